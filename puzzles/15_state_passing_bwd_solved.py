"""Chapter 15, stage state_passing_bwd: carry the gradient of the state back from chunk to chunk.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 15

The forward pass is h_(c+1) = a_c h_c + s_c with a_c = 2^gc_last. dh_out [B, NT, H, N, P], what the
outputs of chunk c give to h_c; gc [B, T, H] (log2, accumulated in each chunk); h like dh_out; dht
[B, H, N, P], the gradient of the final state. Out: ds like dh_out, the gradient of s_c; dlast
[B, NT, H], the gradient of the log of a_c in natural units; dh0 like dht, of the initial state.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, load_tile, store_tile
from linattn_edu.reference.tiles import pad_gate, to_chunks


def state_passing_bwd_torch(dh_out, gc, h, dht, *, chunk_size):
    a = torch.exp2(to_chunks(pad_gate(gc, chunk_size), chunk_size)[..., -1])  # [B, H, NT]
    dS, ds, dlast = dht, [], []
    for c in reversed(range(dh_out.shape[1])):
        a_c = a[:, :, c, None, None]
        # eq:ssd-ds
        ds.append(dS)
        # eq:ssd-dlast
        x = (a_c * h[:, c] * dS).sum((-1, -2))  # blank: [B, H]
        dlast.append(x)
        # eq:ssd-dh
        dS = dh_out[:, c] + a_c * dS  # blank: the gradient of the state that enters the chunk
    return torch.stack(ds[::-1], 1), torch.stack(dlast[::-1], 1), dS


@triton.jit
def state_passing_bwd_kernel(dh_out_ptr, gc_ptr, h_ptr, dht_ptr, ds_ptr, dlast_ptr, dh0_ptr,
                             T, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                             BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program: dS of one head, from the last chunk to the first.  Grid (B * H)."""
    i_b, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    o_n, o_p = tl.arange(0, BN), tl.arange(0, BP)
    i_state = (i_b * H + i_h) * N * P
    b_dS = load_tile(dht_ptr + i_state, o_n, o_p, P, N, P)  # [BN, BP]
    NT = tl.cdiv(T, BT)
    for step in range(NT):
        i_t = NT - 1 - step
        i = (i_b * NT + i_t) * H + i_h
        end = tl.minimum((i_t + 1) * BT, T) - 1  # blank: the last token of chunk i_t
        b_a = tl.exp2(tl.load(gc_ptr + (i_b * T + end) * H + i_h))
        b_h = load_tile(h_ptr + i * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        b_dh = load_tile(dh_out_ptr + i * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        # eq:ssd-ds
        store_tile(ds_ptr + i * N * P, b_dS, o_n, o_p, P, N, P)
        # eq:ssd-dlast
        b_dlast = b_a * tl.sum(b_h * b_dS)  # blank: a number
        tl.store(dlast_ptr + i, b_dlast)
        # eq:ssd-dh
        b_dS = b_dh + b_a * b_dS  # blank: [BN, BP]
    store_tile(dh0_ptr + i_state, b_dS, o_n, o_p, P, N, P)


def state_passing_bwd_triton(dh_out, gc, h, dht, *, chunk_size):
    B, NT, H, N, P = h.shape
    ds, dlast, dh0 = torch.empty_like(dh_out), gc.new_empty(B, NT, H), torch.empty_like(dht)
    state_passing_bwd_kernel[(B * H,)](
        dh_out, gc, h, dht, ds, dlast, dh0, gc.shape[1], H, N, P,
        BT=chunk_size, BN=block(N), BP=block(P),
    )  # fmt: skip
    return ds, dlast, dh0


# hint 1
# The loop runs from the last chunk to the first and carries dS, the gradient of the state that
# leaves chunk c. The chunk's own sum s_c is added to that state, so it has the same gradient. The
# state that enters was used twice: decayed into the one that leaves, and read by the outputs of the
# chunk.
#
# hint 2
# From h' = a h + s: ds = dS, and h gets a dS beside dh_out_c. The number a multiplies every entry
# of h, so its gradient is the sum of h * dS over the whole matrix; by the log of a that is a times
# as much. A short last chunk ends at the sequence's last token, T - 1.
#
# hint 3
# PyTorch:
#     x = (a_c * h[:, c] * ...).sum((-1, -2))
#     dS = dh_out[:, c] + ...
# Kernel:
#     end = tl.minimum(..., T) - 1
#     b_dlast = b_a * tl.sum(...)
#     b_dS = b_dh + ...
