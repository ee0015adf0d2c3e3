"""The quiz of each chapter: complete, one right answer a question, and what can be computed is."""

import collections
import math
import re
import sys

import pytest
import torch
from book.layout import ROOT, toc

sys.path.append(str(ROOT / "book" / "_ext"))
import quiz

NAMES = [name for name in toc() if not name.startswith("00")]
QUESTIONS = {
    f"{name}-{i}": question for name in NAMES for i, question in enumerate(quiz.read(name), 1)
}


def close(x, y, tolerance=1e-6):
    """Whether two numbers or tensors agree to a relative tolerance."""
    x, y = (torch.as_tensor(z, dtype=torch.float64) for z in (x, y))
    return x.shape == y.shape and bool((x - y).norm() <= tolerance * y.norm())


def test_each_chapter_has_a_quiz():
    assert sorted(p.stem for p in quiz.FOLDER.glob("*.yml")) == sorted(
        name for name in toc() if name in NAMES or (quiz.FOLDER / f"{name}.yml").exists()
    )


@pytest.mark.parametrize("name", NAMES)
def test_three_to_five_questions(name):
    asked = [q["ask"] for q in quiz.read(name)]
    assert 3 <= len(asked) <= 5
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_question_is_complete(question):
    options = question["options"]
    assert set(question) <= {"ask", "options", "given"}
    assert all(set(o) <= {"text", "right", "why", "holds"} for o in options)
    assert 3 <= len(options) <= 4
    assert sum(o["right"] for o in options) == 1
    assert len({o["text"] for o in options}) == len(options)
    assert len({o["why"] for o in options}) == len(options)
    texts = [question["ask"], *(o[key] for o in options for key in ("text", "why"))]
    assert [t for t in texts if not t.strip() or t.replace("\\$", "").count("$") % 2] == []
    assert [o["why"] for o in options if len(o["why"].split()) < 5] == []
    # the order of the options may change: no text may name a letter
    assert [t for t in texts if re.search(r"\b(option|answer) [A-E]\b", t)] == []


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_computed_answers(question):
    """`holds` is True for the right option and False for each other that has one."""
    claims = [o for o in question["options"] if "holds" in o]
    assert any(o["right"] for o in claims) or not (claims or "given" in question)
    names = {"torch": torch, "math": math, "close": close}
    exec(question.get("given", ""), names)
    assert [bool(eval(o["holds"], names)) for o in claims] == [o["right"] for o in claims]


def test_half_of_the_answers_are_computed():
    computed = [q for q in QUESTIONS.values() if any("holds" in o for o in q["options"])]
    assert len(computed) >= len(QUESTIONS) / 2


def test_the_right_option_may_stand_anywhere():
    """Among questions of as many options, each place is right about equally often."""
    places = collections.defaultdict(collections.Counter)
    for question in QUESTIONS.values():
        rights = [o["right"] for o in question["options"]]
        places[len(rights)][rights.index(True)] += 1
    for options, counts in places.items():
        share = sum(counts.values()) / options
        assert all(abs(counts[i] - share) <= 1 + share / 4 for i in range(options)), counts


def test_length_does_not_give_the_answer_away():
    """The right option is the longest no more often than in two questions of five."""
    longest = [
        all(len(o["text"]) < len(right["text"]) for o in q["options"] if o is not right)
        for q in QUESTIONS.values()
        for right in q["options"]
        if right["right"]
    ]
    assert sum(longest) <= 0.4 * len(QUESTIONS)
