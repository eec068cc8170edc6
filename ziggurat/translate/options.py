"""The options of a call of a translator, and what belongs to single lines of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from ziggurat.config import DecodingConfig
from ziggurat.system.errors import DataError
from ziggurat.translate.terms import Terms

ARGUMENTS = ("prefixes", "constraints", "tag", "terminology", "scores", "complete", "next_words", "options", "first")
"""ARGUMENTS lists the arguments of `translate` other than its lines and the keys of the `decoding` section."""


@dataclass(frozen=True)
class TranslateOptions:
    """Options of a request, a stream or a job: the same for all of its lines.

    Attributes:
        n_best: number of translations per line; 0: the translator's setting.
        alignments: include token alignments, even if the translator's settings do not.
        scores: include the log-probability of each token; PyTorch's engine always does.
        tag: tag put before every source sentence; None: no tag.
        terms: a terminology for lines that contain its terms, or a glossary that a server applies around the search.
        protect: patterns of text that must stay unchanged, which a server applies around the search.
        prefix: start of each translation, unless lines have separate prefixes.
        complete: whether a prefix ends with a whole word; otherwise its last word may continue.
        next_words: whether the n best differ in the word after the prefix.
        constrained: whether lines have phrases that their translations must contain, whatever the translator's search.
        decoding: further keys of the `decoding` section that replace the translator's.
    """

    n_best: int = 0
    alignments: bool = False
    scores: bool = False
    tag: str | None = None
    terms: Terms | None = None
    protect: tuple[str, ...] = ()
    prefix: str = ""
    complete: bool = False
    next_words: bool = False
    constrained: bool = False
    decoding: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: TranslateOptions | None, asked: Mapping[str, Any]) -> TranslateOptions:
        """Return the options of a call: those `given`, changed by its keywords.

        The keywords are `tag`, `scores`, `complete`, `next_words`, and `terminology` (source term -> target term);
        others are keys of the `decoding` section, which take precedence over `n_best` and `alignments` of `given`.
        """
        options, left = given or cls(), dict(asked)
        own: dict[str, Any] = {key: left.pop(key) for key in ("tag", "scores", "complete", "next_words") if key in left}
        own |= {key: unasked for key, unasked in (("n_best", 0), ("alignments", False)) if left.get(key) is not None}
        if (terms := left.pop("terminology", None)) is not None:
            own["terms"] = Terms.of(terms)
        return replace(options, **own, decoding={**options.decoding, **left})

    @property
    def more(self) -> int:
        """Number of translations per line in addition to the best."""
        return max(0, self.n_best - 1)

    @property
    def begun(self) -> bool:
        """True if the options concern the start of the translation of one sentence."""
        return bool(self.prefix) or self.next_words

    @cached_property
    def key(self) -> tuple[object, bool]:
        """The part that lines must share to be translated together: everything except the words of the prefix."""
        return replace(self, prefix=""), bool(self.prefix)

    def changes(self, own: DecodingConfig) -> dict[str, Any]:
        """Return the keys of the `decoding` section that differ from the translator's settings `own`."""
        changes = dict(self.decoding)
        beam = changes.get("beam_size") or own.beam_size
        if self.n_best:
            changes["n_best"] = self.n_best
            if self.n_best > beam:
                changes["beam_size"] = self.n_best
        if self.constrained:
            changes["beam_size"] = max(2, self.n_best, beam)
            changes |= {"search": "beam", "endings": "candidates", "diverse_groups": 1, "mbr": 0}
        if self.next_words:
            changes |= {"search": "beam", "diverse_groups": 1, "mbr": 0}
        if self.alignments:
            changes["alignments"] = True
        return changes


@dataclass(frozen=True)
class LineExtras:
    """Prefixes and constraints of the lines of one window, and the number of its first line."""

    first: int = 0
    """Number of the first line."""
    prefixes: Sequence[str] = field(default_factory=list)
    """Starts of the translations: empty, or one for each line."""
    constraints: Sequence[Sequence[str]] = field(default_factory=list)
    """Phrases that the translations must contain: empty, or a list for each line."""
    longest: Sequence[int] = field(default_factory=list)
    """Maximum number of tokens of each part of the translations: empty, or a number for each line."""
    numbered: bool = True
    """Whether errors name a line's number and the key that sets a limit, which mean nothing to a server's client."""

    def __post_init__(self) -> None:
        """Raise TypeError for a phrase in place of a list of phrases, which would be read letter by letter."""
        if any(isinstance(phrases, str) for phrases in self.constraints):
            raise TypeError("constraints: give a list of phrases for each text, such as [['dog'], []]")

    def asked(self, place: int) -> list[str]:
        """Return the constraints of the line at index `place`, without those of a terminology."""
        return [phrase for phrase in self.constraints[place] if phrase.strip()] if self.constraints else []


def line_extras(
    line_windows: Iterable[list[str]],
    first: int,
    prefixes: Iterable[str] | None,
    constraints: Iterable[Sequence[str]] | None,
) -> Iterator[tuple[list[str], LineExtras]]:
    """Yield each window of lines with its prefixes and constraints; the first line has number `first`.

    Raises DataError if their numbers differ from that of the lines.
    """
    number = first
    prefix_rows = None if prefixes is None else iter(prefixes)
    constraint_rows = None if constraints is None else iter(constraints)
    for window in line_windows:
        done = number - first
        taken = _taken(prefix_rows, len(window), "prefixes", done)
        yield window, LineExtras(number, taken, _taken(constraint_rows, len(window), "constraints", done))
        number += len(window)
    for name, rows in (("prefixes", prefix_rows), ("constraints", constraint_rows)):
        if rows is not None and next(rows, None) is not None:
            raise DataError(f"{name}: more lines than the {number - first} to translate; they must pair up")


def _taken(rows: Iterator[Any] | None, count: int, name: str, done: int) -> list[Any]:
    """Return the next `count` rows, or none if there are no rows at all; `done` were taken before."""
    if rows is None:
        return []
    taken = list(islice(rows, count))
    if len(taken) < count:
        raise DataError(f"{name}: {done + len(taken)} lines, but there are more to translate; they must pair up")
    return taken
