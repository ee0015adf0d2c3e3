"""Tokens of Mamba-2, one or several, as one kernel: a state is read once, and written for each."""

import math

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import softplus as softplus_of
from linattn_edu.kernels.delta.recurrent import slot_of
from linattn_edu.kernels.routes import by_load
from linattn_edu.kernels.rows import device_of, of_generation
from linattn_edu.kernels.tiles import cast, cdiv, load_tile, mask_if


@triton.jit
def load_part(x_ptr, i, o_p, o_n, P: tl.constexpr, N: tl.constexpr):
    """x[o_p, o_n] of the [P, N] that begins at number i, in the tensor's dtype; 0 without a tensor.

    Where P or N is 1, one number stands for all: a row [1, BN], a column [BP, 1], a scalar.
    """
    if x_ptr is None:
        return 0.0
    elif P == 1 and N == 1:
        return tl.load(x_ptr + i)
    elif P == 1:
        return tl.load(x_ptr + i + o_n, mask=o_n < N, other=0.0)[None, :]
    elif N == 1:
        return tl.load(x_ptr + i + o_p, mask=o_p < P, other=0.0)[:, None]
    else:
        return load_tile(x_ptr + i, o_p, o_n, N, P, N)


@triton.jit
def step_of(b_dt, b_bias, bias_ptr, SOFTPLUS: tl.constexpr):
    """The step of a token."""
    b_step = b_dt.to(tl.float32)
    if bias_ptr is not None:
        b_step += b_bias.to(tl.float32)
    return softplus_of(b_step) if SOFTPLUS else b_step


@triton.jit
def write(b_S, b_x, b_dt, b_bias, b_A, b_B, bias_ptr, SOFTPLUS: tl.constexpr):
    """The state after a token, float32."""
    # eq:ssd-step   step = softplus(dt + dt_bias)
    b_step = step_of(b_dt, b_bias, bias_ptr, SOFTPLUS)
    # eq:ssd-update   S <- exp(step A) S + step B x
    b_S = tl.exp(b_step * b_A.to(tl.float32)) * b_S.to(tl.float32)
    return b_S + (b_step * b_x) * b_B.to(tl.float32)


@triton.jit
def read(b_S, b_x, b_C, b_D, b_z, D_ptr, z_ptr):
    """out of a token and of the state after it."""
    # eq:ssd-read   out = C S + D x
    b_out = tl.sum(b_S * b_C.to(tl.float32), 1, keep_dims=True)
    if D_ptr is not None:
        b_out += b_D.to(tl.float32) * b_x
    # eq:ssd-gate   out = out silu(z)
    if z_ptr is not None:
        b_out *= b_z.to(tl.float32) * tl.sigmoid(b_z.to(tl.float32))
    return b_out


STRIDES = [f"{x}_stride" for x in ("slot", "x", "dt", "B", "C", "z")]


@triton.jit(do_not_specialize=["slots", *STRIDES])
def selective_state_update_kernel(
    state_ptr,  # [B, H, P, N], with indices [slots, H, P, N]; in and out
    x_ptr,  # [B, H, P]
    dt_ptr,  # [B, H, P_DT]
    A_ptr,  # [H, P_A, N_A]
    B_ptr, C_ptr,  # [B, G, N]
    D_ptr,  # [H, P_D] or None
    z_ptr,  # [B, H, P] or None
    bias_ptr,  # [H, P_BIAS] or None
    out_ptr,  # [B, H, P] out
    indices_ptr,  # [B] or None
    slot_stride,  # from one state to the next
    slots,  # how many states there are
    x_stride, dt_stride, B_stride, C_stride, z_stride,  # from one sequence to the next
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    P_DT: tl.constexpr, P_A: tl.constexpr, N_A: tl.constexpr, P_D: tl.constexpr,
    P_BIAS: tl.constexpr,  # P, N, or 1: one number stands for all
    SOFTPLUS: tl.constexpr,
    ALIGNED: tl.constexpr,  # divides the strides of states, B and C
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BP rows of one state, whole.  Grid (B * H * P / BP).

    Reference: linattn_edu.reference.ssd.selective_state_update.
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    i_nh = tl.program_id(0) // NP
    i_n, i_h = (i_nh // H).to(tl.int64), i_nh % H
    o_p, o_n = tl.program_id(0) % NP * BP + tl.arange(0, BP), tl.arange(0, BN)
    slot = i_n if indices_ptr is None else slot_of(indices_ptr, i_n, 0, slots, 1)
    m_p = o_p[:, None] < P
    m_S = mask_if(m_p & (o_n[None, :] < N), slot >= 0)
    state_ptr += tl.multiple_of(slot * slot_stride, ALIGNED) + i_h * P * N
    state_ptr += o_p[:, None] * N + o_n[None, :]

    # a change of dtype waits for its load: all are issued before the first, the state's in front
    b_S = tl.load(state_ptr, mask=m_S, other=0.0)
    i_group = i_h // (H // G) * N
    b_B = load_part(B_ptr, tl.multiple_of(i_n * B_stride, ALIGNED) + i_group, o_p, o_n, 1, N)
    b_C = load_part(C_ptr, tl.multiple_of(i_n * C_stride, ALIGNED) + i_group, o_p, o_n, 1, N)
    b_x = load_part(x_ptr, i_n * x_stride + i_h * P, o_p, o_n, P, 1)
    b_z = load_part(z_ptr, i_n * z_stride + i_h * P, o_p, o_n, P, 1)
    b_dt = load_part(dt_ptr, i_n * dt_stride + i_h * P_DT, o_p, o_n, P_DT, 1)
    b_A = load_part(A_ptr, i_h * P_A * N_A, o_p, o_n, P_A, N_A)
    b_bias = load_part(bias_ptr, i_h * P_BIAS, o_p, o_n, P_BIAS, 1)
    b_D = load_part(D_ptr, i_h * P_D, o_p, o_n, P_D, 1)

    b_x = b_x.to(tl.float32)
    b_S = write(b_S, b_x, b_dt, b_bias, b_A, b_B, bias_ptr, SOFTPLUS)
    tl.store(state_ptr, cast(b_S, state_ptr.dtype.element_ty), mask=m_S)
    b_out = read(b_S, b_x, b_C, b_D, b_z, D_ptr, z_ptr)
    b_out = tl.where(slot >= 0, b_out, 0.0)  # no sequence: zeros come out
    out_ptr += i_nh.to(tl.int64) * P + o_p[:, None]
    tl.store(out_ptr, cast(b_out, out_ptr.dtype.element_ty), mask=m_p)


@triton.jit(do_not_specialize=["slots", *STRIDES])
def selective_state_update_drafts_kernel(
    state_ptr,  # [slots, H, P, N] in and out
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr,  # as above, B: tokens
    out_ptr,  # [tokens, H, P] out
    indices_ptr,  # [sequences, SLOTS]
    accepted_ptr,  # [sequences] or None
    cu_ptr,  # [sequences + 1]
    slot_stride, slots,
    x_stride, dt_stride, B_stride, C_stride, z_stride,  # from one token to the next
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    P_DT: tl.constexpr, P_A: tl.constexpr, N_A: tl.constexpr, P_D: tl.constexpr,
    P_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BP rows of one state, through all tokens.  Grid (sequences * H * P / BP).

    A state is rounded to its dtype after each token, as if each had a call of its own.

    Reference: linattn_edu.reference.ssd.selective_state_update.
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    i_nh = tl.program_id(0) // NP
    i_n, i_h = (i_nh // H).to(tl.int64), i_nh % H
    o_p, o_n = tl.program_id(0) % NP * BP + tl.arange(0, BP), tl.arange(0, BN)
    first, last = tl.load(cu_ptr + i_n).to(tl.int64), tl.load(cu_ptr + i_n + 1).to(tl.int64)
    before = 0 if accepted_ptr is None else tl.load(accepted_ptr + i_n) - 1
    start = slot_of(indices_ptr, i_n, before, slots, SLOTS)
    m_p = o_p[:, None] < P
    m_S = mask_if(m_p & (o_n[None, :] < N), start >= 0)
    state_ptr += i_h * P * N + o_p[:, None] * N + o_n[None, :]
    b_S = tl.load(state_ptr + tl.multiple_of(start * slot_stride, ALIGNED), mask=m_S, other=0.0)
    b_A = load_part(A_ptr, i_h * P_A * N_A, o_p, o_n, P_A, N_A)
    b_bias = load_part(bias_ptr, i_h * P_BIAS, o_p, o_n, P_BIAS, 1)
    b_D = load_part(D_ptr, i_h * P_D, o_p, o_n, P_D, 1)
    i_group = i_h // (H // G) * N
    for t in range(first, last):
        b_B = load_part(B_ptr, tl.multiple_of(t * B_stride, ALIGNED) + i_group, o_p, o_n, 1, N)
        b_C = load_part(C_ptr, tl.multiple_of(t * C_stride, ALIGNED) + i_group, o_p, o_n, 1, N)
        b_x = load_part(x_ptr, t * x_stride + i_h * P, o_p, o_n, P, 1).to(tl.float32)
        b_z = load_part(z_ptr, t * z_stride + i_h * P, o_p, o_n, P, 1)
        b_dt = load_part(dt_ptr, t * dt_stride + i_h * P_DT, o_p, o_n, P_DT, 1)
        b_new = write(b_S, b_x, b_dt, b_bias, b_A, b_B, bias_ptr, SOFTPLUS)
        b_out = tl.where(start >= 0, read(b_new, b_x, b_C, b_D, b_z, D_ptr, z_ptr), 0.0)
        tl.store(out_ptr + (t * H + i_h) * P + o_p[:, None],
                 cast(b_out, out_ptr.dtype.element_ty), mask=m_p)  # fmt: skip
        b_S = cast(b_new, state_ptr.dtype.element_ty)
        if (t - first < SLOTS - 1) | (t == last - 1):  # past the last column, the last state alone
            slot = slot_of(indices_ptr, i_n, tl.minimum(t - first, SLOTS - 1), slots, SLOTS)
            tl.store(state_ptr + tl.multiple_of(slot * slot_stride, ALIGNED), b_S,
                     mask=mask_if(m_S, slot >= 0))  # fmt: skip


WORD = 8  # numbers of 16 bit in a load

# Bytes of a state that a program holds and its warps, by generation, with programs enough for every
# multiprocessor and without. Bandwidth times latency says how many must be on their way at a time:
# 6 KiB a multiprocessor of a T4, 15 of an A100, 33 of an H200, 54 of a B200. Registers allow 8
# programs of 8 KiB, two or four vectors of 16 bytes a thread: enough, and B and C are read for many
# rows at once. The narrow tile has one vector a thread: a row's numbers then lie on the same
# threads, and a batch of one gives the bits that it gives among others.
TILES = {
    "turing": ((8 << 10, 4), (2 << 10, 4)),
    "ampere": ((8 << 10, 4), (2 << 10, 4)),
    "hopper": ((8 << 10, 8), (2 << 10, 4)),
}


def _tile(state: Tensor, sequences: int) -> tuple[int, int, int]:
    """BP, BN and warps of the first tile with four programs a multiprocessor, or of the last."""
    H, P, N = state.shape[1:]
    generation, processors = device_of(state)
    BN, whole = 1 << (N - 1).bit_length(), 1 << (P - 1).bit_length()
    row = state.element_size() * BN
    tiles = [(min(whole, max(1, n // row)), BN, w) for n, w in of_generation(TILES, generation)]
    programs = tuple(sequences * H * cdiv(P, BP) for BP, *_ in tiles)
    return tiles[by_load.widest(programs, processors, 40).takes]


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, indices: Tensor | None = None,
    accepted: Tensor | None = None, cu_seqlens: Tensor | None = None, *, softplus: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the kernel of one token, or with cu_seqlens of several; arguments and result as in the
    reference.

    What is between the states, and between the rows x[i], dt[i], B[i], C[i], z[i], does not matter.
    """
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    kernel, where, columns = selective_state_update_kernel, (), {}
    sequences, out = len(x), x.new_empty(x.shape)
    if cu_seqlens is not None:
        kernel, where = selective_state_update_drafts_kernel, (accepted, cu_seqlens)
        (sequences, columns["SLOTS"]), out = indices.shape, out.zero_()  # behind the last one too
    BP, BN, warps = _tile(state, sequences)
    apart = (state, x, dt, B, C, z)
    strides = [0 if y is None or y.shape[0] == 1 else y.stride(0) for y in apart]
    aligned = math.gcd(WORD, strides[0], *strides[3:5])
    kernel[(sequences * H * cdiv(P, BP),)](
        state, x, dt, A, B, C, D, z, dt_bias, out, indices, *where, strides[0], state.shape[0],
        *strides[1:], H, G, P, N, dt.shape[2], *A.shape[1:],
        *(1 if y is None else y.shape[1] for y in (D, dt_bias)),
        SOFTPLUS=softplus, ALIGNED=aligned, BP=BP, BN=BN, num_warps=warps, **columns,
    )  # fmt: skip
    return out
