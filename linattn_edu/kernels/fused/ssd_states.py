"""The states of Mamba-2 between its chunks, and their gradients, for the backward pass."""

from torch import Tensor

from linattn_edu.kernels.delta.state import state
from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.kernels.fused.ssd_fwd import by_head, ssd_ends
from linattn_edu.kernels.gluon.kernels import ssd_states as gluon
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.packing import Packing


def ssd_states(
    B: Tensor, x: Tensor, gs: Tensor, gc: Tensor, initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, chunk_size: int, packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernels that are faster; arguments and result as in the reference."""
    options = {"seq_idx": seq_idx, "chunk_size": chunk_size, "packing": packing}
    # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
    found = _in_gluon(B, x, gs, gc, initial_state, **options)
    if found:
        return found[0]
    return state(B, None, x.contiguous(), gc, initial_state, gs, **options)[0]


def ssd_states_bwd(
    C: Tensor, gc: Tensor, dy: Tensor, dht: Tensor | None = None, seq_idx: Tensor | None = None, *,
    chunk_size: int, packing: Packing | None = None, maps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same.  maps: of ssd_ends_bwd, of the pieces that are then scanned side by side."""
    options = {"seq_idx": seq_idx, "chunk_size": chunk_size, "packing": packing, "maps": maps}
    # eq:delta-ds   dh <- a dh + (diag(e) C)^T dY
    found = _in_gluon(C, dy, None, gc, dht, **options)
    return found or state_bwd(C, None, None, gc, dy, None, dht, scale=1.0, **options)[::2]


def _in_gluon(
    B: Tensor, x: Tensor, gs: Tensor | None, gc: Tensor, entering: Tensor | None, *,
    seq_idx: Tensor | None, chunk_size: int, packing: Packing | None,
    maps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Launch ssd_ends_kernel, where a sequence has several pieces, and ssd_states_gluon_kernel; or
    say that they are not for this.

    Back in time, where gs is None, B is C, x dy, and with dh comes dh0.
    """
    (n, T, H, P), N = x.shape, B.shape[3]
    kind = kind_of(B, H, P, chunk_size, packing, (B, x))
    if by_kind.ssd_states(kind, seq_idx is not None).takes != "gluon":
        return None
    piece = (by_kind.ssd_piece if maps is None else by_kind.ssd_piece_bwd)(kind).takes
    if maps is None and piece < T:
        options = {"chunk_size": chunk_size, "piece": piece, "back": gs is None}
        maps = ssd_ends(B, x, gs, gc, rows=(), **options)[:2]
    ends, kept = (None, None) if piece >= T else maps
    h, ht = B.new_empty(n, T // chunk_size, H, N, P), None
    if gs is None:
        ht = gc.new_empty(n, H, N, P)
    gates = gs if gs is None else by_head(gs), by_head(gc)
    if gluon.ssd_states_gluon((B, x, h, *gates, entering, ends, kept, ht), piece):
        return h, ht
    return None
