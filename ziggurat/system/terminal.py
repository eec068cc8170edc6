"""Message streams that never fail: work continues if the terminal, pipe or file behind standard error is gone.

Results are different: failing to write them to standard output is an error of the verb. The module also handles stop
signals and formats durations.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any, TextIO, cast

from rich.console import Console


class Messages(io.TextIOBase):
    """A text stream on top of another one that never fails: text that cannot be written is lost.

    Writing is tried for every message, even after a failure, since a full disk may have room again. `stream` is None if
    it was closed before the process started. `failure` is the reason why the first message was lost, None if none was.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: str | None = None if stream is not None else "it is closed"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the underlying stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return True for a terminal that still exists."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the descriptor of the underlying file. Raises OSError if there is none."""
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Write `text`, or lose it."""
        if not isinstance(text, str):  # click tests in this way whether a stream accepts bytes
            raise TypeError(f"expected text, not {type(text).__name__}")
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream has been closed
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream, or lose its buffer."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        self.failure = self.failure or why(error)


def why(error: OSError | ValueError) -> str:
    """Return the reason why a stream failed, in words."""
    if isinstance(error, OSError):
        return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
    return str(error)


def safe(console: Console) -> Console:
    """Make a console lose messages that it cannot write instead of failing; return it.

    By default, rich ends the process with status 1 when the reader of a pipe is gone.
    """
    if not isinstance(console.file, Messages):
        console.file = cast("IO[str]", Messages(cast(TextIO, console.file)))
    return console


def print_message(console: Console, message: str, style: str | None = None) -> None:
    """Print a message without interpreting markup; on a terminal, lines break between words.

    By itself a terminal breaks lines within words. A pipe or a file gets each line whole, so programs can search it.
    """
    console.print(message, style=style, markup=False, highlight=False, emoji=False, soft_wrap=not console.file.isatty())


def say_at_once(message: str) -> None:
    """Write to standard error, bypassing all buffers, for use in signal handlers; a failure is ignored."""
    with contextlib.suppress(OSError):
        os.write(2, message.encode())


REPEATED = (signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)
"""REPEATED are the stop signals that may arrive several times for one reason and so never count as a second request.

SIGHUP: both the shell and the kernel send it when a terminal closes. SIGXCPU: the kernel sends it every second once the
limit on CPU time is reached. SIGUSR1 and SIGUSR2: schedulers announce the end of a job with them (Slurm's `--signal`),
to single processes and to whole groups.
"""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop: SIGINT (Ctrl-C), SIGTERM, and REPEATED.

    Signals in REPEATED are left out if they are already ignored, as SIGHUP is under `nohup`, or if a program that calls
    ziggurat handles them, for example by printing its stack on SIGUSR1.
    """
    return [signal.SIGINT, signal.SIGTERM, *(number for number in REPEATED if _is_ours(signal.getsignal(number)))]


def _is_ours(handler: object) -> bool:
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("ziggurat.")


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """Context that delays stop signals until its end, when the previous handlers receive them.

    It does nothing outside the main thread, where Python allows no handlers, and a signal that the system delivers to
    another thread is not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # a handler known to Python
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Context for a command line: writing to standard error never fails, writing to a closed standard output does.

    A closed standard input stays None (ziggurat.cli.output.check_input).
    """
    # A closed descriptor 0, 1 or 2 would be given to the next file that is opened, and messages of C++ libraries could
    # end up in a checkpoint. So each is occupied: 0 and 1 in the wrong direction, so that using them fails.
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    before = sys.stderr
    messages = Messages(before)
    sys.stderr = cast(TextIO, messages)
    try:
        yield
    finally:
        sys.stderr = before
        if messages.failure is not None and before is not None:
            let_go(before)


def let_go(stream: TextIO) -> None:
    """Discard the buffer of a failed stream: Python would flush it again at exit and end with status 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context for imports: stop signals end the process at once, with status 128 + their number.

    Raised inside an import, a KeyboardInterrupt would show a traceback of half-loaded modules or get lost in them.

    Garbage collection is off: modules leave no garbage, and looking for it takes a sixth of PyTorch's import time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in stop_signals()}
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    say_at_once(f"ziggurat: stopped{by}\n")
    os._exit(128 + number)


def duration(seconds: float) -> str:
    """Return a time span as `42 s`, `3:07` or `2:05:09`."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
