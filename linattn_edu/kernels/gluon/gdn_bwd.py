"""scan_bwd and intra_chunk_bwd of Gated DeltaNet's fused backward pass as one kernel in Gluon.

For Hopper. A program goes back through all chunks of a head. Two groups of four warps hold dS^T in
registers, each for half of the values, as the scan does, and make dQ, each for half of the keys. A
third makes of each chunk what is left, as intra_chunk_bwd does, while the two are at the chunk
before. So dS and Z stay in shared memory, where everything is in tiles of 64 x 64.
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
    bar,
    bars,
    beside,
    descriptor,
    numbers,
    operand,
    own_dot,
    own_sums,
    product,
    ring,
    without_last,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, VECTOR
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.gluon.scan_frame import (
    again,
    chunk_at,
    gates_of,
    hand_over,
    load_state,
    piece_of_program,
    state_of,
    store_state,
    store_transposed,
)
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.tiles import significand


@record
class Memory:
    """Tiles in shared memory: of keys and of values two halves, of states the values of the first
    half of the keys, then of the second.
    """

    qs: object
    ks: object  # two places; dk leaves from there
    vs: object
    Ps: object  # P and A * G; dV leaves from there
    Ss: object
    news: object  # v_new
    dos: object  # two places; dq leaves from there
    dSs: object
    Zs: object
    inner: object  # dM, diag(beta) dL
    gates: object  # two places of gc and beta
    parts: object  # dgc, dbeta, and what dgc's last row gets; before, what `read_gradient` says


@record
class Bars:
    """The mbarriers, see scan_intra_bwd_gluon_kernel."""

    full_k: object  # two, as of the next
    empty_k: object
    full_q: object
    full_do: object  # two, as of the next
    empty_do: object
    full_P: object
    empty_P: object
    full_new: object
    full_h: object  # two, as of the halves of the keys
    full_Z: object
    full_M: object
    read_do: object
    used: object  # two, as full_h
    used_q: object
    updated: object


@record
class Out:
    """Where the results go, and what they are scaled by."""

    dq_desc: object
    dk_desc: object
    dv_desc: object
    dbeta_ptr: object
    dgc_ptr: object
    scale: object
    ROW: object


@gluon.jit
def load_pair(desc, row, column, bar, tiles, i):
    """Two tiles beside each other, to places i and i + 1."""
    async_load(desc, [row, column], bar, tiles.index(i))
    async_load(desc, [row, column + 64], bar, tiles.index(i + 1))


@gluon.jit
def load_keys(k_desc, piece, m, bars, given, n, b_gc, b_beta):
    """k of the n-th chunk and its gates, of which it returns those of the next one."""
    i = n % 2
    row = piece.first + chunk_at(n, piece.NT, True) * 64
    mbarrier.wait(bars.empty_k.index(i), (n // 2 & 1) ^ 1)
    full = bars.full_k.index(i)
    mbarrier.expect(full, 2 * 64 * 64 * 2)
    load_pair(k_desc, row, piece.i_k * 128, full, m.ks, 2 * i)
    m.gates.index(2 * i).store(b_gc)
    m.gates.index(2 * i + 1).store(b_beta)
    b_gc, b_beta, _ = given.of(n + 1, piece.NT, 64, True)
    barrier()
    mbarrier.arrive(full, count=1)
    return b_gc, b_beta


@gluon.jit
def load_do(do_desc, piece, m, bars, n):
    """do of the n-th chunk."""
    i = n % 2
    mbarrier.wait(bars.empty_do.index(i), (n // 2 & 1) ^ 1)
    full = bars.full_do.index(i)
    mbarrier.expect(full, 2 * 64 * 64 * 2)
    row = piece.first + chunk_at(n, piece.NT, True) * 64
    load_pair(do_desc, row, piece.i_h * 128, full, m.dos, 2 * i)


@gluon.jit
def load_back(descs, piece, m, bars, given, HV: gl.constexpr):
    """The producer, a warp that loads, in the order in which places become empty."""
    q_desc, k_desc, v_desc, P_desc, AG_desc, h_desc, v_new_desc, do_desc = descs
    NT = piece.NT
    b_gc, b_beta, _ = given.of(0, NT, 64, True)
    if NT > 0:
        b_gc, b_beta = load_keys(k_desc, piece, m, bars, given, 0, b_gc, b_beta)
        load_do(do_desc, piece, m, bars, 0)
    for n in range(NT):
        i_c, empty = chunk_at(n, NT, True), (n & 1) ^ 1
        row, column = piece.first + i_c * 64, piece.i_h * 128
        mbarrier.wait(bars.empty_P, empty)
        mbarrier.expect(bars.full_P, 2 * 64 * 64 * 2)
        async_load(P_desc, [row, piece.i_h * 64], bars.full_P, m.Ps.index(0))
        async_load(AG_desc, [row, piece.i_h * 64], bars.full_P, m.Ps.index(1))
        i_S = ((piece.i_c + i_c) * HV + piece.i_h) * 128
        for c in gl.static_range(2):
            full_h = bars.full_h.index(c)
            mbarrier.wait(bars.used.index(c), empty)
            if c == 1:
                mbarrier.expect(bars.full_new, 2 * 64 * 64 * 2)
                load_pair(v_new_desc, row, column, bars.full_new, m.news, 0)
            mbarrier.expect(full_h, 3 * 64 * 64 * 2)
            load_pair(h_desc, i_S + c * 64, 0, full_h, m.Ss, 2 * c)
            async_load(v_desc, [row, column + c * 64], full_h, m.vs.index(c))
        mbarrier.wait(bars.used_q, empty)
        mbarrier.expect(bars.full_q, 2 * 64 * 64 * 2)
        load_pair(q_desc, row, piece.i_k * 128, bars.full_q, m.qs, 0)
        if n + 1 < NT:
            load_do(do_desc, piece, m, bars, n + 1)
            b_gc, b_beta = load_keys(k_desc, piece, m, bars, given, n + 1, b_gc, b_beta)


@gluon.jit
def times_transposed(x, o, y, i, zero):
    """Begin x y^T: of x both halves of the columns, at o and behind it, of y those at i."""
    b_x = product(x.index(o), y.index(i).permute((1, 0)), zero, False)
    return product(x.index(o + 1), y.index(i + 1).permute((1, 0)), b_x)


@gluon.jit
def read_gradient(c: gl.constexpr, m, bars, i, z, turn, zero, scale):
    """Half c of dQ to the place of dO; dM's diagonal is in `parts`, sums of Q * dQ go behind it."""
    k, q = m.ks.index(2 * i + c), m.qs.index(c + z)
    mbarrier.wait(bars.full_h.index(c), turn)
    mbarrier.wait(bars.full_M, turn)
    b_dq = warpgroup_mma_wait(0, [times_transposed(m.dos, 2 * i, m.Ss, 2 * c + z, zero)])
    barrier()
    mbarrier.arrive(bars.read_do, count=1)
    mbarrier.arrive(bars.used.index(c), count=1)
    # eq:delta-dq   dQ = scale diag(2^gc) dO S^T + dM K
    b_dq *= gl.exp2(m.gates.index(2 * i).load(ROWS))[:, None] * scale
    b_dq = warpgroup_mma_wait(0, [product(m.inner.index(z), k, b_dq)])
    b_sums = gl.sum(own_sums(q.load(MMA).to(gl.float32) * b_dq), 1)
    m.parts.index(1 + c).store(gl.convert_layout(b_sums, ROWS))
    b_dq += m.parts.index(0).load(ROWS)[:, None] * k.load(MMA).to(gl.float32)
    mbarrier.wait(bars.read_do, turn)
    m.dos.index(2 * i + c).store(b_dq.to(m.dos.dtype))
    hand_over(bars.updated)


# over 80 lines: the order of its products, waits and arithmetic is what it is about
@gluon.jit
def scan_back(w: gl.constexpr, m, bars, state, out, piece):
    """Half w of the values, by four warps: scan_bwd_kernel's sums."""
    dtype: gl.constexpr = m.ks.dtype
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    NT = piece.NT
    b_S1, b_S2 = load_state(state, NT)
    for i_t in range(NT):
        i, turn = i_t % 2, i_t & 1
        z = i_t >> 30  # 0, and the compiler cannot know, see gdn_intra_bwd
        do, gc, beta = m.dos.index(2 * i + w), m.gates.index(2 * i), m.gates.index(2 * i + 1)
        # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        mbarrier.wait(bars.full_k.index(i), i_t // 2 & 1)
        k1, k2 = m.ks.index(2 * i).permute((1, 0)), m.ks.index(2 * i + 1).permute((1, 0))
        b_dv = product(operand(b_S1, dtype), k1, zero, False)
        b_dv = warpgroup_mma_wait(0, [product(operand(b_S2, dtype), k2, b_dv)])
        mbarrier.wait(bars.full_do.index(i), i_t // 2 & 1)
        b_do = do.permute((1, 0)).load(MMA).to(gl.float32) * out.scale
        b_last = gc.slice(63, 1).load(ALONG)
        b_dv *= gl.exp2(b_last - gc.load(ALONG))[None, :]
        mbarrier.wait(bars.full_P, turn)
        b_dv = product(operand(b_do, dtype), m.Ps.index(z), b_dv)
        b_dv = warpgroup_mma_wait(0, [b_dv])
        # eq:delta-z   Z = (A * G)^T dv_new
        b_Z = product(operand(b_dv, dtype), m.Ps.index(1 + z), zero, False)
        b_Z = warpgroup_mma_wait(0, [b_Z])
        mbarrier.wait(bars.used.index(0), turn ^ 1)  # dS of the chunk after
        mbarrier.wait(bars.used.index(1), turn ^ 1)  # and Z
        store_transposed(again(b_S1, i_t).to(dtype), m.dSs.index(w + z))
        store_transposed(again(b_S2, i_t).to(dtype), m.dSs.index(2 + w + z))
        store_transposed(b_Z.to(dtype), m.Zs.index(w + z))
        tma.store_wait(0)
        hand_over(bars.full_Z)
        if i_t > 0:  # dq of the chunk after has left
            mbarrier.arrive(bars.empty_do.index(1 - i), count=1)
        # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
        decay = gl.exp2(b_last)[None, :]
        b_S1 *= decay
        b_S2 *= decay
        b_e = gl.exp2(gc.load(ALONG))[None, :]
        b_do = do.permute((1, 0)).load(MMA).to(gl.float32) * out.scale
        b_do = operand(b_e * b_do, dtype)
        mbarrier.wait(bars.full_q, turn)
        b_S1 = product(b_do, m.qs.index(z), b_S1)
        b_S2 = product(b_do, m.qs.index(1 + z), b_S2)
        # eq:delta-dv   dV = diag(beta) Z
        b_dv = beta.load(ALONG)[None, :] * b_Z
        mbarrier.wait(bars.full_Z, turn)  # both of the scan have read P and A * G
        store_transposed(b_dv.to(dtype), m.Ps.index(w + z))
        fence_async_shared()
        barrier()
        row = piece.first + chunk_at(i_t, NT, True) * 64
        async_store(out.dv_desc, [row, piece.i_h * 128 + w * 64], m.Ps.index(w + z))
        b_e = gl.exp2(gc.load(ALONG))[None, :]  # made again: registers are scarce
        b_x = operand(-b_e * b_dv, dtype)
        # with Triton 3.9 all would wait if these had not been waited for
        b_S1, b_S2 = warpgroup_mma_wait(0, [b_S1, b_S2])
        b_S1 = product(b_x, m.ks.index(2 * i), b_S1)
        b_S2 = product(b_x, m.ks.index(2 * i + 1), b_S2)
        b_S1, b_S2 = warpgroup_mma_wait(0, [b_S1, b_S2])
        tma.store_wait(0)
        barrier()  # dV has left
        mbarrier.arrive(bars.empty_P, count=1)
        read_gradient(w, m, bars, i, z, turn, zero, out.scale)
        async_store(out.dq_desc, [row, piece.i_k * 128 + w * 64], m.dos.index(2 * i + w))
    tma.store_wait(0)
    if state.i_end >= 0:
        store_state(state, b_S1, b_S2)


@gluon.jit
def within(b_P, gc, z):
    """b_P times the decay from column to row, its diagonal, and what is below that; above it b_P
    may be anything.
    """
    o_i = gl.arange(0, 64, ROWS)[:, None] + z
    o_j = gl.arange(0, 64, ALONG)[None, :]
    b_d = gc.load(ROWS)[:, None] - gc.load(ALONG)[None, :]
    return b_P * gl.exp2(b_d), o_i == o_j, o_i > o_j


@gluon.jit
def key_gradient(c, m, i, z, a_dL, b_F, b_W, b_own, b_dbeta):
    """Half c of dK; parts of dgc, dbeta and dgc's last row.  b_F: Z S^T, b_W: v_new dS^T."""
    k, q, gc = m.ks.index(2 * i + c), m.qs.index(c), m.gates.index(2 * i)
    beta = m.gates.index(2 * i + 1)
    # eq:fused-read   F = dL K - diag(2^gc) Z S^T, here times one of beta = one two
    b_one, _ = significand(beta.load(ROWS)[:, None])
    b_F = product(a_dL, k, b_F * -(b_one * gl.exp2(gc.load(ROWS))[:, None]))
    # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
    b_W *= gl.exp2(gc.slice(63, 1).load(ROWS) - gc.load(ROWS))[:, None]
    b_k = k.load(MMA).to(gl.float32)
    b_t = without_last(own_sums(b_k * b_W))
    # eq:fused-dk   dK = diag(beta) F + D
    b_dk = b_W + b_own * q.load(MMA).to(gl.float32)
    b_dgc = own_sums(b_k * b_dk) - b_t
    # eq:fused-write   D = dK_state + dM^T Q + (diag(beta) dL)^T K
    b_dk = product(m.inner.index(1 + z).permute((1, 0)), k, b_dk)
    b_dk = product(m.inner.index(z).permute((1, 0)), q, b_dk)
    b_F = warpgroup_mma_wait(2, [b_F])
    b_k = k.load(MMA).to(gl.float32)
    _, b_two = significand(beta.load(ROWS)[:, None])
    b_KF = own_sums(b_k * b_F)
    b_F *= b_two
    # rounded once with the sum, as in intra_chunk_bwd: in one block of code with it
    b_one, b_two = significand(beside(beta, b_KF))
    b_dbeta += b_KF * (1.0 / b_one)
    b_dgc += b_KF * b_two
    b_dk = warpgroup_mma_wait(0, [b_dk])
    b_KD = own_sums(b_k * b_dk)
    return b_dk + b_F, b_dgc - b_KD, b_dbeta, b_t


@gluon.jit
def half_of_keys(c, m, bars, i, turn, zero, a_dL, b_own):
    """Half c of dK to the place of k; parts of dgc, dbeta and dgc's last row."""
    z = c >> 30  # 0, as above
    i += z
    mbarrier.wait(bars.full_h.index(c), turn)
    b_F = times_transposed(m.Zs, z, m.Ss, 2 * c, zero)
    b_W = times_transposed(m.news, z, m.dSs, 2 * c, zero)
    b_through = own_dot(m.Ss.index(2 * c), m.dSs.index(2 * c))
    b_through += own_dot(m.Ss.index(2 * c + 1), m.dSs.index(2 * c + 1))
    b_last = m.gates.index(2 * i).slice(63, 1).load(ROWS)
    decay = gl.exp2(gl.max(b_last, 0))
    b_dbeta = own_dot(m.Zs.index(c), m.vs.index(c))
    b_F, b_W = warpgroup_mma_wait(0, [b_F, b_W])
    barrier()  # no warp reads the half of S, dS and v any more
    mbarrier.arrive(bars.used.index(c), count=1)
    b_dk, b_dgc, b_dbeta, b_t = key_gradient(c, m, i, z, a_dL, b_F, b_W, b_own, b_dbeta)
    mbarrier.wait(bars.updated, turn)
    barrier()  # no warp reads the half of k and of q any more
    if c == 1:
        mbarrier.arrive(bars.used_q, count=1)
    m.ks.index(2 * i + c).store(b_dk.to(m.ks.dtype))
    return (
        gl.convert_layout(gl.sum(b_dgc, 1), ROWS) + m.parts.index(1 + c).load(ROWS),
        gl.convert_layout(gl.sum(b_dbeta, 1), ROWS),
        gl.convert_layout(gl.sum(b_through * decay + b_t, 1), ROWS),
    )


@gluon.jit
def store_sums(m, out, row, i_h):
    """dgc and dbeta of a chunk, of what was left in parts."""
    ROW: gl.constexpr = out.ROW
    o_t = gl.arange(0, 64, VECTOR)
    o = (row + o_t).to(gl.int64) * ROW + i_h
    # eq:fused-dgc   dgc = q dq + beta k f - k d; dgc_last += sum k dk + 2^gc_last <dS, S>
    b_through = gl.sum(m.parts.index(2).load(VECTOR), 0)
    gl.store(out.dgc_ptr + o, m.parts.index(0).load(VECTOR) + gl.where(o_t == 63, b_through, 0.0))
    # eq:fused-dbeta   dbeta = rowsum(Z * V) + rowsum(K * F)
    gl.store(out.dbeta_ptr + o, m.parts.index(1).load(VECTOR).to(out.dbeta_ptr.dtype.element_ty))


@gluon.jit
def gradients(m, bars, out, piece):
    """All but dV and dQ of each chunk, by four warps: intra_chunk_bwd_kernel's sums."""
    dtype: gl.constexpr = m.ks.dtype
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    sums = gl.full([64], 0.0, gl.float32, ROWS)
    NT = piece.NT
    for i_t in range(NT):
        i, turn = i_t % 2, i_t & 1
        z = i_t >> 30  # 0, and the compiler cannot know, see gdn_intra_bwd
        mbarrier.wait(bars.full_do.index(i), i_t // 2 & 1)
        mbarrier.wait(bars.full_new, turn)
        b_P = times_transposed(m.dos, 2 * i, m.news, z, zero)
        if i_t > 0:
            tma.store_wait(0)
            barrier()  # dk of the chunk after has left
            mbarrier.arrive(bars.empty_k.index(1 - i), count=1)
        mbarrier.wait(bars.full_k.index(i), i_t // 2 & 1)
        b_P = warpgroup_mma_wait(0, [b_P])
        # eq:delta-dm   dM = scale (dO v_new^T) * G
        b_P, diagonal, below = within(b_P, m.gates.index(2 * i), z)
        b_P *= out.scale
        # no decay acts on the diagonal: it must not be in the sums of dgc, where it would cancel
        b_own = gl.sum(gl.where(diagonal, b_P, 0.0), 1)
        m.parts.index(0).store(b_own)
        b_own = b_own[:, None]
        m.inner.index(z).store(gl.where(below, b_P, 0.0).to(dtype))
        hand_over(bars.full_M)
        mbarrier.wait(bars.full_Z, turn)
        b_P = warpgroup_mma_wait(0, [times_transposed(m.Zs, z, m.news, z, zero)])
        # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
        b_P, diagonal, below = within(b_P, m.gates.index(2 * i), z)
        b_one, b_two = significand(m.gates.index(2 * i + 1).load(ROWS)[:, None])
        b_P = gl.where(below, -b_P, 0.0) * b_one
        m.inner.index(1 + z).store((b_two * b_P).to(dtype))
        a_dL = operand(b_P, dtype)
        fence_async_shared()
        barrier()
        mbarrier.wait(bars.full_q, turn)
        b_dgc, b_dbeta, b_through = sums, sums, sums
        for c in range(2):
            b_1, b_2, b_3 = half_of_keys(c, m, bars, i, turn, zero, a_dL, b_own)
            b_dgc, b_dbeta, b_through = b_dgc + b_1, b_dbeta + b_2, b_through + b_3
        m.parts.index(0).store(b_dgc)
        m.parts.index(1).store(b_dbeta)
        m.parts.index(2).store(b_through)
        fence_async_shared()
        barrier()
        row, column = piece.first + chunk_at(i_t, NT, True) * 64, piece.i_k * 128
        async_store(out.dk_desc, [row, column], m.ks.index(2 * i))
        async_store(out.dk_desc, [row, column + 64], m.ks.index(2 * i + 1))
        store_sums(m, out, row, piece.i_h)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "N"])
def scan_intra_bwd_gluon_kernel(
    q_desc, k_desc, v_desc, P_desc, AG_desc, h_desc, v_new_desc, do_desc, dq_desc, dk_desc, dv_desc,
    beta_ptr, gc_ptr, dht_ptr, dh0_ptr, dbeta_ptr, dgc_ptr, scale,
    warmup_ptr,  # None, or -1 for heads that are not worked on
    cu_ptr, offsets_ptr, T, N,
    ROW: gl.constexpr,  # numbers between tokens in beta and gc, and in their gradients
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence, back through all chunks.  Grid (N * HV).

    Arguments of scan_bwd_kernel and intra_chunk_bwd_kernel of kernels/fused, see `descriptor`.
    Reference: linattn_edu.reference.fused.gdn_bwd.chunk_bwd.

    mbarriers; two groups of four warps scan, a third makes the gradients::

        full_k, full_q    k and gates, two places; q -> all
        empty_k   gradients: dk has left -> loading warp
        full_do   do, two places -> all
        empty_do  scan: dq has left -> loading warp
        full_P    P and A * G -> scan
        empty_P   dV has left -> loading warp
        full_new  v_new -> gradients
        full_h    S and v, a half of the keys and of the values each -> gradients, and the one of
                  the scan that makes this half of dQ
        full_Z    both of the scan: dS and Z, so P and A * G have been read -> gradients; both of
                  the scan, which leave dV in the place of P and A * G
        full_M    gradients: dM -> scan, which makes dQ
        read_do   both of the scan have read do for it -> both, which leave dq in its place
        used      gradients have read a half of S, dS and v, one of the scan this half of S; with
                  the second, Z and v_new have been read -> loading warp and scan
        used_q    gradients have read q; what the scan reads of it stands before `updated`, for
                  which they have waited by then -> loading warp
        updated   the scan reads no k and q of the chunk any more, and has left its part of dgc ->
                  gradients, which leave dk in the place of k
    """
    piece = piece_of_program(
        gl.program_id(0), warmup_ptr, cu_ptr, offsets_ptr, T, N, H, HV, V, 64, 64, 2, True
    )
    m = Memory(
        ring(q_desc, 2), ring(k_desc, 4), ring(v_desc, 2), ring(P_desc, 2), ring(h_desc, 4),
        ring(v_new_desc, 2), ring(do_desc, 4), ring(h_desc, 4), ring(do_desc, 2), ring(P_desc, 2),
        numbers([4, 64]), numbers([3, 64]),
    )  # fmt: skip
    b = Bars(
        bars(2, 2), bars(2, 1), bar(1), bars(2, 1), bars(2, 2), bar(1), bar(2), bar(1), bars(2, 1),
        bar(2), bar(1), bar(2), bars(2, 2), bar(1), bar(2),
    )  # fmt: skip
    fence_async_shared()
    descs = q_desc, k_desc, v_desc, P_desc, AG_desc, h_desc, v_new_desc, do_desc
    out = Out(dq_desc, dk_desc, dv_desc, dbeta_ptr, dgc_ptr, scale, ROW)
    given = gates_of(piece, gc_ptr, beta_ptr, ROW)
    gl.warp_specialize([
        (gradients, (m, b, out, piece)),
        (scan_back, (0, m, b, state_of(0, piece, dht_ptr, dh0_ptr, K, V, 64), out, piece)),
        (scan_back, (1, m, b, state_of(1, piece, dht_ptr, dh0_ptr, K, V, 64), out, piece)),
        (load_back, (descs, piece, m, b, given, HV)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip


# of the registers at the start the warps that load and scan keep what they ask for, the others
# take the rest, 168 a thread
OPTIONS = {"num_warps": 4, "maxnreg": 128, **ALLOCATE}


@attempt
def scan_intra_bwd_gluon(
    given: tuple[Tensor | None, ...], out: tuple[Tensor, ...], scale: float, ways: Tensor | None,
    pieces: Pieces,
) -> None:  # fmt: skip
    """Launch the kernel on whole sequences.

    given: q, k, v, beta, gc, P, AG, h, v_new, do and dht; out, which it writes: dq, dk, dv, dbeta,
    dgc and dh0. Tensors [B, T, heads, ...] may be views of some heads. ways: [N, HV], -1 for heads
    that are not worked on, or None.
    """
    q, k, v, beta, gc, P, AG, h, v_new, do, dht = given
    dq, dk, dv, dbeta, dgc, dh0 = out
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    tensors = q, k, v, P, AG, h, v_new, do, dq, dk, dv
    scan_intra_bwd_gluon_kernel[(pieces.N * HV,)](
        *(descriptor(x, CHUNK) for x in tensors), beta, gc, dht, dh0, dbeta, dgc, scale, ways,
        *pieces.places, pieces.chained, gc.stride(1), H, HV, K, V, **OPTIONS,
    )  # fmt: skip
