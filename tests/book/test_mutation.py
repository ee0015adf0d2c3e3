"""A fault in a kernel turns its chapter red; every mistake of tools/mutants.py has its place.

`make mutants` plants them all. Without a fault the chapter is green: nbval runs it in `make test`.
"""

import re

import pytest
from book.layout import ROOT, tool

mutants = tool("mutants")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_mistake_has_its_place(mutant):
    assert mutants.places(mutant) == 1, "its text must be in its file once"
    paths = re.findall(r"\S+\.(?:py|ipynb)", mutant.tests)
    assert paths and [p for p in paths if not (ROOT / p).exists()] == []


def test_fault_turns_a_chapter_red(tmp_path):
    mutant = next(m for m in mutants.MUTANTS if "--nbval-lax" in m.tests)
    mutants.copy(tmp_path)
    done = mutants.plant(mutant, tmp_path)
    assert mutant.said == "AssertionError", "red by a failed comparison"
    assert mutants.verdict(done, mutant) == "", (done.stdout + done.stderr)[-3000:]
