"""Models of transformers on the operators of this library."""

import functools
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from linattn_edu.integrations import calls, rings
from linattn_edu.integrations.loan import disable, enable
from linattn_edu.ops import check

__all__ = ["disable", "enable", "undo", "use"]


class Missing:
    """In place of an attribute that was not there."""


class Held:
    """An attribute in use: what it was, what it is, and by how many uses."""

    def __init__(self, original: Any, ours: Any, impl: str) -> None:
        self.original, self.ours, self.impl, self.count = original, ours, impl, 0
        _LIVE.add(self)


class Hook:
    """A hook of ours: it calls a function with what it needs to know before the rest."""

    def __init__(self, function: Callable, known: Any) -> None:
        self.function, self.known = function, known
        _LIVE.add(self)

    def __call__(self, *args: Any) -> Any:
        return self.function(self.known, *args)


class Place(NamedTuple):
    """An attribute to replace: of a file of models, or of a layer."""

    owner: ModuleType | nn.Module
    name: str
    ours: Any
    label: str  # what it becomes, in words

    def __str__(self) -> str:
        owner = self.owner.__name__ if self.is_file else type(self.owner).__name__
        return f"{owner}.{self.name}"

    @property
    def is_file(self) -> bool:
        return isinstance(self.owner, ModuleType)


IN_USE = "_linattn_edu_in_use"  # where an owner keeps what of it is in use
MAMBA = frozenset(name for name in calls.RECURRENCES if name.startswith("mamba"))
_LOCK = threading.Lock()
# What a use has put somewhere and will take away. What is of the same kind and not here came with a
# copy of a model in use, which deepcopy and pickle make without a constructor.
_LIVE: weakref.WeakSet = weakref.WeakSet()
# The uses of each model that are not undone, for who has dropped them.
_USES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def use(model: nn.Module, *, impl: str = "auto") -> "InUse":
    """Put a model of transformers on the operators of this library, until undone.

        with use(model):
            trainer.train()

    or ``undo = use(model)`` and later ``undo()``. Layers with the gated delta rule (qwen3_next,
    qwen3_5, qwen3_5_moe, qwen4_exp, lara_mini, olmo_hybrid), with Kimi Delta Attention
    (kimi_linear, glm5_next, bailing_hybrid) and with Mamba-2 (mamba2, bamba, falcon_h1,
    granitemoehybrid, nemotron_h, zamba2) are found by the functions that they call, so that their
    subclasses and models around them (PEFT, DDP) are served too; their short convolutions and gated
    norms with them (the norms on a GPU, on a CPU with an impl named). Weights, outputs to rounding,
    and caches, but for rings (below), stay as they were. Of layers that may double beta themselves
    (olmo_hybrid) the operator is told so, ``allow_neg_eigval=True``, which in 16 bit keeps their
    outputs right and takes longer.

    Packed sequences: the boundaries that a model is called with, ``cu_seq_lens_q`` [N + 1] or
    ``seq_idx`` [1, T] (Mamba-2: [B, T]), reach convolution and recurrence, and there each sequence
    is as alone. position_ids do not: layers without softmax attention never see them.
    ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` or ``return_seq_idx=True`` gives
    boundaries.

    Softmax attention in the same model is not ours and needs boundaries of its own. With flash
    attention ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` give it
    these. With eager and SDPA attention position_ids that begin anew do, where transformers builds
    the mask from them: without attention_mask and cache, and not in granitemoehybrid, whose mask
    does not look at positions (give ``attention_mask={"full_attention": mask, "linear_attention":
    None}``, mask [1, 1, T, T] with a large negative number between sequences), nor in the indexed
    attention of glm5_next, which knows no boundaries: pack its layers of linear attention only.

    Assisted generation, which transformers refuses for these models, works in use, with an
    assistant or prompt lookup, and gives the tokens of plain generation where rounding does not
    decide. Beside each state in the cache lies a ring of the last tokens
    (:func:`linattn_edu.make_ring`, chapter 26b), from which wrong guesses are dropped: no state is
    copied or computed again. Up to 24 can be dropped at once (transformers guesses 20), more are a
    ValueError. An assistant with such layers shall be in use too, or its wrong guesses stay in its
    own states, and the next get worse. It needs transformers 5.21 or later (Python 3.11), whose
    models get the states from ``Cache.get_recurrent_state``; with an older one it stays refused, a
    ValueError that says so. transformers takes a batch of one, and models with a layer of softmax
    attention, which counts the tokens; of mamba2, whose cache has another name, it takes none. A
    cache that it returns goes on in use alone; a copy.deepcopy of it has whole states and no rings.
    On a GPU plain generation, from 5.21 on, leaves the writes of states to rings of 8 tokens too,
    in caches that it makes and does not return.

    What is replaced: from transformers 5.15 on, functions of the model's file, which serve every
    model of that file while they are in use; before, attributes of this model's layers (GDN) or
    functions of the file (Mamba-2). ``print(undo)`` lists it. Before 5.15 most layers do not hand
    boundaries on: a call with them is refused then.

    Args:
        model: A model, or any module with such layers.
        impl: "triton", "reference" or "auto", as in :func:`linattn_edu.chunk_gated_delta_rule`.

    Returns:
        An object that undoes it, when called or when its ``with`` block is left: every attribute is
        what it was before the first use that is still there. Models may be put in use and undone in
        any order, one of them several times. What someone else has replaced since is left alone,
        with a warning. A copy of a model in use (deepcopy, pickle) has our attributes of layers and
        no undo; a use of the copy and its undo take them away. Entering a ``with`` block by an
        object that is undone is a RuntimeError. Who has dropped it calls :func:`undo`.

    Raises:
        TypeError: model is no module.
        ValueError: no layer of the model is known; impl is none of the three, or another than that
            of a use of the same file that is not undone. Nothing is changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check.choice("impl", impl, ("auto", "triton", "reference"))
    with _LOCK:
        found = list(_places(model, impl))
        if not found:
            raise ValueError(
                f"model must have layers of the gated delta rule, of Kimi Delta Attention or of "
                f"Mamba-2 as transformers 4.57 to 5 has them, got {_name(model)} without one"
            )
        for place in found:
            held = _held(place.owner).get(place.name)
            if held in _LIVE and held.impl != impl:
                raise ValueError(
                    f"impl must be {held.impl!r}, that of the use of {place} which is not undone, "
                    f"got {impl!r}"
                )
        for module in model.modules():
            _drop_copied(module)
        return InUse(model, impl, found)


def undo(model: nn.Module) -> int:
    """Undo every use of a model that is not undone, the last one first; say how many there were.

    For ``use(model)`` whose result is not at hand. Warns as that does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    uses = [*_USES.get(model, ())]
    for one in reversed(uses):
        one()
    return len(uses)


class InUse:
    """A model on the operators of this library: call it, or leave its ``with`` block, to undo."""

    def __init__(self, model: nn.Module, impl: str, places: list[Place]) -> None:
        self.model, self.impl = _name(model), impl
        self.places: list[Place] = []
        self.hooks: list[RemovableHandle] = []
        self.of = weakref.ref(model)
        try:
            for hook in _hooks(model):
                self.hooks.append(hook)
            for place in places:
                _hold(place, impl)
                self.places.append(place)
            _USES.setdefault(model, []).append(self)
        except BaseException:  # an interrupt too: nothing is left half in use
            self._undo()
            raise

    def __call__(self) -> None:
        """Undo. A second call does nothing."""
        with _LOCK:
            left = self._undo()
        for name in left:  # at last: a warning may be an error
            warnings.warn(f"{name} was replaced by someone else and is left alone", stacklevel=2)

    def _undo(self) -> list[str]:
        """Undo; return the names of what someone else has replaced."""
        places, self.places = self.places, []
        hooks, self.hooks = self.hooks, []
        for hook in hooks:
            hook.remove()
        model = self.of()
        if model is not None and self in _USES.get(model, ()):
            _USES[model].remove(self)
        return [str(place) for place in places if not _release(place)]

    def __enter__(self) -> "InUse":
        if not self.places:
            raise RuntimeError(f"{self}: call use() again")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self()

    def __repr__(self) -> str:
        if not self.places:
            return f"{self.model}: undone"
        lines = [f"{self.model} on linattn_edu, impl={self.impl!r}:"]
        for is_file in (True, False):
            count: dict[str, list[str]] = {}
            for place in self.places:
                if place.is_file == is_file:
                    count.setdefault(place.owner.__name__ if is_file else str(place), []).append(
                        f"{place.name} -> {place.label}" if is_file else place.label
                    )
            for owner, names in count.items():
                if is_file:
                    lines += [f"  {owner}, for every model of this file:"]
                    lines += [f"    {name}" for name in names]
                else:
                    lines += [f"  {owner} -> {names[0]}, in {len(names)} layers of this model"]
        return "\n".join(lines)


def _held(owner: ModuleType | nn.Module) -> dict[str, Held]:
    """What of an owner is in use; the owner keeps it."""
    return vars(owner).get(IN_USE, {})


def _hold(place: Place, impl: str) -> None:
    """Replace an attribute, or count one more use of it; an exception leaves all as it was."""
    owner, name, held = place.owner, place.name, _held(place.owner)
    now, before = vars(owner).get(name, Missing), held.get(name)
    one = Held(now, place.ours, impl) if before is None else before
    original = one.original
    if now is not one.ours:  # someone else's, since
        one.original = now
    try:
        one.count += 1
        setattr(owner, IN_USE, held | {name: one})
        setattr(owner, name, one.ours)
    except BaseException:
        one.count, one.original = one.count - 1, original
        for key, value in ((name, now), (IN_USE, held or Missing)):
            if value is Missing:
                vars(owner).pop(key, None)
            else:
                vars(owner)[key] = value
        raise


def _release(place: Place) -> bool:
    """Count one use less of an attribute; after the last it is what it was, unless it is someone
    else's: whether it is not.
    """
    held = _held(place.owner)
    held[place.name].count -= 1
    return held[place.name].count > 0 or _restore(place.owner, place.name)


def _restore(owner: ModuleType | nn.Module, name: str) -> bool:
    """Make an attribute what it was, unless it is someone else's: whether it is not."""
    held = _held(owner)
    last = held.pop(name)
    if not held:
        delattr(owner, IN_USE)
    if vars(owner).get(name, Missing) is not last.ours:
        return False
    if last.original is Missing:
        delattr(owner, name)
    else:
        setattr(owner, name, last.original)
    return True


def _drop_copied(module: nn.Module) -> None:
    """Undo what a module that was copied in use brought with it."""
    for name, held in list(_held(module).items()):
        if held not in _LIVE:
            _restore(module, name)
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Hook) and hook not in _LIVE:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _name(model: nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" (model_type {kind})" if kind else "")


def _places(model: nn.Module, impl: str) -> Iterator[Place]:
    """What to replace for a model, each once."""
    seen: set[tuple[int, str]] = set()
    for layer in model.modules():
        for owner, name, ours, label in _of_layer(layer, impl):
            if (id(owner), name) not in seen:
                seen.add((id(owner), name))
                yield Place(owner, name, ours, label)
    for place in rings.places(model, impl) if seen else ():
        yield Place(*place)


def _of_layer(layer: nn.Module, impl: str) -> Iterator[tuple[Any, str, Any, str]]:
    """What to replace for a layer: owner, name, ours and its name."""
    functions = [*_attributes(layer), *_functions(layer)]
    for owner, name in functions:
        ours = calls.FUNCTIONS[name]
        if ours is calls.chunk_gated_delta_rule and _may_double(layer, owner):
            ours = calls.doubled_gated_delta_rule
        yield owner, name, _with_impl(ours, impl), ours.__name__
    for kind in type(layer).__mro__ if functions else ():
        fast = vars(kind).get("cuda_kernels_forward")
        if fast is not None:  # Mamba-2 before 5.15: take the way that calls the functions
            way, label = (
                functools.partial(calls.unfused, fast, layer),
                "cuda_kernels_forward, unfused",
            )
            yield sys.modules[kind.__module__], "is_fast_path_available", True, "True"
            yield layer, "cuda_kernels_forward", way, label
            if "cuda" not in fast.__code__.co_names:  # it runs on a CPU too
                yield layer, "torch_forward", way, label
    # norm, then gate in the delta rule; Mamba-2's the other way about
    before_gate = not any(name in MAMBA for _, name in functions)
    for norm in layer.children() if functions else ():
        if _is_gated_norm(norm):
            ours = functools.partial(calls.gated_norm, norm, before_gate, impl)
            yield norm, "forward", ours, "rms_norm_gated"


def _may_double(layer: nn.Module, owner: nn.Module | ModuleType) -> bool:
    """Whether beta comes doubled to a function of a layer, as olmo_hybrid's can; to one of a file,
    from any layer of its kind, whatever this one's flag is.
    """
    return getattr(layer, "allow_neg_eigval", False) or (
        owner is not layer and hasattr(layer, "allow_neg_eigval")
    )


def _with_impl(function: Callable, impl: str) -> Callable:
    return function if impl == "auto" else functools.partial(function, impl=impl)


def _is_gated_norm(norm: nn.Module) -> bool:
    """Whether it is the gated norm of transformers, its forward pass not replaced by others."""
    return (
        type(norm).__name__.endswith("RMSNormGated")
        and hasattr(norm, "variance_epsilon")
        and getattr(norm, "activation", "silu") in ("silu", "swish", "sigmoid")
        and ("forward" not in vars(norm) or "forward" in _held(norm))
    )


def _attributes(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Functions that a layer of transformers before 5.15 keeps itself."""
    names = calls.FUNCTIONS.keys() & vars(layer).keys()
    if names & calls.RECURRENCES.keys():
        yield from ((layer, name) for name in sorted(names))


def _functions(layer: nn.Module) -> Iterator[tuple[ModuleType, str]]:
    """Functions that the methods of a layer look up in their file."""
    for kind in type(layer).__mro__:
        if kind.__module__.startswith("linattn_edu."):
            continue  # ours already
        file = sys.modules.get(kind.__module__)
        names = (_looked_up(kind) & calls.FUNCTIONS.keys()) - vars(layer).keys()
        if file is None or not names & calls.RECURRENCES.keys():
            continue
        if "cuda_kernels_forward" not in vars(kind):  # else None or missing without the packages
            names = {name for name in names if callable(vars(file).get(name))}
        yield from ((file, name) for name in sorted(names))


def _hooks(model: nn.Module) -> Iterator[RemovableHandle]:
    """What brings boundaries of packed sequences to the layers, or refuses them."""
    add = functools.partial(nn.Module.register_forward_pre_hook, with_kwargs=True)
    old = {layer for layer in model.modules() if _before_5_15(layer)}
    if old:
        hear = {type(layer).__name__: _hears(layer) for layer in old}
        yield add(model, Hook(_refuse_boundaries, hear))
        return
    for module in model.modules():
        if type(module).__name__ == "Mamba2ForCausalLM":
            kept: dict[str, Any] = {}
            yield add(module, Hook(_keep_boundaries, kept))
            yield add(module.backbone, Hook(_give_boundaries, kept))


def _before_5_15(layer: nn.Module) -> bool:
    """Whether it is a layer that calls our functions as transformers did before 5.15."""
    fast = hasattr(layer, "cuda_kernels_forward") and any(_functions(layer))
    return fast or any(_attributes(layer))


def _hears(layer: nn.Module) -> set[str]:
    """The names of boundaries that such a layer takes to our functions."""
    read: set[Any] = set()
    for function in _decorated(type(layer).forward):
        read.update(function.__code__.co_varnames, function.__code__.co_consts)
    return {name for name in calls.BOUNDARIES if name in read}


def _keep_boundaries(kept: dict, head: nn.Module, args: tuple, kwargs: dict) -> None:
    """For the model inside a head that drops them."""
    kept.clear()
    kept.update({k: kwargs[k] for k in calls.BOUNDARIES if k in kwargs})


def _give_boundaries(
    kept: dict, backbone: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    given = kept | kwargs
    kept.clear()
    return args, given


def _refuse_boundaries(
    hear: dict[str, set[str]], model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    given = {name for name in calls.BOUNDARIES if kwargs.get(name) is not None}
    for layer, names in hear.items():
        if given and not (names and names <= given):
            raise ValueError(
                f"{' and '.join(sorted(given))} must be None"
                + (f", or come with {' and '.join(sorted(names - given))}" if names else "")
                + f": {layer} of this transformers, older than 5.15, would take packed sequences "
                f"for one"
            )


def _looked_up(kind: type) -> set[str]:
    """The global names and attributes that the methods of a class read, the constructor apart."""
    names: set[str] = set()
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name != "__init__":
            for function in _decorated(method):
                names.update(function.__code__.co_names)
    return names


def _decorated(method: Callable) -> Iterator[Callable]:
    """A function, and those that its decorators hold."""
    function = inspect.unwrap(method)
    yield function
    for cell in function.__closure__ or ():
        if inspect.isfunction(cell.cell_contents):
            yield cell.cell_contents
