"""A chapter's appendices are folded on its page; a link into one opens it, and so does printing.

The heading stays outside the fold: a heading for screen readers, an entry of the page's table of
contents.  The minutes are those that tools/minutes.py counts.
"""

import json
from pathlib import Path

from docutils import nodes
from quiz import element

TITLE = "Appendix: "
MINUTES = "book/_parts/appendices.json"  # written by tools/book.py


def fold(app, doctree, docname):
    """Put what follows the heading of each appendix into a closed <details>."""
    if app.builder.format != "html" or not docname.startswith("chapters/"):
        return
    takes = json.loads(Path(app.srcdir, MINUTES).read_text())[docname.removeprefix("chapters/")]
    sections = [s for s in doctree.findall(nodes.section) if s[0].astext().startswith(TITLE)]
    for section, minutes in zip(sections, takes, strict=True):
        number = max(1, round(minutes))
        text = f"Read this appendix ({number} minute{'s' if number > 1 else ''})"
        title, *rest = section.children
        section[:] = [title, element("details", element("summary", text), *rest, CLASS="appendix")]


def setup(app):
    """Register with Sphinx."""
    app.connect("doctree-resolved", fold)
    app.add_js_file("appendix.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
