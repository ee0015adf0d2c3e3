"""The recurrence as one kernel: a token at a time, the state in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import block, cast, load_tile, store_tile

BV = 16  # columns of the state a program: narrow, so that a short batch still fills the GPU


@triton.jit(do_not_specialize=["T"])
def recurrent_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV] natural log
    beta_ptr,  # [B, T, HV]
    h0_ptr,  # [B, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [B, HV, K, V] out
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: S[:, v-tile] of one head, through all tokens.  Grid (B * HV * V / BV).

    Reference: linattn_edu.reference.delta.recurrent.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_bh = tl.program_id(0) % NV, (tl.program_id(0) // NV).to(tl.int64)
    i_b, i_h = i_bh // HV, i_bh % HV
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    q_ptr += (i_b * T * H + i_h // (HV // H)) * K + o_k
    k_ptr += (i_b * T * H + i_h // (HV // H)) * K + o_k
    v_ptr += (i_b * T * HV + i_h) * V + o_v
    o_ptr += (i_b * T * HV + i_h) * V + o_v
    g_ptr += i_b * T * HV + i_h
    beta_ptr += i_b * T * HV + i_h
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if h0_ptr is not None:
        b_S += load_tile(h0_ptr + i_bh * K * V, o_k, o_v, V, K, V).to(tl.float32)

    for _ in range(T):
        b_q = tl.load(q_ptr, mask=o_k < K, other=0.0).to(tl.float32)
        b_k = tl.load(k_ptr, mask=o_k < K, other=0.0).to(tl.float32)
        b_v = tl.load(v_ptr, mask=o_v < V, other=0.0).to(tl.float32)
        # eq:delta-decay   S <- a S
        b_S *= tl.exp(tl.load(g_ptr).to(tl.float32))
        # eq:delta-error   e = v - k S
        b_e = b_v - tl.sum(b_k[:, None] * b_S, 0)
        # eq:delta-write   S <- S + k^T beta e
        b_S += b_k[:, None] * (tl.load(beta_ptr).to(tl.float32) * b_e)[None, :]
        # eq:delta-read   o = scale q S
        b_o = scale * tl.sum(b_q[:, None] * b_S, 0)
        tl.store(o_ptr, cast(b_o, o_ptr.dtype.element_ty), mask=o_v < V)
        q_ptr += H * K
        k_ptr += H * K
        v_ptr += HV * V
        o_ptr += HV * V
        g_ptr += HV
        beta_ptr += HV

    store_tile(ht_ptr + i_bh * K * V, b_S, o_k, o_v, V, K, V)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch recurrent_kernel; arguments and result as in the reference."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    o = torch.empty_like(v)
    final_state = q.new_empty(B, HV, K, V, dtype=torch.float32)
    with torch.cuda.device_of(q):
        recurrent_kernel[(B * HV * triton.cdiv(V, BV),)](
            q, k, v, g, beta, initial_state, o, final_state,
            scale, T, H, HV, K, V, BK=block(K), BV=BV, num_warps=4,
        )  # fmt: skip
    return o, final_state
