"""Lines of one model that are translated together: in a search that they join, or all at once.

With PyTorch lines join the search that is running (ziggurat.translate.live); CTranslate2 gets whole batches, and so
does the constrained search, whose size depends on the phrases.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ziggurat.serve.queue import Late, QueuedLine, SearchOptions
from ziggurat.system.errors import ConfigError, ZigguratError
from ziggurat.translate.results import Translation
from ziggurat.translate.served import ServedTranslator

if TYPE_CHECKING:
    from ziggurat.translate.translator import Translator

CONSTRAINED = 8
"""Most lines of a constrained search: its candidates are compared with each other, by the square of their number."""


class LineBatch(Protocol):
    """Lines under way in one search."""

    slots: int

    @property
    def lines(self) -> dict[int, QueuedLine]:
        """The lines under way, by ticket."""

    def add(self, line: QueuedLine) -> None:
        """Let a line join. Raises ZigguratError for one that cannot be translated."""

    def step(self) -> dict[int, Translation]:
        """Go on; return what is done by ticket, whose lines stay in `lines`. Those at fault get an error and leave."""

    def cancel(self, tickets: list[int]) -> None:
        """Take lines out."""


class LiveBatch:
    """Lines in a search of ours, token by token."""

    def __init__(self, translator: Translator, options: SearchOptions, slots: int) -> None:
        from ziggurat.translate.live import LiveTranslation

        self.slots = slots
        self.lines: dict[int, QueuedLine] = {}
        more = _changes(translator, options)
        self._live = LiveTranslation(translator, slots=slots, tag=options.tag, complete=options.complete, **more)

    def add(self, line: QueuedLine) -> None:
        """Add a line."""
        self.lines[self._live.add(line.text, line.prefix)] = line

    def step(self) -> dict[int, Translation]:
        """Go on by a step; return the translations that it ended, by ticket."""
        return self._live.step()

    def cancel(self, tickets: list[int]) -> None:
        """Drop lines that nobody waits for."""
        self._live.cancel(tickets)


class WholeBatch:
    """Lines that are translated together in one step: by CTranslate2, with phrases, or by next word."""

    def __init__(self, translator: Translator | ServedTranslator, options: SearchOptions, slots: int) -> None:
        self.slots = min(slots, CONSTRAINED) if options.constrained or options.next_words else slots
        self.lines: dict[int, QueuedLine] = {}
        self._translator, self._options, self._next = translator, options, 0
        if options.constrained:
            if isinstance(translator, ServedTranslator):
                raise ConfigError(
                    "an exported model cannot search for soft terms; ask for them with `mode: hard`, or serve the "
                    "model that was exported"
                )
            translator.call_of(options.tag, constrained=True, **_changes(translator, options))  # a shortlist forbids it

    def add(self, line: QueuedLine) -> None:
        """Add a line."""
        self.lines[self._next] = line
        self._next += 1

    def step(self) -> dict[int, Translation]:
        """Go on by a step; return the translations that it ended, by ticket."""
        tickets = list(self.lines)
        try:
            return dict(zip(tickets, self._found([self.lines[ticket] for ticket in tickets]), strict=True))
        except ZigguratError as error:
            if len(tickets) == 1:
                self.lines.pop(tickets[0]).finish(error)
                return {}
        done = dict[int, Translation]()
        for ticket in tickets:  # one by one, so that only a line at fault gets the error: others are of other clients
            try:
                (done[ticket],) = self._found([self.lines[ticket]])
            except ZigguratError as error:
                self.lines.pop(ticket).finish(error)
        return done

    def _found(self, lines: list[QueuedLine]) -> list[Translation]:
        """Return the translation of each line. Raises ZigguratError for one at fault, Late where nobody waits."""
        options = self._options
        more = _changes(self._translator, options)
        if options.prefixed:
            more["prefixes"] = [line.prefix for line in lines]
        if isinstance(self._translator, ServedTranslator):
            more |= {"token_scores": options.scores, "next_words": options.next_words, "complete": options.complete}
        else:
            self._translator.before_step = lambda: _refuse_unwanted(lines)
        if options.constrained:
            more["constraints"] = [line.constraints for line in lines]
        try:
            return self._translate([line.text for line in lines], [line.prefix for line in lines], more)
        finally:
            if not isinstance(self._translator, ServedTranslator):
                self._translator.before_step = lambda: None

    def _translate(self, texts: list[str], prefixes: list[str], more: dict[str, Any]) -> list[Translation]:
        translator, options = self._translator, self._options
        if options.next_words and not isinstance(translator, ServedTranslator):
            from ziggurat.translate.next_words import translate_next_words

            return translate_next_words(
                translator, texts, tag=options.tag, complete=options.complete, **{**more, "prefixes": prefixes}
            )
        return translator.translate(texts, tag=options.tag, **more)

    def cancel(self, tickets: list[int]) -> None:
        """Drop lines that nobody waits for."""
        for ticket in tickets:
            self.lines.pop(ticket, None)


def _refuse_unwanted(lines: Sequence[QueuedLine]) -> None:
    """Raise Late where all lines are cancelled or late; called before each step of a search."""
    now = time.monotonic()
    if all(line.cancelled or now > line.deadline for line in lines):
        raise Late("the deadline passed while the line was translated")


def _changes(translator: Translator | ServedTranslator, options: SearchOptions) -> dict[str, Any]:
    """Return the keys of the `decoding` section that these options change."""
    changes: dict[str, Any] = {"n_best": options.n_best}
    if options.n_best > translator.decoding.beam_size:
        changes["beam_size"] = options.n_best
    if options.constrained:  # what a constrained search needs, whatever the model's own search is
        changes["beam_size"] = max(2, options.n_best, translator.decoding.beam_size)
        changes |= {"search": "beam", "endings": "candidates", "diverse_groups": 1, "mbr": 0}
    if options.alignments:
        changes["alignments"] = True
    return changes


def batch_of(
    translator: Translator | ServedTranslator, options: SearchOptions, slots: int, *, aligned: bool = True
) -> LineBatch:
    """Return an empty batch for lines with these options, `slots` of them at a time.

    Where the translator does not tell alignments (not `aligned`), the translations have none.
    """
    if options.alignments and not aligned:
        options = replace(options, alignments=False)
    if isinstance(translator, ServedTranslator) or options.constrained or options.next_words:
        return WholeBatch(translator, options, slots)
    return LiveBatch(translator, options, slots)
