"""Agreement of two sides in what a translation keeps: numbers, punctuation, web and e-mail addresses."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import regex
from numpy.typing import NDArray

Mask = NDArray[np.bool_]

_WORDS = 12
"""Numbers up to this one are often written as words."""

# Digits by `re`, which has the Unicode tables of `unicodedata`: those of `regex` are newer, with digits that have no
# value there. A digit is looked for first, and then what stands before it: `re` finds that in less than half the time.
_GROUPED = re.compile(r"(\d(?<![\d.,]\d)\d{0,2})((?:[.,'’ \u00A0\u202F\u2009]\d{3})+)(?!\d)")
_DIGITS = re.compile(r"\d+")
_URL = regex.compile(r"(?:https?://|ftp://|www\.)[^\s<>\"“”„«»]+", flags=regex.IGNORECASE)
# A name is tried from its first character on alone (or behind the address before, \G), not from each of a long word.
_EMAIL = regex.compile(r"(?:\G|(?<![\p{L}\p{N}._%+-]))[\p{L}\p{N}._%+-]++@[\p{L}\p{N}-]+(?:\.[\p{L}\p{N}-]+)+")
_TRAILING = ".,;:!?)]}'…。，、）」』"

_MARKS = {
    mark: name
    for name, marks in (
        ("stop", ".。．｡।۔။።"),
        ("question", "?？؟\u037e՞"),
        ("exclamation", "!！"),
        ("colon", ":："),
        ("ellipsis", "…"),
        ("quotation", '"“”„‟«»「」『』'),
        ("bracket", "()[]{}（）［］｛｝"),
    )
    for mark in marks
}
_MARK = regex.compile(f"[{regex.escape(''.join(_MARKS), special_only=False)}]")
_GREEK = regex.compile(r"\p{Greek}{2}")
_DOTS = regex.compile(r"\.{2,}")
_INNER = regex.compile(r"(?<=[\p{L}\p{N}])[.:](?=[\p{L}\p{N}])")


def numbers(text: str) -> Counter[str]:
    """Return the numbers of a text by their digits 0 to 9, without leading zeros and separators of thousands.

    The parts of a date, of a time or around a decimal sign are numbers of their own: languages order them as they like.
    """
    grouped = _GROUPED.sub(lambda found: found[1] + "".join(_DIGITS.findall(found[2])), text)
    return Counter(_plain(digits) for digits in _DIGITS.findall(grouped))


def _plain(digits: str) -> str:
    if not digits.isascii():
        digits = "".join(str(unicodedata.digit(digit)) for digit in digits)
    return digits.lstrip("0") or "0"


def number_share(source: str, target: str) -> float:
    """Return the share of the numbers of both texts that have their like on the other side; 1 without any.

    A number up to 12 that has none does not count: it may be a word there.
    """
    first, second = numbers(source), numbers(target)
    common = sum((first & second).values())
    alone = sum(
        n for digits, n in ((first - second) + (second - first)).items() if len(digits) > 2 or int(digits) > _WORDS
    )
    return 2 * common / (2 * common + alone) if alone else 1.0


def unmatched_marks(source: str, target: str) -> int:
    """Return the number of marks of both texts that have none of their sort on the other side.

    Sorts are full stops, question marks, exclamation marks, colons, ellipses, brackets, and quotation marks; a stop or
    colon inside a word or number is none.
    """
    first, second = _marks(source), _marks(target)
    return sum(abs(first[name] - second[name]) for name in first.keys() | second.keys())


def greek_questions(text: str) -> str:
    """Return text with `?` for semicolons if it has a Greek word: there they are question marks."""
    return text.replace(";", "?") if ";" in text and _GREEK.search(text) else text


def _marks(text: str) -> Counter[str]:
    plain = _DOTS.sub("…", _INNER.sub("", greek_questions(text)))
    return Counter(_MARKS[mark] for mark in _MARK.findall(plain))


def web_addresses(text: str) -> Counter[str]:
    """Return the web addresses in a text, in lower case."""
    return Counter(found.lower().rstrip(_TRAILING) for found in _URL.findall(text))


def email_addresses(text: str) -> Counter[str]:
    """Return the e-mail addresses in a text, in lower case."""
    return Counter(found.lower() for found in _EMAIL.findall(text))


def addresses_differ(
    sources: Sequence[str], targets: Sequence[str], find: Callable[[str], Counter[str]], sign: str
) -> Mask:
    """Return a mask of the pairs whose addresses are not the same on both sides; `sign` is in all addresses."""
    drop = np.zeros(len(sources), np.bool_)
    for number, pair in enumerate(zip(sources, targets, strict=True)):
        if any(sign in text for text in pair):
            drop[number] = find(pair[0]) != find(pair[1])
    return drop
