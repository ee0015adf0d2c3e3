"""intra_chunk and the scan of Gated DeltaNet's fused forward pass as one kernel in Gluon.

For Hopper. A program goes through all chunks of a head. Four warps make P and R of a chunk, as
intra_chunk does, while one or two groups of four, each for 64 of the values, scan the chunk before.
So q and k are read once, and R is never in memory. One more warp loads, and takes the registers of
four; with 64 values, where they are scarce, the warps that make P and R load themselves.
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

from linattn_edu.kernels.gluon.blocks import (
    CHUNK,
    bar_pairs,
    descriptor,
    half,
    numbers,
    operand,
    product,
    ring,
)
from linattn_edu.kernels.gluon.gdn_solve import (
    cancel,
    inverse,
    invert_blocks,
    join_blocks,
    pairs,
    resolvent,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA
from linattn_edu.kernels.gluon.names import async_store, barrier, record, reinterpret
from linattn_edu.kernels.gluon.scan_frame import (
    BV,
    again,
    chunks_of,
    gates_of,
    hand_over,
    keys_times_state,
    load_chunk,
    load_chunks,
    next_place,
    piece_of_program,
    rows_of,
    state_of,
)
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.pieces import Pieces


@record
class Made:
    """What four warps make of each chunk: places for two. R is made of what lies in `inner`."""

    Rs: object
    Ps: object
    inner: object  # Rs as fp16
    full: object  # [2, 1] mbarriers: R and P are there
    empty: object  # [2, 1] mbarriers: no warp that scans reads them any more


@record
class Room:
    """Shared memory in which they are made, see gdn_solve."""

    Xs: object
    As: object  # from where A * G leaves; with 64 values Xs, in 16 bit as k has
    Ns: object
    D_s: object
    norms: object  # apart, so that no warp waits between their stores


@record
class Find:
    """Where heads are marked that cancel, if that is asked."""

    cancels_ptr: object  # [N, HV], or None
    i_nh: object
    rooms: object  # of each group of warps two places to work in, or None
    G: object  # heads that are marked together

    @gluon.jit
    def look(self, w: gl.constexpr, P_s, R_s, beta_s):
        """The w-th group of warps looks at a chunk."""
        rows_s, sums_s = self.rooms.index(2 * w), self.rooms.index(2 * w + 1)
        cancel(self.cancels_ptr, self.i_nh, P_s, R_s, beta_s, rows_s, sums_s, True, self.G)


@record
class BothGates:
    """Gates, for the scan, and gc itself."""

    gates: object
    gcs: object  # [STAGES, 64]

    @gluon.jit
    def of(self, i_t, NT, BT: gl.constexpr, BACK: gl.constexpr):
        """As Gates.of."""
        return self.gates.of(i_t, NT, BT, BACK)

    @gluon.jit
    def leave(self, gates, i, b_gc, b_beta, b_last):
        """As Gates.leave."""
        self.gates.leave(gates, i, b_gc, b_beta, b_last)
        self.gcs.index(i).store(b_gc)


@gluon.jit
def load_later(chunks, given, i_t, gates):
    """Load the last chunk that the rings take, once its place is empty; the next one's gates."""
    n = i_t + (chunks.STAGES - 1)
    if (i_t > 0) & (n < chunks.NT):
        i = n % chunks.STAGES
        mbarrier.wait(chunks.empty.index(i), (n // chunks.STAGES & 1) ^ 1)
        load_chunk(chunks, i, chunks.first + n * chunks.BT, given, gates)
        barrier()
        mbarrier.arrive(chunks.full.index(i), count=1)
    return given.of(n + 1, chunks.NT, chunks.BT, False)


@gluon.jit
def make_chunks(chunks, given, made, room, gcs, P_desc, A_desc, c_t, skip, find):
    """The warps that make P and R: intra_chunk_gluon_kernel's sums. P and A * G are stored, too.

    given: (gates,) if these warps load the chunks, too.
    """
    LOADS: gl.constexpr = len(given) == 1
    ks, _, qs = chunks.rings
    dtype: gl.constexpr = ks.dtype
    if LOADS:
        for n in range(gl.minimum(chunks.STAGES, chunks.NT)):
            gates = given[0].of(n, chunks.NT, chunks.BT, False)
            load_chunk(chunks, n % chunks.STAGES, chunks.first + n * chunks.BT, given[0], gates)
            barrier()
            mbarrier.arrive(chunks.full.index(n % chunks.STAGES), count=1)
        gates = given[0].of(chunks.STAGES, chunks.NT, chunks.BT, False)
    mbarrier.wait(chunks.full.index(0), 0)
    b_S = warpgroup_mma_wait(0, [pairs(ks.index(0), ks.index(0))])
    for i_t in range(chunks.NT):
        i, j = i_t % chunks.STAGES, i_t % 2
        # 0, and the compiler cannot know, see gdn_intra
        z = i_t >> 30
        n_s, w_s, u_s = room.norms[0].index(z), room.norms[1].index(z), room.norms[2].index(z)
        X_s, N_s, A_s = room.Xs.index(z), room.Ns.index(z), room.As.index(z)
        L_s, P_s, gc_s = made.inner.index(j), made.Ps.index(j), gcs.index(i)
        b_P = pairs(qs.index(i), ks.index(i))
        mbarrier.wait(made.empty.index(j), (i_t // 2 & 1) ^ 1)
        if LOADS and A_desc is not None:
            tma.store_wait(0)
            barrier()  # what was made before has left
        invert_blocks(b_S, chunks.gates.index(3 * i + 2), n_s, w_s, u_s, room.D_s, L_s, X_s, z)
        if LOADS:
            gates = load_later(chunks, given[0], i_t, gates)
        b_P = warpgroup_mma_wait(0, [b_P])
        if A_desc is not None and not LOADS:
            tma.store_wait(0)  # the same; `join_blocks` says so to all warps
        b_A, b_G = join_blocks(b_P, gc_s, P_s, L_s, X_s, N_s, z)
        k_s = ks.index(next_place(chunks, i_t))
        b_S = pairs(k_s, k_s)
        made.Rs.index(j).store(resolvent(b_A, b_G, w_s, u_s).to(dtype))
        if A_desc is not None:
            if LOADS:
                barrier()  # no product reads X_s any more
            A_s.store(inverse(b_A, b_G, n_s, w_s, True).to(dtype))
        hand_over(made.full.index(j))
        if A_desc is not None:  # noqa: SIM102  (known beforehand)
            if i_t >= skip:
                at = [chunks.first + i_t * chunks.BT, c_t]
                async_store(P_desc, at, P_s)
                async_store(A_desc, at, A_s)
        b_S = warpgroup_mma_wait(0, [b_S])
        if LOADS and find.cancels_ptr is not None:
            find.look(0, P_s, made.Rs.index(j), chunks.gates.index(3 * i + 2))
    tma.store_wait(0)


@gluon.jit
def read_and_written(b_new, gate_s, dtype: gl.constexpr):
    """v_new as P and as the state take it."""
    b_w = b_new * gate_s.load(ALONG)[None, :]
    return operand(b_new, dtype), operand(b_w, dtype)


@gluon.jit
def scan_made(chunks, made, state, o_desc, out, scale, c_v, skip, find):
    """Warps that scan: scan_transposed_kernel's sums in its order; S^T in halves of 64 keys.

    Each product is waited for: what bounds the time is the making of P and R. So where two
    groups scan they look, by turns, whether numbers cancel; else those that make P and R do.
    """
    ks, vs, qs = chunks.rings
    gates, NT = chunks.gates, chunks.NT
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
    for i_t in range(NT):
        i, j = i_t % chunks.STAGES, i_t % 2
        mbarrier.wait(chunks.full.index(i), i_t // chunks.STAGES & 1)
        b_h1, b_h2 = operand(b_S1, dtype), operand(b_S2, dtype)
        # eq:delta-residual   W = V - diag(2^gc) K S
        b_W = warpgroup_mma_wait(0, [keys_times_state(b_h1, b_h2, ks.index(i), zero, state.K)])
        b_v = half(vs.index(i), state.W).permute((1, 0)).load(MMA)
        b_W = b_v.to(gl.float32) - gates.index(3 * i).load(ALONG)[None, :] * b_W
        # eq:delta-v-new   v_new = R W
        mbarrier.wait(made.full.index(j), i_t // 2 & 1)
        b_new = product(operand(b_W, dtype), made.Rs.index(j).permute((1, 0)), zero, False)
        b_new = warpgroup_mma_wait(0, [b_new])
        if HALVES == 1:  # before b_o takes registers
            b_16, b_new = read_and_written(b_new, gates.index(3 * i + 1), dtype)
        # eq:delta-inter   diag(2^gc) Q S
        b_h1 = operand(again(b_S1, i_t), dtype)
        b_o = product(b_h1, half(qs.index(i), 0).permute((1, 0)), zero, False)
        if HALVES == 2:
            b_o = warpgroup_mma_wait(0, [b_o])
            b_h2 = operand(again(b_S2, i_t), dtype)
            b_o = product(b_h2, half(qs.index(i), 1).permute((1, 0)), b_o)
            b_16, b_new = read_and_written(b_new, gates.index(3 * i + 1), dtype)
        b_o = warpgroup_mma_wait(0, [b_o])
        # eq:delta-output   o = scale (inter + P v_new)
        b_o *= gates.index(3 * i).load(ALONG)[None, :]
        b_o = warpgroup_mma_wait(0, [product(b_16, made.Ps.index(j).permute((1, 0)), b_o)])
        b_o = (scale * b_o).to(dtype)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decay = gates.index(3 * i).slice(chunks.BT - 1, 1).load(ALONG)[None, :]
        b_S1 = product(b_new, half(ks.index(i), 0), b_S1 * decay)
        if HALVES == 2:
            b_S2 = product(b_new, half(ks.index(i), 1), b_S2 * decay)
            b_S1, b_S2 = warpgroup_mma_wait(0, [b_S1, b_S2])
        else:
            b_S1 = warpgroup_mma_wait(0, [b_S1])
        if find.cancels_ptr is not None and state.V > state.BV:  # noqa: SIM102  (known beforehand)
            if i_t % 2 == state.W:
                find.look(state.W, made.Ps.index(j), made.Rs.index(j), gates.index(3 * i + 2))
        tma.store_wait(0)
        barrier()  # no warp reads the chunk any more, and none has to wait to write `out`
        mbarrier.arrive(made.empty.index(j), count=1)
        mbarrier.arrive(chunks.empty.index(i), count=1)
        out.permute((1, 0)).store(b_o)
        fence_async_shared()
        barrier()
        if i_t >= skip:
            async_store(o_desc, [chunks.first + i_t * chunks.BT, c_v], out)
    tma.store_wait(0)
    if state.last_ptr is not None:
        ht_ptr = state.last_ptr + state.i_end.to(gl.int64) * state.K * state.V
        gl.store(ht_ptr + o_S, b_S1)
        if HALVES == 2:
            gl.store(ht_ptr + o_S + 64 * state.V, b_S2)


@gluon.jit(do_not_specialize=["T", "N"])
def chunk_fwd_gluon_kernel(
    q_desc, k_desc, v_desc, P_desc, AG_desc, o_desc, beta_ptr, gc_ptr, h0_ptr, ht_ptr,
    cancels_ptr, scale, warmup_ptr, cu_ptr, T, N,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BT: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that scans
):  # fmt: skip
    """One program: one head of a sequence or piece, through all chunks.  Grid (N * HV).

    Arguments of scores_kernel, resolvent_kernel, scan_kernel and, or None, cancels_kernel of
    kernels/fused, see `descriptor`; P and AG are written, or None both.

    Reference: linattn_edu.reference.fused.gdn_fwd.chunk_fwd.

    mbarriers; i: place of a chunk in the rings, j: of what is made of it::

        full[i]        the copies of q, k and v, and the gates, from the warps that load -> all
        made.full[j]   R and P are there -> warps that scan
        made.empty[j]  warps that scan have read them -> warps that make those of the next but one
        empty[i]       warps that scan have read the chunk, of which all is made -> those that load
    """
    WORKERS: gl.constexpr = V // BV
    piece = piece_of_program(
        gl.program_id(0), warmup_ptr, cu_ptr, None, T, N, H, HV, V, BT, BV, WORKERS, False
    )
    if piece.NT == 0:  # an empty piece, or one that another program goes through
        return
    c_k, c_v, c_t = piece.i_k * K, piece.i_h * V, piece.i_h * BT
    ks, qs, vs = ring(k_desc, STAGES), ring(q_desc, STAGES), ring(v_desc, STAGES)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BT, BT], k_desc.dtype)
    inner = gl.allocate_shared_memory(gl.float16, [2, BT, BT], tile)
    Rs = reinterpret(inner, k_desc.dtype, [2, BT, BT], tile)
    Ps = gl.allocate_shared_memory(k_desc.dtype, [2, BT, BT], tile)
    full, empty = bar_pairs(2, 1, WORKERS)
    made = Made(Rs, Ps, inner, full, empty)
    Xs = gl.allocate_shared_memory(gl.float16, [1, BT, BT], tile)
    As = reinterpret(Xs, k_desc.dtype, [1, BT, BT], tile)
    if WORKERS == 2:
        As = gl.allocate_shared_memory(k_desc.dtype, [1, BT, BT], tile)
    cube: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    room = Room(
        Xs, As, gl.allocate_shared_memory(gl.float16, [1, BT, BT], tile),
        gl.allocate_shared_memory(gl.float32, [4, 16, 16], cube),
        (numbers([1, BT]), numbers([1, BT]), numbers([1, BT])),
    )  # fmt: skip
    out = ring(o_desc, WORKERS)
    gcs = numbers([STAGES, BT])
    rooms = None if cancels_ptr is None else numbers([2 * WORKERS, BT])
    find = Find(cancels_ptr, piece.i_nh, rooms, HV // H)
    chunks = chunks_of(
        piece, (k_desc, v_desc, q_desc), (c_k, c_v, c_k), (ks, vs, qs), BT, STAGES, WORKERS, False
    )
    fence_async_shared()
    gates = BothGates(gates_of(piece, gc_ptr, beta_ptr, HV), gcs)
    given = () if WORKERS == 2 else (gates,)
    gl.warp_specialize(
        [(make_chunks, (chunks, given, made, room, gcs, P_desc, AG_desc, c_t, piece.skip, find))]
        + [
            (scan_made, (
                chunks, made, state_of(w, piece, h0_ptr, ht_ptr, K, V, BV), o_desc, out.index(w),
                scale, c_v + w * BV, piece.skip, find,
            ))
            for w in ((0, 1) if WORKERS == 2 else (0,))
        ]
        + ([(load_chunks, (chunks, gates))] if WORKERS == 2 else []),
        [4, 4, 1] if WORKERS == 2 else [4],
        [REGISTERS, REGISTERS, 24] if WORKERS == 2 else [REGISTERS],
    )  # fmt: skip


# values -> tiles: three chunks in shared memory, or, for two programs a multiprocessor, two; and
# registers of a thread that scans: one that only loads keeps 24, those that make P and R the rest
TILES = {
    64: {"BT": CHUNK, "BV": BV, "STAGES": 2, "REGISTERS": 112},
    128: {"BT": CHUNK, "BV": BV, "STAGES": 3, "REGISTERS": 176},
}
OPTIONS = {"num_warps": 4, "maxnreg": 128, **ALLOCATE}


@attempt
def chunk_fwd_gluon(
    given: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...], scale: float,
    warmup: Tensor | None, pieces: Pieces,
) -> None:  # fmt: skip
    """Launch the kernel on sequences or pieces.

    given: q, k, v, beta, gc and h0; out, which it writes: o, ht, P, A * G and, of sequences,
    cancels, the last four or None. warmup: as of scan_gluon.
    """
    q, k, v, beta, gc, h0 = given
    o, ht, P, AG, found = out
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    inner = (descriptor(x, CHUNK) for x in (P, AG))
    chunk_fwd_gluon_kernel[(pieces.N * HV,)](
        descriptor(q, K), descriptor(k, K), descriptor(v, V), *inner, descriptor(o, BV),
        beta, gc, h0, ht, found, scale, warmup, pieces.cu_seqlens, pieces.T, pieces.N, H, HV, K, V,
        **TILES[V], **OPTIONS,
    )  # fmt: skip
