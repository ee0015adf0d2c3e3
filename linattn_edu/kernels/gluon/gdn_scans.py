"""The two scans of the fused backward pass in Gluon, for Hopper, after the model of gdn_scan.

Four warps hold S^T or dS^T [64, 128] in registers. One warp copies chunks ahead, and one copies
results out: the four only write them to shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from linattn_edu.kernels.delta.warm_up import with_warm_up
from linattn_edu.kernels.gluon.gdn_scan import (
    BV,
    CHUNK,
    OPTIONS,
    barrier,
    descriptor,
    half,
    keys_times_state,
    operand,
    product,
)
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.tiles import sequence_of


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
def place(i_t, NT, BACK: gl.constexpr):
    """Which chunk of a sequence comes i_t-th."""
    return NT - 1 - i_t if BACK else i_t


@gluon.jit
def gates_of(gc_ptr, beta_ptr, i_t, NT, ROW: gl.constexpr, BT: gl.constexpr, BACK: gl.constexpr):
    """gc and beta of the chunk that comes i_t-th, and gc of its last token."""
    i = place(gl.maximum(gl.minimum(i_t, NT - 1), 0), gl.maximum(NT, 1), BACK) * BT * ROW
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
    b_gc, b_beta, b_last = gates_of(gc_ptr, beta_ptr, 0, NT, ROW, BT, BACK)
    for i_t in range(NT):
        i = i_t % STAGES
        begin = first + place(i_t, NT, BACK) * BT
        mbarrier.wait(empty.index(i), (i_t // STAGES & 1) ^ 1)
        bar = full.index(i)
        mbarrier.expect(bar, BYTES)
        for j in gl.static_range(len(rings)):
            tma.async_copy_global_to_shared(descs[j], [begin, columns[j]], bar, rings[j].index(i))
        gates.index(3 * i).store(gl.exp2(b_gc))
        gates.index(3 * i + 1).store(gl.exp2(b_last - b_gc))
        gates.index(3 * i + 2).store(b_beta)
        # those of the next chunk are on their way meanwhile
        b_gc, b_beta, b_last = gates_of(gc_ptr, beta_ptr, i_t + 1, NT, ROW, BT, BACK)
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
        i_c = place(i_t, NT, BACK)
        mbarrier.wait(out.index(0), i_t & 1)
        if i_t >= skip:
            i = row + i_c * HV * K
            tma.async_copy_shared_to_global(S_desc, [i, c_S], Ss[0])
            tma.async_copy_shared_to_global(S_desc, [i + K // 2, c_S], Ss[1])
        tma.store_wait(len(Ss))
        barrier()
        mbarrier.arrive(out.index(3), count=1)
        mbarrier.wait(out.index(2), i_t & 1)
        if i_t >= skip:
            for j in gl.static_range(len(outs)):
                tma.async_copy_shared_to_global(descs[j], [first + i_c * BT, c_v], outs[j])
        tma.store_wait(len(outs))
        barrier()
        mbarrier.arrive(out.index(1), count=1)
    tma.store_wait(0)


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
def rows_of(i_v, V: gl.constexpr, BV: gl.constexpr, mma: gl.constexpr):
    """Where the numbers of S^T [BV, 64] are in S."""
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, mma))
    return gl.arange(0, 64, gl.SliceLayout(0, mma))[None, :] * V + o_v[:, None]


@gluon.jit
def scan_forth(
    h0_ptr, ks, vs, AGs, gates, full, empty, h1, h2, new, out, i_nh, i_v, NT,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that compute: the sums of scan_states_kernel in its order."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, mma)  # a number for each column
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([BV, 64], 0.0, gl.float32, mma)
    b_S1, b_S2 = state_of(h0_ptr, NT, i_nh, i_v, K, V, BV, mma)
    store_transposed(b_S1.to(dtype), h1)
    store_transposed(b_S2.to(dtype), h2)
    hand_over(out.index(0))
    mbarrier.wait(full.index(0), 0, pred=NT > 0)
    b_h1, b_h2 = operand(b_S1, dtype, mma), operand(b_S2, dtype, mma)
    # K S of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, K)])
    for i_t in range(NT):
        i = i_t % STAGES
        # eq:delta-residual   W = V - diag(2^gc) K S
        b_v = vs.index(i).permute((1, 0)).load(mma)
        b_W = b_v.to(gl.float32) - gates.index(3 * i).load(along)[None, :] * b_W
        # eq:delta-v-new   v_new = (A * G) diag(beta) W
        b_W *= gates.index(3 * i + 2).load(along)[None, :]
        b_new = product(operand(b_W, dtype, mma), AGs.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decay = gates.index(3 * i).slice(BT - 1, 1).load(along)[None, :]
        b_S1 *= decay
        b_S2 *= decay
        b_r = gates.index(3 * i + 1).load(along)[None, :]
        b_new = warpgroup_mma_wait(0, [b_new])
        b_x = operand(b_new * b_r, dtype, mma)
        b_S1 = product(b_x, half(ks.index(i), 0), b_S1)
        b_S2 = product(b_x, half(ks.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_new.to(dtype), new)
        hand_over(out.index(2))
        # K S of the next chunk; after the last one for nothing
        i_next = gl.minimum(i_t + 1, NT - 1)
        n = i_next % STAGES
        mbarrier.wait(full.index(n), i_next // STAGES & 1)
        b_S1 = warpgroup_mma_wait(1, [b_S1])
        b_h1 = operand(b_S1, dtype, mma)
        b_W = product(b_h1, half(ks.index(n), 0).permute((1, 0)), zero, False)
        b_S2 = warpgroup_mma_wait(1, [b_S2])
        b_h2 = operand(b_S2, dtype, mma)
        b_W = product(b_h2, half(ks.index(n), 1).permute((1, 0)), b_W)
        mbarrier.wait(out.index(1), i_t & 1)
        store_transposed(b_S1.to(dtype), h1)
        store_transposed(b_S2.to(dtype), h2)
        hand_over(out.index(0))
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_W = warpgroup_mma_wait(0, [b_W])


@gluon.jit
def scan_back(
    dht_ptr, dh0_ptr, scale, qs, ks, dos, Ps, AGs, gates, full, empty, h1, h2, Zs, dvs, out,
    i_nh, i_end, i_v, NT,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that compute: the sums of scan_bwd_kernel in its order; dS^T in halves of 64 keys.

    At most three products are under way, and none where the loop turns: ptxas would run them one
    after the other.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, mma)  # a number for each column
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([BV, 64], 0.0, gl.float32, mma)
    b_S1, b_S2 = state_of(dht_ptr, NT, i_nh, i_v, K, V, BV, mma)
    store_transposed(b_S1.to(dtype), h1)
    store_transposed(b_S2.to(dtype), h2)
    hand_over(out.index(0))
    mbarrier.wait(full.index(0), 0, pred=NT > 0)
    b_h1, b_h2 = operand(b_S1, dtype, mma), operand(b_S2, dtype, mma)
    # K S of the last chunk
    b_dv = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, K)])
    for i_t in range(NT):
        i = i_t % STAGES
        # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        b_do = dos.index(i).permute((1, 0)).load(mma).to(gl.float32) * scale
        b_dv *= gates.index(3 * i + 1).load(along)[None, :]
        b_dv = product(operand(b_do, dtype, mma), Ps.index(i), b_dv)
        # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
        b_e = gates.index(3 * i).load(along)[None, :]
        decay = gates.index(3 * i).slice(BT - 1, 1).load(along)[None, :]
        b_S1 *= decay
        b_S2 *= decay
        b_do = operand(b_e * b_do, dtype, mma)
        b_S1 = product(b_do, half(qs.index(i), 0), b_S1)
        # eq:delta-z   Z = (A * G)^T dv_new
        b_dv = warpgroup_mma_wait(1, [b_dv])
        b_Z = product(operand(b_dv, dtype, mma), AGs.index(i), zero, False)
        b_S2 = product(b_do, half(qs.index(i), 1), b_S2)
        # eq:delta-dv   dV = diag(beta) Z
        b_Z = warpgroup_mma_wait(1, [b_Z])
        b_dv = gates.index(3 * i + 2).load(along)[None, :] * b_Z
        b_e = gates.index(3 * i).load(along)[None, :]  # read again: registers are scarce
        b_x = operand(-b_e * b_dv, dtype, mma)
        b_S1 = product(b_x, half(ks.index(i), 0), b_S1)
        b_S2 = product(b_x, half(ks.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_Z.to(dtype), Zs)
        store_transposed(b_dv.to(dtype), dvs)
        hand_over(out.index(2))
        # K dS of the next chunk; after the last one for nothing
        i_next = gl.minimum(i_t + 1, NT - 1)
        n = i_next % STAGES
        mbarrier.wait(full.index(n), i_next // STAGES & 1)
        b_S1 = warpgroup_mma_wait(1, [b_S1])
        b_h1 = operand(b_S1, dtype, mma)
        b_dv = product(b_h1, half(ks.index(n), 0).permute((1, 0)), zero, False)
        b_S2 = warpgroup_mma_wait(1, [b_S2])
        b_h2 = operand(b_S2, dtype, mma)
        b_dv = product(b_h2, half(ks.index(n), 1).permute((1, 0)), b_dv)
        mbarrier.wait(out.index(1), i_t & 1)
        store_transposed(b_S1.to(dtype), h1)
        store_transposed(b_S2.to(dtype), h2)
        hand_over(out.index(0))
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_dv = warpgroup_mma_wait(0, [b_dv])
    if i_end >= 0:
        o_S = i_end.to(gl.int64) * K * V + rows_of(i_v, V, BV, mma)
        gl.store(dh0_ptr + o_S, b_S1)
        gl.store(dh0_ptr + o_S + 64 * V, b_S2)


@gluon.jit
def ring(desc, STAGES: gl.constexpr):
    """Shared memory for STAGES copies of a descriptor's tile."""
    shape: gl.constexpr = [STAGES, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Of places in a ring, full and empty; and of the results, see store_chunks."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    out = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # the copies have come, and the gates
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(out.index(i), count=1)
    fence_async_shared()
    return full, empty, out


@gluon.jit(do_not_specialize=["T", "N"])
def scan_states_gluon_kernel(
    k_desc,  # [B * T, H * K]
    v_desc,  # [B * T, HV * V]
    AG_desc,  # [B * T, HV * BT]
    h_desc,  # [B * NT * HV * K, V] out: state entering each chunk
    new_desc,  # [B * T, HV * V] out: v_new
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    h0_ptr,  # [N, HV, K, V] or None
    warmup_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N] or None
    T,
    N,
    ROW: gl.constexpr,  # numbers between tokens in beta and gc, which may have more heads
    STEP: gl.constexpr,  # one of so many programs of the grid
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_scans.scan_states.
    """
    i_v, i_h, i_k, i_nh, _, first, i_c, NT, skip = piece_of_program(
        gl.program_id(0) // STEP, warmup_ptr, cu_ptr, offsets_ptr, T, N, H, HV, V, BT, BV, False
    )
    c_v = i_h * V + i_v * BV
    gc_ptr += first.to(gl.int64) * ROW + i_h
    beta_ptr += first.to(gl.int64) * ROW + i_h
    ks, vs, AGs = ring(k_desc, STAGES), ring(v_desc, STAGES), ring(AG_desc, STAGES)
    h1, h2 = ring(h_desc, 1).index(0), ring(h_desc, 1).index(0)
    new = ring(new_desc, 1).index(0)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gates = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BT], rows)
    full, empty, out = barriers(STAGES)
    gl.warp_specialize([
        (scan_forth, (
            h0_ptr, ks, vs, AGs, gates, full, empty, h1, h2, new, out, i_nh, i_v, NT,
            K, V, BT, BV, STAGES,
        )),
        (load_chunks, (
            (k_desc, v_desc, AG_desc), (i_k * K, c_v, i_h * BT), (ks, vs, AGs), gc_ptr, beta_ptr,
            gates, full, empty, first, NT, (K + BV + BT) * BT * 2, ROW, BT, STAGES, False,
        )),
        (store_chunks, (
            h_desc, (new_desc,), (h1, h2), (new,), out, (i_c * HV + i_h) * K, i_v * BV, first, c_v,
            NT, skip, HV, K, BT, False,
        )),
    ], [1, 1], [24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["T", "N"])
def scan_bwd_gluon_kernel(
    q_desc,  # [B * T, H * K]
    k_desc,  # [B * T, H * K]
    P_desc,  # [B * T, HV * BT]
    AG_desc,  # [B * T, HV * BT]
    do_desc,  # [B * T, HV * V]
    dh_desc,  # [B * NT * HV * K, V] out: gradient of the state leaving each chunk
    Z_desc,  # [B * T, HV * V] out
    dv_desc,  # [B * T, HV * V] out
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    dht_ptr,  # [N, HV, K, V] or None
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    warmup_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N] or None
    T,
    N,
    ROW: gl.constexpr,  # numbers between tokens in beta and gc, which may have more heads
    STEP: gl.constexpr,  # one of so many programs of the grid
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_scans.scan_bwd.
    """
    i_v, i_h, i_k, i_nh, i_end, first, i_c, NT, skip = piece_of_program(
        gl.program_id(0) // STEP, warmup_ptr, cu_ptr, offsets_ptr, T, N, H, HV, V, BT, BV, True
    )
    c_k, c_v, c_t = i_k * K, i_h * V + i_v * BV, i_h * BT
    gc_ptr += first.to(gl.int64) * ROW + i_h
    beta_ptr += first.to(gl.int64) * ROW + i_h
    ks, qs, dos = ring(k_desc, STAGES), ring(q_desc, STAGES), ring(do_desc, STAGES)
    Ps, AGs = ring(P_desc, STAGES), ring(AG_desc, STAGES)
    h1, h2 = ring(dh_desc, 1).index(0), ring(dh_desc, 1).index(0)
    Zs, dvs = ring(Z_desc, 1).index(0), ring(dv_desc, 1).index(0)
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gates = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BT], rows)
    full, empty, out = barriers(STAGES)
    gl.warp_specialize([
        (scan_back, (
            dht_ptr, dh0_ptr, scale, qs, ks, dos, Ps, AGs, gates, full, empty, h1, h2, Zs, dvs,
            out, i_nh, i_end, i_v, NT, K, V, BT, BV, STAGES,
        )),
        (load_chunks, (
            (k_desc, do_desc, P_desc, q_desc, AG_desc), (c_k, c_v, c_t, c_k, c_t),
            (ks, dos, Ps, qs, AGs), gc_ptr, beta_ptr, gates, full, empty, first, NT,
            (2 * K + BV + 2 * BT) * BT * 2, ROW, BT, STAGES, True,
        )),
        (store_chunks, (
            dh_desc, (Z_desc, dv_desc), (h1, h2), (Zs, dvs), out, (i_c * HV + i_h) * K, i_v * BV,
            first, c_v, NT, skip, HV, K, BT, True,
        )),
    ], [1, 1], [24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["T", "N"])
def scans_gluon_kernel(
    q_desc, k_desc, v_desc, P_desc, AG_desc, do_desc, h_desc, new_desc, dh_desc, Z_desc, dv_desc,
    beta_ptr, gc_ptr, h0_ptr, dht_ptr, dh0_ptr, scale, forth_ptr, back_ptr, cu_ptr, offsets_ptr,
    T,
    N,
    ROW: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, STAGES_BACK: gl.constexpr,
):  # fmt: skip
    """The programs of both kernels, of which it has all arguments.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.gdn_scans.scans.
    """
    if gl.program_id(0) % 2 == 0:
        scan_bwd_gluon_kernel(
            q_desc, k_desc, P_desc, AG_desc, do_desc, dh_desc, Z_desc, dv_desc, beta_ptr, gc_ptr,
            dht_ptr, dh0_ptr, scale, back_ptr, cu_ptr, offsets_ptr, T, N, ROW, 2, H, HV, K, V, BT,
            BV, STAGES_BACK,
        )  # fmt: skip
    else:
        scan_states_gluon_kernel(
            k_desc, v_desc, AG_desc, h_desc, new_desc, beta_ptr, gc_ptr, h0_ptr, forth_ptr, cu_ptr,
            offsets_ptr, T, N, ROW, 2, H, HV, K, V, BT, BV, STAGES,
        )  # fmt: skip


# STAGES: chunks in shared memory, one at work, the others on their way
TILES = {"BT": CHUNK, "BV": BV, "STAGES": 4}
TILES_BACK = TILES | {"STAGES": 3}
TILES_BOTH = TILES | {"STAGES_BACK": 3}


def states_descriptor(h: Tensor) -> TensorDescriptor:
    """Of h [B, NT, HV, K, V], for copies of 64 keys and BV values."""
    return descriptor(h.view(-1, 1, 1, h.shape[-1]), BV)


def places_of(pieces: Pieces) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The last arguments of both kernels that no tensor's shape says."""
    return pieces.cu_seqlens, pieces.chunk_offsets, pieces.T, pieces.N


def scan_states_gluon(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    h0: Tensor | None,
    h: Tensor,
    v_new: Tensor,
    warmup: Tensor | None,
    pieces: Pieces,
) -> None:
    """Launch scan_states_gluon_kernel on the pieces; it writes h and v_new."""
    (H, K), (HV, V) = k.shape[2:], v.shape[2:]
    chunks = map(descriptor, (k, v, AG), (K, BV, CHUNK))
    scan_states_gluon_kernel[(pieces.N * HV * V // BV,)](
        *chunks, states_descriptor(h), descriptor(v_new, BV), beta, gc, h0, warmup,
        *places_of(pieces), gc.stride(1), 1, H, HV, K, V, **TILES, **OPTIONS,
    )  # fmt: skip


def scan_bwd_gluon(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None,
    dh: Tensor,
    Z: Tensor,
    dv: Tensor,
    dh0: Tensor,
    scale: float,
    warmup: Tensor | None,
    pieces: Pieces,
) -> None:
    """Launch scan_bwd_gluon_kernel on the pieces; it writes dh, Z, dv and dh0."""
    (H, K), (HV, V) = q.shape[2:], do.shape[2:]
    chunks = map(descriptor, (q, k, P, AG, do), (K, K, CHUNK, CHUNK, BV))
    outs = map(descriptor, (Z, dv), (BV, BV))
    scan_bwd_gluon_kernel[(pieces.N * HV * V // BV,)](
        *chunks, states_descriptor(dh), *outs, beta, gc, dht, dh0, scale, warmup,
        *places_of(pieces), gc.stride(1), 1, H, HV, K, V, **TILES_BACK, **OPTIONS,
    )  # fmt: skip


def scans_gluon(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    h0: Tensor | None,
    dht: Tensor | None,
    h: Tensor,
    v_new: Tensor,
    dh: Tensor,
    Z: Tensor,
    dv: Tensor,
    dh0: Tensor,
    scale: float,
    forth: Tensor | None,
    back: Tensor | None,
    pieces: Pieces,
) -> None:
    """Launch scans_gluon_kernel on the pieces; it writes what the two others write."""
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    tensors = q, k, v, P, AG, do, v_new, Z, dv
    widths = K, K, BV, CHUNK, CHUNK, BV, BV, BV, BV
    *chunks, new, Zs, dvs = map(descriptor, tensors, widths)
    scans_gluon_kernel[(2 * pieces.N * HV * V // BV,)](
        *chunks, states_descriptor(h), new, states_descriptor(dh), Zs, dvs, beta, gc, h0, dht, dh0,
        scale, forth, back, *places_of(pieces), gc.stride(1), H, HV, K, V, **TILES_BOTH, **OPTIONS,
    )  # fmt: skip
