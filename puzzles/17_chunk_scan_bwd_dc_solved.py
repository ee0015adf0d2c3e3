"""Chapter 17, stage chunk_scan_bwd_dc: the adjoint of chunk_scan by C and B.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 17

The forward pass is y = diag(e) C h + (C B^T * G * step) X with e = 2^gc, a product for each head.
C, B [B, T, G, N], x [B, T, H, P], step, gc [B, T, H] (log2, accumulated in each chunk),
h [B, NT, H, N, P], dy [B, T, H, P], dB_state [B, T, G, N] of stage chunk_state_bwd_db. Out: dC and
dB [B, T, G, N], summed over the heads of a group; dgc [B, T, H], the gradient of gc in e, in
natural units. Head j reads group j // (H // G).
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


def chunk_scan_bwd_dc_torch(C, B, x, step, gc, h, dy, dB_state, *, chunk_size):
    (T, H), G = x.shape[1:3], C.shape[2]
    C, C_head, B, dB, X, dY, step, gc = (
        to_chunks(y, chunk_size)
        for y in (C, repeat_heads(C, H), B, dB_state, x, dy, step, pad_gate(gc, chunk_size))
    )  # [B, H or G, NT, C, ...]
    S = h.transpose(1, 2)  # [B, H, NT, N, P]
    # eq:ssd-dc-inter
    inter = torch.exp2(gc)[..., None] * (dY @ S.mT)  # blank: of each head, [B, H, NT, C, N]
    # eq:ssd-dgc-inter
    dgc = (C_head * inter).sum(-1)  # blank: [B, H, NT, C]
    # eq:ssd-dscores
    dscores = (dY @ X.mT) * decay_matrix(gc) * step[..., None, :]  # blank: of C B^T, for each head
    dscores, inter = (y.unflatten(1, (G, -1)).sum(2) for y in (dscores, inter))  # [B, G, ...]
    # eq:ssd-dc
    dC = inter + dscores @ B  # blank: [B, G, NT, C, N]
    # eq:ssd-db
    dB = dB + dscores.mT @ C  # blank: [B, G, NT, C, N]
    return from_chunks(dC, T), from_chunks(dB, T), from_chunks(dgc, T)


@triton.jit
def chunk_scan_bwd_dc_kernel(C_ptr, B_ptr, x_ptr, step_ptr, gc_ptr, h_ptr, dy_ptr, dB_state_ptr,
                             dC_ptr, dB_ptr, dgc_ptr,
                             T, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                             BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a group, head after head.  Grid (B * NT * G)."""
    i_g, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, G, BT)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_B = (first * G + i_g) * N
    b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dB = load_tile(dB_state_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dC, b_sum = tl.zeros([BT, BN], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
        i = first * H + i_h
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_h = load_tile(h_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
        b_step = load_row(step_ptr + i, o_t, H, n_t)  # [BT]
        # eq:ssd-dc-inter
        b_inter = tl.exp2(b_gc)[:, None] * dot(b_dy, tl.trans(b_h))  # blank: [BT, BN]
        b_dC += b_inter
        # eq:ssd-dgc-inter
        tl.store(dgc_ptr + i + o_t * H, tl.sum(b_C * b_inter, 1), mask=o_t < n_t)
        # eq:ssd-dscores
        b_ds = dot(b_dy, tl.trans(b_x)) * decay_tile(b_gc, o_t) * b_step[None, :]  # blank: [BT, BT]
        b_sum += b_ds
    # eq:ssd-dc
    b_dC += dot(b_sum, b_B)  # blank: [BT, BN]
    # eq:ssd-db
    b_dB += dot(tl.trans(b_sum), b_C)  # blank: [BT, BN]
    store_tile(dC_ptr + i_B, b_dC, o_t, o_n, G * N, n_t, N)
    store_tile(dB_ptr + i_B, b_dB, o_t, o_n, G * N, n_t, N)


def chunk_scan_bwd_dc_triton(C, B, x, step, gc, h, dy, dB_state, *, chunk_size):
    (n, T, G, N), (H, P) = B.shape, x.shape[2:]
    dC, dB, dgc = torch.empty_like(C), torch.empty_like(B), torch.empty_like(gc)
    chunk_scan_bwd_dc_kernel[(n * cdiv(T, chunk_size) * G,)](
        C, B, x, step, gc, h, dy, dB_state, dC, dB, dgc,
        T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P),
    )  # fmt: skip
    return dC, dB, dgc


# hint 1
# C stands in both terms of y: it reads the state, and it meets B in the scores. The heads of a
# group share C and B, so their gradients are sums over the heads. The scores C B^T are shared too:
# sum their gradient over the heads first, and the products with B and C are done once a group.
#
# hint 2
# diag(e) C h gives inter = diag(e) dY h^T to C, and its exponent gets row i of C times row i of
# inter. The scores, times G and step, multiply X, so their gradient is dY X^T * G * step, the step
# along columns. From the scores C B^T: C gets dscores B, and B gets dscores^T C.
#
# hint 3
# PyTorch:
#     inter = torch.exp2(gc)[..., None] * (dY @ ...)
#     dgc = (C_head * ...).sum(-1)
#     dscores = (dY @ ...) * decay_matrix(gc) * ...
#     dC = inter + dscores @ ...
#     dB = dB + dscores.mT @ ...
# Kernel:
#     b_inter = tl.exp2(b_gc)[:, None] * dot(b_dy, ...)
#     b_ds = dot(b_dy, ...) * decay_tile(b_gc, o_t) * ...
#     b_dC += dot(b_sum, ...)
#     b_dB += dot(tl.trans(b_sum), ...)
