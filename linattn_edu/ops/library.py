"""What the registered operators share: their arguments, how long a chunk is, where it begins."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.packing import Packing, pack


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of one of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def traced(x: Tensor) -> bool:
    """Whether x is traced or wrapped, so that only a registered operator can take it.

    Elsewhere a call without a gradient goes past PyTorch's dispatcher, which costs a short one
    much of its time.
    """
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


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
