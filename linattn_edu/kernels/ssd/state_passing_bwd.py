"""Stage state_passing_bwd: carry the gradient of the state back from chunk to chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import sequence_args
from linattn_edu.kernels.ssd.state_passing import BD, decay_of_chunk
from linattn_edu.kernels.tiles import cdiv, load_vector, sequence_of
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def state_passing_bwd_kernel(
    dh_ptr,  # [B, NT, H, D], D = N * P: dh_out
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, D]
    dht_ptr,  # [N, H, D] or None
    seq_ptr,  # [B, T] or None
    ds_ptr,  # [B, NT, H, D] out
    part_ptr,  # [B, NT, H, D / BD] out: the part of dlast that a program's numbers make
    dh0_ptr,  # [N, H, D] out
    cu_ptr, offsets_ptr, T,  # of sequence_of
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program: BD numbers of one head's dS, back through all chunks.  Grid (N * H, D / BD).

    Reference: linattn_edu.reference.ssd.state_passing_bwd.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_nh, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_h = i_nh % H
    first, n_seq, i_c = sequence_of(i_nh // H, cu_ptr, offsets_ptr, T, BT)
    o = i_d * BD + tl.arange(0, BD)
    b_dS = tl.zeros([BD], tl.float32)
    if dht_ptr is not None:
        b_dS += load_vector(dht_ptr + i_nh * D, o, D)
    NT = tl.cdiv(n_seq, BT)
    for j in range(NT):
        i_t = NT - 1 - j
        i = (i_c + i_t) * H + i_h
        # eq:ssd-ds   ds_c = dh_(c+1)
        tl.store(ds_ptr + i * D + o, b_dS, mask=o < D)
        start = first + i_t * BT
        gc = gc_ptr + start * H + i_h
        a = decay_of_chunk(gc, seq_ptr, i_t, start, n_seq - i_t * BT, H, BT)
        # eq:ssd-dlast   dlast_c = a_c <h_c, dh_(c+1)>
        b_h = load_vector(h_ptr + i * D, o, D)
        tl.store(part_ptr + i * ND + i_d, a * tl.sum(b_h * b_dS))
        # eq:ssd-dh   dh_c = dh_out_c + a_c dh_(c+1)
        b_dS = load_vector(dh_ptr + i * D, o, D) + a * b_dS
    tl.store(dh0_ptr + i_nh * D + o, b_dS, mask=o < D)


def state_passing_bwd(
    dh_out: Tensor, gc: Tensor, h: Tensor, dht: Tensor | None = None, seq_idx: Tensor | None = None,
    *, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch state_passing_bwd_kernel, then add its parts of dlast; as in the reference."""
    H, N, P = dh_out.shape[2:]
    sequences, *bounds = sequence_args(gc, packing)
    ds, dh0 = torch.empty_like(dh_out), dh_out.new_empty(sequences, H, N, P)
    parts = dh_out.new_empty(*dh_out.shape[:3], cdiv(N * P, BD))
    state_passing_bwd_kernel[(sequences * H, parts.shape[-1])](
        dh_out, gc, h, dht, seq_idx, ds, parts, dh0, *bounds, gc.shape[1], H, N * P,
        BT=chunk_size, BD=BD, num_warps=4,
    )  # fmt: skip
    # a sum in the order of the programs' numbers, whichever of them came first
    return ds, parts.sum(-1), dh0
