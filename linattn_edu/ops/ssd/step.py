"""Mamba-2 token by token: decoding, with the state written in place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import contiguous_rows, known

LARGEST = 256  # N: a program of the kernel holds rows of a state whole
SHAPES = {
    "x": ("B", "H", "P"),
    "dt": ("B", "H", "P"),
    "A": ("H", "P", "N"),
    "B": ("B", "G", "N"),
    "C": ("B", "G", "N"),
    "D": ("H", "P"),
    "z": ("B", "H", "P"),
    "dt_bias": ("H", "P"),
}
OPTIONAL = ("D", "z", "dt_bias")


@repeated("state")
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Mamba-2, one token or a few: decoding. The new state is written over the old one.

    For each sequence and head, with its state S of P rows and N columns:

    .. math::

        \Delta &= \mathrm{softplus}(dt + dt\_bias) \\
        S &\leftarrow e^{\Delta A} \odot S + (\Delta\, x)^\top B \\
        out &= (C S^\top + D\, x)\, \mathrm{silu}(z)

    A, dt, D and dt_bias may have a number for each row (A: each number) of a state. As a rule they
    have one a head, expanded: what is expanded (stride 0) is never copied, and one exponential
    serves a head. All arithmetic is in float32.

    Args:
        state: ``[B, H, P, N]``, float32, float16 or bfloat16 (float64: reference only), N at most
            256; overwritten. Each of its B states must be contiguous, and they must not overlap,
            nor share memory with another argument. out is read before it is rounded to its dtype.
        x: ``[B, H, P]``, of these dtypes too, as all that follow; each may have its own.
        dt: Raw step size ``[B, H, P]``.
        A: Rate of the log decay, ``[H, P, N]``, <= 0.
        B, C: What is written with, and read with, ``[B, G, N]``, H a multiple of G: head h has that
            of group h // (H // G). Or ``[B, N]``: one group.
        D: Weight of x in out ``[H, P]``, or None: 0.
        z: Gate of out ``[B, H, P]``, or None: out is not gated.
        dt_bias: Added to dt ``[H, P]``, or None: 0.
        dt_softplus: Whether the step size is the softplus of dt + dt_bias, or that itself.
        state_batch_indices: Slot of each sequence ``[B]``, int32 or int64, in a pool of states:
            state is then ``[slots, H, P, N]``. Slots that are not named keep their bits. A negative
            slot is none: nothing is read or written there, and its row of out is zero. No slot may
            be named by two sequences. On the CPU slots are checked, when a compiled graph runs too.
            On a GPU they are not read; there a slot past the pool's end counts as negative, and one
            named twice is left with either state.

            Or ``[B, S]``, for tokens that may be rejected later: the state after token t of
            sequence n goes to slot ``[n, t]``. With more tokens than columns the last slot is left
            with the last state. A sequence that would start from no slot is padding.
        num_accepted_tokens: How many tokens of the previous call were kept ``[B]``, int32 or int64,
            1 to S, with state_batch_indices ``[B, S]``: sequence n starts from the state in slot
            ``[n, num_accepted_tokens[n] - 1]``. None: from slot ``[n, 0]``. On a GPU a count that
            is none of these is a slot that is not there.
        cu_seqlens: Boundaries ``[B + 1]``, int32 or int64, of B sequences of several tokens: x, dt,
            B, C and z then have a row for each token, those of a sequence one after the other. out
            is zero at tokens behind the last of them. Each token has the bits that it has in a call
            of its own. On a GPU the numbers are not looked at.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

        The axis H may be left out where it is 1, in all of them or in some.

    A step has no gradient, as in mamba_ssm. Where one is recorded, as in decoding without
    torch.no_grad(), it runs, and a backward pass that comes to its output or to the new state is an
    error; under torch.compile neither asks for one. For training there is
    :func:`mamba_chunk_scan_combined`.

    Returns:
        out, in shape and dtype as x.

    Raises:
        TypeError: An argument is no tensor of such a dtype, or dt_softplus is no flag.
        ValueError: Shapes, devices, strides, slots or counts do not fit; state is a leaf that needs
            a gradient; a transform of torch.func or forward-mode differentiation is at work; impl
            cannot run. Before any kernel runs.

    Source: Dao and Gu 2024 (arXiv:2405.21060); mamba_ssm 2.3.2, whose arguments these are, and
    vLLM's num_accepted_tokens and cu_seqlens; chapter 13.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    whole, tensors, sequences = _checked(
        state, given, state_batch_indices, num_accepted_tokens, cu_seqlens
    )
    indices = state_batch_indices
    softplus = check.flag("dt_softplus", dt_softplus)
    impl = check.resolve_impl(
        impl, x.device, tuple(y.dtype for y in (whole, *tensors.values()) if y is not None)
    )
    others = tuple(given.values())
    inplace.check("state", state, others, "selective_state_update", without_gradient=True)
    for name, first in (("dt", 2), ("A", 1), ("D", 1), ("dt_bias", 1)):
        tensors[name] = _once(tensors[name], first)
    rows = tuple(tensors.values())
    if cu_seqlens is None and (indices is None or indices.ndim == 1):
        step = lambda state: update(*rows, state, indices, softplus, impl)[0]
    else:
        if cu_seqlens is None:
            cu_seqlens = torch.arange(sequences + 1, device=x.device)
        if indices is None:
            indices = torch.arange(sequences, device=x.device)
        where = indices.reshape(sequences, -1), num_accepted_tokens, cu_seqlens
        step = lambda state: drafts(*rows, state, *where, softplus, impl)[0]
    out = inplace.stepped(step, whole, impl)
    return out[:, 0] if x.ndim == 2 else out


def _checked(
    state: Tensor,
    given: dict[str, Tensor | None],
    indices: Tensor | None,
    accepted: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """Refuse tensors that do not fit; return the state and the others with their axis of heads or
    groups, and how many sequences there are.
    """
    checked = check.Tensors()
    sizes, first = checked.sizes, "B" if indices is None and cu_seqlens is None else "slots"
    whole = _with_heads("state", state, (first, "H", "P", "N"), checked)
    tensors = {
        n: None if x is None and n in OPTIONAL else _with_heads(n, x, SHAPES[n], checked)
        for n, x in given.items()
    }
    for axis, size in sizes.items():
        if size < 1:
            owner = "B" if axis == "G" else "x" if axis == "B" else "state"
            raise ValueError(f"{owner} must have {axis} >= 1, got {axis}={size}")
    check.group_count(sizes)
    if sizes["N"] > LARGEST:
        raise ValueError(f"state must have N <= {LARGEST}, got N={sizes['N']}")
    sequences = sizes["B"]
    if cu_seqlens is not None:
        sequences = checked.boundaries("cu_seqlens", cu_seqlens)
        if known(cu_seqlens):
            check.lengths("cu_seqlens", cu_seqlens.tolist(), sizes["B"])
    for name, x in (("state_batch_indices", indices), ("num_accepted_tokens", accepted)):
        if x is not None:
            checked.integers(name, x)
    inplace.check_rows("state_batch_indices", "B", sequences, indices, accepted)
    if cu_seqlens is not None and indices is None and sizes["slots"] != sequences:
        raise ValueError(
            f"state must have B={sequences} states with cu_seqlens, got {sizes['slots']}"
        )
    if not inplace.dense(whole):
        raise ValueError(
            "state must be contiguous in every sequence or slot, and they must not overlap, "
            f"got strides {state.stride()} for {tuple(state.shape)}"
        )
    return whole, tensors, sequences


def _with_heads(name: str, x: object, shape: tuple[str, ...], checked: check.Tensors) -> Tensor:
    """x, checked, with an axis of one head or group if it is left out."""
    axis = next(i for i, a in enumerate(shape) if a in ("H", "G"))
    short = isinstance(x, Tensor) and x.ndim == len(shape) - 1
    if not (short and checked.sizes.get(shape[axis], 1) == 1):
        checked.take(name, x, shape)
        return x
    checked.sizes[shape[axis]] = 1
    checked.take(name, x, shape[:axis] + shape[axis + 1 :])
    return x.unsqueeze(axis)


def _once(x: Tensor | None, first: int) -> Tensor | None:
    """x, with one number along each axis from `first` on where an expansion repeats it."""
    if x is None:
        return None
    for d in range(first, x.ndim):
        if x.stride(d) == 0:
            x = x.narrow(d, 0, 1)
    return x


@dataclass(frozen=True)
class Stages:
    """The recurrence of one token, or of several, in place."""

    selective_state_update: Callable = stage("ssd.selective_state_update")


stages = implementations(Stages)

# H: the groups of B and C, HV: the heads, S: N.  P_.., N_..: P and N, or 1, one number for all
AXES = {
    "x": "B HV P",
    "dt": "B HV P_DT",
    "A": "HV P_A N_A",
    "B": "B H S",
    "C": "B H S",
    "D": "HV P_D?",
    "z": "B HV P?",
    "dt_bias": "HV P_BIAS?",
    "state": "slots HV P S",
}
update = Operator(
    "selective_state_update",
    AXES | {"indices": "B?"},
    {"out": like("B HV P", "x")},
    options={"softplus": "bool"},
    stages=stages,
    mutates="state",
    apart=dict.fromkeys(("x", "dt", "B", "C", "z"), 2),
)


@update.forward
def forward(
    stages: Stages,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: Tensor | None,
    softplus: bool,
) -> Tensor:
    """out; the new states go where the old ones are."""
    if known(indices):
        rows = [[slot] for slot in indices.tolist()]
        inplace.check_slots("state_batch_indices", "state", rows, state.shape[0])
    aligned = state if indices is not None else contiguous_rows(state, 3)
    out = stages.selective_state_update(
        aligned, x, dt, A, B, C, D, z, dt_bias, indices, softplus=softplus
    )
    if aligned is not state:
        state.copy_(aligned)
    return out


drafts = Operator(
    "selective_state_update_drafts",
    {name: axes.replace("B ", "ROWS ") for name, axes in AXES.items()}
    | {"indices": "SEQUENCES COLUMNS", "accepted": "SEQUENCES?", "cu_seqlens": "BOUNDS"},
    {"out": like("ROWS HV P", "x")},
    options={"softplus": "bool"},
    stages=stages,
    mutates="state",
    apart=dict.fromkeys(("x", "dt", "B", "C", "z"), 2),
)


@drafts.forward
def forward_drafts(
    stages: Stages,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: Tensor,
    accepted: Tensor | None,
    cu_seqlens: Tensor,
    softplus: bool,
) -> Tensor:
    """out; the new states go to their slots."""
    if known(indices):
        rows = indices.tolist()
        inplace.check_slots("state_batch_indices", "state", rows, state.shape[0])
        if accepted is not None:
            inplace.check_accepted("num_accepted_tokens", rows, accepted.tolist())
    return stages.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, indices, accepted, cu_seqlens, softplus=softplus
    )
