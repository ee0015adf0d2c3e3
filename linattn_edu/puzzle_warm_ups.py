"""The warm-ups: what each is checked on. The truth is the PyTorch function of its own file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.puzzle_stages import Family, Puzzle


@dataclass(frozen=True, eq=False)
class Example:
    """Inputs few and small enough to be printed: tensors of whole numbers, and options."""

    given: dict[str, Tensor | int]

    def said(self, letters: str) -> str:
        """All of them, such as "x = [3, 1]"; `letters` is not needed."""
        listed = {
            name: x.long().tolist() if isinstance(x, Tensor) else x
            for name, x in self.given.items()
        }
        return ", ".join(f"{name} = {x}" for name, x in listed.items())


DIGITS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9)


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Digits in a row, over again where they end, in float64."""
    n = torch.Size(shape).numel()
    return torch.tensor([DIGITS[(start + i) % len(DIGITS)] for i in range(n)]).double().view(shape)


def whole(*rows: object) -> Tensor:
    """A tensor of the numbers given, in float64."""
    return torch.tensor(rows, dtype=torch.float64)


def warm_up(
    name: str, arguments: str, outputs: dict[str, str], *cases: dict, options: tuple[str, ...] = ()
) -> Puzzle:
    """A puzzle whose cases are the inputs themselves."""
    family = Family(lambda case: case.given, "", tuple(Example(case) for case in cases))
    return Puzzle(family, name, None, tuple(arguments.split()), options, outputs)


MATRIX = "row column"
WARM_UPS = {
    puzzle.number: puzzle
    for puzzle in (
        warm_up("w1_map", "x", {"y": "place"}, {"x": numbers(8)}, {"x": numbers(4, start=8)}),
        warm_up(
            "w2_mask",
            "x z",
            {"y": "place"},
            {"x": numbers(10), "z": 10 * numbers(10, start=3)},
            {"x": numbers(5), "z": 10 * numbers(5, start=6)},
        ),
        warm_up("w3_row_sum", "x", {"s": "row"}, {"x": numbers(3, 5)}, {"x": numbers(2, 3)}),
        warm_up(
            "w4_outer",
            "x z",
            {"P": MATRIX},
            {"x": numbers(4), "z": numbers(4, start=4)},
            {"x": numbers(2, start=5), "z": numbers(8)},
        ),
        warm_up(
            "w5_matrix_product",
            "A B",
            {"P": MATRIX},
            {"A": numbers(4, 3), "B": numbers(3, 4, start=2)},
            {"A": numbers(2, 5), "B": numbers(5, 3, start=4)},
        ),
        warm_up(
            "w6_cumsum",
            "x",
            {"y": "token"},
            {"x": numbers(12), "chunk_size": 4},
            {"x": numbers(10, start=3), "chunk_size": 4},
            options=("chunk_size",),
        ),
        warm_up(
            "w7_decay_matrix",
            "gc",
            {"G": MATRIX},
            {"gc": whole(0, -1, -1, -3)},
            {"gc": whole(-1, -2, -4, -4, -5, -6, -6, -300)},
        ),
        warm_up(
            "w8_triangular_solve",
            "L b",
            {"x": "row"},
            {
                "L": whole([0, 0, 0, 0], [2, 0, 0, 0], [1, 3, 0, 0], [0, 1, 2, 0]),
                "b": whole(1, 3, 6, 9),
            },
            {"L": whole([0, 0], [5, 0]), "b": whole(2, 3)},
        ),
        warm_up(
            "w9_scan",
            "a x",
            {"y": "token channel"},
            {"a": whole(1, 2, 0, 1, 3), "x": numbers(5, 4)},
            {"a": whole(3, 1, 2), "x": numbers(3, 2, start=4)},
        ),
    )
}
