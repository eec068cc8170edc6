"""Phrases that a translation must contain: terminologies, and constraints of single lines.

This module does not need PyTorch, nor does a command that reads such files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import regex

from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.translate.results import UNSPACED_SCRIPTS

# In scripts without blanks a term may begin and end next to another letter.
_LETTER = regex.compile(rf"(?![{UNSPACED_SCRIPTS}])\w")


class Terminology:
    """Source terms and their translations.

    Args:
        terms: source term -> target term. Case counts. A term matches whole words only; of terms that overlap, the
            first counts, and of those that begin at the same place the longest.

    Raises ConfigError for an empty term.
    """

    def __init__(self, terms: Mapping[str, str]) -> None:
        self.terms = {source.strip(): target.strip() for source, target in terms.items()}
        if not all(self.terms.keys()) or not all(self.terms.values()):
            raise ConfigError("a terminology has terms that are empty")
        # A regular expression takes the first alternative that matches.
        longest_first = sorted(self.terms, key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(_bounded, longest_first))) if self.terms else None

    def wanted(self, source: str) -> list[str]:
        """Return the target terms of the terms in `source`, each once, in the order of the source."""
        if self._pattern is None:
            return []
        return list(dict.fromkeys(self.terms[found[0]] for found in self._pattern.finditer(source)))


def phrase_ids(phrases: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ids of each phrase; no ids for a phrase that the vocabulary cannot spell."""
    encoded = tokenizer.encode([phrase.replace("\0", " ") for phrase in phrases])
    return [() if tokenizer.unk in ids else tuple(ids) for ids in encoded]


def unmet(phrases: Sequence[str], text: str, tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the phrases that `text`, whose ids are `tokens`, does not contain as whole words."""
    missing = []
    for phrase, ids in zip(phrases, phrase_ids(phrases, tokenizer), strict=True):
        places = range(len(tokens) - len(ids) + 1) if ids else ()
        among = any(tuple(tokens[i : i + len(ids)]) == ids for i in places)
        # A phrase that the vocabulary's normalisation writes in another way is not in the text letter by letter: there
        # its pieces count. Where its letters are in the text, but only inside a longer word, it is missing.
        if regex.search(_bounded(phrase), text) is None and (phrase in text or not among):
            missing.append(phrase)
    return missing


def read_constraints(lines: Iterable[str]) -> Iterable[list[str]]:
    """Yield the phrases of each line; tabs separate them, and blank ones are left out."""
    return ([phrase.strip() for phrase in line.split("\t") if phrase.strip()] for line in lines)


def read_terminology(lines: Iterable[str], name: str) -> dict[str, str]:
    """Return source term -> target term of lines `source TAB target`; blank lines are left out.

    Raises DataError, naming file and line, for another number of columns or a source term with two targets.
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
    before = r"(?<!\w)" if _LETTER.match(term[0]) else ""
    after = r"(?!\w)" if _LETTER.match(term[-1]) else ""
    return before + regex.escape(term) + after
