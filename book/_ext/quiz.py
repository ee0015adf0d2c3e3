"""A chapter's quiz: book/quiz/NAME.yml becomes a section of its page, before the exercises.

- ask: one paragraph of MyST
  given: Python that runs before `holds`; both are for the tests, no reader sees them
  options:
    - right: the right answer
      why: why it is right
      holds: a Python expression that is True here, and False at a wrong option
    - wrong: another answer, of which any number may have no `holds`
      why: which mistake it is
"""

import json
import re
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[1] / "quiz"
BEFORE = ("## Exercises", "## References")  # the first of these that a chapter has
SECTION = "## Quiz\n\n```{{quiz}} {}\n```\n\n"


def read(name):
    """The questions of a chapter; each option gets `text` and, as a bool, `right`."""
    questions = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    for question in questions:
        for option in question["options"]:
            right = "right" in option
            option["text"] = str(option.pop("right" if right else "wrong")).strip()
            option["right"] = right
    return questions


def insert(app, docname, source):
    """Put the section into the source of a chapter that has a quiz."""
    name = docname.removeprefix("chapters/")
    if not (FOLDER / f"{name}.yml").exists() or name == docname:
        return
    notebook = json.loads(source[0])
    texts = [c for c in notebook["cells"] if c["cell_type"] == "markdown"]
    for heading in BEFORE:
        for cell in texts:
            text = "".join(cell["source"])
            if place := re.search(rf"^{heading}\b", text, re.M):
                start = place.start()
                cell["source"] = text[:start] + SECTION.format(name) + text[start:]
                source[0] = json.dumps(notebook)
                return
    raise ValueError(f"{docname} has none of {BEFORE}: no place for its quiz")


class part(nodes.General, nodes.TextElement):
    """An element of HTML; elsewhere its contents alone."""


def element(tag, *children, **attributes):
    """<tag class="...">children</tag>; a child that is a string is text."""
    children = [nodes.Text(c) if isinstance(c, str) else c for c in children]
    return part("", "", *children, tag=tag, html=attributes)


def open_tag(self, node):
    self.body.append(self.starttag(node, node["tag"], "", **node["html"]))


def close_tag(self, node):
    self.body.append("" if node["tag"] == "input" else f"</{node['tag']}>")


def skip(self, node):
    pass


def end_line(self, node):
    self.body.append("\n\n" if node["tag"] in ("legend", "label", "li", "summary") else " ")


class Quiz(SphinxDirective):
    """{quiz} NAME: the questions of book/quiz/NAME.yml, with the answers folded below each."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        self.env.note_dependency(str(FOLDER / f"{name}.yml"))
        questions = read(name)
        box = nodes.container(classes=["quiz"])
        hint = (
            "What you choose is neither kept nor sent. The answers are folded below each question."
        )
        box += nodes.paragraph("", hint)
        box += [self._question(i, len(questions), q) for i, q in enumerate(questions, 1)]
        return [box]

    def _question(self, number, of, question):
        count = element("span", f"Question {number} of {of} ", CLASS="quiz-number")
        items, answers = [element("legend", count, *self._inline(question["ask"]))], []
        for letter, option in zip("ABCDE", question["options"], strict=False):
            choice = {"type": "radio", "name": f"quiz-{number}", "value": letter}
            letters = element("span", f"{letter} ", CLASS="quiz-letter")
            text = element("span", *self._inline(option["text"]))
            items.append(element("label", element("input", **choice), letters, text))
            verdict = f"{letter} is {'right' if option['right'] else 'wrong'}. "
            reason = element("span", *self._inline(option["why"]), CLASS="quiz-why")
            data = {"data-option": letter, "data-right": str(option["right"]).lower()}
            answers.append(element("li", element("strong", verdict), reason, **data))
        answers = element("ul", *answers)
        items.append(element("details", element("summary", "Answers and reasons"), answers))
        return element("fieldset", *items)

    def _inline(self, text):
        """The nodes of one paragraph of MyST."""
        box = nodes.Element()
        self.state.nested_parse(StringList(text.strip().splitlines(), "quiz"), 0, box)
        if len(box) != 1 or not isinstance(box[0], nodes.paragraph):
            raise self.error(f"a text of a quiz is one paragraph, not: {text}")
        return list(box[0].children)


def setup(app):
    """Register with Sphinx."""
    app.add_node(part, html=(open_tag, close_tag), latex=(skip, end_line))
    app.add_directive("quiz", Quiz)
    app.connect("source-read", insert)
    app.add_js_file("quiz.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
