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
    gc = ...  # blank: log2 decay up to each token
    # eq:delta-decay-matrix
    exponent = ...  # blank: [B, HV, NT, C, C], row i, column j
    future = torch.ones(exponent.shape[-2:], dtype=torch.bool).triu(1)  # j > i
    G = ...  # blank: 0 in the future, no overflow
    return from_chunks(gc, T), from_chunks(G, T)


@triton.jit
def gate_cumsum_kernel(g_ptr, gc_ptr, G_ptr, T, HV: tl.constexpr, BT: tl.constexpr):
    """One program: a chunk of a head.  Grid (B * NT * HV)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, o_t = first * HV + i_h, tl.arange(0, BT)
    b_g = load_row(g_ptr + i, o_t, HV, n_t)  # [BT]
    # eq:delta-gate-cumsum
    b_gc = ...  # blank: [BT]; LOG2E is log2(e)
    tl.store(gc_ptr + i + o_t * HV, b_gc, mask=o_t < n_t)
    # eq:delta-decay-matrix
    causal = ...  # blank: [BT, BT], where token i sees token j
    exponent = ...  # blank: [BT, BT]
    store_tile(G_ptr + i * BT, tl.exp2(exponent), o_t, o_t, HV * BT, n_t, BT)


def gate_cumsum_triton(g, *, chunk_size):
    B, T, HV = g.shape
    gc, G = torch.empty_like(g), g.new_empty(B, T, HV, chunk_size)
    gate_cumsum_kernel[(B * cdiv(T, chunk_size) * HV,)](g, gc, G, T, HV, BT=chunk_size)
    return gc, G
