"""kda_fused_scans in Gluon, for Hopper, after the model of scans_gluon: a decay for each row of S.

Four warps hold S^T or dS^T [64, 128] of 64 values; a program of 128 values has them twice, and each
chunk that the loading warp copies serves both. One warp for each copies results out.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from linattn_edu.kernels.gluon.blocks import CHUNK, descriptor, half, operand, product, ring
from linattn_edu.kernels.gluon.gdn_scans import carry_on
from linattn_edu.kernels.gluon.kda_scan import OPTIONS, workers_of
from linattn_edu.kernels.gluon.layouts import ALONG, MMA
from linattn_edu.kernels.gluon.scan_frame import (
    BV,
    begin,
    channel_gates_of,
    hand_over,
    hand_over_state,
    keys_times_state,
    next_place,
    piece_of_program,
    places,
    residual,
    scan_and_store,
    store_end,
    store_transposed,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.pieces import Pieces


@gluon.jit
def kda_scan_forth(chunks, made, state):
    """Four warps that compute: the sums of kda_scan_states, for tile W of the values."""
    kds, _, As, kgs = chunks.rings[:4]
    gates, empty, NT = chunks.gates, chunks.empty, chunks.NT
    new, out = made.others[0], made.bars
    dtype: gl.constexpr = kds.dtype
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2, b_h1, b_h2 = begin(chunks, made, state, dtype)
    # kd S of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, kds.index(0), zero, state.K)])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:delta-residual   W = V - kd S
        # eq:delta-v-new   v_new = A diag(beta) W
        b_W = residual(chunks, 4, i, state.W, b_W)
        b_new = product(operand(b_W, dtype), As.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_S1 *= gates.index(3 * i).load(ALONG)[None, :]
        b_S2 *= gates.index(3 * i + 1).load(ALONG)[None, :]
        b_new = warpgroup_mma_wait(0, [b_new])
        b_x = operand(b_new, dtype)
        b_S1 = product(b_x, half(kgs.index(i), 0), b_S1)
        b_S2 = product(b_x, half(kgs.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_new.to(dtype), new)
        hand_over(out.index(2))
        b_S1, b_S2, b_W = carry_on(kds, chunks, made, i_t, b_S1, b_S2, zero)
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_W = warpgroup_mma_wait(0, [b_W])


@gluon.jit
def output_part(do, P, zero):
    """Begin (P^T dO)^T."""
    return product(do.permute((1, 0)), P, zero, False)


@gluon.jit
def plus_keys_times_state(b_h1, b_h2, k, acc):
    """Begin acc + (K S)^T, from S^T in halves of 64 keys."""
    acc = product(b_h1, half(k, 0).permute((1, 0)), acc)
    return product(b_h2, half(k, 1).permute((1, 0)), acc)


@gluon.jit
def kda_scan_back(chunks, made, state, scale):
    """Four warps that compute: the sums of kda_scan_bwd, for tile W of the values."""
    dos, Ps, kgs, As, qs, kds = chunks.rings
    gates, empty, NT = chunks.gates, chunks.empty, chunks.NT
    others, out = made.others, made.bars  # Z, and with beta dv
    dtype: gl.constexpr = kds.dtype
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2, b_h1, b_h2 = begin(chunks, made, state, dtype)
    # dv_new of the last chunk
    b_dv = warpgroup_mma_wait(0, [output_part(half(dos.index(0), state.W), Ps.index(0), zero)])
    b_dv = plus_keys_times_state(b_h1, b_h2, kgs.index(0), b_dv * scale)
    b_dv = warpgroup_mma_wait(0, [b_dv])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:fused-ds   dS <- diag(2^gc_last) dS + qg^T scale dO - kd^T dV
        b_do = half(dos.index(i), state.W).permute((1, 0)).load(MMA).to(gl.float32) * scale
        b_do = operand(b_do, dtype)
        b_S1 *= gates.index(3 * i).load(ALONG)[None, :]
        b_S2 *= gates.index(3 * i + 1).load(ALONG)[None, :]
        # eq:kda-z   Z = A^T dv_new
        b_Z = product(operand(b_dv, dtype), As.index(i), zero, False)
        b_S1 = product(b_do, half(qs.index(i), 0), b_S1)
        b_S2 = product(b_do, half(qs.index(i), 1), b_S2)
        # eq:kda-dv   dV = diag(beta) Z
        b_Z = warpgroup_mma_wait(2, [b_Z])
        b_dv = b_Z
        if len(others) == 2:
            b_dv = gates.index(3 * i + 2).load(ALONG)[None, :] * b_Z
        b_x = operand(-b_dv, dtype)
        b_S1 = warpgroup_mma_wait(1, [b_S1])
        b_S1 = product(b_x, half(kds.index(i), 0), b_S1)
        b_S2 = product(b_x, half(kds.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_Z.to(dtype), others[0])
        if len(others) == 2:
            store_transposed(b_dv.to(dtype), others[1])
        hand_over(out.index(2))
        # eq:kda-dv-out   dv_new = scale P^T dO
        # eq:delta-dv-new   dv_new += kg dS: of the next chunk; after the last one for nothing
        n = next_place(chunks, i_t)
        b_S1 = warpgroup_mma_wait(1, [b_S1])
        b_dv = output_part(half(dos.index(n), state.W), Ps.index(n), zero)
        b_h1 = operand(b_S1, dtype)
        b_S2 = warpgroup_mma_wait(1, [b_S2])
        b_h2 = operand(b_S2, dtype)
        b_dv = warpgroup_mma_wait(0, [b_dv]) * scale
        b_dv = plus_keys_times_state(b_h1, b_h2, kgs.index(n), b_dv)
        mbarrier.wait(out.index(1), i_t & 1)
        hand_over_state(made, b_S1, b_S2, dtype)
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_dv = warpgroup_mma_wait(0, [b_dv])
    store_end(state, b_S1, b_S2)


@gluon.jit(do_not_specialize=["T"])
def kda_scan_states_gluon_kernel(
    kg_desc, kd_desc, v_desc, write_desc, A_desc, h_desc, new_desc, beta_ptr, gc_ptr, h0_ptr,
    ways_ptr, cu_ptr, offsets_ptr, T,
    STEP: gl.constexpr,  # one of so many programs of the grid
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    WORKERS: gl.constexpr,  # groups of four warps, each with BV values
):  # fmt: skip
    """One program: S[:, v-tiles] of one head, through all chunks.

    Grid (N * HV * V / BV / WORKERS).  Arguments of kda_scans_gluon_kernel, and mbarriers of
    scan_and_store; `others` is v_new.

    Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    piece = piece_of_program(
        gl.program_id(0) // STEP, ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, HV, V, BT, BV, WORKERS,
        False,
    )  # fmt: skip
    c_k, c_v, c_t = piece.i_h * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = channel_gates_of(piece, gc_ptr, beta_ptr, HV)
    kds, kgs = ring(kd_desc, STAGES), ring(kg_desc, STAGES)
    vs, As = ring(v_desc, STAGES), ring(A_desc, STAGES)
    descs, columns = (kd_desc, v_desc, A_desc, kg_desc), (c_k, c_v, c_t, c_k)
    rings = kds, vs, As, kgs
    if write_desc is not None:
        descs, columns = descs + (write_desc,), columns + (c_v,)  # noqa: RUF005
        rings = rings + (ring(write_desc, STAGES),)  # noqa: RUF005
    halves = places(ring(h_desc, 2 * WORKERS))
    scan_and_store(
        kda_scan_forth, (), piece, given, descs, columns, rings, h_desc, halves, (new_desc,),
        h0_ptr, None, HV, K, V, BT, BV, STAGES, WORKERS, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])
def kda_scan_bwd_gluon_kernel(
    qg_desc, kg_desc, kd_desc, P_desc, A_desc, do_desc, dh_desc, Z_desc, dv_desc, beta_ptr, gc_ptr,
    dht_ptr, dh0_ptr, scale, ways_ptr, cu_ptr, offsets_ptr, T,
    STEP: gl.constexpr,  # one of so many programs of the grid
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    WORKERS: gl.constexpr,  # groups of four warps, each with BV values
):  # fmt: skip
    """One program: dS[:, v-tiles] of one head, back through all chunks.

    Grid (N * HV * V / BV / WORKERS).  Arguments of kda_scans_gluon_kernel, and mbarriers of
    scan_and_store; `halves` are of dS, `others` Z and, without a write gate, dv.

    Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    piece = piece_of_program(
        gl.program_id(0) // STEP, ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, HV, V, BT, BV, WORKERS,
        True,
    )  # fmt: skip
    c_k, c_v, c_t = piece.i_h * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = channel_gates_of(piece, gc_ptr, beta_ptr, HV)
    kds, kgs, qs = ring(kd_desc, STAGES), ring(kg_desc, STAGES), ring(qg_desc, STAGES)
    dos, As, Ps = ring(do_desc, STAGES), ring(A_desc, STAGES), ring(P_desc, STAGES)
    halves = places(ring(dh_desc, 2 * WORKERS))
    scan_and_store(
        kda_scan_back, (scale,), piece, given, (do_desc, P_desc, kg_desc, A_desc, qg_desc, kd_desc),
        (c_v, c_t, c_k, c_t, c_k, c_k), (dos, Ps, kgs, As, qs, kds), dh_desc, halves,
        (Z_desc,) if dv_desc is None else (Z_desc, dv_desc), dht_ptr, dh0_ptr, HV, K, V, BT, BV,
        STAGES, WORKERS, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])
def kda_scans_gluon_kernel(
    qg_desc, kg_desc, kd_desc, v_desc, write_desc, P_desc, A_desc, do_desc, h_desc, new_desc,
    dh_desc, Z_desc, dv_desc, beta_ptr, gc_ptr, h0_ptr, dht_ptr, dh0_ptr, scale, ways_ptr, cu_ptr,
    offsets_ptr, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, STAGES_BACK: gl.constexpr,
):  # fmt: skip
    """The programs of both kernels.

    Arguments of kda_fused_scans_kernel of kernels/fused/kda_scans.py, see `descriptor`; new: v_new.
    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    if gl.program_id(0) % 2 == 0:
        kda_scan_bwd_gluon_kernel(
            qg_desc, kg_desc, kd_desc, P_desc, A_desc, do_desc, dh_desc, Z_desc, dv_desc, beta_ptr,
            gc_ptr, dht_ptr, dh0_ptr, scale, ways_ptr, cu_ptr, offsets_ptr, T, 2, HV, K, V, BT, BV,
            STAGES_BACK, 1,
        )  # fmt: skip
    else:
        kda_scan_states_gluon_kernel(
            kg_desc, kd_desc, v_desc, write_desc, A_desc, h_desc, new_desc, beta_ptr, gc_ptr,
            h0_ptr, ways_ptr, cu_ptr, offsets_ptr, T, 2, HV, K, V, BT, BV, STAGES, 1,
        )  # fmt: skip


# WORKERS -> chunks in shared memory
STAGES, STAGES_BACK = {1: 3, 2: 3}, {1: 2, 2: 2}
WRITE_STAGES = {1: 3, 2: 2}  # of the first, with a write gate


@attempt
def kda_scan_states_gluon(
    given: tuple[Tensor | None, ...], ways: Tensor | None, pieces: Pieces
) -> None:
    """Launch kda_scan_states_gluon_kernel on the pieces; given: the tensors of kda_scan_states,
    whose h and v_new it writes.  ways: [N, HV], -1 where another launch goes, or None.
    """
    kg, kd, v, beta, write, gc, A, h0, h, v_new = given
    HV, K, V = *kg.shape[2:], v.shape[-1]
    n = workers_of(kg, V, pieces)
    widths = K, K, n * BV, n * BV, CHUNK, BV, BV
    descriptors = map(descriptor, (kg, kd, v, write, A, h, v_new), widths)
    stages = STAGES if write is None else WRITE_STAGES
    kda_scan_states_gluon_kernel[(pieces.N * HV * V // BV // n,)](
        *descriptors, beta, gc, h0, ways, *pieces.places, 1, HV, K, V, BT=CHUNK, BV=BV,
        STAGES=stages[n], WORKERS=n, **OPTIONS[n],
    )  # fmt: skip


@attempt
def kda_scan_bwd_gluon(
    given: tuple[Tensor | None, ...], scale: float, ways: Tensor | None, pieces: Pieces
) -> None:
    """Launch kda_scan_bwd_gluon_kernel on the pieces; given: the tensors of kda_scan_bwd, whose dh,
    Z, dv and dh0 it writes.  ways: of kda_scan_states_gluon.
    """
    qg, kg, kd, beta, gc, P, A, do, dht, dh, Z, dv, dh0 = given
    HV, K, V = *kg.shape[2:], do.shape[-1]
    n = workers_of(kg, V, pieces)
    widths = K, K, K, CHUNK, CHUNK, n * BV, BV, BV, BV
    descriptors = map(descriptor, (qg, kg, kd, P, A, do, dh, Z, dv), widths)
    kda_scan_bwd_gluon_kernel[(pieces.N * HV * V // BV // n,)](
        *descriptors, beta, gc, dht, dh0, scale, ways, *pieces.places, 1, HV, K, V, BT=CHUNK,
        BV=BV, STAGES=STAGES_BACK[n], WORKERS=n, **OPTIONS[n],
    )  # fmt: skip


@attempt
def kda_scans_gluon(
    given: tuple[Tensor | None, ...], scale: float, ways: Tensor | None, pieces: Pieces
) -> None:
    """Launch kda_scans_gluon_kernel on the pieces; given: the tensors of kda_fused_scans_kernel, of
    which it writes what the two others write.  ways: of kda_scan_states_gluon.
    """
    qg, kg, kd, v, beta, write, gc, P, A, do, h0, dht, h, v_new, dh, Z, dv, dh0 = given
    HV, K, V = *kg.shape[2:], v.shape[-1]
    tensors = qg, kg, kd, v, write, P, A, do, h, v_new, dh, Z, dv
    widths = K, K, K, BV, BV, CHUNK, CHUNK, BV, BV, BV, BV, BV, BV
    stages = STAGES if write is None else WRITE_STAGES
    kda_scans_gluon_kernel[(2 * pieces.N * HV * V // BV,)](
        *map(descriptor, tensors, widths), beta, gc, h0, dht, dh0, scale, ways, *pieces.places,
        HV, K, V, BT=CHUNK, BV=BV, STAGES=stages[1], STAGES_BACK=STAGES_BACK[1], **OPTIONS[1],
    )  # fmt: skip
