"""Rows of unit length, and their adjoint."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import INTERPRETED, cdiv, load_row, load_tile, store_tile

ELEMENTS = 4096  # of a program's tile
EPS = 1e-6  # where the caller names none


@triton.jit
def power(b_largest, eps):
    """A power of two for a row whose squares fp32 cannot hold, by its largest magnitude; else 1.

    Rows too small count only beside an eps as small.
    """
    b_s = tl.where((b_largest < 2.0**-50) & (eps < 2.0**-70), 2.0**96, 1.0)
    return tl.where(b_largest > 2.0**50, 2.0**-80, b_s)


@triton.jit
def add_four(a, b, c, d, a_other, b_other, c_other, d_other):
    return a + a_other, b + b_other, c + c_other, d + d_other


@triton.jit
def reciprocal_lengths(b_x, b_y):
    """The rstd of two vectors, with an eps of 1e-6."""
    b_x2, b_y2, b_u, b_w = b_x * b_x, b_y * b_y, 2.0**-70 * b_x, 2.0**-70 * b_y
    b_u, b_w = b_u * b_u, b_w * b_w
    if INTERPRETED:  # where tl.reduce goes from element to element
        b_x2, b_y2, b_u, b_w = tl.sum(b_x2, 0), tl.sum(b_y2, 0), tl.sum(b_u, 0), tl.sum(b_w, 0)
    else:  # in one reduction: its threads meet once
        b_x2, b_y2, b_u, b_w = tl.reduce((b_x2, b_y2, b_u, b_w), 0, add_four)
    return rstd_of(b_x2, b_u), rstd_of(b_y2, b_w)


@triton.jit
def rstd_of(b_sum, b_scaled):
    """From the sum of squares of x, and of 2^-70 x for numbers so large that eps is nothing."""
    huge = b_sum > 2.0**100
    b_rstd = tl.rsqrt(tl.where(huge, b_scaled, b_sum + 1e-6))
    return tl.where(huge, 2.0**-70, 1.0) * b_rstd


@triton.jit
def unit_of(b_x, eps):
    """Rows of a tile in fp32 divided by their lengths; the product of the others divides by it."""
    # eq:delta-l2norm   y = x / sqrt(sum x^2 + eps)
    b_s = power(tl.max(tl.abs(b_x), 1), eps)
    b_x *= b_s[:, None]
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) + eps * b_s * b_s)
    return b_rstd[:, None] * b_x, b_s, b_rstd


@triton.jit
def l2norm_kernel(x_ptr, y_ptr, rstd_ptr, n, eps, D: tl.constexpr, BR: tl.constexpr,
                  BD: tl.constexpr):  # fmt: skip
    """One program: BR rows.  Grid (n / BR).  Reference: linattn_edu.reference.delta.l2norm."""
    first = tl.program_id(0).to(tl.int64) * BR
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    b_x = load_tile(x_ptr + first * D, o_r, o_d, D, n - first, D).to(tl.float32)  # [BR, BD]
    b_y, b_s, b_rstd = unit_of(b_x, eps)
    store_tile(y_ptr + first * D, b_y, o_r, o_d, D, n - first, D)
    tl.store(rstd_ptr + first + o_r, b_s * b_rstd, mask=o_r < n - first)


@triton.jit
def l2norm_bwd_kernel(x_ptr, rstd_ptr, dy_ptr, dx_ptr, n, D: tl.constexpr, BR: tl.constexpr,
                      BD: tl.constexpr):  # fmt: skip
    """One program: BR rows.  Grid (n / BR).  Reference: linattn_edu.reference.delta.l2norm."""
    first = tl.program_id(0).to(tl.int64) * BR
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    b_rstd = load_row(rstd_ptr + first, o_r, 1, n - first)[:, None]
    b_y = b_rstd * load_tile(x_ptr + first * D, o_r, o_d, D, n - first, D).to(tl.float32)
    b_dy = load_tile(dy_ptr + first * D, o_r, o_d, D, n - first, D).to(tl.float32)  # [BR, BD]
    # eq:delta-l2norm-bwd   dx = rstd (dy - y <y, dy>)
    b_dx = b_rstd * (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None])
    store_tile(dx_ptr + first * D, b_dx, o_r, o_d, D, n - first, D)


def _tiles(D: int) -> dict[str, int]:
    BD = triton.next_power_of_2(D)
    return {"D": D, "BD": BD, "BR": max(1, ELEMENTS // BD)}


def l2norm(x: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """Launch l2norm_kernel; arguments and result as in the reference."""
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    n, tiles = rstd.numel(), _tiles(x.shape[-1])
    l2norm_kernel[(cdiv(n, tiles["BR"]),)](x, y, rstd, n, eps, **tiles, num_warps=4)
    return y, rstd


def l2norm_bwd(x: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """Launch l2norm_bwd_kernel; arguments and result as in the reference."""
    dx = torch.empty_like(x)
    n, tiles = rstd.numel(), _tiles(x.shape[-1])
    l2norm_bwd_kernel[(cdiv(n, tiles["BR"]),)](x, rstd, dy, dx, n, **tiles, num_warps=4)
    return dx
