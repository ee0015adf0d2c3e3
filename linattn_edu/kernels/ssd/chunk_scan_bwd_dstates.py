"""Stage chunk_scan_bwd_dstates: the gradient of the states that the outputs read."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, states
from linattn_edu.kernels.ssd.chunk_cumsum import decays
from linattn_edu.kernels.ssd.chunk_state import CONFIGS
from linattn_edu.kernels.tiles import cast, cdiv, chunk_of, dot, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_scan_bwd_dstates_kernel(
    C_ptr,  # [B, T, G, N]
    gc_ptr,  # [B, T, H] log2
    dy_ptr,  # [B, T, H, P]
    seq_ptr,  # [B, T] or None
    dh_ptr,  # [B, NT, H, N, P] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one head's gradient of the state, summed over the tokens of a chunk.
    Grid (NT * H, N/BN * P/BP).

    Reference: linattn_edu.reference.ssd.chunk_scan_bwd_dstates.
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    o_t = tl.arange(0, BT)
    o_n = tl.program_id(1) // NP * BN + tl.arange(0, BN)
    o_p = tl.program_id(1) % NP * BP + tl.arange(0, BP)
    i = first * H + i_h
    _, b_e, _, _, _ = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    i_C = (first * G + i_h // (H // G)) * N
    b_C = load_tile(C_ptr + i_C, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    # eq:ssd-dstates   dh_out = (diag(e) C)^T dY
    b_dy = cast(b_dy.to(tl.float32) * b_e[:, None], b_C.dtype)
    b_dh = dot(tl.trans(b_C), b_dy)
    store_tile(dh_ptr + (i_c * H + i_h) * N * P, b_dh, o_n, o_p, P, N, P)


def chunk_scan_bwd_dstates(
    C: Tensor, gc: Tensor, dy: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch chunk_scan_bwd_dstates_kernel; arguments and result as in the reference."""
    _, T, H, P = dy.shape
    G, N = C.shape[2:]
    dh_out = gc.new_empty(*states(dy, chunk_size, packing), H, N, P)
    config = entry(CONFIGS, dy).launch()
    NT, *chunks = chunk_args(dy, chunk_size, packing)
    chunk_scan_bwd_dstates_kernel[(NT * H, cdiv(N, config["BN"]) * cdiv(P, config["BP"]))](
        C, gc, dy, seq_idx, dh_out, *chunks, T, G, H, N, P, BT=chunk_size, **config
    )
    return dh_out
