"""The short convolution of new tokens, the state written in place: one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.recurrent import slot_of
from linattn_edu.kernels.rows import row
from linattn_edu.kernels.tiles import cast, cdiv, load_row, load_vector, mask_if


@triton.jit
def column_of(t, length, S: tl.constexpr):
    """Where a state keeps token t >= -S; in order, with a length of 0, the newest comes last."""
    return ((length + t) % S + S) % S


@triton.jit(do_not_specialize=["x_stride", "slot_stride", "slots", "T"])
def causal_conv1d_update_kernel(
    state_ptr,  # [B, D, S], with indices [slots, D, S]; in and out
    x_ptr,  # [B, T, D]
    w_ptr,  # [D, W]
    b_ptr,  # [D] or None
    y_ptr,  # [B, T, D] out
    lengths_ptr,  # [B] or None
    indices_ptr,  # [B] or None
    x_stride,  # from one sequence to the next
    slot_stride,  # from one state to the next
    slots,  # how many states there are
    T,
    D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    D_STRIDE: tl.constexpr, S_STRIDE: tl.constexpr,  # of a state
    BD: tl.constexpr, BS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a sequence.  Grid (B * D / BD).

    Reference: linattn_edu.reference.delta.causal_conv1d_update.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_n = (tl.program_id(0) // ND).to(tl.int64)
    o_d, o_s = tl.program_id(0) % ND * BD + tl.arange(0, BD), tl.arange(0, BS)
    slot = i_n if indices_ptr is None else slot_of(indices_ptr, i_n, 0, slots, 1)
    m_d = mask_if(o_d < D, slot >= 0)
    state_ptr += slot * slot_stride + o_d * D_STRIDE
    x_ptr += i_n * x_stride + o_d
    y_ptr += i_n * T * D + o_d
    # column k of a state in order holds token k - S
    length = 0 if lengths_ptr is None else (tl.load(lengths_ptr + i_n) % S).to(tl.int32)
    for t in range(T):
        b_p = tl.zeros([BD], tl.float32)
        for j in tl.static_range(W):
            s = t - (W - 1) + j
            # eq:conv-update-read   u_t = s_((length + t) mod S) for t < 0
            o_k = column_of(tl.minimum(s, -1), length, S)
            b_s = tl.load(state_ptr + o_k * S_STRIDE, mask=mask_if(m_d, s < 0), other=0.0)
            b_x = tl.load(x_ptr + s * D, mask=mask_if(m_d, s >= 0), other=0.0)
            b_u = tl.where(s < 0, b_s.to(tl.float32), b_x.to(tl.float32))
            # eq:conv-pre   p_t = b + sum_j w_j u_(t-W+1+j)
            b_p += load_row(w_ptr + j, o_d, W, D) * b_u
        if b_ptr is not None:
            b_p += load_vector(b_ptr, o_d, D)
        if SILU:
            # eq:conv-act   y = p sigmoid(p)
            b_p *= tl.sigmoid(b_p)
        b_p = tl.where(slot >= 0, b_p, 0.0)  # no sequence: zeros come out
        tl.store(y_ptr + t * D, cast(b_p, y_ptr.dtype.element_ty), mask=o_d < D)
    # eq:conv-update-write   s_((length + t) mod S) <- x_t
    o_x = o_s + (T - S)  # the token that a column is to hold
    if lengths_ptr is not None:
        o_x = (o_s - length + S) % S
        o_x = tl.where(o_x < T, o_x + (T - 1 - o_x) // S * S, -1)
    m_x = m_d[:, None] & (o_s < S)[None, :]
    b_new = tl.load(x_ptr[:, None] + (o_x * D)[None, :], mask=m_x & (o_x >= 0)[None, :], other=0.0)
    b_new = cast(b_new, state_ptr.dtype.element_ty)
    if lengths_ptr is None:
        m_old = m_x & (o_x < 0)[None, :]
        b_old = tl.load(state_ptr[:, None] + ((o_s + T) * S_STRIDE)[None, :], mask=m_old, other=0.0)
        b_new = tl.where(m_old, b_old, b_new)
    else:
        m_x &= (o_x >= 0)[None, :]
    tl.debug_barrier()  # other threads have read what is overwritten
    tl.store(state_ptr[:, None] + (o_s * S_STRIDE)[None, :], b_new, mask=m_x)


# Bound by the latency of a few loads: small programs, many of them. A thread holds a channel.
CONFIG = row(4, 1, BD=128)
COLUMNS = 32  # of a state of which a program holds so many channels; of longer ones fewer


def causal_conv1d_update(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    lengths: Tensor | None = None, indices: Tensor | None = None, *, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Launch causal_conv1d_update_kernel; arguments and result as in the reference.

    What is between the states and between the rows x[i] of the sequences does not matter; a state
    may be the transpose of a contiguous [S, D].
    """
    (B, T, D), S = x.shape, state.shape[2]
    y, config, BS = x.new_empty(x.shape), CONFIG.launch(), 1 << (S - 1).bit_length()
    BD = max(1, min(config["BD"], config["BD"] * COLUMNS // BS))
    strides = [0 if t.shape[0] == 1 else t.stride(0) for t in (x, state)]
    inner = (S, 1) if state[:1].is_contiguous() else (1, D)
    causal_conv1d_update_kernel[(B * cdiv(D, BD),)](
        state, x, weight, bias, y, lengths, indices, *strides, state.shape[0], T, D, S,
        weight.shape[1], *inner, SILU=activation == "silu", **config | {"BD": BD, "BS": BS},
    )  # fmt: skip
    return y
