"""One call of a translator: its settings, and its lines of text as sentences of a search.

Words in pieces: where one ends and another may begin.

SentencePiece marks the beginning of a word with `▁`; punctuation and scripts without blanks have no such mark. Of text
that was segmented before, each piece counts as a word. Neither PyTorch nor CTranslate2 is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.system.errors import ConfigError, DataError, out_of_memory, printable
from ziggurat.translate.choice import RuleOptions, SamplingOptions, SearchSettings, Sentence
from ziggurat.translate.hypotheses import IdHypothesis, SourcePart
from ziggurat.translate.length import LengthPenalty
from ziggurat.translate.results import Notices, boundary_ids, check_tag, count_untagged, ends_in_word, in_parts
from ziggurat.translate.scorers import Scorer
from ziggurat.translate.search import search_by_steps
from ziggurat.translate.terminology import Terminology, phrase_ids

# A byte may be part of a letter, a mark belongs to the letter before it.


@dataclass(frozen=True)
class LineExtras:
    """Prefixes and constraints of the lines of one window, and the number of its first line."""

    first: int = 0
    """Number of the first line."""
    prefixes: Sequence[str] = field(default_factory=list)
    """Beginnings of the translations: none at all, or one for each line."""
    constraints: Sequence[Sequence[str]] = field(default_factory=list)
    """Phrases that the translations must contain: none at all, or a list for each line."""
    longest: Sequence[int] = field(default_factory=list)
    """Most tokens of each part of the translations: none at all, or a number for each line."""
    numbered: bool = True
    """Errors name a line's number and the key that sets a limit; to a client of a server both mean nothing."""

    def __post_init__(self) -> None:
        """Raise TypeError for a phrase where a list of phrases belongs: it would be taken letter by letter."""
        if any(isinstance(phrases, str) for phrases in self.constraints):
            raise TypeError("constraints: give a list of phrases for each text, such as [['dog'], []]")

    def asked(self, place: int) -> list[str]:
        """Return the constraints of the line at `place` itself, without those of a terminology."""
        return [phrase for phrase in self.constraints[place] if phrase.strip()] if self.constraints else []


def line_extras(
    line_windows: Iterable[list[str]],
    first: int,
    prefixes: Iterable[str] | None,
    constraints: Iterable[Sequence[str]] | None,
) -> Iterator[tuple[list[str], LineExtras]]:
    """Yield each window of lines with as many prefixes and constraints; the first line has number `first`.

    Raises DataError where there are fewer or more of them than lines.
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
    """Return the next `count` rows, or none where there are no rows at all; `done` were taken before."""
    if rows is None:
        return []
    taken = list(islice(rows, count))
    if len(taken) < count:
        raise DataError(f"{name}: {done + len(taken)} lines, but there are more to translate; they must pair up")
    return taken


class TranslationCall:
    """Settings of one call of a translator, checked, and the search's settings that follow from them.

    Args:
        decoding: the settings.
        source, target: the tokenizers.
        vocabulary_size: rows of the model's output; those beyond the tokenizer's ids only fill up the matrix.
        max_positions: most positions of either side, where the model has such a limit.
        device: where the model is.
        before_step: called before every step of a search.
        tag: put before every source sentence.
        terminology: source terms and their translations.
        constrained: lines have constraints.

    Raises ConfigError for an unknown tag, constraints in a search that cannot meet them, or a banned phrase that is
    blank or that the vocabulary cannot spell.
    """

    def __init__(
        self,
        decoding: DecodingConfig,
        source: Tokenizer,
        target: Tokenizer,
        *,
        vocabulary_size: int,
        max_positions: int | None,
        device: torch.device | str,
        before_step: Callable[[], None],
        tag: str | None,
        terminology: Mapping[str, str] | None,
        constrained: bool,
    ) -> None:
        self.decoding = decoding
        self.source = source
        self.target = target
        self._complete = False
        self.tag: tuple[int, ...] = ()
        check_tag(tag, source.tags)
        if tag is not None:
            self.tag = (source.tags[tag],)
        self.terminology = Terminology(terminology or {})
        if constrained or terminology:
            self._check_constraints()
        self.source_limit = decoding.max_source_pieces
        """Most pieces of a source that is translated in one go."""
        self.target_limit = decoding.max_length.limit
        """Most tokens of a translation, end-of-sentence not counted."""
        self._positions = max_positions
        if max_positions is not None:
            self.source_limit = min(self.source_limit, max(1, max_positions - 1 - len(self.tag)))
            self.target_limit = min(self.target_limit, max_positions - 1)
        # A model may have rows beyond the tokenizer's ids, for which there is no text.
        never = {target.pad, target.bos, *target.tags.values(), *range(target.size, vocabulary_size)}
        beams = decoding.beam_size if decoding.search == "beam" else decoding.mbr or decoding.n_best
        self.settings = SearchSettings(
            beam_size=beams,
            n_best=decoding.mbr or decoding.n_best,
            bos=target.bos,
            eos=target.eos,
            pad=source.pad,
            forbidden=tuple(sorted(never - {target.eos})),
            rules=self._rules(),
            penalty=LengthPenalty.of(decoding.length_penalty),
            endings=decoding.endings,
            groups=decoding.diverse_groups,
            strength=decoding.diverse_strength,
            sampling=SamplingOptions(decoding.temperature, decoding.top_k, decoding.top_p, decoding.epsilon)
            if decoding.search == "sample"
            else None,
            keep_attention=decoding.alignments or decoding.replace_unknown,
            batch_tokens=decoding.batch_tokens,
            batch_sentences=decoding.batch_sentences,
            device=device,
            before_step=before_step,
        )

    def end_words(self, *, complete: bool) -> None:
        """Let the search know where words end; with `complete`, let each prefix end with a whole one."""
        rules = replace(self.settings.rules, boundary=boundary_ids(self.target))
        self.settings = replace(self.settings, rules=rules)
        self._complete = complete

    def search(
        self,
        scorer: Callable[[], Scorer],
        sentences: Sequence[Sentence],
        notices: Notices,
        on_finished: Callable[[int], object],
    ) -> list[list[IdHypothesis]]:
        """Return the results of each sentence, in the order of the input.

        Where memory runs out, what is left is searched for again, from then on half as much at a time; `notices` counts
        it. The results are the same, up to rounding. Raises as `search_by_steps`, and where one sentence is too much.
        """
        # Longest first: little padding, and a batch that does not fit into memory fails at once, not after an hour.
        left = sorted(range(len(sentences)), key=lambda i: -len(sentences[i].source))
        found: dict[int, list[IdHypothesis]] = {}
        while left:
            try:
                for settled in search_by_steps(scorer(), [sentences[i] for i in left], self.settings):
                    found.update((left[place], results) for place, results in settled.items())
                    on_finished(len(settled))
            except Exception as error:  # PyTorch's CPU allocator raises RuntimeError
                longest = max(len(sentences[i].source) for i in left if i not in found)
                if not out_of_memory(error) or not self._halve(len(left) - len(found), longest, notices):
                    raise
            # Out here nothing holds the error any more, in whose frames are the tensors of that search.
            left = [i for i in left if i not in found]
        return [found[i] for i in range(len(sentences))]

    def _halve(self, count: int, longest: int, notices: Notices) -> bool:
        """Let the search take half as many of `count` sentences at a time; return whether that is possible."""
        settings = self.settings
        together = min(count, settings.batch_sentences, settings.batch_tokens // longest)
        if together < 2:
            return False
        tokens = together * longest // 2
        self.settings = replace(settings, batch_tokens=tokens)
        notices.add("too_large", f"memory ran out; the search goes on with `decoding.batch_tokens={tokens}`")
        return True

    def segmented(
        self, texts: Sequence[str], extras: LineExtras, notices: Notices
    ) -> tuple[list[range], list[SourcePart], list[Sentence]]:
        """Return which parts each line has (none: it is blank), all parts, and each as a sentence of a search.

        `notices` counts lines that are not translated in the ordinary way. Raises the DataError of `sentences`.
        """
        owned, parts, sentences = [], list[SourcePart](), list[Sentence]()
        count_untagged(bool(self.tag), texts, self.source, notices)
        found = in_parts(texts, self.source.encode, self.source_limit, notices, self.source.unk)
        for place, (text, new) in enumerate(found):
            owned.append(range(len(parts), len(parts) + len(new)))
            for part, sentence in self.sentences(text, new, place, extras):
                parts.append(part)
                sentences.append(sentence)
        return owned, parts, sentences

    def sentences(
        self, text: str, parts: Sequence[list[int]], place: int, extras: LineExtras
    ) -> Iterator[tuple[SourcePart, Sentence]]:
        """Yield the parts of the line at `place` of the window as sentences of a search.

        The line's prefix and constraints go to the first part, terms to the parts whose source has them. Raises
        DataError where they have more tokens than the model has positions.
        """
        for number, ids in enumerate(parts):
            source = text if len(parts) == 1 else self.source.decode(ids)
            phrases = self.terminology.wanted(source)
            if number == 0:
                phrases = list(dict.fromkeys([*extras.asked(place), *phrases]))
            prefix: tuple[int, ...] = ()
            if number == 0 and extras.prefixes and extras.prefixes[place].strip():
                self._refuse_shortlist("prefixes")
                prefix = tuple(self.target.encode([extras.prefixes[place].replace("\0", " ")])[0])
            line = extras.first + place
            # A hash of seed, line and part: samples must not depend on windows, batches or processes.
            digest = blake2b(f"{self.decoding.seed} {line} {number}".encode(), digest_size=8).digest()
            part = SourcePart(source, self.tag, ids, tuple(phrases))
            limit = extras.longest[place] if extras.longest else self.target_limit
            told = line if extras.numbered else None
            yield part, self._sentence(part, prefix, int.from_bytes(digest, "little"), told, limit)

    def _sentence(self, part: SourcePart, prefix: tuple[int, ...], key: int, line: int | None, limit: int) -> Sentence:
        constraints = tuple(ids for ids in phrase_ids(part.constraints, self.target) if ids) if part.constraints else ()
        rule = self.decoding.max_length
        longest = min(int(rule.ratio * len(part.ids) + rule.extra), self.target_limit, limit)
        needed = len(prefix) + sum(map(len, constraints))
        asked = f"{'the' if line is None else f'line {line + 1}: its'} prefix and constraints have {needed} tokens"
        if self._positions is not None and needed >= self._positions:
            raise DataError(f"{asked}, but the model has {self._positions} positions")
        most = max(rule.limit, self.decoding.max_source_pieces)
        # Prefix and constraints raise the sentence's own limit, and each token is a step: without a bound one line
        # could keep a search busy for ever.
        if needed > most:
            way = "" if line is None else ", or raise `decoding.max_length.limit`"
            raise DataError(f"{asked}, but at most {most} can be asked for; shorten them{way}")
        source = [*self.tag, *part.ids, self.source.eos]
        whole = self._complete and bool(prefix) and ends_in_word(self.target.pieces(prefix[-1:])[0])
        return Sentence(source, max(longest, needed), self.decoding.min_length, prefix, constraints, key, whole)

    def _check_constraints(self) -> None:
        decoding = self.decoding
        self._refuse_shortlist("constraints and terminology")
        if decoding.search == "sample":
            raise ConfigError("constraints and terminology need `decoding.search: beam`; samples are not searched for")
        if decoding.endings != "candidates":
            raise ConfigError("constraints and terminology need `decoding.endings: candidates`")
        if decoding.diverse_groups > 1:
            raise ConfigError("constraints and terminology do not go with `decoding.diverse_groups`; set it to 1")
        if decoding.beam_size == 1:
            raise ConfigError("constraints and terminology need `decoding.beam_size` of at least 2")

    def _refuse_shortlist(self, what: str) -> None:
        """Raise ConfigError where a shortlist could forbid tokens that the call asks for."""
        if self.decoding.shortlist is not None:
            raise ConfigError(f"{what} do not go with `decoding.shortlist`; set it to null")

    def _rules(self) -> RuleOptions:
        decoding = self.decoding
        banned = []
        for phrase, ids in zip(decoding.banned, phrase_ids(decoding.banned, self.target), strict=True):
            if not ids:
                raise ConfigError(
                    f"`decoding.banned`: {printable(phrase)!r} is blank, or the vocabulary cannot spell it: it would "
                    "never be written; leave it out"
                )
            banned.append(ids)
        return RuleOptions(
            banned=tuple(banned),
            no_repeat_ngram_size=decoding.no_repeat_ngram_size,
            repetition_penalty=decoding.repetition_penalty,
            eos_margin=decoding.eos_margin,
            prune=decoding.prune,
        )
