"""The built book in a browser: all from one host, formulas set, legible on a phone."""

import functools
import html
import http.server
import io
import re
import shutil
import subprocess
import sys
import threading
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
from axe_playwright_python.sync_playwright import Axe
from book.layout import CHAPTERS, HTML, ROOT, toc, tool
from bs4 import BeautifulSoup, SoupStrainer
from grids import FULL
from pypdf import PdfReader

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FOUND = sorted(str(p.relative_to(HTML)) for p in HTML.rglob("*.html") if "_static" not in p.parts)
FRONT = "book/intro.html"
PAGES = [p for p in FOUND if p != "index.html"]  # which only leads on to FRONT
# listings are made by one template, of files in one style: some are opened, the links of all read
LISTINGS = [p for p in PAGES if p.startswith("_modules/")]
OPENED = [p for p in PAGES if FULL or p not in LISTINGS or p in LISTINGS[::24]]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # reaches this machine alone
]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def test_the_book_is_built():
    assert FOUND, "no _build/html; `make book` builds it"
    assert f"url={FRONT}" in (HTML / "index.html").read_text()
    assert [c for c in toc() if f"chapters/{c}.html" not in PAGES] == []


# ---- without a browser


# without parsing: a page of listings takes the parser a second
ANCHOR = re.compile(r"<(?:[a-z][^<>]*?\sid|a\b[^<>]*?\sname)=\"([^\"]+)\"")
LINK = re.compile(r"<a\b[^<>]*?\shref=\"([^\"]*)\"")


@functools.cache
def soup(page):
    return BeautifulSoup((HTML / page).read_text(), "html.parser")


@functools.cache
def attributes(form, page):
    return {html.unescape(x) for x in form.findall((HTML / page).read_text())}


def test_links_are_found_as_a_parser_finds_them():
    for page in (FRONT, "book/api.html", "genindex.html", "_modules/linattn_edu/layers/layer.html"):
        text, links = (HTML / page).read_text(), SoupStrainer("a", href=True)
        parsed = BeautifulSoup(text, "html.parser", parse_only=links)
        assert attributes(LINK, page) == {a["href"] for a in parsed.select("a")}


@pytest.mark.parametrize("page", FOUND)
def test_internal_links_lead_somewhere(page):
    broken = []
    for link in attributes(LINK, page):
        url = urlparse(link)
        if url.scheme or url.netloc or link == "#":
            continue
        target, anchor = urldefrag(urljoin(page, link))
        target = unquote(target.split("?")[0]) or page
        if not (HTML / target).is_file() or (
            anchor
            and target.endswith(".html")
            and unquote(anchor) not in attributes(ANCHOR, target)
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", [n for n in toc() if not n.startswith("00")])
def test_the_quiz_is_in_the_page_and_in_its_table_of_contents(name):
    """Readable without a script: every option has its reason in a fold."""
    text = (HTML / "chapters" / f"{name}.html").read_text()
    assert re.search(r'<a class="[^"]*nav-link[^"]*" href="#quiz"', text)
    section = text.split('<section id="quiz">')[1].split("</section>")[0]
    questions = BeautifulSoup(section, "html.parser").select(".quiz fieldset")
    assert 3 <= len(questions) <= 5
    for question in questions:
        assert len(question.select("legend")) == 1
        assert len(question.select("label input")) == len(question.select("details li")) >= 3
        assert len(question.select("details li[data-right=true]")) == 1


@pytest.mark.parametrize("name", toc())
def test_a_chapter_begins_with_its_idea(name):
    """No bar over code above the first section; the set-up ends it, Colab's cell is nowhere."""
    article = (HTML / "chapters" / f"{name}.html").read_text()
    article = article[article.index("<article") : article.index("</article>")]
    # parsed up to the second heading: a whole page takes the parser half a second
    before, idea, *rest = article.split("<h2")
    rest = re.sub("<[^>]+>", "", "".join(rest))
    assert "teaching.setup()" not in rest and "google.colab" not in rest
    start = BeautifulSoup(f"{before}<h2{idea}", "html.parser")
    first = start.select_one("h2")
    assert first.find_previous("details", class_="hide") is None
    assert first.find_previous("div", class_="cell") is None
    cells = [c for c in start.select("div.cell") if "teaching.setup()" in c.text]
    assert all(cell.select_one("details.hide") is not None for cell in cells) and len(cells) < 2
    assert "google.colab" not in start.text


# ---- in a browser

# ms for a request that a script makes late; "networkidle" may never come for a page of a file
LATE = 500
# A page full of formulas takes its thread six to eight seconds of a slow core. By the clock that
# may be half a minute, beside other browsers: so the clock, in ms, only tells a page that hangs.
THREAD, HANGS = 20, 180_000


@pytest.fixture(scope="session")
def site():
    """The book on a port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path == "/favicon.ico":  # which a browser asks for by itself
                self.send_response(204)
                self.end_headers()
            else:
                super().do_GET()

        def end_headers(self):
            self.send_header("Cache-Control", "max-age=3600")
            super().end_headers()

    handler = functools.partial(Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(f"none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A tab, and what went wrong with the page in it."""

    def __init__(self, browser, home, **options):
        self.elsewhere, self.missing, self.errors = [], [], []
        self.home, self.before = home, 0
        self.context = browser.new_context(**({"viewport": DESK} | options))
        self.context.set_default_navigation_timeout(HANGS)
        self.context.on("request", self._asked)
        self.tab = self.context.new_page()
        self.meter = self.context.new_cdp_session(self.tab)
        self.meter.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.tab.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.tab.on("pageerror", lambda e: self.errors.append(str(e)))
        self.tab.on("response", lambda r: r.status >= 400 and self.missing.append(r.url))
        self.tab.on("requestfailed", lambda r: self.missing.append(r.url))

    def _asked(self, request):
        if not request.url.startswith((self.home, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def go(self, page):
        for of_another_page in (self.elsewhere, self.missing, self.errors):
            of_another_page.clear()
        self.tab.bring_to_front()  # behind another tab it draws no frames, and no click is taken
        self.tab.goto(f"{self.home}/{page}", wait_until="load")
        self.tab.evaluate(
            "async () => { if (window.MathJax?.startup) await MathJax.startup.promise;"
            " await window.formulas?.all(); await document.fonts.ready }"
        )
        metrics = self.meter.send("Performance.getMetrics")["metrics"]
        whole = {m["name"]: m["value"] for m in metrics}["ThreadTime"]
        taken, self.before = whole - self.before, whole
        assert taken < THREAD, f"{page} takes a core {taken:.0f} s to show"
        return self.tab

    def close(self):
        self.context.close()


@pytest.fixture(scope="session")
def desk(browser, site):
    """One tab for many pages: what they share is loaded once."""
    v = Visit(browser, site)
    yield v
    v.close()


@pytest.fixture
def visit(browser, site):
    visits = []

    def make(home=site, **options):
        visits.append(Visit(browser, home, **options))
        return visits[-1]

    yield make
    for v in visits:
        v.close()


# formulas that are still TeX, or that MathJax could not read
UNSET = """() => {
  // MathJax marks what it cannot read, and sets an unknown command in red
  const marks = 'mjx-merror, [data-mjx-error], mjx-mtext[style*="color: red"]';
  const bad = [...document.querySelectorAll(marks)].map(e => e.textContent);
  for (const e of document.querySelectorAll('.math'))
    if (!e.querySelector('mjx-container')) bad.push(e.textContent);
  const tex = /\\$\\$|\\\\[(\\[]|\\\\begin\\{|(^|\\s)\\$[^\\s$][^$]*\\$/;
  const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode())
    if (!n.parentElement.closest('pre, code, script, style, mjx-container')
        && tex.test(n.data)) bad.push(n.data.trim());
  return bad;
}"""

# what sticks out of the window and cannot be scrolled to
WIDE = """() => {
  const room = document.documentElement.clientWidth + 1, bad = [];
  if (document.documentElement.scrollWidth > room) bad.push('the page itself');
  for (const e of document.querySelectorAll('main *')) {
    if (!e.getClientRects().length || e.getBoundingClientRect().right <= room) continue;
    let box = e;
    while (box && !/auto|scroll/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
    const hidden = e.closest('mjx-assistive-mml, .visually-hidden, .headerlink');
    if ((!box || box.matches('html, body, main')) && !hidden)
      bad.push(e.tagName + '.' + e.getAttribute('class') + ' ' + e.textContent.trim().slice(0, 40));
  }
  return bad.slice(0, 5);
}"""

# tables with columns that one has to scroll to
CUT = """() => [...document.querySelectorAll('main table')].filter(table => {
    let box = table;
    while (box && !/auto|scroll/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
    return table.getClientRects().length && box && box.scrollWidth > box.clientWidth + 1;
  }).map(table => table.rows[0].innerText.replace(/\\s+/g, ' ')).slice(0, 5)"""

# formulas that fit, in a box that scrolls: a bar below each of them, on many browsers
LOOSE = """() => [...document.querySelectorAll('mjx-container')]
  .filter(e => e.getClientRects().length && e.scrollWidth > e.clientWidth + 2
    && e.querySelector('mjx-math').getBoundingClientRect().width <= e.clientWidth + 2)
  .map(e => e.textContent).slice(0, 5)"""

# formulas that a line break parts from the comma behind them
BROKEN = """() => [...document.querySelectorAll('main .bound')].filter(e => {
    const tops = [...e.getClientRects()].filter(r => r.width > 0).map(r => r.top + r.height / 2);
    return Math.max(...tops) - Math.min(...tops) > 16; }).map(e => e.textContent).slice(0, 5)"""

ARTICLE = "() => document.querySelector('article')?.textContent ?? ''"

IMAGES = """() => [...document.images].filter(i => i.src && !(i.complete && i.naturalWidth))
  .map(i => i.src)"""


# icons that are not among those that the pages take with them
UNDRAWN = """() => [...document.querySelectorAll('i[class*=fa-], .svg-inline--fa:has(.missing)')]
  .map(e => e.outerHTML)"""


SOLUTIONS = "[...document.querySelectorAll('.solution.dropdown')]"


def unfold(tab, least):
    """A solution, of at least so many, is closed at first; a click shows it and the cells in it."""
    heights = f"() => {SOLUTIONS}.map(e => e.getBoundingClientRect().height)"
    closed = tab.evaluate(heights)
    assert len(closed) >= least
    tab.locator(".solution.dropdown button.toggle-button").first.click()
    tab.evaluate(f"() => {SOLUTIONS}.slice(1).forEach(e => e.querySelector('button').click())")
    tab.wait_for_function(f"closed => ({heights})().every((h, i) => h > closed[i])", arg=closed)


OPEN = "() => [...document.querySelectorAll('details.appendix')].map(fold => fold.open)"


def unfold_appendices(tab):
    """Each is closed at first; its address in the page's table of contents opens it alone."""
    folds = tab.locator("details.appendix")
    for i in range(folds.count()):
        assert tab.evaluate(OPEN) == [j < i for j in range(folds.count())]
        anchor = folds.nth(i).evaluate("fold => fold.parentElement.id")
        assert tab.locator(f".bd-sidebar-secondary a[href='#{anchor}']").count() == 1
        tab.evaluate("anchor => { location.hash = anchor }", anchor)
        tab.wait_for_function(f"i => ({OPEN})()[i]", arg=i)


APPENDIX = re.compile(r"^## (Appendix: .+)$", re.M)
# of each appendix its heading, whether something follows it that is not in its fold, its summary
FOLDS = """() => [...document.querySelectorAll('article details.appendix')].map(fold => {
    let h2 = fold; while (h2 && h2.tagName != 'H2') h2 = h2.previousElementSibling;
    return [h2.textContent, !!fold.nextElementSibling,
            fold.querySelector('summary').textContent] })"""


def read_chapter(tab, name):
    """It is numbered, leads to its source and shows outputs; all of an appendix is folded but its
    heading, with the minutes that it takes.
    """
    number = tab.locator("article h1 .section-number").text_content().strip(". \u00a0")
    assert number == re.sub("^0(?=.)", "", name.split("_")[0])  # 7b of 07b_recurrent_bwd
    links = tab.evaluate("() => [...document.querySelectorAll('a')].map(a => a.href)")
    assert any(re.search(rf"colab\..*/blob/main/chapters/{name}\.ipynb$", h) for h in links)
    assert any(h.endswith(f"/edit/main/chapters/{name}.md") for h in links)
    assert tab.locator("article .output").count(), "the page shows no output"
    folds = tab.evaluate(FOLDS)
    headings = [re.sub(r"^\d+[a-z]?[\d.]* |#$", "", heading) for heading, *_ in folds]
    assert headings == APPENDIX.findall((CHAPTERS / f"{name}.md").read_text())
    if folds:
        minutes = tool("minutes").appendices(name)
        for (_, goes_on, summary), takes in zip(folds, minutes, strict=True):
            assert not goes_on, "a part of the appendix is not in its fold"
            assert abs(int(re.search(r"\((\d+) minutes?\)", summary)[1]) - takes) <= 1


@pytest.mark.parametrize("page", OPENED)
def test_page(page, desk):
    """Formulas set, images there, nothing too wide on a desk with the appendices open or on a phone
    with the solutions open, no table cut on a desk, an equation's number in one pair of brackets.
    """
    desk.tab.set_viewport_size(DESK)
    tab = desk.go(page)
    assert tab.evaluate(UNSET) == []
    assert tab.evaluate(LOOSE) == []
    # a lazy image loads when it is scrolled to
    tab.evaluate("() => document.querySelectorAll('img').forEach(i => { i.loading = 'eager' })")
    tab.wait_for_timeout(LATE)
    assert tab.evaluate(IMAGES) == []
    assert tab.evaluate(UNDRAWN) == []
    assert re.findall(r"\(\(\d+\.\d+\)\)", tab.evaluate(ARTICLE)) == []
    if page.startswith("chapters/"):
        read_chapter(tab, page.removeprefix("chapters/").removesuffix(".html"))
    unfold_appendices(tab)
    assert tab.evaluate(WIDE) == []
    assert tab.evaluate(CUT) == []
    tab.set_viewport_size(PHONE)
    if page.startswith("chapters/"):  # one with a letter goes on with what another began
        unfold(tab, 1 if re.match(r"chapters/\d\d[a-z]", page) else 4)
    assert tab.evaluate(WIDE) == [], "at 390 px"
    assert tab.evaluate(BROKEN) == []
    assert desk.elsewhere == []
    assert desk.missing == []
    assert desk.errors == []


def test_a_wide_table_is_noticed(desk):
    """In the theme's own box, and in that of a cell's output."""
    tab = desk.go("chapters/26_decoding.html")
    tab.set_viewport_size(DESK)
    assert tab.evaluate(CUT) == []
    for box in ("div.pst-scrollable-table-container", "div.cell_output"):
        cell = f"document.querySelector('{box} table tr').cells[0]"
        tab.evaluate(f"() => {{ {cell}.style.minWidth = '700px' }}")
        assert len(tab.evaluate(CUT)) == 1
        tab.evaluate(f"() => {{ {cell}.style.minWidth = '' }}")


def test_an_icon_that_no_page_shows_is_left_out(desk):
    """And one that a page asks for nevertheless is noticed."""
    assert (HTML / "_static/scripts/fontawesome.js").stat().st_size < 120_000
    tab = desk.go(FRONT)
    tab.evaluate(
        "() => document.body.insertAdjacentHTML('beforeend', '<i class=\"fas fa-horse\">')"
    )
    tab.wait_for_selector(".missing", state="attached")
    assert ["fa-horse" in e for e in tab.evaluate(UNDRAWN)] == [True]


def test_opened_as_a_file(visit):
    """`make book` prints the path of a file: it must read well without a server."""
    for page in (FRONT, *(f"chapters/{name}.html" for name in toc()[:1])):
        v = visit(home=HTML.as_uri())
        assert v.go(page).evaluate(UNSET) == []
        v.tab.wait_for_timeout(LATE)
        assert (v.elsewhere, v.missing, v.errors) == ([], [], [])


@pytest.mark.parametrize(
    "words, found",
    [
        ("recurrence", "chapters/01_recurrent.html"),
        ("Householder", "chapters/04_wy.html"),
        ("chunk_kda", "book/api.html#linattn_edu.chunk_kda"),
        ("state_kernel", "book/api.html#linattn_edu.kernels.delta.state.state_kernel"),
        ("eq:delta-v-new", "chapters/05_state.html#equation-eq-delta-v-new"),
        ("delta-v-new", "chapters/05_state.html#equation-eq-delta-v-new"),
    ],
)
def test_search_finds(words, found, desk):
    """A word, a function, a kernel, the label of an equation: the last three lead to the place."""
    tab = desk.go(f"search.html?q={words}")
    tab.wait_for_selector("#search-results li a", timeout=15000)
    tab.wait_for_function(
        "!/Searching|Preparing/.test(document.querySelector('#search-results h2').textContent)"
    )
    links = [
        a.get_attribute("href").split("?")[0]
        for a in tab.query_selector_all("#search-results li a")
    ]
    assert any(link.endswith(found) for link in links[: 3 if "#" in found else None]), links[:5]
    assert desk.elsewhere == []


# the ratio of WCAG between the colours of an element's text and of what lies behind it
CONTRAST = """(selector) => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const e = document.querySelector(selector);
  let box = e;
  while (/, 0\\)|transparent/.test(getComputedStyle(box).backgroundColor) && box.parentElement)
    box = box.parentElement;
  const [a, b] = [getComputedStyle(e).color, getComputedStyle(box).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_readers_colour_scheme(scheme, visit):
    tab = visit(color_scheme=scheme).go(FRONT)
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    assert tab.evaluate(CONTRAST, "article p") > 7


def test_a_tag_of_the_code_shows_its_equation(visit):
    v = visit(viewport=PHONE, has_touch=True)
    tab = v.go("chapters/05_state.html")
    tag = tab.locator("a.eq-tag", has_text="eq:delta-v-new").first
    anchor = tag.get_attribute("href")
    assert anchor == "#equation-eq-delta-v-new"
    tag.focus()
    box = tab.locator("#eq-box")
    tab.wait_for_selector("#eq-box mjx-container")
    assert box.get_by_role("link").get_attribute("href") == anchor
    place = box.bounding_box()
    assert place["x"] >= 0 and place["x"] + place["width"] <= PHONE["width"]
    tab.keyboard.press("Escape")
    assert box.is_hidden()
    tag.tap()
    assert box.is_visible() and not tab.url.endswith(anchor)
    code = tab.locator(f"[id='{anchor[1:]}'] + p.eq-code a")
    assert {"reference/delta/state.py", "kernels/delta/state.py"} <= set(code.all_inner_texts())
    assert v.errors == []


def test_a_quiz_says_whether_an_answer_is_right_and_why(visit):
    """By keyboard alone: the verdict is a live region with the option's own reason."""
    v = visit(viewport=PHONE)
    question = v.go("chapters/05_state.html").locator(".quiz fieldset").first
    said, options = question.get_by_role("status"), question.get_by_role("radio")
    assert said.inner_text() == ""
    verdicts = []
    for i in range(options.count()):
        options.nth(i).focus()
        options.nth(i).press("Space")
        options.nth(i).press("Enter")
        verdicts.append(said.locator("strong").inner_text().strip())
        reason = question.locator("details li").nth(i).locator(".quiz-why")
        assert said.locator(".quiz-why").text_content() == reason.text_content()
    answers = question.locator("details li").all()
    right = [a.get_attribute("data-right") == "true" for a in answers]
    assert verdicts == ["Right." if r else "Not right." for r in right]
    question.get_by_role("radio").first.press("ArrowDown")
    assert said.inner_text() == "", "another choice takes the old verdict away"
    assert v.errors == []


IN_VIEW = """([id, height]) => {
    const y = document.getElementById(id).getBoundingClientRect().y
    return 0 < y && y < height
}"""


def test_links_and_paper_open_an_appendix(visit):
    """A key closes it; a link to its heading, or to a place in it, opens it; paper shows it."""
    heading, equation = "appendix-what-is-stored-on-the-way", "equation-eq-03-binomial"
    v = visit()
    tab = v.go(f"chapters/03_solve.html#{heading}")
    fold = tab.locator("details.appendix")
    for link in (None, heading, equation):  # the address that led here; the same again; another
        if link:
            put = "a => { document.querySelector('article p').innerHTML = a }"
            tab.evaluate(put, f"<a href='#{link}'>it</a>")
            tab.locator("article p a").first.click()
        tab.wait_for_function(f"() => ({OPEN})()[0]")
        tab.wait_for_function(IN_VIEW, arg=[link or heading, DESK["height"]])  # formulas come in
        fold.locator(":scope > summary").press("Enter")
        assert tab.evaluate(OPEN) == [False]

    for event, opens in (("beforeprint", True), ("afterprint", False)):
        tab.evaluate("name => dispatchEvent(new Event(name))", event)
        assert tab.evaluate(OPEN) == [opens]
    # the style sheet does it, too; the other sections would take seconds to print
    height = "() => document.querySelector('details.appendix').getBoundingClientRect().height"
    closed = tab.evaluate(height)
    tab.emulate_media(media="print")
    assert tab.evaluate(height) > 10 * closed
    others = "section section:not(:has(details.appendix), details *)"
    tab.evaluate("x => document.querySelectorAll(x).forEach(e => e.remove())", others)
    paper = PdfReader(io.BytesIO(tab.pdf()))
    text = " ".join(" ".join(page.extract_text() for page in paper.pages).split())
    title = fold.locator("h3").first.text_content().rstrip("#").split()
    assert " ".join(title[1:]) in text
    assert v.errors == []


LONG = "chapters/08_output_bwd.html"  # has hundreds of formulas


def test_formulas_are_set_as_they_come_near(visit):
    """First those around the place that an address leads to, which then stays where it is."""
    v = visit()
    tab = v.tab
    links = soup(LONG).select(".bd-sidebar-secondary a[href^='#']")
    anchor = links[len(links) // 2]["href"]
    # the rest waits until the test lets it go on
    tab.add_init_script(
        "window.later = []; const wait = window.setTimeout; window.setTimeout = (f, ms, ...x) =>"
        " ms || window.now ? wait(f, ms, ...x) : window.later.push([f, x])"
    )
    tab.goto(f"{v.home}/{LONG}{anchor}", wait_until="load")
    tab.evaluate("async () => { await MathJax.startup.promise; await document.fonts.ready }")
    near = """() => { const math = [...document.querySelectorAll('.math')];
      const bare = math.filter(e => !e.querySelector('mjx-container'));
      const inside = e => { const r = e.getBoundingClientRect();
        return r.height > 0 && r.bottom > 0 && r.top < innerHeight; };
      return [math.length, bare.length, bare.filter(inside).length]; }"""
    count, bare, seen = tab.evaluate(near)
    assert count > 400 and bare > count / 2 and seen == 0
    place = "a => document.querySelector(a).getBoundingClientRect().top"
    before = tab.evaluate(place, anchor)
    assert 0 <= before < DESK["height"] / 2
    # rows of half the page above it become as high as their formulas
    tab.evaluate("() => { window.now = true; later.forEach(([f, x]) => f(...x)) }")
    tab.evaluate("() => formulas.done")
    assert tab.evaluate(UNSET) == []
    assert abs(tab.evaluate(place, anchor) - before) < 40
    assert v.errors == []


def test_paper_has_all_formulas_at_once(visit):
    v = visit()
    v.tab.goto(f"{v.home}/{LONG}", wait_until="load")
    v.tab.evaluate("async () => { await MathJax.startup.promise }")
    v.tab.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    bare = "() => document.querySelectorAll('.math:not(:has(mjx-container))').length"
    assert v.tab.evaluate(bare) == 0
    assert v.errors == []


# pages with everything that pages have; `make audit` takes all of them
SEEN = [
    FRONT,
    "book/tested.html",
    "chapters/03_solve.html",
    "search.html",
    "genindex.html",
    "prf-prf.html",
]
GRAVE = ("serious", "critical")


# of formulas in one kind of place, and of words of one kind in listings, three that are seen
# remain; axe takes no single letter for a word
FEW = """() => {
  const all = [...document.querySelectorAll('mjx-container, pre span[class]')], seen = {};
  const read = all.map(e => e.getClientRects().length && e.textContent.trim().length > 1);
  const kinds = all.map(e => [e, e.parentElement, e.parentElement.parentElement]
    .map(box => box.tagName + '.' + box.className).join(' '));
  all.forEach((e, i) => {
    seen[kinds[i]] = (seen[kinds[i]] ?? 0) + (read[i] ? 1 : 0);
    if (!read[i] || seen[kinds[i]] > 3)
      e.replaceWith(e.tagName == 'SPAN' ? e.textContent : 'x');
  }) }"""


def faults(tab):
    """What axe-core finds on a page that is serious or critical, a line a place.

    Colours on their way from the light scheme to the dark one, which the theme lets take a while,
    are none that a reader reads.
    """
    tab.evaluate(
        "document.getAnimations().forEach("
        "a => isFinite(a.effect.getComputedTiming().endTime) ? a.finish() : a.pause())"
    )
    found = Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{v['id']} ({v['impact']}): {' '.join(map(str, node['target']))}\n    {node['html'][:160]}"
        for v in found
        if v["impact"] in GRAVE
        for node in v["nodes"]
    ]


# the desk first: what FEW leaves there is more than a phone shows
SCREENS = [("dark", DESK), ("light", PHONE)] + ([("light", DESK), ("dark", PHONE)] if FULL else [])


@pytest.mark.parametrize("page", PAGES if FULL else SEEN)
def test_audit(page, visit):
    """For a keyboard, a screen reader and weak eyes: nothing serious by axe-core, which looks at
    each colour of each word; of what a page has hundreds of, `make audit` alone shows it all.
    """
    tab = visit().go(page)
    tab.evaluate("document.querySelectorAll('details.appendix').forEach(e => { e.open = true })")
    if not FULL:
        tab.evaluate(FEW)
    for scheme, width in SCREENS:
        tab.set_viewport_size(width)
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_function("x => document.documentElement.dataset.theme == x", arg=scheme)
        tab.wait_for_timeout(LATE)  # then the theme has found the boxes that scroll
        assert faults(tab) == [], (scheme, width)


def test_audit_notices_what_is_wrong(visit):
    tab = visit().go(FRONT)
    tab.evaluate(
        "document.querySelector('article').insertAdjacentHTML('beforeend',"
        ' \'<img src="x.png"><p style="color: #bbb; background: #fff">pale</p>\')'
    )
    assert {f.split()[0] for f in faults(tab)} == {"image-alt", "color-contrast"}


def test_print(tmp_path):
    """Two pages as one PDF: numbers that go on, an outline, links that lead to a place in it."""
    path = tmp_path / "two.pdf"
    pages = ["book/bibliography", "book/tested"]
    command = [sys.executable, "tools/pdf.py", *pages, "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pdf = PdfReader(path)
    numbers = [page.extract_text().split()[0] for page in pdf.pages]
    front = numbers.index("1")
    assert numbers[:front] == ["i", "ii"]
    assert numbers[front:] == [str(n + 1) for n in range(len(pdf.pages) - front)]
    starts = {item.title: pdf.get_destination_page_number(item) for item in titles(pdf.outline)}
    text = pdf.pages[1].extract_text()
    for title in ("Bibliography", "What is tested where"):
        assert title in pdf.pages[starts[title]].extract_text()
        assert re.search(rf"{title}\s+{starts[title] - front + 1}\b", text)
    actions = [
        note.get_object()["/A"]
        for page in pdf.pages
        for note in page.get("/Annots", ())
        if "/A" in note.get_object()
    ]
    assert not [a for a in actions if str(a.get("/URI", "")).startswith("file:")]
    assert any(a["/S"] == "/GoTo" for a in actions)


def titles(outline):
    """The items of an outline, those inside others too."""
    for item in outline:
        yield from titles(item) if isinstance(item, list) else (item,)
