"""Marks that a file format or another program leaves in text that was not read in its own format.

Each kind is rare in ordinary text, so even a few lines in a thousand are a sign of damage. The exception is quotation
marks around a text, which most of the lines must have.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_ENTITY = re.compile(
    "&(?:[A-Za-z][A-Za-z0-9]{1,30}|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});| ?& ?(?:amp|quot|apos|lt|gt|nbsp|#[0-9]{1,7}) ?;"
)
_ELEMENTS = (
    "a|abbr|article|aside|b|blockquote|body|br|button|center|code|div|em|figure|font|footer|form|h[1-6]|head|header|html|"
    "i|iframe|img|input|label|link|main|nav|ol|option|p|pre|script|section|select|small|span|strong|style|sub|sup|table|"
    "tbody|td|thead|title|u|ul|video"
)
_LANGUAGES_TOO = "hr|li|th|tr"  # `<tr>` alone may be a tag for Turkish
TAG = re.compile(
    rf"(?:</?(?:{_ELEMENTS})|(?:</|<(?=\w+[\s/]))(?:{_LANGUAGES_TOO}))(?:\s[^<>]*)?/?>|<!--", re.IGNORECASE
)
"""TAG matches a tag of an HTML element that is usual in crawled text, or the start of a comment."""
_ESCAPE = re.compile(r"\\(?:[nrtN](?![a-z])|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[\"'/])")

# The bytes from 128 to 191 in Latin-1 and Windows-1252, and in Windows-1251.
_LATER = "[\u0080-\u00bf" + "".join(bytes([n]).decode("cp1252", "ignore") for n in range(0x80, 0xA0)) + "]"
_LATER_1251 = "[" + "".join(bytes([n]).decode("cp1251", "ignore") for n in range(0x80, 0xC0)) + "]"
# After most first letters, two such characters in a row are required: `é »` in French may have a no-break space.
_MISREAD = re.compile(
    f"[\u00c2\u00c3]{_LATER}|\u00e2[\u0080\u20ac]{_LATER}|\u00f0{_LATER}{{3}}|\ufffd|\u951f\u65a4\u62f7"
    f"|(?:[\u00c4-\u00df]{_LATER}){{2}}|(?:[\u00e0-\u00ef]{_LATER}{{2}}){{2}}|(?:[\u0420\u0421]{_LATER_1251}){{3}}"
)
_MISREAD_FIRST = re.compile("[\u00c2-\u00df\u00e0-\u00f0\u0420\u0421\u951f][^\\x00-\\x7f]|\ufffd")


def _entity(text: str) -> str | None:
    found = (one[0] for one in _ENTITY.finditer(text))
    return next((one for one in found if " " in one or one == "&bar;" or html.unescape(one) != one), None)


def _misread(text: str) -> str | None:
    return found[0] if (found := _MISREAD.search(text)) else None


def _escape(text: str) -> str | None:
    return found[0] if (found := _ESCAPE.search(text)) else None


def _tag(text: str) -> str | None:
    return found[0] if (found := TAG.search(text)) else None


def _quoted(text: str) -> str | None:
    """Return the mark of a quoted CSV field in which inner quotation marks are doubled; None for other text."""
    whole = len(text) > 1 and text[0] == text[-1] == '"' and '"' not in text[1:-1].replace('""', "")
    return '"' if whole else None


def _doubled(text: str) -> str | None:
    pairs = text[1:-1].count('""') if _quoted(text) else 0
    return '""' if pairs and pairs % 2 == 0 else None


@dataclass(frozen=True)
class DamageKind:
    """A kind of marks.

    Attributes:
        found_in: returns the first mark in a text, or None.
        may_be_in: fast test, false for a text that certainly has none.
        said: description of lines that have it, for messages.
        share: share of lines at which they become a sign.
        way_out: what to do with the corpus.
        filter: switch in `data.filters` that mends or drops such lines; "" if there is none.
    """

    found_in: Callable[[str], str | None]
    may_be_in: Callable[[str], object]
    said: str
    way_out: str
    share: float = 0.001
    filter: Literal["repair", "markup", ""] = ""


_REPAIR = "`data.filters.repair: true` mends it"
_MARKUP = "`data.filters.markup: true` drops such pairs"
_READ = "read the file as CSV, and write the texts as they are (TSV has no quotation marks around them)"
KINDS = (
    DamageKind(_entity, re.compile("&").search, "have HTML or XML entities as text", _REPAIR, filter="repair"),
    DamageKind(_misread, _MISREAD_FIRST.search, "have letters that were decoded wrongly", _REPAIR, filter="repair"),
    DamageKind(_tag, re.compile("<").search, "have HTML tags as text", _MARKUP, filter="markup"),
    DamageKind(_escape, re.compile(r"\\").search, "have escapes as text", "read the file in its format"),
    DamageKind(_quoted, re.compile('"').match, "are in quotation marks like CSV fields", _READ, share=0.5),
    DamageKind(
        _doubled, re.compile('"').match, "are in quotation marks with doubled ones inside, like CSV fields", _READ
    ),
)


def marks_of(texts: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield for each text with marks the index of their kind in KINDS, the text's index, and the first mark."""
    for number, mark in enumerate(KINDS):
        for place, text in enumerate(texts):
            if mark.may_be_in(text) and (found := mark.found_in(text)):
                yield number, place, found
