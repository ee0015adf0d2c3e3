"""What the kernels in Gluon share: names that Triton has changed, products, memory, the warps that
load and store.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from linattn_edu.kernels.delta.warm_up import with_warm_up
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.tiles import sequence_of

# -- names by which Triton 3.6 to 3.9 call the same ----------------------------------------------
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name in 3.6
# copies of tiles by the copy engine, and of what pointers say; the second names are from before 3.8
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_read = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_NAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9 on


@gluon.jit
def reinterpret(x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of a whole allocation as another; from Triton 3.8 on a part of one may not be x."""
    if _NAMED:
        return x.reinterpret(dtype, shape, layout)
    else:
        return x._reinterpret(dtype, shape, layout)


# -- records --------------------------------------------------------------------------------------
def record(cls: type) -> type:
    """A class of named values that functions of a kernel hand on, made of all of them in order.

    Whatever can be an argument can be one: tensors, memory, tuples, None. Numbers are constants,
    and stay constants, as those of a tuple in a variable do not.
    """
    names = list(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if hasattr(value, "_flatten_ir") else gl.constexpr(value))

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return _aggregate(cls)


@record
class Chunks:
    """The chunks of a sequence that a scan goes through: a warp loads them, others compute."""

    descs: object  # of tensors, in the order in which they are needed
    columns: object  # where the columns of each begin
    rings: object  # of each, the places [STAGES, BT, columns]
    gates: object  # [3 * STAGES, 64] in fp32: three vectors a place
    full: object  # [STAGES, 1] mbarriers: the copies have come to a place, and the gates
    empty: object  # [STAGES, 1] mbarriers: no warp reads a place any more
    first: object  # row of the first token
    NT: object  # chunks
    BYTES: object  # of a chunk's copies
    BT: object
    STAGES: object
    BACK: object  # the last chunk first


@record
class Results:
    """What a group of warps makes of each chunk, and another warp copies out."""

    S_desc: object  # [rows, V], a row a key
    descs: object  # of what else there is, a row a token
    halves: object  # S, or its gradient, in halves of 64 keys
    others: object  # what else there is
    bars: object  # [4, 1] mbarriers: see store_chunks
    row: object  # of the state of the first chunk
    c_S: object  # columns, of the state and of the others
    c_v: object
    skip: object  # chunks that come first and are not copied out
    HV: object
    K: object


@record
class State:
    """Which S [K, BV], or gradient of one, a group of warps has."""

    first_ptr: object  # [N, HV, K, V] or None: what it begins with
    last_ptr: object  # [N, HV, K, V] or None: what it ends with
    i_nh: object  # piece and head with which it begins
    i_end: object  # the same at the end; -1: another program goes through it
    i_v: object  # first tile of values of the program
    W: object  # the group's among them
    K: object
    V: object
    BV: object


# -- products ------------------------------------------------------------------------------------
@gluon.jit
def product(a, b, acc, use_acc: gl.constexpr = True):
    """Begin acc + a @ b, or a @ b without use_acc."""
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def operand(x, dtype: gl.constexpr, mma: gl.constexpr):
    """A product's result as another's first operand: every number stays in its thread."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def half(x, i: gl.constexpr):
    """64 of 128 columns; of 64, all."""
    return x.slice(64 * i, 64, dim=1)


@gluon.jit
def keys_times_state(b_h1, b_h2, k, zero, K: gl.constexpr):
    """Begin (K S)^T, from S^T in halves of 64 keys; with K = 64 b_h2 is not read."""
    b_W = product(b_h1, half(k, 0).permute((1, 0)), zero, False)
    if K == 128:
        b_W = product(b_h2, half(k, 1).permute((1, 0)), b_W)
    return b_W


# -- shared memory -------------------------------------------------------------------------------
@gluon.jit
def ring(desc, STAGES: gl.constexpr):
    """Shared memory for STAGES copies of a descriptor's tile."""
    shape: gl.constexpr = [STAGES, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def places(STAGES: gl.constexpr, WORKERS: gl.constexpr):
    """Barriers of the places in a ring, full and empty."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # the copies have come, and the gates
        mbarrier.init(empty.index(i), count=WORKERS)
    return full, empty


@gluon.jit
def results():
    """Barriers of what a group of warps has made, see store_chunks."""
    out = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(out.index(i), count=1)
    return out


@gluon.jit
def hand_over(bar):
    """What the warps have written to shared memory is there for the warp that waits at bar."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def store_transposed(x, shared):
    """A result x^T into shared memory."""
    shared.permute((1, 0)).store(x)


# -- scans: a piece of a sequence a program, a chunk after the other -----------------------------
@gluon.jit
def piece_of_program(pid, warmup_ptr, cu_ptr, offsets_ptr, T, N, H: gl.constexpr, HV: gl.constexpr,
        V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, BACK: gl.constexpr):  # fmt: skip
    """What program pid goes through: a piece, or by warmup_ptr more, or nothing.

    Returns the tile of values, the head, its head of keys, the piece and head with which it begins
    and with which it ends (-1: another program goes through it), the first row, the number of the
    first chunk, the chunks, and those at whose end nothing is stored.
    """
    NV: gl.constexpr = V // BV
    i_v, i_nh = pid % NV, pid // NV
    i_h, skip, i_end = i_nh % HV, 0, i_nh
    first, n_t, i_c = sequence_of(i_nh // HV, cu_ptr, offsets_ptr, T, BT)
    if warmup_ptr is not None:
        first, n_t, i_c, skip, i_end = with_warm_up(
            i_nh, first, n_t, i_c, warmup_ptr, cu_ptr, T, N, HV, BT, BACK
        )
    first, i_c = first.to(gl.int32), i_c.to(gl.int32)  # rows of descriptors
    return i_v, i_h, i_h // (HV // H), i_nh, i_end, first, i_c, n_t // BT, skip


@gluon.jit
def rows_of(state, mma: gl.constexpr):
    """Where the numbers of S^T [BV, 64] are in S."""
    BV: gl.constexpr = state.BV
    o_v = (state.i_v + state.W) * BV + gl.arange(0, BV, gl.SliceLayout(1, mma))
    return gl.arange(0, 64, gl.SliceLayout(0, mma))[None, :] * state.V + o_v[:, None]


@gluon.jit
def load_state(state, NT, mma: gl.constexpr):
    """S^T [BV, 128] in halves of 64 keys, 0 without first_ptr."""
    # not a constant: a product of those ptxas would not run beside others
    b_S1 = gl.full([state.BV, 64], gl.where(NT < 0, 1.0, 0.0), gl.float32, mma)
    b_S2 = b_S1
    if state.first_ptr is not None:
        o_S = state.i_nh.to(gl.int64) * state.K * state.V + rows_of(state, mma)
        b_S1 = gl.load(state.first_ptr + o_S).to(gl.float32)
        b_S2 = gl.load(state.first_ptr + o_S + 64 * state.V).to(gl.float32)
    return b_S1, b_S2


@gluon.jit
def store_state(state, b_S1, b_S2, mma: gl.constexpr):
    """S^T from its halves to last_ptr."""
    o_S = state.i_end.to(gl.int64) * state.K * state.V + rows_of(state, mma)
    gl.store(state.last_ptr + o_S, b_S1)
    gl.store(state.last_ptr + o_S + 64 * state.V, b_S2)


@gluon.jit
def chunk_at(i_t, NT, BACK: gl.constexpr):
    """Which chunk of a sequence comes i_t-th."""
    return NT - 1 - i_t if BACK else i_t


@record
class Gates:
    """A gate a head. A place has 2^gc, 2^(gc_last - gc) and, if there is one, beta."""

    gc_ptr: object  # at the first token
    beta_ptr: object  # or None
    ROW: object  # numbers between tokens

    @gluon.jit
    def of(self, i_t, NT, BT: gl.constexpr, BACK: gl.constexpr):
        """gc and beta of the chunk that comes i_t-th, and gc of its last token."""
        ROW: gl.constexpr = self.ROW
        i = chunk_at(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT * ROW
        o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * ROW
        some = (o_t >= 0) & (NT > 0)  # an empty piece may begin behind the last token
        b_last = gl.load(self.gc_ptr + i + (BT - 1) * ROW, mask=NT > 0, other=0.0)
        b_gc = gl.load(self.gc_ptr + i + o_t, mask=some, other=0.0)
        b_beta = b_gc
        if self.beta_ptr is not None:
            b_beta = gl.load(self.beta_ptr + i + o_t, mask=some, other=0.0).to(gl.float32)
        return b_gc, b_beta, b_last

    @gluon.jit
    def leave(self, gates, i, b_gc, b_beta, b_last):
        """Write to place i what `of` has loaded."""
        gates.index(3 * i).store(gl.exp2(b_gc))
        gates.index(3 * i + 1).store(gl.exp2(b_last - b_gc))
        if self.beta_ptr is not None:
            gates.index(3 * i + 2).store(b_beta)


@record
class ChannelGates:
    """A gate a channel. A place has 2^gc_last, in halves of 64 keys, and beta."""

    gc_ptr: object  # at the first token
    beta_ptr: object
    HV: object

    @gluon.jit
    def of(self, i_t, NT, BT: gl.constexpr, BACK: gl.constexpr):
        """gc of the last token of the chunk that comes i_t-th, in halves, and its beta."""
        HV: gl.constexpr = self.HV
        i = chunk_at(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT
        o = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        some = (o >= 0) & (NT > 0)  # an empty piece may begin behind the last token
        last_ptr = self.gc_ptr + (i + BT - 1).to(gl.int64) * (HV * 128) + o
        b_a1 = gl.load(last_ptr, mask=some, other=0.0)
        b_a2 = gl.load(last_ptr + 64, mask=some, other=0.0)
        b_beta = gl.load(self.beta_ptr + (i + o) * HV, mask=some, other=0.0).to(gl.float32)
        return b_a1, b_a2, b_beta

    @gluon.jit
    def leave(self, gates, i, b_a1, b_a2, b_beta):
        """Write to place i what `of` has loaded."""
        gates.index(3 * i).store(gl.exp2(b_a1))
        gates.index(3 * i + 1).store(gl.exp2(b_a2))
        gates.index(3 * i + 2).store(b_beta)


@gluon.jit
def load_chunks(chunks, given):
    """The producer: every chunk into the rings, as soon as its place is empty.

    given: Gates or ChannelGates.
    """
    NT = chunks.NT
    BT: gl.constexpr = chunks.BT
    STAGES: gl.constexpr = chunks.STAGES
    BACK: gl.constexpr = chunks.BACK
    b_1, b_2, b_3 = given.of(0, NT, BT, BACK)
    for i_t in range(NT):
        i = i_t % STAGES
        begin = chunks.first + chunk_at(i_t, NT, BACK) * BT
        mbarrier.wait(chunks.empty.index(i), (i_t // STAGES & 1) ^ 1)
        bar = chunks.full.index(i)
        mbarrier.expect(bar, chunks.BYTES)
        for j in gl.static_range(len(chunks.rings)):
            place = chunks.rings[j].index(i)
            async_load(chunks.descs[j], [begin, chunks.columns[j]], bar, place)
        given.leave(chunks.gates, i, b_1, b_2, b_3)
        # those of the next chunk are on their way meanwhile
        b_1, b_2, b_3 = given.of(i_t + 1, NT, BT, BACK)
        barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def store_chunks(chunks, made):
    """The warp that copies Results out: a chunk's state in halves, then the rest.

    Its mbarriers: 0, the state is there; 1, it was taken; 2, the rest is there; 3, it was taken.
    That something was taken is said when the next copy has begun: their latencies overlap.
    """
    NT = chunks.NT
    K: gl.constexpr = made.K
    BACK: gl.constexpr = chunks.BACK
    for i_t in range(NT):
        i_c = chunk_at(i_t, NT, BACK)
        mbarrier.wait(made.bars.index(0), i_t & 1)
        if i_t >= made.skip:
            i = made.row + i_c * made.HV * K
            async_store(made.S_desc, [i, made.c_S], made.halves[0])
            async_store(made.S_desc, [i + K // 2, made.c_S], made.halves[1])
        tma.store_wait(len(made.halves))
        barrier()
        mbarrier.arrive(made.bars.index(3), count=1)
        mbarrier.wait(made.bars.index(2), i_t & 1)
        if i_t >= made.skip:
            for j in gl.static_range(len(made.others)):
                at = [chunks.first + i_c * chunks.BT, made.c_v]
                async_store(made.descs[j], at, made.others[j])
        tma.store_wait(len(made.others))
        barrier()
        mbarrier.arrive(made.bars.index(1), count=1)
    tma.store_wait(0)


# -- chunk-parallel stages: every so many-th item, a head of a chunk, a program ------------------
@gluon.jit
def item_at(n, H: gl.constexpr, G: gl.constexpr):
    """Of the n-th item of this program, a value head of a chunk: chunk, q/k head, value head."""
    i = gl.program_id(0) + n // G * gl.num_programs(0)
    i_h = i % H
    return i // H, i_h, i_h * G + n % G


@gluon.jit
def gates_of_item(gc_ptr, beta_ptr, n, o_t, ROW: gl.constexpr, H: gl.constexpr,
             G: gl.constexpr, BT: gl.constexpr):  # fmt: skip
    """gc and beta [BT] of the n-th item."""
    i_c, _, i_hv = item_at(n, H, G)
    o = (i_c * BT + o_t).to(gl.int64) * ROW + i_hv
    return gl.load(gc_ptr + o), gl.load(beta_ptr + o).to(gl.float32)


@gluon.jit
def own_sums(x):
    """What each thread sums of a row by itself: [64, 4] of x [64, 64] in a product's layout."""
    x = gl.reshape(x, [x.shape[0], 8, 4, 2])
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def own_dot(x, y, mma: gl.constexpr):
    """own_sums of x * y, both in shared memory."""
    return own_sums(x.load(mma).to(gl.float32) * y.load(mma).to(gl.float32))


# -- on the host ---------------------------------------------------------------------------------
CHUNK, BV = 64, 64  # tokens, and values of a group of four warps in scans
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def layout_of(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def descriptor(x: Tensor, columns: int, rows: int = CHUNK) -> TensorDescriptor:
    """Of x as a matrix, for copies of such tiles: a row is a token of x [B, T, heads, columns], or
    a key of states [B, NT, heads, K, V].
    """
    x = x.view(-1, x.shape[-1] if x.ndim == 5 else x.shape[-2] * x.shape[-1])
    layout = layout_of(x.dtype, rows, columns)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def piece_args(pieces: Pieces) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The last arguments of both kernels that no tensor's shape says."""
    return pieces.cu_seqlens, pieces.chunk_offsets, pieces.T, pieces.N
