"""Stage wy: what each chunk would write, and how that depends on the incoming state."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import (
    cast,
    chunk_args,
    chunk_of,
    decay_matrix,
    device_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    row,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def wy_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    A_ptr,  # [B, T, HV, BT]
    w_ptr,  # [B, T, HV, K] out
    u_ptr,  # [B, T, HV, V] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.wy.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    k_ptr += (first * H + i_h // (HV // H)) * K
    w_ptr += (first * HV + i_h) * K
    v_ptr += (first * HV + i_h) * V
    u_ptr += (first * HV + i_h) * V

    o_t = tl.arange(0, BT)
    b_gc = load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t)
    b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    b_A = load_tile(A_ptr + (first * HV + i_h) * BT, o_t, o_t, HV * BT, n_t, BT)
    b_Ab = b_A.to(tl.float32) * b_beta[None, :]  # A diag(beta)

    # eq:delta-w   w = diag(2^gc) A diag(beta) K
    b_Aw = cast(b_Ab, b_A.dtype)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = dot(b_Aw, b_k) * tl.exp2(b_gc)[:, None]
        store_tile(w_ptr, b_w, o_t, o_k, HV * K, n_t, K)

    # eq:delta-u   u = (A * G) diag(beta) V
    b_Au = cast(b_Ab * decay_matrix(b_gc, o_t), b_A.dtype)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        store_tile(u_ptr, dot(b_Au, b_v), o_t, o_v, HV * V, n_t, V)


# generation -> bytes of an element -> row. Narrower heads keep these tiles: see tiles.UNPIPELINED.
CONFIGS = {
    "turing": {2: row(4, 1, BK=64, BV=64), 4: row(4, 1, BK=32, BV=32)},
    "ampere": {2: row(4, 1, BK=64, BV=64), 4: row(4, 1, BK=32, BV=32)},
    "hopper": {2: row(4, 3, BK=64, BV=64), 4: row(4, 1, BK=64, BV=64)},
}


def wy(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    A: Tensor,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch wy_kernel; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    chunk_size = A.shape[-1]
    w, u = k.new_empty(B, T, HV, K), torch.empty_like(v)
    config = CONFIGS[device_of(k)[0]][k.element_size()].launch()
    NT, *chunks = chunk_args(k, chunk_size, packing)
    wy_kernel[(NT * HV,)](k, v, beta, gc, A, w, u, *chunks, T, H, HV, K, V, BT=chunk_size, **config)
    return w, u
