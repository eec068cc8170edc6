"""The two sides of a corpus: does it look as if source and target were swapped, or were the same text?

Texts are compared by their character trigrams (Cavnar and Trenkle 1994), with the Bhattacharyya coefficient of the two
distributions: 1 for equal ones, 0 where they share no trigram. No language is identified, so this works for all of
them. `prepare` samples both sides while it counts them (ziggurat.data.inputs).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path

from ziggurat.system.compressed import compression_of

_CLEARLY = 1.15
"""Ratio of likenesses from which two texts count as clearly more alike.

Measured as crossed / straight likeness, from five lines on: corpora of de-en, fr-en, cs-en, fr-de, cs-de and en-ja from
different domains stay below 0.7 with their sides right and exceed 1.4 with them swapped. Nearly equal languages lie
between, and raise no notice.
"""

_BLOCK_LINES = 200  # lines taken from each block of a file, so that a sample covers more than its beginning
_MOST_LINES = 2000
_LEAST_TRIGRAMS = 200  # a handful of sentences; fewer say nothing
_LEAST_LIKENESS = 0.2  # noise resembles nothing


class Trigrams:
    """Counts of character trigrams in a sample of text, ignoring case."""

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
        """Number of trigrams counted."""
        return self._counts.total()

    def likeness(self, other: Trigrams) -> float:
        """Return the Bhattacharyya coefficient, from 0 to 1."""
        few, many = sorted((self, other), key=lambda t: len(t._counts))
        if not few.total:
            return 0.0
        shared = sum(sqrt(n * many._counts[trigram]) for trigram, n in few._counts.items())
        return shared / sqrt(self.total * other.total)


class SideSample:
    """A sample of the lines of both sides of a corpus."""

    def __init__(self) -> None:
        self.trigrams = (Trigrams(), Trigrams())
        self.lines = 0
        self.equal = 0
        """Sampled lines that are the same on both sides."""

    def see(self, source: Sequence[str], target: Sequence[str]) -> None:
        """Sample the first lines of a block."""
        count = min(_BLOCK_LINES, _MOST_LINES - self.lines, len(source))
        first, second = source[:count], target[:count]
        self.lines += count
        self.equal += sum(s == t for s, t in zip(first, second, strict=True))
        for trigrams, lines in zip(self.trigrams, (first, second), strict=True):
            trigrams.add(lines)


def looks_swapped(first: tuple[Trigrams, Trigrams], second: tuple[Trigrams, Trigrams]) -> bool:
    """Return True if `second`'s (source, target) clearly resemble (target, source) of `first`."""
    straight = first[0].likeness(second[0]) + first[1].likeness(second[1])
    crossed = first[0].likeness(second[1]) + first[1].likeness(second[0])
    return _is_meaningful(crossed / 2, *first, *second) and crossed > _CLEARLY * straight


def resembles_more(text: Trigrams, one: Trigrams, other: Trigrams) -> bool:
    """Return True if `text` is clearly more like `one` than like `other`."""
    likeness = text.likeness(one)
    return _is_meaningful(likeness, text, one, other) and likeness > _CLEARLY * text.likeness(other)


def _is_meaningful(likeness: float, *texts: Trigrams) -> bool:
    return likeness > _LEAST_LIKENESS and min(text.total for text in texts) >= _LEAST_TRIGRAMS


def named_language(path: str) -> str:
    """Return the last part of a text file's name in lower case, by convention its language: `en` of `mono.en.gz`."""
    name = Path(path).with_suffix("") if compression_of(Path(path)) else Path(path)
    return re.split(r"[._-]", name.name)[-1].lower()
