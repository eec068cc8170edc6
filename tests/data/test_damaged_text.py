"""Characters that file formats and other programs leave in text."""

from __future__ import annotations

import csv
import html
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_signs import notices
from ziggurat.data.damage import KINDS, marks_of

NAMES = ["entity", "misread", "tag", "escape", "quoted", "doubled"]
WORDS = [
    *("ein", "Haus", "für", "Straße", "«été\u00a0»", "AT&T", "R&D;", "C:\\neu", "日本", "Привет", "“so”", "a_b", "É»"),
]


def kinds(text: str) -> set[str]:
    return {NAMES[kind] for kind, _, _ in marks_of([text])}


ENTITIES = [
    "Tom &amp; Jerry", "&quot;Hi&quot;", "it &apos;s", "&#91; 1 &#93;", "a &lt; b", "&#x27;s", "x&nbsp;y", "&bar;",
    "f&uuml;r", "AT&amp;amp;T", "rock & amp ; roll", "& quot ; a & quot ;", "& #39 ; s", "&#39;s", "&Eacute;t&eacute;",
]  # fmt: skip
MISREAD = [
    *(
        "fÃ¼r",
        "donâ€™t",
        "â€œso",
        "Â£5",
        "Â\u00a0a",
        "ÐŸÑ€Ð¸Ð²ÐµÑ‚",
        "ã\u0081\u0093ã\u0082\u0093",
        "æ—¥æœ¬èªž",
        "naÃ¯ve",
    ),
    *("РџСЂРёРІРµС‚", "ð\u009f\u0098\u0080", "lost \ufffd", "锟斤拷", "â\u0080\u0099", "Å\u0082Ã³dÅº", "Î±Î²"),
]
ESCAPES = [
    *("one\\nTwo", "the end.\\n", "A\\tB", "f\\u00fcr", "\\x27s", 'he said \\"no\\"', "a\\/b", "up\\NDown", "so\\r\\n"),
]
TAGS = [
    '<p class="x">Ein Hund',
    "one<br/>two",
    "see <A HREF='b'>here</A>",
    "a <hr /> b",
    "end</li>",
    "<!-- no -->",
    "<i>so</i>",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((t, "entity") for t in ENTITIES),
        *((t, "misread") for t in MISREAD),
        *((t, "escape") for t in ESCAPES),
        *((t, "tag") for t in TAGS),
    ],
)
def test_marks(text: str, kind: str) -> None:
    assert kinds(text) == {kind}
    found = notices(["plain", f"{text} x", *["plain"] * 8], [*["x"] * 9, f"a {text}"])
    assert len(found) == 2
    assert "1 of 10 source lines" in found[0]
    assert "the first in a.en, line 2" in found[0]
    assert "1 of 10 target lines" in found[1]
    for switch in ("repair", "markup"):
        assert len(notices([text], ["x"], filters={switch: True})) == (KINDS[NAMES.index(kind)].filter != switch)
    assert not notices([text, *["plain"] * 1200], ["x"] * 1201), "an accident"


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join))
def test_plain_text_has_none_until_it_is_written_in_another_way(text: str) -> None:
    assert not kinds(text)
    for raw in (
        "&c; &",
        "&nosuch;",
        "$\\nu$ \\textbf",
        "\\new",
        "5\\6",
        "ÃO",
        "CAFÉ »",
        "РОССИЯ",
        "Â",
        "naïve – é…",
        "<tr> Bir",
        "a < b > c",
        "<2de> x",
        "<3",
    ):
        assert not kinds(raw), raw
    assert ("misread" in kinds(text.encode().decode("latin-1"))) == any(ord(letter) > 127 for letter in text)
    assert ("entity" in kinds(html.escape(text))) == ("&" in text)
    assert ("escape" in kinds(json.dumps(text)[1:-1])) == (not text.isascii())


@given(st.lists(st.sampled_from([*WORDS, '"no"', "a, b"]), min_size=1, max_size=9).map(" ".join))
def test_fields_of_csv(text: str) -> None:
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerow([text])
    field = written.getvalue().rstrip("\r\n")
    assert "quoted" in kinds(field)
    assert ("doubled" in kinds(field)) == ('"' in text)


def test_quotation_marks_around_most_lines() -> None:
    (found,) = notices(['"a"', '"b, c"', "d"], ["x", "y", "z"])
    assert "2 of 3 source lines are in quotation marks" in found
    assert not notices(['"a"', "b", "c"], ["x", "y", "z"]), "speech"
    assert not notices(['"a?" "b."', '"A," he said, "and B"', '"A?""B."'], ["x", "y", "z"])
    (found,) = notices(["a", '"b ""c"" d"', "e"], ["x", "y", "z"])
    assert '`""`' in found


@pytest.mark.parametrize(
    "text", ["&" * 50_000, '"' * 50_001, "\\" * 50_000, "Ã" * 50_000, "& " * 25_000, "РС" * 25_000]
)
def test_hostile_text_hangs_nothing(text: str) -> None:
    """In quadratic time each of these would take minutes."""
    assert all(mark for _, _, mark in marks_of([text]))
