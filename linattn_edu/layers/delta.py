"""What Gated DeltaNet, KDA and GDN-2 share: all but the gates of the recurrence."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.layer import Layer, Projected, draw_step_bias
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import WIDEST
from linattn_edu.ops.delta import recurrence

MODES = ("chunk", "fused_recurrent")
LARGEST = {"chunk": (256, 512), "fused_recurrent": recurrence.LARGEST}  # K and V


class DeltaLayer(Layer):
    """Projections, short convolutions, the delta rule, a gated norm, a projection.

    A subclass adds the parameters of its gates and names the two forms of its operator.
    """

    last = "o_proj"

    def __init__(
        self, hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv,
        allow_neg_eigval, conv_size, conv_bias, layer_idx, norm_eps, impl, **factory,
    ):  # fmt: skip
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        check.choice("mode", mode, MODES)
        K, V = LARGEST[mode]
        check.positive(
            {"head_dim": K, "conv_size": WIDEST}, hidden_size=hidden_size, head_dim=head_dim,
            num_heads=num_heads, num_v_heads=num_v_heads, conv_size=conv_size,
        )  # fmt: skip
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads={num_heads}, got {num_v_heads}"
            )
        whole = head_dim * check.real("expand_v", expand_v)
        head_v_dim = round(whole)  # 7 * (61 / 7) is less than 61
        if not 1 <= head_v_dim <= V or not math.isclose(head_v_dim, whole, rel_tol=1e-5):
            raise ValueError(
                f"expand_v must make head_dim={head_dim} an integer from 1 to {V}, got {expand_v}"
            )
        check.choice("impl", impl, check.IMPLS)
        self.hidden_size, self.expand_v, self.mode, self.impl = hidden_size, expand_v, mode, impl
        self.head_dim, self.num_heads, self.num_v_heads = head_dim, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, head_v_dim
        self.key_dim, self.value_dim = num_heads * head_dim, num_v_heads * head_v_dim
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.allow_neg_eigval, self.layer_idx, self.norm_eps = allow_neg_eigval, layer_idx, norm_eps
        self.state_shape = (num_v_heads, head_dim, head_v_dim)
        widths = (self.key_dim, self.key_dim, self.value_dim)
        self.conv_shapes = tuple((D, conv_size) for D in widths) if use_short_conv else ()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, D, bias=False, **factory) for D in widths
        )
        self.b_proj = nn.Linear(hidden_size, self._strengths(), bias=False, **factory)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False, **factory)
        if use_short_conv:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                ShortConvolution(D, conv_size, bias=conv_bias, impl=impl, **factory) for D in widths
            )

    def _strengths(self) -> int:
        """Numbers of a token that b_proj makes: a beta for each value head."""
        return self.num_v_heads

    def _low_rank(self, D: int, bias: bool, **factory) -> nn.Sequential:
        """A projection to D numbers through V."""
        return nn.Sequential(
            nn.Linear(self.hidden_size, self.head_v_dim, bias=False, **factory),
            nn.Linear(self.head_v_dim, D, bias=bias, **factory),
        )

    def _gate_parameters(self, rates: int, biases: int, device, dtype) -> None:
        """A_log and dt_bias, in float32 at least, and not for weight decay, as fla marks them."""
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.A_log = nn.Parameter(torch.empty(rates, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(biases, device=device, dtype=dtype))
        self.A_log._no_weight_decay = self.dt_bias._no_weight_decay = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A_log and dt_bias anew; the modules inside have functions of their own."""
        self._draw_rate()
        draw_step_bias(self.dt_bias, 1e-3, 0.1, floor=1e-4)

    def _draw_rate(self) -> None:
        raise NotImplementedError

    def _projection(self) -> nn.Module:
        return self.q_proj

    def _raw_gate(self, projected: Projected) -> Tensor:
        """g before the gate: [B, T, HV], or [B, T, HV, K]."""
        raise NotImplementedError

    def _gates(self, projected: Projected) -> dict[str, Tensor | bool]:
        """What the operator is given for the decay of the state and for the strength of a write."""
        return {
            "g": self._raw_gate(projected),
            "beta": projected("b_proj"),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def _rule(self, recurrent: bool, **arguments) -> tuple[Tensor, Tensor | None]:
        """The operator, in its recurrent form or in chunks."""
        raise NotImplementedError

    def _replay(self, **arguments) -> Tensor:
        """The operator of one token, or a few, with a ring."""
        raise NotImplementedError

    def _ring_kind(self) -> dict | None:
        return {"heads": self.num_heads}

    def _norm(self, o: Tensor, projected: Projected) -> Tensor:
        """o [B, T, HV, V], normalised and gated."""
        raise NotImplementedError

    def _mixed(
        self,
        projected: Projected,
        padding: Tensor | None,
        cache: Cache | None,
        bounds: dict,
        step: bool,
    ) -> Tensor:
        q, k, v = (self._qkv(i, projected, cache, bounds) for i in range(3))
        if padding is not None and self.use_short_conv and self.conv_bias:
            v = v.masked_fill(padding, 0)  # so that padding writes nothing
        recurrent = step or self.mode == "fused_recurrent"
        if recurrent:
            bounds = {n: x for n, x in bounds.items() if n != "cu_seqlens_cpu"}
        arguments = {
            "q": q.unflatten(-1, (self.num_heads, self.head_k_dim)),
            "k": k.unflatten(-1, (self.num_heads, self.head_k_dim)),
            "v": v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            **self._gates(projected),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "impl": self.impl,
        }
        if step and cache.ring:
            o = self._replay(**arguments, state=cache.recurrent_state, ring=cache.ring)
            return self._norm(o, projected).flatten(-2)
        o, state = self._rule(
            recurrent,
            **arguments,
            initial_state=None if cache is None else cache.recurrent_state,
            output_final_state=cache is not None,
            **bounds,
            **({"inplace_final_state": True} if step else {}),
        )
        if cache is not None and not step:
            cache.put(len(cache.conv_states), state)
        return self._norm(o, projected).flatten(-2)

    def _qkv(self, i: int, projected: Projected, cache: Cache | None, bounds: dict) -> Tensor:
        """q, k or v: a projection of x, and its short convolution with silu."""
        name = "qkv"[i]
        y = projected(f"{name}_proj")
        if not self.use_short_conv:
            return F.silu(y)
        return self._convolved(getattr(self, f"{name}_conv1d"), y, cache, i, bounds)
