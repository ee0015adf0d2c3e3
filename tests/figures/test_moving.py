"""The picture of the front: its states against the rule written out; still where asked to be."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from browsers import chromium

from linattn_edu.figures import drawing, moving
from linattn_edu.testing import assert_close


def outer(key, value):
    return torch.outer(moving.row(moving.KEYS[key]), moving.row(moving.VALUES[value]))


def test_the_states_are_those_of_the_rule():
    """The keys are at a right angle: what is written under one leaves the other alone."""
    want = [
        torch.zeros(4, 6, dtype=torch.float64),
        outer("a", 1),
        outer("a", 1) + outer("b", 2),
        outer("b", 2),
        outer("a", 3) + outer("b", 2),
        moving.GATE * (outer("a", 3) + outer("b", 2)),
    ]
    found = moving.states()
    assert len(found) == len(want) == len(moving.SAID) == len(moving.SHORT) + 1
    for said, S, S_want in zip(moving.SAID, found, want, strict=True):
        assert_close(said, S, S_want, 1e-14)
        assert (S >= 0).all(), "a square has no sign"


def test_what_the_keys_read():
    """As the alternative text says."""
    empty, one, two, erased, three, faded = moving.states()
    v1, v2, v3 = (moving.row(v) for v in moving.VALUES.values())
    for key, S, want in (
        ("a", empty, 0 * v1), ("a", one, v1), ("b", two, v2), ("a", two, v1), ("a", erased, 0 * v1),
        ("a", three, v3), ("b", three, v2), ("a", faded, 0.3 * v3), ("b", faded, 0.3 * v2),
    ):  # fmt: skip
        assert (moving.reads(S, key) - want).abs().max() < 1e-14
    assert "three tenths" in moving.ALT


@pytest.mark.parametrize("text", [moving.svg(), moving.svg(paper=True)])
def test_it_is_small_by_itself_and_named(text):
    assert len(text.encode()) <= 24_000
    root = ET.fromstring(text)
    assert root.get("role") == "img" and root.get("aria-label") == moving.ALT
    outside = re.sub(r'xmlns="[^"]*"', "", text)
    assert re.findall(r"https?:|src=|href=|url\(|@import|<script", outside) == []
    fills = {None, "none", "currentColor", drawing.BLUE}
    card, drawn = (e.get("fill") for e in root.iter("{*}rect")), "#fff" if "#fff" in text else None
    assert set(card) <= fills | {drawn}


@pytest.fixture(scope="module")
def tab():
    with chromium() as browser:
        yield browser.new_page(viewport={"width": 390, "height": 844})


MOVING = {"reduced_motion": "no-preference"}
RUNNING = "() => document.getAnimations().filter(a => a.playState === 'running').length"


def test_it_moves_until_it_is_held_and_is_still_for_who_asks(tab):
    tab.set_content(moving.front())
    moves, still = tab.locator(".lm-moves"), tab.locator(".lm-still")
    assert moves.is_visible() and not still.is_visible()
    assert tab.evaluate(RUNNING) > 20
    tab.get_by_label("hold it still").check()
    assert tab.evaluate(RUNNING) == 0
    tab.get_by_label("hold it still").uncheck()
    for media in ({"reduced_motion": "reduce"}, MOVING | {"media": "print"}):
        tab.emulate_media(**media)
        assert still.is_visible() and not moves.is_visible()
        assert tab.evaluate(RUNNING) == 0
        assert not tab.get_by_label("hold it still").is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_at_each_moment_the_squares_have_the_area_of_the_entries(tab):
    tab.emulate_media(**MOVING, media="screen")
    tab.set_content(moving.front())
    step = 1000 * moving.SECONDS / len(moving.SAID)
    shown = """(ms) => { for (const a of document.getAnimations()) { a.pause(); a.currentTime = ms }
      const visible = [...document.querySelectorAll('.lm-moves g[class]')]
        .filter(g => getComputedStyle(g).opacity === '1').map(g => g.textContent);
      const area = [...document.querySelectorAll('.lm-moves rect[class][width="25"]')]
        .filter(r => r.y.baseVal.value > 60 && r.x.baseVal.value > 50)
        .reduce((sum, r) => sum + new DOMMatrix(getComputedStyle(r).transform).a ** 2, 0);
      return [visible, area]; }"""
    for i, (said, S) in enumerate(zip(moving.SAID, moving.states(), strict=True)):
        visible, area = tab.evaluate(shown, (i + 0.3) * step)
        assert visible == [said]
        assert area == pytest.approx(S.sum().item(), abs=0.1)
