"""The figure that is gone through step by step."""

import re
import xml.etree.ElementTree as ET

import pytest
from browsers import chromium

from linattn_edu import teaching
from linattn_edu.steps import steps_html

FRAMES = [(f'<svg viewBox="0 0 9 9"><text>{x}</text></svg>', f"{x} < 2 & on") for x in "abc"]


def test_without_a_script_every_frame_is_there_to_read():
    text = steps_html(FRAMES, "of a test")
    root = ET.fromstring(_closed(text))
    figures = list(root.iter("figure"))
    assert [f.find("svg/text").text for f in figures] == ["a", "b", "c"]
    assert [f.find("figcaption").text for f in figures] == [
        f"{i}. {x} < 2 & on" for i, x in enumerate("abc", 1)
    ]
    assert not any("style" in f.attrib for f in figures)


def _closed(text: str) -> str:
    """The HTML as XML: its one void element closed, its script left out."""
    text = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    return re.sub(r"(<input[^>]*)>", r"\1/>", text)


def test_it_needs_nothing_but_itself():
    text = steps_html(FRAMES, "of a test")
    assert re.findall(r"https?:|src=|href=|import\b|fetch", text) == []
    name = re.search(r'id="([^"]+)"', text)[1]
    assert f'getElementById("{name}")' in text and "$" not in text
    assert text == steps_html(FRAMES, "of a test"), "the same frames give the same text"
    other = re.search(r'id="([^"]+)"', steps_html(FRAMES[:2], "of a test"))[1]
    assert other != name, "two figures of a page do not move each other"


def test_a_frame_without_a_name_is_named():
    text = steps_html([FRAMES[0], ('<svg aria-label="mine"></svg>', "named")], "of a test")
    assert re.findall(r'<svg aria-label="([^"]*)"', text) == ["of a test, 1", "mine"]


def test_choices_have_as_many_frames_each():
    text = steps_html(FRAMES * 2, "of a test", ("part", ["x", "y"]))
    captions = re.findall(r"<figcaption>(\S+ \S+)", text)
    assert captions == ["x, 1.", "x, 2.", "x, 3.", "y, 1.", "y, 2.", "y, 3."]
    assert re.findall(r"<option>(.*?)</option>", text) == ["x", "y"] and 'max="2"' in text
    only = steps_html(FRAMES, "of a test", ("part", ["x", "y", "z"]))
    assert "<select " in only and "<input" not in only and "<figcaption>z. c" in only
    with pytest.raises(ValueError, match="as many for each"):
        steps_html(FRAMES, "of a test", ("part", ["x", "y"]))


def test_no_frames():
    with pytest.raises(ValueError, match="at least one"):
        steps_html([], "of nothing")


def test_outside_a_notebook_the_captions_are_printed(capsys):
    teaching.steps(FRAMES, "of a test")
    assert capsys.readouterr().out.splitlines()[:2] == ["of a test", "1. a < 2 & on"]


@pytest.mark.parametrize("clicks", [0, 1, 5])
def test_a_button_goes_to_the_next_frame(clicks):
    """In a browser, where there is one."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(steps_html(FRAMES, "of a test"))
        for _ in range(clicks):
            page.locator("button").nth(1).click(force=True, no_wait_after=True)
        shown = [f.is_visible() for f in page.locator("figure").all()]
        assert shown == [i == min(clicks, 2) for i in range(3)]
        page.locator("button").nth(1).press("ArrowLeft")
        shown = [f.is_visible() for f in page.locator("figure").all()]
        assert shown == [i == max(min(clicks, 2) - 1, 0) for i in range(3)], "focus on a button"
