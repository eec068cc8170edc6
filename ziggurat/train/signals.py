"""Stop signals during training: finish the update, write a checkpoint, end; a second one ends at once.

A validation in progress is abandoned, and the resumed run repeats it. The second part of the file ends processes whose
launcher, torchrun, has died, and those that cannot end normally.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from ziggurat.system.terminal import REPEATED, say_at_once, stop_signals

_PATIENCE_SECONDS = 30.0
"""_PATIENCE_SECONDS is the time for a process to end after its launcher, the same as torchrun's wait between SIGTERM
and SIGKILL."""


_HEARD = "finishing this update, then a checkpoint (a validation is left for later); a second signal stops at once"


class GracefulStop:
    """Context in which stop signals are remembered instead of ending the process.

    Those that may arrive several times for one reason (`REPEATED`) never count as the second signal. Outside the main
    thread, where Python forbids handlers, signals keep their default effect.

    Args:
        says: whether to print a message when a signal arrives; one of several processes is enough.
        several: whether several torchrun processes train together. Ctrl-C reaches each from the terminal, and again
            from torchrun, which passes it on: a second signal within 5 seconds then counts as the same one.

    Attributes:
        received: number of the signal that this process received, or None.
        heeded: number of the signal on which all processes have agreed, or None; only this one may end training.
    """

    def __init__(self, says: bool = True, several: bool = False) -> None:
        self._says = says
        self._deaf_seconds, self._heard = 5.0 if several else 0.0, 0.0
        self.received: int | None = None
        self.heeded: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        """Name of the agreed signal, such as SIGTERM, or None."""
        if self.heeded is None:
            return None
        return signal.Signals(self.heeded).name + (f", since {_GONE[0]}" if _GONE else "")

    def __enter__(self) -> GracefulStop:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if others have replaced them since."""
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                before = signal.signal(number, self._handle)
                self._previous.setdefault(number, before)

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number in REPEATED or time.monotonic() < self._heard + self._deaf_seconds:
                return
            os._exit(128 + number)  # without clean-up, since checkpoints on disk are complete at any moment
        self.received, self._heard = number, time.monotonic()
        # Not through the console or the log: this may run in the middle of one of their writes and would wait for it.
        if self._says:
            say_at_once(f"\n{signal.Signals(number).name}: {_HEARD}\n")


_watching: list[int] = []
"""Id of the process whose launcher is being watched: this process or, after a fork, its parent."""


_GONE: list[str] = []
"""The reason to stop, once the launcher is gone."""


def leave_with_launcher() -> None:
    """Make this process stop when torchrun, its launcher, is gone: a killed torchrun does not notify its workers.

    They would continue unnoticed, in a folder and on GPUs that the next start needs. So the process sends itself
    SIGTERM. During training it then finishes the update and writes a checkpoint, as do the others that lost the same
    torchrun. If it waits for a dead one, it ends after 30 seconds; before and after training it ends at once.

    The parent's id is read every second. The kernel's notification (PR_SET_PDEATHSIG) refers to the parent's thread,
    not the parent, and never arrives if the parent died before it was requested. Nothing is done if torchrun did not
    start this process: other parents, such as a shell with `nohup`, may leave it behind on purpose.
    """
    if os.getpid() in _watching or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _watching.append(os.getpid())  # threads do not survive a fork, so a child must start a new one
    threading.Thread(target=_watch, args=(os.getppid(),), name="ziggurat-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    """Wait until the parent is no longer `launcher`, then end this process."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    _GONE.append(f"torchrun (process {launcher}) is gone")
    say_at_once(f"\n{_GONE[0]}\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os._exit(128 + signal.SIGTERM)


def end_at_once() -> None:
    """End this process with a failure status, skipping the rest of Python's clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(1)
