"""The hours that reading takes, for the front to say."""

import json
from pathlib import Path

HOURS = "book/_parts/hours.json"  # written by tools/book.py


def hours(app, config):
    """Let pages say {{ hours_maths }}."""
    counted = json.loads(Path(app.srcdir, HOURS).read_text())
    config.myst_substitutions = {f"hours_{name}": hours for name, hours in counted.items()}


def setup(app):
    """Register with Sphinx."""
    app.connect("config-inited", hours)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
