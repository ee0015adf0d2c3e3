"""Stage state_passing: carry the state from chunk to chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import sequence_args
from linattn_edu.kernels.tiles import cdiv, load_vector, sequence_of
from linattn_edu.packing import Packing


@triton.jit
def decay_of_chunk(gc_ptr, seq_ptr, i_t, first, n_t, H: tl.constexpr, BT: tl.constexpr):
    """a of chunk i_t of a sequence, which starts at token `first` and has n_t tokens left.

    gc_ptr: at the chunk's first token and the head.  seq_ptr: [B, T] or None.
    """
    n = tl.minimum(BT, n_t)
    # a = 2^gc_last, as in `decays`
    a = tl.exp2(tl.load(gc_ptr + (n - 1) * H))
    if seq_ptr is not None:
        seq_ptr += first
        before = tl.load(seq_ptr - tl.minimum(i_t, 1))
        a = tl.where(tl.load(seq_ptr + n - 1) == before, a, 0.0)
    return a


@triton.jit(do_not_specialize=["T"])
def state_passing_kernel(
    s_ptr,  # [B, NT, H, D], D = N * P
    gc_ptr,  # [B, T, H] log2
    h0_ptr,  # [N, H, D] or None
    seq_ptr,  # [B, T] or None
    h_ptr,  # [B, NT, H, D] out
    ht_ptr,  # [N, H, D] out, or None
    cu_ptr, offsets_ptr, T,  # of sequence_of
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program: BD numbers of one head's state, through all chunks.  Grid (N * H, D / BD).

    Reference: linattn_edu.reference.ssd.state_passing.
    """
    i_nh = tl.program_id(0).to(tl.int64)
    i_h = i_nh % H
    first, n_seq, i_c = sequence_of(i_nh // H, cu_ptr, offsets_ptr, T, BT)
    o = tl.program_id(1) * BD + tl.arange(0, BD)
    b_S = tl.zeros([BD], tl.float32)
    if h0_ptr is not None:
        b_S += load_vector(h0_ptr + i_nh * D, o, D)
    for i_t in range(tl.cdiv(n_seq, BT)):
        i = (i_c + i_t) * H + i_h
        tl.store(h_ptr + i * D + o, b_S, mask=o < D)
        start = first + i_t * BT
        gc = gc_ptr + start * H + i_h
        a = decay_of_chunk(gc, seq_ptr, i_t, start, n_seq - i_t * BT, H, BT)
        # eq:ssd-state-passing   h <- a h + s
        b_S = a * b_S + load_vector(s_ptr + i * D, o, D)
    if ht_ptr is not None:
        tl.store(ht_ptr + i_nh * D + o, b_S, mask=o < D)


BD = 512  # numbers a program: 16 bytes a thread of 4 warps, and many programs for few heads


def state_passing(
    s: Tensor, gc: Tensor, initial_state: Tensor | None = None, seq_idx: Tensor | None = None, *,
    chunk_size: int, output_final_state: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch state_passing_kernel; arguments and result as in the reference."""
    H, N, P = s.shape[2:]
    sequences, *bounds = sequence_args(gc, packing)
    h = torch.empty_like(s)
    final_state = s.new_empty(sequences, H, N, P) if output_final_state else None
    state_passing_kernel[(sequences * H, cdiv(N * P, BD))](
        s, gc, initial_state, seq_idx, h, final_state, *bounds, gc.shape[1], H, N * P,
        BT=chunk_size, BD=BD, num_warps=4,
    )  # fmt: skip
    return h, final_state
