"""Which of two texts another one resembles: cheap enough to notice sides that were swapped.

Texts are compared by their character trigrams (Cavnar and Trenkle 1994), by the Bhattacharyya coefficient of the two
distributions: 1 for equal ones, 0 where no trigram is in both. No language is named, so this works for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt

__all__ = ["Sides", "Trigrams", "looks_swapped", "resembles_more"]

_CLEARLY = 1.15
"""Right sides of de-en, fr-en, cs-en, fr-de, cs-de and en-ja corpora of other domains stay below 0.7, swapped ones are
above 1.4, from five lines on; languages that are nearly alike lie between, and are left alone."""

_OF_BLOCK = 200  # lines of each block of a file, so that a sample is not of its beginning only
_MOST_LINES = 2000
_LEAST_TRIGRAMS = 200  # a handful of sentences; fewer tell nothing
_LEAST_LIKENESS = 0.2  # noise resembles nothing


class Trigrams:
    """How often each three characters follow each other in a sample of text, without regard to case."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self.add(lines)

    def add(self, lines: Iterable[str]) -> None:
        """Count more lines."""
        for line in lines:
            text = f" {' '.join(line.lower().split())} "
            self._counts.update(text[i : i + 3] for i in range(len(text) - 2))

    @property
    def total(self) -> int:
        """Trigrams counted."""
        return self._counts.total()

    def likeness(self, other: Trigrams) -> float:
        """Return the Bhattacharyya coefficient, from 0 to 1."""
        few, many = sorted((self, other), key=lambda t: len(t._counts))
        if not few.total:
            return 0.0
        shared = sum(sqrt(n * many._counts[trigram]) for trigram, n in few._counts.items())
        return shared / sqrt(self.total * other.total)


class Sides:
    """A sample of the lines of both sides of a corpus."""

    def __init__(self) -> None:
        self.trigrams = (Trigrams(), Trigrams())
        self.lines = 0
        self.equal = 0
        """Lines that are the same on both sides."""

    def see(self, source: Sequence[str], target: Sequence[str]) -> None:
        """Take some lines of a block."""
        count = min(_OF_BLOCK, _MOST_LINES - self.lines, len(source))
        first, second = source[:count], target[:count]
        self.lines += count
        self.equal += sum(s == t for s, t in zip(first, second, strict=True))
        for trigrams, lines in zip(self.trigrams, (first, second), strict=True):
            trigrams.add(lines)


def looks_swapped(first: tuple[Trigrams, Trigrams], second: tuple[Trigrams, Trigrams]) -> bool:
    """Whether source and target of `second` are clearly more like target and source of `first` than the other way."""
    straight = first[0].likeness(second[0]) + first[1].likeness(second[1])
    crossed = first[0].likeness(second[1]) + first[1].likeness(second[0])
    return _says_something(crossed / 2, *first, *second) and crossed > _CLEARLY * straight


def resembles_more(text: Trigrams, one: Trigrams, other: Trigrams) -> bool:
    """Whether `text` is clearly more like `one` than like `other`."""
    likeness = text.likeness(one)
    return _says_something(likeness, text, one, other) and likeness > _CLEARLY * text.likeness(other)


def _says_something(likeness: float, *texts: Trigrams) -> bool:
    return likeness > _LEAST_LIKENESS and min(text.total for text in texts) >= _LEAST_TRIGRAMS
