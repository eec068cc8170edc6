"""Lines of one model that are translated together: in a search that they join, or all at once.

With PyTorch lines join the search that is running (ziggurat.decoding.live); CTranslate2 gets whole batches, and so does
the constrained search, whose size depends on the phrases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ziggurat.decoding.results import Translation
from ziggurat.decoding.served import ServedTranslator
from ziggurat.serving.queue import Job, Options

if TYPE_CHECKING:
    from ziggurat.decoding.translator import Translator

__all__ = ["LineBatch", "batch_of"]


class LineBatch(Protocol):
    """Lines under way in one search."""

    slots: int

    @property
    def jobs(self) -> dict[int, Job]:
        """The lines under way, by ticket."""

    def add(self, job: Job) -> None:
        """Let a line join. Raises ZigguratError for one that cannot be translated."""

    def step(self) -> dict[int, Translation]:
        """Go on; return what is done by ticket, whose jobs are still in `jobs`."""

    def cancel(self, tickets: list[int]) -> None:
        """Take lines out."""


class LiveBatch:
    """Lines in a search of ours, token by token."""

    def __init__(self, translator: Translator, options: Options, slots: int) -> None:
        from ziggurat.decoding.live import LiveTranslation

        self.slots = slots
        self.jobs: dict[int, Job] = {}
        self._live = LiveTranslation(translator, slots=slots, tag=options.tag, **_changes(translator, options))

    def add(self, job: Job) -> None:
        self.jobs[self._live.add(job.text)] = job

    def step(self) -> dict[int, Translation]:
        return self._live.step()

    def cancel(self, tickets: list[int]) -> None:
        self._live.cancel(tickets)


class WholeBatch:
    """Lines that are translated together in one step: by CTranslate2, or with phrases that they must contain."""

    def __init__(self, translator: Translator | ServedTranslator, options: Options, slots: int) -> None:
        self.slots = slots
        self.jobs: dict[int, Job] = {}
        self._translator, self._options, self._next = translator, options, 0

    def add(self, job: Job) -> None:
        self.jobs[self._next] = job
        self._next += 1

    def step(self) -> dict[int, Translation]:
        options, tickets = self._options, list(self.jobs)
        more = _changes(self._translator, options)
        if options.constrained:
            more["constraints"] = [self.jobs[ticket].constraints for ticket in tickets]
        texts = [self.jobs[ticket].text for ticket in tickets]
        found = self._translator.translate(texts, tag=options.tag, **more)
        return dict(zip(tickets, found, strict=True))

    def cancel(self, tickets: list[int]) -> None:
        pass  # it is done in one step


def _changes(translator: Translator | ServedTranslator, options: Options) -> dict[str, Any]:
    """Return the keys of the `decoding` section that these options change."""
    changes: dict[str, Any] = {"n_best": options.n_best}
    if options.n_best > translator.decoding.beam_size:
        changes["beam_size"] = options.n_best
    if options.alignments:
        changes["alignments"] = True
    return changes


def batch_of(translator: Translator | ServedTranslator, options: Options, slots: int) -> LineBatch:
    """Return an empty batch for lines with these options, `slots` of them at a time."""
    if isinstance(translator, ServedTranslator) or options.constrained:
        return WholeBatch(translator, options, slots)
    return LiveBatch(translator, options, slots)
