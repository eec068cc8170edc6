"""The thread that translates the lines of one model for all requests: in a shared running search, or batch by batch.

With PyTorch, lines join the running search. CTranslate2 gets whole batches, and so does the constrained search, whose
size depends on the phrases.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from ziggurat.serve.notices import silent_notices
from ziggurat.serve.queue import DeadlineExceeded, FairLock, FairQueue, QueuedLine
from ziggurat.system.errors import ConfigError, ZigguratError, out_of_memory, printable
from ziggurat.translate.interface import TextTranslator
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Translation
from ziggurat.translate.text_lines import count_untagged

if TYPE_CHECKING:
    from ziggurat.translate.call import ContinuousTranslation
    from ziggurat.translate.translator import Translator


CONSTRAINED = 8
"""CONSTRAINED is the maximum number of lines of a constrained search; its cost grows as its candidates squared."""


class LineBatch:
    """Lines in one running search, by ticket.

    They join it while it runs, token by token. With CTranslate2, phrases or next words, they are translated together in
    one step.

    Args:
        translator: translates the lines.
        options: those of the first line; their shared part (`TranslateOptions.key`) holds for all lines.
        most_lines: maximum number of lines at a time.

    Raises ConfigError if the translator cannot do what is requested.
    """

    def __init__(self, translator: TextTranslator, options: TranslateOptions, most_lines: int) -> None:
        one_by_one = bool(options.prefix) and not translator.own_search
        few = options.constrained or options.next_words or one_by_one  # other lines wait during such a search
        self.most_lines = min(most_lines, CONSTRAINED) if few else most_lines
        self.lines: dict[int, QueuedLine] = {}
        self._translator, self._options, self._tickets = translator, options, count()
        self._running: ContinuousTranslation | None = None
        if options.constrained:
            if not translator.own_search:
                raise ConfigError(
                    "an exported model cannot search for soft terms; ask for them with `mode: hard`, or serve the "
                    "model that was exported"
                )
            translator.translate([], options, constraints=[])  # fails with a shortlist
        if translator.own_search and not few:
            from ziggurat.translate.call import ContinuousTranslation

            self._running = ContinuousTranslation(cast("Translator", translator), options, slots=most_lines)

    def add(self, line: QueuedLine) -> None:
        """Add a line. Raises ZigguratError for one that cannot be translated."""
        running = self._running
        ticket = next(self._tickets) if running is None else running.add(line.text, line.options.prefix)
        self.lines[ticket] = line
        notices, tokenizer = silent_notices(), self._translator.source_tokenizer
        count_untagged(bool(line.options.tag), [line.text], tokenizer, notices)
        if tokenizer.unk in tokenizer.encode([line.text])[0]:
            notices["unknown"] += 1
        line.notices.update(notices)

    def cancel(self, tickets: list[int]) -> None:
        """Take lines out."""
        for ticket in tickets:
            self.lines.pop(ticket, None)
        if self._running is not None:
            self._running.cancel(tickets)

    def step(self) -> dict[int, Translation]:
        """Continue; return finished translations by ticket; their lines stay. Failed lines get an error and leave."""
        if self._running is not None:
            return self._running.step()
        done = dict[int, Translation]()
        groups = deque([list(self.lines)])
        while groups:
            tickets = groups.popleft()
            try:
                done |= zip(tickets, self._found([self.lines[ticket] for ticket in tickets]), strict=True)
            except ZigguratError as error:
                if len(tickets) == 1:
                    self.lines.pop(tickets[0]).finish(error)
                else:  # one by one, so that only the faulty line gets the error: others belong to other clients
                    groups.extend([ticket] for ticket in tickets)
        return done

    def _found(self, lines: list[QueuedLine]) -> list[Translation]:
        """Return the translation of each line.

        Raises ZigguratError for a faulty one, DeadlineExceeded if no client is still waiting.
        """
        columns: dict[str, Any] = {}
        if self._options.prefix:
            columns["prefixes"] = [line.options.prefix for line in lines]
        if self._options.constrained:
            columns["constraints"] = [line.constraints for line in lines]
        self._translator.before_step = lambda: _refuse_unwanted(lines)
        try:
            return self._translator.translate([line.text for line in lines], self._options, **columns)
        finally:
            self._translator.before_step = lambda: None


def _refuse_unwanted(lines: Sequence[QueuedLine]) -> None:
    """Raise DeadlineExceeded if all lines are cancelled or late; called before each step of a search."""
    now = time.monotonic()
    if all(line.cancelled or now > line.deadline for line in lines):
        raise DeadlineExceeded("the deadline passed while the line was translated")


MOST_LINES = 64
"""MOST_LINES is the maximum number of lines in a search at a time; it is halved each time that memory runs out."""
_PATIENCE = 0.5
"""_PATIENCE is how many seconds a line with other options waits before the running search stops taking new lines."""
_COLLECT = 0.003
"""_COLLECT is how many seconds lines for CTranslate2 are collected, so that a burst of requests makes one batch."""
_RETRY = (1.0, 60.0)
"""_RETRY are the seconds after which opening a model is tried again: at first, and at most."""
_LOST = 3
"""_LOST is how many failures in a row make a model fail: a GPU's error lasts as long as its process."""
_CHANGED = 2.0
"""_CHANGED is how many seconds pass between checks of whether a model's files have changed."""
_FAILED = "failed while it translated"

_COMPUTING = FairLock()
"""_COMPUTING is held during a step, because models that compute at the same time slow each other down."""


class ModelFailed(ZigguratError):  # noqa: N818 - a state reported to clients
    """The model could not be opened, or failed while it translated."""


@dataclass(frozen=True)
class Opened:
    """An open model.

    Attributes:
        translator: a PyTorch or CTranslate2 translator.
        version: changes when the files do.
        aligned: whether it gives alignments; if not, text with tags is translated without them.
    """

    translator: TextTranslator
    version: object
    aligned: bool = False


@dataclass
class EngineState:
    """State of a model: `cold` (not open), `ready` or `failed`, with the reason; counts since the start."""

    status: str = "cold"
    reason: str = ""
    lines: int = 0
    tokens: int = 0
    steps: int = 0
    live: int = 0
    reloads: int = 0
    failures: int = 0
    aligned: bool | None = None
    """True if the open model gives alignments; None: it was not opened yet."""
    last_used: float = field(default_factory=time.monotonic)


class Engine:
    """A model with its queue, in a separate thread that opens it when the first line arrives.

    Args:
        name: its name in messages and figures.
        opening: opens the model, in the engine's thread; called again when its files have changed.
        version: returns a value that changes when the model's files do; raises ZigguratError while they are incomplete.
        queue: the lines.
        say: receives messages for the operator, such as that a model was reloaded.
        closed: called when the model has been closed.
    """

    def __init__(
        self,
        name: str,
        opening: Callable[[], Opened],
        version: Callable[[], object],
        queue: FairQueue,
        say: Callable[[str], object] = lambda text: None,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.queue = queue
        self.state = EngineState()
        self._opening, self._version, self._say, self._closed = opening, version, say, closed
        self._opened: Opened | None = None
        self._batch: LineBatch | None = None
        self._options = TranslateOptions()
        self._retry, self._retry_at, self._looked, self._in_a_row = _RETRY[0], 0.0, 0.0, 0
        self._unload = self._closing = self._stale = False
        self._most_lines = MOST_LINES
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> object:
        """The version of the files that the open model was read from; None: it is not open."""
        opened = self._opened  # read once: the engine's thread may close it in the meantime
        return None if opened is None else opened.version

    @property
    def busy(self) -> bool:
        """True if lines are waiting or being translated."""
        return len(self.queue) > 0 or self._batch is not None

    def unload(self) -> None:
        """Close the model once no line is waiting or being translated; the next line opens it again."""
        with self.queue.changed:
            self._unload = True
            self.queue.changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Translate the waiting lines, then end the thread; return whether it ended within `seconds`."""
        with self.queue.changed:
            self._closing, self.queue.closed = True, ModelFailed("the server is shutting down")
            self.queue.changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.queue.clear(ModelFailed("the server is shutting down"))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.queue.changed:
                while self._batch is None and not len(self.queue) and not self._closing and not self._unload:
                    self.queue.changed.wait()
                if self._closing and self._batch is None and not len(self.queue):
                    return
            try:
                self._turn()
            except Exception as error:  # an error must not stop the thread or the other models
                self._failed(error)

    def _turn(self) -> None:
        """Admit lines, take one step, and deliver finished translations."""
        self._look()
        if self._batch is None:
            if self.queue.first() is None:
                if self._unload:
                    self._opened, self._unload, self.state.status = None, False, "cold"
                    self._closed()
                return
            if not self._ready():
                return
            self._begin()
        if self._batch is None:
            return
        self._admit()
        self.state.live = len(self._batch.lines)
        if not self._batch.lines:
            self._batch = None
            return
        began = time.perf_counter()
        with _COMPUTING:
            done = self._batch.step()
        finished = [(self._batch.lines.pop(ticket), translation) for ticket, translation in done.items()]
        self.state.steps += 1
        self.state.live = len(self._batch.lines)
        self.state.last_used = time.monotonic()
        self.state.lines += len(finished)
        if finished:
            self._in_a_row, self.state.status, self.state.reason = 0, "ready", ""
        self.state.tokens += sum(len(t.hypotheses[0].tokens) for _, t in finished)
        self.queue.measured(len(finished), time.perf_counter() - began)
        for line, translation in finished:
            if translation.parts > 1:
                line.notices["long_lines"] += 1
            if not translation.hypotheses[0].finished:
                line.notices["unfinished"] += 1
            line.finish(translation)
        if not self._batch.lines:
            self._batch = None  # the next one may have other options

    def _ready(self) -> bool:
        """Open the model, again if its files have changed; return whether it can translate.

        If it cannot, all waiting lines fail with the reason.
        """
        if self._opened is not None:
            if self._stale:
                self._reload(self._opened)
            return True
        now = time.monotonic()
        if now < self._retry_at:
            self.queue.clear(ModelFailed(f"{self.name}: {self.state.reason}"))
            return False
        try:
            self._opened, self._looked = self._opening(), now
        except Exception:
            self._retry_at, self._retry = now + self._retry, min(2 * self._retry, _RETRY[1])
            raise
        # The objects of an open model are never garbage, so collections need not scan them.
        gc.collect()
        gc.freeze()
        if self._in_a_row < _LOST:  # otherwise its first translation decides
            self.state.status, self.state.reason = "ready", ""
        self._retry, self._most_lines, self.state.aligned = _RETRY[0], MOST_LINES, self._opened.aligned
        return True

    def _look(self) -> None:
        """Check now and then whether the files of the open model have changed."""
        now = time.monotonic()
        if self._opened is not None and not self._stale and now - self._looked > _CHANGED:
            self._looked = now
            with contextlib.suppress(ZigguratError, OSError):  # being replaced right now
                self._stale = self._version() != self._opened.version

    def _reload(self, old: Opened) -> None:
        """Open the model again; the old one stays in use if its files are incomplete."""
        self._stale, self._looked = False, time.monotonic()
        version: object = None
        try:
            version = self._version()
            self._opened = self._opening()
        except Exception as error:  # half-written, or too large while the old one is open
            # Not tried again before the files change once more, because each attempt drains the search.
            self._opened = replace(old, version=version)
            self._say(f"{self.name}: its files have changed, but cannot be opened; the old ones stay in use: {error}")
            return
        self.state.aligned = self._opened.aligned
        self.state.reloads += 1
        self._say(f"{self.name}: reloaded, because its files have changed")

    def _begin(self) -> None:
        """Start a search with the options of the line whose turn it is."""
        first = self.queue.first()
        if first is None or self._opened is None:
            return
        translator, self._options = self._opened.translator, first.options
        if not translator.own_search:
            time.sleep(_COLLECT)
        try:
            # If the translator gives no alignments, the translations have none.
            aligned = self._options.alignments and self._opened.aligned
            self._batch = LineBatch(translator, replace(self._options, alignments=aligned), self._most_lines)
        except ZigguratError as error:  # caused by the options of its request
            if (taken := self.queue.take(self._options)) is not None:
                taken.finish(error)

    def _admit(self) -> None:
        """Let waiting lines join, and remove those for which no client is waiting."""
        batch = self._batch
        assert batch is not None
        now = time.monotonic()
        gone = [ticket for ticket, line in batch.lines.items() if line.cancelled or now > line.deadline]
        for ticket in gone:
            line = batch.lines[ticket]
            line.finish(DeadlineExceeded("the deadline passed while the line was translated"))
            line.cancel()
        if gone:
            batch.cancel(gone)
        room = batch.most_lines - len(batch.lines)
        waited = self.queue.oldest(other_than=self._options)
        if batch.lines and (self._stale or (waited is not None and now - waited > _PATIENCE)):
            return
        while room > 0 and (taken := self.queue.take(self._options)) is not None:
            try:
                batch.add(taken)
            except ZigguratError as error:  # caused by this line
                taken.finish(error)
                continue
            except Exception:  # it is now in neither the queue nor a batch
                taken.finish(ModelFailed(f"{self.name}: {_FAILED}"))
                raise
            room -= 1

    def _failed(self, error: Exception) -> None:
        """Let the running lines fail, or all lines if the model is not open; close a model that fails every time."""
        what, told = _FAILED, _FAILED
        if self._opened is None:
            what, told = "could not be opened", "could not be opened; the server's log has the reason"
        elif self._batch is not None and self._batch.most_lines > 1 and out_of_memory(error):
            self._most_lines = self._batch.most_lines // 2
            what = f"{_FAILED}; from now on it takes at most {self._most_lines} at a time"
        else:
            self._in_a_row += 1
            if self._in_a_row >= _LOST:
                what = told = f"{_FAILED}, {self._in_a_row} times without a translation in between; it will be reopened"
                self._opened, self._retry_at = None, time.monotonic() + self._retry
                self._closed()
        if self._opened is None:
            self.state.status, self.state.reason = "failed", told
        self.state.failures += 1
        self._say(f"{self.name}: {what}: {printable(str(error), 1000)}")
        why = ModelFailed(f"{self.name}: {told}")
        lines = [] if self._batch is None else list(self._batch.lines.values())
        self._batch, self.state.live = None, 0
        for line in lines:
            line.finish(why)
        if not lines:  # it cannot even start, and clients would wait forever
            self.queue.clear(why)
