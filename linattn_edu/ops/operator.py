"""One declaration an operator; the forms in which PyTorch meets it follow from it.

An operator is declared by the axes of its tensors, and completed by its composition of stages:

    twice = Operator("twice", {"x": "B T D"}, {"y": like("B T D", "x")}, stages=stages)

    @twice.forward
    def forward(stages, x): ...

    @twice.backward
    def backward(stages, dy): ...

What a function takes is told by the names of its arguments.  A call then takes one of three forms:
plain, the composition itself; eager, an autograd.Function, where a gradient is asked for or a
transform of torch.func is at work; registered with torch.library, where somebody looks on
(torch.compile, fake tensors, DTensors, a dispatch mode).  From the axes follow the shapes for
tracing, the reference's loop over packed sequences, vmap, and how DTensors may be sharded.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from linattn_edu.ops import batching, sequences, sharding
from linattn_edu.ops.ranks import Probe, Ranks, Reached, crossings
from linattn_edu.ops.tensors import (
    at_device,
    contiguous,
    contiguous_rows,
    needs_gradient,
    traced,
    transformed,
    wide,
)

# how sequences are packed -> the arguments that say it
BOUNDS = {
    None: (),
    "tokens": ("cu_seqlens",),
    "chunks": ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices"),
    "ranks": ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_plan", "cp_rows"),
}
PACKED = ("cu_seqlens", "packing")  # by which a composition says that it knows packed sequences
KNOWN = (*PACKED, "cp")  # made of the bounds


@dataclass(frozen=True)
class Output:
    """An output: its axes, whose dtype it has, and the name of its gradient."""

    axes: tuple[str, ...]
    of: tuple[str, ...]
    wide: bool
    gradient: str | None


def like(axes: str, of: str, gradient: str | None = None) -> Output:
    """An output of the dtype of a tensor."""
    return Output(tuple(axes.split()), (of,), False, gradient)


def widened(axes: str, of: str, gradient: str | None = None) -> Output:
    """An output in float32, or float64 where one of the tensors is."""
    return Output(tuple(axes.split()), tuple(of.split()), True, gradient)


class Operator:
    """An operator of the library, called with its tensors, bounds and options in this order.

    Args:
        name: Of the operator, in torch.library and in autograd's graph.
        tensors: Name -> axes, "B T H K", with "?" at the end where None may come.  B, N and T are
            the batch, the sequences and their tokens, H and HV heads, C the tokens of a chunk, NT
            the chunks, X the states that come from other ranks; "..." any axes in front.
        outputs: Name -> what `like` or `widened` give.  "final_state" is made with the option
            output_final_state alone, and is the initial_state where there are no tokens.
        stages: "reference" or "triton" -> the stages that the composition takes first.
        forward_stages: The same of the forward pass, if it has others.
        fused: The residual with which the backward pass too takes forward_stages; or the option,
            an int: how many of the two passes do, the forward pass first.
        options: Name -> type in the schema of torch.library.  "impl" is the last of all operators.
        residuals: The NamedTuple of outputs that only the backward pass and who asks for them see.
            With one, a call names in `keep` those it wants and in `save` those that the backward
            pass starts from; the others are None.
        packed: How a batch of one holds several sequences: "tokens", known to the kernels by
            cu_seqlens; "chunks", by a Packing; "ranks", as chunks, and they may go on on other
            ranks, known by a Ranks; None, not at all.
        transition: With "ranks", the axes of what takes the initial_state through a piece.
        limited: The tensor whose head size limits the tokens of a chunk.
        mutates: The tensor that is written in place.
        constants: The tensors that have no gradient, being no numbers to be changed.
        apart: The tensors whose rows, along the first axis, the stages take wherever they lie.
        flops: sizes -> operations of the matrix products, forward and backward.

    Returns of a call: the outputs, None for what was not asked for.
    """

    def __init__(
        self,
        name: str,
        tensors: dict[str, str],
        outputs: dict[str, Output],
        *,
        stages: Callable,
        forward_stages: Callable | None = None,
        fused: str | None = None,
        options: dict[str, str] | None = None,
        residuals: type | None = None,
        packed: str | None = None,
        transition: str = "",
        limited: str | None = None,
        mutates: str | None = None,
        constants: Collection[str] = (),
        apart: Collection[str] = (),
        flops: Callable | None = None,
    ):
        self.name, self.stages, self.forward_stages = name, stages, forward_stages or stages
        self.inputs = tuple(tensors)
        self.optional = {n for n, axes in tensors.items() if axes.endswith("?")}
        self.axes = {n: tuple(axes.rstrip("?").split()) for n, axes in tensors.items()}
        self.axes |= {n: out.axes for n, out in outputs.items()}
        self.outputs, self.residuals, self.flops = outputs, residuals, flops
        self.fused = fused
        self.packed, self.bounds = packed, BOUNDS[packed]
        self.matrices = len(transition.split()) > 1
        self.limited, self.mutates, self.apart = limited, mutates, apart
        self.constants = constants
        self._in_chunks = [n for n, axes in self.axes.items() if "C" in axes]
        self._programs = None  # of both passes, once there is one
        self.with_tokens = self.axes[self.inputs[0]][:2] == ("B", "T")
        group = {"group": "str"} if packed == "ranks" else {}
        self.options = {**(options or {}), **group, "impl": "str"}
        if residuals:
            self.options |= {"keep": "str", "save": "str"}
        self.names = (*self.inputs, *self.bounds, *self.options)
        self._impl = [*self.options].index("impl") - len(self.options)  # from the end
        self._asked = None
        if fused in self.options:
            self._asked = [*self.options].index(fused) - len(self.options)
        ways = {mutates: _as_it_is, **dict.fromkeys(apart, contiguous_rows)}
        self._brought = [ways.get(n, contiguous) for n in self.inputs]
        self._kept = functools.cache(self._where_kept)
        self.backward_names: tuple[str, ...] = ()

    # -- the declaration is completed

    def forward(self, f: Callable) -> Callable:
        """Take f as the forward pass; return it, made to run where its tensors are."""
        self._forward = at_device(f)
        names = self._declared(f, (*self.inputs, *self.options, *KNOWN))
        self._forward_takes = [n for n in names if n in (*self.inputs, *self.options)]
        self._forward_packs = any(n in PACKED for n in names)
        self.registered = self._register(
            self.name, self.names, self.inputs, tuple(self.outputs), self._run, self._fake
        )
        self._vmap = batching.rule(self, self._call, self.names, tuple(self.outputs), sums=False)
        self.registered.register_vmap(self._vmap)
        refuse = _refuse(f"{self.name} has no gradient")
        n = len(self.inputs)
        self._eager = _function(self.name, n, self._run, _no_setup, refuse, self._vmap)
        return self._forward

    def backward(self, f: Callable) -> Callable:
        """Take f as the backward pass, which returns a gradient for each tensor, in their order."""
        self._backward = at_device(f)
        gradients = {out.gradient: n for n, out in self.outputs.items() if out.gradient}
        saved = (*self.inputs, *self.outputs)
        known = {*saved, *gradients, *self.options, "residuals", *KNOWN}
        names = self._declared(f, known)
        self._saved = tuple(
            x for n in names for x in (self.residuals._fields if n == "residuals" else (n,))
            if x in saved
        )  # fmt: skip
        self._backward_packs = any(n in PACKED for n in names)
        self._given = tuple(d for d in gradients if d in names)
        self.axes |= {d: self.axes[n] for d, n in gradients.items()}
        self.backward_names = (*self._saved, *self.bounds, *self._given, *self.options)
        self._backward_takes = [n for n in names if n not in KNOWN]
        kept = self.residuals._fields if self.residuals else ()
        tensors = (*self._saved, *self._given)
        self._brought_back = [_there if n in kept else contiguous for n in tensors]
        self._fused_at = tensors.index(self.fused) if self.fused in tensors else None
        if self.limited and not any(n == self.limited or "C" in self.axes[n] for n in self._saved):
            raise TypeError(f"{self.name}: {f.__name__} must take {self.limited}, for its chunks")
        name, tensors = f"{self.name}_backward", (*self._saved, *self._given)
        self.registered_backward = self._register(
            name, self.backward_names, tensors, self.inputs, self._run_backward, self._fake_backward
        )
        call, names = self._call_backward, self.backward_names
        vmap = batching.rule(self, call, names, self.inputs, sums=True)
        self.registered_backward.register_vmap(vmap)
        refuse = _refuse(f"the gradient of {self.name} cannot be differentiated again")
        n = len(self.backward_names) - len(self.options)
        self._once = _function(name, n, self._run_backward, _no_setup, refuse, vmap)
        self._differentiate()
        return self._backward

    def _declared(self, f: Callable, known: Collection[str]) -> list[str]:
        """The names of f's arguments after the stages; refuse one that the declaration lacks."""
        names = list(inspect.signature(f).parameters)[1:]
        if unknown := [n for n in names if n not in known]:
            raise TypeError(f"{self.name}: nothing declares {', '.join(unknown)} of {f.__name__}")
        return names

    def adjoint(self, f: Callable) -> Callable:
        """Take f as the backward pass of a linear operator of one tensor: a call of an operator.

        f(dy, *bounds, *options) returns dx, which has gradients again.
        """
        self._saved, self._given = (), (next(iter(self.outputs.values())).gradient,)

        def call(*args):
            n = len(self.bounds)
            return (f(args[n], *args[:n], *args[n + 1 :]),)

        self._call_backward = call
        self._differentiate()
        return f

    def _differentiate(self) -> None:
        """Give the forms that autograd meets their gradients."""
        gradients = [out.gradient for out in self.outputs.values()]
        self._given_at = [gradients.index(n) for n in self._given]
        steps = self._run, self._setup, self._gradients, self._vmap
        self._eager = _function(self.name, len(self.inputs), *steps)
        self.registered.register_autograd(self._gradients, setup_context=self._setup)

    def _register(self, name, names, tensors, outputs, run, fake):
        """An operator of torch.library, which returns an empty tensor in the place of None."""
        must = set(self.inputs) - self.optional if names is self.names else {*self._given[:1]}
        parts = []
        for n in names:
            if n in tensors or n in self.bounds:
                alias = "(a0!)" if n == self.mutates else ""
                parts.append(f"Tensor{alias}{'' if n in must else '?'} {n}")
            else:
                parts.append(f"{self.options[n]} {n}")
        schema = f"({', '.join(parts)}) -> ({', '.join('Tensor' for _ in outputs)})"

        def whole(*args):
            given = dict(zip(names, args, strict=True))
            like = next(given[n] for n in tensors if given[n] is not None)
            results = tuple(like.new_empty(0) if x is None else x for x in run(*args))
            return results if len(results) > 1 else results[0]

        def shapes(*args):
            results = fake(*args)
            return results if len(results) > 1 else results[0]

        mutated = () if self.mutates is None or names is not self.names else (self.mutates,)
        registered = torch.library.custom_op(
            f"linattn_edu::{name}", whole, mutates_args=mutated, schema=schema
        )
        registered.register_fake(shapes)
        return registered

    # -- a call

    def __call__(self, *args, save: str = "") -> tuple[Tensor | None, ...]:
        """The outputs; None for what was not asked for."""
        differentiable = self._differentiable(args)
        if self.residuals:
            args = (*args, save if differentiable else "")
        return self._in_form(args, differentiable)

    def _differentiable(self, args: tuple) -> bool:
        return transformed() or needs_gradient(*args[: len(self.inputs)])

    def _call(self, *args) -> tuple[Tensor | None, ...]:
        """A call in the form that fits, with what is saved as it is."""
        return self._in_form(args, self._differentiable(args))

    def _in_form(self, args: tuple, differentiable: bool) -> tuple[Tensor | None, ...]:
        if traced(args[0]):
            if sharding.sharded(*args[: len(self.inputs)]):
                return sharding.on_shards(self, args)
            self._count_operations()
            made = self._made(dict(zip(self.names, args, strict=True)))
            results = zip(self.outputs, _several(self.registered(*args)), strict=True)
            return tuple(x if n in made else None for n, x in results)
        return self._eager(*args) if differentiable else self._run(*args)

    def _call_backward(self, *args) -> tuple[Tensor | None, ...]:
        """A backward pass in the form that fits."""
        if traced(args[len(self._saved) + len(self.bounds)]):  # the first gradient
            self._count_operations()
            return _several(self.registered_backward(*args))
        f = self._once if transformed() or torch.is_grad_enabled() else self._run_backward
        return f(*args)

    def _made(self, given: dict) -> Collection[str]:
        """The outputs that this call makes."""
        if not self.residuals and "output_final_state" not in given:
            return self.outputs
        made = set(self.outputs)
        if self.residuals:
            made -= {*self.residuals._fields} - {*f"{given['keep']} {given['save']}".split()}
        if not given.get("output_final_state", True):
            made.discard("final_state")
        return made

    # -- the composition is run

    def _run(self, *args) -> tuple[Tensor | None, ...]:
        """The forward pass; None for what is not asked for."""
        n = len(self.inputs)
        fused = self._asked is None or args[self._asked] > 0
        stages = (self.forward_stages if fused else self.stages)(args[self._impl])
        return self._planned(0, stages, args[:n], args[n : -len(self.options)], args)

    def _planned(
        self, which: int, stages, tensors: tuple, bounds: tuple, args: tuple
    ) -> tuple[Tensor | None, ...]:
        """A pass with these tensors, by the program of earlier calls of its kind, if there is."""
        options, plan = args[-len(self.options) :], None
        cut = any(x is not None for x in bounds)
        if args[self._impl] != "reference" and not transformed():
            plan = _plan()
            if self._programs is None:
                self._programs = plan.plans(), plan.plans()
            place = self._programs[which], (stages, options)
            if not cut and (program := plan.find(*place, tensors)) is not None:
                return program(*tensors)
        bring, names, compose = self._brought, (*self.inputs, *self.bounds), self._compose
        if which:
            bring, names = self._brought_back, (*self._saved, *self._given, *self.bounds)
            compose = self._compose_backward
        tensors = [f(x) for f, x in zip(bring, tensors, strict=True)]

        def composed() -> tuple[Tensor | None, ...]:
            values = (*tensors, *bounds, *options)
            return compose(stages, dict(zip((*names, *self.options), values, strict=True)))

        if plan is None:
            return composed()
        if cut:
            return plan.run_packed(tensors, composed)
        return plan.run(*place, tensors, composed)

    def _compose(self, stages, given: dict) -> tuple[Tensor | None, ...]:
        """The forward pass of contiguous tensors."""
        made = self._made(given)
        options = {n: given[n] for n in self._forward_takes}
        if "keep" in options:
            options["keep"] = tuple(n for n in self.residuals._fields if n in made)
        first, length = given[self.inputs[0]], self._length(given)
        if "chunk_size" in options:
            options["chunk_size"] = length
        alone = self._alone(given, first, length, self._forward_packs)
        ranks = self._ranks(given, first)
        if alone is None:
            options |= self._packing(given, first, length) | ({"cp": ranks} if ranks else {})
            results = _flat(self._forward(stages, **options))
        else:
            results = self._run_each(stages, given, options, [*alone], length, ranks)
        results = zip(self.outputs, results, strict=True)
        return tuple(_owned(x) if n in made else None for n, x in results)

    def _run_each(self, stages, given, options, alone, length, ranks):
        """The forward pass of each sequence by itself."""

        def own(where) -> dict:
            one = {n: _part(given[n], self.axes[n], where) for n in self.inputs}
            return options | {n: one[n] for n in self.inputs if n in options}

        made = self._made(given)
        sizes = self._sizes(given, length)
        whole = {n: self._new(n, given, sizes) if n in made else None for n in self.outputs}
        if whole.get("final_state") is not None:  # what a sequence without tokens leaves
            _fill(whole["final_state"], given["initial_state"])
        if ranks:
            _reach(ranks, lambda where, cp: self._forward(stages, **own(where), cp=cp), alone)
            given["initial_state"] = ranks.receive(stages.cp_merge, given["initial_state"])
        for where in alone:
            parts = _flat(self._forward(stages, **own(where)))
            for n, part in zip(self.outputs, parts, strict=True):
                if whole[n] is not None and part is not None:
                    _part(whole[n], self.axes[n], where).copy_(part)
        if whole.get("crossing") is not None:
            _fill(whole["crossing"], ranks.crossing)
        return tuple(whole.values())

    def _run_backward(self, *args) -> tuple[Tensor | None, ...]:
        """The backward pass: a gradient for each tensor, in its dtype; None for one not given."""
        n = len(self._saved)
        bounds = args[n : n + len(self.bounds)]
        tensors = (*args[:n], *args[n + len(bounds) : -len(self.options)])
        if self._asked is None:
            fused = self._fused_at is not None and _there(tensors[self._fused_at]) is not None
        else:
            fused = args[self._asked] > 1
        stages = (self.forward_stages if fused else self.stages)(args[self._impl])
        return self._planned(1, stages, tensors, bounds, args)

    def _compose_backward(self, stages, given: dict) -> tuple[Tensor | None, ...]:
        """The backward pass of contiguous tensors."""
        kept = self.residuals._fields if self.residuals else ()
        options = {n: given[n] for n in self._backward_takes if n != "residuals"}
        if "residuals" in self._backward_takes:
            options["residuals"] = self.residuals(*(given[n] for n in kept))
        length = self._length(given)
        if "chunk_size" in options:
            options["chunk_size"] = length
        tokens = given[self._given[0]]
        alone = self._alone(given, tokens, length, self._backward_packs)
        ranks = self._ranks(given, tokens, back=True)
        if alone is None:
            options |= self._packing(given, tokens, length) | ({"cp": ranks} if ranks else {})
            results = _several(self._backward(stages, **options))
        else:
            results = self._run_each_backward(stages, given, options, [*alone], ranks)
        return tuple(
            None if x is None or given.get(n, x) is None else x.to(given.get(n, x).dtype)
            for n, x in zip(self.inputs, results, strict=True)
        )

    def _run_each_backward(self, stages, given, options, alone, ranks):
        """The backward pass of each sequence by itself."""

        def own(where) -> dict:
            one = {n: _part(x, self.axes.get(n), where) for n, x in given.items()}
            own = options | {n: one[n] for n in (*self._saved, *self._given) if n in options}
            if "residuals" in own:
                own["residuals"] = self.residuals(*(one[n] for n in self.residuals._fields))
            return own

        sums = {n for n in self.inputs if not {"T", "N"} & {*self.axes[n]}}
        sizes = self._sizes(given, None)
        whole = {
            n: None if self._without(n, given) else self._new(n, given, sizes) for n in self.inputs
        }
        for n in sums:  # which 16 bits would round after each sequence
            whole[n] = None if whole[n] is None else whole[n].to(wide(whole[n]))
        final = self.outputs.get("final_state")
        through = final and final.gradient
        for n, x in whole.items():
            if x is not None and "T" not in self.axes[n]:  # also through a sequence without tokens
                _fill(x, given.get(through) if n == "initial_state" else None)
        if ranks:
            state = ranks.entering(given.get("crossing"), given.get("initial_state"))
            given = given | {"initial_state": state}
            _reach(ranks, lambda where, cp: self._backward(stages, **own(where), cp=cp), alone)
            given[through] = ranks.receive(stages.cp_merge_bwd, given.get(through))
        for where in alone:
            parts = self._backward(stages, **own(where))
            for n, part in zip(self.inputs, _several(parts), strict=True):
                if whole[n] is not None and n in sums:
                    whole[n] += part
                elif whole[n] is not None:
                    _part(whole[n], self.axes[n], where).copy_(part)
        return tuple(whole.values())

    def _length(self, given: dict) -> int | None:
        """Tokens of a chunk: chunk_size, or less where the kernels do not fit the GPU."""
        for n in self._in_chunks:
            if given.get(n) is not None:
                return given[n].shape[self.axes[n].index("C")]
        if self.limited is None or given["impl"] == "reference":
            return given.get("chunk_size")
        from linattn_edu.kernels.tiles import chunk_limit

        return min(given["chunk_size"], chunk_limit(given[self.limited]))

    def _packing(self, given: dict, tokens: Tensor, length: int | None) -> dict:
        """What tells the kernels where the sequences are."""
        if not self.bounds or given["cu_seqlens"] is None:
            return {}
        if self.packed == "tokens":
            return {"cu_seqlens": given["cu_seqlens"].long().contiguous()}
        bounds = (given[n] for n in BOUNDS["chunks"])
        size = given.get("chunk_size", length)
        return {"packing": sequences.packing(*bounds, tokens.shape[1], size, length)}

    def _ranks(self, given: dict, tokens: Tensor, *, back: bool = False) -> Ranks | None:
        """The exchange with other ranks, or None: no sequence goes on there."""
        if self.packed != "ranks" or given["cp_plan"] is None:
            return None
        sizes = self._sizes(given, None)
        axes = tuple(sizes[a] for a in self.axes["initial_state"][1:])
        options = {"matrices": self.matrices, "dtype": wide(tokens), "back": back}
        return Ranks(given["cp_plan"], given["cp_rows"], given["group"], axes, **options)

    def _alone(
        self, given: dict, tokens: Tensor, length: int | None, packs: bool
    ) -> Iterator | None:
        """The sequences that the stages must be given one by one; None: all at once.

        The reference knows no packing, and no stage an empty sequence.
        """
        if self.with_tokens and tokens.shape[1] == 0:
            return iter(())
        if not self.bounds or given["cu_seqlens"] is None:
            return None
        if packs and given["impl"] != "reference":
            return None
        bounds = given["cu_seqlens"], given.get("cu_seqlens_cpu"), tokens.shape[1]
        return sequences.each(sequences.bounds(*bounds), length or 1)

    # -- shapes

    def _sizes(self, given: dict, length: int | None) -> dict:
        """Axis -> size, as the tensors have it."""
        sizes = {"C": length}
        for n, x in given.items():
            axes = self.axes.get(n)
            if axes is None or x is None:
                continue
            if axes[0] == "...":
                sizes["..."], axes = x.shape[: x.ndim - len(axes) + 1], axes[1:]
            sizes |= zip(axes, x.shape[x.ndim - len(axes) :], strict=True)
        cu_seqlens = given.get("cu_seqlens")
        if "B" in sizes:
            sizes["N"] = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return sizes

    def _new(self, name: str, given: dict, sizes: dict) -> Tensor:
        """A new tensor in the place of an output, or of the gradient of a tensor."""
        axes = self.axes[name]
        if "NT" in axes:
            sizes = sizes | {"NT": self._chunks(given, sizes)}
        if "X" in axes:
            sizes = sizes | {"X": self._crossings(given["cp_plan"])}
        shape = [s for a in axes for s in (sizes[a] if a == "..." else (sizes[a],))]
        like = next(x for n, x in given.items() if n in self.axes and x is not None)
        out = self.outputs.get(name)
        if out is None:
            dtype = given[name].dtype if name in given else wide(like)
        elif out.wide:
            dtype = wide(*(given[n] for n in out.of))
        else:
            dtype = given[out.of[0]].dtype
        return like.new_empty(shape, dtype=dtype)

    def _chunks(self, given: dict, sizes: dict) -> int:
        """How many chunks there are."""
        cu_seqlens, T, C = given.get("cu_seqlens"), sizes["T"], sizes["C"]
        if cu_seqlens is None:
            return -(-T // C)
        if traced(cu_seqlens):  # as many as its numbers say
            return torch.library.get_ctx().new_dynamic_size()
        bounds = sequences.bounds(cu_seqlens, given["cu_seqlens_cpu"], T)
        return sum(chunks.stop - chunks.start for *_, chunks in sequences.each(bounds, C))

    def _crossings(self, plan: Tensor) -> int:
        """How many states come from other ranks."""
        return torch.library.get_ctx().new_dynamic_size() if traced(plan) else crossings(plan)

    def _fake(self, *args):
        given = dict(zip(self.names, args, strict=True))
        made, sizes = self._made(given), self._sizes(given, self._length(given))
        first = given[self.inputs[0]]
        return tuple(
            self._new(n, given, sizes) if n in made else first.new_empty(0) for n in self.outputs
        )

    def _fake_backward(self, *args):
        given = dict(zip(self.backward_names, args, strict=True))
        sizes, like = self._sizes(given, None), given[self._given[0]]
        return tuple(
            like.new_empty(0) if self._without(n, given) else self._new(n, given, sizes)
            for n in self.inputs
        )

    def _without(self, name: str, given: dict) -> bool:
        """Whether a tensor has no gradient: it was not given, or is a constant."""
        return name in self.constants or (name in given and given[name] is None)

    # -- autograd

    def _setup(self, ctx, inputs, output):
        made = _several(output)
        values = (*inputs, *made, None)
        kept = self._kept(inputs[-1] if self.residuals else "")
        ctx.save_for_backward(*[values[i] for i in kept])
        ctx.options = inputs[-len(self.options) :]
        ctx.dtypes = [
            None if x is None or n in self.constants else x.dtype
            for n, x in zip(self.inputs, inputs, strict=False)
        ]
        ctx.shape, ctx.dtype = made[0].shape, made[0].dtype
        outputs = zip(self.outputs.values(), made, strict=True)
        ctx.mark_non_differentiable(
            *[x for out, x in outputs if x is not None and out.gradient is None]
        )
        ctx.set_materialize_grads(False)

    def _where_kept(self, save: str) -> list[int]:
        """Where, in the arguments, the outputs and a None, that lies which is kept."""
        names = (*self.names, *self.outputs)
        dropped = {*self.residuals._fields} - {*save.split()} if self.residuals else ()
        return [-1 if n in dropped else names.index(n) for n in (*self._saved, *self.bounds)]

    def _gradients(self, ctx, *outer):
        """Gradients of the outputs -> gradients of the inputs."""
        saved = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
        given = [outer[i] for i in self._given_at]
        given = [None if x is None or not x.numel() else x for x in given]
        if given[0] is None:
            like = next(x for x in (*outer, *saved) if x is not None)
            given[0] = like.new_zeros(ctx.shape, dtype=ctx.dtype)
        results = self._call_backward(*saved, *given, *ctx.options)
        results = (
            None if dtype is None or x is None else x if x.dtype == dtype else x.to(dtype)
            for dtype, x in zip(ctx.dtypes, results, strict=True)
        )
        return *results, *[None] * (len(self.names) - len(self.inputs))

    # -- torch.utils.flop_counter

    def _count_operations(self) -> None:
        """Tell a FlopCounterMode that looks on, which has its own copy of what is registered."""
        if self.flops is None or torch.compiler.is_compiling():
            return
        for mode in _get_current_dispatch_mode_stack():
            registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if registry is not None:
                registry.update(self._counts())

    def _counts(self) -> dict:
        """Operator of torch.library -> its count of operations."""

        def count(names, which):
            def operations(*args, out_val=None, **kwargs):
                given = dict(zip(names, args, strict=True))
                sizes = self._sizes(given, self._length(given))
                return int(self.flops(sizes)[which])

            return operations

        library = torch.ops.linattn_edu
        return {
            getattr(library, self.name): count(self.names, 0),
            getattr(library, f"{self.name}_backward"): count(self.backward_names, 1),
        }


@functools.cache
def _plan():
    """What writes down calls of kernels; it needs Triton, which may be missing."""
    from linattn_edu.kernels.host import plan

    return plan


def _function(name, n, run, setup, backward, vmap) -> Callable:
    """run with a gradient, for calls that are not traced; autograd knows it by this name.

    n: how many of its arguments have gradients; autograd takes time for each that it is shown.
    """

    def both(ctx, *args):
        args = (*args[:n], *args[n])
        outputs = run(*args)
        setup(ctx, args, outputs)
        return outputs

    def back(ctx, *outer):
        return (*backward(ctx, *outer)[:n], None)

    def function(**members) -> Callable:
        members = {n: staticmethod(f) for n, f in members.items()}
        return type(name, (torch.autograd.Function,), members).apply

    # what torch.func asks for takes longer: a call binds its arguments to a signature
    split = function(
        forward=lambda *args: run(*args), setup_context=setup, backward=backward, vmap=vmap
    )
    joint = function(forward=both, backward=back)
    return lambda *args: split(*args) if transformed() else joint(*args[:n], args[n:])


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _there(x: Tensor | None) -> Tensor | None:
    """A residual; None for the empty tensor that an operator of torch.library gives for it."""
    return None if x is None or not x.numel() else contiguous(x)


def _no_setup(ctx, inputs, output):
    pass


def _refuse(message: str) -> Callable:
    def refuse(ctx, *_):
        raise RuntimeError(message)

    return refuse


def _flat(results) -> tuple[Tensor | None, ...]:
    """The outputs of a composition, whose residuals are a tuple of their own."""
    if isinstance(results, Tensor):
        return (results,)
    *first, last = results
    return (*first, *last) if isinstance(last, tuple) else tuple(results)


def _several(results) -> tuple:
    return results if isinstance(results, (tuple, list)) else (results,)


def _owned(x: Tensor | None) -> Tensor | None:
    """x, which autograd does not take for a view: else it could not be changed in place."""
    return x.data if x is not None and x._is_view() else x


def _fill(x: Tensor, value: Tensor | None) -> None:
    if value is None:
        x.zero_()
    else:
        x.copy_(value)


def _reach(ranks: Ranks, run: Callable, alone: list) -> None:
    """Gather the maps of the pieces that others need: run(where, cp) ends at the map of one."""
    places, maps = {where[0]: where for where in alone}, []
    for row in ranks.sources.tolist():
        try:
            run(places[row], Probe(ranks.transition))
        except Reached as reached:
            maps.append(reached.map)
    if not maps:
        ranks.gather(None)
        return
    ext, M = zip(*maps, strict=True)
    ranks.gather((torch.cat(ext), torch.cat(M) if ranks.transition else None))


def _part(x, axes: tuple[str, ...] | None, where: tuple[int, slice, slice]):
    """What of x belongs to a sequence; the rest as it is."""
    n, tokens, chunks = where
    if x is None or axes is None:
        return x
    if "T" in axes:
        return x[:, tokens]
    if "NT" in axes:
        return x[:, chunks]
    return x[n : n + 1] if "N" in axes else x
