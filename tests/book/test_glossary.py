"""The glossary: one sentence a term, each with a chapter that uses its word."""

import re

import pytest
from book.layout import CHAPTERS, ROOT, toc

TEXT = (ROOT / "book" / "glossary.md").read_text()
BODY = TEXT.split(":sorted:\n\n")[1].split("\n```")[0]
ENTRIES = dict(entry.split("\n  ", 1) for entry in BODY.strip().split("\n\n"))


def test_terms_are_there_once_and_in_order():
    names = re.findall(r"^(?=\S)(.+)$", BODY, re.M)
    assert len(names) == len(ENTRIES) >= 60
    assert names == sorted(names, key=str.lower)


@pytest.mark.parametrize("term", ENTRIES)
def test_entry_is_a_sentence_with_the_chapter_that_uses_the_word(term):
    said = re.fullmatch(
        r"(\S[^\n]*) \(\{doc\}`chapter (\d+[a-z]?) </chapters/(\w+)>`\)\.", ENTRIES[term]
    )
    assert said, "a sentence, then ({doc}`chapter N </chapters/NN_name>`)."
    definition, number, name = said.groups()
    assert name in toc() and name.split("_")[0] == number.zfill(len(name.split("_")[0]))
    assert not re.search(r"[.!?] [A-Z]", definition), "more than one sentence"
    text = (CHAPTERS / f"{name}.md").read_text().lower()
    assert any(word in text for word in term.lower().split() if len(word) > 2)
