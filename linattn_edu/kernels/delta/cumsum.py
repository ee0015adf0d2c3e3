"""The cumulative sum inside each chunk, or of each sequence, forwards or backwards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import BH
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import cdiv, chunk_of, load_tile, sequence_of, store_tile
from linattn_edu.packing import Packing

BLOCK = 256  # tokens of a tile; longer chunks and sequences take several, one after the other


@triton.jit
def running_sum(x_ptr, y_ptr, scale, n_t, blocks, o_d, D: tl.constexpr, BT: tl.constexpr,
                BD: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """Columns o_d of y [n_t, D], the sums of x, a block of BT tokens at a time."""
    o_t = tl.arange(0, BT)
    begin = tl.cast(blocks - 1, tl.int64) * BT * D if REVERSE else 0
    x_ptr, y_ptr = x_ptr + begin, y_ptr + begin
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


@triton.jit(do_not_specialize=["T"])
def cumsum_kernel(
    x_ptr,  # [B, T, D]
    y_ptr,  # [B, T, D] out
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    D: tl.constexpr,
    BC: tl.constexpr,  # tokens of a chunk
    BT: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """One program: one chunk of BD columns.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.cumsum.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BC)
    o_d = i_d * BD + tl.arange(0, BD)
    n_t = tl.minimum(n_t, BC)
    blocks = tl.cdiv(n_t, BT) if BC > BT else 1
    running_sum(x_ptr + first * D, y_ptr + first * D, scale, n_t, blocks, o_d, D, BT, BD,
                REVERSE)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def global_cumsum_kernel(
    x_ptr,  # [B, T, D]
    y_ptr,  # [B, T, D] out
    scale,
    cu_ptr,  # [N + 1] or None
    T,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """One program: BD columns of one sequence, all its tokens.  Grid (N * D / BD).

    Reference: linattn_edu.reference.delta.cumsum.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_n = tl.program_id(0) % ND, (tl.program_id(0) // ND).to(tl.int64)
    first, n_t, _ = sequence_of(i_n, cu_ptr, None, T, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    running_sum(x_ptr + first * D, y_ptr + first * D, scale, n_t, tl.cdiv(n_t, BT), o_d, D, BT,
                BD, REVERSE)  # fmt: skip


def cumsum(
    x: Tensor,
    *,
    chunk_size: int,
    reverse: bool = False,
    scale: float = 1.0,
    packing: Packing | None = None,
) -> Tensor:
    """Launch cumsum_kernel; arguments and result as in the reference."""
    _, T, D = x.shape
    y = torch.empty_like(x, dtype=torch.float32)
    NT, *chunks = chunk_args(x, chunk_size, packing)
    with torch.cuda.device_of(x):
        cumsum_kernel[(NT * cdiv(D, BH),)](
            x, y, scale, *chunks, T, D, BC=chunk_size, BT=min(chunk_size, BLOCK), BD=BH,
            REVERSE=reverse, num_warps=4,
        )  # fmt: skip
    return y


def global_cumsum(
    x: Tensor, *, reverse: bool = False, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Launch global_cumsum_kernel; arguments and result as in the reference.

    cu_seqlens: [N + 1] int64, of sequences packed into a batch of one.
    """
    B, T, D = x.shape
    y = torch.empty_like(x, dtype=torch.float32)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    with torch.cuda.device_of(x):
        global_cumsum_kernel[(N * cdiv(D, BH),)](
            x, y, scale, cu_seqlens, T, D, BT=BLOCK, BD=BH, REVERSE=reverse, num_warps=4
        )
    return y
