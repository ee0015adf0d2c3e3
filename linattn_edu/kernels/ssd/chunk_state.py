"""Stage chunk_state: what each chunk adds to the state."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row, states
from linattn_edu.kernels.ssd.chunk_cumsum import decays
from linattn_edu.kernels.tiles import cast, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_state_kernel(
    B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    seq_ptr,  # [B, T] or None
    s_ptr,  # [B, NT, H, N, P] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one head's state, summed over one chunk.  Grid (NT * H, N/BN * P/BP).

    Reference: linattn_edu.reference.ssd.chunk_state.
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    o_t = tl.arange(0, BT)
    o_n = tl.program_id(1) // NP * BN + tl.arange(0, BN)
    o_p = tl.program_id(1) % NP * BP + tl.arange(0, BP)
    i = first * H + i_h
    _, _, b_r, _, _ = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    b_r *= load_row(step_ptr + i, o_t, H, n_t)
    i_B = (first * G + i_h // (H // G)) * N
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    # eq:ssd-chunk-state   s = (diag(r * step) B)^T X
    b_x = cast(b_x.to(tl.float32) * b_r[:, None], b_B.dtype)
    b_s = dot(tl.trans(b_B), b_x)
    store_tile(s_ptr + (i_c * H + i_h) * N * P, b_s, o_n, o_p, P, N, P)


# generation -> bytes of an element -> row. A state of 64 x 64 and a chunk of both operands fit
# everywhere; narrower heads keep these tiles, for the reason given in kernels/delta/wy.py. They
# are those of chunk_scan_bwd_dstates too, the same product of other factors.
CONFIGS = {
    "turing": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=64)},
    "hopper": {2: row(4, 1, BN=128, BP=64), 4: row(4, 1, BN=64, BP=64)},
}


def chunk_state(
    B: Tensor, x: Tensor, step: Tensor, gc: Tensor, seq_idx: Tensor | None = None, *,
    chunk_size: int, packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch chunk_state_kernel; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    s = gc.new_empty(*states(x, chunk_size, packing), H, N, P)
    config = entry(CONFIGS, x).launch()
    NT, *chunks = chunk_args(x, chunk_size, packing)
    chunk_state_kernel[(NT * H, cdiv(N, config["BN"]) * cdiv(P, config["BP"]))](
        B, x, step, gc, seq_idx, s, *chunks, T, G, H, N, P, BT=chunk_size, **config
    )
    return s
