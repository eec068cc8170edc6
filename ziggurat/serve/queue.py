"""The lines that wait for a model: bounded, fair to clients, and dropped when their client leaves.

And the turns that models take.
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

_MEMORY = 0.999  # of a step: a few hundred steps count


class QueueFull(ZigguratError):  # noqa: N818 - a state, not a fault
    """More lines wait than the queue takes; `seconds` is how long they may take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"too many lines wait for this model; try again in {seconds:.0f} s")
        self.seconds = seconds


class DeadlineExceeded(ZigguratError):  # noqa: N818 - likewise
    """A line was not translated before its deadline."""


@dataclass(eq=False)
class QueuedLine:
    """A line that waits or is translated.

    Attributes:
        text: the line.
        client: who asked; clients take turns.
        options: what is asked of the translation; lines of one `TranslateOptions.key` are translated together.
        deadline: `time.monotonic()` after which nobody wants the translation.
        done: called once, in the thread of the engine, with the translation or an exception; never after `cancel`.
        constraints: phrases that the translation must contain.
        notices: counts, by kind, of what was not translated in the ordinary way, written by the engine before `done`.
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
        """Give the translation up; the engine takes the line out of its search at the next step."""
        self.cancelled = True

    def finish(self, result: Translation | Exception) -> None:
        """Hand over what came of it."""
        if not self.cancelled:
            with contextlib.suppress(RuntimeError):  # of an event loop that has ended: nobody is there any more
                self.done(result)


class FairQueue:
    """Lines by client; the clients take turns, so that a long request does not keep out a short one.

    Args:
        most: lines that may wait. A request is let in whole or not at all (`check`); one alone may be longer.
        most_of_client: lines of one client that may wait beside those of others; None: no separate limit.

    Safe between threads. `changed` is notified when lines come.
    """

    def __init__(self, most: int, most_of_client: int | None = None) -> None:
        self.most = most
        self.most_of_client = most_of_client
        self.changed = threading.Condition()
        self._clients: OrderedDict[str, deque[QueuedLine]] = OrderedDict()
        self._lately = [0.0, 0.0]  # lines and seconds, the older the less they count
        self._size = 0
        self.closed: Exception | None = None
        """Why no more lines are taken."""

    def __len__(self) -> int:
        return self._size

    def check(self, client: str, lines: int) -> None:
        """Raise QueueFull where a request of so many lines finds no room, or whatever the queue was closed with.

        A request over several queues asks all of them before it puts anything into one.
        """
        with self.changed:
            if self.closed is not None:
                raise self.closed
            if self._room(client, lines):
                return
            for other in list(self._clients):  # those that nobody wants any more keep nobody out
                self._drop(other, lambda line: not self._wanted(line))
            if not self._room(client, lines):
                raise QueueFull(self.wait())

    def put(self, lines: Sequence[QueuedLine]) -> None:
        """Let lines wait, also where there is no room. Raises whatever the queue was closed with.

        A request that was let in by `check` asks for some sentences again, or a second model for them all: half of the
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
        """Give lines up, wherever they are: those that wait leave the queue now."""
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
        """Return the seconds that the lines that wait now may take, at least 1."""
        lines, seconds = self._lately
        return max(1.0, self._size * seconds / lines) if lines else 1.0

    def measured(self, lines: int, seconds: float) -> None:
        """Take note that `lines` took `seconds`, for `wait`."""
        self._lately = [_MEMORY * old + new for old, new in zip(self._lately, (lines, seconds), strict=True)]

    def first(self) -> QueuedLine | None:
        """Return the line whose turn it is, without taking it; None: none waits. Lines nobody wants are dropped."""
        with self.changed:
            while self._clients:
                client, lines = next(iter(self._clients.items()))
                if self._wanted(lines[0]):
                    return lines[0]
                self._pop(client)
            return None

    def take(self, options: TranslateOptions) -> QueuedLine | None:
        """Take the next line with these options, the client after the last one first; None: there is none."""
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
        """Return when the oldest of the lines whose turn it is came, of those with other options; None: none waits."""
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
        """Return whether somebody still waits for it; a late one fails now."""
        if not line.cancelled and time.monotonic() > line.deadline:
            line.finish(DeadlineExceeded("the deadline passed while the request waited for its turn"))
            line.cancel()
        return not line.cancelled


class FairLock:
    """A lock for `with`, fair between threads.

    A thread that lets `threading.Lock` go and wants it again at once mostly gets it again, so that of two models that
    compute step by step one could wait for as long as the other has work.
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
                self._waiting.popleft().set()  # handed over: nobody who comes now is before it
            else:
                self._held = False
