"""The two scans of the fused backward pass in Gluon, for Hopper, after the model of gdn_scan.

Four warps hold S^T or dS^T [64, 128] in registers. One warp copies chunks ahead, and one copies
results out: the four only write them to shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from linattn_edu.kernels.gluon import gdn_scan
from linattn_edu.kernels.gluon.blocks import CHUNK, descriptor, half, operand, product, ring
from linattn_edu.kernels.gluon.layouts import ALONG, MMA
from linattn_edu.kernels.gluon.scan_frame import (
    BV,
    begin,
    gates_of,
    hand_over,
    hand_over_state,
    keys_times_state,
    next_place,
    piece_of_program,
    scan_and_store,
    store_state,
    store_transposed,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.pieces import Pieces


@gluon.jit
def carry_on(ks, chunks, made, i_t, b_S1, b_S2, zero):
    """Begin K S of the next chunk, after the last one for nothing, and hand S over."""
    n = next_place(chunks, i_t)
    b_S1 = warpgroup_mma_wait(1, [b_S1])
    b_h1 = operand(b_S1, ks.dtype)
    b_W = product(b_h1, half(ks.index(n), 0).permute((1, 0)), zero, False)
    b_S2 = warpgroup_mma_wait(1, [b_S2])
    b_h2 = operand(b_S2, ks.dtype)
    b_W = product(b_h2, half(ks.index(n), 1).permute((1, 0)), b_W)
    mbarrier.wait(made.bars.index(1), i_t & 1)
    hand_over_state(made, b_S1, b_S2, ks.dtype)
    return b_S1, b_S2, b_W


@gluon.jit
def scan_forth(chunks, made, state):
    """The warps that compute: the sums of scan_states_kernel in its order."""
    ks, vs, AGs = chunks.rings
    gates, empty, NT = chunks.gates, chunks.empty, chunks.NT
    new, out = made.others[0], made.bars
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2, b_h1, b_h2 = begin(chunks, made, state, dtype)
    # K S of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, state.K)])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:delta-residual   W = V - diag(2^gc) K S
        b_v = vs.index(i).permute((1, 0)).load(MMA)
        b_W = b_v.to(gl.float32) - gates.index(3 * i).load(ALONG)[None, :] * b_W
        # eq:delta-v-new   v_new = (A * G) diag(beta) W
        b_W *= gates.index(3 * i + 2).load(ALONG)[None, :]
        b_new = product(operand(b_W, dtype), AGs.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decay = gates.index(3 * i).slice(chunks.BT - 1, 1).load(ALONG)[None, :]
        b_S1 *= decay
        b_S2 *= decay
        b_r = gates.index(3 * i + 1).load(ALONG)[None, :]
        b_new = warpgroup_mma_wait(0, [b_new])
        b_x = operand(b_new * b_r, dtype)
        b_S1 = product(b_x, half(ks.index(i), 0), b_S1)
        b_S2 = product(b_x, half(ks.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_new.to(dtype), new)
        hand_over(out.index(2))
        b_S1, b_S2, b_W = carry_on(ks, chunks, made, i_t, b_S1, b_S2, zero)
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_W = warpgroup_mma_wait(0, [b_W])


@gluon.jit
def scan_back(chunks, made, state, scale):
    """Warps that compute: the sums of scan_bwd_kernel in its order; dS^T in halves of 64 keys."""
    ks, dos, Ps, qs, AGs = chunks.rings
    gates, empty, NT = chunks.gates, chunks.empty, chunks.NT
    Zs, dvs = made.others
    out = made.bars
    dtype: gl.constexpr = ks.dtype
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2, b_h1, b_h2 = begin(chunks, made, state, dtype)
    # K S of the last chunk
    b_dv = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, state.K)])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        b_do = dos.index(i).permute((1, 0)).load(MMA).to(gl.float32) * scale
        b_dv *= gates.index(3 * i + 1).load(ALONG)[None, :]
        b_dv = product(operand(b_do, dtype), Ps.index(i), b_dv)
        # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
        b_e = gates.index(3 * i).load(ALONG)[None, :]
        decay = gates.index(3 * i).slice(chunks.BT - 1, 1).load(ALONG)[None, :]
        b_S1 *= decay
        b_S2 *= decay
        b_do = operand(b_e * b_do, dtype)
        b_S1 = product(b_do, half(qs.index(i), 0), b_S1)
        # eq:delta-z   Z = (A * G)^T dv_new
        b_dv = warpgroup_mma_wait(1, [b_dv])
        b_Z = product(operand(b_dv, dtype), AGs.index(i), zero, False)
        b_S2 = product(b_do, half(qs.index(i), 1), b_S2)
        # eq:delta-dv   dV = diag(beta) Z
        b_Z = warpgroup_mma_wait(1, [b_Z])
        b_dv = gates.index(3 * i + 2).load(ALONG)[None, :] * b_Z
        b_e = gates.index(3 * i).load(ALONG)[None, :]  # read again: registers are scarce
        b_x = operand(-b_e * b_dv, dtype)
        b_S1 = product(b_x, half(ks.index(i), 0), b_S1)
        b_S2 = product(b_x, half(ks.index(i), 1), b_S2)
        mbarrier.wait(out.index(3), i_t & 1)
        store_transposed(b_Z.to(dtype), Zs)
        store_transposed(b_dv.to(dtype), dvs)
        hand_over(out.index(2))
        b_S1, b_S2, b_dv = carry_on(ks, chunks, made, i_t, b_S1, b_S2, zero)
        mbarrier.arrive(empty.index(i), count=1)  # no warp reads the chunk any more
        b_dv = warpgroup_mma_wait(0, [b_dv])
    if state.i_end >= 0:
        store_state(state, b_S1, b_S2)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_states_gluon_kernel(
    k_desc, v_desc, AG_desc, h_desc, new_desc, beta_ptr, gc_ptr, h0_ptr, warmup_ptr, cu_ptr,
    offsets_ptr, T, N,
    ROW: gl.constexpr, STEP: gl.constexpr,  # one of so many programs of the grid
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Arguments of scans_gluon_kernel, and mbarriers of scan_and_store; `others` is v_new.

    Reference: linattn_edu.reference.fused.gdn_scans.scan_states.
    """
    piece = piece_of_program(
        gl.program_id(0) // STEP, warmup_ptr, cu_ptr, offsets_ptr, T, N, H, HV, V, BT, BV, 1, False
    )
    c_k, c_v, c_t = piece.i_k * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = gates_of(piece, gc_ptr, beta_ptr, ROW)
    rings = ring(k_desc, STAGES), ring(v_desc, STAGES), ring(AG_desc, STAGES)
    # apart: between two stores to one allocation the compiler puts a barrier
    halves = ring(h_desc, 1).index(0), ring(h_desc, 1).index(0)
    scan_and_store(
        scan_forth, (), piece, given, (k_desc, v_desc, AG_desc), (c_k, c_v, c_t), rings, h_desc,
        halves, (new_desc,), h0_ptr, None, HV, K, V, BT, BV, STAGES, 1, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "N"])
def scan_bwd_gluon_kernel(
    q_desc, k_desc, P_desc, AG_desc, do_desc, dh_desc, Z_desc, dv_desc, beta_ptr, gc_ptr, dht_ptr,
    dh0_ptr, scale, warmup_ptr, cu_ptr, offsets_ptr, T, N,
    ROW: gl.constexpr, STEP: gl.constexpr,  # one of so many programs of the grid
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Arguments of scans_gluon_kernel, and mbarriers of scan_and_store; `halves` are of dS, `others`
    Z and dV.

    Reference: linattn_edu.reference.fused.gdn_scans.scan_bwd.
    """
    piece = piece_of_program(
        gl.program_id(0) // STEP, warmup_ptr, cu_ptr, offsets_ptr, T, N, H, HV, V, BT, BV, 1, True
    )
    c_k, c_v, c_t = piece.i_k * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = gates_of(piece, gc_ptr, beta_ptr, ROW)
    ks, qs, dos = ring(k_desc, STAGES), ring(q_desc, STAGES), ring(do_desc, STAGES)
    Ps, AGs = ring(P_desc, STAGES), ring(AG_desc, STAGES)
    halves = ring(dh_desc, 1).index(0), ring(dh_desc, 1).index(0)  # apart, as forth
    scan_and_store(
        scan_back, (scale,), piece, given, (k_desc, do_desc, P_desc, q_desc, AG_desc),
        (c_k, c_v, c_t, c_k, c_t), (ks, dos, Ps, qs, AGs), dh_desc, halves,
        (Z_desc, dv_desc), dht_ptr, dh0_ptr, HV, K, V, BT, BV, STAGES, 1, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "N"])
def scans_gluon_kernel(
    q_desc, k_desc, v_desc, P_desc, AG_desc, do_desc, h_desc, new_desc, dh_desc, Z_desc, dv_desc,
    beta_ptr, gc_ptr, h0_ptr, dht_ptr, dh0_ptr, scale, forth_ptr, back_ptr, cu_ptr, offsets_ptr, T,
    N,
    ROW: gl.constexpr,  # numbers between tokens in beta and gc, which may have more heads
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, STAGES_BACK: gl.constexpr,
):  # fmt: skip
    """The programs of both kernels.

    Arguments of scans_kernel of kernels/fused/gdn_scans.py, see `descriptor`; new: v_new.
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
    given: tuple[Tensor | None, ...], warmup: Tensor | None, pieces: Pieces
) -> None:
    """Launch scan_states_gluon_kernel on the pieces; given: Scans.forth, whose h and v_new it
    writes.
    """
    k, v, beta, gc, AG, h0, h, v_new = given
    (H, K), (HV, V) = k.shape[2:], v.shape[2:]
    descriptors = map(descriptor, (k, v, AG, h, v_new), (K, BV, CHUNK, BV, BV))
    scan_states_gluon_kernel[(pieces.N * HV * V // BV,)](
        *descriptors, beta, gc, h0, warmup, *pieces.places, pieces.chained, gc.stride(1), 1,
        H, HV, K, V, **TILES, **gdn_scan.OPTIONS,
    )  # fmt: skip


@attempt
def scan_bwd_gluon(
    given: tuple[Tensor | None, ...], scale: float, warmup: Tensor | None, pieces: Pieces
) -> None:
    """Launch scan_bwd_gluon_kernel on the pieces; given: Scans.back, whose dh, Z, dv and dh0 it
    writes.
    """
    q, k, beta, gc, P, AG, do, dht, dh, Z, dv, dh0 = given
    (H, K), (HV, V) = q.shape[2:], do.shape[2:]
    widths = K, K, CHUNK, CHUNK, BV, BV, BV, BV
    descriptors = map(descriptor, (q, k, P, AG, do, dh, Z, dv), widths)
    scan_bwd_gluon_kernel[(pieces.N * HV * V // BV,)](
        *descriptors, beta, gc, dht, dh0, scale, warmup, *pieces.places, pieces.chained,
        gc.stride(1), 1, H, HV, K, V, **TILES_BACK, **gdn_scan.OPTIONS,
    )  # fmt: skip


@attempt
def scans_gluon(
    given: tuple[Tensor | None, ...], scale: float, forth: Tensor | None, back: Tensor | None,
    pieces: Pieces,
) -> None:  # fmt: skip
    """Launch scans_gluon_kernel on the pieces; given: Scans, of which it writes what the two others
    write.
    """
    q, k, v, beta, gc, P, AG, do, h0, dht, h, v_new, dh, Z, dv, dh0 = given
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    tensors = q, k, v, P, AG, do, h, v_new, dh, Z, dv
    widths = K, K, BV, CHUNK, CHUNK, BV, BV, BV, BV, BV, BV
    scans_gluon_kernel[(2 * pieces.N * HV * V // BV,)](
        *map(descriptor, tensors, widths), beta, gc, h0, dht, dh0, scale, forth, back,
        *pieces.places, pieces.chained, gc.stride(1), H, HV, K, V, **TILES_BOTH, **gdn_scan.OPTIONS,
    )  # fmt: skip
