"""Rings in the caches of transformers: steps that do not write a state, guesses taken back.

A layer gets the state of its recurrence from its cache, hands it to a function, and gives the cache
what comes back as the new one. Here it is handed a :class:`State`, with which our functions find
the ring that lies beside the state in the cache.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.ops import gdn, kda, ssd
from linattn_edu.ops.ring import Ring, commit_ring, make_ring
from linattn_edu.ops.tensors import needs_gradient, wide

RING = 8  # tokens between two writes of a state where nothing is taken back
LONGEST = 32  # entries of a ring whose tokens may be taken back: more do not fit into registers
GUESSES = 24  # how many of the last tokens may be; transformers guesses 20 unless told otherwise


@dataclass(frozen=True)
class State:
    """In place of a recurrent state: where it is, and the ring of what was written since."""

    layer: "RingedLayer"
    number: int  # among the states of the layer

    def to(self, kind: Any) -> "State":
        """Itself, where a layer gives it back; a function that is not ours wants a tensor."""
        return self if isinstance(kind, torch.dtype) else self._refuse(kind)

    def _refuse(self, _: Any) -> Any:
        raise AttributeError(
            "a cache of assisted generation has rings beside its states, which use(model) knows: "
            "go on in use, or with a copy.deepcopy of the cache, whose states are whole"
        )

    __getattr__ = __getitem__ = _refuse


class RingedLayer:
    """What a layer of a cache is besides, when its recurrent states have rings.

    Without record_past a ring takes single tokens; else any, of which :meth:`crop` takes back as
    many as :data:`GUESSES`. Then the last inputs of the convolutions are kept as well.
    """

    is_compileable = False  # transformers would compile a model for it
    rings: dict[int, Ring]
    entries: dict[int, int]  # of the rings whose tokens may be taken back, on the host
    impl: str

    @property
    def is_croppable(self) -> bool:
        """What transformers asks from 5.24 on, which says no for every recurrent state."""
        return self.record_past

    def take(
        self,
        number: int,
        T: int,
        chunked: Callable[[slice, Tensor | None], tuple[Tensor, Tensor]],
        replayed: Callable[[slice, Tensor, Ring], Tensor],
        zeros: Callable[[], Tensor],
        kind: dict[str, Any],
        recorded: bool,
    ) -> Tensor:
        """The output of T tokens, which state and ring have then.

        chunked, replayed: of some of them, with the state alone, or beside its ring.  zeros: the
        state of no tokens.  kind: what make_ring is told.  recorded: a gradient is, so no ring.
        """
        some = min(T, GUESSES) if self.record_past else int(T == 1)
        first = T if recorded else T - some
        parts = []
        if first:
            self.commit()
            y, state = chunked(slice(0, first), self.recurrent_states[number])
            super().update_recurrent_state(state, number)
            parts.append(y)
        if first < T:
            if self.recurrent_states[number] is None:
                super().update_recurrent_state(zeros(), number)
            state = self.recurrent_states[number]
            ring = self._ring(number, T - first, functools.partial(make_ring, state, **kind))
            parts.append(replayed(slice(first, T), state, ring))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _ring(self, number: int, T: int, make: Callable[..., Ring]) -> Ring:
        """The ring, with room for T tokens."""
        if number not in self.rings:
            length, tokens = (LONGEST, GUESSES) if self.record_past else (RING, 1)
            self.rings[number] = make(length=length, tokens=tokens)
            self.entries[number] = 0
        ring = self.rings[number]
        if self.record_past:  # it is never so full that it would be folded whole
            count = self.entries[number]
            if count + T > ring.length:
                kept = min(count, GUESSES - T)
                _say(ring, count - kept)
                commit_ring(self.recurrent_states[number], ring, impl=self.impl)
                _say(ring, kept)
                count = kept
            self.entries[number] = count + T
        return ring

    def commit(self) -> None:
        """Bring the recurrent states up to the last token; none is taken back any more."""
        for number, ring in self.rings.items():
            commit_ring(self.recurrent_states[number], ring, impl=self.impl)
            self.entries[number] = 0

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any):
        if not isinstance(recurrent_states, State):  # else our functions have done it
            if self.record_past or state_idx in self.rings:  # crop would not take this one back
                raise ValueError(
                    "a model must get the states that have rings from cache.get_recurrent_state "
                    f"and give them back, got a {type(recurrent_states).__name__} computed beside "
                    f"the ring"
                )
            super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return recurrent_states

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        y = super().update_conv_state(conv_states, state_idx, **kwargs)
        self._keep_inputs()
        return y

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self.commit()
            self.rings.clear()  # they are too short
        super().activate_past_recording()
        self._keep_inputs()

    def _keep_inputs(self) -> None:
        """Of each convolution, those that are read when tokens are taken back; steps of one token
        shift them in place.
        """
        for i, x in self.conv_states.items() if self.record_past else ():
            if x is not None:
                more = self.conv_kernel_size[i] + GUESSES - x.shape[-1]
                self.conv_states[i] = F.pad(x, (more, 0))

    def crop(self, tokens_to_remove: int) -> None:
        if not any(self.has_previous_state.values()):
            return  # before 5.23 a layer without attention, moe or mlp, has such a place too
        states = [i for i, there in self.is_recurrent_states_initialized.items() if there]
        if -tokens_to_remove > min([GUESSES, *(self.entries.get(i, 0) for i in states)]):
            raise ValueError(
                f"at most {GUESSES} tokens can be taken back, got {-tokens_to_remove}: let "
                f"num_assistant_tokens, or prompt_lookup_num_tokens, be at most {GUESSES}, and "
                f"num_assistant_tokens_schedule 'constant'"
            )
        super().crop(tokens_to_remove)
        self._keep_inputs()
        for i, ring in self.rings.items() if tokens_to_remove else ():
            self.entries[i] += tokens_to_remove
            _say(ring, self.entries[i])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for i, ring in self.rings.items():
            rows = beam_idx.to(ring.counts.device)
            self.rings[i] = Ring(*(x.index_select(0, rows) for x in ring[:4]), *ring[4:])

    def reset(self) -> None:
        super().reset()
        self.rings.clear()
        self.entries.clear()

    def __reduce_ex__(self, protocol: int) -> tuple:
        """A copy is a layer of transformers, whose states are those after the last token."""
        self.commit()
        own = {name: x for name, x in vars(self).items() if name not in RingedLayer.__annotations__}
        return object.__new__, (type(self).__bases__[1],), own


@functools.cache
def _ringed(theirs: type) -> type:
    return type(theirs.__name__, (RingedLayer, theirs), {})


def give_rings(cache: Any, impl: str) -> None:
    """Make the layers of a cache of transformers that have recurrent states RingedLayers."""
    for n, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states") and not isinstance(layer, RingedLayer):
            kind = _ringed(type(layer))
            cache.layers[n] = ringed = kind.__new__(kind)
            vars(ringed).update(vars(layer), rings={}, entries={}, impl=impl)
            ringed._keep_inputs()
    cache.get_recurrent_state = functools.partial(get_recurrent_state, cache)


def get_recurrent_state(cache: Any, layer_idx: int, state_idx: int = 0) -> Any:
    """Of a cache with such layers."""
    state = type(cache).get_recurrent_state(cache, layer_idx, state_idx)
    layer = cache.layers[layer_idx]
    if not isinstance(layer, RingedLayer) or (state is None and not layer.record_past):
        return state
    return State(layer, state_idx)


def places(model: nn.Module, impl: str) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """What to replace of a model, that its caches of generate have rings: owner, name, ours, label.

    They need a transformers whose layers take back the inputs of convolutions, and whose models
    get the states from a method of the cache; with another its refusal says so.
    """
    file = sys.modules.get("transformers.cache_utils")
    layer = getattr(file, "LinearAttentionCacheLayerMixin", None)
    able = hasattr(layer, "activate_past_recording") and hasattr(file.Cache, "get_recurrent_state")
    for one in model.modules():
        if not (getattr(type(one), "_is_stateful", False) and hasattr(one, PREPARE)):
            continue
        found = "mamba" not in type(one).__name__.lower()  # its cache _assisted_decoding misses
        if able:
            yield one, PREPARE, functools.partial(prepare_cache, one, impl), "prepare_cache"
            if found:
                yield one, "_is_stateful", False, "False"
        elif found and hasattr(one, VALIDATE):
            yield one, VALIDATE, functools.partial(refuse_assisted, one), "refuse_assisted"


def refuse_assisted(model: nn.Module, mode: str, *more: Any) -> None:
    """A model's _validate_generation_mode, in a transformers that rings cannot serve."""
    if mode == "assisted_generation":
        raise ValueError(
            f"assisted generation of {type(model).__name__} needs transformers 5.21 or later, "
            f"whose models get the states from Cache.get_recurrent_state: in this one wrong "
            f"guesses would stay in the states"
        )
    getattr(type(model), VALIDATE)(model, mode, *more)


def prepare_cache(
    model: nn.Module, impl: str, config: Any, kwargs: dict, mode: str, *more: Any
) -> None:
    """A model's _prepare_cache_for_generation: with rings where tokens are taken back; and where
    they pay and nobody else will see the cache, whose states they leave behind.
    """
    caches = lambda: [x for name in NAMES if (x := kwargs.get(name)) is not None]
    own = not (caches() or config.return_dict_in_generate)
    getattr(type(model), PREPARE)(model, config, kwargs, mode, *more)
    for cache in caches():
        if mode == "assisted_generation" or config.is_assistant or (own and pays(cache, model)):
            give_rings(cache, impl)


def pays(cache: Any, model: nn.Module) -> bool:
    """Whether steps of one token are to leave their writes to a ring: on a GPU, whatever the batch,
    so that a sequence's tokens do not depend on it, where transformers compiles nothing.
    """
    plain = type(cache).__name__ == "DynamicCache" and not cache.offloading
    return plain and model.device.type == "cuda"


PREPARE, VALIDATE = "_prepare_cache_for_generation", "_validate_generation_mode"
NAMES = ("cache", "past_key_values", "cache_params")  # the first from transformers 5.24 on


def _say(ring: Ring, count: int) -> None:
    """Let a ring have so many entries, from its first on."""
    ring.counts[..., 1].fill_(count)
    ring.counts[..., 2].zero_()


def delta(operator: Callable, given: dict[str, Any]) -> tuple[Tensor, State]:
    """A function of the delta rule, its arguments by name: o, and the state again."""
    q, v = given["q"], given["v"]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    chunk, replay, channels = RULES[operator]
    state, names = given["initial_state"], ("q", "k", "v", "g", "beta")
    options = {n: x for n, x in given.items() if n in _known(replay)}
    cut = lambda at: options | {n: given[n][:, at] for n in names}
    o = state.layer.take(
        state.number,
        T,
        lambda at, S: chunk(**cut(at), initial_state=S, output_final_state=True),
        lambda at, S, ring: replay(**cut(at), state=S, ring=ring),
        lambda: v.new_zeros(B, HV, K, V, dtype=wide(q, v)),
        {"heads": H, "dtype": q.dtype, "channels": channels},
        needs_gradient(*(given[n] for n in names)),
    )
    return o, state


@functools.cache
def _known(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


_GDN = gdn.chunk_gated_delta_rule, gdn.replay_gated_delta_rule, False
_KDA = kda.chunk_kda, kda.replay_kda, True
RULES = {  # of an operator: in chunks, with a ring, and whether each channel has a decay
    gdn.chunk_gated_delta_rule: _GDN,
    gdn.fused_recurrent_gated_delta_rule: _GDN,
    kda.chunk_kda: _KDA,
    kda.fused_recurrent_kda: _KDA,
}


def scan(
    state: State, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 64,
    *, z: Tensor | None = None, **more: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """mamba_chunk_scan_combined with a final state: out, and the state again."""
    (N, T, H, P), (G, K) = x.shape, B.shape[2:]
    step, bias, softplus = dt, more.get("dt_bias"), bool(more.get("dt_softplus"))
    if tuple(limit := more.get("dt_limit", UNLIMITED)) != UNLIMITED:  # a ring's step knows none
        step = dt.to(wide(dt)) if bias is None else dt.to(wide(dt)) + bias
        step = (F.softplus(step) if softplus else step).clamp(*limit)
        bias, softplus = None, False
    cut = lambda at, *tokens: (y if y is None else y[:, at] for y in tokens)

    def chunked(at: slice, S: Tensor | None) -> tuple[Tensor, Tensor]:
        x_, dt_, B_, C_, z_ = cut(at, x, dt, B, C, z)
        final = more | {"z": z_, "initial_states": S, "return_final_states": True}
        return ssd.mamba_chunk_scan_combined(x_, dt_, A, B_, C_, chunk_size, **final)

    def replayed(at: slice, S: Tensor, ring: Ring) -> Tensor:
        x_, dt_, B_, C_, z_ = cut(at, x, step, B, C, z)
        return ssd.replay_selective_state_update(
            S, ring, x_, dt_, A, B_, C_, more.get("D"), z_, bias, softplus,
            impl=more.get("impl", "auto"),
        )  # fmt: skip

    out = state.layer.take(
        state.number, T, chunked, replayed,
        lambda: x.new_zeros(N, H, P, K, dtype=wide(x, dt, B)),
        {"heads": G, "dtype": B.dtype, "state_v_first": True},
        needs_gradient(x, dt, A, B, C, z, more.get("D"), bias),
    )  # fmt: skip
    return out, state


def step(
    state: State, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """selective_state_update, whose numbers of a head are expanded to its channels."""
    D, dt_bias = (y if y is None else y[:, 0] for y in (D, dt_bias))
    x, dt, B, C = (y[:, None] for y in (x, dt[..., 0], B, C))
    z = None if z is None else z[:, None]
    out, _ = scan(state, x, dt, A[:, 0, 0], B, C, z=z, D=D, dt_bias=dt_bias, **more)
    return out[:, 0]


UNLIMITED = (0.0, float("inf"))
