"""What kda_intra_bwd in Gluon has in shared memory, and the warps that fill it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from linattn_edu.kernels.delta.kda_intra_bwd import NEAR
from linattn_edu.kernels.gluon.blocks import half, item_at
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record


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
    FINE: object  # v_new and Z in halves
    items_ptr: object  # of item_at


@record
class Memory:
    """Shared memory. Halves of the channels are two places."""

    qs: object  # halves; dq leaves from there
    ks: object  # halves; dk leaves from there
    gcs: object  # halves; dgc leaves from there
    vs: object  # with beta, but in halves
    bs: object  # erase gates, in halves; their gradients leave from there
    hs: object
    news: object  # v_new
    dos: object
    dhs: object
    Zs: object
    v_lows: object  # or None, or the low halves of v_new and Z
    Z_lows: object
    inner: object  # dP, dL and the low half of dP; in halves they lie in the place of S
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
    items_ptr: object  # of item_at


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


@gluon.jit
def load_tiles(source, m, bars, N, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
               BT: gl.constexpr):  # fmt: skip
    """The producer, a warp that loads, in the order in which the others read, for N items."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_t, o_k, o_n = gl.arange(0, BT, layout), gl.arange(0, K, layout), gl.arange(0, 2, layout)
    TILES: gl.constexpr = 5 if source.FINE else 4 if m.bs is None else 3
    for n in range(N):
        i_c, i_h, _ = item_at(n, HV, 1, source.items_ptr)
        begin, column, i_S = i_c * BT, i_h * V, (i_c * HV + i_h) * K
        mbarrier.wait(bars.empty_h, (n & 1) ^ 1)
        wide = 2 * column if source.FINE else column
        mbarrier.expect(bars.full_new, TILES * BT * V * 2)
        async_load(source.do_desc, [begin, column], bars.full_new, m.dos.index(0))
        async_load(source.v_new_desc, [begin, wide], bars.full_new, m.news.index(0))
        async_load(source.Z_desc, [begin, wide], bars.full_new, m.Zs.index(0))
        if source.FINE:
            async_load(source.v_new_desc, [begin, wide + V], bars.full_new, m.v_lows.index(0))
            async_load(source.Z_desc, [begin, wide + V], bars.full_new, m.Z_lows.index(0))
        elif m.bs is None:
            async_load(source.v_desc, [begin, column], bars.full_new, m.vs.index(0))
        if not source.FINE:
            mbarrier.expect(bars.full_h, K * V * 2)
            async_load(source.h_desc, [i_S, 0], bars.full_h, m.hs.index(0))
        mbarrier.expect(bars.full_dh, K * V * 2)
        async_load(source.dh_desc, [i_S, 0], bars.full_dh, m.dhs.index(0))
        if source.FINE:  # where S goes, dP and dL of the item before are
            mbarrier.wait(bars.used, (n & 1) ^ 1)
            mbarrier.expect(bars.full_h, K * V * 2)
            async_load(source.h_desc, [i_S, 0], bars.full_h, m.hs.index(0))
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
def write_gradients(x, Zs, bars, N, HV: gl.constexpr, V: gl.constexpr, BT: gl.constexpr):
    """Two warps beside: what v and the write gate of N items get."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for n in range(N):
        i_c, i_h, _ = item_at(n, HV, 1, x.items_ptr)
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
