"""grids.py: pairs of values, as few combinations as may be, the same every time. And --quick."""

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from grids import pairs, spread

SIZES = pytest.mark.parametrize(
    "sizes",
    [(1,), (4,), (2, 2), (7, 5), (3, 4, 2, 2, 2), (7, 5, 3, 3, 5), (2, 2, 2, 2, 2, 2), (1, 3, 1)],
)


@SIZES
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


@SIZES
@pytest.mark.parametrize("times", [1, 2])
def test_every_value_occurs(times, sizes):
    """At most so many times on the longest axis."""
    found = spread(times, **{f"axis{i}": range(size) for i, size in enumerate(sizes)})
    assert len(set(found)) == len(found) <= times * max(sizes)
    assert all({row[i] for row in found} == {*range(size)} for i, size in enumerate(sizes))


SPY = """
import pytest

class Spy:
    def pytest_deselected(self, items):
        print(*(f"out {x.nodeid}" for x in items), sep="\\n")

files = ["delta", "kernels/test_budgets.py", "layers/test_processes.py"]
files = [f"tests/{file}" for file in files]
pytest.main(["--collect-only", "-q", "--quick", *files], plugins=[Spy()])
"""


@pytest.mark.long
def test_quick_keeps_a_case_of_every_function():
    """Less than half of all; of files that are marked `whole` every case, of others one; what is
    marked `long` not at all.
    """
    root = Path(__file__).parents[1]
    said = subprocess.run([sys.executable, "-c", SPY], cwd=root, capture_output=True, text=True)
    lines = [x for x in said.stdout.splitlines() if "::" in x]
    out = [x.removeprefix("out ") for x in lines if x.startswith("out ")]
    kept = Counter(function_of(x) for x in lines if x.startswith("tests/"))
    long = {"tests/layers/test_processes.py::test_two_processes_are_one"}
    assert {function_of(x) for x in out} - set(kept) == long, said.stdout + said.stderr
    assert 0 < sum(kept.values()) < len(out)
    whole = {x for x in kept if "mark.whole" in (root / x.partition("::")[0]).read_text()}
    assert not whole & {function_of(x) for x in out} and any(kept[x] > 1 for x in whole)
    assert all(kept[x] == 1 for x in set(kept) - whole)


def function_of(case):
    """tests/test_a.py::test_b of one of its cases."""
    return case.partition("[")[0]
