"""Translators with known answers: each word is changed, words are moved, and the alignment is given."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from types import FrameType

from ziggurat.serve.text.sentences import Link, SentenceTranslation

Translate = Callable[[list[str]], list[SentenceTranslation]]

PART = re.compile(r"\w+|[^\w\s]")
WORD = re.compile(r"\S+")


def identity(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator for which every sentence is its own translation, with characters linked to themselves."""
    return [
        SentenceTranslation(s, [Link(m.start(), m.end(), m.start(), m.end()) for m in re.finditer(r"\S", s)])
        for s in sentences
    ]


def permuting(seed: int | None, *, aligned: bool = True, change: Callable[[str], str] = lambda word: word) -> Translate:
    """A translator that moves words between blanks at random (None: not at all), and changes each by `change`.

    One blank separates two words, as a model writes them.
    """

    def one(text: str) -> SentenceTranslation:
        words = list(WORD.finditer(text))
        order = list(range(len(words)))
        if seed is not None:
            random.Random(f"{seed} {text}").shuffle(order)
        said, links = "", []
        for number in order:
            said += " " if said else ""
            word = change(words[number][0])
            for part in PART.finditer(words[number][0]):
                begin, end = part.span()
                at = words[number].start()
                links.append(Link(at + begin, at + end, len(said) + begin, len(said) + end))
            said += word
        return SentenceTranslation(said, links if aligned else None)

    return lambda sentences: [one(sentence) for sentence in sentences]


def swapped(word: str) -> str:
    """Return the word with its ASCII letters in the other case: a different word of the same length."""
    return "".join(c.swapcase() if c.isascii() else c for c in word)


def upper(sentences: list[str]) -> list[SentenceTranslation]:
    """A translator that changes the case of letters, with characters linked to themselves; protected text stays."""
    return [
        SentenceTranslation(swapped(s), [Link(m.start(), m.end(), m.start(), m.end()) for m in re.finditer(r"\S", s)])
        for s in sentences
    ]


def steps(work: Callable[[], object]) -> int:
    """Return how many Python and C functions `work` calls: its cost without a clock, apart from loops inside C."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
