"""Mamba-2, the layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.layer import Layer, Projected, draw_rate, draw_step_bias
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import WIDEST
from linattn_edu.ops.ssd import (
    mamba_chunk_scan_combined,
    replay_selective_state_update,
    selective_state_update,
)
from linattn_edu.ops.ssd.chunk import LARGEST, check_options


class Mamba2(Layer):
    r"""Mamba-2: the state-space recurrence between projections.

    .. math::

        z,\ xBC,\ dt &= u W_{in}, \qquad x, B, C = \mathrm{silu}(\mathrm{conv}(xBC)), \qquad
            A = -e^{A\_log} \\
        y &= \frac{v}{\mathrm{rms}(v)}\, w\, W_{out}, \qquad v = o \odot \mathrm{silu}(z)

    with o of :func:`mamba_chunk_scan_combined` and u the hidden states; the norm is that of each
    group, and with norm_before_gate the gate comes after it.

    A state dict of mamba_ssm's Mamba2 (2.3.2) loads with strict=True and gives its outputs; one
    that does not fit is refused whole. What differs from mamba_ssm's forward: a mask, cu_seqlens as
    boundaries instead of seq_idx, a :class:`Cache` instead of inference_params, which any number of
    tokens may follow; hidden states are ``[B, T, d_model]`` only; one token of a cache obeys
    dt_limit, which mamba_ssm's step does not read, and may have D for each channel.
    ``linattn_edu.integrations.layers`` has mamba_ssm's call.

    Parameters, with H = d_ssm / headdim, G = ngroups, N = d_state, d_inner = expand d_model and
    D_conv = d_ssm + 2 G N: in_proj ``[2 d_inner + 2 G N + H, d_model]``, conv1d ``[D_conv, 1, W]``
    (.weight, and .bias), A_log, dt_bias ``[H]``, D ``[H]``, or with D_has_hdim ``[d_ssm]``,
    norm.weight ``[d_ssm]``, out_proj ``[d_model, d_inner]``. At first exp(A_log) is uniform in
    A_init_range, softplus(dt_bias) log-uniform in [dt_min, dt_max] and at least dt_init_floor, D
    and the norm are one, the convolution's weight is uniform in [-conv_init, conv_init] if that is
    given, and the others are as PyTorch draws them. D has the default dtype, whatever dtype is.

    Args:
        d_model: Numbers of a hidden state.
        d_state: N, at most 256.
        d_conv: W of the convolution, from 1 to 8.
        conv_init: Bound of the convolution's first weights, or None.
        expand: d_inner / d_model.
        headdim: Channels of a head P, a divisor of d_ssm, at most 256.
        d_ssm: Channels of the recurrence; the others, d_inner - d_ssm, are a gated MLP beside it.
            None: d_inner.
        ngroups: Groups of B and C, and of the norm; a divisor of H.
        A_init_range, dt_min, dt_max, dt_init_floor: Of the first A_log and dt_bias.
        D_has_hdim: Whether D has a number for each channel.
        rmsnorm: Whether there is a norm; without, o is gated by silu(z) alone.
        norm_before_gate: Whether the norm comes before the gate.
        dt_limit: Least and largest step.
        bias, conv_bias: Whether the projections, and the convolution, have a bias.
        chunk_size: As in :func:`mamba_chunk_scan_combined`.
        use_mem_eff_path, sequence_parallel: Arguments of mamba_ssm without a meaning here.
        layer_idx: Number of the layer in a model, which is only kept.
        process_group: An argument of mamba_ssm: None alone is taken.
        device, dtype: Of the parameters.
        impl: "triton", "reference" or "auto", for all operators of the layer.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: Dao and Gu 2024 (arXiv:2405.21060); chapter 27.
    """

    first, last = ("in_proj",), "out_proj"

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str = "auto",
    ):
        super().__init__()
        check.absent("process_group", process_group)
        check.choice("impl", impl, check.IMPLS)
        check.positive(
            {"d_state": LARGEST, "d_conv": WIDEST, "headdim": LARGEST}, d_model=d_model,
            d_state=d_state, d_conv=d_conv, expand=expand, headdim=headdim, ngroups=ngroups,
        )  # fmt: skip
        d_inner = expand * d_model
        d_ssm = d_inner if d_ssm is None else d_ssm
        check.positive(d_ssm=d_ssm)
        if d_ssm > d_inner:
            raise ValueError(f"d_ssm must be in 1 to expand * d_model = {d_inner}, got {d_ssm}")
        if d_ssm % headdim:
            raise ValueError(f"headdim must divide d_ssm={d_ssm}, got {headdim}")
        nheads = d_ssm // headdim
        if nheads % ngroups:
            raise ValueError(f"ngroups must divide the {nheads} heads, got {ngroups}")
        A_init_range = check.pair("A_init_range", A_init_range)
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"A_init_range must be 0 < least <= largest, got {A_init_range}")
        dt_min, dt_max = check.pair("(dt_min, dt_max)", (dt_min, dt_max))
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min must be > 0 and at most dt_max={dt_max}, got {dt_min}")
        if check.real("dt_init_floor", dt_init_floor) < 0:
            raise ValueError(f"dt_init_floor must be >= 0, got {dt_init_floor}")
        _, *limit = check_options(chunk_size, dt_limit)
        factory = {"device": device, "dtype": dtype}
        self.hidden_size = self.d_model = d_model
        self.d_state, self.d_conv, self.conv_init, self.expand = d_state, d_conv, conv_init, expand
        self.headdim, self.d_inner, self.d_ssm, self.nheads = headdim, d_inner, d_ssm, nheads
        self.ngroups, self.A_init_range, self.D_has_hdim = ngroups, A_init_range, D_has_hdim
        self.rmsnorm, self.norm_before_gate, self.dt_limit = rmsnorm, norm_before_gate, tuple(limit)
        self.dt_min, self.dt_max, self.dt_init_floor = dt_min, dt_max, dt_init_floor
        self.chunk_size, self.layer_idx, self.impl = chunk_size, layer_idx, impl
        conv_dim = d_ssm + 2 * ngroups * d_state
        self.conv_shapes = ((conv_dim, d_conv),)
        self.state_shape = (nheads, headdim, d_state)
        # what in_proj gives: the gated MLP beside the recurrence (z0, x0), z, xBC, dt
        d_mlp = d_inner - d_ssm
        self.widths = (d_mlp, d_mlp, d_ssm, conv_dim, nheads)
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=bias, **factory)
        self.conv1d = ShortConvolution(conv_dim, d_conv, bias=conv_bias, impl=impl, **factory)
        if conv_init is not None:
            self.conv1d.first = conv_init
            self.conv1d.reset_parameters()
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(nheads, **factory)) for _ in range(2))
        self.D = nn.Parameter(torch.empty(d_ssm if D_has_hdim else nheads, device=device))
        for x in (self.dt_bias, self.A_log, self.D):
            x._no_weight_decay = True
        if rmsnorm:
            self.norm = RMSNormGated(
                d_ssm, eps=1e-5, group_size=d_ssm // ngroups, norm_before_gate=norm_before_gate,
                impl=impl, **factory,
            )  # fmt: skip
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw dt_bias, A_log and D anew; the modules inside have functions of their own."""
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max, floor=self.dt_init_floor)
        draw_rate(self.A_log, *self.A_init_range)
        nn.init.ones_(self.D)

    def _projection(self) -> nn.Module:
        return self.in_proj

    def _mixed(
        self,
        projected: Projected,
        padding: Tensor | None,
        cache: Cache | None,
        bounds: dict,
        step: bool,
    ) -> Tensor:
        z0, x0, z, xBC, dt = projected("in_proj").split(self.widths, -1)
        if padding is not None:  # in_proj may have a bias
            xBC = xBC.masked_fill(padding, 0)
        xBC = self._convolved(self.conv1d, xBC, cache, 0, bounds)
        GN = self.ngroups * self.d_state
        v, B, C = xBC.split((self.d_ssm, GN, GN), -1)
        if padding is not None:
            v = v.masked_fill(padding, 0)  # so that padding writes nothing
        v, z_heads = (y.unflatten(-1, (self.nheads, self.headdim)) for y in (v, z))
        B, C = (y.unflatten(-1, (self.ngroups, self.d_state)) for y in (B, C))
        z_heads = None if self.rmsnorm else z_heads
        if step:
            y = self._step(cache, v, dt, B, C, z_heads)
        else:
            y = self._scan(cache, v, dt, B, C, z_heads, bounds)
        y = y.flatten(-2)
        if self.rmsnorm:
            y = self.norm(y, z)
        if self.d_ssm < self.d_inner:
            y = torch.cat([F.silu(z0) * x0, y], -1)
        return y

    def _skip(self) -> Tensor:
        """D [H], or [H, P]."""
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D

    def _scan(
        self, cache: Cache | None, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None,
        bounds: dict,
    ) -> Tensor:  # fmt: skip
        """The recurrence in chunks [B, T, H, P]; a cache's state is read and written."""
        keep = cache is not None
        packed = bounds["cu_seqlens"] is not None
        y = mamba_chunk_scan_combined(
            x, dt, -self.A_log.to(_wide(self.A_log)).exp(), B, C, self.chunk_size,
            D=self._skip(), z=z, dt_bias=self.dt_bias, dt_softplus=True, dt_limit=self.dt_limit,
            initial_states=cache.recurrent_state if keep else None,
            return_final_states=keep and not packed, return_varlen_states=keep and packed,
            impl=self.impl, **bounds,
        )  # fmt: skip
        if keep:
            y, state = y
            cache.put(len(cache.conv_states), state)
        return y

    def _ring_kind(self) -> dict:
        return {"heads": self.ngroups, "state_v_first": True}

    def _step(
        self, cache: Cache, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> Tensor:
        """One token [B, 1, H, P], or a few with a ring; the state or it is written in place."""
        H, P, N = self.state_shape
        A = -self.A_log.to(_wide(self.A_log)).exp()
        dt_bias, softplus, state = self.dt_bias, True, cache.recurrent_state
        if self.dt_limit != (0.0, math.inf):  # which selective_state_update does not know
            dt = F.softplus((dt + dt_bias).to(_wide(dt))).clamp(*self.dt_limit)
            dt_bias, softplus = None, False
        skip = self._skip()
        if cache.ring:
            return replay_selective_state_update(
                state, cache.ring, x, dt, A, B, C, skip, z, dt_bias, softplus, impl=self.impl
            )
        y = selective_state_update(
            state, x[:, 0], dt[:, 0, :, None].expand(-1, H, P), A[:, None, None].expand(H, P, N),
            B[:, 0], C[:, 0], skip if skip.ndim == 2 else skip[:, None].expand(H, P),
            None if z is None else z[:, 0],
            None if dt_bias is None else dt_bias[:, None].expand(H, P), softplus, impl=self.impl,
        )  # fmt: skip
        return y[:, None]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
