"""kda_fused_scan in Gluon, for Hopper, after the model of scan_gluon: a decay for each row of S.

Four warps hold S^T [64, 128] of 64 values; a program of 128 values has them twice, and each chunk
that the loading warp copies serves both.
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

from linattn_edu.kernels.gluon.blocks import CHUNK, descriptor, half, operand, product, ring
from linattn_edu.kernels.gluon.layouts import ALONG, MMA
from linattn_edu.kernels.gluon.names import async_store, barrier
from linattn_edu.kernels.gluon.scan_frame import (
    BV,
    channel_gates_of,
    chunks_of,
    keys_times_state,
    load_chunks,
    load_state,
    next_place,
    piece_of_program,
    residual,
    state_of,
    store_end,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.routes import by_load, kind_of, load_of


@gluon.jit
def kda_scan_chunks(chunks, state, o_desc, out, scale, c_v):
    """Four warps that compute: the sums of kda_fused_scan_transposed_kernel in its order, for tile
    W of the program's values.
    """
    kds, _, As, qs, kgs, Ps = chunks.rings[:6]
    gates, full, empty, NT = chunks.gates, chunks.full, chunks.empty, chunks.NT
    dtype: gl.constexpr = kds.dtype
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2 = load_state(state, NT)
    b_h1, b_h2 = operand(b_S1, dtype), operand(b_S2, dtype)
    mbarrier.wait(full.index(0), 0, pred=NT > 0)
    # (kd S)^T of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, kds.index(0), zero, state.K)])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:delta-inter   qg S
        b_o = product(b_h1, half(qs.index(i), 0).permute((1, 0)), zero, False)
        # eq:delta-residual   W = V - kd S
        # eq:delta-v-new   v_new = A diag(beta) W
        b_W = residual(chunks, 6, i, state.W, b_W)
        b_new = product(operand(b_W, dtype), As.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_o = product(b_h2, half(qs.index(i), 1).permute((1, 0)), b_o)
        b_S1 *= gates.index(3 * i).load(ALONG)[None, :]
        b_S2 *= gates.index(3 * i + 1).load(ALONG)[None, :]
        b_new = warpgroup_mma_wait(1, [b_new])
        b_x = operand(b_new, dtype)
        b_S1 = product(b_x, half(kgs.index(i), 0), b_S1)
        b_S2 = product(b_x, half(kgs.index(i), 1), b_S2)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = warpgroup_mma_wait(2, [b_o])
        b_o = product(b_x, Ps.index(i).permute((1, 0)), b_o)
        b_S1 = warpgroup_mma_wait(2, [b_S1])
        b_h1 = operand(b_S1, dtype)
        b_S2 = warpgroup_mma_wait(1, [b_S2])
        b_h2 = operand(b_S2, dtype)
        # kd S of the next chunk; after the last one for nothing
        n = next_place(chunks, i_t)
        b_W = keys_times_state(b_h1, b_h2, kds.index(n), zero, state.K)
        b_o = warpgroup_mma_wait(2, [b_o])
        b_o = (scale * b_o).to(dtype)
        tma.store_wait(0)
        barrier()  # no warp reads the chunk any more, and none has to wait to write `out`
        mbarrier.arrive(empty.index(i), count=1)
        out.permute((1, 0)).store(b_o)
        fence_async_shared()
        barrier()
        at = [chunks.first + i_t * chunks.BT, c_v + state.W * state.BV]
        async_store(o_desc, at, out)
        b_W = warpgroup_mma_wait(0, [b_W])
    tma.store_wait(0)
    if state.last_ptr is not None:
        store_end(state, b_S1, b_S2)


@gluon.jit(do_not_specialize=["T"])
def kda_scan_gluon_kernel(
    qg_desc, kg_desc, kd_desc, v_desc,
    write_desc,  # or None
    P_desc, A_desc, o_desc,
    beta_ptr,  # or None, with write
    gc_ptr, h0_ptr, ht_ptr, scale,
    ways_ptr,  # [N, HV]: -1 where another launch goes, or None
    cu_ptr, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    WORKERS: gl.constexpr,  # groups of four warps, each with BV values
):  # fmt: skip
    """One program: S[:, v-tiles] of one head, through all chunks.

    Grid (N * HV * V / BV / WORKERS).

    Arguments of kda_fused_scan_kernel of kernels/fused/kda_fwd.py, see `descriptor`.
    Reference: linattn_edu.reference.fused.kda_fwd.kda_fused_scan.

    mbarriers: as in gdn_scan's scan_gluon_kernel. Every group of four warps arrives at empty[i].
    """
    piece = piece_of_program(
        gl.program_id(0), ways_ptr, cu_ptr, None, T, 0, HV, HV, V, BT, BV, WORKERS, False
    )
    c_k, c_v, c_t = piece.i_h * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = channel_gates_of(piece, gc_ptr, beta_ptr, HV)
    kds, kgs, qs = ring(kd_desc, STAGES), ring(kg_desc, STAGES), ring(qg_desc, STAGES)
    vs, As, Ps = ring(v_desc, STAGES), ring(A_desc, STAGES), ring(P_desc, STAGES)
    out = ring(o_desc, WORKERS)
    descs = kd_desc, v_desc, A_desc, qg_desc, kg_desc, P_desc
    columns, rings = (c_k, c_v, c_t, c_k, c_k, c_t), (kds, vs, As, qs, kgs, Ps)
    if write_desc is not None:
        descs, columns = descs + (write_desc,), columns + (c_v,)  # noqa: RUF005
        rings = rings + (ring(write_desc, STAGES),)  # noqa: RUF005
    chunks = chunks_of(piece, descs, columns, rings, BT, STAGES, WORKERS, False)
    fence_async_shared()
    states = [
        state_of(w, piece, h0_ptr, ht_ptr, K, V, BV) for w in ((0, 1) if WORKERS == 2 else (0,))
    ]
    gl.warp_specialize(
        [(kda_scan_chunks, (chunks, x, o_desc, out.index(x.W), scale, c_v)) for x in states]
        + [(load_chunks, (chunks, given))],
        [4, 1] if WORKERS == 2 else [1],
        [240, 24] if WORKERS == 2 else [24],
    )


# WORKERS -> chunks in shared memory, one at work, the others on their way; and registers of a
# thread at the start, of which the warps that load and store keep 24, and the others take the rest
STAGES = {1: 3, 2: 2}
WRITE_STAGES = {1: 2, 2: 2}  # with a write gate
OPTIONS = {1: {"num_warps": 4, "maxnreg": 144}, 2: {"num_warps": 4, "maxnreg": 168}}


def workers_of(kg: Tensor, V: int, pieces: Pieces) -> int:
    """Tiles of BV values a program, of a scan in either direction."""
    load = load_of(kind_of(kg, kg.shape[2], V, CHUNK, None), kg, None)
    return by_load.workers(load, pieces.N).takes


@attempt
def kda_scan_gluon(
    given: tuple[Tensor | None, ...], scale: float, ways: Tensor | None, pieces: Pieces
) -> None:
    """Launch kda_scan_gluon_kernel on the pieces; given: the tensors of kda_fused_scan_kernel,
    whose o and ht it writes.  ways: of that kernel.
    """
    qg, kg, kd, v, beta, write, gc, P, A, h0, o, ht = given
    HV, K, V = *kg.shape[2:], v.shape[-1]
    workers = workers_of(kg, V, pieces)
    widths = K, K, K, workers * BV, workers * BV, CHUNK, CHUNK, BV
    descriptors = map(descriptor, (qg, kg, kd, v, write, P, A, o), widths)
    stages = STAGES if write is None else WRITE_STAGES
    kda_scan_gluon_kernel[(pieces.N * HV * V // BV // workers,)](
        *descriptors, beta, gc, h0, ht, scale, ways, pieces.cu_seqlens, pieces.T, HV, K, V,
        BT=CHUNK, BV=BV, STAGES=stages[workers], WORKERS=workers, **OPTIONS[workers],
    )  # fmt: skip
