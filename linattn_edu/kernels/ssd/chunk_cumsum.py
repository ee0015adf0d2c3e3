"""Stage chunk_cumsum: the step sizes of Mamba-2, and the decay accumulated inside each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import softplus
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import (
    LOG2E,
    cdiv,
    channels_of,
    decay_matrix,
    decay_matrix_transposed,
    documents,
    load_gate,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing

BH = 8  # heads a program: a chunk of 16 takes all registers
LEAST = tl.constexpr(2.0**-100)  # a step that is written in an exponent, as the reference's


@triton.jit
def step_tile(b_dt, bias_ptr, o_h, low, high, H: tl.constexpr, SOFTPLUS: tl.constexpr):
    """(step, dt + dt_bias, the step before the clamp) of a tile of dt, whose columns are o_h."""
    if bias_ptr is not None:
        b_dt += load_vector(bias_ptr, o_h, H)[None, :]
    # eq:ssd-step   step = clamp(softplus(dt + dt_bias))
    b_free = softplus(b_dt) if SOFTPLUS else b_dt
    b_step = tl.where(b_free < low, low, b_free)  # not tl.clamp, which would drop a NaN
    return tl.where(b_step > high, high, b_step), b_dt, b_free


@triton.jit
def cumsum_tile(
    dt_ptr, A_ptr, bias_ptr, low, high, cu_ptr, chunks_ptr, T, H: tl.constexpr,
    SOFTPLUS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """step and gc [BT, BH] of one chunk of BH heads, and all of `channels_of` but its number."""
    _, first, n_t, o_t, o_h = channels_of(cu_ptr, chunks_ptr, T, H, BT, BH)
    b_dt = load_tile(dt_ptr + first * H, o_t, o_h, H, n_t, H).to(tl.float32)  # [BT, BH]
    b_step, _, _ = step_tile(b_dt, bias_ptr, o_h, low, high, H, SOFTPLUS)
    # eq:ssd-cumsum   gc = log2(e) cumsum(step A)
    b_g = b_step * load_vector(A_ptr, o_h, H)[None, :] * LOG2E
    b_g = tl.where(b_g < -150.0, -150.0, b_g)  # 2^-150 is zero, as in gate_cumsum
    return b_step, tl.cumsum(b_g, axis=0), first, n_t, o_t, o_h


@triton.jit(do_not_specialize=["T"])
def chunk_cumsum_kernel(
    dt_ptr,  # [B, T, H]
    A_ptr,  # [H]
    bias_ptr,  # [H] or None
    step_ptr,  # [B, T, H] out
    gc_ptr,  # [B, T, H] out: log2, cumulative within a chunk
    low, high,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, SOFTPLUS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of BH heads.  Grid (NT * H / BH).

    Reference: linattn_edu.reference.ssd.chunk_cumsum.
    """
    b_step, b_gc, first, n_t, o_t, o_h = cumsum_tile(
        dt_ptr, A_ptr, bias_ptr, low, high, cu_ptr, chunks_ptr, T, H, SOFTPLUS, BT, BH
    )
    store_tile(step_ptr + first * H, b_step, o_t, o_h, H, n_t, H)
    store_tile(gc_ptr + first * H, b_gc, o_t, o_h, H, n_t, H)


@triton.jit(do_not_specialize=["T", "tokens"])
def chunk_cumsum_log_kernel(
    dt_ptr,  # [B, T, H]
    A_ptr,  # [H]
    bias_ptr,  # [H] or None
    gates_ptr,  # [2, H, B, T] out: gs, and gc cumulative within a chunk, log2
    low, high,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    H: tl.constexpr, SOFTPLUS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of BH heads.  Grid (NT * H / BH).

    Reference: linattn_edu.reference.ssd.chunk_cumsum.
    """
    b_step, b_gc, first, n_t, o_t, o_h = cumsum_tile(
        dt_ptr, A_ptr, bias_ptr, low, high, cu_ptr, chunks_ptr, T, H, SOFTPLUS, BT, BH
    )
    # eq:ssd-gs   gs = gc - log2(step)
    b_none = b_step < LEAST
    b_gs = tl.where(b_none, float("inf"), b_gc - tl.log2(tl.where(b_none, 1.0, b_step)))
    o = first + o_t[:, None] + o_h[None, :].to(tl.int64) * tokens
    mask = (o_t < n_t)[:, None] & (o_h < H)[None, :]
    # as one store: of two, Triton 3.6 makes one's layout by summing a second time
    o_2 = tl.arange(0, 2).to(tl.int64) * H * tokens
    tl.store(gates_ptr + o[:, :, None] + o_2[None, None, :], tl.join(b_gs, b_gc), mask[:, :, None])


@triton.jit
def decays(gc_ptr, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H: tl.constexpr):
    """What a chunk's kernel knows of its decay: gc, e, r, a, and the documents of its tokens.

    gc_ptr: at the chunk's first token and the head.  seq_ptr: [B, T] or None.
    e and r [BT] and a are as in the reference, zero between documents.
    """
    n = tl.minimum(o_t.shape[0], n_t)
    b_gc = load_gate(gc_ptr, o_t, H, n_t)
    b_last = tl.load(gc_ptr + (n - 1) * H)
    # eq:ssd-decays   e = 2^gc, G = 2^(gc_i - gc_j), r = 2^(gc_last - gc), a = 2^gc_last
    b_e, b_r, b_a = tl.exp2(b_gc), tl.exp2(b_last - b_gc), tl.exp2(b_last)
    b_id = o_t
    if seq_ptr is not None:
        i_t = first % T if chunks_ptr is None else tl.load(chunks_ptr + 2 * i_c + 1)
        b_id, before, end = documents(seq_ptr + first, i_t, o_t, n_t)
        b_e = tl.where(b_id == before, b_e, 0.0)
        b_r = tl.where(b_id == end, b_r, 0.0)
        b_a = tl.where(end == before, b_a, 0.0)
    return b_gc, b_e, b_r, b_a, b_id


@triton.jit
def decay_within(b_gc, b_id, o_t, seq_ptr):
    """G [BT, BT], zero between documents; b_gc and b_id of `decays`."""
    G = decay_matrix(b_gc, o_t)
    if seq_ptr is not None:
        G = tl.where(b_id[:, None] == b_id[None, :], G, 0.0)
    return G


@triton.jit
def decay_within_transposed(b_gc, b_id, o_t, seq_ptr):
    """The transpose of `decay_within`, computed as such."""
    GT = decay_matrix_transposed(b_gc, o_t)
    if seq_ptr is not None:
        GT = tl.where(b_id[:, None] == b_id[None, :], GT, 0.0)
    return GT


def chunk_cumsum(
    dt: Tensor, A: Tensor, dt_bias: Tensor | None = None, *, softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")), chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch chunk_cumsum_kernel; arguments and result as in the reference."""
    _, T, H = dt.shape
    step, gc = (torch.empty_like(dt, dtype=torch.float32) for _ in range(2))
    NT, *chunks = chunk_args(dt, chunk_size, packing)
    chunk_cumsum_kernel[(NT * cdiv(H, BH),)](
        dt, A, dt_bias, step, gc, *limit, *chunks, T, H, softplus, BT=chunk_size, BH=BH,
        num_warps=4,
    )  # fmt: skip
    return step, gc


def chunk_cumsum_log(
    dt: Tensor, A: Tensor, dt_bias: Tensor | None = None, *, softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")), chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch chunk_cumsum_log_kernel; arguments and result as in the reference.

    In memory the tokens of a head are side by side: a program of the fused stages reads one head.
    """
    B, T, H = dt.shape
    gates = dt.new_empty(2, H, B, T, dtype=torch.float32)
    NT, *chunks = chunk_args(dt, chunk_size, packing)
    chunk_cumsum_log_kernel[(NT * cdiv(H, BH),)](
        dt, A, dt_bias, gates, *limit, *chunks, T, B * T, H, softplus, BT=chunk_size, BH=BH,
        num_warps=4,
    )  # fmt: skip
    return tuple(gates.permute(0, 2, 3, 1))
