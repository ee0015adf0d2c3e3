"""ssd_bwd_dx of Mamba-2's fused backward pass in Gluon, for Hopper.

A program takes one chunk and goes through the heads of a group, so that x, dy and the gradients of
the states are read once, and what is summed over the heads stays in registers: the gradients of B
through the states, and of the scores. One warp copies the next head's tiles. Three groups of four
warps compute: two of them a tile of 64 tokens that are written, the third what comes through the
states and what the second tile reads of the first.
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
    bars,
    descriptor,
    numbers,
    operand,
    product,
    ring,
    rounded,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, WIDE, WIDE_ALONG, WIDE_ROWS
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record, reinterpret
from linattn_edu.kernels.gluon.support import ALLOCATE, attempt


@record
class Source:
    """What is copied in, by tensor maps, and the numbers of each token."""

    B_desc: object
    C_desc: object
    x_desc: object
    dy_desc: object
    dh_desc: object
    gs_ptr: object
    gc_ptr: object
    dgc_ptr: object


@record
class Memory:
    """Shared memory. Two places but of B, C, scores and rows: of the heads, in turn."""

    Bs: object  # tiles of 64 tokens
    Cs: object
    xs: object  # of 128 tokens; dx leaves from there
    dys: object
    dss: object
    vs: object  # dY of the second tile, by its decay since the first
    scores: object  # in fp32, a tile's own, transposed: where its C was
    far: object  # those of the second tile with the first, transposed
    gates: object  # gs, gc and dgc of 128 tokens
    rows: object  # two of three sums over rows, by warp: each tile's own, the second's of the first


@record
class Bars:
    """The mbarriers."""

    full_in: object  # B and C have come
    far_made: object  # the second tile's C has been read for scores with the first
    full: object  # two: x, dy, dh and gates have
    empty_x: object  # two: x has been read, and dx has left
    empty: object  # two: the others have been read
    v_full: object  # two: v is there
    shared_full: object  # two: sums of the second tile's rows are, and x has been read for them


@record
class Out:
    """Where the results go."""

    dx_desc: object
    sums_ptr: object  # [4, H, tokens]: dgc, dstep, m, xdy
    parts_ptr: object  # [tokens, G, N] of this part of the heads
    dS_ptr: object  # [tokens, G, 128]
    D_ptr: object  # [H] or None


@record
class Place:
    """What a program works on."""

    row: object  # the chunk's first token
    i_g: object  # group
    i_h: object  # first head
    i_S: object  # row of its state's gradient
    i_split: object  # which part of the group's heads
    heads: object
    tokens: object
    plane: object  # heads times tokens
    G: object
    N: object
    P: object


@gluon.jit
def place_of(tokens, G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
             SPLITS: gl.constexpr):  # fmt: skip
    """What this program works on: a chunk of 128 tokens and some heads of a group."""
    HEADS: gl.constexpr = H // G
    MOST: gl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    i_split, i_g = gl.program_id(0) % SPLITS, gl.program_id(0) // SPLITS % G
    i_c = gl.program_id(0) // (SPLITS * G)
    i_h = i_g * HEADS + i_split * MOST
    heads = gl.minimum(MOST, HEADS - i_split * MOST)
    return Place(
        i_c * 128, i_g, i_h, (i_c * H + i_h) * N, i_split, heads, tokens,
        tokens.to(gl.int64) * H, G, N, P,
    )  # fmt: skip


@gluon.jit
def load_tiles(source, m, bars, at):
    """The producer, a warp that loads."""
    BYTES: gl.constexpr = (2 * 128 * at.P + at.N * at.P) * 2
    o_t = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    mbarrier.expect(bars.full_in, 4 * 64 * at.N * 2)
    for c in gl.static_range(2):
        where = [at.row + 64 * c, at.i_g * at.N]
        async_load(source.B_desc, where, bars.full_in, m.Bs.index(c))
        async_load(source.C_desc, where, bars.full_in, m.Cs.index(c))
    o = at.i_h.to(gl.int64) * at.tokens + at.row
    for n in range(at.heads):
        i, turn = n % 2, (n // 2 & 1) ^ 1
        full, i_h = bars.full.index(i), at.i_h + n
        b_gs = gl.load(source.gs_ptr + o + o_t)
        b_gc = gl.load(source.gc_ptr + o + o_t)
        b_dgc = gl.load(source.dgc_ptr + o + o_t)
        o += at.tokens
        mbarrier.wait(bars.empty.index(i), turn)
        mbarrier.expect(full, BYTES)
        async_load(source.dy_desc, [at.row, i_h * at.P], full, m.dys.index(i))
        async_load(source.dh_desc, [at.i_S + n * at.N, 0], full, m.dss.index(i))
        mbarrier.wait(bars.empty_x.index(i), turn)
        async_load(source.x_desc, [at.row, i_h * at.P], full, m.xs.index(i))
        m.gates.index(3 * i).store(b_gs)
        m.gates.index(3 * i + 1).store(b_gc)
        m.gates.index(3 * i + 2).store(b_dgc)
        barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def make_scores(c: gl.constexpr, m, bars, below, same, zero):
    """A tile's own scores below the diagonal into memory; returns the diagonal."""
    mbarrier.wait(bars.full_in, 0)
    # eq:ssd-cb   S = C B^T, transposed
    b_S = product(m.Bs.index(c), m.Cs.index(c).permute((1, 0)), zero, False)
    b_S = warpgroup_mma_wait(0, [b_S])
    if c == 1:
        mbarrier.wait(bars.far_made, 0)
    barrier()  # no warp reads C any more
    m.scores.index(c).store(gl.where(below, b_S, 0.0))
    barrier()
    return gl.sum(gl.where(same, b_S, 0.0), 1)


@gluon.jit
def leave_rows(sums, x):
    """What each of the four warps sums of the columns of x [64, 64]: no warp waits for another."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    b_sum = gl.sum(gl.reshape(x, [4, 2, 8, 64]), 1)
    # by shared memory: a sum from lane to lane moves every column three times
    sums.reshape([4, 64]).store(gl.sum(gl.convert_layout(b_sum, lanes), 1))


@gluon.jit
def rows_left(sums):
    """The sum of them."""
    b_sum = sums.slice(0, 64).load(ROWS) + sums.slice(64, 64).load(ROWS)
    return b_sum + sums.slice(128, 64).load(ROWS) + sums.slice(192, 64).load(ROWS)


@gluon.jit
def inside(b_W, b_dS, b_on, b_gw, gc, scores, sums, dtype: gl.constexpr):
    """Of b_W = X dY^T of a tile M^T, the scores' gradients with it, and the sums of W's rows."""
    b_E = gl.exp2(gl.minimum(gc.load(ALONG)[None, :] - b_gw[:, None], 100.0))
    b_W *= b_on[:, None]
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    b_dS += b_W * b_E
    b_M = rounded(scores.load(MMA) * b_E, dtype)
    # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i, with M as dx rounds it
    leave_rows(sums, b_W * b_M.to(gl.float32))
    return b_M, b_dS


@gluon.jit
def write_v(m, i, b_gc, mid):
    """dY of the second tile by its decay since the first, for the first's products."""
    dy, v = m.dys.index(i).slice(64, 64), m.vs.index(i)
    b_e = gl.exp2(gl.minimum(b_gc - mid, 0.0))
    v.store((dy.load(MMA).to(gl.float32) * b_e[:, None]).to(v.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def store_vectors(out, at, n, c: gl.constexpr, b_dgc, b_dstep, b_m, b_xdy):
    """The numbers of a tile's tokens, of the n-th head."""
    o = (at.i_h + n).to(gl.int64) * at.tokens + at.row + 64 * c
    to = out.sums_ptr + o + gl.arange(0, 64, ROWS)
    gl.store(to, b_dgc)
    gl.store(to + at.plane, b_dstep)
    gl.store(to + 2 * at.plane, b_m)
    gl.store(to + 3 * at.plane, b_xdy)


@gluon.jit
def gates_of(m, i, c: gl.constexpr):
    """Of tile c: gc of its tokens; gs, with weight 1 for those that write nothing, and 0 for them
    beside it; gc of the chunk's last token and of the first tile's.
    """
    gs, gc = m.gates.index(3 * i).slice(64 * c, 64), m.gates.index(3 * i + 1)
    last = gl.max(gc.slice(127, 1).load(ROWS), 0)
    mid = gl.max(gc.slice(63, 1).load(ROWS), 0)
    b_gs, b_gc = gs.load(ROWS), gc.slice(64 * c, 64).load(ROWS)
    off = b_gs == float("inf")
    return b_gc, gl.where(off, b_gc, b_gs), gl.where(off, 0.0, 1.0), last, mid


@gluon.jit
def weighted(m, i, c: gl.constexpr, b_r, dtype: gl.constexpr):
    """diag(r * step) X of tile c, as a product's first operand."""
    b_x = m.xs.index(i).slice(64 * c, 64).load(MMA).to(gl.float32)
    return operand(b_x * b_r[:, None], dtype, WIDE)


@gluon.jit
def compute_shared(out, m, bars, at):
    """What both tiles give to dB through the states, and what the second reads of the first."""
    dtype: gl.constexpr = m.xs.dtype
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    mbarrier.wait(bars.full_in, 0)
    b_far = product(m.Bs.index(0), m.Cs.index(1).permute((1, 0)), zero, False)
    b_far = warpgroup_mma_wait(0, [b_far])
    m.far.index(0).store(b_far.to(dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(bars.far_made, count=1)
    b_dB = gl.full([64, at.N], 0.0, gl.float32, WIDE)
    b_dB1, b_far = b_dB, zero
    for n in range(at.heads):
        i, turn, z = n % 2, n // 2 & 1, n >> 30
        ds, v = m.dss.index(i).permute((1, 0)), m.vs.index(i)
        mbarrier.wait(bars.full.index(i), turn)
        b_gc, b_gw1, b_on1, last, mid = gates_of(m, i, 1)
        write_v(m, i, b_gc, mid)
        mbarrier.arrive(bars.v_full.index(i), count=1)
        b_W = product(m.xs.index(i).slice(0, 64), v.permute((1, 0)), zero, False)
        b_gc, b_gw, b_on, last, mid = gates_of(m, i, 0)
        b_W = warpgroup_mma_wait(0, [b_W])
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_W *= (gl.exp2(mid - b_gw) * b_on)[:, None]
        b_far += b_W
        # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i
        b_W *= m.far.index(z).load(MMA).to(gl.float32)
        leave_rows(m.rows.index(3 * i + 2), b_W)
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_u = weighted(m, i, 0, gl.exp2(last - b_gw) * b_on, dtype)
        b_dB = product(b_u, ds, b_dB)
        b_u = weighted(m, i, 1, gl.exp2(last - b_gw1) * b_on1, dtype)
        barrier()
        mbarrier.arrive(bars.shared_full.index(i), count=1)
        b_dB1 = product(b_u, ds, b_dB1)
        b_dB, b_dB1 = warpgroup_mma_wait(0, [b_dB, b_dB1])
        barrier()
        mbarrier.arrive(bars.empty.index(i), count=1)
    o_t = gl.arange(0, 64, WIDE_ROWS)[:, None] + at.row
    to = (o_t.to(gl.int64) * at.G + at.i_g) * at.N + gl.arange(0, at.N, WIDE_ALONG)[None, :]
    gl.store(out.parts_ptr + to, b_dB)
    gl.store(out.parts_ptr + to + 64 * at.G * at.N, b_dB1)
    o_j, o_i = gl.arange(0, 64, ROWS)[:, None], gl.arange(0, 64, ALONG)[None, :]
    row = out.dS_ptr + ((at.row + 64 + o_i).to(gl.int64) * at.G + at.i_g) * 128 + o_j
    gl.store(row, b_far)
    gl.store(row + (64 - 64 * at.G * 128), zero)


@gluon.jit
def compute_tile(c: gl.constexpr, out, m, bars, at):
    """Tile c of the chunk, by four warps: dx, the scores' gradients, and the numbers."""
    dtype: gl.constexpr = m.xs.dtype
    o_j, o_i = gl.arange(0, 64, ROWS)[:, None], gl.arange(0, 64, ALONG)[None, :]
    below, same = o_j < o_i, o_j == o_i
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    b_same, b_dS = make_scores(c, m, bars, below, same, zero), zero
    for n in range(at.heads):
        i, turn = n % 2, n // 2 & 1
        # 0, and the compiler cannot know: see gdn_intra_bwd
        z = n >> 30
        x, dy = m.xs.index(i).slice(64 * c, 64), m.dys.index(i).slice(64 * c, 64)
        if out.D_ptr is not None:
            D = gl.load(out.D_ptr + at.i_h + n).to(gl.float32)
        mbarrier.wait(bars.full.index(i), turn)
        b_W = product(x, dy.permute((1, 0)), zero, False)
        # of a token that writes nothing, weight 1 until the end: dstep is of its write
        b_gc, b_gw, b_on, last, mid = gates_of(m, i, c)
        if n > 0:  # dx of the head before has left
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(bars.empty_x.index((n - 1) % 2), count=1)
        b_W = warpgroup_mma_wait(0, [b_W])
        b_xdy = gl.sum(gl.where(same, b_W, 0.0), 1)
        gc = m.gates.index(3 * i + 1).slice(64 * c, 64)
        b_M, b_dS = inside(
            b_W, b_dS, b_on, b_gw, gc, m.scores.index(c + z), m.rows.index(3 * i + c), dtype
        )
        b_dxs = product(m.Bs.index(c + z), m.dss.index(i), zero, False)
        b_M = operand(b_M, dtype)
        b_dxs = warpgroup_mma_wait(0, [b_dxs])
        b_r = gl.exp2(last - b_gw)
        # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_j = step_j r_j x_j . (B ds)_j
        b_m = b_on * b_r * gl.sum(x.load(MMA).to(gl.float32) * b_dxs, 1)
        # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
        if c == 0:
            mbarrier.wait(bars.v_full.index(i), turn)
            b_dxs = product(m.far.index(z), m.vs.index(i), b_dxs * gl.exp2(last - mid))
            b_r = gl.exp2(mid - b_gw)
            b_dxs = warpgroup_mma_wait(0, [b_dxs])
        b_dxs = product(b_M, dy, b_dxs * b_r[:, None])
        b_direct = b_same * b_on * gl.exp2(b_gc - b_gw)
        if out.D_ptr is not None:
            b_direct += D
        barrier()  # the sums over rows are there
        b_dgc = m.gates.index(3 * i + 2).slice(64 * c, 64).load(ROWS)
        b_dgc += rows_left(m.rows.index(3 * i + c))
        mbarrier.wait(bars.shared_full.index(i), turn)
        if c == 1:
            b_dgc += rows_left(m.rows.index(3 * i + 2))
        b_dxs = warpgroup_mma_wait(0, [b_dxs])
        b_cols = gl.sum(x.load(MMA).to(gl.float32) * b_dxs, 1)
        # eq:ssd-dstep   dstep_j = x_j . dXs_j
        b_dstep = b_cols / gl.exp2(b_gc - b_gw) + b_same * b_xdy
        # eq:ssd-dgc-columns   colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)
        b_dgc -= b_on * b_cols
        # eq:ssd-dx   dX = diag(step) dXs + D dY
        b_dx = b_dxs * b_on[:, None] + dy.load(MMA).to(gl.float32) * b_direct[:, None]
        barrier()
        mbarrier.arrive(bars.empty.index(i), count=1)
        x.store(b_dx.to(dtype))
        fence_async_shared()
        barrier()
        async_store(out.dx_desc, [at.row + 64 * c, (at.i_h + n) * at.P], x)
        store_vectors(out, at, n, c, b_dgc, b_dstep, b_m, b_xdy)
    row = out.dS_ptr + ((at.row + 64 * c + o_i).to(gl.int64) * at.G + at.i_g) * 128 + o_j
    gl.store(row + 64 * c, gl.where(below | same, b_dS, 0.0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def ssd_bwd_dx_gluon_kernel(
    B_desc, C_desc, x_desc, dy_desc, dh_desc, dx_desc,
    gs_ptr, gc_ptr, dgc_ptr, D_ptr, sums_ptr, parts_ptr, dS_ptr,
    tokens,  # B * T
    G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, P: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """One program: a chunk of 128 tokens, some heads of a group.  Grid (chunks * G * SPLITS).

    Arguments of ssd_bwd_dx_kernel and of the others of kernels/fused/ssd_bwd.py, see `descriptor`.
    Reference: linattn_edu.reference.fused.ssd_bwd.ssd_bwd_dx.

    mbarriers, in the order of a head; compute_tile has tile c, compute_shared what is of both::

        full_in      B and C, once -> all three groups of warps: scores
        far_made     compute_shared: it has read the second tile's C -> tile 1: scores in its place
        full         x, dy, dh and gates, a head ahead -> all: X dY^T, B ds; v
        v_full       compute_shared: v, and far scores -> tile 0: S v
        shared_full  compute_shared: sums of the second tile's ROWS, and it reads x no more ->
                     both tiles: dgc; dx takes the place of x
        empty_x      both tiles: dx of the head before has left -> loading warp
        empty        all: nothing else of the head is read any more -> loading warp

    The places of v and of sums are empty again where those of dy are: full says so.
    """
    at = place_of(tokens, G, H, N, P, SPLITS)
    part = at.i_split * (tokens.to(gl.int64) * G)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    Cs = ring(C_desc, 2)
    m = Memory(
        ring(B_desc, 2), Cs, ring(x_desc, 2), ring(dy_desc, 2), ring(dh_desc, 2), ring(dx_desc, 2),
        reinterpret(Cs, gl.float32, [2, 64, 64], swizzled), ring(dx_desc, 1),
        numbers([6, 128]), numbers([6, 256]),
    )  # fmt: skip
    full, empty_x = bar_pairs(2, 2, 2)
    b = Bars(bar(1), bar(1), full, empty_x, bars(2, 3), bars(2, 1), bars(2, 1))
    fence_async_shared()
    out = Out(dx_desc, sums_ptr, parts_ptr + part * N, dS_ptr + part * 128, D_ptr)
    source = Source(B_desc, C_desc, x_desc, dy_desc, dh_desc, gs_ptr, gc_ptr, dgc_ptr)
    gl.warp_specialize([
        (compute_shared, (out, m, b, at)),
        (compute_tile, (0, out, m, b, at)),
        (compute_tile, (1, out, m, b, at)),
        (load_tiles, (source, m, b, at)),
    ], [4, 4, 1], [136, 136, 24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 128, **ALLOCATE}


@attempt
def ssd_dx_gluon(given: tuple[Tensor | None, ...], out: tuple[Tensor, ...]) -> None:
    """Launch ssd_bwd_dx_gluon_kernel on what ssd_bwd_dx is given: C, B, x, gs, gc, dh, dy, dgc and
    D [H, 1] or None; it writes dx, sums [4, H, B, T], parts [SPLITS, B, T, G, N] and dS
    [SPLITS, B, T, G, 128].
    """
    C, B, x, gs, gc, dh, dy, dgc, D = given
    dx, sums, parts, dS = out
    (n, T, H, P), (G, N) = x.shape, B.shape[2:]
    descriptors = (
        descriptor(B, N), descriptor(C, N), descriptor(x, P, 2 * CHUNK),
        descriptor(dy, P, 2 * CHUNK), descriptor(dh, P, N), descriptor(dx, P),
    )  # fmt: skip
    ssd_bwd_dx_gluon_kernel[(n * T // (2 * CHUNK) * G * len(parts),)](
        *descriptors, gs, gc, dgc, D, sums, parts, dS, n * T, G, H, N, P, len(parts), **OPTIONS
    )
