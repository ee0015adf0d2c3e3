"""Chapter 02, stage gate_cumsum: the decay accumulated in each chunk, and the decay matrix.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 02

g [B, T, HV], the natural log of the decay of one token, <= 0. Out: gc [B, T, HV] in log2, which
starts anew in each chunk of C tokens; G [B, T, HV, C], whose rows are those of each chunk's decay
matrix: the decay from token j of the chunk to token i, 0 for j > i. One token of the check has
g = -100: the state is forgotten there, and e^100 does not fit float32.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_of, load_row, store_tile
from linattn_edu.reference.tiles import from_chunks, to_chunks


def gate_cumsum_torch(g, *, chunk_size):
    T = g.shape[1]
    g = to_chunks(g, chunk_size)  # [B, HV, NT, C]; missing tokens are 0
    # eq:delta-gate-cumsum
    gc = torch.cumsum(g, -1) / torch.log(g.new_tensor(2.0))  # blank: log2 decay up to each token
    # eq:delta-decay-matrix
    exponent = gc[..., :, None] - gc[..., None, :]  # blank: [B, HV, NT, C, C], row i, column j
    future = torch.ones(exponent.shape[-2:], dtype=torch.bool).triu(1)  # j > i
    G = torch.exp2(exponent.masked_fill(future, -torch.inf))  # blank: 0 in the future, no overflow
    return from_chunks(gc, T), from_chunks(G, T)


@triton.jit
def gate_cumsum_kernel(g_ptr, gc_ptr, G_ptr, T, HV: tl.constexpr, BT: tl.constexpr):
    """One program: a chunk of a head.  Grid (B * NT * HV)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, o_t = first * HV + i_h, tl.arange(0, BT)
    b_g = load_row(g_ptr + i, o_t, HV, n_t)  # [BT]
    # eq:delta-gate-cumsum
    b_gc = tl.cumsum(b_g * LOG2E, axis=0)  # blank: [BT]; LOG2E is log2(e)
    tl.store(gc_ptr + i + o_t * HV, b_gc, mask=o_t < n_t)
    # eq:delta-decay-matrix
    causal = o_t[:, None] >= o_t[None, :]  # blank: [BT, BT], where token i sees token j
    exponent = tl.where(causal, b_gc[:, None] - b_gc[None, :], float("-inf"))  # blank: [BT, BT]
    store_tile(G_ptr + i * BT, tl.exp2(exponent), o_t, o_t, HV * BT, n_t, BT)


def gate_cumsum_triton(g, *, chunk_size):
    B, T, HV = g.shape
    gc, G = torch.empty_like(g), g.new_empty(B, T, HV, chunk_size)
    gate_cumsum_kernel[(B * cdiv(T, chunk_size) * HV,)](g, gc, G, T, HV, BT=chunk_size)
    return gc, G


# hint 1
# The decay from token j to token i is a product of numbers between 0 and 1. Its log is a sum, and
# every such sum is the difference of two sums from the start of the chunk. So one running sum a
# chunk holds all C (C + 1) / 2 decays. The exponent is negative where token i comes after j and
# positive where it comes before: those pairs are not wanted, and their powers overflow. Make the
# exponent harmless first, then take the power.
#
# hint 2
# gc is the running sum of g along the tokens of a chunk, times log2(e), or divided by the log of 2.
# The exponent of entry (i, j) is gc_i less gc_j. Where j > i the exponent is set to minus infinity,
# whose power is exactly 0; a product of the power and a mask would be infinity times 0. In the
# kernel a row index is `o_t[:, None]`, a column index `o_t[None, :]`.
#
# hint 3
# PyTorch:
#     gc = torch.cumsum(g, -1) / ...
#     exponent = gc[..., :, None] - ...
#     G = torch.exp2(exponent.masked_fill(future, ...))
# Kernel:
#     b_gc = tl.cumsum(b_g * ..., axis=0)
#     causal = o_t[:, None] >= ...
#     exponent = tl.where(causal, b_gc[:, None] - ..., float("-inf"))
