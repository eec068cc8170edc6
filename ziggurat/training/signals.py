"""SIGTERM and Ctrl-C: finish the update, write a checkpoint, leave; a second one leaves at once.

A validation under way is not finished: the resumed run does it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

__all__ = ["GracefulStop"]

_HEARD = "finishing this update, then a checkpoint (a validation is left for later); the same again leaves at once"


class GracefulStop:
    """Context in which SIGINT and SIGTERM are remembered instead of ending the process.

    Outside the main thread, where Python forbids handlers, signals keep their ordinary effect.

    Args:
        says: what is under way when a signal comes; of several processes one is enough.
        several: whether processes of torchrun train together. Ctrl-C reaches each from the terminal, and once more from
            torchrun, which passes it on: a second signal within 5 seconds of the first is then the same one.

    Attributes:
        received: number of the signal that came to this process, or None.
        heeded: what all processes have agreed on, or None; only this may end their training.
    """

    def __init__(self, says: bool = True, several: bool = False) -> None:
        self._says = says
        self._deaf_seconds, self._heard = 5.0 if several else 0.0, 0.0
        self.received: int | None = None
        self.heeded: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        """Name of the signal heeded, such as SIGTERM, or None."""
        return None if self.heeded is None else signal.Signals(self.heeded).name

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() < self._heard + self._deaf_seconds:
                return
            os._exit(128 + number)  # at once: no cleaning up, the last checkpoint is whole
        self.received, self._heard = number, time.monotonic()
        # Not through the console or the log: the signal may have come while they were writing.
        if self._says:
            os.write(2, f"\n{signal.Signals(number).name}: {_HEARD}\n".encode())
