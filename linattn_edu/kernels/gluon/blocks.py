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

from linattn_edu.kernels.delta.warm_up import span_of
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
def piece_of_program(pid, warm_ptr, cu_ptr, offsets_ptr, T, N, H: gl.constexpr, HV: gl.constexpr,
        V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, BACK: gl.constexpr):  # fmt: skip
    """What program pid goes through: a piece, or by warm_ptr more, or nothing.

    Returns the tile of values, the head, its head of keys, the piece and head with which it begins
    and with which it ends (-1: another program goes through it), the first row, the number of the
    first chunk, the chunks, and those at whose end nothing is stored.
    """
    NV: gl.constexpr = V // BV
    i_v, i_nh = pid % NV, pid // NV
    i_h, skip, i_end = i_nh % HV, 0, i_nh
    first, n_t, i_c = sequence_of(i_nh // HV, cu_ptr, offsets_ptr, T, BT)
    if warm_ptr is not None:
        first, n_t, i_c, skip, i_end = span_of(
            i_nh, first, n_t, i_c, warm_ptr, cu_ptr, T, N, HV, BT, BACK
        )
    first, i_c = first.to(gl.int32), i_c.to(gl.int32)  # rows of descriptors
    return i_v, i_h, i_h // (HV // H), i_nh, i_end, first, i_c, n_t // BT, skip


@gluon.jit
def rows_of(i_v, V: gl.constexpr, BV: gl.constexpr, mma: gl.constexpr):
    """Where the numbers of S^T [BV, 64] are in S."""
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, mma))
    return gl.arange(0, 64, gl.SliceLayout(0, mma))[None, :] * V + o_v[:, None]


@gluon.jit
def state_of(S_ptr, NT, i_nh, i_v, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
             mma: gl.constexpr):  # fmt: skip
    """S^T [BV, 128] in halves of 64 keys, 0 without S_ptr."""
    # not a constant: a product of those ptxas would not run beside others
    b_S1 = gl.full([BV, 64], gl.where(NT < 0, 1.0, 0.0), gl.float32, mma)
    b_S2 = b_S1
    if S_ptr is not None:
        o_S = i_nh.to(gl.int64) * K * V + rows_of(i_v, V, BV, mma)
        b_S1 = gl.load(S_ptr + o_S).to(gl.float32)
        b_S2 = gl.load(S_ptr + o_S + 64 * V).to(gl.float32)
    return b_S1, b_S2


@gluon.jit
def chunk_at(i_t, NT, BACK: gl.constexpr):
    """Which chunk of a sequence comes i_t-th."""
    return NT - 1 - i_t if BACK else i_t


@gluon.jit
def gates_at(gc_ptr, beta_ptr, i_t, NT, ROW: gl.constexpr, BT: gl.constexpr, BACK: gl.constexpr):
    """gc and beta of the chunk that comes i_t-th, and gc of its last token."""
    i = chunk_at(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT * ROW
    o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) * ROW
    some = (o_t >= 0) & (NT > 0)  # an empty piece may begin behind the last token
    b_last = gl.load(gc_ptr + i + (BT - 1) * ROW, mask=NT > 0, other=0.0)
    b_gc = gl.load(gc_ptr + i + o_t, mask=some, other=0.0)
    return b_gc, gl.load(beta_ptr + i + o_t, mask=some, other=0.0).to(gl.float32), b_last


@gluon.jit
def load_chunks(
    descs, columns, rings, gc_ptr, beta_ptr, gates, full, empty, first, NT,
    BYTES: gl.constexpr, ROW: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
    BACK: gl.constexpr,
):  # fmt: skip
    """The warp that loads: every chunk into the rings, as soon as its place is empty.

    first: row of the first token.  BACK: the last chunk first.
    """
    b_gc, b_beta, b_last = gates_at(gc_ptr, beta_ptr, 0, NT, ROW, BT, BACK)
    for i_t in range(NT):
        i = i_t % STAGES
        begin = first + chunk_at(i_t, NT, BACK) * BT
        mbarrier.wait(empty.index(i), (i_t // STAGES & 1) ^ 1)
        bar = full.index(i)
        mbarrier.expect(bar, BYTES)
        for j in gl.static_range(len(rings)):
            async_load(descs[j], [begin, columns[j]], bar, rings[j].index(i))
        gates.index(3 * i).store(gl.exp2(b_gc))
        gates.index(3 * i + 1).store(gl.exp2(b_last - b_gc))
        gates.index(3 * i + 2).store(b_beta)
        # those of the next chunk are on their way meanwhile
        b_gc, b_beta, b_last = gates_at(gc_ptr, beta_ptr, i_t + 1, NT, ROW, BT, BACK)
        barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def store_chunks(
    S_desc, descs, Ss, outs, out, row, c_S, first, c_v, NT, skip,
    HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """The warp that stores: a chunk's state in halves, then the rest; not of the first `skip`.

    row: of the state of the first chunk.  out: barriers; the state is there, and has been taken;
    the rest is there, and what was there before has been taken. Of each it is said when the next
    copy has begun: their latencies overlap.
    """
    for i_t in range(NT):
        i_c = chunk_at(i_t, NT, BACK)
        mbarrier.wait(out.index(0), i_t & 1)
        if i_t >= skip:
            i = row + i_c * HV * K
            async_store(S_desc, [i, c_S], Ss[0])
            async_store(S_desc, [i + K // 2, c_S], Ss[1])
        tma.store_wait(len(Ss))
        barrier()
        mbarrier.arrive(out.index(3), count=1)
        mbarrier.wait(out.index(2), i_t & 1)
        if i_t >= skip:
            for j in gl.static_range(len(outs)):
                async_store(descs[j], [first + i_c * BT, c_v], outs[j])
        tma.store_wait(len(outs))
        barrier()
        mbarrier.arrive(out.index(1), count=1)
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
