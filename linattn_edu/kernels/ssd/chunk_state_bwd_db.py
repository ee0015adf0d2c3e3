"""Stage chunk_state_bwd_db: the adjoint of chunk_state by B, and by its decay."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row, states
from linattn_edu.kernels.ssd.chunk_cumsum import decays
from linattn_edu.kernels.tiles import cast, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "tokens"])
def chunk_state_bwd_db_kernel(
    B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    ds_ptr,  # [B, NT, H, N, P]
    seq_ptr,  # [B, T] or None
    dB_ptr,  # [B, T, G, N] out: the part of the states
    dgc_ptr,  # [N / BN, B, T, H] out: natural units
    dlast_ptr,  # [N / BN, B, NT, H] out: natural units
    cu_ptr, chunks_ptr,  # of chunk_of
    tokens, chunks, T,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: BN columns of B in one chunk, head after head of a group.  Grid (NT * G, N/BN).

    tokens, chunks: of all sequences.  Reference: linattn_edu.reference.ssd.chunk_state_bwd_db.
    """
    i_g, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G, BT)
    i_n = tl.program_id(1)
    o_t = tl.arange(0, BT)
    o_n = i_n * BN + tl.arange(0, BN)
    i_B = (first * G + i_g) * N
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    dgc_ptr += i_n.to(tl.int64) * tokens * H
    dlast_ptr += i_n.to(tl.int64) * chunks * H
    b_sum = tl.zeros([BT, BN], dtype=tl.float32)
    for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
        i = first * H + i_h
        i_S = (i_c * H + i_h) * N * P
        _, _, b_r, _, _ = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
        b_r *= load_row(step_ptr + i, o_t, H, n_t)
        b_dB = tl.zeros([BT, BN], dtype=tl.float32)
        for j in range(tl.cdiv(P, BP)):
            o_p = j * BP + tl.arange(0, BP)
            b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
            b_ds = load_tile(ds_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
            b_dB = dot(b_x, tl.trans(cast(b_ds, b_x.dtype)), b_dB)
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_dB *= b_r[:, None]
        b_sum += b_dB
        # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_head_j
        b_m = tl.sum(b_B.to(tl.float32) * b_dB, 1)
        tl.store(dgc_ptr + i + o_t * H, -b_m, mask=o_t < n_t)
        tl.store(dlast_ptr + i_c * H + i_h, tl.sum(b_m))
    store_tile(dB_ptr + i_B, b_sum, o_t, o_n, G * N, n_t, N)


# generation -> bytes of an element -> row. BN = 128 spares N = 128 a second reading of x, and ds in
# fp32 takes the registers of 8 warps then; narrower heads keep these tiles, for the reason given in
# kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: row(4, 1, BN=32, BP=32), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(4, 2, BN=64, BP=64), 4: row(4, 1, BN=32, BP=32)},
    "hopper": {2: row(8, 3, BN=128, BP=64), 4: row(4, 2, BN=64, BP=64)},  # fp32: two fit
}


def chunk_state_bwd_db(
    B: Tensor, x: Tensor, step: Tensor, gc: Tensor, ds: Tensor, seq_idx: Tensor | None = None, *,
    chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch chunk_state_bwd_db_kernel; arguments and result as in the reference."""
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    config = entry(CONFIGS, x).launch()
    NN = cdiv(N, config["BN"])
    dB, dgc = gc.new_empty(B.shape), gc.new_empty(NN, batch, T, H)
    dlast = gc.new_empty(NN, *states(x, chunk_size, packing), H)
    NT, *chunks = chunk_args(x, chunk_size, packing)
    chunk_state_bwd_db_kernel[(NT * G, NN)](
        B, x, step, gc, ds, seq_idx, dB, dgc, dlast, *chunks, batch * T, NT, T, G, H, N, P,
        BT=chunk_size, **config,
    )  # fmt: skip
    return dB, sum_tiles(dgc), sum_tiles(dlast)


def sum_tiles(x: Tensor) -> Tensor:
    """The sum over x's first axis, one entry for each tile of N; nothing is launched for one."""
    return x[0] if len(x) == 1 else x.sum(0)
