"""Argument checks of the public operators: everything that can be refused is refused here."""

import functools
import importlib.util
import math
import os
import sys
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from linattn_edu.choices import asked
from linattn_edu.ops.tensors import known

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KERNEL_FLOATS = FLOATS[1:]
INTEGERS = (torch.int32, torch.int64)
STAGES = ("triton", "reference")
IMPLS = ("auto", *STAGES)
LARGEST = sys.float_info.max


def tensor(
    name: str,
    x: object,
    shape: tuple[str, ...],
    sizes: dict[str, int],
    taken: list[tuple[str, tuple[str, ...]]] | None = None,
) -> None:
    """Check that x is a floating-point tensor of the named shape; bind or compare each size.

    `shape` names the axes ("B", "T", ...). A name met for the first time is bound in `sizes`;
    one met before must agree. taken: names and shapes of the tensors that have bound them, in
    order, so that the error can say whose size it is.
    """
    if (
        not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided
        or x.dtype not in FLOATS
    ):  # fmt: skip
        dense(name, x, f"[{', '.join(shape)}]")
    if x.ndim != len(shape):
        raise ValueError(
            f"{name} must have {len(shape)} dimensions [{', '.join(shape)}], got {x.ndim}: "
            f"{tuple(x.shape)}"
        )
    if (*map(sizes.get, shape),) == x.shape:  # at once, where all are known
        return
    for axis, size in zip(shape, x.shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            want = "[" + ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in shape) + "]"
            owner = next((n for n, axes in taken or () if axis in axes and n != name), None)
            whose = "" if owner is None else f": {axis}={sizes[axis]} is that of {owner}"
            raise ValueError(f"{name} must have shape {want}, got {tuple(x.shape)}{whose}")


def dense(name: str, x: object, shape: str) -> None:
    """Check that x is a floating-point tensor whose numbers lie in memory by strides."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {shape}, got {type(x).__name__}")
    _strided(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")


def _strided(name: str, x: Tensor) -> None:
    """Check that the numbers of x lie in memory by strides."""
    if x.is_nested:  # which has no shape to speak of
        raise TypeError(f"{name} must be a dense tensor, got a nested one")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")


def integers(name: str, x: object) -> None:
    """Check that x is a dense tensor of integers."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {got}")
    _strided(name, x)


def tokens(name: str, x: object, vocabulary: int) -> None:
    """Refuse what is no batch [B, T] of tokens; on a GPU their numbers are not looked at."""
    integers(name, x)
    if x.ndim != 2:
        raise ValueError(f"{name} must be [B, T], got {list(x.shape)}")
    if known(x) and not ((x >= 0) & (x < vocabulary)).all():
        raise ValueError(f"{name} must be in 0 to {vocabulary - 1}, got others")


def token_mask(name: str, mask: object, x: Tensor) -> None:
    """Check that mask has a number for each token of x [B, T, ...]."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor [B, T], got {type(mask).__name__}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} must have shape {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    same_device(("x", x), (name, mask))


def sequence_numbers(name: str, x: object, B: int, T: int) -> None:
    """Check that x holds an integer for each token."""
    integers(name, x)
    if x.shape != (B, T):
        raise ValueError(f"{name} must have shape [B, T] = {(B, T)}, got {tuple(x.shape)}")


def dtype(name: str, value: object) -> None:
    """Check that value is a floating-point dtype."""
    if value not in FLOATS:
        raise TypeError(f"{name} must be a floating-point dtype, got {value}")


def elements(name: str, x: object, shape: tuple[str, ...], sizes: dict[str, int]) -> Tensor:
    """x of any shape with as many elements as the named one, as a tensor of that shape."""
    wanted = [sizes[axis] for axis in shape]
    expected = ", ".join(f"{axis}={sizes[axis]}" for axis in shape)
    dense(name, x, f"[{expected}]")
    if x.numel() != math.prod(wanted):
        raise ValueError(
            f"{name} must have the elements of [{expected}], in any shape, got {tuple(x.shape)}"
        )
    return x.reshape(wanted)


def same_device(first: tuple[str, Tensor], *others: tuple[str, Tensor | None]) -> None:
    """Check that all tensors lie on the device of the first."""
    for name, x in others:
        if x is not None and x.device != first[1].device:
            raise ValueError(f"{name} must be on {first[1].device} like {first[0]}, got {x.device}")


def same_dtype(first: tuple[str, Tensor], *others: tuple[str, Tensor]) -> None:
    """Check that all tensors have the dtype of the first."""
    for name, x in others:
        if x.dtype != first[1].dtype:
            raise TypeError(f"{name} must be {first[1].dtype} like {first[0]}, got {x.dtype}")


class Tensors:
    """The tensors of a call: each is taken once, which checks all that can be said of it.

    The first gives the device of all, and the dtype of those that must be like it.

    Attributes:
        sizes: Axis -> size, as the tensors so far have it.
        first: Name of the first.  device, dtype: Of the first.
        dtypes: Of all floating-point tensors.
        taken: Names and shapes, as they were taken.
    """

    __slots__ = ("device", "dtype", "dtypes", "first", "sizes", "taken")

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.taken: list[tuple[str, tuple[str, ...]]] = []
        self.dtypes: list[torch.dtype] = []
        self.first: str | None = None

    def take(
        self,
        name: str,
        x: object,
        shape: tuple[str, ...],
        *,
        alike: bool = False,
        decay: bool = False,
        factor: bool = False,
    ) -> None:
        """Check a tensor as `tensor`; alike: of the first one's dtype; decay: nowhere positive;
        factor: from 0 to 1.
        """
        tensor(name, x, shape, self.sizes, self.taken)
        self.taken.append((name, shape))
        if self.first is None or x.device != self.device:
            self._beside(name, x)
        dtype = x.dtype
        if alike and dtype != self.dtype:
            raise TypeError(f"{name} must be {self.dtype} like {self.first}, got {dtype}")
        self.dtypes.append(dtype)
        if decay:
            log_decay(name, x)
        if factor:
            decay_factor(name, x)

    def dense(self, name: str, x: object, shape: str) -> None:
        """Check a tensor as `dense`, whose sizes are looked at elsewhere."""
        dense(name, x, shape)
        self._beside(name, x)
        self.dtypes.append(x.dtype)

    def elements(self, name: str, x: object, shape: tuple[str, ...]) -> Tensor:
        """x of any shape, as a tensor of the named one, as `elements`."""
        y = elements(name, x, shape, self.sizes)
        self._beside(name, x)
        self.dtypes.append(x.dtype)
        return y

    def integers(self, name: str, x: object) -> None:
        """Check a tensor of integers."""
        integers(name, x)
        self._beside(name, x)

    def sequence_numbers(self, name: str, x: object) -> None:
        """Check that x holds an integer for each token [B, T]."""
        sequence_numbers(name, x, self.sizes["B"], self.sizes["T"])
        self._beside(name, x)

    def boundaries(self, name: str, x: object) -> int:
        """Check a vector of boundaries; return how many sequences it bounds."""
        sequences = boundaries(name, x)
        self._beside(name, x)
        return sequences

    def _beside(self, name: str, x: Tensor) -> None:
        """Check that x lies where the first tensor does."""
        if self.first is None:
            self.first, self.device, self.dtype = name, x.device, x.dtype
        elif x.device != self.device:
            raise ValueError(f"{name} must be on {self.device} like {self.first}, got {x.device}")


def log_decay(name: str, g: Tensor) -> None:
    """Check g <= 0 where its numbers are known. NaN passes: the result shows it."""
    if known(g) and bool((g > 0).any()):
        raise ValueError(
            f"{name} must be a log decay, <= 0 everywhere, got a maximum of {g.max().item():.4g}"
        )


def decay_factor(name: str, g: Tensor) -> None:
    """Check 0 <= g <= 1 where its numbers are known. NaN passes: the result shows it."""
    if known(g) and bool(((g < 0) | (g > 1)).any()):
        raise ValueError(
            f"{name} must be a factor from 0 to 1 with gate_domain='linear', got "
            f"{g.min().item():.4g} to {g.max().item():.4g}"
        )


def head_counts(
    sizes: dict[str, int],
    names: tuple[str, str, str] = ("q", "k", "v"),
    largest: tuple[int, int] = (256, 512),
    instead: str = "",
) -> None:
    """Check B, H, HV, K, V: positive, HV a multiple of H, K and V at most the largest.  instead:
    what HV may be beside that, in the words of the refusal.
    """
    q, k, v = names
    owners = {"HV": v, "V": v}
    for axis, size in sizes.items():
        if size < 1 and axis != "T":
            raise ValueError(f"{owners.get(axis, q)} must have {axis} >= 1, got {axis}={size}")
    if sizes["HV"] % sizes["H"]:
        raise ValueError(
            f"{v} must have a multiple of {q}'s {sizes['H']} heads (HV % H == 0)"
            f"{instead}, got HV={sizes['HV']}"
        )
    for axis, name, limit in zip(("K", "V"), (f"{q} and {k}", v), largest, strict=True):
        if sizes[axis] > limit:
            raise ValueError(f"{name} must have {axis} <= {limit}, got {axis}={sizes[axis]}")


def group_count(sizes: dict[str, int]) -> None:
    """Check that H is a multiple of G, the groups of B and C."""
    if sizes["H"] % sizes["G"]:
        raise ValueError(
            f"B must have a number of groups G that divides H={sizes['H']}, got G={sizes['G']}"
        )


def number(name: str, value: object) -> float | None:
    """value, None or a finite number (of Python, of NumPy, a tensor of one), as a float."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    if not isinstance(value, (int, float)):
        value = float(value)
    if not abs(value) <= LARGEST:  # math.isfinite ends a graph where numbers are symbols
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def real(name: str, value: object) -> float:
    """value, a finite number, as a float."""
    if value is None:
        raise TypeError(f"{name} must be a number, got None")
    return number(name, value)


def positive(largest: dict[str, int] | None = None, /, **sizes: object) -> None:
    """Check that sizes are integers >= 1, and at most the largest of that name."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if largest is not None and value > (most := largest.get(name, value)):
            raise ValueError(f"{name} must be at most {most}, got {value}")


def pair(name: str, values: object) -> tuple[float, float]:
    """Two finite numbers, as floats."""
    try:
        least, largest = values
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be two numbers, got {values!r}") from None
    if least is None or largest is None:
        raise TypeError(f"{name} must be two numbers, got {values!r}")
    return number(name, least), number(name, largest)


def flag(name: str, value: object) -> bool:
    """value, True or False or a way to write them (1, 0, None), as a bool."""
    if isinstance(value, bool):
        return value
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def absent(name: str, value: object, default: object = None) -> None:
    """Check that an argument of fla-core that does not exist here has fla-core's default value."""
    if value is not default:
        raise ValueError(f"{name} is not supported: leave it out, or give {default}, got {value!r}")


def choice(name: str, value: object, allowed: tuple) -> None:
    """Check that value is one of the allowed ones, and of their type."""
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def power_of_two(name: str, value: object) -> None:
    """Check that value is 1, 2, 4, ..."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}")


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter: decided when they are first imported."""
    kernels = sys.modules.get("linattn_edu.kernels.tiles")
    if kernels is not None:
        return kernels.INTERPRETED.value
    return interpreter_wanted() and not imported_for_compilation()


def interpreter_wanted() -> bool:
    """Whether TRITON_INTERPRET is set."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def imported_for_compilation() -> bool:
    """Whether triton is loaded with its own library decorated for the compiler.

    Decorating happens at import, so a TRITON_INTERPRET set later would reach half the functions.
    """
    standard = sys.modules.get("triton.language.standard")
    return standard is not None and type(standard.cdiv).__name__ == "JITFunction"


def resolve_impl(impl: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    """Turn impl into "triton" or "reference"; a "triton" that cannot run here is a ValueError."""
    choice("impl", impl, IMPLS)
    if torch.jit.is_tracing():  # which records no kernel, and sizes as numbers
        raise RuntimeError(
            "operators of linattn_edu cannot be recorded by torch.jit.trace, whose graph would "
            "serve these numbers alone: torch.export and torch.compile can"
        )
    if impl == "reference":
        return impl
    why_not = _why_not(device, dtypes)
    if impl == "triton" and why_not:
        raise ValueError(f"impl='triton' cannot run here: {why_not}; impl='reference' can")
    return "reference" if why_not else "triton"


def has_triton() -> bool:
    """Whether triton is installed."""
    if "triton" in sys.modules:
        return sys.modules["triton"] is not None
    return _found()


@functools.cache
def _found() -> bool:
    """Looking for a package takes longer than a short kernel."""
    return importlib.util.find_spec("triton") is not None


def triton_problem() -> str | None:
    """Why Triton cannot be used here, in one sentence without a full stop; None: it can."""
    if not has_triton():
        return "the package triton is not installed"
    return _import_error()


@functools.cache
def _import_error() -> str | None:
    """What importing triton fails with; a broken installation can raise anything."""
    try:
        import triton.language  # noqa: F401
    except Exception as e:
        return f"the package triton is installed but cannot be imported ({type(e).__name__}: {e})"
    return None


def _why_not(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why the kernels cannot run, or None; in a compiled graph asked while it is traced."""
    if not has_triton():
        return triton_problem()
    if device.type == "cpu" and not interpreted():
        return "the tensors are on the CPU and TRITON_INTERPRET=1 was not set in time"
    gpu = asked() if device.type == "meta" else None
    if device.type not in ("cpu", "cuda") and gpu is None:
        return f"there is no kernel for the device {device}"
    if gpu is not None:
        capability = gpu.capability
    else:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if capability < (7, 5):
        return "the GPU is older than compute capability 7.5"
    if any(dtype not in KERNEL_FLOATS for dtype in dtypes):
        return "the kernels compute in float32 at most, and float64 was given"
    return triton_problem()


# what torch.compiler.assume_constant_result does, which imports triton when it is called: too
# early for TRITON_INTERPRET
_why_not._dynamo_marked_constant = True


def boundaries(name: str, x: object) -> int:
    """Check that x is a vector of at least two integers; return how many sequences it bounds."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape [N + 1], got {type(x).__name__}")
    if x.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    _strided(name, x)
    if x.ndim != 1 or x.shape[0] < 2:
        raise ValueError(f"{name} must have shape [N + 1] with N >= 1, got {tuple(x.shape)}")
    return x.shape[0] - 1


def lengths(name: str, bounds: list[int], T: int) -> list[int]:
    """Check that the bounds of packed sequences begin at 0, never fall and end at T or before."""
    if bounds[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {bounds[0]}")
    for n, (a, b) in enumerate(pairwise(bounds)):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {a} and then {b} at position {n + 1}")
    if bounds[-1] > T:
        raise ValueError(f"{name} must end at T={T} or before, got {bounds[-1]}")
    return bounds


def chunks(chunk_indices: Tensor, bounds: list[int], chunk_size: int) -> None:
    """Check that chunk_indices has a row for each chunk, and on the CPU that they are right."""
    counts = [-(-(b - a) // chunk_size) for a, b in pairwise(bounds)]
    if chunk_indices.shape[0] != sum(counts):
        raise ValueError(
            f"chunk_indices must have {sum(counts)} rows, one for each chunk of {chunk_size} "
            f"tokens, got {chunk_indices.shape[0]}"
        )
    if chunk_indices.device.type == "cpu":
        rows = [[n, i] for n, count in enumerate(counts) for i in range(count)]
        if chunk_indices.tolist() != rows:
            raise ValueError(
                "chunk_indices must hold the sequence of each chunk and its number in the "
                f"sequence, {rows}, got {chunk_indices.tolist()}"
            )
