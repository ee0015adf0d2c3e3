"""kda_fused_intra_bwd of Kimi Delta Attention's fused backward pass in Gluon, for Hopper.

A program stays on its multiprocessor and takes one chunk after the other, as in intra_bwd_gluon.
One warp copies tiles ahead. Two groups of four warps compute, each half of the channels, with the
channels as rows: of what a gate multiplies a product makes the first operand of the next, which
stays in registers. With erase and write gates two more warps have what is left of the values.
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

from linattn_edu.kernels.delta.kda_intra_bwd import NEAR
from linattn_edu.kernels.gluon.blocks import (
    CHUNK,
    bar,
    bars,
    descriptor,
    half,
    in_halves,
    item_at,
    numbers,
    operand,
    own_dot,
    product,
    ring,
    rounded,
    sum_backwards,
)
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.rows import device_of


@record
class Source:
    """What is copied in, by tensor maps, and the gates; and near_ptr, which the loader writes."""

    q_desc: object
    k_desc: object
    v_desc: object
    erase_desc: object  # or None, here and below: beta is given
    gc_desc: object
    h_desc: object
    v_new_desc: object
    do_desc: object
    dh_desc: object
    Z_desc: object
    beta_ptr: object
    gc_ptr: object
    near_ptr: object


@record
class Memory:
    """Shared memory. Halves of the channels are two places."""

    qs: object  # halves; dq leaves from there
    ks: object  # halves; dk leaves from there
    gcs: object  # halves; dgc leaves from there
    vs: object  # with beta
    bs: object  # erase gates, in halves; their gradients leave from there
    hs: object
    news: object  # v_new
    dos: object
    dhs: object
    Zs: object
    inner: object  # dP, dL and the low half of dP
    betas: object
    middles: object  # gc of the middle token
    lasts: object  # gc of the last token
    nears: object  # whether the gates of a half are near
    sums: object  # of dgc, of the later half of a chunk
    own: object  # the diagonal of dP
    parts: object  # two sums of each half


@record
class Values:
    """What else is there of a write gate: a quarter of the tokens of a chunk at a time."""

    v_desc: object
    write_desc: object
    dv_desc: object
    dwrite_desc: object
    v: object  # the gradient of w leaves from there
    w: object  # dv leaves from there
    full: object  # an mbarrier: both have come


@record
class Bars:
    """The mbarriers. Full: copies have come."""

    full_new: object  # do, v_new, Z and, with beta, v
    full_h: object
    full_dh: object
    full_k: object  # q, k, gc and erase gates
    gates_full: object  # betas, middles, lasts and nears
    empty_h: object  # what full_new, full_h and full_dh say has been read
    empty_k: object  # these have been read, their gradients have left
    ready: object  # dP and dL are there
    used: object  # neither, nor what was left beside them, is needed any more


@record
class Out:
    """Where the results go, and what they are scaled by."""

    dq_desc: object
    dk_desc: object
    dgc_desc: object
    derase_desc: object
    dP_ptr: object
    dL_ptr: object
    dgl_ptr: object
    dbeta_ptr: object
    scale: object


@gluon.jit
def load_tiles(source, m, bars, N, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
               BT: gl.constexpr):  # fmt: skip
    """The producer, a warp that loads, in the order in which the others read, for N items."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_t, o_k, o_n = gl.arange(0, BT, layout), gl.arange(0, K, layout), gl.arange(0, 2, layout)
    for n in range(N):
        i_c, i_h, _ = item_at(n, HV, 1)
        begin, column, i_S = i_c * BT, i_h * V, (i_c * HV + i_h) * K
        mbarrier.wait(bars.empty_h, (n & 1) ^ 1)
        mbarrier.expect(bars.full_new, (4 if m.bs is None else 3) * BT * V * 2)
        async_load(source.do_desc, [begin, column], bars.full_new, m.dos.index(0))
        async_load(source.v_new_desc, [begin, column], bars.full_new, m.news.index(0))
        async_load(source.Z_desc, [begin, column], bars.full_new, m.Zs.index(0))
        if m.bs is None:
            async_load(source.v_desc, [begin, column], bars.full_new, m.vs.index(0))
        mbarrier.expect(bars.full_h, K * V * 2)
        async_load(source.h_desc, [i_S, 0], bars.full_h, m.hs.index(0))
        mbarrier.expect(bars.full_dh, K * V * 2)
        async_load(source.dh_desc, [i_S, 0], bars.full_dh, m.dhs.index(0))
        # of the gates these rows are needed before the others have come
        i = begin.to(gl.int64) * HV + i_h
        if m.bs is None:
            b_beta = gl.load(source.beta_ptr + i + o_t * HV).to(gl.float32)
        b_first = gl.load(source.gc_ptr + i * K + o_k)
        b_middle = gl.load(source.gc_ptr + (i + BT // 2 * HV) * K + o_k)
        b_last = gl.load(source.gc_ptr + (i + (BT - 1) * HV) * K + o_k)
        mbarrier.wait(bars.empty_k, (n & 1) ^ 1)
        mbarrier.expect(bars.full_k, BT * K * (8 if m.bs is None else 10))
        for c in gl.static_range(2):
            at = [begin, i_h * K + c * (K // 2)]
            async_load(source.k_desc, at, bars.full_k, m.ks.index(c))
            async_load(source.q_desc, at, bars.full_k, m.qs.index(c))
            async_load(source.gc_desc, at, bars.full_k, m.gcs.index(c))
            if m.bs is not None:
                async_load(source.erase_desc, at, bars.full_k, m.bs.index(c))
        # the last of these vectors was read before the place of q and k became empty
        if m.bs is None:
            m.betas.store(b_beta)
        m.middles.store(b_middle)
        m.lasts.store(b_last)
        b_most = gl.maximum(b_first - b_middle, b_middle - b_last)
        most = gl.max(gl.where(o_k < K // 2, b_most, 0.0), 0)
        other = gl.max(gl.where(o_k < K // 2, 0.0, b_most), 0)
        b_near = gl.where(o_n == 0, most, other) <= NEAR
        m.nears.store(b_near.to(gl.float32))
        gl.store(source.near_ptr + (i_c * HV + i_h).to(gl.int64) * 2 + o_n, b_near.to(gl.int8))
        barrier()
        mbarrier.arrive(bars.gates_full, count=1)


@gluon.jit
def store_sums(parts, dbeta_ptr, n, HV: gl.constexpr, BT: gl.constexpr):
    """Add what both halves left of dbeta of the n-th item."""
    vector: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    )
    i_c, i_h, _ = item_at(n, HV, 1)
    b_dbeta = parts.index(0).load(vector) + parts.index(1).load(vector)
    b_dbeta += parts.index(2).load(vector) + parts.index(3).load(vector)
    o = (i_c * BT + gl.arange(0, BT, vector)).to(gl.int64) * HV + i_h
    gl.store(dbeta_ptr + o, b_dbeta)


@gluon.jit
def write_gradients(x, Zs, bars, N, HV: gl.constexpr, V: gl.constexpr, BT: gl.constexpr):
    """Two warps beside: what v and the write gate of N items get."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for n in range(N):
        i_c, i_h, _ = item_at(n, HV, 1)
        for j in gl.static_range(4):
            at = [i_c * BT + j * (BT // 4), i_h * V]
            tma.store_wait(0)  # what was stored last left from these places
            barrier()
            mbarrier.expect(x.full, BT * V)
            async_load(x.v_desc, at, x.full, x.v)
            async_load(x.write_desc, at, x.full, x.w)
            if j == 0:
                mbarrier.wait(bars.full_new, n & 1)
            mbarrier.wait(x.full, j & 1)
            Z_part = Zs.index(0).slice(j * (BT // 4), BT // 4)
            for t in gl.static_range(BT // 32):
                for c in gl.static_range(2):
                    Z, v, w = [half(y, c).slice(8 * t, 8) for y in (Z_part, x.v, x.w)]
                    b_Z = Z.load(layout).to(gl.float32)
                    # dw = Z * V, dV = w * Z
                    v.store((v.load(layout).to(gl.float32) * b_Z).to(Zs.dtype))
                    w.store((w.load(layout).to(gl.float32) * b_Z).to(Zs.dtype))
            fence_async_shared()
            barrier()
            async_store(x.dwrite_desc, at, x.v)
            async_store(x.dv_desc, at, x.w)
        mbarrier.arrive(bars.empty_h, count=1)
    tma.store_wait(0)


@gluon.jit
def strength_of(m, c, mma: gl.constexpr):
    """beta of each token, or the erase gate of each channel of half c, for numbers [BT, BT]."""
    if m.bs is None:
        return m.betas.load(gl.SliceLayout(0, mma))[None, :]
    else:
        return m.bs.index(c).permute((1, 0)).load(mma).to(gl.float32)


# over 80 lines: the order of its products, waits and arithmetic is what it is about
@gluon.jit
def compute_half(c: gl.constexpr, out, m, bars, N, HV: gl.constexpr, K: gl.constexpr,
                 V: gl.constexpr, BT: gl.constexpr, SUMMED: gl.constexpr):  # fmt: skip
    """Half c of the channels, by four warps: kda_intra_bwd's near_sums, transposed."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    along: gl.constexpr = gl.SliceLayout(0, mma)
    dtype: gl.constexpr = m.ks.dtype
    zero = gl.full([BT, BT], 0.0, gl.float32, mma)
    o_i, o_j = gl.arange(0, BT, rows), gl.arange(0, BT, along)
    for n in range(N):
        # 0, and the compiler cannot know: else it makes the addresses of all products before the
        # loop, and they hold every register
        z = n >> 30
        k, q, gc = m.ks.index(c + z), m.qs.index(c + z), m.gcs.index(c + z)
        S, dS = m.hs.index(z).slice(c * BT, BT), m.dhs.index(z).slice(c * BT, BT)
        Z, do, new = m.Zs.index(z), m.dos.index(z), m.news.index(z)
        dP, dL, low = m.inner.index(z), m.inner.index(1 + z), m.inner.index(2 + z)
        i_c, i_h, _ = item_at(n, HV, 1)
        mbarrier.wait(bars.full_new, n & 1)
        b_P = product(do if c == 0 else Z, new.permute((1, 0)), zero, False)
        mbarrier.wait(bars.full_h, n & 1)
        # eq:kda-dqg   dqg = scale dO h^T
        b_x = product(S, do.permute((1, 0)), zero, False)
        # eq:kda-dkb   dkb = -Z S^T
        b_y = product(S, Z.permute((1, 0)), zero, False)
        mbarrier.wait(bars.full_dh, n & 1)
        # eq:kda-dkg   dkg = v_new dS^T
        b_r = product(dS, new.permute((1, 0)), zero, False)
        if n > 0:  # what was stored last left from the place of q, k and gc
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(bars.empty_k, count=1)
        mbarrier.wait(bars.used, (n & 1) ^ 1)
        if c == 1 and m.bs is None:  # noqa: SIM102  (the other half has no such branch)
            if n > 0:
                store_sums(m.parts, out.dbeta_ptr, n - 1, HV, BT)
        mbarrier.wait(bars.gates_full, n & 1)
        near = gl.max(m.nears.slice(c, 1).load(rows), 0) > 0.0
        both = gl.max(m.nears.slice(0, 1).load(rows), 0) * gl.max(m.nears.slice(1, 1).load(rows), 0)
        b_P = warpgroup_mma_wait(3, [b_P])
        below = o_i[:, None] > o_j[None, :]
        if c == 0:
            # eq:kda-dp   dP = scale tril(dO v_new^T)
            b_P *= out.scale
            m.own.store(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_P, 0.0), 1))
            b_high, b_rest = in_halves(gl.where(below, b_P, 0.0), dtype)
            dP.store(b_high)
            low.store(b_rest)
            if both == 0.0:
                b_P = gl.where(o_i[:, None] >= o_j[None, :], b_P, 0.0)
                o = (i_c * BT + o_i).to(gl.int64)[:, None] * (HV * V) + (i_h * V + o_j)[None, :]
                gl.store(out.dP_ptr + o, b_P.to(dtype))
        else:
            # eq:kda-dl   dL = -tril(Z v_new^T, -1)
            b_P = gl.where(below, -b_P, 0.0)
            dL.store(b_P.to(dtype))
            if both == 0.0:
                o = (i_c * BT + o_i).to(gl.int64)[:, None] * (HV * V) + (i_h * V + o_j)[None, :]
                gl.store(out.dL_ptr + o, b_P.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.ready, count=1)
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_t = own_dot(half(S, 0), half(dS, 0), mma) + own_dot(half(S, 1), half(dS, 1), mma)
        b_dgl = gl.convert_layout(gl.sum(b_t, 1), rows)
        if m.bs is None:
            b_t = own_dot(half(Z, c), half(m.vs.index(z), c), mma)
            b_dbeta = gl.convert_layout(gl.sum(b_t, 1), rows)
        b_x, b_y, b_r = warpgroup_mma_wait(0, [b_x, b_y, b_r])
        barrier()
        mbarrier.arrive(bars.empty_h, count=1)
        b_gl = m.lasts.slice(c * BT, BT).load(rows)
        mbarrier.wait(bars.full_k, n & 1)
        if near:
            b_ga = m.middles.slice(c * BT, BT).load(rows)
            # gates that all of a row has are in the sums from their beginning
            b_x *= (gl.exp2(b_ga) * out.scale)[:, None]
            b_y *= -gl.exp2(b_ga)[:, None]
            b_r *= gl.exp2(b_gl - b_ga)[:, None]
            b_g = gc.permute((1, 0)).load(mma) - b_ga[:, None]
            b_F = gl.exp2(-b_g)
            b_u = k.permute((1, 0)).load(mma).to(gl.float32) * b_F
            # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
            b_u = gl.where(o_j[None, :] == BT - 1, 0.0, b_u * b_r)
            b_dgl = b_dgl * gl.exp2(b_gl) + gl.sum(b_u, 1)
            mbarrier.wait(bars.ready, n & 1)
            if m.bs is None:
                m.parts.index(2 * c).store(b_dbeta)
            # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
            b_E = gl.exp2(b_g)
            b_qE = (q.permute((1, 0)).load(mma).to(gl.float32) * b_E).to(dtype)
            b_r = product(operand(b_qE, dtype, mma), dP, b_r)
            b_r = product(operand(b_qE, dtype, mma), low, b_r)
            b_k = k.permute((1, 0)).load(mma).to(gl.float32)
            b_kE = (b_k * b_E * strength_of(m, c + z, mma)).to(dtype)
            b_r = product(operand(b_kE, dtype, mma), dL, b_r)
            b_r = warpgroup_mma_wait(0, [b_r])  # its operands leave their registers to the next
            b_F = gl.exp2(-b_g)
            b_kF, b_low = in_halves(k.permute((1, 0)).load(mma).to(gl.float32) * b_F, dtype)
            # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
            b_x = product(operand(b_kF, dtype, mma), dP.permute((1, 0)), b_x)
            b_x = product(operand(b_low, dtype, mma), dP.permute((1, 0)), b_x)
            b_x = product(operand(b_kF, dtype, mma), low.permute((1, 0)), b_x)
            # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
            b_y = product(operand(b_kF, dtype, mma), dL.permute((1, 0)), b_y)
            b_y = product(operand(b_low, dtype, mma), dL.permute((1, 0)), b_y)
            b_x, b_y = warpgroup_mma_wait(0, [b_x, b_y])
            barrier()
            b_u = gl.where(o_j[None, :] == 0, b_g, 0.0)
            m.middles.slice(c * BT, BT).store(gl.sum(b_u, 1) + b_ga)  # gc of the first token
            b_k = k.permute((1, 0)).load(mma).to(gl.float32)
            b_F = gl.exp2(-b_g)
            # with the operands as products read them, halves to 2^-17: what i gains is what j loses
            # term by term; of the last token R is all from outside the chunk, and would cancel
            b_u = b_k * b_F * b_r
            b_dgc = gl.where(o_j[None, :] == BT - 1, b_dgl[:, None], -b_u)
            b_r *= b_F
            b_E = gl.exp2(b_g)
            b_beta = strength_of(m, c + z, mma)
            b_dgc += rounded(b_k * b_E * b_beta, dtype).to(gl.float32) * b_y
            b_q = q.permute((1, 0)).load(mma).to(gl.float32)
            # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
            b_dgc += rounded(b_q * b_E, dtype).to(gl.float32) * b_x
            gc.permute((1, 0)).store(b_dgc)
            # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
            b_own = m.own.load(along)[None, :]
            b_x = b_E * b_x + b_own * b_k
            b_y *= b_E
            # eq:kda-dbeta   dbeta += rowsum(K * Y)
            b_db = b_k * b_y
            if m.bs is None:
                m.parts.index(2 * c + 1).store(gl.sum(b_db, 0))
            # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
            b_y = b_beta * b_y + b_r + b_own * b_q
            barrier()
            q.permute((1, 0)).store(b_x.to(dtype))
            k.permute((1, 0)).store(b_y.to(dtype))
            if m.bs is not None:
                m.bs.index(c + z).permute((1, 0)).store(b_db.to(dtype))
            if SUMMED:
                sum_backwards(gc, m.middles.slice(c * BT, BT), m.sums.index(c + z))
        else:
            mbarrier.wait(bars.ready, n & 1)
            b_k = k.permute((1, 0)).load(mma).to(gl.float32)
            b_g = gc.permute((1, 0)).load(mma)
            b_u = b_k * gl.exp2(b_gl[:, None] - b_g) * b_r
            b_u = gl.where(o_j[None, :] == BT - 1, 0.0, b_u)
            b_dgl = b_dgl * gl.exp2(b_gl) + gl.sum(b_u, 1)
            gl.store(out.dgl_ptr + (i_c * HV + i_h).to(gl.int64) * K + c * BT + o_i, b_dgl)
            if m.bs is None:
                m.parts.index(2 * c).store(b_dbeta)
                m.parts.index(2 * c + 1).store(gl.full([BT], 0.0, gl.float32, along))
            barrier()
            gc.permute((1, 0)).store(b_r)
            q.permute((1, 0)).store((b_x * out.scale).to(dtype))
            k.permute((1, 0)).store((-b_y).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.used, count=1)
        at = [i_c * BT, i_h * K + c * BT]
        async_store(out.dgc_desc, at, gc)
        async_store(out.dq_desc, at, q)
        async_store(out.dk_desc, at, k)
        if m.bs is not None:  # of channels that are not near, for nothing
            async_store(out.derase_desc, at, m.bs.index(c + z))
    if c == 1 and m.bs is None:
        mbarrier.wait(bars.used, (N & 1) ^ 1)
        store_sums(m.parts, out.dbeta_ptr, N - 1, HV, BT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["NT"])
def kda_intra_bwd_gluon_kernel(
    q_desc, k_desc, v_desc, erase_desc, write_desc, gc_desc, h_desc, v_new_desc, do_desc, dh_desc,
    Z_desc, dq_desc, dk_desc, derase_desc, dgc_desc, dv_desc, dwrite_desc, beta_ptr, gc_ptr,
    near_ptr, dP_ptr, dL_ptr, dgl_ptr, dbeta_ptr, scale,
    NT,  # chunks of all sequences
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
    SUMMED: gl.constexpr,  # dgc of near channels is summed to dg
):  # fmt: skip
    """One program: every so many-th chunk of a head.  Any grid.

    Arguments of kda_fused_intra_bwd and its results, see `descriptor`; of channels that are not
    near those of kda_intra_bwd: dqg, dkb and dkg in the place of dq, dk and dgc, dP, dL and dgl.
    Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_intra_bwd.

    mbarriers, in the order of an item; two groups of four warps compute, c = 0 and 1::

        full_new    do, v_new, Z and, with beta, v -> both groups: dO v_new^T, Z v_new^T; with a
                    write gate -> the two warps of write_gradients too, which have their own `full`
        full_h      h -> both: dO S^T, Z S^T
        full_dh     dh -> both: v_new dS^T
        empty_k     both: the last dq, dk and dgc have left -> loading warp
        used        both, at the end of the item before -> both: they write dP or dL, and sums
        gates_full  loading warp: betas, middles, lasts, nears -> both
        ready       both: dP and dL are there -> both, which multiply by them
        empty_h     all of these: nothing reads what lies in the first three any more -> loading
                    warp
        full_k      q, k, gc and erase gates -> both
    """
    N = gl.cdiv(NT * HV - gl.program_id(0), gl.num_programs(0))
    beta: gl.constexpr = erase_desc is None
    m = Memory(
        ring(q_desc, 2), ring(k_desc, 2), ring(gc_desc, 2), ring(v_desc, 1) if beta else None,
        None if beta else ring(erase_desc, 2), ring(h_desc, 1), ring(v_new_desc, 1),
        ring(do_desc, 1), ring(dh_desc, 1), ring(Z_desc, 1), ring(dq_desc, 3),
        numbers([BT]) if beta else None, numbers([K]), numbers([K]), numbers([2]),
        numbers([2, 2 * BT]), numbers([BT]), numbers([4, BT]) if beta else None,
    )  # fmt: skip
    states, chunks = bars(2, 1), bars(2, 1)  # each by itself would take a place of 16 bytes
    b = Bars(
        bar(1), states.index(0), states.index(1), chunks.index(0), chunks.index(1),
        bar(2 if beta else 3), bar(2), bar(2), bar(2),
    )  # fmt: skip
    out = Out(dq_desc, dk_desc, dgc_desc, derase_desc, dP_ptr, dL_ptr, dgl_ptr, dbeta_ptr, scale)
    source = Source(
        q_desc, k_desc, v_desc, erase_desc, gc_desc, h_desc, v_new_desc, do_desc, dh_desc, Z_desc,
        beta_ptr, gc_ptr, near_ptr,
    )  # fmt: skip
    if beta:
        fence_async_shared()
        gl.warp_specialize([
            (compute_half, (0, out, m, b, N, HV, K, V, BT, SUMMED)),
            (compute_half, (1, out, m, b, N, HV, K, V, BT, SUMMED)),
            (load_tiles, (source, m, b, N, HV, K, V, BT)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        v, w = ring(v_desc, 1).index(0), ring(write_desc, 1).index(0)
        x = Values(v_desc, write_desc, dv_desc, dwrite_desc, v, w, bar(1))
        fence_async_shared()
        gl.warp_specialize([
            (compute_half, (0, out, m, b, N, HV, K, V, BT, SUMMED)),
            (compute_half, (1, out, m, b, N, HV, K, V, BT, SUMMED)),
            (load_tiles, (source, m, b, N, HV, K, V, BT)),
            (write_gradients, (x, m.Zs, b, N, HV, V, BT)),
        ], [4, 1, 2], [240, 24, 24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 168, **ALLOCATE}


@attempt
def kda_intra_bwd_gluon(
    given: tuple[Tensor, ...], out: tuple[Tensor, ...], near: Tensor, scale: float, summed: bool
) -> None:
    """Launch kda_intra_bwd_gluon_kernel on what kda_fused_intra_bwd is given; it writes `out`, near
    [B, NT, HV, K / 64], whether the channels of a group are, and dP and dL in the place of Z.
    summed: dg of near channels in the place of dgc.
    """
    q, k, v, beta, erase, gc, h, v_new, do, dh, Z, write = given
    dgl, dq, dk, dbeta, dgc, dv, dwrite = out
    dbeta, derase = (dbeta, None) if erase is None else (None, dbeta)
    B, T, HV, K = q.shape
    V, NT = v.shape[-1], B * T // CHUNK
    keys, values, states, part = (K // 2,), (V,), (V, K), (V, CHUNK // 4)
    tensors = q, k, v, erase, write, gc, h, v_new, do, dh, Z, dq, dk, derase, dgc, dv, dwrite
    sizes = (
        keys, keys, values if erase is None else part, keys, part, keys, states, values, values,
        states, values, keys, keys, keys, keys, part, part,
    )  # fmt: skip
    descriptors = (
        x if x is None else descriptor(x, *size) for x, size in zip(tensors, sizes, strict=True)
    )
    kda_intra_bwd_gluon_kernel[(min(device_of(q)[1], NT * HV),)](
        *descriptors, beta, gc, near, Z, Z[..., CHUNK:], dgl, dbeta, scale, NT, HV, K, V, CHUNK,
        summed, **OPTIONS,
    )  # fmt: skip
