"""What is asked of a prompt in pieces: states at every n tokens, and the whole's bits."""

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.cp.place import Place
from linattn_edu.ops import check
from linattn_edu.ops.tensors import known


def check_every(
    every: int | None, chunk_size: int, cp_context: CPContext | None, most: int | None
) -> None:
    """Refuse a number of tokens that is no number of chunks."""
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"checkpoint_every_n_tokens must be an integer or None, got {every!r}")
    if every < 1 or every % chunk_size:
        raise ValueError(
            f"checkpoint_every_n_tokens must be a multiple of the chunk's {chunk_size} tokens, "
            f"got {every}"
        )
    for name, y in (("cp_context", cp_context), ("max_num_seqs", most)):
        if y is not None:
            raise ValueError(f"checkpoint_every_n_tokens is not supported with {name}")


def check_invariant(
    asked: bool, x: Tensor, heads: int, V: int, place: Place, every: int | None, impl: str
) -> None:
    """Refuse what has other bits in pieces, or in another batch: batch_invariant of the public
    functions.  x: [B, T, ...], with states of V columns; 0: of Mamba-2.
    """
    if not check.flag("batch_invariant", asked):
        return
    if impl == "reference":
        raise ValueError(
            "batch_invariant=True needs the kernels, got impl='reference', whose products on a CPU "
            "are rounded by the size of the batch"
        )
    if place.group:
        raise ValueError("batch_invariant=True is not supported with cp_context")
    from linattn_edu.kernels.routes import by_kind, kind_of

    bounds, longest = place.bounds[1], x.shape[1]
    if known(bounds):
        longest = max(bounds.diff().tolist())
    kind = kind_of(x, heads, V, 64, None)._replace(T=min(longest, every or longest))
    if V:
        cut = by_kind.pieces_by_maps(kind).takes or by_kind.pieces_by_warm_up(kind).takes
    else:
        cut = impl == "fused" and by_kind.ssd_piece(kind).takes < kind.T
    if cut:
        raise ValueError(
            f"batch_invariant=True needs sequences that no kernel cuts, got T={kind.T}: give "
            "checkpoint_every_n_tokens, or the prompt in pieces of whole chunks"
        )
