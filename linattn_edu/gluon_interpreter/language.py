"""The names that kernels in Gluon use, each as a function of the program that runs.

`substitutes` maps what kernels import from Triton to these. What is not here is Triton's own:
layouts and dtypes, which are plain values.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from triton import language as triton_language
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper

from linattn_edu.gluon_interpreter.machine import Machine, Product
from linattn_edu.gluon_interpreter.memory import Shared, allocate
from linattn_edu.gluon_interpreter.values import (
    Block,
    Descriptor,
    Number,
    Pointer,
    block,
    raw,
    torch_dtype,
)
from linattn_edu.kernels.gluon import names

_running: list[Machine] = []  # the program that runs, last


def running() -> Machine:
    """The program that runs."""
    return _running[-1]


enter, leave = _running.append, _running.pop


# -- numbers and blocks


def program_id(axis: int) -> Number:
    return Number(running().pid)


def num_programs(axis: int) -> Number:
    return Number(running().grid)


def num_warps() -> int:
    return running().part.num_warps


def arange(start: int, end: int, layout: object = None) -> Block:
    return Block(torch.arange(start, end, dtype=torch.int32))


def full(shape: list[int], value: object, dtype: object, layout: object = None) -> Block:
    return Block(torch.full([int(x) for x in shape], raw(value), dtype=torch_dtype(dtype)))


def zeros_like(x: Block) -> Block:
    return Block(torch.zeros_like(x.data))


def to_tensor(x: object) -> object:
    return Number(x) if isinstance(x, int) else x


def where(condition: object, x: object, y: object) -> object:
    if not isinstance(condition, Block) and not any(isinstance(v, Block) for v in (x, y)):
        return block(x if condition else y)
    condition = torch.as_tensor(raw(condition))
    return block(torch.where(condition, raw(x), raw(y)))


def _of_two(name: str, of_numbers: object):
    def apply(x: object, y: object) -> object:
        if not any(isinstance(v, Block) for v in (x, y)):
            return block(of_numbers(x, y))
        x, y = (torch.as_tensor(raw(v)) for v in (x, y))
        return block(getattr(torch, name)(x, y))

    return apply


def exp2(x: Block) -> Block:
    return Block(torch.exp2(x.data))


def sum(x: Block, axis: int) -> Block:
    return Block(x.data.sum(axis))


def max(x: Block, axis: int) -> Block:
    return Block(x.data.amax(axis))


def min(x: Block, axis: int) -> Block:
    return Block(x.data.amin(axis))


def abs(x: Block) -> Block:
    return Block(x.data.abs())


def associative_scan(x: Block, axis: int, combine: object, reverse: bool = False) -> Block:
    parts = [Block(y) for y in x.data.unbind(axis)]
    places = range(len(parts))[:: -1 if reverse else 1]
    for before, i in pairwise(places):
        parts[i] = combine(parts[before], parts[i])
    return Block(torch.stack([y.data for y in parts], axis))


def reshape(x: Block, shape: list[int]) -> Block:
    return Block(x.data.reshape([int(n) for n in shape]))


def permute(x: Block, order: tuple[int, ...]) -> Block:
    return Block(x.data.permute(*order))


def split(x: Block) -> tuple[Block, Block]:
    first, second = x.data.unbind(-1)
    return Block(first), Block(second)


def convert_layout(x: Block, layout: object, assert_trivial: bool = False) -> Block:
    return Block(x.data)


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Block], dtype: object, is_pure: bool, pack: int
) -> Block:
    """The instructions in PTX that kernels here have, each on two numbers of 16 bit."""
    if (constraints, pack) != ("=r,r,r", 2):
        raise NotImplementedError(f"inline PTX with {constraints!r}, {pack} numbers at a time")
    if asm == "and.b32 $0, $1, $2;":
        x, y = (arg.data.view(torch.int16) for arg in args)
        return Block((x & y).view(torch_dtype(dtype)))
    for name, kind in {"bf16": torch.bfloat16, "f16": torch.float16}.items():
        if asm == f"cvt.rn.{name}x2.f32 $0, $2, $1;":
            return Block(args[0].data.to(kind).view(torch_dtype(dtype)))
    raise NotImplementedError(f"inline PTX {asm!r}")


def cdiv(x: int, y: int) -> Number:
    return Number(x + y - 1) // y


def static_range(*bounds: int) -> range:
    return range(*bounds)


def numbers(*bounds: int):
    """Python's range, of a kernel's integers."""
    return map(Number, range(*(int(x) for x in bounds)))


# -- global memory


def load(pointer: Pointer, mask: object = None, other: object = 0) -> object:
    at, given = pointer.places(mask)
    x = pointer.storage[at]
    if mask is not None:
        x = torch.where(given, x, torch.as_tensor(raw(other)).to(x.dtype))
    return block(x)


def store(pointer: Pointer, value: object, mask: object = None) -> None:
    at, given = pointer.places(mask)
    x = torch.as_tensor(raw(value)).to(pointer.storage.dtype).broadcast_to(at.shape)
    pointer.storage[at[given]] = x[given]


# -- shared memory and warps


def allocate_shared_memory(dtype: object, shape: list[int], layout: object) -> Shared:
    return allocate(running(), dtype, shape, layout)


def barrier() -> None:
    """A barrier of the warps of this part."""
    running().part.barrier()


def fence_async_shared() -> None:
    """What was written to shared memory through registers may be read by copies and products."""
    running().part.fence()


def warp_specialize(calls: list[tuple], warps: list[int], registers: list[int]) -> None:
    """Each function with its arguments in a part of its own; the first one in these warps."""
    running().specialize(calls, warps)


def init(bar: Shared, count: int) -> None:
    running().make_barrier(bar, count)


def expect(bar: Shared, size: int) -> None:
    """Arrive, and have the phase wait for so many bytes of copies too."""
    running().part.arrive(bar, 1, size)


def arrive(bar: Shared, *, count: int = 1) -> None:
    running().part.arrive(bar, count)


def wait(bar: Shared, phase: int, pred: object = True) -> None:
    if raw(pred):
        running().part.wait(bar, int(phase))


# -- copies


def _same(desc: Descriptor, place: Shared) -> None:
    if place.shape != desc.block_shape or place.dtype != desc.dtype:
        raise TypeError(
            f"a tile {desc.dtype}{desc.block_shape} of {desc.name} and {place.name}, "
            f"{place.dtype}{place.shape}"
        )


def async_load(desc: Descriptor, at: list, bar: Shared, place: Shared) -> None:
    """Begin to copy a tile; what hangs over an edge is 0."""
    _same(desc, place)

    def tile():
        x = torch.zeros(desc.block_shape, dtype=desc.matrix.dtype)
        inside, rows, columns = desc.parts(at)
        x[rows, columns] = inside
        return x

    running().part.load(tile, place, desc.bytes, bar)


def async_store(desc: Descriptor, at: list, place: Shared) -> None:
    """Begin to copy a tile out; what hangs over an edge is not written."""
    _same(desc, place)

    def write():
        inside, rows, columns = desc.parts(at)
        inside.copy_(place.tensor[rows, columns])

    running().part.store(write, place)


def store_wait(pendings: int) -> None:
    """Until at most so many copies out still read shared memory."""
    part = running().part
    part.finish(part.stores, pendings)


def async_read(place: Shared, pointer: Pointer, mask: object = None) -> None:
    """Begin to copy what pointers say; 0 where the mask does not hold."""
    at, given = pointer.places(mask)
    running().part.read(
        place, lambda: place.tensor.copy_(torch.where(given, pointer.storage[at], 0))
    )


def commit_group() -> None:
    """Kernels here have one group."""


def wait_group(most: int) -> None:
    running().part.wait_reads(most)


# -- products


def warpgroup_mma(a: object, b: Shared, acc: Block, *, use_acc: bool, is_async: bool) -> Block:
    """Begin a @ b, or acc + a @ b."""
    (m, k), (k_b, n) = a.shape, b.shape
    fits = k == k_b and acc.shape == [m, n] and a.dtype == b.dtype and is_async
    if not fits or a.dtype.primitive_bitwidth != 16:
        raise TypeError(f"a product of {a.dtype}{a.shape} and {b.dtype}{b.shape} for {acc.shape}")
    return running().part.multiply(a, b, acc, use_acc)


def warpgroup_mma_wait(most: int, deps: list[Block]) -> object:
    """Until at most so many products are under way; returns what of deps is there then."""
    part = running().part
    part.finish(part.products, most)
    found = [x.result if isinstance(x, Product) else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


class _Language:
    """In the place of Triton's and Gluon's language."""

    def __getattr__(self, name: str) -> object:
        return getattr(gluon_language, name)


language = _Language()
for _f in (
    program_id, num_programs, num_warps, arange, full, zeros_like, to_tensor, where, exp2, sum, max,
    min, abs, associative_scan, reshape, permute, split, convert_layout, inline_asm_elementwise,
    cdiv, static_range, load, store, allocate_shared_memory, barrier, warp_specialize,
):  # fmt: skip
    setattr(language, _f.__name__, _f)
language.maximum = _of_two("maximum", lambda x, y: x if x > y else y)
language.minimum = _of_two("minimum", lambda x, y: x if x < y else y)


def substitutes() -> dict[int, object]:
    """id of what kernels import -> what stands in its place."""
    mbarrier = SimpleNamespace(
        init=init, expect=expect, arrive=arrive, wait=wait,
        MBarrierLayout=hopper.mbarrier.MBarrierLayout,
    )  # fmt: skip
    pairs = [
        (gluon_language, language),
        (triton_language, language),
        (hopper.mbarrier, mbarrier),
        (hopper.tma, SimpleNamespace(store_wait=store_wait)),
        (hopper.async_copy, SimpleNamespace(commit_group=commit_group, wait_group=wait_group)),
        (hopper.fence_async_shared, fence_async_shared),
        (hopper.warpgroup_mma, warpgroup_mma),
        (hopper.warpgroup_mma_wait, warpgroup_mma_wait),
        (names.barrier, barrier),
        (names.async_load, async_load),
        (names.async_store, async_store),
        (names.async_read, async_read),
    ]
    return {id(real): plain for real, plain in pairs}
