"""What the kernels in Gluon share: products, memory, barriers, descriptors.

Gluon is Triton's lower level: layouts, shared memory, copies and waits are written out. In each of
these kernels a warp, the producer, copies chunks or tiles ahead into rings in shared memory, and
groups of four warps, the consumers, compute on them. An mbarrier says when a place is full, another
when it is empty again. A place is used over and over: a wait names the parity of its use.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from linattn_edu.kernels.gluon.layouts import MMA
from linattn_edu.kernels.gluon.names import barrier


# -- products ------------------------------------------------------------------------------------
@gluon.jit
def product(a, b, acc, use_acc: gl.constexpr = True):
    """Begin acc + a @ b, or a @ b without use_acc."""
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def products(
    a, a_low, b, b_low, acc, use_acc: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """Begin acc + (a + a_low) @ (b + b_low), or without acc; LEFT, RIGHT: who has a low one."""
    acc = product(a, b, acc, use_acc)
    if LEFT:
        acc = product(a_low, b, acc)
    return product(a, b_low, acc) if RIGHT else acc


@gluon.jit
def operand(x, dtype: gl.constexpr, mma: gl.constexpr = MMA):
    """A product's result as another's first operand: every number stays in its thread."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x in 16 bit, where the result is used in fp32 too: two numbers an instruction.

    The compiler would convert them one by one, a quarter as fast.
    """
    name: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    asm: gl.constexpr = "cvt.rn." + name + "x2.f32 $0, $2, $1;"
    bits = gl.inline_asm_elementwise(asm, "=r,r,r", [x], gl.int16, is_pure=True, pack=2)
    return bits.to(dtype, bitcast=True)


@gluon.jit
def in_halves(x, dtype: gl.constexpr):
    """x in fp32 as two numbers of 16 bit: x rounded, and what that cuts off."""
    high = rounded(x, dtype)
    return high, (x - high.to(gl.float32)).to(dtype)


@gluon.jit
def parted(x, dtype: gl.constexpr, FINE: gl.constexpr):
    """With FINE in_halves; else x rounded, twice."""
    return in_halves(x, dtype) if FINE else (x.to(dtype), x.to(dtype))


@gluon.jit
def kept(x, own):
    """x of 16 bit where `own` holds, else 0: two numbers an instruction."""
    zero = gl.full(x.shape, 0, gl.int16, x.type.layout)
    bits = gl.where(own, zero - 1, zero)
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, bits], x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def half(x, i: gl.constexpr):
    """64 of 128 columns; of 64, all."""
    return x.slice(64 * i, 64, dim=1)


# -- shared memory -------------------------------------------------------------------------------
@gluon.jit
def ring(desc, STAGES: gl.constexpr):
    """Shared memory for STAGES copies of a descriptor's tile."""
    shape: gl.constexpr = [STAGES, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def numbers(shape: gl.constexpr):
    """Shared memory for numbers in fp32 that no product reads."""
    return gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def bar(count: gl.constexpr):
    """An mbarrier for so many arrivals."""
    one = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(one, count=count)
    return one


@gluon.jit
def bars(n: gl.constexpr, count: gl.constexpr):
    """n mbarriers, each for so many arrivals."""
    several = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(several.index(i), count=count)
    return several


@gluon.jit
def bar_pairs(n: gl.constexpr, first: gl.constexpr, second: gl.constexpr):
    """Twice n mbarriers, for so many arrivals."""
    one = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    two = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(one.index(i), count=first)
        mbarrier.init(two.index(i), count=second)
    return one, two


# -- chunk-parallel stages: every so many-th item, a head of a chunk, a program ------------------
@gluon.jit
def item_at(n, H: gl.constexpr, G: gl.constexpr, items_ptr=None):
    """Of the n-th item of this program, a value head of a chunk: chunk, q/k head, value head.
    items_ptr: of `listed`, or None.
    """
    i = gl.program_id(0) + n // G * gl.num_programs(0)
    if items_ptr is not None:
        i = gl.load(items_ptr + 1 + i)
    i_h = i % H
    return i // H, i_h, i_h * G + n % G


@gluon.jit
def gates_of_item(gc_ptr, beta_ptr, n, o_t, ROW: gl.constexpr, H: gl.constexpr,
             G: gl.constexpr, BT: gl.constexpr, items_ptr=None):  # fmt: skip
    """gc and beta [BT] of the n-th item."""
    i_c, _, i_hv = item_at(n, H, G, items_ptr)
    o = (i_c * BT + o_t).to(gl.int64) * ROW + i_hv
    return gl.load(gc_ptr + o), gl.load(beta_ptr + o).to(gl.float32)


@gluon.jit
def own_sums(x):
    """What each thread sums of a row by itself: [64, 4] of x [64, 64] in a product's layout."""
    x = gl.reshape(x, [x.shape[0], 8, 4, 2])
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def beside(x_s, sums):
    """A number a row from shared memory, for own_sums."""
    return x_s.load(gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def without_last(sums):
    """own_sums, and 0 for the last row."""
    o_t = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))[:, None]
    return gl.where(o_t == sums.shape[0] - 1, 0.0, sums)


@gluon.jit
def own_dot(x, y):
    """own_sums of x * y, both in shared memory."""
    return own_sums(x.load(MMA).to(gl.float32) * y.load(MMA).to(gl.float32))


@gluon.jit
def add(x, y):
    """Of gl.associative_scan."""
    return x + y


@gluon.jit
def sum_backwards(x_s, first_s, sums_s):
    """dg in the place of dgc [64, 64]: a thread has one channel of half of the tokens.  first_s:
    the first token's gate.  sums_s: [128], to work in.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 32, 1], [1, 1, 32], [2, 1, 2], [2, 1, 0])
    ends: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.BlockedLayout([32, 1], [1, 32], [2, 2], [1, 0])
    x = gl.convert_layout(gl.reshape(x_s.load(flat), [2, 32, 64]), layout, assert_trivial=True)
    # eq:delta-dg   dg = reverse cumsum(dgc); asked for it, the compiler would turn the tile over
    b_sum = gl.sum(x, 1)[:, None, :]
    x = (b_sum - gl.associative_scan(x, 1, add)) + x
    i = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    part = gl.arange(0, 2, gl.SliceLayout(1, ends))[:, None]
    sums_s.reshape([2, 64]).store(gl.sum(gl.where(i == 0, x, 0.0), 1))
    barrier()
    rest = sums_s.slice(64, 64).load(gl.SliceLayout(0, ends))[None, :]
    x += gl.where(part == 0, rest, 0.0)[:, None, :]
    # where gate_cumsum held g at its floor, of 2^-150: of near channels only the first can be there
    shut = (first_s.load(gl.SliceLayout(0, ends))[None, :] < -149.0) & (part == 0)
    x = gl.where((i == 0) & shut[:, None, :], 0.0, x)
    x_s.store(gl.convert_layout(gl.reshape(x, [64, 64]), flat, assert_trivial=True))


# -- on the host ---------------------------------------------------------------------------------
CHUNK = 64  # tokens
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def layout_of(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def descriptor(x: Tensor | None, columns: int, rows: int = CHUNK) -> "TensorDescriptor | None":
    """Of x as a matrix, for copies of such tiles: a row is a token of x [B, T, heads, columns], or
    a key of states [B, NT, heads, K, V]; of None, None.
    """
    if x is None:
        return None
    x = x.view(-1, x.shape[-1] if x.ndim == 5 else x.shape[-2] * x.shape[-1])
    layout = layout_of(x.dtype, rows, columns)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)
