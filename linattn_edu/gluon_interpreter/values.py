"""What a kernel computes with: numbers, blocks in registers, pointers and descriptors.

A block is a tensor of PyTorch that no operation changes: `x *= y` in a kernel makes another one.
Layouts are taken and forgotten, as they say where a number is and not what it is.
"""

import operator
from types import SimpleNamespace

import torch
import triton.language as tl

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMED = {
    torch_dtype: getattr(tl, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(n, n))
    for n, torch_dtype in DTYPES.items()
}


def torch_dtype(dtype: tl.dtype) -> torch.dtype:
    """PyTorch's name of a dtype of Triton."""
    return DTYPES[dtype.name]


class Number(int):
    """An integer of a kernel: // and % truncate towards zero, as on the GPU."""

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> object:
        if dtype.is_int():
            return self
        return Block(torch.tensor(int(self), dtype=torch.int32)).to(dtype, bitcast)

    def __floordiv__(self, other):
        if not isinstance(other, int):
            return NotImplemented
        quotient = abs(int(self)) // abs(int(other))
        return Number(quotient if (self < 0) == (other < 0) else -quotient)

    def __rfloordiv__(self, other):
        return Number(other) // self

    def __mod__(self, other):
        return self - self // other * other if isinstance(other, int) else NotImplemented

    def __rmod__(self, other):
        return Number(other) % self


def _stays_a_number(name):
    of_int = getattr(int, name)

    def method(self, *other):
        result = of_int(self, *other)
        return Number(result) if type(result) is int else result

    setattr(Number, name, method)


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    _stays_a_number(f"__{_name}__")
    _stays_a_number(f"__r{_name}__")
_stays_a_number("__neg__")


class Block:
    """Numbers in the registers of some warps; of no axes, a number that all of them have."""

    def __init__(self, data: torch.Tensor):
        self._data = data

    @property
    def data(self) -> torch.Tensor:
        return self._data

    @property
    def shape(self) -> list[int]:
        return [*self._data.shape]

    @property
    def dtype(self) -> tl.dtype:
        return _NAMED[self._data.dtype]

    @property
    def type(self) -> SimpleNamespace:
        """As a tensor's in a kernel: its layout, which is none here."""
        return SimpleNamespace(layout=None)

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> "Block":
        """Rounded to the nearest, ties to even; or with bitcast the same bits."""
        kind = torch_dtype(dtype)
        return Block(self.data.view(kind) if bitcast else self.data.to(kind))

    def __getitem__(self, index) -> "Block":
        return Block(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> "Block":
        return Block(-self.data)


def raw(x: object) -> object:
    """The tensor of a block; of anything else itself."""
    return x.data if isinstance(x, Block) else x


def block(x: object) -> object:
    """A block of a tensor; of no axes and integers, a Number."""
    if not isinstance(x, torch.Tensor):
        return Number(x) if type(x) is int else x
    whole = x.ndim == 0 and not x.dtype.is_floating_point and x.dtype != torch.bool
    return Number(x) if whole else Block(x)


def _operator(name, apply):
    def forward(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Block(apply(self.data, raw(other)))

    def reflected(self, other):
        return Block(apply(raw(other), self.data))

    setattr(Block, f"__{name}__", forward)
    setattr(Block, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift"):
    _operator(_name, getattr(operator, _name + "_" * (_name in ("and", "or"))))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(_name, getattr(operator, _name))
_operator("floordiv", lambda x, y: torch.div(x, y, rounding_mode="trunc"))
_operator("mod", torch.fmod)


class Pointer:
    """Places in the memory of a tensor: the tensor's storage, and a number or a block of them."""

    def __init__(self, storage: torch.Tensor, at: object):
        self.storage, self.at = storage, at
        self.dtype = SimpleNamespace(element_ty=_NAMED[storage.dtype])

    @classmethod
    def to_tensor(cls, x: torch.Tensor) -> "Pointer":
        """To the first number of x, which may be a view."""
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((size,), (1,), 0), Number(x.storage_offset()))

    def __add__(self, other) -> "Pointer":
        return Pointer(self.storage, self.at + other)

    __radd__ = __add__

    def places(self, mask: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Where it points, and where the mask holds; IndexError if that is outside."""
        at = torch.as_tensor(raw(self.at)).long()
        given = torch.as_tensor(True if mask is None else raw(mask))
        at, given = torch.broadcast_tensors(at, given)
        outside = given & ((at < 0) | (at >= len(self.storage)))
        if outside.any():
            raise IndexError(f"a pointer to place {at[outside][0]} of {len(self.storage)}")
        return at.where(given, 0), given


class Descriptor:
    """A matrix in global memory of which tiles are copied."""

    def __init__(self, name: str, x: object):
        # x: triton's TensorDescriptor of the host
        self.name, self.matrix = name, x.base
        self.block_shape, self.layout = [*x.block_shape], x.layout
        self.dtype = _NAMED[x.base.dtype]

    @property
    def bytes(self) -> int:
        """Of a tile: what a copy brings, also where the tile hangs over an edge."""
        rows, columns = self.block_shape
        return rows * columns * self.matrix.element_size()

    def parts(self, at: list) -> tuple[torch.Tensor, slice, slice]:
        """Of the tile at these coordinates what is inside the matrix, and which of its own rows and
        columns that is.
        """
        inside, own = [], []
        for start, size, whole in zip(
            map(int, at), self.block_shape, self.matrix.shape, strict=True
        ):
            first, last = max(start, 0), min(start + size, whole)
            inside.append(slice(first, max(first, last)))
            own.append(slice(first - start, max(first, last) - start))
        return self.matrix[tuple(inside)], *own
