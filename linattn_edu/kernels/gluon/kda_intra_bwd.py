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
    own_sums,
    parted,
    product,
    products,
    ring,
    rounded,
    sum_backwards,
)
from linattn_edu.kernels.gluon.kda_intra_tiles import (
    Bars,
    Memory,
    Source,
    Values,
    load_tiles,
    write_gradients,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, VECTOR
from linattn_edu.kernels.gluon.names import async_store, barrier, record
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.rows import device_of


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
    v_ptr: object  # in halves, for `written`
    scale: object
    items_ptr: object  # of item_at


@gluon.jit
def store_sums(parts, out, n, HV: gl.constexpr, BT: gl.constexpr):
    """Add what both halves left of dbeta of the n-th item."""
    i_c, i_h, _ = item_at(n, HV, 1, out.items_ptr)
    b_dbeta = parts.index(0).load(VECTOR) + parts.index(1).load(VECTOR)
    b_dbeta += parts.index(2).load(VECTOR) + parts.index(3).load(VECTOR)
    o = (i_c * BT + gl.arange(0, BT, VECTOR)).to(gl.int64) * HV + i_h
    gl.store(out.dbeta_ptr + o, b_dbeta)


@gluon.jit
def strength_of(m, c):
    """beta of each token, or the erase gate of each channel of half c, for numbers [BT, BT]."""
    if m.bs is None:
        return m.betas.load(ALONG)[None, :]
    else:
        return m.bs.index(c).permute((1, 0)).load(MMA).to(gl.float32)


@gluon.jit
def as_read(x, dtype: gl.constexpr, FINE: gl.constexpr):
    """x, in fp32, as products read it: rounded, or in halves to 2^-17."""
    return x if FINE else rounded(x, dtype).to(gl.float32)


@gluon.jit
def written(m, v_ptr, none, z, c: gl.constexpr, i_c, i_h, HV: gl.constexpr, V: gl.constexpr,
            BT: gl.constexpr):  # fmt: skip
    """In halves, what 64 values add to rowsum(Z * v_new) / beta, dbeta without the rounding of the
    states; to rowsum(Z * V) where `none` of it is taken.
    """
    b_Z = half(m.Zs.index(z), c).load(MMA).to(gl.float32) + half(m.Z_lows.index(z), c).load(MMA)
    b_v = half(m.news.index(z), c).load(MMA).to(gl.float32) + half(m.v_lows.index(z), c).load(MMA)
    b_sum = gl.convert_layout(gl.sum(own_sums(b_Z * b_v), 1), ROWS)
    b_sum /= gl.where(none, 1.0, m.betas.load(ROWS))
    if gl.max(none.to(gl.int32), 0) > 0:
        o_t, o_v = gl.arange(0, BT, ROWS) + i_c * BT, gl.arange(0, 64, ALONG)
        o = o_t.to(gl.int64)[:, None] * (HV * V) + (i_h * V + c * 64 + o_v)[None, :]
        b_v = gl.load(v_ptr + o).to(gl.float32)
        b_ZV = gl.convert_layout(gl.sum(own_sums(b_Z * b_v), 1), ROWS)
        b_sum = gl.where(none, b_ZV, b_sum)
    return b_sum


@gluon.jit
def not_written(betas, both, layout: gl.constexpr):
    """Which tokens have dbeta of the rows of K and Y: those of next to no beta, or of a chunk with
    channels that are not near, whose part the next kernel adds.
    """
    return (gl.abs(betas.load(layout)) < 2.0**-60) | (both == 0.0)


# over 80 lines: the order of its products, waits and arithmetic is what it is about
@gluon.jit
def compute_half(c: gl.constexpr, out, m, bars, N, HV: gl.constexpr, K: gl.constexpr,
                 V: gl.constexpr, BT: gl.constexpr, SUMMED: gl.constexpr):  # fmt: skip
    """Half c of the channels, by four warps: kda_intra_bwd's near_sums, transposed."""
    dtype: gl.constexpr = m.ks.dtype
    zero = gl.full([BT, BT], 0.0, gl.float32, MMA)
    o_i, o_j = gl.arange(0, BT, ROWS), gl.arange(0, BT, ALONG)
    FINE: gl.constexpr = m.Z_lows is not None
    for n in range(N):
        # 0, and the compiler cannot know: else it makes the addresses of all products before the
        # loop, and they hold every register
        z = n >> 30
        k, q, gc = m.ks.index(c + z), m.qs.index(c + z), m.gcs.index(c + z)
        S, dS = m.hs.index(z).slice(c * BT, BT), m.dhs.index(z).slice(c * BT, BT)
        Z, do, new = m.Zs.index(z), m.dos.index(z), m.news.index(z)
        if FINE:
            Z_low, new_low = m.Z_lows.index(z), m.v_lows.index(z)
            S1, S2 = m.hs.index(z).slice(0, BT), m.hs.index(z).slice(BT, BT)
            dP, dL, low, dL_low = half(S1, 0), half(S2, 0), half(S1, 1), half(S2, 1)
        else:
            Z_low, new_low = Z, new
            dP, dL, low, dL_low = [m.inner.index(i + z) for i in (0, 1, 2, 1)]
        newT, new_lowT = new.permute((1, 0)), new_low.permute((1, 0))
        i_c, i_h, _ = item_at(n, HV, 1, out.items_ptr)
        mbarrier.wait(bars.full_new, n & 1)
        one, one_low = (do, do) if c == 0 else (Z, Z_low)
        b_P = products(one, one_low, newT, new_lowT, zero, False, FINE and c == 1, FINE)
        if FINE:
            mbarrier.wait(bars.full_dh, n & 1)
            b_r = products(dS, dS, newT, new_lowT, zero, False, False, True)
        mbarrier.wait(bars.full_h, n & 1)
        # eq:kda-dqg   dqg = scale dO h^T
        b_x = product(S, do.permute((1, 0)), zero, False)
        # eq:kda-dkb   dkb = -Z S^T
        b_y = products(S, S, Z.permute((1, 0)), Z_low.permute((1, 0)), zero, False, False, FINE)
        # eq:kda-dkg   dkg = v_new dS^T
        if not FINE:
            mbarrier.wait(bars.full_dh, n & 1)
            b_r = product(dS, newT, zero, False)
        if n > 0:  # what was stored last left from the place of q, k and gc
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(bars.empty_k, count=1)
        mbarrier.wait(bars.used, (n & 1) ^ 1)
        if c == 1 and m.bs is None:  # noqa: SIM102  (the other half has no such branch)
            if n > 0:
                store_sums(m.parts, out, n - 1, HV, BT)
        mbarrier.wait(bars.gates_full, n & 1)
        near = gl.max(m.nears.slice(c, 1).load(ROWS), 0) > 0.0
        both = gl.max(m.nears.slice(0, 1).load(ROWS), 0) * gl.max(m.nears.slice(1, 1).load(ROWS), 0)
        b_P = warpgroup_mma_wait(5 if FINE else 3, [b_P])
        below = o_i[:, None] > o_j[None, :]
        if c == 0:
            # eq:kda-dp   dP = scale tril(dO v_new^T)
            b_P *= out.scale
            m.own.store(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_P, 0.0), 1))
            b_high, b_rest = in_halves(gl.where(below, b_P, 0.0), dtype)
            if not FINE:
                dP.store(b_high)
                low.store(b_rest)
        else:
            # eq:kda-dl   dL = -tril(Z v_new^T, -1)
            b_P = gl.where(below, -b_P, 0.0)
            if FINE:
                b_high, b_rest = in_halves(b_P, dtype)
            else:
                dL.store(b_P.to(dtype))
        if both == 0.0:
            if c == 0:
                b_P = gl.where(o_i[:, None] >= o_j[None, :], b_P, 0.0)
            o = (i_c * BT + o_i).to(gl.int64)[:, None] * (HV * V) + (i_h * V + o_j)[None, :]
            to_ptr = out.dP_ptr if c == 0 else out.dL_ptr
            gl.store(to_ptr + o, b_P.to(to_ptr.dtype.element_ty))
        if not FINE:
            fence_async_shared()
            barrier()
            mbarrier.arrive(bars.ready, count=1)
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_t = own_dot(half(S, 0), half(dS, 0)) + own_dot(half(S, 1), half(dS, 1))
        b_dgl = gl.convert_layout(gl.sum(b_t, 1), ROWS)
        if FINE:
            none = not_written(m.betas, both, ROWS)
            b_dbeta = written(m, out.v_ptr, none, z, c, i_c, i_h, HV, V, BT)
        elif m.bs is None:
            b_t = own_dot(half(Z, c), half(m.vs.index(z), c))
            b_dbeta = gl.convert_layout(gl.sum(b_t, 1), ROWS)
        b_x, b_y, b_r = warpgroup_mma_wait(0, [b_x, b_y, b_r])
        barrier()
        if FINE:  # a group's half of S, which it alone has read, is free
            half(S, 0).store(b_high)
            half(S, 1).store(b_rest)
            fence_async_shared()
            barrier()
            mbarrier.arrive(bars.ready, count=1)
        mbarrier.arrive(bars.empty_h, count=1)
        b_gl = m.lasts.slice(c * BT, BT).load(ROWS)
        mbarrier.wait(bars.full_k, n & 1)
        if near:
            b_ga = m.middles.slice(c * BT, BT).load(ROWS)
            # gates that all of a row has are in the sums from their beginning
            b_x *= (gl.exp2(b_ga) * out.scale)[:, None]
            b_y *= -gl.exp2(b_ga)[:, None]
            b_r *= gl.exp2(b_gl - b_ga)[:, None]
            b_g = gc.permute((1, 0)).load(MMA) - b_ga[:, None]
            b_F = gl.exp2(-b_g)
            b_u = k.permute((1, 0)).load(MMA).to(gl.float32) * b_F
            # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
            b_u = gl.where(o_j[None, :] == BT - 1, 0.0, b_u * b_r)
            b_dgl = b_dgl * gl.exp2(b_gl) + gl.sum(b_u, 1)
            mbarrier.wait(bars.ready, n & 1)
            if m.bs is None:
                m.parts.index(2 * c).store(b_dbeta)
            # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
            b_E = gl.exp2(b_g)
            b_high, b_rest = parted(q.permute((1, 0)).load(MMA).to(gl.float32) * b_E, dtype, FINE)
            a, a_low = operand(b_high, dtype), operand(b_rest, dtype)
            b_r = products(a, a_low, dP, low, b_r, True, FINE, True)
            b_k = k.permute((1, 0)).load(MMA).to(gl.float32)
            b_high, b_rest = parted(b_k * b_E * strength_of(m, c + z), dtype, FINE)
            a, a_low = operand(b_high, dtype), operand(b_rest, dtype)
            b_r = products(a, a_low, dL, dL_low, b_r, True, FINE, FINE)
            b_r = warpgroup_mma_wait(0, [b_r])  # its operands leave their registers to the next
            if FINE:  # again, and no register holds it meanwhile
                b_g = gc.permute((1, 0)).load(MMA) - b_ga[:, None]
            b_F = gl.exp2(-b_g)
            b_kF, b_low = in_halves(k.permute((1, 0)).load(MMA).to(gl.float32) * b_F, dtype)
            # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
            a, a_low = operand(b_kF, dtype), operand(b_low, dtype)
            dPT, lowT = dP.permute((1, 0)), low.permute((1, 0))
            b_x = products(a, a_low, dPT, lowT, b_x, True, True, True)
            # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
            dLT, dL_lowT = dL.permute((1, 0)), dL_low.permute((1, 0))
            b_y = products(a, a_low, dLT, dL_lowT, b_y, True, True, FINE)
            b_x, b_y = warpgroup_mma_wait(0, [b_x, b_y])
            barrier()
            b_u = gl.where(o_j[None, :] == 0, b_g, 0.0)
            m.middles.slice(c * BT, BT).store(gl.sum(b_u, 1) + b_ga)  # gc of the first token
            b_k = k.permute((1, 0)).load(MMA).to(gl.float32)
            b_F = gl.exp2(-b_g)
            # with the operands as products read them, halves to 2^-17: what i gains is what j loses
            # term by term; of the last token R is all from outside the chunk, and would cancel
            b_u = b_k * b_F * b_r
            b_dgc = gl.where(o_j[None, :] == BT - 1, b_dgl[:, None], -b_u)
            b_r *= b_F
            b_E = gl.exp2(b_g)
            b_beta = strength_of(m, c + z)
            b_dgc += as_read(b_k * b_E * b_beta, dtype, FINE) * b_y
            b_q = q.permute((1, 0)).load(MMA).to(gl.float32)
            # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
            b_dgc += as_read(b_q * b_E, dtype, FINE) * b_x
            gc.permute((1, 0)).store(b_dgc)
            # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
            b_own = m.own.load(ALONG)[None, :]
            b_x = b_E * b_x + b_own * b_k
            b_y *= b_E
            # eq:kda-dbeta   dbeta += rowsum(K * Y)
            b_db = b_k * b_y
            if m.bs is None:
                b_KY = gl.sum(b_db, 0)
                if FINE:
                    b_KY = gl.where(not_written(m.betas, both, ALONG), b_KY, 0.0)
                m.parts.index(2 * c + 1).store(b_KY)
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
            b_k = k.permute((1, 0)).load(MMA).to(gl.float32)
            b_g = gc.permute((1, 0)).load(MMA)
            b_u = b_k * gl.exp2(b_gl[:, None] - b_g) * b_r
            b_u = gl.where(o_j[None, :] == BT - 1, 0.0, b_u)
            b_dgl = b_dgl * gl.exp2(b_gl) + gl.sum(b_u, 1)
            gl.store(out.dgl_ptr + (i_c * HV + i_h).to(gl.int64) * K + c * BT + o_i, b_dgl)
            if m.bs is None:
                m.parts.index(2 * c).store(b_dbeta)
                m.parts.index(2 * c + 1).store(gl.full([BT], 0.0, gl.float32, ALONG))
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
        store_sums(m.parts, out, N - 1, HV, BT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["NT"])
def kda_intra_bwd_gluon_kernel(
    q_desc, k_desc, v_desc, erase_desc, write_desc, gc_desc, h_desc, v_new_desc, do_desc, dh_desc,
    Z_desc, dq_desc, dk_desc, derase_desc, dgc_desc, dv_desc, dwrite_desc, beta_ptr, gc_ptr,
    near_ptr, dP_ptr, dL_ptr, dgl_ptr, dbeta_ptr,
    v_ptr,  # with v_new and Z in halves, in the place of v_desc, or None
    scale,
    items_ptr,  # of item_at
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
        used        both, at the end of the item before -> both: they write dP or dL, and sums; in
                    halves -> loading warp: S comes to the place of dP and dL
        gates_full  loading warp: betas, middles, lasts, nears -> both
        ready       both: dP and dL are there -> both, which multiply by them
        empty_h     all of these: nothing reads what lies in the first three any more -> loading
                    warp
        full_k      q, k, gc and erase gates -> both
    """
    N = NT * HV if items_ptr is None else gl.load(items_ptr)
    N = gl.cdiv(N - gl.program_id(0), gl.num_programs(0))
    if items_ptr is not None:  # noqa: SIM102 - of None it is known here
        if N <= 0:
            return
    beta: gl.constexpr = erase_desc is None
    FINE: gl.constexpr = v_ptr is not None
    m = Memory(
        ring(q_desc, 2), ring(k_desc, 2), ring(gc_desc, 2),
        ring(v_desc, 1) if beta and not FINE else None,
        None if beta else ring(erase_desc, 2), ring(h_desc, 1), ring(v_new_desc, 1),
        ring(do_desc, 1), ring(dh_desc, 1), ring(Z_desc, 1), ring(do_desc, 1) if FINE else None,
        ring(do_desc, 1) if FINE else None, None if FINE else ring(dq_desc, 3),
        numbers([BT]) if beta else None, numbers([K]), numbers([K]), numbers([2]),
        numbers([2, 2 * BT]), numbers([BT]), numbers([4, BT]) if beta else None,
    )  # fmt: skip
    states, chunks = bars(2, 1), bars(2, 1)  # each by itself would take a place of 16 bytes
    b = Bars(
        bar(1), states.index(0), states.index(1), chunks.index(0), chunks.index(1),
        bar(2 if beta else 3), bar(2), bar(2), bar(2),
    )  # fmt: skip
    out = Out(
        dq_desc, dk_desc, dgc_desc, derase_desc, dP_ptr, dL_ptr, dgl_ptr, dbeta_ptr, v_ptr, scale,
        items_ptr,
    )  # fmt: skip
    source = Source(
        q_desc, k_desc, v_desc, erase_desc, gc_desc, h_desc, v_new_desc, do_desc, dh_desc, Z_desc,
        beta_ptr, gc_ptr, near_ptr, FINE, items_ptr,
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
        x = Values(v_desc, write_desc, dv_desc, dwrite_desc, v, w, bar(1), items_ptr)
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
    given: tuple[Tensor, ...], out: tuple[Tensor, ...], near: Tensor, inner: tuple[Tensor, Tensor],
    scale: float, summed: bool, fine: bool, items: Tensor | None,
) -> None:  # fmt: skip
    """Launch kda_intra_bwd_gluon_kernel on what kda_fused_intra_bwd is given; it writes `out`, near
    [B, NT, HV, K / 64], whether the channels of a group are, and `inner`, dP and dL in the place of
    Z. summed: dg of near channels in the place of dgc. fine: v_new and Z are in halves. items: of
    item_at.
    """
    q, k, v, beta, erase, gc, h, v_new, do, dh, Z, write = given
    dgl, dq, dk, dbeta, dgc, dv, dwrite = out
    dbeta, derase = (dbeta, None) if erase is None else (None, dbeta)
    B, T, HV, K = q.shape
    V, NT = v.shape[-1], B * T // CHUNK
    keys, values, states, part = (K // 2,), (V,), (V, K), (V, CHUNK // 4)
    v_desc, v_ptr = (None, v) if fine else (v, None)
    tensors = q, k, v_desc, erase, write, gc, h, v_new, do, dh, Z
    tensors += dq, dk, derase, dgc, dv, dwrite
    sizes = (
        keys, keys, values if erase is None else part, keys, part, keys, states, values, values,
        states, values, keys, keys, keys, keys, part, part,
    )  # fmt: skip
    descriptors = (descriptor(x, *size) for x, size in zip(tensors, sizes, strict=True))
    kda_intra_bwd_gluon_kernel[(min(device_of(q)[1], NT * HV),)](
        *descriptors, beta, gc, near, *inner, dgl, dbeta, v_ptr, scale, items, NT, HV, K, V, CHUNK,
        summed, **OPTIONS,
    )  # fmt: skip
