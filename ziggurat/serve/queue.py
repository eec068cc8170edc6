"""The lines that wait for a model: bounded, fair to clients, and dropped when their client leaves.

Also contains the lock by which models take turns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ziggurat.system.errors import ZigguratError
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Translation

_MEMORY = 0.999  # weight that each step leaves to earlier ones, so that a few hundred steps count


class QueueFull(ZigguratError):  # noqa: N818 - a state, not a fault
    """More lines are waiting than the queue accepts; `seconds` is how long they may take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many lines wait for this model; try again in {seconds:.0f} s")
        self.seconds = seconds


class DeadlineExceeded(ZigguratError):  # noqa: N818 - also a state
    """A line was not translated before its deadline."""


@dataclass(eq=False)
class QueuedLine:
    """A line that is waiting or being translated.

    Attributes:
        text: the line.
        client: the client that sent it; clients take turns.
        options: the requested options; lines with the same `TranslateOptions.key` are translated together.
        deadline: `time.monotonic()` after which the translation is no longer needed.
        done: called once, in the engine's thread, with the translation or an exception; never after `cancel`.
        constraints: phrases that the translation must contain.
        notices: counts, by kind, of what needed special handling, written by the engine before `done`.
    """

    text: str
    client: str
    options: TranslateOptions
    deadline: float
    done: Callable[[Translation | Exception], Any]
    constraints: tuple[str, ...] = ()
    notices: Counter[str] = field(default_factory=Counter)
    came: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def cancel(self) -> None:
        """Abandon the translation; the engine takes the line out of its search at the next step."""
        self.cancelled = True

    def finish(self, result: Translation | Exception) -> None:
        """Deliver the result."""
        if not self.cancelled:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, so nothing waits for it
                self.done(result)


class FairQueue:
    """Lines by client; the clients take turns, so that a long request does not block a short one.

    Args:
        most: lines that may wait. A request is admitted in whole or not at all (`check`); a single one may be longer.
        most_of_client: lines of one client that may wait along with those of others; None: no separate limit.

    Thread-safe. `changed` is notified when lines arrive.
    """

    def __init__(self, most: int, most_of_client: int | None = None) -> None:
        self.most = most
        self.most_of_client = most_of_client
        self.changed = threading.Condition()
        self._clients: OrderedDict[str, deque[QueuedLine]] = OrderedDict()
        self._lately = [0.0, 0.0]  # recent lines and seconds; older ones count less
        self._size = 0
        self.closed: Exception | None = None
        """The reason why no more lines are accepted."""

    def __len__(self) -> int:
        return self._size

    def check(self, client: str, lines: int) -> None:
        """Raise QueueFull if there is no room for a request of `lines` lines, or the exception the queue was closed
        with.

        A request over several queues checks all of them before it adds anything to one.
        """
        with self.changed:
            if self.closed is not None:
                raise self.closed
            if self._room(client, lines):
                return
            for other in list(self._clients):  # abandoned lines must not keep others out
                self._drop(other, lambda line: not self._wanted(line))
            if not self._room(client, lines):
                raise QueueFull(self.wait())

    def put(self, lines: Sequence[QueuedLine]) -> None:
        """Add lines, even if there is no room. Raises the exception that the queue was closed with.

        A request admitted by `check` may translate some sentences again, or all of them by a second model. Half of the
        work would be lost if there were no room for these.
        """
        with self.changed:
            if self.closed is not None:
                raise self.closed
            for line in lines:
                self._clients.setdefault(line.client, deque()).append(line)
            self._size += len(lines)
            self.changed.notify_all()

    def remove(self, lines: Collection[QueuedLine]) -> None:
        """Abandon lines, wherever they are: waiting ones leave the queue now."""
        for line in lines:
            line.cancel()
        with self.changed:
            for client in {line.client for line in lines} & self._clients.keys():
                self._drop(client, lambda line: line.cancelled)

    def _room(self, client: str, lines: int) -> bool:
        waiting = len(self._clients.get(client, ()))
        limit = self.most if self.most_of_client is None else self.most_of_client
        if waiting and waiting + lines > limit:
            return False
        return not self._size or self._size + lines <= self.most

    def _drop(self, client: str, unwanted: Callable[[QueuedLine], bool]) -> None:
        kept = deque(line for line in self._clients[client] if not unwanted(line))
        self._size -= len(self._clients[client]) - len(kept)
        if kept:
            self._clients[client] = kept
        else:
            del self._clients[client]

    def wait(self) -> float:
        """Return the seconds that the waiting lines may take, at least 1."""
        lines, seconds = self._lately
        return max(1.0, self._size * seconds / lines) if lines else 1.0

    def measured(self, lines: int, seconds: float) -> None:
        """Record that `lines` took `seconds`, for `wait`."""
        self._lately = [_MEMORY * old + new for old, new in zip(self._lately, (lines, seconds), strict=True)]

    def first(self) -> QueuedLine | None:
        """Return the line whose turn it is, without removing it; None: none waits. Abandoned lines are dropped."""
        with self.changed:
            while self._clients:
                client, lines = next(iter(self._clients.items()))
                if self._wanted(lines[0]):
                    return lines[0]
                self._pop(client)
            return None

    def take(self, options: TranslateOptions) -> QueuedLine | None:
        """Remove and return the next line with these options, starting after the last client; None: there is none."""
        with self.changed:
            for client in list(self._clients):
                lines = self._clients[client]
                while lines and not self._wanted(lines[0]):
                    self._pop(client)
                if lines and lines[0].options.key == options.key:
                    line = self._pop(client)
                    if client in self._clients:
                        self._clients.move_to_end(client)
                    return line
            return None

    def oldest(self, other_than: TranslateOptions) -> float | None:
        """Return when the oldest next line with other options arrived; None: none waits."""
        with self.changed:
            came = [
                lines[0].came for lines in self._clients.values() if lines and lines[0].options.key != other_than.key
            ]
            return min(came, default=None)

    def clear(self, why: Exception) -> None:
        """Let all lines fail."""
        with self.changed:
            lines = [line for of_client in self._clients.values() for line in of_client]
            self._clients.clear()
            self._size = 0
        for line in lines:
            line.finish(why)

    def _pop(self, client: str) -> QueuedLine:
        lines = self._clients[client]
        line = lines.popleft()
        self._size -= 1
        if not lines:
            del self._clients[client]
        return line

    def _wanted(self, line: QueuedLine) -> bool:
        """Return whether a line is still needed; a late one fails now."""
        if not line.cancelled and time.monotonic() > line.deadline:
            line.finish(DeadlineExceeded("the deadline passed while the request waited for its turn"))
            line.cancel()
        return not line.cancelled


class FairLock:
    """A lock for `with`, fair between threads.

    A thread that releases a `threading.Lock` and requests it again at once usually gets it again. Of two models that
    compute step by step, one could then wait for as long as the other has work.
    """

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._inner:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, *error: object) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().set()  # handed over directly, so that no newcomer overtakes it
            else:
                self._held = False
