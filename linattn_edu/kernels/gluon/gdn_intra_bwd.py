"""intra_chunk_bwd of Gated DeltaNet's fused backward pass in Gluon, for Hopper.

A program stays on its multiprocessor and takes one chunk after the other. One warp copies tiles
ahead, each as soon as what lay in its place was read. Groups of four warps compute, each 64 of the
keys. Of two, a group makes one of the matrices dM and dL that both need; one alone makes both, and
two such programs share a multiprocessor. While a matrix is rounded, the tensor cores are with other
products. The value heads of a q/k head follow one another, so their sums stay in registers.
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
    bar_pairs,
    beside,
    descriptor,
    gates_of_item,
    half,
    in_halves,
    item_at,
    numbers,
    own_dot,
    own_sums,
    product,
    products,
    ring,
    without_last,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, VECTOR
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt
from linattn_edu.kernels.rows import device_of
from linattn_edu.kernels.tiles import significand


@record
class Source:
    """What is copied in, by tensor maps, and the gates."""

    q_desc: object
    k_desc: object
    v_desc: object
    h_desc: object
    v_new_desc: object
    do_desc: object
    dh_desc: object
    Z_desc: object
    v_low_desc: object  # None, or the low halves of v_new and Z
    Z_low_desc: object
    gc_ptr: object
    beta_ptr: object
    items_ptr: object


@record
class Memory:
    """Shared memory. Places of two are used in turn; each 64 of the keys are a place."""

    qs: object  # 64 keys each; dq leaves from there
    ks: object  # 64 keys each; dk leaves from there
    vs: object
    hs: object
    news: object  # two: v_new; with low halves one, and one of what follows
    dos: object  # two
    dhs: object
    Zs: object
    v_lows: object
    Z_lows: object
    inner: object  # dM, dL, diag(beta) dL; with low halves dM, diag(beta) dL, and theirs
    gates: object  # two: gc and beta
    own: object  # the diagonal of dM
    parts: object  # three sums of each group


@record
class Bars:
    """The mbarriers. Full: copies have come; two of them where there are two places."""

    full_new: object  # two: do and v_new; one with low halves
    gates_full: object  # two
    full_Z: object  # Z and v
    full_h: object
    full_dh: object
    full_k: object  # q and k
    empty_h: object  # v, h, dh and Z have been read
    empty_k: object  # q and k have been read, dq and dk have left
    ready: object  # dM and dL are there
    used: object  # neither, nor what was left beside them, is needed any more


@record
class Out:
    """Where the results go, and what they are scaled by."""

    dq_desc: object
    dk_desc: object
    dbeta_ptr: object
    dgc_ptr: object
    scale: object
    items_ptr: object  # as of item_at


@gluon.jit
def load_tiles(source, m, bars, N, ROW: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
               K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr):  # fmt: skip
    """The producer, a warp that loads, in the order in which the others read, for N items."""
    o_t = gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    FINE: gl.constexpr = source.Z_low_desc is not None
    AHEAD: gl.constexpr = 0 if FINE else 1
    b_gc, b_beta = gates_of_item(
        source.gc_ptr, source.beta_ptr, 0, o_t, ROW, H, G, BT, source.items_ptr
    )
    for n in range(N + AHEAD):
        if n >= AHEAD:
            i_c, _, i_hv = item_at(n - AHEAD, H, G, source.items_ptr)
            i_S, column = (i_c * (H * G) + i_hv) * K, i_hv * V
            mbarrier.wait(bars.empty_h, (n + AHEAD & 1) ^ 1)
            mbarrier.expect(bars.full_Z, (3 if FINE else 2) * BT * V * 2)
            if FINE:
                async_load(source.Z_low_desc, [i_c * BT, column], bars.full_Z, m.Z_lows.index(0))
            async_load(source.Z_desc, [i_c * BT, column], bars.full_Z, m.Zs.index(0))
            async_load(source.v_desc, [i_c * BT, column], bars.full_Z, m.vs.index(0))
            mbarrier.expect(bars.full_h, K * V * 2)
            async_load(source.h_desc, [i_S, 0], bars.full_h, m.hs.index(0))
            mbarrier.expect(bars.full_dh, K * V * 2)
            async_load(source.dh_desc, [i_S, 0], bars.full_dh, m.dhs.index(0))
        if n < N:  # one item further, to the place that the wait above has seen empty
            i_c, _, i_hv = item_at(n, H, G, source.items_ptr)
            i, column = n % (1 + AHEAD), i_hv * V
            full = bars.full_new.index(i)
            mbarrier.expect(full, (3 if FINE else 2) * BT * V * 2)
            if FINE:
                async_load(source.v_low_desc, [i_c * BT, column], full, m.v_lows.index(0))
            async_load(source.do_desc, [i_c * BT, column], full, m.dos.index(i))
            async_load(source.v_new_desc, [i_c * BT, column], full, m.news.index(i))
            m.gates.index(2 * i).store(b_gc)
            m.gates.index(2 * i + 1).store(b_beta)
            barrier()
            mbarrier.arrive(bars.gates_full.index(i), count=1)
        if (n >= AHEAD) & ((n - AHEAD) % G == 0):  # the place of q and k becomes empty last
            i_c, i_h, _ = item_at(n - AHEAD, H, G, source.items_ptr)
            mbarrier.wait(bars.empty_k, ((n - AHEAD) // G & 1) ^ 1)
            mbarrier.expect(bars.full_k, 2 * BT * K * 2)
            for c in gl.static_range(K // 64):
                at = [i_c * BT, i_h * K + c * 64]
                async_load(source.k_desc, at, bars.full_k, m.ks.index(c))
                async_load(source.q_desc, at, bars.full_k, m.qs.index(c))
        # those of the next one are on their way meanwhile
        b_gc, b_beta = gates_of_item(
            source.gc_ptr, source.beta_ptr, gl.minimum(n + 1, N - 1), o_t, ROW, H, G, BT,
            source.items_ptr,
        )  # fmt: skip


@gluon.jit
def leave_sums(parts, c: gl.constexpr, b_dgc, b_read, b_dbeta, b_through):
    """A group's part of dgc, of dbeta, and of what dgc's last row gets; b_read: rowsum(Q * dQ)."""
    parts.index(3 * c).store(gl.convert_layout(gl.sum(b_dgc, 1) + gl.sum(b_read, 1), ROWS))
    parts.index(3 * c + 1).store(gl.convert_layout(gl.sum(b_dbeta, 1), ROWS))
    parts.index(3 * c + 2).store(gl.convert_layout(gl.sum(b_through, 1), ROWS))


@gluon.jit
def whole(parts, i: gl.constexpr, GROUPS: gl.constexpr):
    """The i-th sum of all groups."""
    x = parts.index(i).load(VECTOR)
    return x if GROUPS == 1 else x + parts.index(3 + i).load(VECTOR)


@gluon.jit
def store_sums(
    parts, c: gl.constexpr, out, n, ROW: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
    BT: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Add what the groups left of the n-th item: the first stores dgc, the last dbeta."""
    o_t = gl.arange(0, BT, VECTOR)
    i_c, _, i_hv = item_at(n, H, G, out.items_ptr)
    o = (i_c * BT + o_t).to(gl.int64) * ROW + i_hv
    if c == 0:
        # eq:fused-dgc   dgc = q dq + beta k f - k d; dgc_last += sum k dk + 2^gc_last <dS, S>
        b_through = gl.sum(whole(parts, 2, GROUPS), 0)
        b_dgc = whole(parts, 0, GROUPS)
        gl.store(out.dgc_ptr + o, b_dgc + gl.where(o_t == BT - 1, b_through, 0.0))
    if c == GROUPS - 1:
        # eq:fused-dbeta   dbeta = rowsum(Z * V) + rowsum(K * F)
        b_dbeta = whole(parts, 1, GROUPS)
        gl.store(out.dbeta_ptr + o, b_dbeta.to(out.dbeta_ptr.dtype.element_ty))


@gluon.jit
def factors(b_beta, FINE: gl.constexpr):
    """beta = one two of significand, where dL is kept times one; with low halves all of beta and 1,
    but no beta of 0, since dL is kept times beta alone.
    """
    if FINE:
        return gl.where(gl.abs(b_beta) < 2.0**-60, 2.0**-60, b_beta), gl.zeros_like(b_beta) + 1.0
    else:
        return significand(b_beta)


@gluon.jit
def whole_half(x, low, c: gl.constexpr, FINE: gl.constexpr):
    """Of x, and its low half, the c-th 64 columns in fp32."""
    b_x = half(x, c).load(MMA).to(gl.float32)
    return b_x + half(low, c).load(MMA).to(gl.float32) if FINE else b_x


@gluon.jit
def inside(b_P, gc, beta, m, z, c: gl.constexpr, scale, BT: gl.constexpr, FINE: gl.constexpr):
    """Of b_P = dO v_new^T make dM, its diagonal apart, with c = 1 of Z v_new^T dL."""
    o_i, o_j = gl.arange(0, BT, ROWS), gl.arange(0, BT, ALONG)
    below = o_i[:, None] > o_j[None, :]
    b_d = gc.load(ROWS)[:, None] - gc.load(ALONG)[None, :]
    b_P *= gl.exp2(b_d)  # above the diagonal anything
    if c == 0:
        # eq:delta-dm   dM = scale (dO v_new^T) * G
        b_P *= scale
        # no decay acts on the diagonal: it must not be in the sums of dgc, where it would cancel
        m.own.store(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_P, 0.0), 1))
        b_P = gl.where(below, b_P, 0.0)
    else:
        # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
        b_one, b_two = factors(beta.load(ROWS), FINE)
        b_P = gl.where(below, -b_P, 0.0) * b_one[:, None]
    if FINE:
        b_P, b_low = in_halves(b_P, m.inner.dtype)
    m.inner.index(c + z).store(b_P.to(m.inner.dtype))
    if FINE:
        m.inner.index(2 + c + z).store(b_low)
    elif c == 1:
        m.inner.index(2 + z).store((b_two[:, None] * b_P).to(m.inner.dtype))


# over 80 lines: the order of its products, waits and arithmetic is what it is about
@gluon.jit
def compute_keys(c: gl.constexpr, out, m, bars, N, ROW: gl.constexpr, H: gl.constexpr,
                 G: gl.constexpr, K: gl.constexpr, BT: gl.constexpr):  # fmt: skip
    """Of the keys the c-th 64, by four warps: intra_chunk_bwd_kernel's sums."""
    GROUPS: gl.constexpr = K // 64
    FINE: gl.constexpr = m.Z_lows is not None
    PLACES: gl.constexpr = 1 if FINE else 2
    # products that begin before a group waits for its last of v_new, with low halves more
    MORE: gl.constexpr = 1 + FINE
    BEGUN: gl.constexpr = 1 + MORE + (MORE if G == 1 else 0)
    zero = gl.full([BT, BT], 0.0, gl.float32, MMA)
    b_dq, b_dk = zero, zero
    for n in range(N):
        i = n % PLACES
        # 0, and the compiler cannot know: else it makes the addresses of all products before the
        # loop, and they hold every register
        z = n >> 30
        k, q = m.ks.index(c + z), m.qs.index(c + z)
        S, dS = m.hs.index(z).slice(c * BT, BT), m.dhs.index(z).slice(c * BT, BT)
        Z, v = m.Zs.index(z), m.vs.index(z)
        dM, dL, bL = m.inner.index(z), m.inner.index(1 + z), m.inner.index(2 + z)
        do, new = m.dos.index(i), m.news.index(i)
        new_low, Z_low, dM_low, dL_low, bL_low = new, Z, dM, dL, bL
        if FINE:
            new_low, Z_low = m.v_lows.index(z), m.Z_lows.index(z)
            dM_low, dL_low = bL, m.inner.index(3 + z)
            bL, bL_low = dL, dL_low
        gc, beta = m.gates.index(2 * i), m.gates.index(2 * i + 1)
        newT, newT_low = new.permute((1, 0)), new_low.permute((1, 0))
        mbarrier.wait(bars.full_new.index(i), n // PLACES & 1)
        mbarrier.wait(bars.full_Z, n & 1)
        if c == 0:
            b_P = products(do, do, newT, newT_low, zero, False, False, FINE)
        if c == GROUPS - 1:
            b_L = products(Z, Z_low, newT, newT_low, zero, False, FINE, FINE)
        mbarrier.wait(bars.full_h, n & 1)
        b_R = product(do, S.permute((1, 0)), zero, False)
        b_F = products(Z, Z_low, S.permute((1, 0)), S, zero, False, FINE, False)
        mbarrier.wait(bars.full_dh, n & 1)
        if G == 1:
            b_W = products(new, new_low, dS.permute((1, 0)), dS, zero, False, FINE, False)
        mbarrier.wait(bars.gates_full.index(i), n // PLACES & 1)
        if (n > 0) & (n % G == 0):  # what was stored last left from the place of q and k
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(bars.empty_k, count=1)
        mbarrier.wait(bars.used, (n & 1) ^ 1)
        if n > 0:
            store_sums(m.parts, c, out, n - 1, ROW, H, G, BT, GROUPS)
        if c == 0:
            b_P = warpgroup_mma_wait(BEGUN + (2 - GROUPS) * (1 + 2 * FINE), [b_P])
            inside(b_P, gc, beta, m, z, 0, out.scale, BT, FINE)
        if c == GROUPS - 1:
            b_L = warpgroup_mma_wait(BEGUN, [b_L])
            inside(b_L, gc, beta, m, z, 1, out.scale, BT, FINE)
        if G > 1:
            b_W = products(new, new_low, dS.permute((1, 0)), dS, zero, False, FINE, False)
        fence_async_shared()
        barrier()
        mbarrier.arrive(bars.ready, count=1)
        b_last = gl.max(gc.slice(BT - 1, 1).load(ROWS), 0)
        b_through = own_dot(half(S, 0), half(dS, 0))
        if GROUPS == 2:  # V = K
            b_through += own_dot(half(S, 1), half(dS, 1))
        b_through *= gl.exp2(b_last)
        b_Z = whole_half(Z, Z_low, c, FINE)
        b_dbeta = own_sums(b_Z * half(v, c).load(MMA).to(gl.float32))
        if FINE:
            b_written = own_sums(b_Z * whole_half(new, new_low, c, FINE))
        b_gc = gc.load(ROWS)[:, None]
        b_one, b_two = factors(beta.load(ROWS)[:, None], FINE)
        b_ones, b_twos = factors(beside(beta, b_dbeta), FINE)  # the same, for own_sums
        b_R, b_F, b_W = warpgroup_mma_wait(0, [b_R, b_F, b_W])
        barrier()
        mbarrier.arrive(bars.empty_h, count=1)
        # sums over value heads grow where they are: a head's part of rowsum(Q * dQ) and of
        # rowsum(K * D) is what the sum has more than before
        mbarrier.wait(bars.full_k, n // G & 1)
        mbarrier.wait(bars.ready, n & 1)
        b_own = m.own.load(ROWS)[:, None]
        b_read = gl.zeros_like(b_through)
        if G == 1:
            b_dq, b_dk = zero, zero
        else:
            more = n % G > 0
            b_dq, b_dk = gl.where(more, b_dq, 0.0), gl.where(more, b_dk, 0.0)
            b_read -= own_sums(q.load(MMA).to(gl.float32) * b_dq)
        b_e = gl.exp2(b_gc)
        # eq:delta-dq   dQ = scale diag(2^gc) dO S^T + dM K
        b_dq = products(dM, dM_low, k, k, b_dq + b_R * (b_e * out.scale), True, FINE, False)
        # eq:fused-read   F = dL K - diag(2^gc) Z S^T, here times one of beta = one two
        b_F = products(dL, dL_low, k, k, b_F * -(b_one * b_e), True, FINE, False)
        # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
        b_k = k.load(MMA).to(gl.float32)
        b_W *= gl.exp2(b_last - b_gc)
        b_t = without_last(own_sums(b_k * b_W))
        # eq:fused-dk   dK = diag(beta) F + D
        b_dk += b_W + b_own * q.load(MMA).to(gl.float32)
        b_dgc = own_sums(b_k * b_dk) - b_t
        # eq:fused-write   D = dK_state + dM^T Q + (diag(beta) dL)^T K
        bLT, bLT_low = bL.permute((1, 0)), bL_low.permute((1, 0))
        b_dk = products(bLT, bLT_low, k, k, b_dk, True, FINE, False)
        dMT, dMT_low = dM.permute((1, 0)), dM_low.permute((1, 0))
        b_dk = products(dMT, dMT_low, q, q, b_dk, True, FINE, False)
        b_dq = warpgroup_mma_wait(3 * MORE, [b_dq])
        b_read += own_sums(q.load(MMA).to(gl.float32) * b_dq)
        b_k = k.load(MMA).to(gl.float32)
        b_dq += b_own * b_k
        b_F = warpgroup_mma_wait(2 * MORE, [b_F])
        b_KF = own_sums(b_k * b_F)
        if FINE:  # beta rowsum(K * F), without the rounding of the states that F has
            b_KF = gl.where(b_ones > 0.5, b_written - b_ones * b_dbeta, b_KF)
        b_dbeta += b_KF * (1.0 / b_ones)
        b_dgc += b_KF * b_twos
        b_F *= b_two
        b_dk = warpgroup_mma_wait(0, [b_dk])
        b_dgc -= own_sums(b_k * b_dk)
        b_dk += b_F
        leave_sums(m.parts, c, b_dgc, b_read, b_dbeta, b_through + b_t)
        barrier()  # no warp reads what the halves share any more, nor its k and q
        mbarrier.arrive(bars.used, count=1)
        if (n + 1) % G == 0:
            i_c, i_h, _ = item_at(n, H, G, out.items_ptr)
            q.store(b_dq.to(q.dtype))
            k.store(b_dk.to(k.dtype))
            fence_async_shared()
            barrier()
            async_store(out.dq_desc, [i_c * BT, i_h * K + c * BT], q)
            async_store(out.dk_desc, [i_c * BT, i_h * K + c * BT], k)
    mbarrier.wait(bars.used, (N & 1) ^ 1)
    store_sums(m.parts, c, out, N - 1, ROW, H, G, BT, GROUPS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["NT"])
def intra_chunk_bwd_gluon_kernel(
    q_desc, k_desc, v_desc, h_desc, v_new_desc, do_desc, dh_desc, Z_desc,
    v_low_desc, Z_low_desc,  # or None
    dq_desc, dk_desc, beta_ptr, gc_ptr, dbeta_ptr, dgc_ptr, scale,
    items_ptr,  # of item_at
    NT,  # chunks of all sequences
    ROW: gl.constexpr,  # numbers between tokens in beta and gc, and in their gradients
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    """One program: every so many-th chunk of a q/k head, with its value heads.  Any grid.

    Arguments of intra_chunk_bwd_kernel of kernels/fused/gdn_bwd.py, see `descriptor`.
    Reference: linattn_edu.reference.fused.gdn_bwd.intra_chunk_bwd.

    mbarriers, in the order of an item; K / 64 groups of four warps compute::

        full_new    do and v_new, an item ahead but in halves -> groups: dO v_new^T, Z v_new^T
        full_Z      Z and v -> groups
        full_h      h -> groups: dO S^T, Z S^T
        full_dh     dh -> groups: v_new dS^T
        gates_full  loading warp: gc and beta, as full_new -> groups
        empty_k     groups: the last dq and dk have left -> loading warp
        used        groups, at the end of the item before -> groups: they write dM or dL, and sums
        ready       groups: dM and dL are there -> groups, which multiply by them
        empty_h     groups: no product reads h, dh, Z or v any more -> loading warp
        full_k      q and k, once a chunk and q/k head -> groups
    """
    GROUPS: gl.constexpr = K // 64
    G: gl.constexpr = HV // H
    N = NT * H if items_ptr is None else gl.load(items_ptr)
    N = gl.cdiv(N - gl.program_id(0), gl.num_programs(0)) * G
    if items_ptr is not None:  # noqa: SIM102 - of None it is known here
        if N <= 0:
            return
    FINE: gl.constexpr = Z_low_desc is not None
    PLACES: gl.constexpr = 1 if FINE else 2
    v_lows, Z_lows = None, None
    if FINE:
        v_lows, Z_lows = ring(v_low_desc, 1), ring(Z_low_desc, 1)
    m = Memory(
        ring(q_desc, GROUPS), ring(k_desc, GROUPS), ring(v_desc, 1), ring(h_desc, 1),
        ring(v_new_desc, PLACES), ring(do_desc, PLACES), ring(dh_desc, 1), ring(Z_desc, 1),
        v_lows, Z_lows, ring(dq_desc, 3 + FINE), numbers([2 * PLACES, BT]), numbers([BT]),
        numbers([3 * GROUPS, BT]),
    )  # fmt: skip
    full_new, gates_full = bar_pairs(PLACES, 1, 1)
    b = Bars(
        full_new, gates_full, bar(1), bar(1), bar(1), bar(1), bar(GROUPS), bar(GROUPS),
        bar(GROUPS), bar(GROUPS),
    )  # fmt: skip
    fence_async_shared()
    out = Out(dq_desc, dk_desc, dbeta_ptr, dgc_ptr, scale, items_ptr)
    source = Source(
        q_desc, k_desc, v_desc, h_desc, v_new_desc, do_desc, dh_desc, Z_desc, v_low_desc,
        Z_low_desc, gc_ptr, beta_ptr, items_ptr,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize([
            (compute_keys, (0, out, m, b, N, ROW, H, G, K, BT)),
            (compute_keys, (1, out, m, b, N, ROW, H, G, K, BT)),
            (load_tiles, (source, m, b, N, ROW, H, G, K, V, BT)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_keys, (0, out, m, b, N, ROW, H, G, K, BT)),
            (load_tiles, (source, m, b, N, ROW, H, G, K, V, BT)),
        ], [1], [24])  # fmt: skip


# K -> options; with 64 keys for two programs a multiprocessor
OPTIONS = {n: {"num_warps": 4, "maxnreg": m, **ALLOCATE} for n, m in ((128, 168), (64, 128))}


@attempt
def intra_bwd_gluon(
    given: tuple[Tensor, ...], out: tuple[Tensor, Tensor, Tensor, Tensor], scale: float,
    low: tuple[Tensor, Tensor] | None = None, items: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch intra_chunk_bwd_gluon_kernel on what intra_chunk_bwd is given; it writes dq, dk, dbeta
    and dgc. Tensors [B, T, heads, ...] may be views of some heads. items: of item_at, or None: all.
    """
    q, k, v, beta, gc, h, v_new, do, dh, Z = given
    dq, dk, dbeta, dgc = out
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    NT = B * T // CHUNK
    keys, values, states = (64,), (V,), (V, K)
    sizes = keys, keys, values, states, values, values, states, values, values, values, keys, keys
    tensors = q, k, v, h, v_new, do, dh, Z, *(low or (None, None)), dq, dk
    descriptors = (descriptor(x, *size) for x, size in zip(tensors, sizes, strict=True))
    intra_chunk_bwd_gluon_kernel[(min(device_of(q)[1] * (128 // K), NT * H),)](
        *descriptors, beta, gc, dbeta, dgc, scale, items, NT, gc.stride(1), H, HV, K, V, CHUNK,
        **OPTIONS[K],
    )  # fmt: skip
