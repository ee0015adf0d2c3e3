"""Small repairs to the theme: where "suggest edit" leads, and one search box in place of two."""

from pathlib import Path


def one_search_box(app, config):
    """Leave the search box in the sidebar, drop the one in a header of its own."""
    config.html_theme_options["navbar_persistent"] = []


def edit_source(app, pagename, templatename, context, doctree):
    """Point "suggest edit" at the .md beside an executed .ipynb."""
    link = context.get("get_edit_provider_and_url")
    if link is None or not Path(app.srcdir, f"{pagename}.md").exists():
        return

    def edit_provider_and_url():
        provider, url = link()
        return provider, url.removesuffix(".ipynb").removesuffix(".md") + ".md"

    context["get_edit_provider_and_url"] = edit_provider_and_url


def setup(app):
    """Register with Sphinx."""
    app.connect("config-inited", one_search_box)
    # after pydata_sphinx_theme (500) sets the link; before sphinx_book_theme (501, listed later)
    app.connect("html-page-context", edit_source, priority=501)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
