"""The log decay that a layer computes from its raw gate, and its adjoint."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import cdiv, channels_of, load_tile, store_tile

BH = 16  # heads a program: 64 contiguous bytes of g, so that whole memory sectors are used
BD = 64  # channels a program
TOKENS = 64  # tokens a program, where no chunk says how many
STEEP = tl.constexpr(2.0**100)  # a bounded gate of this rate is a step to any precision


@triton.jit
def softplus(x):
    """log(1 + e^x), to full relative precision: e^-|x| may be too small to change 1."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log1p(y) = log(u) y / (u - 1): the rounding of u cancels
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def product(x, y):
    """x y, and 0 where either is 0, however large the other."""
    return tl.where(x == 0.0, 0.0, tl.where(y == 0.0, 0.0, x * y))


@triton.jit
def log_decay(b_a, b_rate, bound):
    """The gate of a + dt_bias at the rate e^A_log.  bound: the lower bound, or None: no bound."""
    if bound is None:
        # eq:delta-gate   gate = -e^A_log softplus(a + dt_bias)
        b_g = -product(b_rate, softplus(b_a))
    else:
        # eq:kda-gate   gate = lower_bound sigmoid(e^A_log (a + dt_bias))
        b_g = bound * tl.sigmoid(product(b_rate, b_a))
    return b_g


@triton.jit
def slope(b_g, b_a, b_rate, bound):
    """The derivative of `log_decay` by a; 0 where it is a step."""
    if bound is None:
        return -tl.where(b_rate == float("inf"), 0.0, b_rate) * tl.sigmoid(b_a)
    else:
        b_finite = tl.where(b_rate > STEEP, 0.0, b_rate)
        return b_g * b_finite * tl.sigmoid(-product(b_rate, b_a))


@triton.jit
def gate_tile(b_a, A_log_ptr, bias_ptr, bound, o_d, D: tl.constexpr, PER: tl.constexpr):
    """(gate, its derivative by a, a + dt_bias) of a tile of raw gates, whose columns are o_d.

    PER columns share a head's A_log.
    """
    b_rate = tl.full([1, 1], 1.0, tl.float32)
    if A_log_ptr is not None:
        b_rate = tl.load(A_log_ptr + o_d // PER, mask=o_d < D, other=0.0).to(tl.float32)
        b_rate = tl.exp(b_rate)[None, :]
    if bias_ptr is not None:
        b_a += tl.load(bias_ptr + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    b_g = log_decay(b_a, b_rate, bound)
    return b_g, slope(b_g, b_a, b_rate, bound), b_a


@triton.jit
def gate_sums(b_dg, b_g, b_slope, b_a, m_t, bound):
    """(da, the terms of dA_log) of a tile, from the gradient of its gate and `gate_tile`'s."""
    if bound is None:
        # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
        b_da = tl.where(m_t, b_slope * b_dg, 0.0)
        # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
        b_dA = tl.where(m_t, product(b_dg, b_g), 0.0)
    else:
        # eq:kda-dgate   da = lower_bound e^A_log y (1 - y) dg
        b_da = tl.where(m_t, b_slope * b_dg, 0.0)
        # eq:kda-dgate-sums   dA_log = sum da (a + dt_bias), ddt_bias = sum da
        b_dA = product(b_da, b_a)
    return b_da, b_dA


@triton.jit
def store_sums(sums_ptr, b_dA, b_da, i_c, o_d, D: tl.constexpr):
    """Row i_c of the partial sums [NT, 2, D]."""
    sums_ptr += 2 * i_c * D + o_d
    tl.store(sums_ptr, tl.sum(b_dA, 0), mask=o_d < D)
    tl.store(sums_ptr + D, tl.sum(b_da, 0), mask=o_d < D)


@triton.jit(do_not_specialize=["n"])
def gate_kernel(
    g_ptr,  # [n, D], the raw gate.  D = HV * PER
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    y_ptr,  # [n, D] out: natural log
    bound,  # lower bound of the gate, or None
    n,
    D: tl.constexpr,
    PER: tl.constexpr,  # gates of a head
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens of BD gates.  Grid (n / BT * D / BD).

    Reference: linattn_edu.reference.delta.gate.
    """
    _, first, n_t, o_t, o_d = channels_of(None, None, n, D, BT, BD)
    b_a = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    b_g, _, _ = gate_tile(b_a, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    store_tile(y_ptr + first * D, b_g, o_t, o_d, D, n_t, D)


@triton.jit(do_not_specialize=["n"])
def layer_gate_bwd_kernel(
    dy_ptr,  # [n, D].  D = HV * PER
    g_ptr,  # [n, D], the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    dg_ptr,  # [n, D] out
    sums_ptr,  # [NT, 2, D] out: of dA_log, and of da, over BT tokens
    bound,  # lower bound of the gate, or None
    n,
    D: tl.constexpr,
    PER: tl.constexpr,  # gates of a head
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens of BD gates.  Grid (n / BT * D / BD).

    Reference: linattn_edu.reference.delta.gate.
    """
    i_c, first, n_t, o_t, o_d = channels_of(None, None, n, D, BT, BD)
    b_dy = load_tile(dy_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    b_a = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    b_g, b_slope, b_a = gate_tile(b_a, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    b_dy = tl.where(b_g == -float("inf"), 0.0, b_dy)
    b_da, b_dA = gate_sums(b_dy, b_g, b_slope, b_a, (o_t < n_t)[:, None], bound)
    store_sums(sums_ptr, b_dA, b_da, i_c, o_d, D)
    store_tile(dg_ptr + first * D, b_da, o_t, o_d, D, n_t, D)


def columns(g: Tensor) -> tuple[int, int, int]:
    """Of gates [B, T, HV] or [B, T, HV, K]: how many a token has, a head, and a program takes."""
    HV, *channels = g.shape[2:]
    per = channels[0] if channels else 1
    return HV * per, per, BD if channels else BH


def parameter_gradients(
    sums: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dA_log and ddt_bias from the partial sums [NT, 2, D]; None for what is not given."""
    dA_log = None if A_log is None else sums[:, 0].sum(0).view(len(A_log), -1).sum(-1)
    ddt_bias = None if dt_bias is None else sums[:, 1].sum(0).view(dt_bias.shape)
    return dA_log, ddt_bias


def gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Launch gate_kernel; arguments and result as in the reference."""
    n, (D, PER, width) = g.shape[0] * g.shape[1], columns(g)
    y = torch.empty_like(g, dtype=torch.float32)
    gate_kernel[(cdiv(n, TOKENS) * cdiv(D, width),)](
        g, A_log, dt_bias, y, lower_bound, n, D, PER, BT=TOKENS, BD=width, num_warps=4
    )
    return y


def layer_gate_bwd(
    dy: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch layer_gate_bwd_kernel; arguments and result as in the reference."""
    n, (D, PER, width) = g.shape[0] * g.shape[1], columns(g)
    dg = torch.empty_like(g)
    sums = g.new_empty(cdiv(n, TOKENS), 2, D, dtype=torch.float32)
    layer_gate_bwd_kernel[(cdiv(n, TOKENS) * cdiv(D, width),)](
        dy, g, A_log, dt_bias, dg, sums, lower_bound, n, D, PER, BT=TOKENS, BD=width, num_warps=4
    )
    return dg, *parameter_gradients(sums, A_log, dt_bias)
