"""Rows of root mean square one, times a weight and a gate, and their adjoint."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.l2norm import power
from linattn_edu.kernels.rows import row_stride
from linattn_edu.kernels.tiles import (
    cdiv,
    load_row,
    load_tile,
    load_vector,
    silu_derivative,
    store_tile,
)

ELEMENTS = 2048  # of a program's tile; the backward pass holds three of them
PARTS = 1024  # of the gradients of weight and bias, at most


@triton.jit
def gate(b_z, SILU: tl.constexpr):
    """act(z)."""
    return b_z * tl.sigmoid(b_z) if SILU else tl.sigmoid(b_z)


@triton.jit
def gate_derivative(b_z, SILU: tl.constexpr):
    """act'(z)."""
    return silu_derivative(b_z) if SILU else tl.sigmoid(b_z) * tl.sigmoid(-b_z)


@triton.jit
def affine(b_n, w_ptr, b_ptr, i_g, o_d, D: tl.constexpr):
    """o = n w + b, of group i_g."""
    if w_ptr is not None:
        b_n *= load_vector(w_ptr + i_g * D, o_d, D)[None, :]
    if b_ptr is not None:
        b_n += load_vector(b_ptr + i_g * D, o_d, D)[None, :]
    return b_n


@triton.jit(do_not_specialize=["n"])
def rms_norm_gated_kernel(
    x_ptr,  # [n, G, D]
    w_ptr,  # [G, D] or None
    b_ptr,  # [G, D] or None
    z_ptr,  # [n, G, D] or None, a row ROW numbers after the one before
    y_ptr,  # [n, G, D] out
    rstd_ptr,  # [n, G] out
    n, eps,
    ROW: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
    BEFORE: tl.constexpr,  # the gate comes before the norm
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BR rows of a group.  Grid (n / BR * G).

    Reference: linattn_edu.reference.delta.rms_norm_gated.
    """
    i_g, first = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64) * BR
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    i_x, rows = first * G * D + i_g * D, n - first
    b_v = load_tile(x_ptr + i_x, o_r, o_d, G * D, rows, D).to(tl.float32)  # [BR, BD]
    if z_ptr is not None:
        b_z = load_tile(z_ptr + first * ROW + i_g * D, o_r, o_d, ROW, rows, D)
        b_a = gate(b_z.to(tl.float32), SILU)
        if BEFORE:
            # eq:norm-gate-first   v = x act(z)
            b_v *= b_a
    # eq:norm-gated   n = v / sqrt(mean v^2 + eps),   o = n w + b
    b_s = power(tl.max(tl.abs(b_v), 1), eps)
    b_v *= b_s[:, None]
    b_rstd = tl.rsqrt(tl.sum(b_v * b_v, 1) / D + eps * b_s * b_s)
    b_y = affine(b_rstd[:, None] * b_v, w_ptr, b_ptr, i_g, o_d, D)
    if z_ptr is not None and not BEFORE:
        # eq:norm-gate-last   y = o act(z)
        b_y *= b_a
    store_tile(y_ptr + i_x, b_y, o_r, o_d, G * D, rows, D)
    tl.store(rstd_ptr + (first + o_r) * G + i_g, b_s * b_rstd, mask=o_r < rows)


@triton.jit(do_not_specialize=["n", "TILES"])
def rms_norm_gated_bwd_kernel(
    x_ptr,  # [n, G, D]
    w_ptr,  # [G, D] or None
    b_ptr,  # [G, D] or None
    z_ptr,  # [n, G, D] or None, a row ROW numbers after the one before
    rstd_ptr,  # [n, G]
    dy_ptr,  # [n, G, D]
    dx_ptr,  # [n, G, D] out
    dw_ptr,  # [PARTS, G, D] out: parts of dweight, or None
    db_ptr,  # [PARTS, G, D] out: parts of dbias, or None
    dz_ptr,  # [n, G, D] out, or None
    n,
    TILES,  # of BR rows each
    ROW: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
    BEFORE: tl.constexpr,  # the gate comes before the norm
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: TILES * BR rows of a group, whose dweight and dbias it adds up.

    Grid (n / BR / TILES * G).  Reference: linattn_edu.reference.delta.rms_norm_gated.
    """
    i_g, i_part = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    b_dw, b_db = tl.zeros([BR, BD], tl.float32), tl.zeros([BR, BD], tl.float32)
    for i in range(TILES):
        first = (i_part * TILES + i) * BR
        i_x, rows = first * G * D + i_g * D, n - first
        b_x = load_tile(x_ptr + i_x, o_r, o_d, G * D, rows, D).to(tl.float32)  # [BR, BD]
        b_do = load_tile(dy_ptr + i_x, o_r, o_d, G * D, rows, D).to(tl.float32)
        b_rstd = load_row(rstd_ptr + first * G + i_g, o_r, G, rows)[:, None]
        b_v = b_x
        if z_ptr is not None:
            b_z = load_tile(z_ptr + first * ROW + i_g * D, o_r, o_d, ROW, rows, D).to(tl.float32)
            b_a, b_da = gate(b_z, SILU), gate_derivative(b_z, SILU)
            if BEFORE:
                # eq:norm-gate-first   v = x act(z)
                b_v *= b_a
        b_n = b_rstd * b_v
        if z_ptr is not None and not BEFORE:
            # eq:norm-gate-last-bwd   do = dy act(z),   dz = dy o act'(z)
            b_dz = b_do * affine(b_n, w_ptr, b_ptr, i_g, o_d, D) * b_da
            b_do *= b_a
            store_tile(dz_ptr + i_x, b_dz, o_r, o_d, G * D, rows, D)
        # eq:norm-gated-dweight   dw = sum do n,   db = sum do
        if dw_ptr is not None:
            b_dw += b_do * b_n
        if db_ptr is not None:
            b_db += b_do
        # eq:norm-gated-bwd   dv = rstd (w do - n mean(n w do))
        b_dn = affine(b_do, w_ptr, None, i_g, o_d, D)
        b_dx = b_rstd * (b_dn - b_n * (tl.sum(b_n * b_dn, 1) / D)[:, None])
        if z_ptr is not None and BEFORE:
            # eq:norm-gate-first-bwd   dx = dv act(z),   dz = dv x act'(z)
            store_tile(dz_ptr + i_x, b_dx * b_x * b_da, o_r, o_d, G * D, rows, D)
            b_dx *= b_a
        store_tile(dx_ptr + i_x, b_dx, o_r, o_d, G * D, rows, D)
    i_w = (i_part * G + i_g) * D + o_d
    if dw_ptr is not None:
        tl.store(dw_ptr + i_w, tl.sum(b_dw, 0), mask=o_d < D)
    if db_ptr is not None:
        tl.store(db_ptr + i_w, tl.sum(b_db, 0), mask=o_d < D)


def _tiles(
    x: Tensor, z: Tensor | None, gate_last: bool, activation: str, warps: int
) -> tuple[int, dict[str, int]]:
    """Rows of x [..., G, D], and a kernel's constants: so many warps, more for a long row."""
    G, D = x.shape[-2:]
    BD = triton.next_power_of_2(D)
    BR, warps = max(1, ELEMENTS // BD), min(16, max(warps, BD // 512))
    ROW = G * D if z is None else row_stride(z, G * D)
    tiles = {"ROW": ROW, "G": G, "D": D, "BR": BR, "BD": BD, "num_warps": warps}
    return x.numel() // (G * D), tiles | {"BEFORE": not gate_last, "SILU": activation == "silu"}


def rms_norm_gated(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None, *,
    eps: float = 1e-6, norm_before_gate: bool = True, activation: str = "silu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch rms_norm_gated_kernel; arguments and results as in the reference."""
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    n, tiles = _tiles(x, z, norm_before_gate, activation, 2)
    grid = (cdiv(n, tiles["BR"]) * tiles["G"],)
    rms_norm_gated_kernel[grid](x, weight, bias, z, y, rstd, n, eps, **tiles)
    return y, rstd


def rms_norm_gated_bwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None, rstd: Tensor,
    dy: Tensor, *, norm_before_gate: bool = True, activation: str = "silu",
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch rms_norm_gated_bwd_kernel and add up its parts; the rest as in the reference."""
    n, tiles = _tiles(x, z, norm_before_gate, activation, 4)
    each = cdiv(cdiv(n, tiles["BR"]), PARTS)
    parts = cdiv(n, tiles["BR"] * each) if n else 0
    dx, dz = torch.empty_like(x), None if z is None else torch.empty_like(z)
    dw, db = (
        None if t is None else t.new_empty(parts, *t.shape, dtype=torch.float32)
        for t in (weight, bias)
    )
    rms_norm_gated_bwd_kernel[(parts * tiles["G"],)](
        x, weight, bias, z, rstd, dy, dx, dw, db, dz, n, each, **tiles
    )
    dw, db = (
        None if t is None else part.sum(0).to(t.dtype) for t, part in ((weight, dw), (bias, db))
    )
    return dx, dw, db, dz
