"""Chapter 23, the short convolution of a sequence in pieces, each with the tokens before it.

Fill in every `...`, in the PyTorch stage first, then in the kernels, and check with

    python -m linattn_edu puzzle 23

p_t = b + sum over j of w_j u_(t-W+1+j), y_t = p_t sigmoid(p_t): a token's sum over itself and the
W - 1 tokens before. Piece p has the tokens from cuts[p] to before cuts[p + 1]; one, or fewer than
W, may be all. Its state is the last W tokens before it, oldest first, and what it makes of that
state is shift_n(S) + S_ext, where n is its number of tokens. x [B, T, D], weight [D, W], bias [D],
initial_state [B, D, W], the W tokens before the first. Out, with NP pieces: S_ext and S_in
[B, NP, D, W], what each piece alone leaves and the state that enters it; y [B, T, D]; S_out
[B, D, W], the last W tokens of all.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, load_row, load_tile, load_vector, store_tile


def cp_conv_torch(x, weight, bias, initial_state, *, cuts):
    W, S = weight.shape[1], initial_state
    S_ext, S_in, y = [], [], []
    for begin, end in pairwise(cuts):
        own, n = x[:, begin:end], min(end - begin, W)  # [B, tokens of the piece, D]
        S_in.append(S)
        # eq:conv-pre
        u, p = torch.cat([S.mT, own], 1), bias  # u: the W tokens before, and its own
        for j in range(W):
            p = p + weight[:, j] * u[:, 1 + j : 1 + j + end - begin]  # blank: tap j of every token
        # eq:conv-act
        y.append(p * torch.sigmoid(p))
        # eq:cp-halo
        last = F.pad(own[:, -n:], (0, 0, W - n, 0)).mT  # blank: its last tokens, behind zeros
        S_ext.append(last)  # [B, D, W]
        S = F.pad(S[..., n:], (0, n)) + last  # blank: the state that enters the next piece
    return torch.stack(S_ext, 1), torch.stack(S_in, 1), torch.cat(y, 1), S


@triton.jit
def merge_kernel(x_ptr, S_0_ptr, cuts_ptr, S_ext_ptr, S_in_ptr, S_out_ptr,
                 NP, T, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One program: the states of BD channels, from piece to piece.  Grid (B * ND)."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_b, o_d = tl.program_id(0) // ND, tl.program_id(0) % ND * BD + tl.arange(0, BD)
    o_w, m_d = tl.arange(0, W), (o_d < D)[:, None]
    b_S = load_tile(S_0_ptr + i_b * D * W, o_d, o_w, W, D, W)  # [BD, W]
    for i_p in range(NP):
        begin, end = tl.load(cuts_ptr + i_p), tl.load(cuts_ptr + i_p + 1)
        S_p_ptr = S_in_ptr + (i_b * NP + i_p) * D * W
        store_tile(S_p_ptr, b_S, o_d, o_w, W, D, W)
        tl.debug_barrier()  # what is stored is read below, by other threads
        # eq:cp-halo
        token = end - W + o_w  # blank: which token stands at each place of S_ext, [W]
        m_x = m_d & ((token >= begin) & (token < end))[None, :]
        x_p_ptr = x_ptr + (i_b * T + token)[None, :] * D + o_d[:, None]
        b_ext = tl.load(x_p_ptr, mask=m_x, other=0.0)  # [BD, W]
        store_tile(S_ext_ptr + (i_b * NP + i_p) * D * W, b_ext, o_d, o_w, W, D, W)
        place = o_w + (end - begin)  # blank: from which place of S_in a token moves here, [W]
        m_S = m_d & ((place >= 0) & (place < W))[None, :]
        b_S = tl.load(S_p_ptr + o_d[:, None] * W + place[None, :], mask=m_S, other=0.0) + b_ext
    store_tile(S_out_ptr + i_b * D * W, b_S, o_d, o_w, W, D, W)


@triton.jit
def conv_kernel(x_ptr, w_ptr, b_ptr, S_in_ptr, cuts_ptr, y_ptr,
                NP, T, D: tl.constexpr, W: tl.constexpr,
                BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One program: BD channels of a piece, with the state that enters it.  Grid (B * NP * ND)."""
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p, i_b = tl.program_id(0) // ND % NP, tl.program_id(0) // ND // NP
    o_t, o_d = tl.arange(0, BT), tl.program_id(0) % ND * BD + tl.arange(0, BD)
    begin, m_d = tl.load(cuts_ptr + i_p), (o_d < D)[None, :]
    n_t = tl.load(cuts_ptr + i_p + 1) - begin
    i_x = (i_b * T + begin) * D
    S_p_ptr = S_in_ptr + (i_b * NP + i_p) * D * W
    b_p = tl.zeros([BT, BD], tl.float32) + load_vector(b_ptr, o_d, D)[None, :]
    for j in tl.static_range(W):
        # eq:conv-pre
        t = o_t - W + 1 + j  # blank: which token tap j reads, counted from the piece's first, [BT]
        place = W + t  # blank: where it stands in the state, if it comes before the piece
        b_u = load_tile(x_ptr + i_x, tl.where(t >= 0, t, n_t), o_d, D, n_t, D)  # [BT, BD]
        m_S = m_d & ((t < 0) & (place >= 0) & (place < W))[:, None]
        b_u += tl.load(S_p_ptr + o_d[None, :] * W + place[:, None], mask=m_S, other=0.0)
        b_p += load_row(w_ptr + j, o_d, W, D)[None, :] * b_u
    # eq:conv-act
    b_y = b_p * tl.sigmoid(b_p)  # blank: [BT, BD]
    store_tile(y_ptr + i_x, b_y, o_t, o_d, D, n_t, D)


def cp_conv_triton(x, weight, bias, initial_state, *, cuts, BD=32):
    (B, T, D), W, NP = x.shape, weight.shape[1], len(cuts) - 1
    BT = block(max(end - begin for begin, end in pairwise(cuts)))
    cuts = torch.tensor(cuts, dtype=torch.int32, device=x.device)
    S_ext, S_in = x.new_empty(B, NP, D, W), x.new_empty(B, NP, D, W)
    y, S_out = torch.empty_like(x), torch.empty_like(initial_state)
    merge_kernel[(B * cdiv(D, BD),)](x, initial_state, cuts, S_ext, S_in, S_out, NP, T, D, W, BD=BD)
    conv_kernel[(B * NP * cdiv(D, BD),)](x, weight, bias, S_in, cuts, y, NP, T, D, W, BT=BT, BD=BD)
    return S_ext, S_in, y, S_out


# hint 1
# The state of a short convolution is a window of W tokens. A token moves it by one place and enters
# at its end; n tokens move it by n places. So a piece does two things to the window that enters: it
# moves it, and it puts its own last tokens at the end. What a piece with fewer than W tokens does
# not fill stays from before it, not from the piece before alone: its state already holds what came
# earlier. Inside a piece the tokens of the state are tokens like its own, with negative numbers.
#
# hint 2
# Of u, the state and then the piece, token t of the piece is row W + t, so tap j of token t reads
# row 1 + j + t. S_ext has the last n tokens at its end, n at most W, and W - n zeros before them.
# shift_n(S) has S_(i+n) at place i and 0 where there is none; no place is filled twice, so the sum
# is exact. In the kernel the last place, W - 1, is token end - 1, and token -1 of a piece stands at
# place W - 1 of its state.
#
# hint 3
# PyTorch:
#     p = p + weight[:, j] * u[:, 1 + j : ...]
#     last = F.pad(own[:, ...], (0, 0, ..., 0)).mT
#     S = F.pad(S[..., n:], (0, ...)) + ...
# Kernel:
#     token = end - ... + o_w
#     place = o_w + ...
#     t = o_t - ... + j
#     place = W + ...
#     b_y = b_p * ...
