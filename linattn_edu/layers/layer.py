"""What the layers share: their arguments, their caches, their state dicts."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from linattn_edu.cp.context import CPContext
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.layers.step import Step
from linattn_edu.layers.token import together
from linattn_edu.ops import check
from linattn_edu.ops.ring import make_ring
from linattn_edu.ops.tensors import AUTOCAST, known, needs_gradient, transformed

Projected = Callable[[str], Tensor]  # name of a first projection -> the hidden states through it


class Layer(nn.Module):
    """A map of hidden states to hidden states, whose memory of earlier tokens has a fixed size.

    A subclass sets hidden_size; conv_shapes, the ``[D, W]`` of each short convolution;
    state_shape, that of the recurrent state of a sequence; first and last, the names of the modules
    that the hidden states meet first, and of the last one; and has the methods that raise
    NotImplementedError here.
    """

    first: tuple[str, ...]
    last: str

    hidden_size: int
    conv_shapes: tuple[tuple[int, int], ...]
    state_shape: tuple[int, ...]
    impl: str

    def make_cache(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ring: int | None = None,
        state_dtype: torch.dtype | None = None,
        guesses: int = 0,
    ) -> Cache:
        """States of no tokens, zero, for decoding.

        Args:
            batch_size: Sequences, at least 1.
            device: Where they lie; None: where the layer's parameters do, or, of those that
                accelerate keeps elsewhere, where it brings them.
            dtype: Of the activations; None: autocast's where it is on, else that of the parameters,
                packed ones apart. The recurrent state is float32, or float64 with float64.
            ring: How many tokens a step of one token keeps beside the recurrent state before it is
                written again, as length in :func:`make_ring`; None: each step writes it. Nearly
                half of a step's traffic is saved, and on an H100 time from 8 sequences on. y
                differs in rounding.
            state_dtype: Of the recurrent state: None is float32 (float64 with float64). float16 or
                bfloat16 are half of its memory; chapter 26 has their error, which is less with a
                ring, where they are written less often.
            guesses: How many of the last tokens :meth:`Cache.take_back` may be asked for, less than
                ring: up to so many and one more are a step, which reads the state once and writes
                the ring.

        Raises:
            TypeError: batch_size is no integer, dtype no floating-point dtype.
            ValueError: batch_size is below 1; device or dtype is None, and no parameter tells; ring
                is no length of a ring, or the layer has none; guesses are not 0 to ring - 1.
        """
        device, dtype = placed(self, self._projection(), batch_size, device, dtype)
        check_guesses(guesses, ring)
        shapes = self._cache_shapes(batch_size, guesses)
        *conv, state = (torch.zeros(s, device=device, dtype=dtype) for s in shapes)
        wide, kept, kind = _widened(dtype), None, self._ring_kind()
        if state_dtype is not None:
            check.dtype("state_dtype", state_dtype)
            if state_dtype not in _kept(wide):
                raise TypeError(f"state_dtype must be {_either(_kept(wide))}, got {state_dtype}")
        state = state.to(state_dtype or wide)
        if ring is not None and kind is None:
            raise ValueError(f"ring must be None for {type(self).__name__}, got {ring}")
        if ring is not None:
            kept = make_ring(state, **kind, length=ring, tokens=1 + guesses, dtype=dtype)
        return Cache(type(self).__name__, tuple(conv), state, kept, guesses)

    def make_step(self, cache: Cache) -> Step:
        """:class:`Step`: a function of the next token of each sequence, on a GPU a CUDA graph."""
        return Step(self, cache)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> Tensor:
        """The new hidden states.

        Args:
            x: Hidden states ``[B, T, hidden_size]``, B >= 1, in the dtype of the parameters, or
                any but float64 under autocast; another is an error of the first projection. T may
                be 0.
            attention_mask: 1 at tokens and 0 at padding ``[B, T]``, of x's tokens alone, any dtype:
                left padding, so that each row is zeros and then ones. Padding, whatever x is there,
                neither is written to a state nor read, and y is zero there: a row gives what it
                gives alone. On the CPU a mask that is no left padding is refused, as is one with
                padding after tokens of an earlier call. On a GPU, where that would wait for the
                device, and under torch.compile such a row is NaN instead, at least from there on,
                in the cache too; without a cache padding that no token follows is zero: what comes
                before it is right. With cu_seqlens or cp_context: ones alone, else NaN likewise.
            cache: Of this layer's :meth:`make_cache`, for as many sequences: x goes on from its
                states, which are then overwritten with those after x. The pieces of a sequence, of
                any lengths, one after the other give what the whole gives at once. One token (T =
                1) takes the recurrent operators, in place, without a new state. Where a gradient is
                recorded, the cache gets new states with their history, with T = 1 too: call
                ``cache.detach()`` between the pieces that a gradient shall not cross, and decode
                under ``torch.no_grad()``, or memory grows with every token. Refused inside
                activation checkpointing, which would run the layer a second time.
            cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of N sequences packed into a batch
                of one: each gives what it gives alone. A cache then has N sequences. y is zero at
                tokens behind the last of them.
            cu_seqlens_cpu: The same numbers on the CPU. Without them a cu_seqlens on a GPU is read
                once, and the call waits for the device.
            cp_context: Of :func:`build_cp_context`, where the sequences are cut over several ranks;
                x has the tokens of this rank. Not with the other arguments.

        Returns:
            y ``[B, T, hidden_size]``, in x's dtype, or under autocast in its dtype.

        Raises:
            TypeError: an argument is not of a type or dtype listed above.
            ValueError: a shape, a mask, a cache of another layer or batch size, or a combination of
                arguments does not fit, or a cache comes in a transform of torch.func or in the
                second run of activation checkpointing; the message names the argument, what was
                expected and what came. Nothing has been written by that call.
        """
        x, padding, fill, bounds, step = self._enter(
            x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context
        )
        projected = self.projected(x)
        if step and padding is None and x.shape[1] == 1:
            given = {n: projected(n) for n in self.first if n in self._modules}
            mixed = lambda: self._mixed(given.__getitem__, None, cache, bounds, True)
            y = together(self, given, cache, mixed)
        else:
            y = self._mixed(projected, padding, cache, bounds, step)
        return filled(getattr(self, self.last)(y), padding, fill)

    def _enter(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        cp_context: CPContext | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, dict, bool]:
        """What forward does first: refuse what does not fit; x with its padding filled, where that
        is and with what (:func:`filled`), the bounds for operators, and whether x is a step.
        """
        x, cu_seqlens_cpu = self._begin(x, cache, cu_seqlens, cu_seqlens_cpu, cp_context)
        packed = cu_seqlens is not None or cp_context is not None
        padding = fill = None
        if attention_mask is not None:
            padding, fill = mask_padding(attention_mask, x, cache, packed)
        elif cu_seqlens_cpu is not None and behind(cu_seqlens_cpu, x.shape[1]):
            padding = torch.arange(x.shape[1], device=x.device)[None, :, None] >= cu_seqlens[-1]
        x = filled(x, padding, fill)
        bounds = {
            "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "cp_context": cp_context,
        }  # fmt: skip
        step = cache is not None and 1 <= x.shape[1] <= 1 + cache.guesses and cu_seqlens is None
        if cache is not None:
            recorded = torch.is_grad_enabled()  # else a step does not go through the parameters
            if recorded and needs_gradient(x, *self.parameters(), *cache.states):
                step = False
            else:
                cache.own()
            if not step:
                cache.commit(self.impl)
        return x, padding, fill, bounds, step

    def projected(self, x: Tensor) -> Projected:
        """Name of a projection -> the hidden states through it."""
        return lambda name: getattr(self, name)(x)

    def _mixed(
        self,
        projected: Projected,
        padding: Tensor | None,
        cache: Cache | None,
        bounds: dict,
        step: bool,
    ) -> Tensor:
        """What the last projection takes, of hidden states that are zero at padding [B, T, 1];
        step: one token, in place.
        """
        raise NotImplementedError

    def _convolved(
        self, conv: ShortConvolution, x: Tensor, cache: Cache | None, i: int, bounds: dict
    ) -> Tensor:
        """The short convolution number i of x; its state is read and written."""
        state = None if cache is None else cache.conv_states[i]
        y, final = conv(x, cache=state, output_final_state=state is not None, **bounds)
        if state is not None and final is not state:
            cache.put(i, final)
        return y

    def _projection(self) -> nn.Module:
        """The module that the hidden states meet first."""
        raise NotImplementedError

    def _ring_kind(self) -> dict | None:
        """What :func:`make_ring` is told of the layer; None: its steps know no ring."""
        return None

    def _cache_shapes(self, N: int, guesses: int) -> list[tuple[int, ...]]:
        return [*((N, D, W + guesses) for D, W in self.conv_shapes), (N, *self.state_shape)]

    def _begin(
        self,
        x: Tensor,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        cp_context: CPContext | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Refuse what does not fit; return x and the boundaries on the CPU, read once for all
        operators of the layer.
        """
        sizes: dict[str, int] = {"hidden_size": self.hidden_size}
        check.tensor("x", x, ("B", "T", "hidden_size"), sizes)
        if cache is not None:
            N = sizes["B"] if cu_seqlens is None else check.boundaries("cu_seqlens", cu_seqlens)
            self._check_cache(x, cache, N, cp_context)
            if cu_seqlens is not None and cache.guesses:
                raise ValueError("cu_seqlens must be None with a cache of guesses, got both")
        if cu_seqlens is not None and cu_seqlens_cpu is None and cp_context is None:
            check.boundaries("cu_seqlens", cu_seqlens)
            cu_seqlens_cpu = cu_seqlens.cpu()
        elif known(cu_seqlens) and known(cu_seqlens_cpu):  # not all forms take both
            check.boundaries("cu_seqlens", cu_seqlens)
            if cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
                raise ValueError(
                    f"cu_seqlens_cpu must be cu_seqlens, {cu_seqlens}, got {cu_seqlens_cpu}"
                )
        return x, cu_seqlens_cpu

    def _check_cache(self, x: Tensor, cache: object, N: int, cp_context: CPContext | None) -> None:
        """Refuse a cache that is not this layer's, or that must not be written."""
        name = type(self).__name__
        if not isinstance(cache, Cache):
            raise TypeError(f"cache must come from {name}.make_cache, got {type(cache).__name__}")
        if cp_context is not None:
            raise ValueError("cache must be None with cp_context, got a Cache")
        if transformed():
            raise ValueError(
                "cache must be None in a transform of torch.func, whose states stay inside, "
                "got a Cache"
            )
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "cache must be None under activation checkpointing, which runs the layer again "
                "in the backward pass, on states of later tokens, got a Cache"
            )
        if cache.layer != name:
            raise ValueError(f"cache must be of a {name}, got one of a {cache.layer}")
        dtype = activations(x.dtype, x.device)
        *conv, state = self._cache_shapes(N, cache.guesses)
        wanted = [*((shape, (dtype,)) for shape in conv), (state, _kept(_widened(dtype)))]
        if len(cache.states) != len(wanted):
            raise ValueError(f"cache must have {len(wanted)} states, got {len(cache.states)}")
        for y, (shape, dtypes) in zip(cache.states, wanted, strict=True):
            if y.shape != shape:
                raise ValueError(
                    f"cache must be of a layer of these sizes and of {N} sequences, with a state "
                    f"{shape}, got {tuple(y.shape)}"
                )
            if y.dtype not in dtypes:
                wanted = _either(dtypes)
                raise TypeError(f"cache must have a state in {wanted} {shape}, got {y.dtype}")
            if not y.is_contiguous():  # else a step would fail after the states before it
                raise ValueError(
                    f"cache must have contiguous states, got strides {y.stride()} for {shape}"
                )
        check.same_device(("x", x), *(("cache", y) for y in cache.states))

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As PyTorch's, but a state dict that does not fit is refused before anything is loaded.

        Raises:
            ValueError: a parameter is missing or unknown, with strict, or has another shape; inside
                a larger model the last alone, and layers before this one are loaded then.
        """
        if strict:
            own = self.state_dict()
            missing = [f"{name} is missing" for name in own if name not in state_dict]
            self._refuse(missing + [f"{name} is unknown" for name in state_dict if name not in own])
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Called by PyTorch before the modules inside are loaded."""
        own = {prefix + name: x for name, x in self.named_parameters()}
        given = {name: state_dict[name] for name in own if name in state_dict}
        self._refuse(
            f"{name} must be a tensor, got {type(y).__name__}"
            if not isinstance(y, Tensor)
            else f"{name} must have shape {tuple(own[name].shape)}, got {tuple(y.shape)}"
            for name, y in given.items()
            if not isinstance(y, Tensor) or y.shape != own[name].shape
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _refuse(self, wrong: Iterable[str]) -> None:
        """Raise an error if anything is wrong with a state dict."""
        if said := "; ".join(wrong):
            raise ValueError(f"state_dict does not fit {type(self).__name__}: {said}")


def placed(
    module: nn.Module, first: nn.Module, batch_size: int, device, dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a cache of a module whose inputs meet `first` first; make_cache has the
    rest.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size must be an integer, got {batch_size!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, got {batch_size}")
    if dtype is not None:
        check.dtype("dtype", dtype)
    # a quantised module may have no weight, or one of integers; rates and norms may be wider
    weights = [getattr(first, "weight", None), *first.parameters(), *module.parameters()]
    weights = [x for x in weights if isinstance(x, Tensor)]
    if device is None:
        hooks = (getattr(m, "_hf_hook", None) for m in (first, module))  # accelerate's
        brought = [getattr(hook, "execution_device", None) for hook in hooks]
        found = [d for d in brought if d is not None] + [x.device for x in weights]
        if not found:
            raise ValueError("device must be given: there is no parameter whose device it could be")
        device = found[0]
    device = torch.device(device)
    if dtype is None:
        floats = [x.dtype for x in weights if x.dtype in check.FLOATS]
        if not floats:
            raise ValueError("dtype must be given: there is no parameter of a floating-point dtype")
        dtype = activations(floats[0], device)
    return device, dtype


def activations(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of what projections of this dtype give: autocast leaves float64 alone."""
    kind = device.type
    if kind not in AUTOCAST or not torch.is_autocast_enabled(kind):
        return dtype
    return dtype if dtype == torch.float64 else torch.get_autocast_dtype(kind)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _kept(wide: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of a recurrent state."""
    return (wide,) if wide == torch.float64 else (wide, torch.float16, torch.bfloat16)


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def check_guesses(guesses: object, ring: int | None) -> None:
    """Refuse guesses for which a ring has no room."""
    if isinstance(guesses, bool) or not isinstance(guesses, int) or guesses < 0:
        raise ValueError(f"guesses must be an integer >= 0, got {guesses!r}")
    if guesses and (ring is None or guesses >= ring):
        raise ValueError(f"guesses must be 0, or less than ring, got {guesses} with ring={ring}")


def check_mask(mask: object, x: Tensor, cache: Cache | None = None) -> Tensor:
    """The mask, True at tokens; refused where it is not left padding, on the CPU."""
    check.token_mask("attention_mask", mask, x)
    if known(mask):
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold zeros and ones alone")
        bad = (mask[:, 1:].bool() < mask[:, :-1].bool()).any(1).nonzero()
        if len(bad):
            raise ValueError(
                "attention_mask must be left padding, zeros and then ones, got a zero after a one "
                f"in row {bad[0].item()}"
            )
        padded = (mask == 0).any(1)
        if cache is not None and padded.any():
            bad = (_begun(cache) & padded).nonzero()
            if len(bad):
                raise ValueError(
                    "attention_mask must have no padding after a token, got a zero in row "
                    f"{bad[0].item()}, whose cache holds tokens"
                )
    return mask.bool()


def _begun(cache: Cache) -> Tensor:
    """Whether each sequence of a cache has tokens [N]."""
    numbers = [*cache.states, *([cache.ring.counts[:, 0, 0, 1:]] if cache.ring else [])]
    return torch.stack([(x != 0).flatten(1).any(1) for x in numbers]).any(0)


def mask_padding(
    mask: object, x: Tensor, cache: Cache | None, packed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Where padding is [B, T, 1], and what it becomes: 0 (None), or NaN where it may not be.

    Where the numbers of the mask are known such a mask is refused.
    """
    if packed:
        check.token_mask("attention_mask", mask, x)
        if known(mask):
            if not (mask == 1).all():
                raise ValueError(
                    "attention_mask must be ones alone with cu_seqlens or cp_context, which pack "
                    "sequences without padding"
                )
            return None, None
        wrong = ~mask.bool()[..., None]
        return wrong, x.new_zeros(wrong.shape).masked_fill(wrong, torch.nan)
    tokens = check_mask(mask, x, cache)
    padding = ~tokens[..., None]
    if known(mask):
        return padding, None
    before = tokens.cumsum(1) > 0  # a token, at or before each
    if cache is not None:
        wrong = before | _begun(cache)[:, None]
    else:  # it is in nothing where no token follows
        wrong = before & (tokens.sum(1, keepdim=True) > tokens.cumsum(1))
    wrong = padding & wrong[..., None]
    return padding, x.new_zeros(wrong.shape).masked_fill(wrong, torch.nan)


def behind(cu_seqlens_cpu: Tensor, T: int) -> bool:
    """Whether there are tokens behind the last sequence, or may be, while a graph is traced."""
    return not known(cu_seqlens_cpu) or int(cu_seqlens_cpu[-1]) < T


def filled(x: Tensor, padding: Tensor | None, fill: Tensor | None) -> Tensor:
    """x with zeros, or what there is to fill, at padding."""
    if padding is None:
        return x
    return x.masked_fill(padding, 0) if fill is None else torch.where(padding, fill.to(x.dtype), x)


@torch.no_grad()
def draw_step_bias(bias: Tensor, least: float, largest: float, floor: float) -> None:
    """Fill dt_bias so that softplus(dt_bias) is log-uniform in [least, largest], >= floor.

    The inverse of the softplus is ``s + log(1 - e^-s)``.
    """
    low, high = math.log(least), math.log(largest)
    s = torch.empty_like(bias, dtype=_widened(bias.dtype)).uniform_(low, high).exp_()
    s.clamp_(min=floor)
    bias.copy_(s + torch.log(-torch.expm1(-s)))


@torch.no_grad()
def draw_rate(A_log: Tensor, least: float, largest: float) -> None:
    """Fill A_log so that exp(A_log) is uniform in (least, largest)."""
    rate = torch.empty_like(A_log, dtype=_widened(A_log.dtype)).uniform_(least, largest)
    A_log.copy_(rate.clamp_(min=torch.finfo(rate.dtype).tiny).log())
