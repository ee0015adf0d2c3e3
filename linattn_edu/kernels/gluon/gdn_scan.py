"""The scan of the fused forward pass in Gluon, for Hopper: products that run beside arithmetic.

One warp copies chunks ahead through a ring in shared memory; four hold S^T [64, K] in registers,
whose 16-bit copy is the first operand of the next product. A product is only begun where it stands,
and waited for where its result is needed.
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
    chunks_of,
    gates_of,
    keys_times_state,
    load_chunks,
    next_place,
    piece_of_program,
    rows_of,
    state_of,
)
from linattn_edu.kernels.gluon.support import attempt
from linattn_edu.kernels.pieces import Pieces


@gluon.jit
def scan_chunks(chunks, state, o_desc, out, scale, c_v, skip):
    """Warps that compute: scan_transposed_kernel's sums in its order; S^T in halves of 64 keys."""
    ks, vs, Rs, qs, Ps = chunks.rings
    gates, full, empty, NT = chunks.gates, chunks.full, chunks.empty, chunks.NT
    dtype: gl.constexpr = ks.dtype
    HALVES: gl.constexpr = state.K // 64  # with one, nothing is done with the second
    zero = gl.full([state.BV, 64], 0.0, gl.float32, MMA)
    b_S1, b_S2 = zero, zero
    o_S = rows_of(state)
    if state.first_ptr is not None:
        h0_ptr = state.first_ptr + state.i_nh.to(gl.int64) * state.K * state.V
        b_S1 = gl.load(h0_ptr + o_S).to(gl.float32)
        if HALVES == 2:
            b_S2 = gl.load(h0_ptr + o_S + 64 * state.V).to(gl.float32)
    b_h1, b_h2 = operand(b_S1, dtype), operand(b_S2, dtype)
    mbarrier.wait(full.index(0), 0)
    # (K S)^T of the first chunk
    b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(0), zero, state.K)])
    for i_t in range(NT):
        i = i_t % chunks.STAGES
        # eq:delta-inter   diag(2^gc) Q S
        b_o = product(b_h1, half(qs.index(i), 0).permute((1, 0)), zero, False)
        # eq:delta-residual   W = V - diag(2^gc) K S
        b_e = gates.index(3 * i).load(ALONG)[None, :]
        b_v = vs.index(i).permute((1, 0)).load(MMA)
        b_W = b_v.to(gl.float32) - b_e * b_W
        # eq:delta-v-new   v_new = R W
        b_new = product(operand(b_W, dtype), Rs.index(i).permute((1, 0)), zero, False)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decay = gates.index(3 * i).slice(chunks.BT - 1, 1).load(ALONG)[None, :]
        b_S1 *= decay
        if HALVES == 2:
            b_o = product(b_h2, half(qs.index(i), 1).permute((1, 0)), b_o)
            b_S2 *= decay
        b_new = warpgroup_mma_wait(HALVES - 1, [b_new])
        b_r = gates.index(3 * i + 1).load(ALONG)[None, :]
        b_16 = operand(b_new, dtype)
        b_new = operand(b_new * b_r, dtype)
        b_S1 = product(b_new, half(ks.index(i), 0), b_S1)
        if HALVES == 2:
            b_S2 = product(b_new, half(ks.index(i), 1), b_S2)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = warpgroup_mma_wait(HALVES, [b_o])
        b_o *= gates.index(3 * i).load(ALONG)[None, :]  # read again: registers are scarce
        b_o = product(b_16, Ps.index(i).permute((1, 0)), b_o)
        b_S1 = warpgroup_mma_wait(HALVES, [b_S1])
        b_h1 = operand(b_S1, dtype)
        if HALVES == 2:
            b_S2 = warpgroup_mma_wait(1, [b_S2])
            b_h2 = operand(b_S2, dtype)
        # K S of the next chunk; after the last one for nothing
        n = next_place(chunks, i_t)
        b_W = keys_times_state(b_h1, b_h2, ks.index(n), zero, state.K)
        b_o = warpgroup_mma_wait(HALVES, [b_o])
        b_o = (scale * b_o).to(dtype)
        tma.store_wait(0)
        barrier()  # no warp reads the chunk any more, and none has to wait to write `out`
        mbarrier.arrive(empty.index(i), count=1)
        out.permute((1, 0)).store(b_o)
        fence_async_shared()
        barrier()
        if i_t >= skip:
            async_store(o_desc, [chunks.first + i_t * chunks.BT, c_v], out)
        b_W = warpgroup_mma_wait(0, [b_W])
    tma.store_wait(0)
    if state.last_ptr is not None:
        ht_ptr = state.last_ptr + state.i_end.to(gl.int64) * state.K * state.V
        gl.store(ht_ptr + o_S, b_S1)
        if HALVES == 2:
            gl.store(ht_ptr + o_S + 64 * state.V, b_S2)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_gluon_kernel(
    q_desc, k_desc, v_desc, P_desc, R_desc, o_desc, gc_ptr, h0_ptr, ht_ptr, scale, warmup_ptr,
    cu_ptr, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Arguments of scan_kernel of kernels/fused/gdn_fwd.py, see `descriptor`.
    Reference: linattn_edu.reference.fused.gdn_fwd.scan.

    mbarriers, of a chunk in place i of the rings::

        empty[i]  computing warps -> loading warp: it may copy the next chunk to this place
        full[i]   the copies, and the loading warp with the gates -> computing warps, which begin
                  the products of the chunk before the last ones of the chunk ahead of it are done
    """
    piece = piece_of_program(
        gl.program_id(0), warmup_ptr, cu_ptr, None, T, N, H, HV, V, BT, BV, 1, False
    )
    if piece.NT == 0:  # an empty piece, or one that another program goes through
        return
    c_k, c_v, c_t = piece.i_k * K, piece.i_h * V + piece.i_v * BV, piece.i_h * BT
    given = gates_of(piece, gc_ptr, None, HV)
    ks, qs, vs = ring(k_desc, STAGES), ring(q_desc, STAGES), ring(v_desc, STAGES)
    Rs, Ps, out = ring(R_desc, STAGES), ring(P_desc, STAGES), ring(o_desc, 1).index(0)
    chunks = chunks_of(
        piece, (k_desc, v_desc, R_desc, q_desc, P_desc), (c_k, c_v, c_t, c_k, c_t),
        (ks, vs, Rs, qs, Ps), BT, STAGES, 1, False,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (scan_chunks, (
            chunks, state_of(0, piece, h0_ptr, ht_ptr, K, V, BV), o_desc, out, scale, c_v,
            piece.skip,
        )),
        (load_chunks, (chunks, given)),
    ], [1], [24])  # fmt: skip


# three chunks in shared memory: one at work, two on their way
TILES = {"BT": CHUNK, "BV": BV, "STAGES": 3}
OPTIONS = {"num_warps": 4, "maxnreg": 144}


@attempt
def scan_gluon(
    given: tuple[Tensor | None, ...], scale: float, warmup: Tensor | None, pieces: Pieces
) -> None:
    """Launch scan_gluon_kernel on the pieces; given: the tensors of scan_kernel, whose o and ht it
    writes.

    warmup: as `warm_up` returns it, or None for pieces that are scanned from their own first token.
    """
    q, k, v, gc, P, R, h0, o, ht = given
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    descriptors = map(descriptor, (q, k, v, P, R, o), (K, K, BV, CHUNK, CHUNK, BV))
    scan_gluon_kernel[(pieces.N * HV * V // BV,)](
        *descriptors, gc, h0, ht, scale, warmup, pieces.cu_seqlens, pieces.T, pieces.chained, H, HV,
        K, V, **TILES, **OPTIONS,
    )  # fmt: skip
