"""RWKV-7, the layer."""

import math

import torch
from torch import Tensor, nn

from linattn_edu.cp.context import CPContext
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.delta import MODES
from linattn_edu.layers.layer import Layer, activations, filled
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d import causal_conv1d
from linattn_edu.ops.delta.recurrence import LARGEST
from linattn_edu.ops.dplr import chunk_rwkv7, fused_recurrent_rwkv7
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.ops.rms_norm_gated import check_eps
from linattn_edu.ops.tensors import wide

LEAST_DECAY = -math.exp(-0.5)  # of w: a token keeps at least e^w = .545 of a row of the state
STREAMS = "rwkvag"


class Projection(nn.Linear):
    """A projection whose first weight is orthogonal times a gain: its first numbers are its own, in
    whatever order modules draw.
    """

    gain: float | None = None
    first_bias: Tensor | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight anew, zero for a gain of 0, and set the bias to first_bias, or zero."""
        if self.gain is None:  # called by nn.Linear
            return
        first = torch.empty_like(self.weight, dtype=wide(self.weight))  # where there is a QR
        nn.init.orthogonal_(first, self.gain) if self.gain else nn.init.zeros_(first)
        self.weight.copy_(first)
        if self.bias is not None:
            self.bias.copy_(0 if self.first_bias is None else self.first_bias)


def projection(
    inputs: int, outputs: int, gain: float, bias: Tensor | bool = False, **factory
) -> Projection:
    """A projection; bias: its first numbers, or True for zeros."""
    made = Projection(inputs, outputs, bias=bias is not False, **factory)
    made.gain, made.first_bias = gain, bias if isinstance(bias, Tensor) else None
    made.reset_parameters()
    return made


class LoRA(nn.Module):
    """Two projections through a few numbers: ``act(x A) B + bias``, under fla's names."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, act: nn.Module, bias: Tensor | bool, **factory
    ):
        super().__init__()
        gain = 0.1 * max(1.0, rank / outputs) ** 0.5
        self.lora = nn.Sequential(
            projection(inputs, rank, 0, **factory),
            act,
            projection(rank, outputs, gain, bias, **factory),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


class HeadNorm(nn.GroupNorm):
    """A layer norm of each head, whose first weight is `first`."""

    first: float = 1.0

    def reset_parameters(self) -> None:
        """Set the weight to its first number and the bias to zero."""
        super().reset_parameters()
        if self.affine:
            nn.init.constant_(self.weight, self.first)


class RWKV7(Layer):
    r"""RWKV-7, "Goose": the general delta rule between projections of each token and the last.

    .. math::

        x^c_t &= x_t + x\_c \odot (x_{t-1} - x_t) \qquad \text{for } c = r, w, k, v, a, g \\
        r &= x^r W_r, \qquad c = x^k W_k, \qquad
            u = x^v W_v, \qquad a = \mathrm{sigmoid}(A(x^a)), \qquad g = G(x^g) \\
        w &= -e^{-1/2}\, \mathrm{sigmoid}(W(x^w)), \qquad
            z = \frac{c \odot k\_k}{|c \odot k\_k|}, \qquad
            k = c \odot (1 + (a - 1) \odot k\_a) \\
        v &= u + \mathrm{sigmoid}(V(x^v)) \odot (v\_first - u), \qquad v = u \text{ in layer 0} \\
        S_t &= \mathrm{diag}(e^{w_t})\, S_{t-1} - (z_t \odot a_t)^\top (z_t S_{t-1})
            + k_t^\top v_t, \qquad o_t = r_t S_t \\
        y &= \big((\mathrm{norm}(o) + ((r \odot k) \cdot r\_k)\, v) \odot g\big) W_o

    with o of :func:`chunk_rwkv7`. S, z of unit length, the norm and the sum over r k r_k are those
    of each head. W, A, V and G are products of two matrices, W with a tanh and G with a sigmoid
    between them, all but G with a bias. The token before the first is zero.

    v_first is v of layer 0, for the same tokens: ``y, v = layer0(x, return_v_first=True)``, then
    ``layer(y, v_first=v)`` of each later layer.

    A state dict of fla's RWKV7Attention (fla-core 0.6.0) loads with strict=True and gives its
    outputs. What differs from fla's forward: it returns y, or y and v_first, and not four things; a
    :class:`Cache` in place of past_key_values, whose shift has two tokens; without layer_idx the
    first numbers are those of layer 0, where fla leaves zeros; a num_heads beside head_dim must
    agree with it.

    Parameters, with D = hidden_size, H heads of K = head_dim, H K = D, and E = value_dim: x_r, x_w,
    x_k, x_v, x_a, x_g ``[1, 1, D]``, k_k, k_a ``[D]``, r_k ``[H, K]``; r_proj, k_proj ``[D, D]``,
    v_proj ``[E, D]``, o_proj ``[D, E]``; w_lora, a_lora, v_lora (not in layer 0), g_lora, each with
    lora.0.weight ``[rank, D]``, lora.2.weight ``[D or E, rank]`` and, but for g_lora, lora.2.bias;
    g_norm.weight and .bias ``[E]``. In layer l of L, with n the number of a channel, t from 0 to 1
    over all channels and m from -1 to 1 over those of a head, at first

    .. math::

        x\_c &= 1 - (n / D)^{p (1 - l / L)}, \qquad p = .2, .9, .7, .7, .9, .2 \text{ for }
            c = r, w, k, v, a, g \\
        k\_k &= .76 - .1\, t, \qquad k\_a = 1.02, \qquad r\_k = -.04, \qquad
            g\_norm = \Big(\frac{l + 1}{L}\Big)^{.7} \\
        b_w &= -5.5 + 6\, t^{1 + (l / (L - 1))^{.3}} + 2.5\, m |m| \\
        b_a &= -.39 + .4\, t + .3\, m |m|, \qquad b_v = .93 - .4\, t

    with b the biases of W, A and V. The first matrix of each pair and o_proj are zero, r_proj and
    v_proj orthogonal, k_proj and the second of each pair orthogonal times .1, and times the root of
    rank / outputs where that is above 1.

    Args:
        mode: "chunk" or "fused_recurrent", the operator but for one token of a cache.
        hidden_size: Numbers of a hidden state D.
        head_dim: Keys of a head K, a divisor of D, at most 512; None: D / num_heads.
        num_heads: H, where head_dim is None.
        decay_low_rank_dim, gate_low_rank_dim, a_low_rank_dim, v_low_rank_dim: Ranks of w_lora,
            g_lora, a_lora, v_lora. None: ``2.5 s``, ``5 D ** .5``, ``2.5 s``, ``1.7 s`` with
            ``s = D ** .5 K / 64``, each in the nearest multiple of 32, and at least 32.
        elementwise_affine: Whether the norm has a weight and a bias.
        norm_eps: Added to the variance, times K.
        layer_idx: Number of the layer in a model: 0 makes v_first, all others, None too, take it.
        fuse_norm: Whether 1e-6 is added to the square of the length that z is divided by, as in
            fla's models by default; else 1e-24, against zero alone.
        value_dim: E, a multiple of H, at most 512 H; None: D.
        num_hidden_layers: L, for the first numbers; None: layer_idx + 1.
        device, dtype: Of the parameters.
        impl: "triton", "reference" or "auto", for all operators of the layer.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: Peng et al. 2025 (arXiv:2503.14456); the layer as in fla-core 0.6.0; chapter 27 has that
    of Kimi Delta Attention.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        fuse_norm: bool = False,
        value_dim: int | None = None,
        num_hidden_layers: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ):
        super().__init__()
        check.choice("mode", mode, MODES)
        check.choice("impl", impl, check.IMPLS)
        check_eps("norm_eps", norm_eps)
        check.positive(hidden_size=hidden_size)
        K, H = _heads(hidden_size, head_dim, num_heads)
        E = hidden_size if value_dim is None else value_dim
        check.positive({"value_dim": LARGEST[1] * H}, value_dim=E)
        if E % H:
            raise ValueError(f"value_dim must be a multiple of the {H} heads, got {E}")
        self.depth = _depth(layer_idx, num_hidden_layers)
        self.mode, self.hidden_size, self.impl, self.norm_eps = mode, hidden_size, impl, norm_eps
        self.head_dim, self.num_heads, self.head_v_dim = K, H, E // H
        self.key_dim, self.value_dim = hidden_size, E
        self.layer_idx, self.num_hidden_layers = layer_idx, num_hidden_layers
        self.fuse_norm = fuse_norm
        self.conv_shapes, self.state_shape = ((hidden_size, 2),), (H, K, E // H)
        ranks = {
            "decay_low_rank_dim": _rank(decay_low_rank_dim, 2.5 * hidden_size**0.5 * K / 64),
            "gate_low_rank_dim": _rank(gate_low_rank_dim, 5 * hidden_size**0.5),
            "a_low_rank_dim": _rank(a_low_rank_dim, 2.5 * hidden_size**0.5 * K / 64),
            "v_low_rank_dim": _rank(v_low_rank_dim, 1.7 * hidden_size**0.5 * K / 64),
        }
        check.positive(**ranks)
        for name, rank in ranks.items():
            setattr(self, name, rank)
        factory, D = {"device": device, "dtype": dtype}, hidden_size
        for c in STREAMS:
            setattr(self, f"x_{c}", nn.Parameter(torch.empty(1, 1, D, **factory)))
        self.k_k, self.k_a = (nn.Parameter(torch.empty(D, **factory)) for _ in range(2))
        self.r_k = nn.Parameter(torch.empty(H, K, **factory))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (
            projection(*sizes, **factory)
            for sizes in ((D, D, 1.0), (D, D, 0.1), (D, E, 1.0), (E, D, 0.0))
        )
        decay, rate, mix = self._first_biases()
        self.w_lora = LoRA(D, D, self.decay_low_rank_dim, nn.Tanh(), decay, **factory)
        if layer_idx != 0:
            self.v_lora = LoRA(D, E, self.v_low_rank_dim, nn.Identity(), mix, **factory)
        self.a_lora = LoRA(D, D, self.a_low_rank_dim, nn.Identity(), rate, **factory)
        self.g_lora = LoRA(D, E, self.gate_low_rank_dim, nn.Sigmoid(), False, **factory)
        self.g_norm = HeadNorm(H, E, K * norm_eps, elementwise_affine, **factory)
        layer, layers = self.depth
        self.g_norm.first = ((layer + 1) / layers) ** 0.7
        self.g_norm.reset_parameters()
        self.reset_parameters()

    def _first_biases(self) -> tuple[Tensor, Tensor, Tensor]:
        """First biases of w_lora, a_lora and v_lora, on the CPU."""
        layer, layers = self.depth
        t = _ramp(self.hidden_size)
        m = 2 * _ramp(self.head_dim) - 1
        bend = (m * m.abs()).repeat(self.num_heads)
        power = 1 + (layer / max(layers - 1, 1)) ** 0.3
        decay = -5.5 + 6 * t**power + 2.5 * bend
        return decay, -0.39 + 0.4 * t + 0.3 * bend, 0.93 - 0.4 * _ramp(self.value_dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set x_*, k_k, k_a and r_k anew; the modules inside have functions of their own."""
        layer, layers = self.depth
        D = self.hidden_size
        n = torch.arange(D, dtype=torch.float64, device="cpu") / D
        for c, p in zip(STREAMS, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            getattr(self, f"x_{c}").copy_(1 - n ** (p * (1 - layer / layers)))
        self.k_k.copy_(0.76 - 0.1 * _ramp(D))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: CPContext | None = None,
        v_first: Tensor | None = None,
        return_v_first: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The new hidden states.

        Args:
            x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu: As in :meth:`Layer.forward`.
            cp_context: Likewise; None in the mode "fused_recurrent". The token before a rank's
                first comes from another rank.
            v_first: v of layer 0 for the same tokens ``[B, T, value_dim]``, of the dtype of the
                activations; None in layer 0. What it holds at padding is not read.
            return_v_first: Whether v_first is returned too: in layer 0 its own v.

        Returns:
            y as in :meth:`Layer.forward`, or ``(y, v_first)``.

        Raises:
            TypeError, ValueError: as :meth:`Layer.forward`; v_first does not fit, is given to layer
                0, or is not given to another.
        """
        x, padding, fill, bounds, step = self._enter(
            x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context
        )
        if self.mode == "fused_recurrent":
            check.absent("cp_context", cp_context)
        return_v_first = check.flag("return_v_first", return_v_first)
        self._check_v_first(x, v_first)
        y, v_first = self._mixed(x, padding, cache, bounds, step, v_first)
        y = filled(y, padding, fill)
        return (y, v_first) if return_v_first else y

    def _check_v_first(self, x: Tensor, v_first: Tensor | None) -> None:
        if self.layer_idx == 0:
            if v_first is not None:
                raise ValueError("v_first must be None in layer 0, which makes it, got one")
            return
        if v_first is None:
            raise ValueError(
                f"v_first must be v of layer 0 in the layer with layer_idx={self.layer_idx}, "
                "got None"
            )
        sizes = {"B": x.shape[0], "T": x.shape[1], "value_dim": self.value_dim}
        check.tensor("v_first", v_first, ("B", "T", "value_dim"), sizes)
        check.same_device(("x", x), ("v_first", v_first))
        if v_first.dtype != (dtype := activations(x.dtype, x.device)):
            raise TypeError(f"v_first must be {dtype} as the activations, got {v_first.dtype}")

    def _projection(self) -> nn.Module:
        return self.r_proj

    def _shift(
        self, x: Tensor, cache: Tensor | None, output_final_state: bool, **bounds
    ) -> tuple[Tensor, Tensor | None]:
        """The token before each of x: a short convolution of the weights 1 and 0, and its state."""
        weight = torch.zeros(self.hidden_size, 2, dtype=x.dtype, device=x.device)
        weight[:, 0] = 1
        return causal_conv1d(
            x, weight, None, None, cache, output_final_state, impl=self.impl, **bounds
        )

    def _mixed(
        self, x: Tensor, padding: Tensor | None, cache: Cache | None, bounds: dict, step: bool,
        v_first: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and v_first."""
        x = x.to(activations(x.dtype, x.device))  # the shift keeps it
        before = self._convolved(self._shift, x, cache, 0, bounds)
        xr, xw, xk, xv, xa, xg = (
            x.lerp(before, getattr(self, f"x_{c}").to(x.dtype)) for c in STREAMS
        )
        r, k, v, raw = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv), self.w_lora(xw)
        w = LEAST_DECAY * raw.to(wide(raw)).sigmoid()
        a, g = self.a_lora(xa).sigmoid(), self.g_lora(xg)
        if self.layer_idx == 0:
            v_first = v
        else:
            given = v_first if padding is None else v_first.masked_fill(padding, 0)
            v = v.lerp(given, self.v_lora(xv).sigmoid())
        heads = (self.num_heads, self.head_dim)
        z = (k * self.k_k.to(k.dtype)).unflatten(-1, heads)
        z = l2norm(z, 1e-6 if self.fuse_norm else 1e-24, impl=self.impl)
        k = k.addcmul(k * (a - 1), self.k_a.to(k.dtype))
        r, w, k, a = (y.unflatten(-1, heads) for y in (r, w, k, a))
        v = v.unflatten(-1, (self.num_heads, self.head_v_dim))
        o = self._rule(r, w, k, v, -z, z * a, cache, bounds, step)
        o = self.g_norm(o.flatten(2).flatten(0, 1)).view_as(v)
        o = o + (r * k * self.r_k.to(r.dtype)).sum(-1, keepdim=True) * v
        return self.o_proj(o.flatten(-2) * g), v_first

    def _rule(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        cache: Cache | None, bounds: dict, step: bool,
    ) -> Tensor:  # fmt: skip
        """The recurrence [B, T, H, V]; a cache's state is read and written."""
        state, keep = None if cache is None else cache.recurrent_state, cache is not None
        cu_seqlens = bounds["cu_seqlens"]
        if step or self.mode == "fused_recurrent":
            o, state = fused_recurrent_rwkv7(
                r, w, k, v, a, b, 1.0, state, keep, cu_seqlens, impl=self.impl
            )
        else:
            o, state = chunk_rwkv7(
                r, w, k, v, a, b, 1.0, state, keep, cu_seqlens, bounds["cu_seqlens_cpu"],
                safe_gate=True, lower_bound=LEAST_DECAY, cp_context=bounds["cp_context"],
                impl=self.impl,
            )  # fmt: skip
        if keep:
            cache.put(len(cache.conv_states), state)
        return o


def _heads(hidden_size: int, head_dim: int | None, num_heads: int | None) -> tuple[int, int]:
    """K and H."""
    if head_dim is None:
        if num_heads is None:
            raise ValueError("num_heads must be given where head_dim is None, got None")
        check.positive(num_heads=num_heads)
        if hidden_size % num_heads:
            raise ValueError(f"num_heads must divide hidden_size={hidden_size}, got {num_heads}")
        head_dim = hidden_size // num_heads
    check.positive({"head_dim": LARGEST[0]}, head_dim=head_dim)
    if hidden_size % head_dim:
        raise ValueError(f"head_dim must divide hidden_size={hidden_size}, got {head_dim}")
    H = hidden_size // head_dim
    if num_heads not in (None, H):
        raise ValueError(f"num_heads must be {H} for head_dim={head_dim}, or None, got {num_heads}")
    return head_dim, H


def _depth(layer_idx: int | None, num_hidden_layers: int | None) -> tuple[int, int]:
    """l and L, whose first numbers the layer has."""
    layer = 0 if layer_idx is None else layer_idx
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise ValueError(f"layer_idx must be an integer >= 0 or None, got {layer_idx!r}")
    layers = layer + 1 if num_hidden_layers is None else num_hidden_layers
    check.positive(num_hidden_layers=layers)
    if layer >= layers:
        raise ValueError(f"layer_idx must be below num_hidden_layers={layers}, got {layer_idx}")
    return layer, layers


def _rank(given: int | None, about: float) -> int:
    """A rank that is given, or the nearest multiple of 32."""
    return max(32, round(about / 32) * 32) if given is None else given


def _ramp(n: int) -> Tensor:
    """n numbers from 0 to 1, on the CPU; of one, 0.5."""
    t = torch.arange(n, dtype=torch.float64, device="cpu")
    return t / (n - 1) if n > 1 else t + 0.5
