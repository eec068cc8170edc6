"""Typing errors of nine kinds, each one edit of a text: those of OpusTrainer, where the package `typo` makes them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from random import Random

import regex

from ziggurat.data.edits import Edit

# Rows of keyboards from left to right, the upper rows first; each row is half a key to the right of the one above.
_KEYBOARDS = (
    ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("1234567890", "йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("1234567890", "ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
    ("1234567890", "קראטוןםפ", "שדגכעיחלךף", "זסבהנמצתץ"),
    ("1234567890", "ضصثقفغعهخحجد", "شسيبلاتنمكط", "ئءؤرىةوزظ"),
)
_ALIKE = ("0Oo", "1lI", "2Z", "5S", "6b", "8B", "9gq", "uv", "ceo", "nm", "hb", "ij")
"""Characters that look alike."""
_CYRILLIC_ALIKE = ("a\u0430", "e\u0435", "o\u043e", "p\u0440", "c\u0441", "x\u0445")
"""Latin and Cyrillic ones."""

_LETTER = regex.compile(r"[\p{L}\p{N}]")
_NEIGHBOURS = regex.compile(r"[\p{L}\p{N}]{2}", flags=regex.V1)
_INSIDE = regex.compile(r"(?<=[\p{L}\p{N}])(?=[\p{L}\p{N}])")
_DOUBLE = regex.compile(r"([\p{L}\p{N}])\1")
# Each character of these is a word of its own: exchanging two of them is no typing error.
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]")


@cache
def _near() -> dict[str, str]:
    """Return the keys around each key, for small letters and digits."""
    found: dict[str, str] = {}
    for keyboard in _KEYBOARDS:
        for number, row in enumerate(keyboard):
            for place, key in enumerate(row):
                keys = [row[place - 1] if place else "", row[place + 1 : place + 2]]
                above = keyboard[number - 1] if number else ""
                below = keyboard[number + 1] if number + 1 < len(keyboard) else ""
                keys += [above[place : place + 2], below[max(0, place - 1) : place + 1]]
                found.setdefault(key, "".join(keys))
    return found


@cache
def _alike() -> dict[str, str]:
    """Return the other characters of each one's groups."""
    found: dict[str, str] = {}
    for group in (*_ALIKE, *_CYRILLIC_ALIKE):
        for character in group:
            found[character] = found.get(character, "") + group.replace(character, "")
    return found


def _neighbour(character: str, rng: Random) -> str:
    """Return a key next to that of a character, in its case; "" where the keyboard is not known."""
    base = unicodedata.normalize("NFD", character.lower())[0]
    keys = _near().get(base, "")
    key = rng.choice(keys) if keys else ""
    return key.upper() if character.isupper() and len(key.upper()) == 1 else key


def _look_alike(character: str, rng: Random) -> str:
    """Return a character that looks like another one; "" where none is known."""
    base = unicodedata.normalize("NFD", character)[0]
    others = _alike().get(character, "") + (base if base != character else "")
    return rng.choice(others) if others else ""


def _place(pattern: regex.Pattern[str], text: str, rng: Random) -> int | None:
    """Return the place of one match of a pattern; None where there is none."""
    places = [match.start() for match in pattern.finditer(text, overlapped=True)]
    return rng.choice(places) if places else None


def _char_swap(text: str, rng: Random) -> Edit | None:
    at = _place(_NEIGHBOURS, text, rng)
    if at is None or text[at] == text[at + 1] or _UNSPACED.search(text, at, at + 2):
        return None
    return Edit(at, at + 2, text[at + 1] + text[at])


def _missing_char(text: str, rng: Random) -> Edit | None:
    at = _place(_LETTER, text, rng)
    return None if at is None or len(text) == 1 else Edit(at, at + 1, "")


def _one_for(text: str, rng: Random, replacement: Callable[[str], str]) -> Edit | None:
    """Return an edit that puts `replacement(character)`, unless it is "", in place of a random character."""
    at = _place(_LETTER, text, rng)
    new = "" if at is None else replacement(text[at])
    return None if at is None or not new else Edit(at, at + 1, new)


def _extra_char(text: str, rng: Random) -> Edit | None:
    def doubled(character: str) -> str:
        return character + key if (key := _neighbour(character, rng)) else ""

    return _one_for(text, rng, doubled)


def _nearby_char(text: str, rng: Random) -> Edit | None:
    return _one_for(text, rng, lambda character: _neighbour(character, rng))


def _similar_char(text: str, rng: Random) -> Edit | None:
    return _one_for(text, rng, lambda character: _look_alike(character, rng))


def _skipped_space(text: str, rng: Random) -> Edit | None:
    at = _place(regex.compile(" "), text, rng)
    return None if at is None else Edit(at, at + 1, "")


def _random_space(text: str, rng: Random) -> Edit | None:
    at = _place(_INSIDE, text, rng)
    return None if at is None else Edit(at, at, " ")


def _repeated_char(text: str, rng: Random) -> Edit | None:
    return _one_for(text, rng, lambda character: character * 2)


def _unichar(text: str, rng: Random) -> Edit | None:
    at = _place(_DOUBLE, text, rng)
    return None if at is None else Edit(at, at + 2, text[at])


TYPOS: dict[str, Callable[[str, Random], Edit | None]] = {
    "char_swap": _char_swap,
    "missing_char": _missing_char,
    "extra_char": _extra_char,
    "nearby_char": _nearby_char,
    "similar_char": _similar_char,
    "skipped_space": _skipped_space,
    "random_space": _random_space,
    "repeated_char": _repeated_char,
    "unichar": _unichar,
}
"""Kind -> its edit of a text at a random place; None where the text has no such place."""
