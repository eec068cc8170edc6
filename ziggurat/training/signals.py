"""SIGTERM and Ctrl-C: finish the update, write a checkpoint, leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["GracefulStop"]

_HEARD = "finishing what is under way, then a checkpoint; the same again leaves at once"


class GracefulStop:
    """Context in which SIGINT and SIGTERM are remembered instead of ending the process.

    Outside the main thread, where Python forbids handlers, signals keep their ordinary effect.

    Args:
        says: what is under way when a signal comes; of several processes one is enough.

    Attributes:
        received: number of the signal that came, or None.
    """

    def __init__(self, says: bool = True) -> None:
        self._says = says
        self.received: int | None = None
        self._previous: dict[int, object] = {}

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
            os._exit(128 + number)  # at once: no cleaning up, the last checkpoint is whole
        self.received = number
        # Not through the console or the log: the signal may have come while they were writing.
        if self._says:
            os.write(2, f"\n{signal.Signals(number).name}: {_HEARD}\n".encode())
