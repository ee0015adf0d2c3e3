"""Decoding of Mamba-2 that does not write its state: a checkpoint is read, a ring beside it."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.recurrent import load, load_number, slot_of
from linattn_edu.kernels.delta.replay import limits, load_entries, opened
from linattn_edu.kernels.ssd.selective_state_update import step_of
from linattn_edu.kernels.tiles import block, cast, cdiv, columns_of, mask_if


@triton.jit
def load_token(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, t, T, o_k, o_p, H: tl.constexpr, G: tl.constexpr,
               K: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """x, dt, B, C and z of token t of a head, if it is below T."""
    there = t < T
    m_p, m_k = mask_if(o_p < P, there), mask_if(o_k < K, there)
    b_x = tl.load(x_ptr + t * H * P + o_p, mask=m_p, other=0.0)
    b_dt = tl.load(dt_ptr + t * H, mask=there, other=0.0)
    b_B = tl.load(B_ptr + t * G * K + o_k, mask=m_k, other=0.0)
    b_C = tl.load(C_ptr + t * G * K + o_k, mask=m_k, other=0.0)
    b_z = 0.0 if z_ptr is None else tl.load(z_ptr + t * H * P + o_p, mask=m_p, other=0.0)
    return b_x, b_dt, b_B, b_C, b_z


STRIDES = [f"{x}_stride" for x in ("x", "dt", "B", "C", "z")]


@triton.jit(do_not_specialize=["T", "pool_slots", *STRIDES])
def ssd_replay_kernel(
    x_ptr,  # [N, T, H, P]
    dt_ptr,  # [N, T, H]
    A_ptr,  # [H]
    B_ptr, C_ptr,  # [N, T, G, K]
    D_ptr,  # [H, P_D] or None
    z_ptr,  # [N, T, H, P] or None
    bias_ptr,  # [H] or None
    state_ptr,  # [slots, H, P, K] in and out
    keys_ptr,  # [slots, G, R, K] in and out
    writes_ptr,  # [slots, H, R, P] in and out
    decays_ptr,  # [slots, H, R, 1] in and out
    counts_ptr,  # [slots, H, NP, 3] in and out: a program has its own, and waits for no other
    out_ptr,  # [N, T, H, P] out
    indices_ptr,  # [N] or None
    accepted_ptr,  # [N] or None
    slot_stride, pool_slots,
    x_stride, dt_stride, B_stride, C_stride, z_stride,  # from one sequence to the next
    T,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    P_D: tl.constexpr,  # P, or 1: one number stands for all
    SOFTPLUS: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr,  # entries in use at most, and entries: T more at least
    BR: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    ONE: tl.constexpr,  # there is one token
):  # fmt: skip
    """One program: BP rows of one state, through all tokens.  Grid (N * H * P / BP).

    Reference: linattn_edu.reference.ssd.replay.
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    i_p, i_nh, i_h, first, _, _ = columns_of(tl.program_id(0), None, None, T, H, P, 1, BP)
    i_n, h = i_nh // H, i_h // (H // G)
    o_r, o_g, o_k = tl.arange(0, BR), tl.arange(0, 1), tl.arange(0, BK)
    o_p = i_p * BP + tl.arange(0, BP)
    tokens = 1 if ONE else T
    x_ptr += i_n * x_stride + i_h * P
    dt_ptr += i_n * dt_stride + i_h
    B_ptr += i_n * B_stride + h * K
    C_ptr += i_n * C_stride + h * K
    z_ptr = None if z_ptr is None else z_ptr + i_n * z_stride + i_h * P
    out_ptr += (first * H + i_h) * P
    # what waits for nothing comes first
    b_x, b_dt, b_B, b_C, b_z = load_token(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, 0, tokens, o_k, o_p,
                                          H, G, K, P)  # fmt: skip
    b_A = tl.load(A_ptr + i_h)
    slot = i_n if indices_ptr is None else slot_of(indices_ptr, i_n, 0, pool_slots, 1)
    if slot < 0:  # no sequence: zeros come out
        for t in range(tokens):
            tl.store(out_ptr + t * H * P + o_p, tl.zeros([BP], tl.float32), mask=o_p < P)
    else:
        state_ptr += slot * slot_stride + i_h * P * K
        keys_ptr += (slot * G + h) * R * K
        writes_ptr += (slot * H + i_h) * R * P
        decays_ptr += (slot * H + i_h) * R
        counts_ptr += ((slot * H + i_h) * NP + i_p) * 3
        b_S, begin, count = opened(state_ptr, keys_ptr, writes_ptr, decays_ptr, counts_ptr,
                                   accepted_ptr, i_n, T, o_k, o_p, o_g, K, P, 1, L, R,
                                   True)  # fmt: skip
        b_keys = load_entries(keys_ptr, begin, count, o_r, o_k, K, R)
        b_writes = load_entries(writes_ptr, begin, count, o_r, o_p, P, R).to(tl.float32)
        b_row = tl.load(decays_ptr + (begin + o_r) % R, mask=o_r < count, other=0.0)
        b_a = tl.exp(tl.sum(b_row, 0))  # as decays_since, by a row: no load waits for its threads
        b_w = tl.where(o_r[:, None] < o_r[None, :], b_row[None, :], 0.0)
        b_w = tl.exp(tl.sum(b_w, 1))[:, None]
        for t in range(tokens):
            # eq:ssd-step   step = softplus(dt + dt_bias)
            b_step = step_of(b_dt, load_number(bias_ptr, i_h), bias_ptr, SOFTPLUS)
            # eq:ssd-update   S <- exp(step A) S + step B x
            b_g = b_step * b_A.to(tl.float32)
            b_a *= tl.exp(b_g)
            b_w *= tl.exp(b_g)
            b_input, b_k, b_q = b_x.to(tl.float32), b_B.to(tl.float32), b_C.to(tl.float32)
            b_write = cast(b_step * b_input, writes_ptr.dtype.element_ty)
            new = (begin + count) % R
            tl.store(writes_ptr + new * P + o_p, b_write, mask=o_p < P)
            if i_p == 0:
                tl.store(decays_ptr + new, b_g)
                if i_h % (H // G) == 0:
                    tl.store(keys_ptr + new * K + o_k, b_B, mask=o_k < K)
            # eq:ssd-read   out = C S + D x
            b_scores = b_w * tl.sum(b_keys.to(tl.float32) * b_q[None, :], 1)[:, None]
            b_out = tl.sum(b_scores * b_writes, 0) + tl.sum((b_a * b_q)[:, None] * b_S, 0)
            b_out += tl.sum(b_q * b_k, 0) * b_write.to(tl.float32)
            if D_ptr is not None:
                b_D = load(D_ptr, i_h, o_p, P) if P_D == P else load_number(D_ptr, i_h)
                b_out += b_D.to(tl.float32) * b_input
            # eq:ssd-gate   out = out silu(z)
            if z_ptr is not None:
                b_out *= b_z.to(tl.float32) * tl.sigmoid(b_z.to(tl.float32))
            tl.store(out_ptr + t * H * P + o_p, cast(b_out, out_ptr.dtype.element_ty), mask=o_p < P)
            if not ONE:
                here = (o_r == count)[:, None]
                b_keys = tl.where(here, b_B[None, :], b_keys)
                b_writes = tl.where(here, b_write.to(tl.float32)[None, :], b_writes)
                b_w = tl.where(here, 1.0, b_w)
                count += 1
                b_x, b_dt, b_B, b_C, b_z = load_token(x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, t + 1, T,
                                                      o_k, o_p, H, G, K, P)  # fmt: skip


def replay(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor, keys: Tensor, writes: Tensor, decays: Tensor, counts: Tensor,
    indices: Tensor | None = None, accepted: Tensor | None = None,
    *, length: int, softplus: bool = False,
) -> Tensor:  # fmt: skip
    """Launch ssd_replay_kernel; arguments and result as in the reference.

    What is between the states, and between the rows x[i], dt[i], B[i], C[i], z[i], does not matter.
    """
    (N, T, H, P), (G, R, K), out = x.shape, keys.shape[1:], x.new_empty(x.shape)
    strides = [0 if y is None else y.stride(0) for y in (x, dt, B, C, z)]
    tiles = {"BK": block(K), "BP": block(cdiv(P, counts.shape[2]))}
    ssd_replay_kernel[(N * H * counts.shape[2],)](
        x, dt, A, B, C, D, z, dt_bias, state, keys, writes, decays, counts, out, indices,
        accepted, state.stride(0), state.shape[0], *strides, T, H, G, P, K,
        1 if D is None else D.shape[1], softplus, length, R,
        BR=1 << (length - 1).bit_length(), ONE=T == 1, **tiles,
        **limits(tiles["BK"] * tiles["BP"], 1, T),
    )  # fmt: skip
    return out
