"""The map of a piece of a sequence for a short convolution: its state is the last W tokens."""

import torch
from torch import Tensor


def shifted(state: Tensor, by: Tensor) -> Tensor:
    """state [N, D, W], whose tokens moved by[n] places towards the past, or back in time if < 0.

    Places that no token moved to are zero.
    """
    W = state.shape[-1]
    place = torch.arange(W, device=state.device) + by[:, None]
    inside = ((place >= 0) & (place < W))[:, None].expand_as(state)
    moved = state.gather(-1, place.clamp(0, W - 1)[:, None].expand_as(state))
    return moved.where(inside, 0)


def last_tokens(
    x: Tensor, state: Tensor | None, begin: Tensor, end: Tensor, W: int
) -> tuple[Tensor, Tensor]:
    """S_ext [N, D, W], the last W tokens of the pieces x[0, begin:end], with the known states
    before them, and M [N, D]: by how many places a piece moves the state that enters it.
    """
    at = end[:, None] - W + torch.arange(W, device=x.device)
    own = (at >= begin[:, None])[..., None]
    S_ext = x[0, at.clamp(min=0)].where(own, 0).mT
    if state is not None:
        S_ext = S_ext + shifted(state, end - begin)
    return S_ext, (end - begin).clamp(max=W)[:, None].expand(S_ext.shape[:2])


def first_tokens(x: Tensor, begin: Tensor, end: Tensor, n: int) -> Tensor:
    """[N, n, D]: the first n tokens of the pieces x[0, begin:end]; missing ones are zero."""
    at = begin[:, None] + torch.arange(n, device=x.device)
    return x[0, at.clamp(max=x.shape[1] - 1)].where((at < end[:, None])[..., None], 0)


def merge(S_ext: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """As cp_merge: S <- S moved by M places + S_ext.  S_ext: [B, NP, D, 1, W].  M: [B, NP, D]."""
    return _chain(S_ext, M, 1)


def merge_bwd(dS_ext: Tensor, dM: Tensor) -> tuple[Tensor, Tensor]:
    """As cp_merge_bwd: dS <- dS moved back by M places + dS_ext."""
    return _chain(dS_ext, dM, -1)


def _chain(S_ext: Tensor, M: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """In the order of the pieces, or with -1 against it."""
    S, states = torch.zeros_like(S_ext[:, 0, :, 0]), []
    for p in range(S_ext.shape[1])[::step]:
        states.append(S)
        # eq:cp-halo   S <- shift(S) + S_ext
        S = shifted(S, step * M[:, p, 0].long()) + S_ext[:, p, :, 0]
    return torch.stack(states[::step], 1)[..., None, :], S[..., None, :]
