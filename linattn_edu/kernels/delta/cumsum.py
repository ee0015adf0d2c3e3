"""The cumulative sum inside each chunk, or of each sequence, forwards or backwards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import BH
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import cdiv, chunk_of, columns_of, load_tile, store_tile
from linattn_edu.packing import Packing

BLOCK = 256  # tokens of a tile; longer chunks and sequences take several, one after the other


@triton.jit(do_not_specialize=["T"])
def cumsum_kernel(
    x_ptr,  # [B, T, D]
    y_ptr,  # [B, T, D] out
    scale,
    cu_ptr, chunks_ptr, T,  # of columns_of
    D: tl.constexpr,
    BC: tl.constexpr,  # tokens of a chunk; None: a sequence is one
    BT: tl.constexpr, BD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of BD columns, a block of BT tokens at a time.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.cumsum.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    if BC is None:
        i_d, _, _, first, n_t, _ = columns_of(tl.program_id(0), cu_ptr, None, T, 1, D, BT, BD)
        blocks = tl.cdiv(n_t, BT)
    else:
        i_d, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BC)
        n_t = tl.minimum(n_t, BC)
        blocks = tl.cdiv(n_t, BT) if BC > BT else 1
    o_t, o_d = tl.arange(0, BT), i_d * BD + tl.arange(0, BD)
    begin = tl.cast(blocks - 1, tl.int64) * BT * D if REVERSE else 0
    x_ptr, y_ptr = x_ptr + first * D + begin, y_ptr + first * D + begin
    b_sum = tl.zeros([1, BD], dtype=tl.float32)  # of the blocks behind
    for i in range(blocks):
        n = n_t - (blocks - 1 - i if REVERSE else i) * BT
        b_x = load_tile(x_ptr, o_t, o_d, D, n, D).to(tl.float32)  # [BT, BD]
        # eq:delta-dg   dg = reverse cumsum(dgc)
        b_y = b_sum + tl.cumsum(b_x, axis=0, reverse=REVERSE)
        store_tile(y_ptr, scale * b_y, o_t, o_d, D, n, D)
        b_sum += tl.sum(b_x, 0)[None, :]
        x_ptr += -BT * D if REVERSE else BT * D
        y_ptr += -BT * D if REVERSE else BT * D


def _launch(
    x: Tensor, chunks: int, bounds: tuple, scale: float, reverse: bool, BC: int | None, BT: int
) -> Tensor:
    """Launch cumsum_kernel on so many chunks."""
    T, D = x.shape[1:]
    y = torch.empty_like(x, dtype=torch.float32)
    cumsum_kernel[(chunks * cdiv(D, BH),)](
        x, y, scale, *bounds, T, D, BC, BT, BH, reverse, num_warps=4
    )
    return y


def cumsum(
    x: Tensor, *, chunk_size: int, reverse: bool = False, scale: float = 1.0,
    packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch cumsum_kernel; arguments and result as in the reference."""
    NT, *chunks = chunk_args(x, chunk_size, packing)
    return _launch(x, NT, chunks, scale, reverse, chunk_size, min(chunk_size, BLOCK))


def global_cumsum(
    x: Tensor, *, reverse: bool = False, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Launch cumsum_kernel on whole sequences; arguments and result as in the reference.

    cu_seqlens: [N + 1] int64, of sequences packed into a batch of one.
    """
    N = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    return _launch(x, N, (cu_seqlens, None), scale, reverse, None, BLOCK)
