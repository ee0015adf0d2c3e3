"""Stage wy: what each chunk would write, and how that depends on the incoming state."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, device_of, entry, of_generation, row, strength
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    decay_matrix,
    dot,
    gated,
    load_gate,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def wy_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV], or None
    erase_ptr,  # [B, T, HV, K] in the place of beta with K, or None
    write_ptr,  # [B, T, HV, V] in the place of beta with V, or None
    gc_ptr,  # [B, T, HV] log2; or [B, T, HV, K]: a gate for each channel, which A has in it
    A_ptr,  # [B, T, HV, BT]
    q_ptr,  # [B, T, H, K], or None: one gate for all channels
    kg_ptr,  # [B, T, HV, K] out, or None
    qg_ptr,  # [B, T, HV, K] out, or None
    w_ptr,  # [B, T, HV, K] out
    u_ptr,  # [B, T, HV, V] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.wy.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i_k = (first * H + i_h // (HV // H)) * K
    i_w = (first * HV + i_h) * K
    v_ptr += (first * HV + i_h) * V
    u_ptr += (first * HV + i_h) * V
    if erase_ptr is not None:
        erase_ptr += i_w
        write_ptr += (first * HV + i_h) * V

    o_t = tl.arange(0, BT)
    if erase_ptr is None:
        b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    b_A = load_tile(A_ptr + (first * HV + i_h) * BT, o_t, o_t, HV * BT, n_t, BT)
    b_Aw = b_A
    if erase_ptr is None:
        b_Ab = b_A.to(tl.float32) * b_beta[None, :]  # A diag(beta)
        b_Aw = cast(b_Ab, b_A.dtype)
    if q_ptr is None:
        b_gc = load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t)
        b_Au = cast(b_Ab * decay_matrix(b_gc, o_t), b_A.dtype)
    else:
        gc_ptr += i_w
        last = (tl.minimum(BT, n_t) - 1) * HV * K
        b_Au = b_Aw
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        if q_ptr is not None:
            b_g = load_gates(gc_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
            b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
            b_last = load_vector(gc_ptr + last, o_k, K)
            # eq:kda-w   w = A diag(beta) (2^gc * K)
            b_r = gated(b_k.to(tl.float32), erase_ptr, o_t, o_k, HV * K, n_t, K)
            b_w = dot(b_Aw, cast(b_r * tl.exp2(b_g), b_A.dtype))
            # eq:kda-kg   kg = 2^(gc_last - gc) * K
            b_kg = b_k.to(tl.float32) * tl.exp2(b_last[None, :] - b_g)
            store_tile(kg_ptr + i_w, b_kg, o_t, o_k, HV * K, n_t, K)
            # eq:kda-qg   qg = 2^gc * Q
            store_tile(qg_ptr + i_w, b_q * tl.exp2(b_g), o_t, o_k, HV * K, n_t, K)
        else:
            # eq:delta-w   w = diag(2^gc) A diag(beta) K
            b_w = dot(b_Aw, b_k) * tl.exp2(b_gc)[:, None]
        store_tile(w_ptr + i_w, b_w, o_t, o_k, HV * K, n_t, K)

    # eq:kda-u   u = A diag(beta) V
    # eq:delta-u   u = (A * G) diag(beta) V
    for j in range(tl.cdiv(V, BV)):
        o_v = j * BV + tl.arange(0, BV)
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        if write_ptr is not None:
            b_v = cast(gated(b_v.to(tl.float32), write_ptr, o_t, o_v, HV * V, n_t, V), b_A.dtype)
        store_tile(u_ptr, dot(b_Au, b_v), o_t, o_v, HV * V, n_t, V)


# generation -> bytes of an element -> row. Narrower heads keep these tiles: see rows.UNPIPELINED.
CONFIGS = {
    "turing": {2: row(4, 1, BK=64, BV=64), 4: row(4, 1, BK=32, BV=32)},
    "ampere": {2: row(4, 1, BK=64, BV=64), 4: row(4, 1, BK=32, BV=32)},
    "hopper": {2: row(4, 3, BK=64, BV=64), 4: row(4, 1, BK=32, BV=32)},  # fp32: three fit
}
# with a gate for each channel, where it differs: every tile of the gate is read once
CHANNEL_CONFIGS = {"hopper": {2: row(4, 2, BK=128, BV=128)}}


def wy(
    k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, A: Tensor, q: Tensor | None = None,
    write: Tensor | None = None, *, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch wy_kernel; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    chunk_size = A.shape[-1]
    w, u = A.new_empty(B, T, HV, K), torch.empty_like(v, dtype=A.dtype)
    kg, qg = (None, None) if q is None else (torch.empty_like(w), torch.empty_like(w))
    config = entry(CONFIGS, A).launch()
    channels = of_generation(CHANNEL_CONFIGS, device_of(k)[0])
    if q is not None and A.element_size() in channels:
        config = channels[A.element_size()].launch(max(64, K), max(64, V))
    NT, *chunks = chunk_args(k, chunk_size, packing)
    wy_kernel[(NT * HV,)](
        k, v, *strength(beta), write, gc, A, q, kg, qg, w, u, *chunks, T, H, HV, K, V,
        BT=chunk_size, **config,
    )  # fmt: skip
    return (w, u) if q is None else (w, u, kg, qg)
