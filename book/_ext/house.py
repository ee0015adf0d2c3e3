"""Small repairs: where "suggest edit" and "[docs]" lead, one search box in place of two."""

import re
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


def docs_links(app, pagename, templatename, context, doctree):
    """Mend viewcode's "[docs]" links on the source of a module.

    One name documented under an alias, such as linattn_edu.chunk_gated_delta_rule, makes viewcode
    write the alias's module before every name of the page.
    """
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    module = pagename.removeprefix("_modules/").replace("/", ".")
    known = {name for name, *_ in app.env.get_domain("py").get_objects()}

    def mend(match):
        full = f"{module}.{match[2].rsplit('.', 1)[-1]}"
        return match[0] if match[2] in known or full not in known else f"{match[1]}#{full}"

    context["body"] = re.sub(r"(\w\.html)#(linattn_edu[\w.]*)", mend, context["body"])


def setup(app):
    """Register with Sphinx."""
    app.connect("config-inited", one_search_box)
    # after pydata_sphinx_theme (500) sets the link; before sphinx_book_theme (501, listed later)
    app.connect("html-page-context", edit_source, priority=501)
    app.connect("html-page-context", docs_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
