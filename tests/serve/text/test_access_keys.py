"""Access keys of labels: hidden from the model, and restored in the translation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.text.fakes import identity, upper
from ziggurat.serve.text.documents.access_keys import read_label
from ziggurat.serve.text.documents.kinds import document
from ziggurat.serve.text.files import Settings
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter

SETTINGS = Settings(Options(sentencex_splitter("en")), "en", "de")
LABELS = [
    ("_Open", "Open"),
    ("E_xit", "Exit"),
    ("Save _As...", "Save As..."),
    ("&File", "File"),
    ("Bro&wse…", "Browse…"),
    ("~Close", "Close"),
    ("Find Ne_xt (%s)", "Find Next (%s)"),
    ("(_none)", "(none)"),
    ("Тип _файла", "Тип файла"),
]
OTHERS = [
    "AT&T",
    "R&D",
    "Tom & Jerry",
    "Use file_name",
    "Save &amp; close",
    "__init__",
    "a _b and _c",
    "Zoom _In, &Out",
    "%_d",
    "~/.config",
    "about ~5",
    "_",
    "The column _id of the table is not known in this file",
]


@pytest.mark.parametrize(("source", "shown"), LABELS)
def test_the_model_sees_a_label_without_its_mark(source: str, shown: str) -> None:
    found = read_label(source)
    assert found is not None
    assert found.text == shown
    assert found.translated(shown) == source


@pytest.mark.parametrize("text", OTHERS)
def test_other_signs_stay_text(text: str) -> None:
    assert read_label(text) is None


@pytest.mark.parametrize(
    ("source", "said", "marked"),
    [
        ("_Open", "Öffnen", "_Öffnen"),
        ("E_xit", "„Beenden“", "„_Beenden“"),
        ("Bro&wse…", "%s durchsuchen", "%s &durchsuchen"),
        ("_Open...", "打开...", "打开(_O)..."),
        ("E_xit:", "終了：", "終了(_X)："),
        ("_Open", "42", "42"),
    ],
)
def test_a_translation_has_the_mark_before_a_possible_key(source: str, said: str, marked: str) -> None:
    found = read_label(source)
    assert found is not None
    assert found.translated(said) == marked


def test_labels_of_gettext_are_marked_again() -> None:
    content = (
        'msgid "E_xit <b>now</b>"\nmsgstr ""\n\nmsgid "_File"\nmsgid_plural "_Files"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    )
    asked = list[str]()

    def watched(sentences: list[str]) -> list[SentenceTranslation]:
        asked.extend(sentences)
        return upper(sentences)

    said = run(document(content.encode(), "a.po", SETTINGS), watched).value.decode()
    assert asked == ["E_xit now", "File", "Files"]  # HTML is left unchanged
    assert 'msgstr[0] "_fILE"\nmsgstr[1] "_fILES"' in said
    assert 'msgstr[1] "_Files"' in run(document(content.encode(), "a.po", SETTINGS), identity).value.decode()


@given(
    st.text(st.sampled_from("_&~ aBé漢.%s{}();"), max_size=20), st.text(st.sampled_from("aBé漢 .%s{}…"), max_size=12)
)
def test_no_letter_is_lost(source: str, said: str) -> None:
    if (found := read_label(source)) is not None:
        assert sorted(found.text + found.mark) == sorted(source)
        assert found.translated(found.text) == source
        marked = found.translated(said)
        assert marked.count(found.mark) <= 1
        key = f"({found.mark}{source[source.index(found.mark) + 1].upper()})"
        assert said in (marked.replace(found.mark, ""), marked.replace(key, "")) or said == found.text
