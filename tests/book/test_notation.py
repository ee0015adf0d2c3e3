"""Part IV: one letter, one meaning; the page of notation has the letters of its chapters."""

import re

import pytest
from book.layout import CHAPTERS, ROOT, toc

PART_IV = [name for name in toc() if 13 <= int(name[:2]) <= 20]
PAGE = (ROOT / "book" / "notation.md").read_text()
LEGEND = PAGE.split("(notation-mamba-2)=")[1].split("(notation-ranks)=")[0]
# letters that mean something else in Part IV, where the number of tokens is L and heads share R
FORBIDDEN = {
    "C as a length": (
        r"(?:[/(]\s*|\\times )C(?![\w}^])"
        r"|(?<![A-Za-z}{])C(?: \\times|\^2| = \d\d|[NP]\b)"
    ),
    "C at the chunk's end": r"g_\{?C",
    "S as scores": r"\\mathbf\{?\s*S",
    "G as groups": r"(?<!\\mathbf\{)(?<!\\mathbf )(?<![A-Za-z])G(?![A-Za-z])",
}  # fmt: skip
LETTERS = {
    "L": "tokens of a chunk",
    "R": "heads of a group",
    "H": "heads;",
    "N": "length of $B_t$ and $C_t$",
    r"\Delta_t": "step:",
    "h_c": "the state that enters chunk $c$",
}


def formulas(text: str) -> list[str]:
    """What stands between dollars, outside of code."""
    text = re.sub(r"^```(?:\{code-cell\}|python|text).*?^```$", "", text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]*`", "", text)
    return [a or b for a, b in re.findall(r"\$\$(.*?)\$\$|\$([^$\n]+)\$", text, re.S)]


@pytest.mark.parametrize("name", PART_IV)
def test_no_letter_has_two_meanings(name):
    text = (CHAPTERS / f"{name}.md").read_text()
    text += "\n\n" + (ROOT / "book" / "quiz" / f"{name}.yml").read_text()
    found = [
        (what, formula.strip())
        for formula in formulas(text)
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, formula)
    ]
    assert found == []


@pytest.mark.parametrize(
    "formula, what",
    [(r"4NP/C", "C as a length"), (r"C \times C", "C as a length"), ("C = 64", "C as a length"),
     (r"2^{\bar g_C - \bar g_j}", "C at the chunk's end"), (r"\mathbf{S} h", "S as scores"),
     (r"N G / H", "G as groups"), ("2CN", "C as a length")],
)  # fmt: skip
def test_what_is_forbidden_is_seen(formula, what):
    assert [name for name, pattern in FORBIDDEN.items() if re.search(pattern, formula)][:1] == [
        what
    ]


@pytest.mark.parametrize("formula", [r"C_i \cdot B_j", r"\mathbf{C} h", r"\mathbf G_{ij}", "q = C"])
def test_what_is_allowed_is_not(formula):
    assert not any(re.search(pattern, formula) for pattern in FORBIDDEN.values())


@pytest.mark.parametrize("letter, meaning", LETTERS.items())
def test_the_page_says_what_a_letter_means(letter, meaning):
    rows = [
        x for x in LEGEND.splitlines() if x.startswith("|") and f"${letter}$" in x.split("|")[1]
    ]
    assert any(meaning in row for row in rows), rows


@pytest.mark.parametrize("name", [n for n in PART_IV if n[:2] != "20"])
def test_letters_are_those_of_the_page(name):
    """Capitals that stand alone in a chapter's formulas have a row, there or in Part I."""
    text = " ".join(formulas((CHAPTERS / f"{name}.md").read_text()))
    text = re.sub(r"\\(?:mathrm|text|operatorname)\{[^}]*\}", " ", text)
    text = re.sub(r"\\begin\{\w+\}|\\end\{\w+\}", " ", text)
    used = set(re.findall(r"(?<![A-Za-z\\{])([A-Z])(?![A-Za-z])", text))
    known = set(re.findall(r"[A-Z]", " ".join(re.findall(r"\$([^$]+)\$", PAGE))))
    assert used <= known, used - known
