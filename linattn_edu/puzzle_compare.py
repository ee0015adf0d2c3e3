"""What is wrong with what a puzzle's function returned, in words."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

import torch
from torch import Tensor

from linattn_edu.puzzle_stages import Puzzle

WITHIN = {"row", "column", "channel", "token-of-chunk", "place"}  # axes inside of a unit of work
# largest error of an entry, relative to the largest entry of the output
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SHOWN = 32  # numbers of an output that is shown whole
POWERS = {"g": torch.exp, "g_hard": torch.exp, "A_log": torch.exp, "gc": torch.exp2}  # of a log


class Wrong(Exception):
    """What is wrong with a reader's stage, in lines for the reader."""


def compare(
    puzzle: Puzzle, truth: Callable, inputs: dict[str, object], got: object, dtype: torch.dtype
) -> None:
    """Raise Wrong with the first wrong entry of each output that is not what the reference has.

    truth: the reference, from the inputs by name to a tuple of outputs.
    """
    expected = truth(inputs)
    got = got if isinstance(got, tuple | list) else (got,)
    if len(got) != len(expected):
        names = ", ".join(puzzle.outputs)
        raise Wrong(f"must return {len(expected)} tensors ({names}), returned {len(got)}")
    outputs = list(zip(puzzle.outputs.items(), got, expected, strict=True))
    for (name, axes), x, ref in outputs:
        if not isinstance(x, Tensor):
            raise Wrong(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != ref.shape:
            raise Wrong(f"{name} must have shape {list(ref.shape)} ({axes}), got {list(x.shape)}")
        if x.dtype != dtype:
            raise Wrong(f"{name} must be {dtype}, got {x.dtype}")
    x_ref = [(x.detach().double().cpu(), ref) for _, x, ref in outputs]
    tol = TOLERANCE[dtype]
    if not any(differs(x, ref, tol).any() for x, ref in x_ref):
        return
    slips = list(left_out(truth, inputs))
    lines = [
        first_wrong(name, axes, x, ref, tol, ((said, every[i]) for said, every in slips))
        for i, ((name, axes), (x, ref)) in enumerate(
            zip(puzzle.outputs.items(), x_ref, strict=True)
        )
    ]
    raise Wrong("\n".join(filter(None, lines)))


def first_wrong(
    name: str,
    axes: str,
    x: Tensor,
    ref: Tensor,
    tol: float,
    slips: Iterable[tuple[str, Tensor]] = (),
) -> str | None:
    """The first entry of x that is further from ref's than tol times ref's largest, if any is.

    slips: what may be said, and the output of which it is true, in the order of asking.
    """
    bad = differs(x, ref, tol)
    if not bad.any():
        return None
    first = tuple(bad.nonzero()[0].tolist())
    at = ", ".join(f"{axis} {i}" for axis, i in zip(axes.split(), first, strict=True))
    value = x[first].item()
    note = ", NaN: not written, read past an end, or from an infinity"
    note = note if math.isnan(value) else ""
    slip = next((f"; {said}" for said, y in slips if same(x, y, tol)), "")
    return (
        f"{name}[{at}]: expected {ref[first].item():.6g}, got {value:.6g}{note} "
        f"(the first of {int(bad.sum())} wrong of {bad.numel()}{only_in(bad, axes)})"
        f"{slip or likeness(x, ref, axes, tol)}{in_full(x, ref)}"
    )


def in_full(x: Tensor, ref: Tensor) -> str:
    """All that was expected, and all that came, of an output of few numbers."""
    if not 1 < ref.numel() <= SHOWN:
        return ""
    both = [[[f"{v:.4g}" for v in row] for row in y.reshape(-1, y.shape[-1])] for y in (ref, x)]
    width = max(len(v) for rows in both for row in rows for v in row)
    return "".join(
        f"\n  {'' if i else word:<9}" + " ".join(f"{v:>{width}}" for v in row)
        for word, rows in zip(("expected", "got"), both, strict=True)
        for i, row in enumerate(rows)
    )


def differs(x: Tensor, ref: Tensor, tol: float) -> Tensor:
    """Which entries of x are further from ref's than tol times ref's largest; NaN is."""
    return ~((x - ref).abs() <= tol * ref.abs().max())


def same(x: Tensor, y: Tensor, tol: float) -> bool:
    """Whether x is y, and y more than one number, finite and not zero."""
    ok = y.numel() > 1 and y.any() and y.isfinite().all()
    return bool(ok) and not differs(x, y, tol).any()


def left_out(
    truth: Callable, inputs: dict[str, object]
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What may have been forgotten, and what comes out then: a factor, a term, two factors.

    A factor is forgotten in all places, where it is 1, or in the last step, whose result is
    divided by it.
    """
    numbers = {name: torch.as_tensor(x) for name, x in inputs.items()}
    numbers = {name: x.double() for name, x in numbers.items() if x.is_floating_point()}
    factors = {name: POWERS[name](x) if name in POWERS else x for name, x in numbers.items()}
    expected = truth(inputs)

    def without(*names: str) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        listed = " times ".join(f"the decay of {x}" if x in POWERS else x for x in names)
        said = f"right but for a factor: {listed} is missing"
        yield said, truth(inputs | {x: filled(inputs[x], float(x not in POWERS)) for x in names})
        product = [math.prod(spread(factors[x], y) for x in names) for y in expected]
        yield said, tuple(y / f for y, f in zip(expected, product, strict=True))

    for name in numbers:
        yield from without(name)
    for name in numbers.keys() - POWERS.keys():
        yield f"as if {name} were 0", truth(inputs | {name: filled(inputs[name], 0.0)})
    axes = max(y.ndim for y in expected)
    for one, two in combinations(numbers, 2):
        if min(numbers[one].ndim, numbers[two].ndim) < axes:  # of others, a product is no factor
            yield from without(one, two)


def filled(x: Tensor | float, value: float) -> Tensor | float:
    """The value, in the form of x."""
    return torch.full_like(x, value) if isinstance(x, Tensor) else value


def spread(factor: Tensor, y: Tensor) -> Tensor:
    """A factor with y's first axes, or its last ones, as it multiplies y; NaN if it has neither."""
    first = factor.reshape(*factor.shape, *[1] * (y.ndim - factor.ndim))
    for f in (first, factor):
        pairs = zip(reversed(f.shape), reversed(y.shape), strict=False)
        if f.ndim <= y.ndim and all(n in (1, size) for n, size in pairs):
            return f
    return torch.tensor(math.nan)


def only_in(bad: Tensor, axes: str) -> str:
    """Where all wrong entries are, if that is a run of a few heads, chunks or tokens."""
    said = []
    for i, axis in enumerate(axes.split()):
        wrong = bad.movedim(i, 0).reshape(bad.shape[i], -1).any(1).nonzero()[:, 0].tolist()
        run = wrong[-1] - wrong[0] + 1 == len(wrong) < bad.shape[i]
        if run and axis not in WITHIN:
            last = f" to {wrong[-1]}" if len(wrong) > 1 else ""
            said.append(f"{axis} {wrong[0]}{last}")
    return f", all in {', '.join(said)}" if said else ""


def likeness(x: Tensor, ref: Tensor, axes: str, tol: float) -> str:
    """What all of x is of the expected tensor, if one of a few slips explains it."""
    if not ref.numel() > 1 or not ref.abs().max() > 0:
        return ""
    names = axes.split()
    if same(-x, ref, tol):
        return "; all have the other sign"
    if x.ndim > 1 and x.shape[-1] == x.shape[-2] and same(x.mT, ref, tol):
        return f"; {names[-2]} and {names[-1]} are swapped"
    factor = ((x * ref).sum() / ref.square().sum()).item()
    if factor and same(x / factor, ref, tol):
        return f"; all are {factor:.4g} times what they should be"
    for i, axis in enumerate(names):
        n = x.shape[i] - 1
        if axis in WITHIN or n < 1:
            continue
        if same(x.flip(i), ref, tol):
            return f"; the order of {axis} is reversed"
        if same(x.narrow(i, 1, n), ref.narrow(i, 0, n), tol):
            return f"; what belongs to {axis} i stands at {axis} i + 1"
        if same(x.narrow(i, 0, n), ref.narrow(i, 1, n), tol):
            return f"; what belongs to {axis} i + 1 stands at {axis} i"
    return ""
