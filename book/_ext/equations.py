"""Tags of the code, as # eq:delta-v-new, lead to their equations and back; search finds labels."""

import html
import re

from docutils import nodes
from sphinx.domains import ObjType
from sphinx.domains.math import MathDomain
from sphinx.util.nodes import make_id

TAG = re.compile(r"\beq:[\w-]+")


class Equations(MathDomain):
    """Labelled equations as objects, which the search knows by name as it knows functions."""

    object_types = {"equation": ObjType("equation", "eq")}  # noqa: RUF012 - as in Sphinx

    def get_objects(self):
        """Name, name shown, type, page, anchor and priority (0: the first) of each."""
        for label, (page, _) in self.equations.items():
            yield label, label, "equation", page, f"equation-{nodes.make_id(label)}", 0


def collect(app, doctree):
    """Keep the TeX of every labelled equation, and where a listing of the package has its tag."""
    env = app.env
    tex = env.__dict__.setdefault("equation_tex", {})
    listings = env.__dict__.setdefault("equation_listings", {})
    for node in doctree.findall(nodes.math_block):
        if node.get("label"):
            tex[node["label"]] = node.astext()
    for node in doctree.findall(nodes.literal_block):
        around = node.parent.children
        above = around[around.index(node) - 1].astext() if around.index(node) else ""
        path = re.fullmatch(r"linattn_edu/(\S+\.py)(, a part of \w+)?", above.strip())
        if not path or not (tags := TAG.findall(node.astext())):
            continue
        anchor = make_id(env, doctree, "listing", path[1].removesuffix(".py").replace("/", "-"))
        node["ids"].append(anchor)
        for tag in tags:
            listings.setdefault(tag, {}).setdefault(path[1], (env.docname, anchor))


def link_code(app, doctree, docname):
    """Below a labelled equation, name the files in whose listings its tag stands."""
    for node in list(doctree.findall(nodes.math_block)):
        files = app.env.equation_listings.get(node.get("label"), {})
        if not files:
            continue
        line = nodes.paragraph("", "In code: ", classes=["eq-code"])
        # the reference is the specification: it comes first
        for i, path in enumerate(sorted(files, reverse=True)):
            page, anchor = files[path]
            uri = app.builder.get_relative_uri(docname, page) if page != docname else ""
            line += [nodes.Text(", ")] if i else []
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{anchor}")
            line += link
            link += nodes.literal("", path)
        node.parent.insert(node.parent.index(node) + 1, line)


def link_equations(app, pagename, templatename, context, doctree):
    """Make each tag in a highlighted comment a link that carries its equation."""
    if doctree is None or "body" not in context:
        return
    env = app.env
    equations = env.get_domain("math").equations

    def link(match):
        label = match[0]
        if label not in equations or label not in env.equation_tex:
            return label
        page, anchor = equations[label][0], "equation-" + nodes.make_id(label)
        uri = app.builder.get_relative_uri(pagename, page) if page != pagename else ""
        number = env.toc_fignumbers.get(page, {}).get("displaymath", {}).get(anchor, ())
        where = f"({'.'.join(map(str, number))}) {env.titles[page].astext()}"
        return (
            f'<a class="eq-tag" href="{uri}#{anchor}" data-where="{html.escape(where)}"'
            f' data-tex="{html.escape(env.equation_tex[label])}">{label}</a>'
        )

    context["body"] = re.sub(
        r'(?<=<span class="c1">)[^<]*', lambda m: TAG.sub(link, m[0]), context["body"]
    )


def setup(app):
    """Register with Sphinx."""
    app.add_domain(Equations, override=True)
    app.connect("doctree-read", collect)
    app.connect("doctree-resolved", link_code)
    app.connect("html-page-context", link_equations)
    app.add_js_file("equations.js", loading_method="defer")
    app.add_js_file("formulas.js", loading_method="defer", priority=400)  # before MathJax
    return {"parallel_read_safe": False, "parallel_write_safe": True}
