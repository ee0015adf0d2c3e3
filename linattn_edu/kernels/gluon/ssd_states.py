"""The states of Mamba-2 between its chunks in Gluon, for Hopper: two heads of a group a program.

Or the gradients of these states, back in time: the same sums, of C and dy in place of B and x. So B
is read once for both heads. One warp copies tiles of 64 tokens ahead, and two groups of four scan a
head each: they hold h^T [P, N] in registers.
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

from linattn_edu.kernels.gluon.blocks import bar_pairs, descriptor, half, operand, product, ring
from linattn_edu.kernels.gluon.layouts import ALONG, MMA, WIDE, WIDE_ALONG, WIDE_ROWS
from linattn_edu.kernels.gluon.names import async_load, async_store, barrier, record
from linattn_edu.kernels.gluon.ssd_fwd import Place, States, entering
from linattn_edu.kernels.gluon.support import attempt


@record
class Tiles:
    """What is copied in, by tensor maps, with places for STAGES tiles of tokens; log decays."""

    B_desc: object
    x_desc: object
    Bs: object
    xs: object  # of both heads
    full: object  # [STAGES, 1] mbarriers: a tile has come
    empty: object  # [STAGES, 1] mbarriers: no warp reads it any more
    gs_ptr: object  # at the first token of the first head; or None, back in time
    gc_ptr: object
    tokens: object  # of all sequences: from one head's gates to the next's
    STAGES: object


@gluon.jit
def load_tiles(t, at):
    """The producer, a warp that loads."""
    BYTES: gl.constexpr = (64 * at.N + 2 * 64 * at.P) * 2
    for n in range(at.tiles):
        i = n % t.STAGES
        c = n // 2 if t.gs_ptr is not None else at.tiles // 2 - 1 - n // 2
        row = at.first + c * 128 + n % 2 * 64
        mbarrier.wait(t.empty.index(i), (n // t.STAGES & 1) ^ 1)
        full = t.full.index(i)
        mbarrier.expect(full, BYTES)
        async_load(t.B_desc, [row, at.i_g * at.N], full, t.Bs.index(i))
        async_load(t.x_desc, [row, at.i_h * at.P], full, t.xs.index(i))


@gluon.jit
def gates_of(t, w: gl.constexpr, c, ALONG: gl.constexpr):
    """Of chunk c of head w: gs or, back in time, gc of its tokens; and gc of the last."""
    o, o_t = w * t.tokens + c * 128, gl.arange(0, 64, ALONG)
    g_ptr = (t.gc_ptr if t.gs_ptr is None else t.gs_ptr) + o
    return gl.load(g_ptr + o_t), gl.load(g_ptr + 64 + o_t), gl.load(t.gc_ptr + o + 127)


@gluon.jit
def weighted(t, w: gl.constexpr, n, b_g, last):
    """x^T of the n-th tile by its weights, as a product's first operand."""
    i = n % t.STAGES
    mbarrier.wait(t.full.index(i), n // t.STAGES & 1)
    b_r = gl.exp2(b_g if t.gs_ptr is None else last - b_g)
    b_x = half(t.xs.index(i), w).permute((1, 0)).load(MMA).to(gl.float32)
    return operand(b_x * b_r[None, :], t.xs.dtype, WIDE)


@gluon.jit
def scan_head(w: gl.constexpr, t, at, states, h_desc, out):
    """Four warps: the scan of head w, transposed."""
    BACK: gl.constexpr = t.gs_ptr is None
    i_h, chunks = at.i_h + w, at.tiles // 2
    o_n, o_p = gl.arange(0, at.N, WIDE_ALONG), gl.arange(0, at.P, WIDE_ROWS)
    o_h = o_n[None, :] * at.P + o_p[:, None]
    zero = gl.full([at.P, at.N], 0.0, gl.float32, WIDE)
    b_h = entering(states, at, i_h, o_h, zero, 1 if BACK else -1)
    b_g0, b_g1, last = gates_of(t, w, chunks - 1 if BACK else 0, ALONG)
    for n in range(chunks):
        i, j = 2 * n % t.STAGES, (2 * n + 1) % t.STAGES
        c = chunks - 1 - n if BACK else n
        b_u = weighted(t, w, 2 * n, b_g0, last)
        tma.store_wait(0)
        barrier()  # the state before has left `out`
        out.permute((1, 0)).store(b_h.to(out.dtype))
        fence_async_shared()
        barrier()
        async_store(h_desc, [((at.first // 128 + c) * at.H + i_h) * at.N, 0], out)
        # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X;  back  dh <- a dh + (diag(e) C)^T dY
        b_h = product(b_u, t.Bs.index(i), b_h * gl.exp2(last))
        b_v = weighted(t, w, 2 * n + 1, b_g1, last)
        more = gl.minimum(n + 1, chunks - 1)
        b_g0, b_g1, last = gates_of(t, w, chunks - 1 - more if BACK else more, ALONG)
        b_h = product(b_v, t.Bs.index(j), b_h)
        b_h = warpgroup_mma_wait(0, [b_h])
        barrier()
        mbarrier.arrive(t.empty.index(i), count=1)
        mbarrier.arrive(t.empty.index(j), count=1)
    tma.store_wait(0)
    if states.ht_ptr is not None:
        i_end = (at.i_n * at.H + i_h) * at.N * at.P
        gl.store(states.ht_ptr + i_end + o_h, b_h, mask=(o_h >= 0) & at.last)


@gluon.jit(do_not_specialize=["T", "tokens", "size"])
def ssd_states_gluon_kernel(
    B_desc, x_desc, h_desc,
    gs_ptr,  # None: back in time
    gc_ptr, h0_ptr, ends_ptr, kept_ptr, ht_ptr, T,
    tokens,  # B * T
    size,  # tokens of a piece
    G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a piece of two heads of a group, chunks of 128 tokens.  Grid (NP * H / 2).

    Arguments of state_kernel, or of state_bwd_kernel, of kernels/delta, see `descriptor`, and those
    of ssd_ends_kernel: whole chunks, without documents.
    Reference: linattn_edu.reference.fused.ssd_states.

    mbarriers, of a tile of 64 tokens in place i of STAGES::

        full   B and x, STAGES ahead -> both scans: h
        empty  both scans: they have been read -> loading warp
    """
    BACK: gl.constexpr = gs_ptr is None
    i_h, i_piece = gl.program_id(0) % (H // 2) * 2, gl.program_id(0) // (H // 2)
    NP = gl.cdiv(T, size)
    i_n, i_p = i_piece // NP, i_piece % NP
    first, n_t = i_n * T + i_p * size, gl.minimum(T - i_p * size, size)
    before = NP - 1 - i_p if BACK else i_p
    at = Place(
        first, n_t // 64, i_h // (H // G), i_h, i_n.to(gl.int64), before, i_piece.to(gl.int64),
        before == NP - 1, G, H, N, P, 128,
    )  # fmt: skip
    o = i_h.to(gl.int64) * tokens + first
    full, empty = bar_pairs(STAGES, 1, 2)
    t = Tiles(
        B_desc, x_desc, ring(B_desc, STAGES), ring(x_desc, STAGES), full, empty,
        gs_ptr if BACK else gs_ptr + o, gc_ptr + o, tokens, STAGES,
    )  # fmt: skip
    outs = ring(h_desc, 2)
    fence_async_shared()
    states = States(h0_ptr, ends_ptr, kept_ptr, ht_ptr)
    gl.warp_specialize([
        (scan_head, (0, t, at, states, h_desc, outs.index(0))),
        (scan_head, (1, t, at, states, h_desc, outs.index(1))),
        (load_tiles, (t, at)),
    ], [4, 1], [240, 24])  # fmt: skip


OPTIONS = {"num_warps": 4, "maxnreg": 168}
STAGES = 4


@attempt
def ssd_states_gluon(given: tuple[Tensor | None, ...], piece: int) -> None:
    """Launch ssd_states_gluon_kernel on B, x, h, gs, gc, h0, ends, kept and ht, of which it writes
    h and ht; or on C, dy, dh, None, gc, dht, ends, kept and dh0.  piece: its tokens.
    """
    B, x, h, *others = given
    (n, T, H, P), (G, N) = x.shape, B.shape[2:]
    ssd_states_gluon_kernel[(n * -(-T // piece) * H // 2,)](
        descriptor(B, N), descriptor(x, 2 * P), descriptor(h, P, N), *others, T, n * T, piece,
        G, H, N, P, STAGES, **OPTIONS,
    )  # fmt: skip
