"""ssd_bwd_dc of Mamba-2's fused backward pass in Gluon, for Hopper.

A program takes one chunk and goes through the heads of a group, so that dy, the states and their
gradients are read once, and the gradient of C stays in registers. One warp copies the tiles of the
heads ahead; two groups of four warps compute, each a tile of 64 tokens.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from linattn_edu.kernels.gluon.blocks import (
    CHUNK,
    bar,
    bar_pairs,
    descriptor,
    operand,
    product,
    ring,
)
from linattn_edu.kernels.gluon.layouts import MMA, ROWS, WIDE, WIDE_ALONG, WIDE_ROWS
from linattn_edu.kernels.gluon.names import async_load, barrier, record
from linattn_edu.kernels.gluon.ssd_bwd import place_of
from linattn_edu.kernels.gluon.support import attempt


@record
class Tiles:
    """What is copied in, its memory and mbarriers."""

    C_desc: object
    dy_desc: object
    h_desc: object
    dh_desc: object
    Cs: object  # tiles of 64 tokens
    dys: object  # of 128 tokens
    hs: object
    dhs: object
    full_in: object  # C has come
    full: object  # STAGES: a head's tiles have
    empty: object  # STAGES: they have been read
    STAGES: object


@record
class Out:
    """Where the results go, and the log decays."""

    gc_ptr: object
    parts_ptr: object  # [tokens, G, N] of this part of the heads
    dgc_ptr: object
    dlast_ptr: object


@gluon.jit
def load_tiles(t, at):
    """The producer, a warp that loads."""
    N: gl.constexpr = at.N
    mbarrier.expect(t.full_in, 2 * 64 * N * 2)
    for c in gl.static_range(2):
        async_load(t.C_desc, [at.row + 64 * c, at.i_g * N], t.full_in, t.Cs.index(c))
    for n in range(at.heads):
        i, turn = n % t.STAGES, (n // t.STAGES & 1) ^ 1
        full = t.full.index(i)
        mbarrier.wait(t.empty.index(i), turn)
        mbarrier.expect(full, (128 * at.P + 2 * N * at.P) * 2)
        async_load(t.dy_desc, [at.row, (at.i_h + n) * at.P], full, t.dys.index(i))
        async_load(t.h_desc, [at.i_S + n * N, 0], full, t.hs.index(i))
        async_load(t.dh_desc, [at.i_S + n * N, 0], full, t.dhs.index(i))


@gluon.jit
def compute_tile(c: gl.constexpr, out, t, at):
    """Tile c of the chunk, by four warps; and <h, dh> of as many rows of the states."""
    dtype: gl.constexpr = t.dys.dtype
    zero = gl.full([64, 64], 0.0, gl.float32, MMA)
    b_dC = gl.full([64, at.N], 0.0, gl.float32, WIDE)
    o = at.i_h.to(gl.int64) * at.tokens + at.row
    o_t = 64 * c + gl.arange(0, 64, ROWS)
    b_gc, last = gl.load(out.gc_ptr + o + o_t), gl.load(out.gc_ptr + o + 127)
    mbarrier.wait(t.full_in, 0)
    for n in range(at.heads):
        i = n % t.STAGES
        dy, h = t.dys.index(i).slice(64 * c, 64), t.hs.index(i)
        b_e, a = gl.exp2(b_gc), gl.exp2(last)
        # of the next head, one head ahead
        o_next = o + gl.where(n + 1 < at.heads, at.tokens, 0)
        b_gc, last = gl.load(out.gc_ptr + o_next + o_t), gl.load(out.gc_ptr + o_next + 127)
        mbarrier.wait(t.full.index(i), n // t.STAGES & 1)
        b_y = product(t.Cs.index(c), h, zero, False)
        b_dy = dy.load(MMA).to(gl.float32)
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        b_dC = product(operand(b_dy * b_e[:, None], dtype, WIDE), h.permute((1, 0)), b_dC)
        # eq:ssd-dlast   dlast = a <h, dh>
        b_ds = t.dhs.index(i).slice(64 * c, 64).load(MMA).to(gl.float32)
        dlast = gl.sum(gl.sum(h.slice(64 * c, 64).load(MMA).to(gl.float32) * b_ds, 1), 0)
        gl.store(out.dlast_ptr + (at.i_S // at.N + n) * 2 + c, a * dlast)
        # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
        b_y = warpgroup_mma_wait(1, [b_y])
        gl.store(out.dgc_ptr + o + o_t, b_e * gl.sum(b_dy * b_y, 1))
        b_dC = warpgroup_mma_wait(0, [b_dC])
        barrier()
        mbarrier.arrive(t.empty.index(i), count=1)
        o = o_next
    o_r = at.row + 64 * c + gl.arange(0, 64, WIDE_ROWS)[:, None]
    to = (o_r.to(gl.int64) * at.G + at.i_g) * at.N + gl.arange(0, at.N, WIDE_ALONG)[None, :]
    gl.store(out.parts_ptr + to, b_dC)


@gluon.jit(do_not_specialize=["tokens"])
def ssd_bwd_dc_gluon_kernel(
    C_desc, dy_desc, h_desc, dh_desc, gc_ptr, parts_ptr, dgc_ptr, dlast_ptr,
    tokens,  # B * T
    G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, P: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a chunk of 128 tokens, some heads of a group.  Grid (chunks * G * SPLITS).

    Arguments of ssd_bwd_dc_kernel of kernels/fused/ssd_bwd_dc.py, see `descriptor`.
    Reference: linattn_edu.reference.fused.ssd_bwd_dc.

    mbarriers, of the n-th head in place n % STAGES::

        full_in  C, once -> both tiles
        full     dy, h and dh, STAGES heads ahead -> both tiles
        empty    both tiles: they have been read -> loading warp
    """
    at = place_of(tokens, G, H, N, P, SPLITS)
    full, empty = bar_pairs(STAGES, 1, 2)
    t = Tiles(
        C_desc, dy_desc, h_desc, dh_desc, ring(C_desc, 2), ring(dy_desc, STAGES),
        ring(h_desc, STAGES), ring(dh_desc, STAGES), bar(1), full, empty, STAGES,
    )  # fmt: skip
    fence_async_shared()
    part = at.i_split * (tokens.to(gl.int64) * G) * N
    out = Out(gc_ptr, parts_ptr + part, dgc_ptr, dlast_ptr)
    gl.warp_specialize([
        (compute_tile, (0, out, t, at)),
        (compute_tile, (1, out, t, at)),
        (load_tiles, (t, at)),
    ], [4, 1], [240, 24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 168}
STAGES = 4  # heads in shared memory, 48 KiB each


@attempt
def ssd_dc_gluon(given: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    """Launch ssd_bwd_dc_gluon_kernel on C, gc, h, dh and dy of ssd_bwd_dc; it writes parts [SPLITS,
    B, T, G, N], dgc [H, B, T] and dlast [B, NT, H, 2].
    """
    C, gc, h, dh, dy = given
    (n, T, H, P), (G, N), parts = dy.shape, C.shape[2:], out[0]
    descriptors = (
        descriptor(C, N), descriptor(dy, P, 2 * CHUNK), descriptor(h, P, N), descriptor(dh, P, N)
    )  # fmt: skip
    ssd_bwd_dc_gluon_kernel[(n * T // (2 * CHUNK) * G * len(parts),)](
        *descriptors, gc, *out, n * T, G, H, N, P, len(parts), STAGES, **OPTIONS
    )
