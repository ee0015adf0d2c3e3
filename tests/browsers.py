"""A browser for pages without a server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def chromium() -> Iterator:
    """Where there is none, the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if path is None:
        pytest.skip("no browser")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
