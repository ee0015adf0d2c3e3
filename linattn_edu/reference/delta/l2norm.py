"""Rows of unit length, and their adjoint."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype


def l2norm(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Divide each row by its length.

        rstd = 1 / sqrt(sum x^2 + eps),  y = rstd x

    The squares are added in fp64: those of no fp32 number overflow there. Only rstd, and the
    gradient with it, overflows for rows shorter than 2^-128 where eps is 0.

    Args:
        x: [..., D].
    Returns:
        y [..., D] in x.dtype and rstd [...] in fp32 (fp64 for fp64 input).
    Source: chapter 08b.
    """
    x_ = x.to(compute_dtype(x))
    # eq:delta-l2norm   y = x / sqrt(sum x^2 + eps)
    length = torch.linalg.vector_norm(x_, dim=-1, dtype=torch.float64)
    rstd = torch.rsqrt(length.square() + eps).to(x_.dtype)
    return (rstd[..., None] * x_).to(x.dtype), rstd


def l2norm_bwd(x: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """The adjoint of l2norm.

        dx = rstd (dy - y <y, dy>),  y = rstd x

    Args:
        x, dy: [..., D].  rstd: [...] from l2norm.
    Returns:
        dx [..., D] in x.dtype.
    Source: chapter 08b.
    """
    dtype = compute_dtype(x, dy)
    rstd, dy_ = rstd.to(dtype)[..., None], dy.to(dtype)
    y = rstd * x.to(dtype)
    # eq:delta-l2norm-bwd   dx = rstd (dy - y <y, dy>)
    return (rstd * (dy_ - y * (y * dy_).sum(-1, keepdim=True))).to(x.dtype)
