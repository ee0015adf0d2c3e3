"""The cumulative sum inside each chunk, forwards or backwards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import BH
from linattn_edu.kernels.tiles import cdiv, chunk_args, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def cumsum_kernel(
    x_ptr,  # [B, T, D]
    y_ptr,  # [B, T, D] out
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """One program: one chunk of BD columns.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.cumsum.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    b_x = load_tile(x_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    # eq:delta-dg   dg = reverse cumsum(dgc)
    b_y = scale * tl.cumsum(b_x, axis=0, reverse=REVERSE)
    store_tile(y_ptr + first * D, b_y, o_t, o_d, D, n_t, D)


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
            x, y, scale, *chunks, T, D, BT=chunk_size, BD=BH, REVERSE=reverse, num_warps=4
        )
    return y
