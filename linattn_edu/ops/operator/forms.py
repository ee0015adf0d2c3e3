"""The forms in which PyTorch meets an operator: plain, eager, registered.

Plain is the composition itself; eager, an autograd.Function, where a gradient is asked for or a
transform of torch.func is at work; registered with torch.library, where somebody looks on
(torch.compile, fake tensors, DTensors, a dispatch mode). From the axes follow the shapes for
tracing, vmap, and how DTensors may be sharded.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from linattn_edu.ops import batching, sharding
from linattn_edu.ops.operator import pieces
from linattn_edu.ops.operator.composing import Composition, several
from linattn_edu.ops.tensors import needs_gradient, traced, transformed


class Operator(Composition):
    """An operator of the library, called with its tensors, bounds and options in this order.

    Made of the arguments of :class:`Declaration`, completed by `forward` and, where it has a
    gradient, `backward` or `adjoint`.

    Returns of a call: the outputs, None for what was not asked for.
    """

    def forward(self, f: Callable) -> Callable:
        """Take f as the forward pass; return it, made to run where its tensors are."""
        self._take_forward(f)
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
        self._take_backward(f)
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
        self._kept = functools.cache(self._where_kept)
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
                alias = f"(a{self.mutates.index(n)}!)" if n in self.mutates else ""
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

        mutated = self.mutates if names is self.names else ()
        registered = torch.library.custom_op(
            f"linattn_edu::{name}", whole, mutates_args=mutated, schema=schema
        )
        registered.register_fake(shapes)
        return registered

    # -- a call

    def __call__(
        self, *args, save: str = "", every: int | None = None
    ) -> tuple[Tensor | None, ...]:
        """The outputs; None for what was not asked for.  every: as of `pieces.run`, whose results
        these are then.
        """
        if every is not None:
            return pieces.run(self, args, every, save)
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
            results = zip(self.outputs, several(self.registered(*args)), strict=True)
            return tuple(x if n in made else None for n, x in results)
        return self._eager(*args) if differentiable else self._run(*args)

    def _call_backward(self, *args) -> tuple[Tensor | None, ...]:
        """A backward pass in the form that fits."""
        if traced(args[len(self._saved) + len(self.bounds)]):  # the first gradient
            self._count_operations()
            return several(self.registered_backward(*args))
        f = self._once if transformed() or torch.is_grad_enabled() else self._run_backward
        return f(*args)

    # -- traced

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

    # -- autograd

    def _setup(self, ctx, inputs, output):
        made = several(output)
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


def _no_setup(ctx, inputs, output):
    pass


def _refuse(message: str) -> Callable:
    def refuse(ctx, *_):
        raise RuntimeError(message)

    return refuse
