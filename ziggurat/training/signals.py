"""SIGTERM, SIGHUP and Ctrl-C: finish the update, write a checkpoint, leave; a second one leaves at once.

A validation under way is not finished: the resumed run does it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

from ziggurat.terminal import say_at_once, stop_signals

__all__ = ["GracefulStop", "leave_with_launcher"]

_PATIENCE_SECONDS = 30.0
"""How long a process goes on without its launcher: as long as torchrun itself waits between SIGTERM and SIGKILL."""

_HEARD = "finishing this update, then a checkpoint (a validation is left for later); the same again leaves at once"


class GracefulStop:
    """Context in which SIGINT, SIGTERM and SIGHUP are remembered instead of ending the process.

    A terminal that goes says so twice, through the shell and through the kernel, so SIGHUP is never a second signal.

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
        if self.heeded is None:
            return None
        return signal.Signals(self.heeded).name + (f", since {_GONE[0]}" if _GONE else "")

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGHUP or time.monotonic() < self._heard + self._deaf_seconds:
                return
            os._exit(128 + number)  # at once: no cleaning up, the last checkpoint is whole
        self.received, self._heard = number, time.monotonic()
        # Not through the console or the log: the signal may have come while they were writing.
        if self._says:
            say_at_once(f"\n{signal.Signals(number).name}: {_HEARD}\n")


_watching: list[int] = []
_GONE: list[str] = []


def leave_with_launcher() -> None:
    """Have this process stop when torchrun, which started it, is gone: killed, torchrun tells its workers nothing.

    They would train on, unseen, in a folder and on GPUs that the next start wants. So the process sends itself SIGTERM:
    in training it finishes the update and writes a checkpoint, as the others do that lost the same torchrun; where it
    waits for one that is dead, it ends after 30 seconds; before and after training, at once.

    The parent's number is looked at every second: the kernel's own notice (PR_SET_PDEATHSIG) is of the parent's thread,
    not of the parent, and is lost where it died before it was asked for. Does nothing where torchrun did not start
    this process, since other parents, a shell with `nohup`, may leave it behind.
    """
    if os.getpid() in _watching or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _watching.append(os.getpid())  # a thread does not outlive a fork
    threading.Thread(target=_watch, args=(os.getppid(),), name="ziggurat-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    _GONE.append(f"torchrun (process {launcher}) is gone")
    say_at_once(f"\n{_GONE[0]}\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os._exit(128 + signal.SIGTERM)
