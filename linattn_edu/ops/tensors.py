"""Facts about tensors that decide how an operator runs: who looks on, what it computes in."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of one of the tensors, or, in forward mode, has a
    tangent of one: it is to find an operator without forward mode, and to say so.
    """
    given = [x for x in tensors if x is not None]
    if has_tangent(*given):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward mode has a tangent of one of the tensors."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x)[1] is not None for x in tensors
    )


def traced(x: Tensor) -> bool:
    """Whether somebody looks on: x is traced or wrapped, or every operator is watched.

    Wrapped are also the gradients of autograd.grad(..., is_grads_batched=True).

    Only then a registered operator is called. Elsewhere PyTorch's dispatcher would cost a short
    call much of its time, and the first one the import of PyTorch's compiler.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    mode = _get_current_dispatch_mode()
    others = mode is not None and not getattr(mode, "ours", False)
    return others or is_legacy_batchedtensor(x)


def alone() -> bool:
    """Whether nobody looks on: no trace, no mode, no transform, no tangents."""
    return not (
        torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or transformed()
        or forward_ad._current_level >= 0 or torch.jit.is_tracing()
    )  # fmt: skip


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is at work: tensors may be wrapped."""
    return torch._C._are_functorch_transforms_active()


def known(x: Tensor | None) -> bool:
    """Whether the numbers of x can be read without waiting for a device: not while it is traced."""
    if x is None or x.device.type != "cpu" or traced(x):
        return False
    return not transformed()


def wide(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32."""
    doubled = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if doubled else torch.float32


def transposed(x: Tensor | None, v_first: bool) -> Tensor | None:
    """States [..., K, V] of states [..., V, K], and the reverse; as they are without v_first."""
    return x if x is None or not v_first else x.transpose(-1, -2)


def laid_out(x: Tensor | None, v_first: bool) -> Tensor | None:
    """States as they are returned: `transposed`, without gaps."""
    return x if x is None else transposed(x, v_first).contiguous()


def in_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, T, H, ...] with as many heads: each one several times, side by side."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def in_float32(*tensors: Tensor) -> list[Tensor]:
    """Those of 16 bit in float32, for beta beyond 1 where no kernel keeps low halves."""
    return [x.float() if x.dtype.itemsize == 2 else x for x in tensors]


def contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy if it has gaps or does not start at 16 bytes on a GPU.

    Narrower loads would make another kernel than the one that was tested.
    """
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def contiguous_rows(x: Tensor | None, axes: int) -> Tensor | None:
    """x, if its rows, each its last `axes` axes, have no gaps, start at 16 bytes on a GPU, and
    follow each other at one distance, however far but not on each other, as slices of a
    projection's rows do; else as `contiguous`.
    """
    if x is None:
        return None
    size, far = 1, None
    for d in range(x.ndim - 1, -1, -1):
        if x.shape[d] == 1:
            continue
        if d < x.ndim - axes and far is None:
            far = size = max(size, x.stride(d))
        if x.stride(d) != size:
            return contiguous(x)
        size *= x.shape[d]
    unaligned = x.data_ptr() % 16 or (far or 0) * x.element_size() % 16
    return contiguous(x) if x.is_cuda and unaligned else x


# types of devices with autocast: once, because torch.compile of PyTorch 2.11 cannot ask
AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu"))
)


def at_device(f: Callable) -> Callable:
    """f(stages, x, ...), run where the GPU of x is the current one, on which Triton launches, and
    without autocast: the stages choose the precision of every product themselves.
    """

    first = list(inspect.signature(f).parameters)[1]

    @functools.wraps(f)
    def wrapped(stages, *args, **kwargs):
        x = args[0] if args else kwargs[first]
        kind = x.device.type if x.device.type in AUTOCAST else "cpu"
        here = not x.is_cuda or x.device.index == torch.cuda.current_device()
        if here and not torch.is_autocast_enabled(kind):
            return f(stages, *args, **kwargs)
        with torch.cuda.device_of(x), torch.autocast(kind, enabled=False):
            return f(stages, *args, **kwargs)

    return wrapped
