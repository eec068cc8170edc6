"""Terms of a glossary: where a text has them, and whether a translation has what they should become.

A soft term is left to the search, which may inflect it; a hard one must come out letter by letter
(ziggurat.serve.text.hard_terms). Looking terms up takes time that does not grow with their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from ziggurat.serve.text.protection import occurrences
from ziggurat.system.errors import DataError, printable
from ziggurat.translate.results import UNSPACED_SCRIPTS

MAX_TERM = 200
"""Characters of a term, in either language."""

# In scripts without blanks a term may begin and end next to another letter.
_LETTER = regex.compile(rf"(?![{UNSPACED_SCRIPTS}])\w")
_WORDS = regex.compile(r"\w+|[^\w\s]+")
_SHORT = 2  # letters of a word that is not inflected: `an` is not `and`
_INFLECTED = 2  # letters that an ending may be longer than that of the term


class Term(NamedTuple):
    """A term and what it is to become; `hard`: letter by letter."""

    source: str
    target: str
    hard: bool = False


class Found(NamedTuple):
    """A term in a text, from character `start` to the exclusive `end`."""

    start: int
    end: int
    term: Term


class Terms:
    """The terms of a glossary.

    A term is found as whole words. One in small letters is found in any letter case, one with capitals as it is
    written. Of terms that overlap the first in the text counts, and of those that begin at the same place the longest.

    Args:
        terms: the terms; white space at their ends does not count.

    Raises DataError for a term that is empty, longer than MAX_TERM, of several lines, or there twice.
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        self.terms = [Term(term.source.strip(), term.target.strip(), term.hard) for term in terms]
        self._exact: dict[str, Term] = {}
        self._any_case: dict[str, Term] = {}
        for term in self.terms:
            for text in term[:2]:
                if not text or len(text) > MAX_TERM or len(text.splitlines()) > 1 or "\0" in text:
                    raise DataError(
                        f"the glossary's term {printable(text, 60)!r} is empty, longer than {MAX_TERM} characters or "
                        "has several lines"
                    )
            known = self._any_case if term.source == term.source.lower() else self._exact
            if known.setdefault(term.source, term) is not term:
                raise DataError(f"the glossary has the term {printable(term.source, 60)!r} twice")
        self._lengths = sorted({len(term.source) for term in self.terms}, reverse=True)

    @property
    def soft(self) -> bool:
        """Whether there are soft terms."""
        return any(not term.hard for term in self.terms)

    @property
    def hard(self) -> bool:
        """Whether there are hard terms."""
        return any(term.hard for term in self.terms)

    def found(self, text: str) -> list[Found]:
        """Return the terms in `text`, in order; they do not overlap."""
        lowered = text.lower()
        if len(lowered) != len(text):  # İ becomes two characters: the places would differ
            lowered = text
        found: list[Found] = []
        end = 0
        for start in range(len(text)):
            if start < end or text[start].isspace() or not _is_boundary(text, start):
                continue
            for length in self._lengths:
                stop = start + length
                if stop > len(text) or not _is_boundary(text, stop):
                    continue
                term = self._exact.get(text[start:stop]) or self._any_case.get(lowered[start:stop])
                if term is not None:
                    found.append(Found(start, stop, term))
                    end = stop
                    break
        return found


def _is_boundary(text: str, place: int) -> bool:
    """Return whether a word can begin or end at `place`."""
    inside = 0 < place < len(text)
    return not (inside and _LETTER.match(text[place - 1]) and _LETTER.match(text[place]))


def times(term: Term, translation: str) -> int:
    """Return how often a translation has what a term should become.

    A hard term counts as it is written. Of a soft one the letter case does not count, and each word may have another
    ending: its first letters (all but one of five, all but two of more) must be there, and at most two letters more
    than it has; words of one or two letters must be as they are.
    """
    if term.hard:
        return len(occurrences(term.target, translation))
    return sum(1 for _ in _inflected(term.target).finditer(translation))


@lru_cache(maxsize=4096)
def _inflected(target: str) -> regex.Pattern[str]:
    parts = []
    for found in _WORDS.finditer(target):
        word = found[0]
        if not _LETTER.match(word[0]) or not _LETTER.match(word[-1]):
            parts.append(regex.escape(word))
            continue
        stem = word[: len(word) - min(2, max(0, len(word) - 4))]
        more = len(word) - len(stem) + _INFLECTED if len(word) > _SHORT else 0
        parts.append(rf"(?<!\w){regex.escape(stem)}\w{{0,{more}}}(?!\w)")
    return regex.compile(r"\s*".join(parts), flags=regex.IGNORECASE)


@dataclass
class Tally:
    """Counts of the terms of a text: how often each was found, and how often it is in the translation."""

    found: Counter[Term] = field(default_factory=Counter)
    applied: Counter[Term] = field(default_factory=Counter)

    def count(self, found: Sequence[Found], translation: str) -> None:
        """Count the terms of a sentence, given its translation."""
        left: dict[str, int] = {}  # by target: two terms may become the same
        for term, number in Counter(each.term for each in found).items():
            there = left.setdefault(term.target, times(term, translation))
            self.found[term] += number
            self.applied[term] += min(number, there)
            left[term.target] = max(0, there - number)

    def records(self, terms: Terms) -> list[dict[str, Any]]:
        """Return the counts of these terms as answers of a server have them."""
        return [
            {
                "source": term.source,
                "target": term.target,
                "mode": "hard" if term.hard else "soft",
                "found": self.found[term],
                "applied": self.applied[term],
            }
            for term in terms.terms
        ]
