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
    warpgroup_mma_wait,
)

from linattn_edu.kernels.gluon import gdn_scan
from linattn_edu.kernels.gluon.blocks import (
    BV,
    CHUNK,
    Chunks,
    Gates,
    Results,
    State,
    descriptor,
    half,
    hand_over,
    keys_times_state,
    load_chunks,
    load_state,
    operand,
    piece_args,
    piece_of_program,
    places,
    product,
    results,
    ring,
    store_chunks,
    store_state,
    store_transposed,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.pieces import Pieces


@gluon.jit
def scan_forth(chunks, made, state):
    """The warps that compute: the sums of scan_states_kernel in its order."""
    ks, vs, AGs = chunks.rings
    gates, full, empty, NT = chunks.gates, chunks.full, chunks.empty, chunks.NT
    h1, h2 = made.halves
    new, out = made.others[0], made.bars
    K: gl.constexpr = state.K
    BT: gl.constexpr = chunks.BT
    BV: gl.constexpr = state.BV
    STAGES: gl.constexpr = chunks.STAGES
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, mma)  # a number for each column
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([BV, 64], 0.0, gl.float32, mma)
    b_S1, b_S2 = load_state(state, NT, mma)
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
def scan_back(chunks, made, state, scale):
    """The warps that compute: the sums of scan_bwd_kernel in its order; dS^T in halves of 64 keys.

    At most three products are under way, and none where the loop turns: ptxas would run them one
    after the other.
    """
    ks, dos, Ps, qs, AGs = chunks.rings
    gates, full, empty, NT = chunks.gates, chunks.full, chunks.empty, chunks.NT
    h1, h2 = made.halves
    Zs, dvs = made.others
    out = made.bars
    K: gl.constexpr = state.K
    BT: gl.constexpr = chunks.BT
    BV: gl.constexpr = state.BV
    STAGES: gl.constexpr = chunks.STAGES
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 64, 16])
    along: gl.constexpr = gl.SliceLayout(0, mma)  # a number for each column
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([BV, 64], 0.0, gl.float32, mma)
    b_S1, b_S2 = load_state(state, NT, mma)
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
    if state.i_end >= 0:
        store_state(state, b_S1, b_S2, mma)


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

    mbarriers, of a chunk in place i of the rings::

        empty[i]  computing warps -> loading warp: it may copy the next chunk to this place
        full[i]   the copies, and the loading warp with the gates -> computing warps, which begin
                  the products of the chunk before the last ones of the chunk ahead of it are done
        bars[0]   computing warps -> storing warp: the state has been written to `halves`
        bars[3]   storing warp -> computing warps: it has left `others`, which may be written
        bars[2]   computing warps -> storing warp: `others` have been written
        bars[1]   storing warp -> computing warps: it has left `halves`, which may be written

    In this order in each chunk, for the storing warp; the computing warps wait for bars[3], arrive
    at bars[2], wait for full of the next chunk and for bars[1], arrive at bars[0] and at empty[i].
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
    full, empty = places(STAGES, 1)
    out = results()
    fence_async_shared()
    chunks = Chunks(
        (k_desc, v_desc, AG_desc), (i_k * K, c_v, i_h * BT), (ks, vs, AGs), gates, full, empty,
        first, NT, (K + BV + BT) * BT * 2, BT, STAGES, False,
    )  # fmt: skip
    made = Results(
        h_desc, (new_desc,), (h1, h2), (new,), out, (i_c * HV + i_h) * K, i_v * BV, c_v, skip, HV, K
    )
    state = State(h0_ptr, None, i_nh, i_nh, i_v, 0, K, V, BV)
    gl.warp_specialize([
        (scan_forth, (chunks, made, state)),
        (load_chunks, (chunks, Gates(gc_ptr, beta_ptr, ROW))),
        (store_chunks, (chunks, made)),
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

    mbarriers: as in scan_states_gluon_kernel; `halves` are of dS, `others` Z and dV.
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
    full, empty = places(STAGES, 1)
    out = results()
    fence_async_shared()
    chunks = Chunks(
        (k_desc, do_desc, P_desc, q_desc, AG_desc), (c_k, c_v, c_t, c_k, c_t),
        (ks, dos, Ps, qs, AGs), gates, full, empty, first, NT, (2 * K + BV + 2 * BT) * BT * 2, BT,
        STAGES, True,
    )  # fmt: skip
    made = Results(
        dh_desc, (Z_desc, dv_desc), (h1, h2), (Zs, dvs), out, (i_c * HV + i_h) * K, i_v * BV, c_v,
        skip, HV, K,
    )  # fmt: skip
    state = State(dht_ptr, dh0_ptr, i_nh, i_end, i_v, 0, K, V, BV)
    gl.warp_specialize([
        (scan_back, (chunks, made, state, scale)),
        (load_chunks, (chunks, Gates(gc_ptr, beta_ptr, ROW))),
        (store_chunks, (chunks, made)),
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


@attempt
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
        *chunks, descriptor(h, BV), descriptor(v_new, BV), beta, gc, h0, warmup,
        *piece_args(pieces), gc.stride(1), 1, H, HV, K, V, **TILES, **gdn_scan.OPTIONS,
    )  # fmt: skip


@attempt
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
        *chunks, descriptor(dh, BV), *outs, beta, gc, dht, dh0, scale, warmup,
        *piece_args(pieces), gc.stride(1), 1, H, HV, K, V, **TILES_BACK, **gdn_scan.OPTIONS,
    )  # fmt: skip


@attempt
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
        *chunks, descriptor(h, BV), new, descriptor(dh, BV), Zs, dvs, beta, gc, h0, dht, dh0,
        scale, forth, back, *piece_args(pieces), gc.stride(1), H, HV, K, V, **TILES_BOTH,
        **gdn_scan.OPTIONS,
    )  # fmt: skip
