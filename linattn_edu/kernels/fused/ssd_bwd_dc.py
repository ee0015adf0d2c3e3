"""The backward pass of Mamba-2: by the states before chunks, of all heads of a group at once."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.fused.ssd_fwd import _widths, by_head, documents_of, tile_of
from linattn_edu.kernels.gluon.kernels import ssd_bwd_dc as gluon
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import chunk_args, row, whole
from linattn_edu.kernels.tiles import cast, dot, load_gate, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_dc_kernel(
    C_ptr,  # [B, T, G, N]
    gc_ptr,  # [H, B, T] log2
    h_ptr, dh_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    seq_ptr,  # [B, T] or None
    parts_ptr,  # [SPLITS, B, T, G, N] out: of dC
    dgc_ptr,  # [H, B, T] out: by what a token reads of the state
    dlast_ptr,  # [B, NT, H, BC / BT] out: to be summed
    cu_ptr, chunks_ptr, T,  # of tile_of
    tokens,  # B * T
    WHOLE: tl.constexpr,  # every chunk has as many tokens as it may
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BC: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what a tile of BT tokens reads of the state before its chunk, of some heads;
    and, of each of them, <h, dh> of as large a part of its rows.

    Grid (NT * G * SPLITS * BC / BT).  Reference: linattn_edu.reference.fused.ssd_bwd_dc.
    """
    start, i_g, i_split, i_h, n_heads, i_c, first, n_t = tile_of(
        tl.program_id(0), cu_ptr, chunks_ptr, T, H, G, SPLITS, BC, BT, WHOLE
    )
    own, n_own = first + start, BT if WHOLE else n_t - start
    TILES: tl.constexpr = BC // BT
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    o_r = start // BT * (BN // TILES) + tl.arange(0, BN // TILES)
    if seq_ptr is not None:
        _id, before, end = documents_of(seq_ptr, chunks_ptr, i_c, first, T, tl.arange(0, BC), n_t)
        b_id = load_gate(seq_ptr + own, o_t, 1, n_own)
    i_C = own * G + i_g
    b_C = load_tile(C_ptr + i_C * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    i_gate = i_h.to(tl.int64) * tokens + own
    n_last = tl.minimum(n_t, BC) - 1 - start  # the chunk's last token, from the tile's first
    b_gc, last = load_gate(gc_ptr + i_gate, o_t, 1, n_own), tl.load(gc_ptr + i_gate + n_last)
    for i_s in range(n_heads):
        b_dy = load_tile(dy_ptr + (own * H + i_h) * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        i_S = i_c * H + i_h
        b_h = load_tile(h_ptr + i_S * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        b_r = load_tile(h_ptr + i_S * N * P, o_r, o_p, P, N, P).to(tl.float32)
        b_ds = load_tile(dh_ptr + i_S * N * P, o_r, o_p, P, N, P).to(tl.float32)
        b_e, a = tl.exp2(b_gc), tl.exp2(last)
        if seq_ptr is not None:
            b_e, a = tl.where(b_id == before, b_e, 0.0), tl.where(end == before, a, 0.0)
        # of the next head, one head ahead
        i_next = i_gate + tl.where(i_s + 1 < n_heads, tokens, 0)
        b_gc, last = load_gate(gc_ptr + i_next, o_t, 1, n_own), tl.load(gc_ptr + i_next + n_last)
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        b_v = cast(b_dy.to(tl.float32) * b_e[:, None], b_dy.dtype)
        b_dC = dot(b_v, tl.trans(b_h), b_dC)
        # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
        b_y = dot(b_C, b_h) * b_e[:, None]
        b_dgc = tl.sum(b_dy.to(tl.float32) * b_y, 1)
        tl.store(dgc_ptr + i_gate + o_t, b_dgc, mask=o_t < n_own)
        # eq:ssd-dlast   dlast = a <h, dh>
        tl.store(dlast_ptr + i_S * TILES + start // BT, a * tl.sum(b_r * b_ds))
        i_h += 1
        i_gate = i_next
    store_tile(parts_ptr + (i_split * tokens * G + i_C) * N, b_dC, o_t, o_n, G * N, n_own, N)


DC, TOKENS = row(4, 3), 64  # h is read for each tile, but from the cache


def ssd_bwd_dc(
    C: Tensor, gc: Tensor, h: Tensor, dh: Tensor, dy: Tensor, seq_idx: Tensor | None = None, *,
    chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernel that is faster; arguments and result as in the reference."""
    n, T, H, P = dy.shape
    G, N = C.shape[2:]
    kind = kind_of(C, H, P, chunk_size, packing, (C, h, dh, dy))
    splits = by_kind.ssd_heads(kind, True).takes
    NT, *chunks = chunk_args(dy, chunk_size, packing)
    BT = min(chunk_size, TOKENS)
    parts, dgc = gc.new_empty(splits, *C.shape), gc.new_empty(H, n, T)
    dlast = gc.new_empty(*h.shape[:3], chunk_size // BT)
    given, out = (C, by_head(gc), h, dh, dy), (parts, dgc, dlast)
    in_gluon = by_kind.ssd_bwd_dc(kind, seq_idx is not None).takes == "gluon"
    if not (in_gluon and gluon.ssd_dc_gluon(given, out)):
        ssd_bwd_dc_kernel[(NT * G * splits * (chunk_size // BT),)](
            *given, seq_idx, *out, *chunks, T, n * T, whole(dy, chunk_size, packing), G, H, N, P,
            chunk_size, splits, BT, *_widths(N), **DC.launch(),
        )  # fmt: skip
    dC = parts[0] if splits == 1 else parts.sum(0)
    return dC, dgc.permute(1, 2, 0), dlast[..., 0] if chunk_size == BT else dlast.sum(-1)
