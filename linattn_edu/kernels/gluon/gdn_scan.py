"""The scan of the fused forward pass in Gluon, for Hopper: products that run beside arithmetic.

Gluon is Triton's lower level: layouts, shared memory, copies and waits are written out. One warp
copies chunks ahead through a ring in shared memory; four hold S^T [64, K] in registers, whose
16-bit copy is the first operand of the next product. A product is only begun where it stands, and
waited for where its result is needed.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from linattn_edu.kernels.delta.warm_up import with_warm_up
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.tiles import sequence_of

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name in Triton 3.6
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


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


@gluon.jit
def load_chunks(
    q_desc, k_desc, v_desc, P_desc, R_desc, gc_ptr,
    qs, ks, vs, Ps, Rs, gates, full, gates_full, empty,
    first, c_k, c_v, c_t, NT,
    HV: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: every chunk into the ring, as soon as its place is empty.

    first: row of the first token.  c_k, c_v, c_t: columns of keys, values, and of P and R.
    """
    o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    b_gc = gl.load(gc_ptr + o_t * HV)
    b_last = gl.load(gc_ptr + (BT - 1) * HV)
    for i_t in range(NT):
        i = i_t % STAGES
        begin = first + i_t * BT
        mbarrier.wait(empty.index(i), (i_t // STAGES & 1) ^ 1)
        bar = full.index(i)
        mbarrier.expect(bar, (ks.shape[2] + qs.shape[2] + vs.shape[2] + 2 * BT) * BT * 2)
        tma.async_copy_global_to_shared(k_desc, [begin, c_k], bar, ks.index(i))
        tma.async_copy_global_to_shared(v_desc, [begin, c_v], bar, vs.index(i))
        tma.async_copy_global_to_shared(R_desc, [begin, c_t], bar, Rs.index(i))
        tma.async_copy_global_to_shared(q_desc, [begin, c_k], bar, qs.index(i))
        tma.async_copy_global_to_shared(P_desc, [begin, c_t], bar, Ps.index(i))
        gates.index(2 * i).store(gl.exp2(b_gc))
        gates.index(2 * i + 1).store(gl.exp2(b_last - b_gc))
        # those of the next chunk are on their way meanwhile
        step = gl.minimum(i_t + 1, NT - 1) * BT * HV
        b_gc = gl.load(gc_ptr + step + o_t * HV)
        b_last = gl.load(gc_ptr + step + (BT - 1) * HV)
        barrier()
        mbarrier.arrive(gates_full.index(i), count=1)


@gluon.jit
def scan_chunks(
    o_desc, h0_ptr, ht_ptr, scale, qs, ks, vs, Ps, Rs, gates, full, gates_full, empty, out,
    first, c_v, i_nh, i_end, i_v, NT, skip,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that compute: scan_transposed_kernel's sums in its order; S^T in halves of 64 keys.

    At most three products are under way, and none where the loop turns: ptxas would run them one
    after the other.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, mma)  # a number for each column
    dtype: gl.constexpr = ks.dtype
    HALVES: gl.constexpr = K // 64  # with one, nothing is done with the second
    zero = gl.full([BV, 64], 0.0, gl.float32, mma)
    b_S1, b_S2 = zero, zero
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, mma))
    o_S = gl.arange(0, 64, along)[None, :] * V + o_v[:, None]
    if h0_ptr is not None:
        h0_ptr += i_nh.to(gl.int64) * K * V
        b_S1 = gl.load(h0_ptr + o_S).to(gl.float32)
        if HALVES == 2:
            b_S2 = gl.load(h0_ptr + o_S + 64 * V).to(gl.float32)
    b_h1, b_h2 = operand(b_S1, dtype, mma), operand(b_S2, dtype, mma)
    mbarrier.wait(gates_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    # (K S)^T of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, K)])
    for i_t in range(NT):
        i = i_t % STAGES
        # eq:delta-inter   diag(2^gc) Q S
        b_o = product(b_h1, half(qs.index(i), 0).permute((1, 0)), zero, False)
        # eq:delta-residual   W = V - diag(2^gc) K S
        b_e = gates.index(2 * i).load(along)[None, :]
        b_v = vs.index(i).permute((1, 0)).load(mma)
        b_W = b_v.to(gl.float32) - b_e * b_W
        # eq:delta-v-new   v_new = R W
        b_new = product(operand(b_W, dtype, mma), Rs.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decay = gates.index(2 * i).slice(BT - 1, 1).load(along)[None, :]
        b_S1 *= decay
        if HALVES == 2:
            b_o = product(b_h2, half(qs.index(i), 1).permute((1, 0)), b_o)
            b_S2 *= decay
        b_new = warpgroup_mma_wait(HALVES - 1, [b_new])
        b_r = gates.index(2 * i + 1).load(along)[None, :]
        b_16 = operand(b_new, dtype, mma)
        b_new = operand(b_new * b_r, dtype, mma)
        b_S1 = product(b_new, half(ks.index(i), 0), b_S1)
        if HALVES == 2:
            b_S2 = product(b_new, half(ks.index(i), 1), b_S2)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = warpgroup_mma_wait(HALVES, [b_o])
        b_o *= gates.index(2 * i).load(along)[None, :]  # read again: registers are scarce
        b_o = product(b_16, Ps.index(i).permute((1, 0)), b_o)
        b_S1 = warpgroup_mma_wait(HALVES, [b_S1])
        b_h1 = operand(b_S1, dtype, mma)
        if HALVES == 2:
            b_S2 = warpgroup_mma_wait(1, [b_S2])
            b_h2 = operand(b_S2, dtype, mma)
        # K S of the next chunk; after the last one for nothing
        i_next = gl.minimum(i_t + 1, NT - 1)
        n = i_next % STAGES
        mbarrier.wait(gates_full.index(n), i_next // STAGES & 1)
        mbarrier.wait(full.index(n), i_next // STAGES & 1)
        b_W = keys_times_state(b_h1, b_h2, ks.index(n), zero, K)
        b_o = warpgroup_mma_wait(HALVES, [b_o])
        b_o = (scale * b_o).to(dtype)
        tma.store_wait(0)
        barrier()  # no warp reads the chunk any more, and none has to wait to write `out`
        mbarrier.arrive(empty.index(i), count=1)
        out.permute((1, 0)).store(b_o)
        fence_async_shared()
        barrier()
        if i_t >= skip:
            tma.async_copy_shared_to_global(o_desc, [first + i_t * BT, c_v], out)
        b_W = warpgroup_mma_wait(0, [b_W])
    tma.store_wait(0)
    if ht_ptr is not None:
        ht_ptr += i_end.to(gl.int64) * K * V
        gl.store(ht_ptr + o_S, b_S1)
        if HALVES == 2:
            gl.store(ht_ptr + o_S + 64 * V, b_S2)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_gluon_kernel(
    q_desc,  # [B * T, H * K]
    k_desc,  # [B * T, H * K]
    v_desc,  # [B * T, HV * V]
    P_desc,  # [B * T, HV * BT]
    R_desc,  # [B * T, HV * BT]
    o_desc,  # [B * T, HV * V] out
    gc_ptr,  # [B, T, HV] log2
    h0_ptr,  # [N, HV, K, V] or None
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    warmup_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    T,
    N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_fwd.scan.
    """
    dtype: gl.constexpr = k_desc.dtype
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    i_v, i_nh = pid % NV, pid // NV
    i_h = i_nh % HV
    first, n_t, _ = sequence_of(i_nh // HV, cu_ptr, None, T, BT)
    skip, i_end = 0, i_nh
    if warmup_ptr is not None:
        first, n_t, _, skip, i_end = with_warm_up(
            i_nh, first, n_t, 0, warmup_ptr, cu_ptr, T, N, HV, BT, False
        )
    if n_t == 0:  # an empty piece, or one that another program goes through
        return
    first, NT = first.to(gl.int32), n_t // BT
    c_k, c_v, c_t = i_h // (HV // H) * K, i_h * V + i_v * BV, i_h * BT
    gc_ptr += first.to(gl.int64) * HV + i_h
    ks = gl.allocate_shared_memory(dtype, [STAGES, BT, K], k_desc.layout)
    qs = gl.allocate_shared_memory(dtype, [STAGES, BT, K], q_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, BT, BV], v_desc.layout)
    Rs = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], R_desc.layout)
    Ps = gl.allocate_shared_memory(dtype, [STAGES, BT, BT], P_desc.layout)
    out = gl.allocate_shared_memory(dtype, [BT, BV], o_desc.layout)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gates = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BT], rows)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(gates_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    # the arguments stand here: in a variable, a tuple's constants are constants no more
    gl.warp_specialize([
        (scan_chunks, (
            o_desc, h0_ptr, ht_ptr, scale, qs, ks, vs, Ps, Rs, gates, full, gates_full, empty, out,
            first, c_v, i_nh, i_end, i_v, NT, skip, K, V, BT, BV, STAGES,
        )),
        (load_chunks, (
            q_desc, k_desc, v_desc, P_desc, R_desc, gc_ptr,
            qs, ks, vs, Ps, Rs, gates, full, gates_full, empty,
            first, c_k, c_v, c_t, NT, HV, BT, STAGES,
        )),
    ], [1], [24])  # fmt: skip


CHUNK, BV = 64, 64
# three chunks in shared memory: one at work, two on their way
TILES = {"BT": CHUNK, "BV": BV, "STAGES": 3}
# of the registers at the start the loading warp keeps 24 a thread, the others take the rest
OPTIONS = {"num_warps": 4, "maxnreg": 144}


@functools.cache
def layout_of(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    """Of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def descriptor(x: Tensor, width: int) -> TensorDescriptor:
    """Of x [B, T, heads, columns], for copies of a chunk and `width` columns."""
    x = x.view(x.shape[0] * x.shape[1], -1)
    layout = layout_of(x.dtype, CHUNK, width)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [CHUNK, width], layout)


def scan_gluon(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gc: Tensor,
    P: Tensor,
    R: Tensor,
    initial_state: Tensor | None,
    o: Tensor,
    last: Tensor | None,
    scale: float,
    warmup: Tensor | None,
    pieces: Pieces,
) -> None:
    """Launch scan_gluon_kernel on the pieces; it writes o and last.

    warmup: as `warm_up` returns it, or None for pieces that are scanned from their own first token.
    """
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    widths = K, K, BV, CHUNK, CHUNK, BV
    descriptors = map(descriptor, (q, k, v, P, R, o), widths)
    scan_gluon_kernel[(pieces.N * HV * V // BV,)](
        *descriptors, gc, initial_state, last, scale, warmup, pieces.cu_seqlens, pieces.T, pieces.N,
        H, HV, K, V, **TILES, **OPTIONS,
    )  # fmt: skip
