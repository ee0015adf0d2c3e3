"""Small repairs to the theme: "suggest edit" opens a chapter's source."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def edit_source(app, pagename, templatename, context, doctree):
    """Point "suggest edit" at the .md beside an executed .ipynb."""
    link = context.get("get_edit_provider_and_url")
    if link is None or not (ROOT / f"{pagename}.md").exists():
        return

    def edit_provider_and_url():
        provider, url = link()
        return provider, url.removesuffix(".ipynb") + ".md" if url.endswith(".ipynb") else url

    context["get_edit_provider_and_url"] = edit_provider_and_url


def setup(app):
    # after pydata_sphinx_theme (500) has set the link, before sphinx_book_theme (501) reads it
    app.connect("html-page-context", edit_source, priority=500)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
