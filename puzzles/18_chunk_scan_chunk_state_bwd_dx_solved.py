"""Chapter 18, stage chunk_scan_chunk_state_bwd_dx: the adjoint of both uses of x.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 18

With Xs = diag(step) X the outputs of a chunk read (C B^T * G) Xs, and the state gets (diag(r) B)^T
Xs, r_j = 2^(gc_last - gc_j). C, B [B, T, G, N], x [B, T, H, P], step, gc [B, T, H] (log2,
accumulated in each chunk), ds [B, NT, H, N, P], the gradient of what the chunk adds to the state,
dy [B, T, H, P]. Out: dx [B, T, H, P] and dstep [B, T, H], of the step where it multiplies x. Head j
reads group j // (H // G). D is left out.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def chunk_scan_chunk_state_bwd_dx_torch(C, B, x, step, gc, ds, dy, *, chunk_size):
    T, H = x.shape[1:3]
    C, B, X, dY, step, gc = (
        to_chunks(y, chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step, pad_gate(gc, chunk_size))
    )  # [B, H, NT, C, ...]
    dS = ds.transpose(1, 2)  # [B, H, NT, N, P]
    # eq:ssd-dxs
    P = (C @ B.mT) * decay_matrix(gc)  # blank: how much token i reads of token j
    r = torch.exp2(gc[..., -1:] - gc)[..., None]
    dXs = P.mT @ dY + r * (B @ dS)  # blank: the gradient of Xs, [B, H, NT, C, P]
    # eq:ssd-dstep
    dstep = (X * dXs).sum(-1)  # blank: [B, H, NT, C]
    # eq:ssd-dx
    dX = step[..., None] * dXs
    return from_chunks(dX, T), from_chunks(dstep, T)


@triton.jit
def chunk_scan_chunk_state_bwd_dx_kernel(C_ptr, B_ptr, x_ptr, step_ptr, gc_ptr, ds_ptr, dy_ptr,
                                         dx_ptr, dstep_ptr, T, G: tl.constexpr, H: tl.constexpr,
                                         N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
                                         BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    i, i_g = first * H + i_h, first * G + i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_C = load_tile(C_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_ds = load_tile(ds_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
    b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
    b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * H)
    b_step = load_row(step_ptr + i, o_t, H, n_t)  # [BT]
    # eq:ssd-dxs
    b_P = dot(b_C, tl.trans(b_B)) * decay_tile(b_gc, o_t)
    b_dxs = tl.exp2(b_last - b_gc)[:, None] * dot(b_B, b_ds)  # blank: through the state, [BT, BP]
    b_dxs += dot(tl.trans(b_P), b_dy)  # blank: through the outputs, [BT, BP]
    # eq:ssd-dstep
    tl.store(dstep_ptr + i + o_t * H, tl.sum(b_x * b_dxs, 1), mask=o_t < n_t)
    # eq:ssd-dx
    b_dx = b_step[:, None] * b_dxs  # blank: [BT, BP]
    store_tile(dx_ptr + i * P, b_dx, o_t, o_p, H * P, n_t, P)


def chunk_scan_chunk_state_bwd_dx_triton(C, B, x, step, gc, ds, dy, *, chunk_size):
    (n, T, G, N), (H, P) = B.shape, x.shape[2:]
    dx, dstep = torch.empty_like(x), torch.empty_like(step)
    chunk_scan_chunk_state_bwd_dx_kernel[(n * cdiv(T, chunk_size) * H,)](
        C, B, x, step, gc, ds, dy, dx, dstep,
        T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P),
    )  # fmt: skip
    return dx, dstep


# hint 1
# A token's x goes two ways: later tokens of the chunk read it, and it is written into the state
# that leaves. Both times it comes with its step. So find the gradient of Xs = diag(step) X, a sum
# of two terms, and split it into that of x and that of the step at the end.
#
# hint 2
# Outputs P Xs with P = C B^T * G give P^T dY: token j sums over the tokens i >= j. The state
# (diag(r) B)^T Xs gives diag(r) B ds, [C, N] times [N, P]. Then dx_j is step_j times row j, and
# dstep_j the inner product of x_j and row j.
#
# hint 3
# PyTorch:
#     P = (C @ ...) * decay_matrix(...)
#     dXs = P.mT @ ... + r * (...)
#     dstep = (X * ...).sum(-1)
# Kernel:
#     b_dxs = tl.exp2(...)[:, None] * dot(b_B, ...)
#     b_dxs += dot(tl.trans(...), b_dy)
#     b_dx = b_step[:, None] * ...
