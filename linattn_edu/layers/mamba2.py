"""Mamba-2, the layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.cp.context import CPContext
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.layer import Layer, draw_rate, draw_step_bias, write
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.ops import check
from linattn_edu.ops.ssd import mamba_chunk_scan_combined, selective_state_update


class Mamba2(Layer):
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
        d_inner = expand * d_model
        d_ssm = d_inner if d_ssm is None else d_ssm
        if not 0 < d_ssm <= d_inner:
            raise ValueError(f"d_ssm must be in 1 to expand * d_model = {d_inner}, got {d_ssm}")
        if d_ssm % headdim:
            raise ValueError(f"headdim must divide d_ssm={d_ssm}, got {headdim}")
        nheads = d_ssm // headdim
        if nheads % ngroups:
            raise ValueError(f"ngroups must divide the {nheads} heads, got {ngroups}")
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"A_init_range must be 0 < least <= largest, got {A_init_range}")
        factory = {"device": device, "dtype": dtype}
        self.hidden_size = self.d_model = d_model
        self.d_state, self.d_conv, self.conv_init, self.expand = d_state, d_conv, conv_init, expand
        self.headdim, self.d_inner, self.d_ssm, self.nheads = headdim, d_inner, d_ssm, nheads
        self.ngroups, self.A_init_range, self.D_has_hdim = ngroups, A_init_range, D_has_hdim
        self.rmsnorm, self.norm_before_gate, self.dt_limit = rmsnorm, norm_before_gate, dt_limit
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
        """Draw dt_bias, A_log, D, and with conv_init the convolution's weight anew; the modules
        inside have functions of their own.
        """
        draw_step_bias(self.dt_bias, self.dt_min, self.dt_max, floor=self.dt_init_floor)
        draw_rate(self.A_log, *self.A_init_range)
        nn.init.ones_(self.D)
        if self.conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -self.conv_init, self.conv_init)

    def _weight(self) -> Tensor:
        return self.in_proj.weight

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> Tensor:
        """The new hidden states; see :meth:`Layer.forward`."""
        x, padding, cu_seqlens_cpu = self._begin(
            x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context
        )
        z0, x0, z, xBC, dt = self.in_proj(x).split(self.widths, -1)
        if padding is not None:  # in_proj may have a bias
            xBC = xBC.masked_fill(padding, 0)
        bounds = {
            "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "cp_context": cp_context,
        }  # fmt: skip
        state = None if cache is None else cache.conv_states[0]
        xBC, final = self.conv1d(xBC, cache=state, output_final_state=state is not None, **bounds)
        if state is not None and final is not state:
            write(state, final)
        GN = self.ngroups * self.d_state
        v, B, C = xBC.split((self.d_ssm, GN, GN), -1)
        if padding is not None:
            v = v.masked_fill(padding, 0)  # so that padding writes nothing
        v, z_heads = (y.unflatten(-1, (self.nheads, self.headdim)) for y in (v, z))
        B, C = (y.unflatten(-1, (self.ngroups, self.d_state)) for y in (B, C))
        z_heads = None if self.rmsnorm else z_heads
        if cache is not None and x.shape[1] == 1 and cu_seqlens is None:
            y = self._step(cache.recurrent_state, v, dt, B, C, z_heads)
        else:
            y = self._scan(cache, v, dt, B, C, z_heads, bounds)
        y = y.flatten(-2)
        if self.rmsnorm:
            y = self.norm(y, z)
        if self.d_ssm < self.d_inner:
            y = torch.cat([F.silu(z0) * x0, y], -1)
        y = self.out_proj(y)
        return y if padding is None else y.masked_fill(padding, 0)

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
            write(cache.recurrent_state, state)
        return y

    def _step(
        self, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> Tensor:
        """One token [B, 1, H, P], its state written in place."""
        H, P, N = self.state_shape
        A = -self.A_log.to(_wide(self.A_log)).exp()
        dt, dt_bias, softplus = dt[:, 0], self.dt_bias, True
        if self.dt_limit != (0.0, math.inf):  # which selective_state_update does not know
            dt = F.softplus((dt + dt_bias).to(_wide(dt))).clamp(*self.dt_limit)
            dt_bias, softplus = None, False
        skip = self._skip()
        y = selective_state_update(
            state, x[:, 0], dt[..., None].expand(-1, H, P), A[:, None, None].expand(H, P, N),
            B[:, 0], C[:, 0], skip if skip.ndim == 2 else skip[:, None].expand(H, P),
            None if z is None else z[:, 0],
            None if dt_bias is None else dt_bias[:, None].expand(H, P), softplus, impl=self.impl,
        )  # fmt: skip
        return y[:, None]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
