"""The book as one PDF, _build/linattn_edu.pdf, printed by Chromium from the pages of `make book`.

Each page of the table of contents is printed by itself, with page numbers that go on; then the
list of contents, whose numbers are known by now, is put in front.  A link to another page of the
book becomes a link to its place in the PDF.  (As one
long page the book takes a browser more than 7 GB.)
"""

import argparse
import html
import io
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import yaml
from notebooks import ROOT, toc_files
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, FloatObject, NameObject

HTML = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "linattn_edu.pdf"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
HIDDEN = (
    "#pst-back-to-top, #pst-skip-link, .bd-header, .bd-header-article, .bd-sidebar-primary, "
    ".bd-sidebar-secondary, .prev-next-footer, .bd-footer, .bd-footer-content, .headerlink, "
    ".copybtn, .toggle-button, details.hide > summary, .la-steps nav, dialog, "
    "#jb-print-docs-body, .pst-async-banner-revealer, .pst-scroll-pixel-helper"
)
STYLE = f"""
@page {{ size: A4; margin: 18mm 16mm 18mm 16mm; @bottom-center {{
  content: counter(page, STYLE); font: 9pt sans-serif; }} }}
html {{ counter-reset: page FIRST; }}
@media print {{
  html {{ font-size: 10.5pt; }}
  * {{ animation: none !important; transition: none !important; }}
  .bd-article h1 {{ display: block !important; }}
  .cell, .cell_input, .cell_output, .output, .highlight, pre, details, .admonition, .solution
    {{ overflow: visible !important; max-height: none !important; break-inside: auto; }}
  {HIDDEN} {{ display: none !important; }}
  .bd-container, .bd-container__inner, .bd-main, .bd-content, .bd-article-container, .bd-article
    {{ display: block !important; max-width: none !important; width: auto !important;
      padding: 0 !important; margin: 0 !important; overflow: visible !important; }}
  pre {{ white-space: pre-wrap !important; font-size: 8pt !important; }}
  table {{ font-size: 8.5pt !important; }}
  .bd-article table.table :is(td, th) {{ white-space: normal !important; min-width: 0 !important; }}
  .bd-article table.table td code, .bd-article table.table td code .pre
    {{ white-space: normal !important; overflow-wrap: anywhere !important; }}
  .highlight a.eq-tag {{ text-decoration: none !important; }}
  h1, h2, h3, h4 {{ break-after: avoid; }}
  svg, img, .math, tr, .admonition-title {{ break-inside: avoid; }}
  .la-steps figure {{ display: block !important; }}
}}
"""
# what is folded is opened; a formula wider than the paper is made smaller; each place that another
# page links to gets a link to itself, without which Chromium writes no place
PREPARE = """([style, anchors]) => {
  document.documentElement.dataset.theme = 'light';
  document.head.insertAdjacentHTML('beforeend', `<style>${style}</style>`);
  document.querySelectorAll('details').forEach(e => { e.open = true });
  document.querySelectorAll('.toggle, .toggle-hidden').forEach(e => {
    e.classList.remove('toggle-hidden'); e.classList.add('toggle-shown') });
  document.querySelectorAll('img').forEach(e => { e.loading = 'eager' });
  const room = 640;
  document.querySelectorAll('mjx-container[display="true"]').forEach(e => {
    const wide = e.scrollWidth;
    if (wide > room) e.style.fontSize = `${Math.floor(95 * room / wide)}%`; });
  const article = document.querySelector('article') || document.body;
  for (const id of anchors) if (document.getElementById(id))
    article.insertAdjacentHTML('beforeend',
      `<a href="#${id}" style="font-size:1px;color:#fff;text-decoration:none">.</a>`);
}"""
LINKS = "() => [...document.querySelectorAll('article a[href]')].map(a => a.href)"


def captions() -> dict[str, str]:
    """The first file of each part -> the part's name."""
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
    return {part["chapters"][0]["file"]: part["caption"] for part in parts}


def book_title() -> str:
    """The title of the book."""
    return yaml.safe_load((ROOT / "_config.yml").read_text())["title"]


class Printer:
    """A browser that prints the pages of the book."""

    def __init__(self, playwright):
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            sys.exit(f"none of {', '.join(BROWSERS)} is installed")
        self.chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)

    def open(self, url: str):
        """A tab with a page, its formulas set."""
        tab = self.chromium.new_page(viewport={"width": 680, "height": 1000}, color_scheme="light")
        tab.set_default_timeout(300_000)
        tab.goto(url, wait_until="load")
        tab.evaluate(
            "async () => { if (window.MathJax?.startup) await MathJax.startup.promise;"
            " await window.formulas?.all(); await document.fonts.ready }"
        )
        return tab

    def links(self, page: str) -> set[str]:
        """Where a page's text leads to."""
        tab = self.chromium.new_page(java_script_enabled=False)
        tab.goto((HTML / page).as_uri(), wait_until="domcontentloaded")
        found = set(tab.evaluate(LINKS))
        tab.close()
        return found

    def print(self, tab, first: int, anchors=(), numbers: str = "decimal") -> PdfReader:
        """The tab as a PDF whose pages are counted from `first`."""
        style = STYLE.replace("FIRST", str(first - 1)).replace("STYLE", numbers)
        tab.evaluate(PREPARE, [style, sorted(anchors)])
        pdf = tab.pdf(prefer_css_page_size=True, outline=True, tagged=True, print_background=True)
        tab.close()
        return PdfReader(io.BytesIO(pdf))


def contents(rows: list[tuple[str, str, int]]) -> str:
    """The title and the list of contents: rows of class, text and page."""
    lines = "".join(
        f'<tr class="{kind}"><td>{html.escape(text)}</td><td>{page or ""}</td></tr>'
        for kind, text, page in rows
    )
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    style = (
        "body{font:11pt 'DejaVu Sans',sans-serif} h1{font-size:26pt;margin:60mm 0 6mm}"
        "h2{break-before:page} table{width:100%;font-size:10.5pt!important}"
        "td:last-child{text-align:right} .part td{font-weight:bold;padding-top:3mm}"
    )
    title = html.escape(book_title())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}"
        f"</style><article><h1>{title}</h1><p>{html.escape(config['author'])}</p>"
        f"<h2>Contents</h2><table>{lines}</table></article></html>"
    )


def join(parts: dict[str, PdfReader], front: PdfReader, titles: dict[str, str]) -> PdfWriter:
    """One PDF of the front and of the parts, with outline and links."""
    writer = PdfWriter()
    writer.append(front, import_outline=False)
    starts, places, count = {}, {}, len(front.pages)
    for page, reader in parts.items():
        starts[page] = count
        for name, place in reader.named_destinations.items():
            places[page, name.lstrip("/")] = (
                count + reader.get_destination_page_number(place),
                place.get("/Left"),
                place.get("/Top"),
            )
        writer.append(reader, import_outline=False)
        count += len(reader.pages)
    heads = captions()
    part = None
    for page in parts:
        file = page.removesuffix(".html")
        if file in heads:
            part = writer.add_outline_item(title=heads[file], page_number=starts[page])
        writer.add_outline_item(title=titles[page], page_number=starts[page], parent=part)
    for page, reader in parts.items():
        for number in range(starts[page], starts[page] + len(reader.pages)):
            for annotation in writer.pages[number].get("/Annots", ()):
                relink(writer, annotation.get_object(), page, starts, places)
    return writer


def relink(writer, annotation, page: str, starts: dict, places: dict) -> None:
    """Let a link to a page of the book lead to its place in the PDF."""
    action = annotation.get("/A", {}).get_object() if "/A" in annotation else {}
    target, anchor = page, str(annotation.get("/Dest", "")).lstrip("/")
    if "/URI" in action:
        url, anchor = urldefrag(str(action["/URI"]))
        target = unquote(url).removeprefix(HTML.as_uri() + "/")
        anchor = unquote(anchor)
        if target not in starts:
            # listings of modules and the general index are not printed
            if url.startswith("file:"):
                annotation.pop("/A")
            return
    elif not anchor:
        return
    number, left, top = places.get((target, anchor), (starts[target], None, None))
    fit = [NameObject("/XYZ"), *(FloatObject(x or 0) for x in (left, top, 0))]
    fit = fit if top is not None else [NameObject("/Fit")]
    dest = ArrayObject([writer.pages[number].indirect_reference, *fit])
    annotation.pop("/A", None)
    annotation.pop("/Dest", None)
    go = {NameObject("/S"): NameObject("/GoTo"), NameObject("/D"): dest}
    annotation[NameObject("/A")] = DictionaryObject(go)


def main() -> int:
    parser = argparse.ArgumentParser(description="print the book to one PDF")
    parser.add_argument("names", nargs="*", help="files of the table of contents; all if none")
    parser.add_argument("--output", type=Path, default=PDF, help="the file to write")
    args = parser.parse_args()
    pages = [f"{name}.html" for name in args.names or toc_files()]
    if absent := [page for page in pages if not (HTML / page).exists()]:
        print(f"`make book` first: _build/html has no {', '.join(absent)}")
        return 1
    from playwright.sync_api import sync_playwright

    start = time.perf_counter()
    parts, titles, rows, first = {}, {}, [], 1
    with sync_playwright() as playwright:
        printer = Printer(playwright)
        wanted = {}
        for page in pages:
            for link in printer.links(page):
                url, anchor = urldefrag(urljoin((HTML / page).as_uri(), link))
                target = unquote(url).removeprefix(HTML.as_uri() + "/")
                wanted.setdefault(target, set()).add(unquote(anchor))
        for i, page in enumerate(pages, 1):
            tab = printer.open((HTML / page).as_uri())
            heading = tab.locator("article h1").first
            titles[page] = " ".join(heading.inner_text().rstrip("#").split())
            parts[page] = printer.print(tab, first, wanted.get(page, set()) - {""})
            file = page.removesuffix(".html")
            rows += [("part", captions()[file], 0)] if file in captions() else []
            rows.append(("", titles[page], first))
            print(f"[{i}/{len(pages)}] {page}  {len(parts[page].pages)} pages", flush=True)
            first += len(parts[page].pages)
        tab = printer.chromium.new_page()
        tab.set_content(contents(rows))
        front = printer.print(tab, 1, numbers="lower-roman")
    writer = join(parts, front, titles)
    writer.add_metadata({"/Title": book_title()})
    writer.compress_identical_objects()
    writer.write(args.output)
    total, size = len(front.pages) + first - 1, args.output.stat().st_size / 2**20
    print(f"{total} pages, {size:.0f} MiB, {time.perf_counter() - start:.0f} s\n{args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
