"""Rows of root mean square one, times a weight and a gate, and their adjoint."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype


def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """Divide each row by its root mean square, before it meets the gate or after.

        v = x, or x act(z) with the gate before the norm
        rstd = 1 / sqrt(mean v^2 + eps),   n = rstd v,   o = n w + b
        y = o act(z), or o with the gate before the norm

    act(z) is z sigmoid(z) ("silu") or sigmoid(z) ("sigmoid"). The squares are added in fp64.

    Args:
        x: [..., G, D].  weight: [G, D], one if None.  bias: [G, D], zero if None.
        z: [..., G, D], or None: there is no gate.
    Returns:
        y [..., G, D] in x.dtype and rstd [..., G] in fp32 (fp64 for fp64 input).
    Source: chapter 27.
    """
    dtype = compute_dtype(x, weight, bias, z)
    v, a = x.to(dtype), None if z is None else gate(z.to(dtype), activation)
    if a is not None and not norm_before_gate:
        # eq:norm-gate-first   v = x act(z)
        v = v * a
    # eq:norm-gated   n = v / sqrt(mean v^2 + eps),   o = n w + b
    length = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64)
    rstd = torch.rsqrt(length.square() / x.shape[-1] + eps).to(dtype)
    y = affine(rstd[..., None] * v, weight, bias)
    if a is not None and norm_before_gate:
        # eq:norm-gate-last   y = o act(z)
        y = y * a
    return y.to(x.dtype), rstd.to(compute_dtype(x))


def rms_norm_gated_bwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    rstd: Tensor,
    dy: Tensor,
    *,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The adjoint of rms_norm_gated; v, n and o are computed again.

        with the gate behind:  do = dy act(z),  dz = dy o act'(z);   else do = dy
        dw = sum do n,  db = sum do,  dv = rstd (w do - n mean(n w do))
        with the gate in front:  dx = dv act(z),  dz = dv x act'(z);   else dx = dv

    Args:
        x, weight, bias, z: as in rms_norm_gated.  rstd: [..., G] from there.  dy: [..., G, D].
    Returns:
        dx, dweight, dbias and dz in the dtypes of x, weight, bias and z; None where these are.
    Source: chapter 27.
    """
    dtype = compute_dtype(x, weight, bias, z, dy)
    x_, do, rstd = x.to(dtype), dy.to(dtype), rstd.to(dtype)[..., None]
    v, dz = x_, None
    if z is not None:
        a, da = gate(z.to(dtype), activation), gate_derivative(z.to(dtype), activation)
    if z is not None and not norm_before_gate:
        # eq:norm-gate-first   v = x act(z)
        v = v * a
    n = rstd * v
    if z is not None and norm_before_gate:
        # eq:norm-gate-last-bwd   do = dy act(z),   dz = dy o act'(z)
        dz, do = do * affine(n, weight, bias) * da, do * a
    # eq:norm-gated-dweight   dw = sum do n,   db = sum do
    rows = -1, *x.shape[-2:]
    dw = None if weight is None else (do * n).reshape(rows).sum(0).to(weight.dtype)
    db = None if bias is None else do.reshape(rows).sum(0).to(bias.dtype)
    # eq:norm-gated-bwd   dv = rstd (w do - n mean(n w do))
    dn = affine(do, weight, None)
    dx = rstd * (dn - n * (n * dn).mean(-1, keepdim=True))
    if z is not None and not norm_before_gate:
        # eq:norm-gate-first-bwd   dx = dv act(z),   dz = dv x act'(z)
        dz, dx = dx * x_ * da, dx * a
    return dx.to(x.dtype), dw, db, None if dz is None else dz.to(z.dtype)


def affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """o = n w + b."""
    o = n if weight is None else n * weight.to(n.dtype)
    return o if bias is None else o + bias.to(n.dtype)


def gate(z: Tensor, activation: str) -> Tensor:
    """act(z)."""
    return z * torch.sigmoid(z) if activation == "silu" else torch.sigmoid(z)


def gate_derivative(z: Tensor, activation: str) -> Tensor:
    """act'(z)."""
    sigmoid = torch.sigmoid(z)
    if activation == "silu":
        return sigmoid * (1 + z * torch.sigmoid(-z))
    return sigmoid * torch.sigmoid(-z)
