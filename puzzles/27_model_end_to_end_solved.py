"""Chapter 27, a layer around its operator: convolution and unit keys, then norm and gate, and back.

Fill in every `...`, in the PyTorch stage first, then in the kernels, and check with

    python -m linattn_edu puzzle 27

q, k [B, T, H, K], v, z [B, T, HV, V], g (log decay) and beta [B, T, HV]: what a Gated DeltaNet
layer has projected. Queries, keys and values go through a short convolution, p_t sigmoid(p_t) with
p_t = sum over j of w_j u_(t-W+1+j), taps wq, wk [H, K, W] and wv [HV, V, W], zeros before the first
token; queries and keys get length 1. The operator makes o of them. Each row of o is divided by its
root mean square and multiplied by weight [V]; the gate z sigmoid(z) comes behind. dy [B, T, HV, V]
is the gradient of the result y. Out: q, k, v as the operator gets them, y, and the gradients do and
dz, like o. eps is added to the sum of squares of a key, and to the mean of those of o.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, load_row, load_tile, load_vector, store_tile
from linattn_edu.reference.delta.recurrent import recurrent


def model_end_to_end_torch(q, k, v, z, g, beta, wq, wk, wv, weight, dy, *, eps):
    mixed = []
    for x, w, unit in ((q, wq, True), (k, wk, True), (v, wv, False)):
        T, W = x.shape[1], w.shape[-1]
        u = F.pad(x, (0, 0, 0, 0, W - 1, 0))  # W - 1 zeros before the first token
        p = torch.zeros_like(x)
        for j in range(W):
            # eq:conv-pre
            p = p + w[..., j] * u[:, j : j + T]  # blank: tap j of every token
        # eq:conv-act
        x = p * torch.sigmoid(p)
        if unit:
            # eq:delta-l2norm
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)  # blank: rows of length 1
        mixed.append(x)
    q, k, v = mixed
    o, _ = recurrent(q, k, v, g, beta)
    # eq:norm-gated
    rstd = torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)  # blank: [B, T, HV, 1]
    n = rstd * o
    # eq:norm-gate-last
    y = n * weight * z * torch.sigmoid(z)  # blank: [B, T, HV, V]
    # eq:norm-gate-last-bwd
    dz = dy * n * weight * torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))
    # eq:norm-gated-bwd
    dn = dy * z * torch.sigmoid(z) * weight
    do = rstd * (dn - n * (n * dn).mean(-1, keepdim=True))  # blank: [B, T, HV, V]
    return q, k, v, y, do, dz


@triton.jit
def mixed_kernel(x_ptr, w_ptr, y_ptr, eps, T, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
                 UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One program: BT tokens of a head.  Grid (B * ceil(T / BT) * H)."""
    i_h, i_t = tl.program_id(0) % H, tl.program_id(0) // H % tl.cdiv(T, BT)
    i = tl.program_id(0) // H // tl.cdiv(T, BT) * T * H + i_h  # the sequence's first row
    o_t, o_d = i_t * BT + tl.arange(0, BT), tl.arange(0, BD)
    b_p = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(W):
        # eq:conv-pre
        t = o_t - W + 1 + j  # blank: the tokens that tap j reads, [BT]; some come before the first
        b_u = load_tile(x_ptr + i * D, tl.where(t >= 0, t, T), o_d, H * D, T, D)  # [BT, BD]
        b_p += load_row(w_ptr + i_h * D * W + j, o_d, W, D)[None, :] * b_u
    # eq:conv-act
    b_y = b_p * tl.sigmoid(b_p)
    if UNIT:
        # eq:delta-l2norm
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, 1) + eps)[:, None]  # blank: rows of length 1
    store_tile(y_ptr + i * D, b_y, o_t, o_d, H * D, T, D)


@triton.jit
def norm_kernel(o_ptr, z_ptr, weight_ptr, dy_ptr, y_ptr, do_ptr, dz_ptr, eps, rows,
                D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One program: BR rows, there and back.  Grid (ceil(rows / BR))."""
    o_r, o_d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    b_o = load_tile(o_ptr, o_r, o_d, D, rows, D)  # [BR, BD], zero past column D
    b_z = load_tile(z_ptr, o_r, o_d, D, rows, D)
    b_dy = load_tile(dy_ptr, o_r, o_d, D, rows, D)
    b_w = load_vector(weight_ptr, o_d, D)[None, :]  # [1, BD]
    b_s = tl.sigmoid(b_z)
    # eq:norm-gated
    b_rstd = tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)[:, None]  # blank: [BR, 1]
    b_n = b_rstd * b_o
    # eq:norm-gate-last
    b_y = b_n * b_w * b_z * b_s  # blank: [BR, BD]
    # eq:norm-gate-last-bwd
    b_dz = b_dy * b_n * b_w * b_s * (1 + b_z * tl.sigmoid(-b_z))
    # eq:norm-gated-bwd
    b_dn = b_dy * b_z * b_s * b_w
    b_do = b_rstd * (b_dn - b_n * (tl.sum(b_n * b_dn, 1) / D)[:, None])  # blank: [BR, BD]
    store_tile(y_ptr, b_y, o_r, o_d, D, rows, D)
    store_tile(do_ptr, b_do, o_r, o_d, D, rows, D)
    store_tile(dz_ptr, b_dz, o_r, o_d, D, rows, D)


def model_end_to_end_triton(q, k, v, z, g, beta, wq, wk, wv, weight, dy, *, eps, BT=32, BR=16):
    mixed = []
    for x, w, unit in ((q, wq, True), (k, wk, True), (v, wv, False)):
        (B, T, H, D), W = x.shape, w.shape[-1]
        mixed.append(torch.empty_like(x))
        mixed_kernel[(B * cdiv(T, BT) * H,)](
            x, w, mixed[-1], eps, T, H, D, W, UNIT=unit, BT=BT, BD=block(D)
        )
    q, k, v = mixed
    o, _ = recurrent(q, k, v, g, beta)  # in earnest chunk_gated_delta_rule, with the same o
    y, do, dz = (torch.empty_like(o) for _ in range(3))
    rows, D = o.numel() // o.shape[-1], o.shape[-1]
    norm_kernel[(cdiv(rows, BR),)](o, z, weight, dy, y, do, dz, eps, rows, D, BR=BR, BD=block(D))
    return q, k, v, y, do, dz


# hint 1
# A layer is the operator between two things that know nothing of it. In front, every token is mixed
# with the few before it, channel by channel, and queries and keys are scaled to length 1, since the
# write assumes that. Behind, a row is scaled to a fixed size, because the answer grows with what
# was written, and the gate says which channels go on. Back through the norm, one thing is to be
# seen: no change along the row itself reaches the result.
#
# hint 2
# With W - 1 rows of zeros in front, tap j of token t stands at row j + t. A row of length 1 is x /
# sqrt(sum of squares + eps); one of root mean square 1 is n = o / sqrt(mean of squares + eps), and
# the mean is over the D columns that are there, not over those of the tile. y = n weight z
# sigmoid(z). With dn, what the gate and the weight leave of dy: do = rstd (dn - n mean(n dn)), each
# mean over a row.
#
# hint 3
# PyTorch:
#     p = p + w[..., j] * u[:, ...]
#     x = x * torch.rsqrt(... + eps)
#     rstd = torch.rsqrt(....mean(-1, keepdim=True) + eps)
#     y = n * ... * z * ...
#     do = rstd * (dn - n * ...)
# Kernel:
#     t = o_t - ... + j
#     b_y *= tl.rsqrt(tl.sum(..., 1) + eps)[:, None]
#     b_rstd = tl.rsqrt(tl.sum(..., 1) / ... + eps)[:, None]
#     b_y = b_n * ...
#     b_do = b_rstd * (b_dn - b_n * (...)[:, None])
