"""Each figure that is gone through: by itself, readable without a script, moved by the keys."""

import functools
import html
import re
import xml.etree.ElementTree as ET

import pytest
from book.layout import CHAPTERS, notebook, toc
from browsers import chromium

from benchmarks.cases import CASES, work
from linattn_edu import teaching
from linattn_edu.figures import drawing
from linattn_edu.steps import steps_html

# module of linattn_edu.figures -> what its figure() takes
FIGURES = {
    "anchors": (),
    "chunk_size": (CASES["gdn_train"], work),
    "memory": (),
    "ranks": (),
    "whole_pass": (),
    "roofline": (teaching.measured(),),
    "two_chunks": (),
}
SVG = "{http://www.w3.org/2000/svg}"
FILLS = {drawing.BLUE, drawing.ORANGE, drawing.GREEN, drawing.PURPLE, drawing.GRAY}
LETTERS = {"#fff", drawing.ON_LIT, "currentColor"}


@functools.cache
def made(name):
    return teaching._figure_of(name)(*FIGURES[name])


@functools.cache
def parsed(name):
    """The figure's HTML as XML: its void elements closed, its script left out."""
    text = re.sub(r"<script>.*?</script>", "", steps_html(*made(name)), flags=re.S)
    return ET.fromstring(re.sub(r"(<input[^>]*)>", r"\1/>", text))


@pytest.mark.parametrize("name", FIGURES)
def test_without_a_script_every_frame_can_be_read(name):
    frames = list(parsed(name).iter("figure"))
    captions = [f.find("figcaption").text for f in frames]
    assert len(frames) == len(made(name)[0]) > 1
    assert all(len(c) > 20 for c in captions) and len(set(captions)) == len(captions)
    for frame in frames:
        assert "style" not in frame.attrib
        drawings = list(frame.iter(f"{SVG}svg"))
        assert drawings and all(d.get("role") == "img" and d.get("aria-label") for d in drawings)


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_small_and_needs_nothing_but_itself(name):
    text = steps_html(*made(name))
    assert len(text.encode()) <= 250_000
    outside = re.sub(r'xmlns="[^"]*"', "", text)
    assert re.findall(r"https?:|src=|href=|url\(|@import|import\b|fetch", outside) == []


@pytest.mark.parametrize("name", FIGURES)
def test_colours_stand_out_on_a_light_and_a_dark_page(name):
    for e in parsed(name).iter():
        if e.tag == f"{SVG}text":
            assert e.get("fill") in (None, *LETTERS)
        else:
            known = (None, "none", drawing.LIT, *FILLS, *LETTERS)
            assert e.get("fill") in known and e.get("stroke") in known


def luminance(colour):
    c = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    c = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in c)
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), c, strict=True))


def contrast(a, b):
    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("fill", sorted(FILLS))
def test_a_fill_carries_white_letters_and_stands_on_both_pages(fill):
    assert contrast(fill, "#ffffff") >= 4.5
    assert contrast(fill, "#14181e") >= 3


def test_letters_on_a_lit_box():
    assert contrast(drawing.LIT, drawing.ON_LIT) >= 4.5


# (chapter, figure)
SHOWN = [
    (chapter, name)
    for chapter in toc()
    for name in re.findall(
        r'^teaching\.interactive\("(\w+)"', (CHAPTERS / f"{chapter}.md").read_text(), re.M
    )
]


@pytest.mark.parametrize(("chapter", "name"), SHOWN)
def test_a_chapter_shows_the_figure_as_it_is_today(chapter, name):
    outputs = [o for c in notebook(chapter).cells for o in c.get("outputs", ()) if "data" in o]
    shown = [o["data"].get("text/html") for o in outputs]
    assert steps_html(*made(name)) in shown, f"python tools/chapters.py {chapter} --all"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser):
    return browser.new_page(viewport={"width": 390, "height": 844})


def test_where_scripts_are_off_all_frames_are_shown_and_no_controls(browser):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.set_content("".join(steps_html(*made(name)) for name in FIGURES))
    count = sum(len(made(name)[0]) for name in FIGURES)
    assert page.locator("figcaption:visible").count() == count
    assert page.locator("figure svg:visible").count() >= count
    assert page.locator(":is(button, input, select):visible").count() == 0


@pytest.mark.parametrize("name", FIGURES)
def test_keys_move_it_on_a_phone(name, tab):
    """Every frame is reached, and only one is shown; its caption is said; nothing is too wide."""
    frames, _, *choices = made(name)
    names = choices[0][1] if choices else [None]
    each = len(frames) // len(names)
    tab.set_content(steps_html(*made(name)))
    shown = "() => [...document.querySelectorAll('figure')].map(f => f.checkVisibility())"
    seen = []
    for i, choice in enumerate(names):
        if choice is not None:
            tab.get_by_label(choices[0][0], exact=True).select_option(choice)
        if each > 1:
            tab.get_by_role("slider").press("Home")
        for j in range(each):
            if j:
                tab.get_by_role("slider").press("ArrowRight")
            visible = [k for k, on in enumerate(tab.evaluate(shown)) if on]
            assert visible == [i * each + j]
            seen += visible
            caption = tab.locator("figcaption").nth(visible[0])
            if seen != [0]:
                assert tab.get_by_role("status").inner_text() == caption.inner_text()
            assert html.escape(frames[visible[0]][1]) in html.escape(caption.inner_text())
            box = tab.evaluate("() => document.documentElement.scrollWidth")
            assert box <= 390
    assert seen == list(range(len(frames)))
