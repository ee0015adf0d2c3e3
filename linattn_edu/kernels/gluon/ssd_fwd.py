"""The scan of Mamba-2's forward pass in Gluon, for Hopper: two heads of a group a program.

So C, B and their scores are read once for both. One warp copies tiles of 64 tokens ahead. Four
warps make the next tile's score matrix of each head, and two groups of four scan a head each: they
hold h^T [P, N] in registers, whose 16-bit copy is the first operand of the next tile's product.
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

from linattn_edu.kernels.delta.cp_merge import FORGOTTEN
from linattn_edu.kernels.gluon.blocks import (
    CHUNK,
    bar_pairs,
    bars,
    descriptor,
    half,
    numbers,
    operand,
    product,
    ring,
)
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, ROWS, WIDE, WIDE_ALONG, WIDE_ROWS
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.gluon.scan_frame import hand_over
from linattn_edu.kernels.gluon.support import attempt


@record
class Tiles:
    """What is copied in, by tensor maps, with places for STAGES tiles of tokens."""

    descs: object  # of C, B, S and x
    Cs: object
    Bs: object
    Ss: object
    xs: object  # of both heads
    gates: object  # in fp32: gs and gc of the first head, and of the second
    full: object  # [STAGES, 1] mbarriers: a tile has come
    empty: object  # [STAGES, 1] mbarriers: no warp reads it any more
    gs_ptr: object  # at the first token of the first head
    gc_ptr: object
    tokens: object  # of all sequences: from one head's gates to the next's
    STAGES: object


@record
class Made:
    """What four warps make of each tile: two places for each of both heads."""

    Ms: object  # 2 j + w: of head w in place j
    rows: object  # in fp32, likewise: e, and at 4 + 2 j + w what a token writes at the tile's end
    full: object  # [2, 1] mbarriers: a tile's are there
    empty: object  # [2, 1] mbarriers: they have been read


@record
class Place:
    """What a program goes through."""

    first: object  # row of the first token
    tiles: object
    i_g: object  # group
    i_h: object  # first head
    i_n: object  # sequence
    before: object  # pieces before it in the sequence
    i_piece: object
    last: object  # whether the sequence ends with it
    G: object
    H: object
    N: object
    P: object
    BC: object


@record
class States:
    """States between pieces, [., H, N, P] in fp32, or None."""

    h0_ptr: object
    ends_ptr: object  # after each piece, from zero
    kept_ptr: object  # [pieces, H]: what a piece leaves of what was before
    ht_ptr: object


@gluon.jit
def load_tiles(t, at):
    """The producer, a warp that loads."""
    C_desc, B_desc, S_desc, x_desc = t.descs
    BYTES: gl.constexpr = (2 * 64 * at.N + 64 * 64 + 2 * 64 * at.P) * 2
    o_t = gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    for i_t in range(at.tiles):
        i, row = i_t % t.STAGES, at.first + i_t * 64
        b_gs0, b_gc0 = gl.load(t.gs_ptr + i_t * 64 + o_t), gl.load(t.gc_ptr + i_t * 64 + o_t)
        b_gs1 = gl.load(t.gs_ptr + t.tokens + i_t * 64 + o_t)
        b_gc1 = gl.load(t.gc_ptr + t.tokens + i_t * 64 + o_t)
        mbarrier.wait(t.empty.index(i), (i_t // t.STAGES & 1) ^ 1)
        full = t.full.index(i)
        mbarrier.expect(full, BYTES)
        async_load(C_desc, [row, at.i_g * at.N], full, t.Cs.index(i))
        async_load(S_desc, [row, at.i_g * at.BC + i_t * 64 % at.BC], full, t.Ss.index(i))
        async_load(x_desc, [row, at.i_h * at.P], full, t.xs.index(i))
        async_load(B_desc, [row, at.i_g * at.N], full, t.Bs.index(i))
        t.gates.index(4 * i).store(b_gs0)
        t.gates.index(4 * i + 1).store(b_gc0)
        t.gates.index(4 * i + 2).store(b_gs1)
        t.gates.index(4 * i + 3).store(b_gc1)
        barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def make_head(w: gl.constexpr, t, m, i, j, b_S, before, tile: gl.constexpr):
    """Head w's matrix and vectors of the tile in place i, to place j; gc of its last token."""
    gs, gc = t.gates.index(4 * i + 2 * w), t.gates.index(4 * i + 2 * w + 1)
    rows: gl.constexpr = gl.SliceLayout(1, tile)
    b_gs, b_gc = gs.load(gl.SliceLayout(0, tile)), gc.load(rows)
    # eq:ssd-scores   M = C B^T * G * step
    b_M = b_S * gl.exp2(gl.minimum(b_gc[:, None] - b_gs[None, :], 100.0))
    m.Ms.index(2 * j + w).store(b_M.to(m.Ms.dtype))
    last = gl.max(gc.slice(63, 1).load(rows), 0)
    m.rows.index(2 * j + w).store(gl.exp2(b_gc - before))
    m.rows.index(4 + 2 * j + w).store(gl.exp2(last - gs.load(rows)))
    return last


@gluon.jit
def make_scores(t, m, at):
    """Four warps a tile ahead: what both heads' scans read of their gates."""
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    before0, before1 = 0.0, 0.0  # gc of the token before, in the chunk
    for i_t in range(at.tiles):
        i, j = i_t % t.STAGES, i_t % 2
        mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)
        b_S = t.Ss.index(i).load(tile).to(gl.float32)
        mbarrier.wait(m.empty.index(j), (i_t // 2 & 1) ^ 1)
        last0 = make_head(0, t, m, i, j, b_S, before0, tile)
        last1 = make_head(1, t, m, i, j, b_S, before1, tile)
        ends = (i_t + 1) * 64 % at.BC == 0
        before0, before1 = gl.where(ends, 0.0, last0), gl.where(ends, 0.0, last1)
        hand_over(m.full.index(j))
        mbarrier.arrive(t.empty.index(i), count=1)


@gluon.jit
def entering(states, at, i_h, o_h, like, STEP: gl.constexpr):
    """The state before the piece: until nothing is left of what was before.

    STEP: from the piece to the one before it; 1 where the scan goes back in time.
    """
    b_h, kept = like, 1.0
    SIZE: gl.constexpr = at.N * at.P
    if states.ends_ptr is not None:
        left = at.before
        while left > 0:
            left -= 1
            i_end = (at.i_piece + STEP * (at.before - left)) * at.H + i_h
            b_h += gl.load(states.ends_ptr + i_end * SIZE + o_h) * kept
            kept *= gl.load(states.kept_ptr + i_end)
            kept = gl.where(kept > FORGOTTEN, kept, 0.0)
            left = gl.where(kept > 0, left, 0)
    if states.h0_ptr is not None:
        h0_ptr = states.h0_ptr + (at.i_n * at.H + i_h) * SIZE
        b_h += gl.load(h0_ptr + o_h, mask=(o_h >= 0) & (kept > 0), other=0.0).to(gl.float32) * kept
    return b_h


@gluon.jit
def scan_head(w: gl.constexpr, t, m, at, states, out_desc, out, D_ptr, PER: gl.constexpr):
    """Four warps: the scan of head w, transposed."""
    P: gl.constexpr = at.P
    dtype: gl.constexpr = t.xs.dtype
    zero = gl.full([P, 64], 0.0, gl.float32, MMA)
    i_h = at.i_h + w
    o_n, o_p = gl.arange(0, at.N, WIDE_ALONG), gl.arange(0, P, WIDE_ROWS)
    o_h = o_n[None, :] * P + o_p[:, None]
    b_h = entering(states, at, i_h, o_h, gl.full([P, at.N], 0.0, gl.float32, WIDE), -1)
    if D_ptr is not None:
        o_D = gl.arange(0, P, ROWS)
        b_D = gl.load(D_ptr + i_h * PER + (o_D if PER > 1 else 0 * o_D)).to(gl.float32)[:, None]
    b_h16 = operand(b_h, dtype)
    for i_t in range(at.tiles):
        i, j = i_t % t.STAGES, i_t % 2
        mbarrier.wait(t.full.index(i), i_t // t.STAGES & 1)
        # eq:ssd-inter   inter = diag(e) C h
        b_y = product(b_h16, t.Cs.index(i).permute((1, 0)), zero, False)
        x = half(t.xs.index(i), w).permute((1, 0))
        b_x = x.load(MMA).to(gl.float32)
        mbarrier.wait(m.full.index(j), i_t // 2 & 1)
        e = m.rows.index(2 * j + w)
        b_u = operand(b_x * m.rows.index(4 + 2 * j + w).load(ALONG)[None, :], dtype, WIDE)
        b_h *= e.slice(63, 1).load(WIDE_ALONG)[None, :]
        b_y = warpgroup_mma_wait(0, [b_y])
        # eq:ssd-output   y = inter + M X + D X
        b_y = product(x, m.Ms.index(2 * j + w).permute((1, 0)), b_y * e.load(ALONG)[None, :])
        # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
        b_h = product(b_u, t.Bs.index(i), b_h)
        b_y = warpgroup_mma_wait(1, [b_y])
        if D_ptr is not None:
            b_y += b_x * b_D
        tma.store_wait(0)
        barrier()  # the tile before has left `out`
        out.permute((1, 0)).store(b_y.to(dtype))
        fence_async_shared()
        barrier()
        async_store(out_desc, [at.first + i_t * 64, i_h * P], out)
        b_h = warpgroup_mma_wait(0, [b_h])
        b_h16 = operand(b_h, dtype)
        barrier()
        mbarrier.arrive(t.empty.index(i), count=1)
        mbarrier.arrive(m.empty.index(j), count=1)
    tma.store_wait(0)
    if states.ht_ptr is not None:
        i_end = (at.i_n * at.H + i_h) * at.N * P
        gl.store(states.ht_ptr + i_end + o_h, b_h, mask=(o_h >= 0) & at.last)


@gluon.jit(do_not_specialize=["T", "tokens", "size"])
def ssd_fwd_gluon_kernel(
    C_desc, B_desc, S_desc, x_desc, out_desc, gs_ptr, gc_ptr, h0_ptr, ends_ptr, kept_ptr, D_ptr,
    ht_ptr, T,
    tokens,  # B * T
    size,  # tokens of a piece
    PER: gl.constexpr,
    G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, P: gl.constexpr, BC: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a piece of two heads of a group, 64 tokens at a time.  Grid (NP * H / 2).

    Arguments of ssd_fwd_kernel of kernels/fused/ssd_fwd.py, see `descriptor`: whole chunks,
    without documents or a gate. BC: columns of S, of which a tile reads its own.
    Reference: linattn_edu.reference.fused.ssd_fwd.

    mbarriers, of a tile in place i of STAGES and in place j of two::

        full      C, B, S, x and gates, STAGES ahead -> all: C h; M
        m.full    make_scores: M, e and r of both heads, two ahead -> both scans: M x, and h
        m.empty   both scans: M has been read -> make_scores
        empty     all: nothing of the tile is read any more -> loading warp
    """
    i_h, i_piece = gl.program_id(0) % (H // 2) * 2, gl.program_id(0) // (H // 2)
    i_n, before = i_piece // gl.cdiv(T, size), i_piece % gl.cdiv(T, size)
    first, n_t = i_n * T + before * size, T - before * size
    at = Place(
        first, gl.minimum(n_t, size) // 64, i_h // (H // G), i_h, i_n.to(gl.int64), before,
        i_piece.to(gl.int64), n_t <= size, G, H, N, P, BC,
    )  # fmt: skip
    o = i_h.to(gl.int64) * tokens + first
    full, empty = bar_pairs(STAGES, 2, 3)
    t = Tiles(
        (C_desc, B_desc, S_desc, x_desc), ring(C_desc, STAGES), ring(B_desc, STAGES),
        ring(S_desc, STAGES), ring(x_desc, STAGES), numbers([4 * STAGES, 64]), full, empty,
        gs_ptr + o, gc_ptr + o, tokens, STAGES,
    )  # fmt: skip
    m = Made(ring(S_desc, 4), numbers([8, 64]), bars(2, 1), bars(2, 2))
    outs = ring(out_desc, 2)
    fence_async_shared()
    states = States(h0_ptr, ends_ptr, kept_ptr, ht_ptr)
    gl.warp_specialize([
        (scan_head, (0, t, m, at, states, out_desc, outs.index(0), D_ptr, PER)),
        (scan_head, (1, t, m, at, states, out_desc, outs.index(1), D_ptr, PER)),
        (make_scores, (t, m, at)),
        (load_tiles, (t, at)),
    ], [4, 4, 1], [192, 96, 24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 128}
STAGES = 3


@attempt
def ssd_fwd_gluon(given: tuple[Tensor | None, ...], piece: int) -> None:
    """Launch ssd_fwd_gluon_kernel on C, B, S, x, out, gs, gc, h0, ends, kept, D and ht, of which it
    writes out and ht.  piece: its tokens.
    """
    C, B, S, x, out, gs, gc, *states, D, ht = given
    (n, T, H, P), (G, N) = x.shape, B.shape[2:]
    descriptors = map(descriptor, (C, B, S, x, out), (N, N, CHUNK, 2 * P, P))
    ssd_fwd_gluon_kernel[(n * -(-T // piece) * H // 2,)](
        *descriptors, gs, gc, *states, D, ht, T, n * T, piece, 1 if D is None else D.numel() // H,
        G, H, N, P, S.shape[3], STAGES, **OPTIONS,
    )  # fmt: skip
