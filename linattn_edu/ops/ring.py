"""What was written to states since they were stored: a ring for each, beside its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import known, transposed, wide

LONGEST = 64  # entries in use
TILE = 1 << 13  # numbers of a state that a program of the kernels has at most, of 64 columns


class Ring(NamedTuple):
    """What a pool of states has not been told yet: the entries of a ring for each slot.

    Made by :func:`make_ring`, read and written in place by the functions ``replay_...``, emptied by
    :func:`commit_ring`. A slot that a new sequence takes is emptied by ``ring.counts[slot] = 0``.

    Args:
        keys: ``[slots, H, R, K]``, k of each entry, as it was given; of Mamba-2 its B.
        writes: ``[slots, HV, R, V]``, what k wrote: beta (v - k S); of Mamba-2 the step times x.
        decays: ``[slots, HV, R, 1 or K]``, the natural log decay before the write.
        counts: ``[slots, HV, tiles, 3]``, int32: the first entry, how many there were before the
            last call, and its tokens. The numbers of a slot are the same for all heads and tiles:
            each program of a kernel reads and writes its own.
        length: How many of the R entries are in use at most; R - length is the most tokens of a
            call.
        state_v_first: Whether the states are ``[V, K]``.
    """

    keys: Tensor
    writes: Tensor
    decays: Tensor
    counts: Tensor
    length: int
    state_v_first: bool

    @property
    def tokens(self) -> int:
        """The most tokens of a call."""
        return self.keys.shape[2] - self.length


def tiles_of(K: int, V: int) -> int:
    """How many programs share a state [K, V] by its columns."""
    return -(-V // (TILE // max(128, 1 << (K - 1).bit_length())))


def make_ring(
    state: Tensor,
    heads: int,
    *,
    length: int = 8,
    tokens: int = 8,
    channels: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    writes_dtype: torch.dtype | None = None,
    state_v_first: bool = False,
) -> Ring:
    """An empty ring for each slot of a pool of states.

    Args:
        state: The pool ``[slots, HV, K, V]``, float32, float16 or bfloat16, or float64 for the
            reference; of Mamba-2 ``[slots, H, P, N]``, with state_v_first.
        heads: H, those of q and k; of Mamba-2 the groups of B.
        length: Entries that are in use at most, 1 to 64: so many tokens are decoded between two
            writes of a state. More are a longer ring to read, fewer are more writes; of 8 and 16,
            8 is the faster on an H100.
        tokens: The most tokens of a call, 1 to length.
        channels: Whether each channel of k has a decay, as in Kimi Delta Attention.
        dtype: Of k (of Mamba-2, of B).
        writes_dtype: Of what is written; None: float32 (float64 for the reference). 16 bit are half
            of its traffic, and round each write once: outputs of unit inputs are off by 1.5e-4 in
            float16, which holds up to 65504, and 1.2e-3 in bfloat16, however many tokens. (To
            round an output to bfloat16 is 1.7e-3.)
        state_v_first: Whether the states are ``[slots, HV, V, K]``.

    Returns:
        The :class:`Ring`, on the device of state.

    Raises:
        TypeError, ValueError: An argument is none of these.

    Source: chapter 26b.
    """
    given, axes = check.Tensors(), ("V", "K") if state_v_first else ("K", "V")
    given.take("state", state, ("slots", "HV", *axes))
    check.positive({"length": LONGEST, "tokens": length}, heads=heads, length=length, tokens=tokens)
    sizes = given.sizes
    if sizes["HV"] % heads:
        raise ValueError(f"heads must divide the HV={sizes['HV']} heads of state, got {heads}")
    kinds = {"dtype": dtype, "writes_dtype": wide(state) if writes_dtype is None else writes_dtype}
    for name, kind in kinds.items():
        check.dtype(name, kind)
    new, R = state.new_zeros, length + tokens
    slots, HV, K, V = (sizes[n] for n in ("slots", "HV", "K", "V"))
    return Ring(
        new(slots, heads, R, K, dtype=dtype),
        new(slots, HV, R, V, dtype=kinds["writes_dtype"]),
        new(slots, HV, R, K if check.flag("channels", channels) else 1, dtype=wide(state)),
        new(slots, HV, tiles_of(K, V), 3, dtype=torch.int32),
        length,
        check.flag("state_v_first", state_v_first),
    )


def commit_ring(
    state: Tensor,
    ring: Ring,
    *,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Make each state what its ring says, in place, and empty the ring.

    What a checkpoint lacks to be the state after the last token that was accepted: at the end of a
    generation, for a prefix cache, or before a prompt goes on in chunks.

    Args:
        state: The pool for which :func:`make_ring` made the ring.
        ring: What was written since.
        ssm_state_indices: Slots ``[N]``, int32 or int64, which may be negative: none. None: all.
        num_accepted_tokens: How many tokens of the last call were right, as in
            :func:`replay_gated_delta_rule`; None: all.
        impl: "triton", "reference" or "auto".

    Returns:
        How many tokens each state has taken in ``[N]``, int32.

    Raises:
        TypeError, ValueError: as :func:`replay_gated_delta_rule`, before any kernel runs.

    Source: chapter 26b.
    """
    given = check.Tensors()
    check_ring(given, state, ring)
    check_slots(given, None, ssm_state_indices, num_accepted_tokens)
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    check_writes(state, ring, (ssm_state_indices, num_accepted_tokens), "commit_ring")
    if ssm_state_indices is None:
        slots = torch.arange(state.shape[0], device=state.device)
    else:
        slots = ssm_state_indices
    with inplace.writable(state), inplace.writable(ring.keys):
        (folded,) = commit_(*ring[:4], state, slots, num_accepted_tokens, ring.state_v_first, impl)
    written(state, ring, impl)
    return folded


def check_ring(
    given: check.Tensors,
    state: Tensor,
    ring: object,
    axes: tuple[str, str, str, str] = ("H", "HV", "K", "V"),
) -> None:
    """Refuse a pool of states and a ring that do not belong together; given.sizes has slots, R, the
    gates of a head and `axes` then.
    """
    if not isinstance(ring, Ring):
        raise TypeError(f"ring must come from make_ring, got {type(ring).__name__}")
    H, HV, K, V = axes
    given.take("state", state, ("slots", HV, *((V, K) if ring.state_v_first else (K, V))))
    given.take("ring.keys", ring.keys, ("slots", H, "R", K))
    given.take("ring.writes", ring.writes, ("slots", HV, "R", V))
    given.take("ring.decays", ring.decays, ("slots", HV, "R", "gates"))
    given.integers("ring.counts", ring.counts)
    sizes = given.sizes
    shape = (sizes["slots"], sizes[HV], tiles_of(sizes[K], sizes[V]), 3)
    if tuple(ring.counts.shape) != shape or ring.counts.dtype != torch.int32:
        raise ValueError(
            f"ring.counts must be int32 of shape {shape}, got {ring.counts.dtype} "
            f"{tuple(ring.counts.shape)}"
        )
    if sizes["gates"] not in (1, sizes[K]):
        raise ValueError(f"ring.decays must have 1 or {K}={sizes[K]} gates, got {sizes['gates']}")
    for name, x in zip(ring._fields[:4], ring[:4], strict=True):
        if not x.is_contiguous():
            raise ValueError(f"ring.{name} must be contiguous")
    if not inplace.dense(state):
        raise ValueError(
            "state must be contiguous in every slot, and slots must not overlap, "
            f"got strides {state.stride()} for {tuple(state.shape)}"
        )


def check_tokens(sizes: dict[str, int], ring: Ring, name: str) -> None:
    """Refuse more tokens than the ring is made for; name: whose they are."""
    if not 1 <= sizes["T"] <= ring.tokens:
        raise ValueError(
            f"{name} must have 1 to {ring.tokens} tokens, as many as ring is made for, "
            f"got T={sizes['T']}"
        )


def check_slots(
    given: check.Tensors,
    N: int | None,
    indices: Tensor | None,
    accepted: Tensor | None,
    named: str = "ssm_state_indices",
) -> None:
    """Refuse slots of N sequences, and numbers of accepted tokens, of a shape that does not fit.

    N: None where it is that of the slots.  named: the argument that has them.
    """
    slots = given.sizes["slots"]
    for name, x in ((named, indices), ("num_accepted_tokens", accepted)):
        if x is not None:
            given.integers(name, x)
            N = x.shape[0] if N is None and x.ndim else N
            if x.shape != (N,) or not N:
                wanted = "N" if N is None else f"N={N}"
                raise ValueError(f"{name} must have shape [{wanted}], got {tuple(x.shape)}")
    if indices is None and N not in (None, slots):
        raise ValueError(f"state must have N={N} slots without {named}, got {slots}")


def check_writes(state: Tensor, ring: Ring, others: tuple[Tensor | None, ...], writer: str) -> None:
    """Refuse to write where a gradient or a transform would not notice, or over an argument."""
    beside = {f"ring.{n}": x for n, x in zip(ring._fields, ring[:4], strict=False)}
    inplace.check("state", state, others, writer, beside=beside)


def check_numbers(
    indices: Tensor | None,
    accepted: Tensor | None,
    slots: int,
    tokens: int,
    named: str = "ssm_state_indices",
) -> None:
    """Refuse slots and numbers of accepted tokens that cannot be, where they can be read."""
    if known(indices):
        inplace.check_slots(named, "state", [[i] for i in indices.tolist()], slots)
    if known(accepted):
        for n, count in enumerate(accepted.tolist()):
            if not 0 <= count <= tokens:
                raise ValueError(
                    f"num_accepted_tokens must be 0 to {tokens}, got {count} for sequence {n}"
                )


def written(state: Tensor, ring: Ring, impl: str) -> None:
    """Tell autograd what a kernel has written."""
    if impl == "triton":
        for x in (state, *ring[:4]):
            inplace.written(x)


@dataclass(frozen=True)
class Stages:
    """The ring is folded into the state."""

    commit: Callable = stage("delta.replay")


# of a ring and of its states, as all operators have them
AXES = {
    "keys": "slots H R K",
    "writes": "slots HV R V",
    "decays": "slots HV R gates",
    "counts": "slots HV tiles numbers",
    "state": "slots HV X Y",
}
WRITTEN = "keys writes decays counts state"

commit_ = Operator(
    "commit_ring",
    AXES | {"indices": "N", "accepted": "N?"},
    {"folded": like("N", "counts")},
    options={"v_first": "bool"},
    stages=implementations(Stages),
    mutates=WRITTEN,
)


@commit_.forward
def forward(
    stages: Stages,
    keys: Tensor,
    writes: Tensor,
    decays: Tensor,
    counts: Tensor,
    state: Tensor,
    indices: Tensor,
    accepted: Tensor | None,
    v_first: bool,
    impl: str,
) -> Tensor:
    """How many entries each state has taken in."""
    check_numbers(indices, accepted, state.shape[0], keys.shape[2])
    state, more = laid(state, v_first, impl)
    return stages.commit(state, keys, writes, decays, counts, indices, accepted, **more)


def laid(state: Tensor, v_first: bool, impl: str) -> tuple[Tensor, dict[str, bool]]:
    """The states as the stages of an implementation take them, and how the kernels are told."""
    if impl == "reference":
        return transposed(state, v_first), {}
    return state, {"v_first": v_first}
