"""Phrases that translations must contain: the terms of a glossary or a terminology, and constraints of lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import regex

from ziggurat.data.lines import is_blank
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.translate.results import UNSPACED_SCRIPTS

MAX_TERM = 200
"""MAX_TERM is the maximum number of characters of a glossary's term, in either language."""

LETTER = regex.compile(rf"(?![{UNSPACED_SCRIPTS}])\w")
"""LETTER matches a letter of a word; in scripts without spaces a term may start and end next to another letter."""

_WORD = regex.compile(r"\w")

_FIRST = regex.compile(rf"(?:(?![{UNSPACED_SCRIPTS}])\w)++|.", flags=regex.DOTALL)
"""_FIRST matches the first word of a term or text; in scripts without spaces, and for other characters, the first
character."""


class Term(NamedTuple):
    """A term and its required translation."""

    source: str
    target: str
    mode: Literal["soft", "hard", "constraint"] = "soft"

    @property
    def hard(self) -> bool:
        """True if it must appear exactly as given."""
        return self.mode == "hard"


class Found(NamedTuple):
    """A term in a text, from character `start` to the exclusive `end`."""

    start: int
    end: int
    term: Term


class Terms:
    """The terms of a glossary or a terminology.

    A term matches whole words. A lower-case term matches in any letter case; a term with capitals, and every term of a
    terminology, matches as written. Of overlapping terms the first in the text counts, and of those that start at the
    same position the longest.

    Args:
        terms: the terms; white space at their ends is ignored.

    Raises ConfigError for an empty constraint; DataError for a glossary term that is empty, longer than MAX_TERM, on
    several lines, or given twice.
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        self.terms = [Term(term.source.strip(), term.target.strip(), term.mode) for term in terms]
        self._exact: dict[str, Term] = {}
        self._any_case: dict[str, Term] = {}
        self._beside = LETTER
        for term in self.terms:
            if term.mode == "constraint":
                if not term.source or not term.target:
                    raise ConfigError("a terminology has terms that are empty")
                self._beside = _WORD
                self._exact[term.source] = term
                continue
            for text in term[:2]:
                if is_blank(text) or len(text) > MAX_TERM or len(text.splitlines()) > 1 or "\0" in text:
                    raise DataError(
                        f"the glossary's term {printable(text, 60)!r} is empty, longer than {MAX_TERM} characters or "
                        "has several lines"
                    )
            known = self._any_case if term.source == term.source.lower() else self._exact
            if known.setdefault(term.source, term) is not term:
                raise DataError(f"the glossary has the term {printable(term.source, 60)!r} twice")
        self._lengths: dict[str, list[int]] = {}  # terms that start with the same word, longest first
        for length, first in sorted({(len(term.source), _first(term.source)) for term in self.terms}, reverse=True):
            self._lengths.setdefault(first, []).append(length)

    @classmethod
    def of(cls, terminology: Mapping[str, str]) -> Terms:
        """Return the mapping source term -> target term as constraints."""
        return cls(Term(source, target, "constraint") for source, target in terminology.items())

    def has(self, mode: str) -> bool:
        """Return whether there are terms of this mode."""
        return any(term.mode == mode for term in self.terms)

    def found(self, text: str) -> list[Found]:
        """Return the terms in `text`, in order; they do not overlap."""
        lowered = text.lower()
        if len(lowered) != len(text):  # İ becomes two characters, so offsets would differ
            lowered = text
        found: list[Found] = []
        end = 0
        for start in range(len(text)):
            if start < end or text[start].isspace() or (start and self._inside(text[start], text[start - 1])):
                continue
            for length in self._lengths.get(_first(text, start), ()):
                stop = start + length
                if stop > len(text) or (stop < len(text) and self._inside(text[stop - 1], text[stop])):
                    continue
                term = self._exact.get(text[start:stop]) or self._any_case.get(lowered[start:stop])
                if term is not None:
                    found.append(Found(start, stop, term))
                    end = stop
                    break
        return found

    def wanted(self, text: str) -> list[str]:
        """Return the target terms of the constraints in `text`, each once, in the order of the text."""
        return list(dict.fromkeys(each.term.target for each in self.found(text) if each.term.mode == "constraint"))

    def _inside(self, own: str, beside: str) -> bool:
        """Return whether a term that starts or ends with the character `own` would be part of a longer word."""
        return bool(LETTER.match(own) and self._beside.match(beside))


def _first(text: str, start: int = 0) -> str:
    return _FIRST.match(text, start)[0].lower()


def phrase_ids(phrases: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ids of each phrase; no ids for a phrase that the vocabulary cannot spell."""
    encoded = tokenizer.encode([phrase.replace("\0", " ") for phrase in phrases])
    return [() if tokenizer.unk in ids else tuple(ids) for ids in encoded]


def unmet(phrases: Sequence[str], text: str, tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the phrases that `text`, whose ids are `tokens`, does not contain as whole words.

    A phrase that is given several times is returned as often as it is missing.
    """
    missing: list[str] = []
    asked: Counter[str] = Counter()
    for phrase, ids in zip(phrases, phrase_ids(phrases, tokenizer), strict=True):
        asked[phrase] += 1
        places = range(len(tokens) - len(ids) + 1) if ids else ()
        among = sum(tuple(tokens[i : i + len(ids)]) == ids for i in places) >= asked[phrase]
        # A phrase that the vocabulary's normalisation changes is not in the text literally, so its pieces are compared.
        # If its letters occur in the text only inside a longer word, it is missing.
        whole = len(regex.findall(_bounded(phrase), text)) >= asked[phrase]
        if not whole and (phrase in text or not among):
            missing.append(phrase)
    return missing


def read_constraints(lines: Iterable[str]) -> Iterable[list[str]]:
    """Yield the phrases of each line, separated by tabs; blank ones are left out."""
    return ([phrase.strip() for phrase in line.split("\t") if phrase.strip()] for line in lines)


def read_terminology(lines: Iterable[str], name: str) -> dict[str, str]:
    """Return source term -> target term from lines `source TAB target`; blank lines are skipped.

    Raises DataError, naming file and line, for a wrong number of columns or a source term with two targets.
    """
    terms: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            raise DataError(f"{name}, line {number}: not a source term, a tab and a target term")
        if terms.setdefault(columns[0], columns[1]) != columns[1]:
            raise DataError(f"{name}, line {number}: {printable(columns[0])!r} has another target term already")
    return terms


def _bounded(term: str) -> str:
    """Return a pattern for `term` that does not match inside a longer word."""
    before = r"(?<!\w)" if LETTER.match(term[0]) else ""
    after = r"(?!\w)" if LETTER.match(term[-1]) else ""
    return before + regex.escape(term) + after
