"""The composition of an operator is run: all sequences at once, or one by one, or by a plan."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from linattn_edu.cp.groups import is_simulated
from linattn_edu.ops import sequences
from linattn_edu.ops.operator.declaration import BOUNDS, Declaration
from linattn_edu.ops.ranks import Probe, Ranks, Reached
from linattn_edu.ops.tensors import at_device, contiguous, contiguous_rows, transformed, wide

PACKED = ("cu_seqlens", "packing")  # by which a composition says that it knows packed sequences
KNOWN = (*PACKED, "cp")  # made of the bounds
READABLE = ("cpu",)  # devices whose numbers the host reads without waiting


class Composition(Declaration):
    """A declaration with the functions that compose its stages, and both passes as they run."""

    backward_names: tuple[str, ...] = ()
    _programs = None  # of both passes, once there is one

    def _take_forward(self, f: Callable) -> None:
        """Take f as the forward pass, made to run where its tensors are."""
        self._forward = at_device(f)
        names = self._declared(f, (*self.inputs, *self.options, *KNOWN))
        self._forward_takes = [n for n in names if n in (*self.inputs, *self.options)]
        self._forward_packs = any(n in PACKED for n in names)
        self._brought = [self._bring(n) for n in self.inputs]

    def _take_backward(self, f: Callable) -> None:
        """Take f as the backward pass; what it names is saved between the passes."""
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
        self._brought_back = [_there if n in kept else self._bring(n) for n in tensors]
        self._fused_at = tensors.index(self.fused) if self.fused in tensors else None
        if self.limited and not any(n == self.limited or "C" in self.axes[n] for n in self._saved):
            raise TypeError(f"{self.name}: {f.__name__} must take {self.limited}, for its chunks")

    def _bring(self, name: str) -> Callable:
        """What gives the stages a tensor: as it is, or a copy where they cannot read it so."""
        if name in self.mutates:
            return _as_it_is
        axes = self.apart.get(name)
        return functools.partial(contiguous_rows, axes=axes) if axes else contiguous

    def _declared(self, f: Callable, known: Collection[str]) -> list[str]:
        """The names of f's arguments after the stages; refuse one that the declaration lacks."""
        names = [n for n in [*inspect.signature(f).parameters][1:] if n not in self.lacks]
        if unknown := [n for n in names if n not in known]:
            raise TypeError(f"{self.name}: nothing declares {', '.join(unknown)} of {f.__name__}")
        return names

    # -- both passes

    def _run(self, *args) -> tuple[Tensor | None, ...]:
        """The forward pass; None for what is not asked for."""
        n = len(self.inputs)
        fused = self._asked is None or args[self._asked] > 0
        stages = (self.forward_stages if fused else self.stages)(args[self._impl])
        return self._planned(0, stages, args[:n], args[n : -len(self.options)], args)

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

    def _planned(
        self, which: int, stages, tensors: tuple, bounds: tuple, args: tuple
    ) -> tuple[Tensor | None, ...]:
        """A pass with these tensors, by the program of earlier calls of its kind, if there is."""
        options, plan = args[-len(self.options) :], None
        exchange = self._exchange(bounds, args)
        if exchange is not None and args[self._impl] != "reference" and not transformed():
            plan, (numbers, rows) = _plan(), exchange
            if self._programs is None:
                self._programs = plan.plans(), plan.plans()
            place = self._programs[which], (stages, options, numbers)
            if (program := plan.find(*place, (*tensors, *rows))) is not None:
                return program(*tensors, *rows)
        bring, names, compose = self._brought, (*self.inputs, *self.bounds), self._compose
        if which:
            bring, names = self._brought_back, (*self._saved, *self._given, *self.bounds)
            compose = self._compose_backward
        tensors = [f(x) for f, x in zip(bring, tensors, strict=True)]

        def composed() -> tuple[Tensor | None, ...]:
            values = (*tensors, *bounds, *options)
            given = dict(zip((*names, *self.options), values, strict=True))
            outputs = self.inputs if which else tuple(self.outputs)
            return self._padded(lambda given: compose(stages, given), given, outputs)

        return composed() if plan is None else plan.run(*place, (*tensors, *rows), composed)

    def _exchange(self, bounds: tuple, args: tuple) -> tuple[tuple, tuple[Tensor, ...]] | None:
        """What of the bounds tells calls apart that no program knows: the numbers of a plan and its
        rows; None: there are others, which differ from call to call.
        """
        if all(x is None for x in bounds):
            return (), ()
        if self.packed != "ranks" or any(x is not None for x in bounds[: len(BOUNDS["chunks"])]):
            return None
        plan, rows = bounds[-2:]
        if not rows.numel() or is_simulated(args[self._group]):
            return None
        return tuple(plan.tolist()), (rows,)

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
            results = self._of_inputs(self._backward(stages, **options))
        else:
            results = self._run_each_backward(stages, given, options, [*alone], ranks)
        return tuple(
            None if x is None or given.get(n, x) is None else x.to(given.get(n, x).dtype)
            for n, x in zip(self.inputs, results, strict=True)
        )

    def _of_inputs(self, results) -> tuple[Tensor | None, ...]:
        """A gradient for each input, of those that a composition returns: of all but constants."""
        names = (n for n in self.inputs if n not in self.constants)
        found = dict(zip(names, several(results), strict=True))
        return tuple(found.get(n) for n in self.inputs)

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
            parts = self._of_inputs(self._backward(stages, **own(where)))
            for n, part in zip(self.inputs, parts, strict=True):
                if whole[n] is not None and n in sums:
                    whole[n] += part
                elif whole[n] is not None:
                    _part(whole[n], self.axes[n], where).copy_(part)
        return tuple(whole.values())

    # -- where the sequences are

    def _padded(self, compose: Callable, given: dict, outputs: tuple[str, ...]) -> tuple:
        """The results of tokens that are of a sequence: those behind the last one are zero there.

        They are left out where the host knows how many there are. Elsewhere the kernels, which go
        by cu_seqlens alone, do not see them.
        """
        if not self.bounds or given["cu_seqlens"] is None:
            return compose(given)
        known = given.get("cu_seqlens_cpu")
        known = given["cu_seqlens"] if known is None else known
        axis = {n: axes.index("T") for n, axes in self.axes.items() if "T" in axes}
        T = next(x.shape[axis[n]] for n, x in given.items() if n in axis and x is not None)
        if known.device.type in READABLE:
            end = int(known[-1])
            if not 0 <= end < T:
                return compose(given)
            results = compose(
                {n: x.narrow(axis[n], 0, end) if n in axis and x is not None else x
                 for n, x in given.items()}
            )  # fmt: skip
            return tuple(
                x if x is None or n not in axis else _with_zeros(x, axis[n], T)
                for n, x in zip(outputs, results, strict=True)
            )
        results, kept = compose(given), self.residuals._fields if self.residuals else ()
        bounds = given["cu_seqlens"]
        behind = torch.arange(T, device=bounds.device) >= bounds[-1]
        for n, x in zip(outputs, results, strict=True):
            if x is not None and n in axis and n not in kept:
                x.masked_fill_(behind.view(-1, *[1] * (x.ndim - axis[n] - 1)), 0)
        return results

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
        options["kernels"] = given["impl"] != "reference"
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


@functools.cache
def _plan():
    """What writes down calls of kernels; it needs Triton, which may be missing."""
    from linattn_edu.kernels.host import plan

    return plan


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _there(x: Tensor | None) -> Tensor | None:
    """A residual; None for the empty tensor that an operator of torch.library gives for it."""
    return None if x is None or not x.numel() else contiguous(x)


def _flat(results) -> tuple[Tensor | None, ...]:
    """The outputs of a composition, whose residuals are a tuple of their own."""
    if isinstance(results, Tensor):
        return (results,)
    *first, last = results
    return (*first, *last) if isinstance(last, tuple) else tuple(results)


def several(results) -> tuple:
    return results if isinstance(results, (tuple, list)) else (results,)


def _with_zeros(x: Tensor, axis: int, T: int) -> Tensor:
    """x, with as many zeros behind it as make T tokens."""
    whole = x.new_zeros(*x.shape[:axis], T, *x.shape[axis + 1 :])
    whole.narrow(axis, 0, x.shape[axis]).copy_(x)
    return whole


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
