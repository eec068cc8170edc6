"""Translators whose answers are known: each word is changed, words change places, and the alignment is given."""

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
    """Every sentence is its own translation; characters are linked to themselves."""
    return [
        SentenceTranslation(s, [Link(m.start(), m.end(), m.start(), m.end()) for m in re.finditer(r"\S", s)])
        for s in sentences
    ]


def permuting(seed: int | None, *, aligned: bool = True, change: Callable[[str], str] = lambda word: word) -> Translate:
    """Words between blanks change places at random (None: none does), and each is changed by `change`.

    One blank stands between two, as a model writes them.
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
    """Return the word with its ASCII letters in the other case: never the same word, and of the same length."""
    return "".join(c.swapcase() if c.isascii() else c for c in word)


def upper(sentences: list[str]) -> list[SentenceTranslation]:
    """Letters change case; characters are linked to themselves. What must come through does not."""
    return [
        SentenceTranslation(swapped(s), [Link(m.start(), m.end(), m.start(), m.end()) for m in re.finditer(r"\S", s)])
        for s in sentences
    ]


def steps(work: Callable[[], object]) -> int:
    """How many functions `work` calls, of Python and of C: what it takes without a clock, but for loops inside of C."""
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
