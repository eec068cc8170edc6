"""One call of a translator: its settings, its lines of text as sentences of a search, and their results.

With `next_words` a line's translations differ in the first word after the prefix. The n best hypotheses of a beam
search mostly differ only in their last words, but a user who chooses the next word of a translation needs the most
likely words instead. They are found in two steps. First, in a beam search, hypotheses end with their word, scored with
the probability that it ends there. Then each word becomes part of the prefix, and the usual search continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch

from ziggurat.config import DecodingConfig
from ziggurat.system.errors import ConfigError, DataError, out_of_memory, printable
from ziggurat.translate.assembly import Assembler, SourcePart
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.options import LineExtras, TranslateOptions
from ziggurat.translate.results import Notices, Translation
from ziggurat.translate.scorers import Scorer
from ziggurat.translate.search import Search, search, search_by_steps
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence
from ziggurat.translate.terms import phrase_ids
from ziggurat.translate.text_lines import boundary_ids, check_tag, count_untagged, ends_in_word, in_parts

if TYPE_CHECKING:
    from ziggurat.translate.translator import Translator

_LONGEST_WORD = 16
"""_LONGEST_WORD is the maximum number of tokens of a next word."""
_WORD_BEAM = 16
"""_WORD_BEAM is the smallest beam size of the search for next words: several pieces may start the same word, or one
piece may start many."""


class TranslationCall:
    """Settings of one call of a translator, checked, and the search's settings that follow from them.

    Args:
        translator: the translator that is called.
        decoding: the settings, including those that `options` change.
        options: options of the translations.
        constrained: whether lines have constraints.

    Raises ConfigError for an unknown tag, constraints in a search that cannot meet them, or a banned phrase that is
    blank or that the vocabulary cannot spell.
    """

    def __init__(
        self,
        translator: Translator,
        decoding: DecodingConfig,
        options: TranslateOptions,
        *,
        constrained: bool,
    ) -> None:
        source, target = translator.source_tokenizer, translator.target_tokenizer
        max_positions = translator.max_positions
        self.n_best = decoding.n_best
        """Number of results of a line."""
        if options.next_words:
            decoding = decoding.model_copy(update={"n_best": 1})
        self.decoding = decoding
        self.options = options
        self.source = source
        self.target = target
        check_tag(options.tag, source.tags)
        self.tag = () if options.tag is None else (source.tags[options.tag],)
        if constrained or (options.terms is not None and options.terms.terms):
            self._check_constraints()
        self.source_limit = decoding.max_source_pieces
        """Maximum number of pieces of a source that is translated in one part."""
        self.target_limit = decoding.max_length.limit
        """Maximum number of tokens of a translation, end-of-sentence not counted."""
        self._positions = max_positions
        if max_positions is not None:
            self.source_limit = min(self.source_limit, max(1, max_positions - 1 - len(self.tag)))
            self.target_limit = min(self.target_limit, max_positions - 1)
        # A model may have rows beyond the tokenizer's ids, which have no text. Exported graphs have none.
        rows = max((model.vocabulary_size for model in translator.models), default=target.size)
        never = {target.pad, target.bos, *target.tags.values(), *range(target.size, rows)}
        if not decoding.writes_unknown:
            never.add(target.unk)
        if decoding.endings == "marian":
            never |= translator.control_bytes
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
            sampling=decoding if decoding.search == "sample" else None,
            keep_attention=decoding.alignments or decoding.replace_unknown,
            batch_tokens=decoding.batch_tokens,
            batch_sentences=decoding.batch_sentences,
            device=translator.device,
            before_step=translator.before_step,
        )

    def search(
        self,
        scorer: Callable[[], Scorer],
        parts: Sequence[SourcePart],
        notices: Notices,
        on_finished: Callable[[int], object],
    ) -> None:
        """Find the results of each part.

        If memory runs out, the rest is searched again with half as much at a time; `notices` counts this. The results
        are the same, up to rounding. Raises as `search_by_steps`, and if a single sentence does not fit.
        """
        # Longest first, for little padding, and so that a batch that does not fit into memory fails at once, not after
        # an hour.
        left = sorted(parts, key=lambda part: -len(part.sentence.source))
        while left:
            try:
                for settled in search_by_steps(scorer(), [part.sentence for part in left], self.settings):
                    for place, results in settled.items():
                        left[place].found = results
                    on_finished(len(settled))
            except Exception as error:  # PyTorch's CPU allocator raises RuntimeError
                lengths = [len(part.sentence.source) for part in left if not part.found]
                if not out_of_memory(error) or not self._halve(len(lengths), max(lengths), notices):
                    raise
            # Outside the handler, so that the error, whose frames hold the tensors of that search, is released.
            left = [part for part in left if not part.found]

    def search_next_words(self, scorer: Callable[[], Scorer], lines: Sequence[Sequence[SourcePart]]) -> None:
        """Find the results of the parts of each line; its first part gets up to `n_best`, whose next words differ.

        They are in the order of the words' probabilities.
        """
        # (1) The next words of the first part of each line.
        beginnings = [line[0] for line in lines if line]
        words = self._next_words(scorer(), [part.sentence for part in beginnings])
        # (2) The continuation of each; other parts as usual.
        wanted = [(part, each) for part, own in zip(beginnings, words, strict=True) for each in own]
        wanted += [(part, part.sentence) for line in lines for part in line[1:]]
        results = search(scorer(), [sentence for _, sentence in wanted], self.settings)
        for (part, _), (best, *_) in zip(wanted, results, strict=True):
            part.found.append(best)

    def _next_words(self, scorer: Scorer, sentences: Sequence[Sentence]) -> list[list[Sentence]]:
        """Return each sentence with up to `n_best` versions of its prefix, most likely first.

        Each version is extended by a different word.
        """
        beams = max(_WORD_BEAM, 2 * self.n_best)
        settings = replace(
            self.settings,
            beam_size=beams,
            n_best=beams,
            rules=replace(self.settings.rules, one_word=True, prune=None, eos_margin=None),
            penalty=LengthPenalty(),
            endings="candidates",
            keep_attention=False,
        )
        asked = [
            replace(each, max_length=min(each.max_length, len(each.prefix) + _LONGEST_WORD), min_length=0)
            for each in sentences
        ]
        listed = []
        for sentence, results in zip(sentences, search(scorer, asked, settings), strict=True):
            by_text = {
                self.target.decode(result.tokens): replace(
                    sentence, prefix=tuple(result.tokens), complete=result.finished
                )
                for result in reversed(results)  # of several spellings of a word, the most likely one is kept
            }
            order = dict.fromkeys(self.target.decode(result.tokens) for result in results)
            listed.append([by_text[text] for text in islice(order, self.n_best)])
        return listed

    def _halve(self, count: int, longest: int, notices: Notices) -> bool:
        """Halve the number of sentences, of `count`, searched at a time; return whether that is possible."""
        settings = self.settings
        together = min(count, settings.batch_sentences, settings.batch_tokens // longest)
        if together < 2:
            return False
        tokens = together * longest // 2
        self.settings = replace(settings, batch_tokens=tokens)
        notices.add("too_large", f"memory ran out; the search continues with `decoding.batch_tokens={tokens}`")
        return True

    def segmented(self, texts: Sequence[str], extras: LineExtras, notices: Notices) -> list[list[SourcePart]]:
        """Return the parts of each line, as sentences of a search; a blank line has none.

        The line's prefix and constraints go to its first part, terms to the parts whose source has them. `notices`
        counts blank and long lines. Raises DataError if they have more tokens than the model has positions.
        """
        count_untagged(bool(self.tag), texts, self.source, notices)
        rows = enumerate(in_parts(texts, self.source.encode, self.source_limit, notices, self.source.unk))
        return [
            [
                self._part(text if len(parts) == 1 else self.source.decode(ids), ids, place, number, extras)
                for number, ids in enumerate(parts)
            ]
            for place, (text, parts) in rows
        ]

    def _part(self, text: str, ids: list[int], place: int, number: int, extras: LineExtras) -> SourcePart:
        phrases = [] if self.options.terms is None else self.options.terms.wanted(text)
        prefix: tuple[int, ...] = ()
        if number == 0:
            asked_for = extras.asked(place)  # a phrase given twice must occur twice; a term need not
            phrases = [*asked_for, *(phrase for phrase in phrases if phrase not in asked_for)]
            beginning = extras.prefixes[place] if extras.prefixes else self.options.prefix
            if beginning.strip():
                self._refuse_shortlist("prefixes")
                prefix = tuple(self.target.encode([beginning.replace("\0", " ")])[0])
        constraints = tuple(ids for ids in phrase_ids(phrases, self.target) if ids) if phrases else ()
        rule, line = self.decoding.max_length, extras.first + place
        limit = extras.longest[place] if extras.longest else self.target_limit
        longest = min(int(rule.ratio * len(ids) + rule.extra), self.target_limit, limit)
        needed = len(prefix) + sum(map(len, constraints))
        whose = f"line {line + 1}: its" if extras.numbered else "the"
        asked = f"{whose} prefix and constraints have {needed} tokens"
        if self._positions is not None and needed >= self._positions:
            raise DataError(f"{asked}, but the model has {self._positions} positions")
        most = max(rule.limit, self.decoding.max_source_pieces)
        # Prefix and constraints raise the sentence's limit, and each token is a step: without a bound, one line could
        # keep a search busy for ever.
        if needed > most:
            way = ", or raise `decoding.max_length.limit`" if extras.numbered else ""
            raise DataError(f"{asked}, but at most {most} are allowed; shorten them{way}")
        # A hash of seed, line and part, because samples must not depend on windows, batches or processes.
        digest = blake2b(f"{self.decoding.seed} {line} {number}".encode(), digest_size=8).digest()
        sentence = Sentence(
            [*self.tag, *ids, self.source.eos],
            max(longest, needed),
            self.decoding.min_length,
            prefix,
            constraints,
            int.from_bytes(digest, "little"),
            self.options.complete and bool(prefix) and ends_in_word(self.target.pieces(prefix[-1:])[0]),
        )
        return SourcePart(text, self.tag, ids, sentence, tuple(phrases))

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
        """Raise ConfigError if a shortlist could forbid tokens that the call requires."""
        if self.decoding.shortlist is not None:
            raise ConfigError(f"{what} do not go with `decoding.shortlist`; set it to null")

    def _rules(self) -> RuleOptions:
        decoding = self.decoding
        banned = []
        spelt = phrase_ids(decoding.banned, self.target) if decoding.banned else []
        for phrase, ids in zip(decoding.banned, spelt, strict=True):
            if not ids:
                raise ConfigError(
                    f"`decoding.banned`: {printable(phrase)!r} is blank, or the vocabulary cannot spell it: it would "
                    "never be written; leave it out",
                    key="decoding.banned",
                )
            banned.append(ids)
        ending = self.options.complete or self.options.next_words
        return RuleOptions(
            boundary=boundary_ids(self.target) if ending else (),
            banned=tuple(banned),
            no_repeat_ngram_size=decoding.no_repeat_ngram_size,
            repetition_penalty=decoding.repetition_penalty,
            eos_margin=decoding.eos_margin,
            prune=decoding.prune,
        )


class ContinuousTranslation:
    """Translation of lines that come and go, by one model or an ensemble, all with the same settings.

    Results are those of `Translator.translate`, up to rounding that depends on which sentences are live together.
    Nothing here is thread-safe: one thread adds, steps and cancels.

    Args:
        translator: the translator.
        options: options of all lines.
        slots: maximum number of live sentences.
        asked: keywords, as for `Translator.translate`.

    Raises ConfigError as `Translator.translate` does.
    """

    def __init__(
        self, translator: Translator, options: TranslateOptions | None = None, *, slots: int, **asked: Any
    ) -> None:
        self._call = translator.call_of(TranslateOptions.of(options, asked))
        self._notices = translator.notices
        self._assembler = Assembler(translator.source_tokenizer, translator.target_tokenizer, self._call.decoding)
        self._search = Search(translator.scorer(), [], self._call.settings, slots)
        self._tickets, self._numbers = count(), count()
        self._lines: dict[int, tuple[str, list[SourcePart]]] = {}  # by ticket
        self._owners: dict[int, tuple[int, SourcePart]] = {}  # number of a sentence -> ticket, part
        self._blank: list[int] = []

    @property
    def lines(self) -> int:
        """Number of lines in progress."""
        return len(self._lines)

    def add(self, text: str, prefix: str = "") -> int:
        """Add a line, whose translation starts with `prefix`; return its ticket.

        Raises DataError for a line that cannot be translated, ConfigError for a prefix with a shortlist.
        """
        ticket = next(self._tickets)
        extras = LineExtras(first=ticket, prefixes=[prefix], numbered=False)
        (parts,) = self._call.segmented([text], extras, self._notices)
        for part in parts:
            number = next(self._numbers)
            self._search.add(number, part.sentence)
            self._owners[number] = (ticket, part)
        self._lines[ticket] = (text, parts)
        if not parts:
            self._blank.append(ticket)
        return ticket

    @torch.inference_mode()
    def cancel(self, tickets: Collection[int]) -> None:
        """Remove lines whose translations are no longer needed; unknown tickets are ignored."""
        for ticket in tickets:
            self._lines.pop(ticket, None)
        numbers = {number for number, (ticket, _) in self._owners.items() if ticket in tickets}
        for number in numbers:
            del self._owners[number]
        if numbers:
            self._search.remove(numbers)

    @torch.inference_mode()
    def step(self) -> dict[int, Translation]:
        """Extend every live hypothesis by one token; return the completed translations by ticket."""
        ended = [ticket for ticket in self._blank if ticket in self._lines]
        self._blank.clear()
        if self._owners:
            for number, results in self._search.step().items():
                ticket, part = self._owners.pop(number)
                part.found = results
                if all(each.found for each in self._lines[ticket][1]):
                    ended.append(ticket)
        return {ticket: self._assembler.line(*self._lines.pop(ticket)) for ticket in ended}
