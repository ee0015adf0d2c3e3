"""What a page begins with: the hours on the front, and in a chapter its idea before any set-up."""

import json
import re
from pathlib import Path

HOURS = "book/_parts/hours.json"  # written by tools/book.py
COLAB = '"google.colab" in sys.modules'
SECTION = re.compile(r"^## ", re.M)


def hours(app, config):
    """Let pages say {{ hours_maths }}."""
    counted = json.loads(Path(app.srcdir, HOURS).read_text())
    config.myst_substitutions = {f"hours_{name}": hours for name, hours in counted.items()}


def idea_first(cells):
    """The cells of a chapter in the order of its page.

    The cells of code above the first section stand folded at its end, and the one that does
    nothing but on Colab in the notebook alone.
    """
    found, moved, sections = [], [], 0
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and not sections:
            moved += [] if COLAB in text else [folded(cell)]
            continue
        places = [m.start() for m in SECTION.finditer(text)] if cell["cell_type"] != "code" else []
        if sections < 2 <= sections + len(places):
            before, after = text[: places[1 - sections]], text[places[1 - sections] :]
            found += [cell | {"source": before, "id": "idea"}] if before.strip() else []
            found += moved
            moved, cell = [], cell | {"source": after}
        sections += len(places)
        found.append(cell)
    return [*found, *moved]


def folded(cell):
    """A cell with its code behind a bar."""
    tags = cell["metadata"].get("tags", [])
    more = [] if {"hide-input", "hide-cell"} & set(tags) else ["hide-input"]
    return cell | {"metadata": cell["metadata"] | {"tags": [*tags, *more]}}


def reorder(app, docname, source):
    """Do so with a notebook."""
    if docname.startswith("chapters/"):
        notebook = json.loads(source[0])
        notebook["cells"] = idea_first(notebook["cells"])
        source[0] = json.dumps(notebook)


def setup(app):
    """Register with Sphinx."""
    app.connect("config-inited", hours)
    app.connect("source-read", reorder)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
