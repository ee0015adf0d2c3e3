"""The forward pass in two fused stages, all that needs no state, then all that does; and in one."""

from collections.abc import Callable

import torch
from torch import Tensor

from linattn_edu.reference.fused.cancel import cancels
from linattn_edu.reference.fused.gdn_intra import intra_chunk
from linattn_edu.reference.tiles import (
    chosen,
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gc: Tensor,
    P: Tensor,
    R: Tensor,
    initial_state: Tensor | None = None,
    beta: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    ways: Tensor | None = None,
    made: tuple[Tensor, Tensor | None] | None = None,
    *,
    scale: float,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Carry the state through the chunks and read the output on the way.

        v_new = R (V - diag(2^gc) K S)
        o     = scale (diag(2^gc) Q S + P v_new)
        S    <- 2^(gc_last) S + (diag(2^(gc_last - gc)) K)^T v_new

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. gc: [B, T, HV] (log2). P, R: from intra_chunk.
        initial_state: [B, HV, K, V], zero if None.
        beta, low: with P and A * G of intra_halves, the second in the place of R: beta [B, T, HV],
            which is not in it, and the low halves of the two.
        ways, made: [B, HV], -1 for heads whose results may be anything; or, with made, are those,
            o and the state.
    Returns:
        o [B, T, HV, V] in q.dtype; the final state [B, HV, K, V] in fp32 (fp64 for fp64 input)
        or None.
    Source: chapter 06.
    """
    dtype = compute_dtype(q, k, v, gc, initial_state)
    T, HV = gc.shape[1:]
    C = P.shape[-1]
    if low is not None:
        P, R = (x.to(dtype) + y.to(dtype) for x, y in zip((P, R), low, strict=True))
        R = from_chunks(to_chunks(R, C) * to_chunks(beta[..., None], C).mT, T)
    Q, K, V, gc, P, R = (
        to_chunks(x.to(dtype), C)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, pad_gate(gc, C), P, R)
    )
    B, _, NT, _, DK = K.shape
    S = K.new_zeros(B, HV, DK, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    o = []
    for c in range(NT):
        decay = torch.exp2(gc[:, :, c])[..., None]
        # eq:delta-residual   W = V - diag(2^gc) K S
        W = V[:, :, c] - decay * (K[:, :, c] @ S)
        # eq:delta-v-new   v_new = R W
        v_new = R[:, :, c] @ W
        # eq:delta-inter   diag(2^gc) Q S
        inter = decay * (Q[:, :, c] @ S)
        # eq:delta-output   o = scale (inter + P v_new)
        o.append(scale * (inter + P[:, :, c] @ v_new))
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        last = gc[:, :, c, -1:]
        decayed = torch.exp2(last - gc[:, :, c])[..., None] * v_new
        S = torch.exp2(last)[..., None] * S + K[:, :, c].mT @ decayed
    o, S = from_chunks(torch.stack(o, 2), T).to(q.dtype), S if output_final_state else None
    if made is not None:
        o, S = chosen(ways, o, made[0]), chosen(ways, S, made[1], 1)
    return o, S


def scan_map(
    k: Tensor,
    v: Tensor,
    gc: Tensor,
    R: Tensor,
    initial_state: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece makes of the state that enters it, as piece_map, from the arguments of scan.

        S_out = M S_in + S_ext

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. gc: [B, T, HV] (log2). R: from intra_chunk.
        initial_state: [B, HV, K, V]: the state itself where it is known; S_ext starts from it.
        beta: [B, T, HV], where R is A * G, without it.
        transition: Whether to compute M.
    Returns:
        S_ext [B, HV, K, V], and M [B, HV, K, K] or None, in fp32 (fp64 for fp64 input).
    Source: chapter 21.
    """
    options = {"scale": 1.0, "output_final_state": True}
    if beta is not None:
        T, C = gc.shape[1], R.shape[-1]
        R = from_chunks(to_chunks(R, C) * to_chunks(beta[..., None], C).mT, T)
    nothing = torch.zeros_like(R)
    # eq:cp-ext   S_ext: the state after the piece, from zero
    _, S_ext = scan(k, k, v, gc, nothing, R, initial_state, **options)
    if not transition:
        return S_ext, None
    B, T, HV = gc.shape
    K = k.shape[-1]
    eye = torch.eye(K, dtype=S_ext.dtype, device=k.device).expand(B, HV, K, K)
    # eq:cp-transition   M: the same with v = 0, from I
    _, M = scan(k, k, v.new_zeros(B, T, HV, K), gc, nothing, R, eye, **options)
    return S_ext, M


def chunk_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    enter: Callable | None = None,
    *,
    scale: float,
    chunk_size: int,
    output_final_state: bool = False,
    keep: bool = False,
    cancelling: bool = False,
) -> tuple[Tensor | None, ...]:
    """intra_chunk and then scan. What the first makes of a chunk only the second reads, and the
    backward pass: so one kernel may hand it over on the chip.

    Args:
        Those of intra_chunk and scan.
        enter: Over ranks, what gives the state that enters, of a function that makes the map of the
            piece and what that one reads.
        keep: Whether P and A * G are returned, from which the backward pass starts.
        cancelling: Whether to find the heads that cancel, too.
    Returns:
        o, the final state or None, P and A * G [B, T, HV, C], or None both; and what `cancels`
        returns, or None. Of heads that cancel o and the state may be anything.
    Source: chapters 11b and 24.
    """
    P, R, AG = intra_chunk(q, k, beta, gc, chunk_size=chunk_size, return_inverse=True, gated=True)
    found = cancels(P, AG, beta, q.shape[2]) if cancelling else None
    if enter is not None:
        initial_state = enter(scan_map, (k, v, gc, R))
    o, final_state = scan(
        q, k, v, gc, P, R, initial_state, scale=scale, output_final_state=output_final_state
    )
    return o, final_state, *((P, AG) if keep else (None, None)), found
