"""Translation of lines that come while others are under way, as a server gets them.

A line joins the search that is running, as soon as there is room; it does not wait for the end of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from itertools import count
from typing import Any, NamedTuple

import torch

from ziggurat.translate.call import LineExtras
from ziggurat.translate.choice import Sentence
from ziggurat.translate.hypotheses import Assembler, IdHypothesis, SourcePart
from ziggurat.translate.results import Translation
from ziggurat.translate.search import Search
from ziggurat.translate.translator import Translator


class _LiveSearch(Search):
    """A search that sentences join and leave while it runs."""

    def add(self, number: int, sentence: Sentence) -> None:
        """Let a sentence without constraints wait behind the others; its `number` must be new."""
        self.sentences[number] = sentence
        self.waiting.add(number, len(sentence.source))

    def remove(self, numbers: Container[int]) -> None:
        """Take sentences out, waiting or live, without results."""
        self.waiting.remove(numbers)
        self.sentences = {number: each for number, each in self.sentences.items() if number not in numbers}
        done = [each.number in numbers for each in self.live]
        if any(done):
            self._leave(done, self.state.tokens)


class _Line(NamedTuple):
    """A line in translation: its parts, and the results of those that are settled."""

    text: str
    numbers: range
    parts: list[SourcePart]
    found: dict[int, list[IdHypothesis]]


class LiveTranslation:
    """Translation by one model, or an ensemble, of lines that come and go, all with the same settings.

    Results are those of `Translator.translate`, up to the rounding that depends on which sentences are live together.
    Nothing here is thread-safe: one thread adds, steps and cancels.

    Args:
        translator: the translator.
        slots: most sentences that are live at a time.
        tag: as in `Translator.translate`.
        complete: whether prefixes end with a whole word; without, their last word may go on.
        decoding: keys of the `decoding` section in place of the configured ones.

    Raises ConfigError as `Translator.translate` does.
    """

    def __init__(
        self, translator: Translator, *, slots: int, tag: str | None = None, complete: bool = False, **decoding: Any
    ) -> None:
        self._call = translator.call_of(tag, **decoding)
        if complete:
            self._call.end_words(complete=True)
        self._notices = translator.notices
        self._assembler = Assembler(translator.source_tokenizer, translator.target_tokenizer, self._call.decoding)
        self._search = _LiveSearch(translator.scorer(), [], self._call.settings, slots)
        self._tickets, self._numbers = count(), count()
        self._lines: dict[int, _Line] = {}  # by ticket
        self._owners: dict[int, int] = {}  # number of a sentence -> ticket
        self._blank: list[int] = []

    @property
    def lines(self) -> int:
        """Number of lines under way."""
        return len(self._lines)

    def add(self, text: str, prefix: str = "") -> int:
        """Let a line join, whose translation begins with `prefix`; return its ticket.

        Raises DataError for a line that cannot be translated, ConfigError for a prefix beside a shortlist.
        """
        ticket = next(self._tickets)
        extras = LineExtras(first=ticket, prefixes=[prefix], numbered=False)
        _, parts, sentences = self._call.segmented([text], extras, self._notices)
        numbers = range(first := next(self._numbers), first + len(sentences))
        for number, sentence in zip(numbers, sentences, strict=True):
            self._search.add(number, sentence)
            self._owners[number] = ticket
        self._numbers = count(numbers.stop)
        self._lines[ticket] = _Line(text, numbers, parts, {})
        if not sentences:
            self._blank.append(ticket)
        return ticket

    @torch.inference_mode()
    def cancel(self, tickets: Collection[int]) -> None:
        """Take lines out, whose translations nobody wants any more; unknown tickets do not matter."""
        lines = [self._lines.pop(ticket) for ticket in tickets if ticket in self._lines]
        numbers = {number for line in lines for number in line.numbers if number in self._owners}
        for number in numbers:
            del self._owners[number]
        if numbers:
            self._search.remove(numbers)

    @torch.inference_mode()
    def step(self) -> dict[int, Translation]:
        """Extend every live hypothesis by one token; return the translations that this completes, by ticket."""
        ended = [ticket for ticket in self._blank if ticket in self._lines]
        self._blank.clear()
        if self._owners:
            for number, results in self._search.step().items():
                ticket = self._owners.pop(number)
                line = self._lines[ticket]
                line.found[number] = results
                if len(line.found) == len(line.numbers):
                    ended.append(ticket)
        return {ticket: self._completed(self._lines.pop(ticket)) for ticket in ended}

    def _completed(self, line: _Line) -> Translation:
        return self._assembler.line(line.text, line.parts, [line.found[number] for number in line.numbers])
