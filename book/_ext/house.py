"""Small repairs: chapter numbers, links for editing, lines, names, one search box, few icons."""

import functools
import re
from pathlib import Path
from weakref import WeakKeyDictionary

from docutils import nodes
from sphinx.addnodes import only, toctree
from sphinx.builders import html
from sphinx.environment.collectors.toctree import TocTreeCollector


def one_search_box(app, config):
    """Leave the search box in the sidebar, drop the one in a header of its own."""
    config.html_theme_options["navbar_persistent"] = []


def number_by_file(env):
    """Number a chapter as its file: sections, theorems and equations of 08_output_bwd begin with 8.

    Sphinx counts the chapters in the table of contents, where 07 may be missing. A letter stays:
    those of 07b_recurrent_bwd begin with 7b.
    """
    for page, numbers in env.toc_secnumbers.items():
        if found := re.fullmatch(r"chapters/(\d+)([a-z]?)_\w+", page):
            chapter = f"{int(found[1])}{found[2]}"
            for anchor, number in numbers.items():
                numbers[anchor] = number and (chapter, *number[1:])
            for node in (env.titles[page], *env.tocs[page].findall(nodes.reference)):
                if number := node.get("secnumber"):
                    node["secnumber"] = [chapter, *number[1:]]


def between_sections_and_figures(number):
    """Have number(env) called when sections are counted, and figures and equations are not yet."""
    count = TocTreeCollector.assign_figure_numbers

    @functools.wraps(count)
    def assign(self, env):
        number(env)
        return count(self, env)

    TocTreeCollector.assign_figure_numbers = assign


def titles_before_copies():
    """Where a table of contents shows titles alone, have Sphinx copy no more of each page.

    It copies the sections of all pages for the sidebar of each, and then drops them.
    """
    resolve, kept = html.global_toctree_for_doc, WeakKeyDictionary()

    def titles(env):
        """The tables of contents of `env.tocs`, without sections where no page hangs below one."""
        found = {}
        for page, toc in env.tocs.items():
            if next(toc.findall(toctree), None) or next(toc.findall(only), None):
                found[page] = toc
                continue
            found[page] = toc.copy()
            for item in toc:
                found[page] += item.copy()
                found[page][-1] += item[0].deepcopy()
        return found

    @functools.wraps(resolve)
    def quicker(env, docname, builder, collapse=False, titles_only=False, **options):
        options |= {"collapse": collapse, "titles_only": titles_only}
        if not titles_only:
            return resolve(env, docname, builder, **options)
        if env not in kept:
            kept[env] = titles(env)
        whole, env.tocs = env.tocs, kept[env]
        try:
            return resolve(env, docname, builder, **options)
        finally:
            env.tocs = whole

    html.global_toctree_for_doc = quicker


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


EQUATION = re.compile(
    r'\((<a class="reference internal" href="[^"]*#equation-[^"]*">\([\d.]+\)</a>)\)'
)
FORMULA = re.compile(
    r'([(\[“]*)(<span class="math notranslate nohighlight">[^<]*</span>)((?:[.,;:!?)\]”’]|-\w+)*)'
)


def lines(app, pagename, templatename, context, doctree):
    """Keep a formula on one line with the marks around it; print (5.3) for ((5.3))."""

    def bind(match):
        return f'<span class="bound">{match[0]}</span>' if match[1] or match[3] else match[0]

    if "body" in context:
        context["body"] = FORMULA.sub(bind, EQUATION.sub(r"\1", context["body"]))


def names(app, pagename, templatename, context, doctree):
    """Let a long name of the index break after an underscore or a slash: its tables are wide."""

    def mend(match):
        return re.sub(r"(?<=[^_/])([_/])(?=.)", r"\1<wbr>", match[0])

    if pagename == "book/where":
        context["body"] = re.sub(r'(?<=<span class="pre">)[^<]+', mend, context["body"])


# of fontawesome.js: "name":[width,height,[aliases],"code point","path"]
ICON = re.compile(r'"?([\w-]+)"?:\[\d+,\d+,\[([^\]]*)\],"\w+",(?:"[^"]*"|\[[^\]]*\])\],?')


def icons(app, error):
    """Leave the icons that the pages show: a browser reads 1.4 MB of 2000 for every page."""
    path = Path(app.outdir, "_static", "scripts", "fontawesome.js")
    if error or not path.exists():
        return
    pages = {p for end in ("html", "js") for p in Path(app.outdir).rglob(f"*.{end}")} - {path}
    shown = {name for p in pages for name in re.findall(r"\bfa-([\w-]+)", p.read_text("utf-8"))}

    def seen(match):
        return match[0] if shown & {match[1], *re.findall(r'"([^"]+)"', match[2])} else ""

    path.write_text(ICON.sub(seen, path.read_text("utf-8")), "utf-8")


def setup(app):
    """Register with Sphinx."""
    app.connect("config-inited", one_search_box)
    between_sections_and_figures(number_by_file)
    titles_before_copies()
    # after pydata_sphinx_theme (500) sets the link; before sphinx_book_theme (501, listed later)
    app.connect("html-page-context", edit_source, priority=501)
    app.connect("html-page-context", docs_links)
    app.connect("html-page-context", lines)
    app.connect("html-page-context", names)
    app.connect("build-finished", icons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
