"""Requests to a translator: terms, the options of a call, and the interface of all translators."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar, Literal, NamedTuple

import regex

from ziggurat.config import DecodingConfig
from ziggurat.data.lines import is_blank
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.translate.results import (
    UNSPACED_SCRIPTS,
    WINDOW_LINES,
    Notices,
    TargetScore,
    Translation,
    refuse_single,
    windows,
)

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


class StreamTranslator(ABC):
    """A translator of streams of lines: in this process, or in several.

    Attributes:
        decoding: default search settings of calls.
        origin: description of the weights, for messages.
        target_language: code of the target language; scores may depend on it.
        notices: counts of lines that needed special handling: `blank_lines` (not shown to the model),
            `long_lines` (translated in parts), `unfinished` (cut at the length limit), `unmet` (constraints are
            missing), `untagged` (no tag, although the model has tags of several languages), `tag_as_text` (a tag at the
            start of the text), `in_pieces` (already cut into subword pieces), `unknown` (text that the vocabulary
            lacks); and `too_large`, how often memory ran out, so that the rest of a call was translated in smaller
            batches. The first of each kind gives a warning, except for blank lines.
        on_finished: called with the number of sentences that have just been translated, for a progress bar; a line
            translated in parts counts once per part, a blank line not at all.
        about_precision: returns the chosen precision and, on request, a faster one, which may require measuring.
    """

    decoding: DecodingConfig
    origin: str
    target_language: str

    def __init__(self) -> None:
        self.notices = Notices()
        self.on_finished: Callable[[int], object] = lambda count: None
        self.about_precision: Callable[[bool], str] = lambda hints: ""

    def translate_stream(
        self,
        lines: Iterable[str],
        options: TranslateOptions | None = None,
        *,
        window: int = WINDOW_LINES,
        first: int = 0,
        prefixes: Iterable[str] | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        **asked: Any,
    ) -> Iterator[Translation]:
        """Yield one Translation per line, in order, in memory that does not grow with the number of lines.

        `window` lines are read, sorted by length and translated together, so nothing appears before the
        window is full or the input ends: for a dialogue use `window=1`, for throughput a few thousand. Several workers
        get whole windows, and a few for each are read before the first translation is yielded. Other arguments are as
        in `translate`. If `lines` raises an error, every line before it is translated first.
        """
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)
        tasks = line_extras(windows(lines, window), first, prefixes, constraints)
        options = TranslateOptions.of(options, asked)
        return chain.from_iterable(self._translated(tasks, options, constrained=constraints is not None))

    @abstractmethod
    def _translated(
        self,
        tasks: Iterable[tuple[list[str], LineExtras]],
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> Iterator[list[Translation]]:
        """Yield the translations of windows of lines; `constrained`: lines may have constraints.

        Raises ConfigError immediately for contradictory options.
        """


class TextTranslator(StreamTranslator):
    """A translator of text in this process: by PyTorch (Translator) or by CTranslate2 (CTranslate2Translator).

    Attributes:
        own_search: whether it uses ziggurat.translate.search, which supports required phrases and lines that join a
            running search (ziggurat.translate.call.ContinuousTranslation).
        source_tokenizer, target_tokenizer: tokenizers of the two sides.
        max_positions: maximum number of positions of either side; None: no limit.
        before_step: called before every step of ziggurat's search; an error that it raises ends the translation.
    """

    own_search: ClassVar[bool]
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    max_positions: int | None
    before_step: Callable[[], None]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.origin}>"

    def translate(
        self,
        texts: Sequence[str],
        options: TranslateOptions | None = None,
        *,
        first: int = 0,
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        longest: Sequence[int] | None = None,
        **asked: Any,
    ) -> list[Translation]:
        """Return one Translation per text, in the same order.

        Args:
            texts: lines; a line end inside a text counts as a space.
            options: options of all texts; most calls use keywords instead.
            first: the number of the first text, on which the random numbers of sampling depend.
            prefixes: start of each translation; an empty one leaves it free.
            constraints: phrases that each translation must contain; the result lists those that it lacks.
            longest: maximum number of tokens of each translation, if lower than `decoding.max_length`; for a text
                translated in parts, of each part.
            asked: `tag`: a token such as `<bt>` of the training data, put before every source sentence; `terminology`:
                source terms and their translations, for texts that contain the terms; `next_words`: the n best differ
                in the word after the prefix, or in the first part of a text that is translated in parts; `complete`:
                prefixes end with a whole word, otherwise the next word may be the rest of their last one; others are
                keys of the `decoding` section that replace the configured ones, except `precision` and `shortlist`,
                which are set when a model is opened; None leaves a key unchanged.

        Raises ConfigError for contradictory settings or an unknown tag, DataError if prefixes, constraints or limits do
        not match the texts in number, TypeError for a single string.
        """
        refuse_single(texts=texts, prefixes=prefixes, constraints=constraints)
        texts = list(texts)
        for name, given in (("prefixes", prefixes), ("constraints", constraints), ("longest", longest)):
            if given is not None and len(given) != len(texts):
                raise DataError(f"{len(texts)} texts, but {len(given)} {name}; they must pair up")
        extras = LineExtras(first, prefixes or (), constraints or (), longest or (), numbered=len(texts) > 1)
        options = TranslateOptions.of(options, asked)
        return next(self._translated([(texts, extras)], options, constrained=constraints is not None))

    @abstractmethod
    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, tag: str | None = None, first: int = 0
    ) -> list[TargetScore]:
        """Return the score of each given target. Raises ConfigError if the translator cannot score."""


def tells_alignments(translator: TextTranslator) -> bool:
    """Return whether the translations of this translator come with alignments.

    This translates a word to find out, since the answer depends on every model of an ensemble and, for an export, on
    the version that wrote it.
    """
    kept, translator.notices = translator.notices, Notices()
    try:
        with warnings.catch_warnings(action="ignore"):  # suppress the notice that this word was cut
            best = translator.translate(["a"], alignments=True)[0].hypotheses[0]
    except ConfigError:
        return False
    finally:
        translator.notices = kept
    return best.alignment is not None
