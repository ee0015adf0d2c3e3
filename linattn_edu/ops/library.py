"""What the registered operators share: their arguments, how long a chunk is, where it begins."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from linattn_edu.ops import check
from linattn_edu.packing import Packing, pack


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of one of the tensors, or, in forward mode, has a
    tangent of one: it is to find an operator without forward mode, and to say so.
    """
    given = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x)[1] is not None for x in given
    ):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def traced(x: Tensor) -> bool:
    """Whether somebody looks on: x is traced or wrapped, or every operator is watched.

    Only then a registered operator is called. Elsewhere PyTorch's dispatcher would cost a short
    call much of its time, and the first one the import of PyTorch's compiler.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    return _get_current_dispatch_mode() is not None


def eager(name: str, forward: Callable, setup: Callable, backward: Callable) -> Callable:
    """forward with a gradient, for calls that are not traced; autograd knows it by this name.

    setup(ctx, inputs, output) and backward(ctx, *gradients) as torch.library's register_autograd
    wants them.
    """
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
    }
    return type(name, (torch.autograd.Function,), members).apply


def form(operator: Callable, eager: Callable, plain: Callable, *tensors: Tensor | None) -> Callable:
    """Which of the three forms of an operator these tensors go through."""
    if traced(tensors[0]):
        return operator
    return eager if needs_gradient(*tensors) else plain


def once(name: str, plain: Callable) -> Callable:
    """A backward pass, for calls that are not traced, that refuses to be differentiated again."""

    def refuse(ctx, *_):
        raise RuntimeError(f"the gradient of {name} cannot be differentiated again")

    return eager(f"{name}_backward", plain, lambda ctx, inputs, output: None, refuse)


def adjoint(operator: Callable, once: Callable, plain: Callable, x: Tensor) -> Callable:
    """Which of its three forms a backward pass takes."""
    if traced(x):
        return operator
    return once if torch.is_grad_enabled() else plain


def wide(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32."""
    doubled = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if doubled else torch.float32


def contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy if it has gaps or does not start at 16 bytes on a GPU.

    Narrower loads would make another kernel than the one that was tested.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


@contextmanager
def at(x: Tensor) -> Iterator[None]:
    """x's GPU is the current one, where Triton launches, and autocast is off.

    The stages choose the precision of every product themselves.
    """
    kind = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
    with torch.cuda.device_of(x), torch.autocast(kind, enabled=False):
        yield


def at_first(f: Callable) -> Callable:
    """f(x, ...), run `at` x."""

    @functools.wraps(f)
    def wrapped(x, *args, **kwargs):
        with at(x):
            return f(x, *args, **kwargs)

    return wrapped


def chunk_length(k: Tensor, chunk_size: int, impl: str) -> int:
    """Tokens of a chunk: chunk_size, or less where the kernels do not fit the GPU."""
    if impl == "reference":
        return chunk_size
    from linattn_edu.kernels.tiles import chunk_limit

    return min(chunk_size, chunk_limit(k))


def packing(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    k: Tensor,
    chunk_size: int,
    length: int,
) -> Packing | None:
    """The Packing for chunks of `length` tokens; chunk_indices were made for chunk_size."""
    if cu_seqlens is None:
        return None
    if length != chunk_size:
        chunk_indices = None
    lengths = None
    if cu_seqlens_cpu is not None or not cu_seqlens.is_cuda or chunk_indices is None:
        known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        lengths = check.lengths("cu_seqlens", known.tolist(), k.shape[1])
        if chunk_indices is not None:
            check.chunks(chunk_indices, lengths, chunk_size)
    return pack(cu_seqlens, length, lengths=lengths, chunk_indices=chunk_indices)


def sequences(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, T: int
) -> Iterator[tuple[int, slice]]:
    """(number, tokens) of every sequence that has tokens."""
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    bounds = check.lengths("cu_seqlens", known.tolist(), T)
    for n, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            yield n, slice(begin, end)


def gradients(
    tensors: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, ...]:
    """The given gradients in the dtypes of the tensors, or new ones; empty for a None."""
    given = (None,) * len(tensors) if given is None else given
    like = [tensors[0].new_empty(0) if x is None else x for x in tensors]
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if y is None or not x.numel()
        else y.to(x.dtype)
        for x, y in zip(like, given, strict=True)
    )


def forward_by_sequence(
    run: Callable,
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    final_state: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """A forward pass that knows no packing, run(q, k, v, g, beta, initial_state), on each sequence.

    tensors: q, k, v, g, beta and the initial state. run gives o, the final state and a tuple of
    residuals, [1, T or NT, ...]. Returns the same of all sequences; the states in final_state.
    """
    *tokens, initial_state = tensors
    # what a sequence without tokens leaves
    final_state.copy_(torch.tensor(0.0) if initial_state is None else initial_state)
    parts = []
    for n, t in sequences(cu_seqlens, cu_seqlens_cpu, tokens[0].shape[1]):
        state = None if initial_state is None else initial_state[n : n + 1]
        o, S, residuals = run(*(x[:, t] for x in tokens), state)
        parts.append((o, *residuals))
        final_state[n] = S[0]
    o, *residuals = (None if x[0] is None else torch.cat(x, 1) for x in zip(*parts, strict=True))
    return o, final_state, residuals


def backward_by_sequence(
    run: Callable,
    tensors: tuple[Tensor | None, ...],
    residuals: tuple[Tensor | None, ...],
    do: Tensor,
    dht: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    length: int,
    by_chunk: tuple[int, ...] = (),
) -> tuple[Tensor, ...]:
    """The same of a backward pass, run(q, k, v, g, beta, residuals, do, dht, initial_state).

    tensors: q, k, v, g, beta, A_log, dt_bias and the initial state, whose gradients are returned.
    by_chunk: which residuals have a row for each chunk of `length` tokens, not for each token.
    """
    whole = gradients(tensors)
    initial_state = tensors[7]
    for x in whole[5:]:
        x.zero_()
    if dht is not None and initial_state is not None:  # through a sequence without tokens
        whole[7].copy_(dht)
    first = 0
    for n, t in sequences(cu_seqlens, cu_seqlens_cpu, do.shape[1]):
        chunks = slice(first, first := first - (t.start - t.stop) // length)
        inner = [
            x if x is None else x[:, chunks if i in by_chunk else t]
            for i, x in enumerate(residuals)
        ]
        state, dstate = (x if x is None else x[n : n + 1] for x in (initial_state, dht))
        one = run(*(x[:, t] for x in tensors[:5]), inner, do[:, t], dstate, state)
        for dx, part in zip(whole[:5], one[:5], strict=True):
            dx[:, t] = part
        for dx, part in zip(whole[5:7], one[5:7], strict=True):
            if part is not None:
                dx += part
        if initial_state is not None:
            whole[7][n] = one[7][0]
    return whole
