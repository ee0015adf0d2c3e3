"""What Sphinx and MyST-NB leave to mend for screen readers and keyboards; `make audit` looks."""

import html
import json
import re
from pathlib import Path

TEXT = re.compile(r"<!-- (.*?) -->")
NUMBER = re.compile(r"[\d.,−–-]+|\$\\mathdefault\{.*\}\$")


def drawn(svg: str) -> str:
    """What a figure of matplotlib says: its texts, which stand in comments, without the ticks."""
    said = [t for t in TEXT.findall(svg) if not NUMBER.fullmatch(t.strip())]
    text = "; ".join(dict.fromkeys(t.replace("$", "").strip() for t in said))
    return f"Figure: {text}" if text else "Figure drawn by the cell above"


def given(app, docname, source):
    """Take what a cell of a chapter says of its figure, `:alt:`, as the alternative text."""
    if not docname.startswith("chapters/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if alt := cell["metadata"].get("alt"):
            cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
    source[0] = json.dumps(notebook)


def alternatives(body: str, images: dict[str, Path]) -> str:
    """Give output images whose alternative text is their file's name the texts drawn in them.

    images: name of the built file -> where it comes from.
    """

    def mend(match):
        path = images.get(match[1])
        if path is None or path.suffix != ".svg":
            return match[0]
        return f'<img alt="{html.escape(drawn(path.read_text(encoding="utf-8")))}"'

    return re.sub(r'<img alt="[^"]*_images/([^"/]+)"', mend, body)


def steps(body: str) -> str:
    """Name the drawing of a step by its caption."""
    form = r'<figure><svg\b(?![^>]*aria-label)(?=[^>]*role="img")(.*?</svg><figcaption>)(.*?)</fig'

    def mend(match):
        label = html.escape(html.unescape(re.sub(r"<[^>]+>", "", match[2])))
        return f'<figure><svg aria-label="{label}"{match[1]}{match[2]}</fig'

    return re.sub(form, mend, body, flags=re.DOTALL)


def lists(body: str) -> str:
    """Lists whose children are none: of citations, and of the parameters of a long signature."""
    body = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
    body = re.sub(r'(<div class="citation" id="[^"]+") role="doc-biblioentry"', r"\1", body)

    def signature(match):
        text = re.sub(r"<dl\b", '<span class="sig-lines"', match[0])
        text = re.sub(r"<dd\b", '<span class="sig-line"', text)
        return re.sub(r"</d[ld]>", "</span>", text)

    return re.sub(r'<dt class="sig .*?</dt>', signature, body, flags=re.DOTALL)


def mend(app, pagename, templatename, context, doctree):
    """Mend a page."""
    if "body" not in context:
        return
    images = {
        name: Path(app.srcdir, source)
        for source, name in getattr(app.builder, "images", {}).items()
    }
    context["body"] = lists(steps(alternatives(context["body"], images)))


def setup(app):
    """Register with Sphinx."""
    app.connect("source-read", given)
    app.connect("html-page-context", mend)
    app.add_js_file("scroll.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
