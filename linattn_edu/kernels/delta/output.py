"""Stage output: read the state and the chunk's own writes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import both, chunk_args, entry, row
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_of,
    decay_matrix,
    dot,
    load_gate,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_new_ptr,  # [B, T, HV, V]
    h_ptr,  # [B, NT, HV, K, V]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT], and q is qg of HV heads; or None: from q, k and gc
    o_ptr,  # [B, T, HV, V] out
    scale,
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head, BV of its columns.  Grid (NT * HV, V / BV).

    Reference: linattn_edu.reference.delta.output.
    """
    i_v = tl.program_id(1)
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i_k = (first * H + i_h // (HV // H)) * K
    h_ptr += (i_c * HV + i_h) * K * V

    o_t = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_h = load_tile(h_ptr, o_k, o_v, V, K, V)  # [BK, BV]
        b_o = dot(b_q, b_h, b_o)
        if P_ptr is None:
            b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_P = dot(b_q, tl.trans(b_k), b_P)

    if P_ptr is not None:
        # eq:kda-output   o = scale (qg h + P v_new)
        b_P = load_tile(P_ptr + (first * HV + i_h) * BT, o_t, o_t, HV * BT, n_t, BT)
    else:
        # eq:delta-inter   diag(2^gc) Q h
        b_gc = load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t)
        b_o *= tl.exp2(b_gc)[:, None]
        # eq:delta-intra   P = Q K^T * G
        b_P *= decay_matrix(b_gc, o_t)
    # eq:delta-output   o = scale (inter + P v_new)
    b_v = load_tile(v_new_ptr + (first * HV + i_h) * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_o = dot(cast(b_P, b_v.dtype), b_v, b_o) * scale
    store_tile(o_ptr + (first * HV + i_h) * V, b_o, o_t, o_v, HV * V, n_t, V)


# generation -> bytes of an element -> BV -> row: 8 warps share a wide tile, 4 a narrow one. Heads
# narrower than a tile keep it, for the reason given in wy. fp32 on Hopper: loads run ahead.
CONFIGS = {
    "turing": {2: both(row(4, 1, BK=64, BV=64)), 4: both(row(4, 1, BK=32, BV=32))},
    "ampere": {2: both(row(4, 2, BK=64, BV=64)), 4: both(row(4, 1, BK=32, BV=32))},
    "hopper": {
        2: {64: row(4, 1, BK=64, BV=64), 128: row(8, 3, BK=64, BV=128)},
        4: both(row(4, 3, BK=32, BV=64)),
    },
}


def output(
    q: Tensor, k: Tensor | None, v_new: Tensor, h: Tensor, gc: Tensor | None,
    P: Tensor | None = None, *, scale: float, chunk_size: int, packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch output_kernel; arguments and result as in the reference."""
    _, T, H, K = q.shape
    HV, V = v_new.shape[2:]
    o = torch.empty_like(v_new)
    config = entry(CONFIGS, q)[64 if V <= 64 else 128].launch()
    NT, *chunks = chunk_args(q, chunk_size, packing)
    output_kernel[(NT * HV, cdiv(V, config["BV"]))](
        q, k, v_new, h, gc, P, o, scale, *chunks, T, H, HV, K, V, BT=chunk_size, **config
    )
    return o
