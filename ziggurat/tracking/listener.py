"""A tracker in a thread of its own, so that it can neither stop a run nor hold it up."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping

from ziggurat.tracking.tracker import Pixels, Tracker

__all__ = ["ROOM", "Listener"]

ROOM = 1000
"""Records that wait for a tracker at most; what comes while so many wait is left out."""

_Event = Callable[[Tracker], None]


class Listener:
    """Starts a tracker and hands it what a run tells, all in one thread; what the run calls returns at once.

    An exception of the tracker ends it, and nothing else: `failure` says what it was. The thread does not keep the
    process from ending.

    Args:
        name: of the tracker, for people.
        start: returns the tracker; called in the thread, since it may import much or wait for a network.
        room: records that wait at most.
    """

    def __init__(self, name: str, start: Callable[[], Tracker], *, room: int = ROOM) -> None:
        self.name = name
        self.failure: str | None = None
        """Why the tracker was given up, once it was."""
        self.left_out = 0
        """Records that the tracker was too slow for."""
        self._queue: queue.Queue[_Event | None] = queue.Queue(room)
        self._thread = threading.Thread(target=self._run, args=(start,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Hand over figures."""
        self._put(lambda tracker: tracker.scalars(update, values))

    def image(self, update: int, name: str, draw: Callable[[], Pixels]) -> None:
        """Hand over an image, which is drawn in the thread."""
        self._put(lambda tracker: tracker.image(update, name, draw()))

    def close(self, seconds: float) -> bool:
        """Let the tracker take what still waits, for so many seconds at most; False when it did not come to its end."""
        end = time.monotonic() + seconds
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)  # a full queue is emptied only while the tracker works
                break
            if time.monotonic() > end:
                return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _put(self, event: _Event) -> None:
        if self.failure is None:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.left_out += 1

    def _run(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            try:
                while (event := self._queue.get()) is not None:
                    event(tracker)
            except BaseException:
                with contextlib.suppress(Exception):
                    tracker.close()
                raise
            tracker.close()
        except (Exception, SystemExit) as error:  # whatever it was, the run goes on
            said = " ".join(str(error).split())
            self.failure = f"{type(error).__name__}: {said}" if said else type(error).__name__
