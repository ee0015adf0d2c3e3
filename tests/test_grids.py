"""grids.py: pairs of values, as few combinations as may be, the same every time."""

import itertools

import pytest
from grids import pairs


@pytest.mark.parametrize(
    "sizes",
    [(1,), (4,), (2, 2), (7, 5), (3, 4, 2, 2, 2), (7, 5, 3, 3, 5), (2, 2, 2, 2, 2, 2), (1, 3, 1)],
)
def test_every_pair_of_values_occurs(sizes):
    axes = {f"axis{i}": [f"{i}:{n}" for n in range(size)] for i, size in enumerate(sizes)}
    found = pairs(**axes)
    assert len(set(found)) == len(found)
    for i, j in itertools.combinations(range(len(sizes)), 2):
        have = {(row[i], row[j]) for row in found}
        assert have == set(itertools.product(axes[f"axis{i}"], axes[f"axis{j}"]))
    for i, values in enumerate(axes.values()):
        assert {row[i] for row in found} == set(values)
    two = sorted(sizes)[-2:]
    assert len(found) <= 2 * two[0] * two[-1]
    assert pairs(**axes) == found
