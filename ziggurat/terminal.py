"""The terminal, pipe or file that messages go to may go away; the work that they are about goes on.

Results are another matter: what cannot be written to standard output is an error of the verb that was asked for it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

from rich.console import Console

__all__ = ["Messages", "let_go", "safe", "say_at_once", "standard_streams", "stop_signals", "why"]


class Messages(io.TextIOBase):
    """A text stream over another one that never fails: what that does not take is lost, and `failure` says why.

    Every message is tried anew, since a full disk may have room again.

    Args:
        stream: what is written to; None: nothing, since it was closed before the process began.

    Attributes:
        failure: why a message was lost, the first time; None as long as none was.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: str | None = None if stream is not None else "it is closed"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream beneath."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal, and one that is still there."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the number of the file beneath. Raises OSError when there is none."""
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream.fileno()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str, /) -> int:
        """Write `text`, or lose it."""
        if not isinstance(text, str):  # click asks in this way whether a stream takes bytes
            raise TypeError(f"a text is wanted, not {type(text).__name__}")
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, or lose it."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        self.failure = self.failure or why(error)


def why(error: OSError | ValueError) -> str:
    """Return why a stream failed, in words."""
    if isinstance(error, OSError):
        return "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
    return str(error)


def safe(console: Console) -> Console:
    """Have a console lose messages that it cannot write, instead of failing; returns it.

    rich itself ends the process with status 1 where the reader of a pipe is gone.
    """
    if not isinstance(console.file, Messages):
        console.file = cast("IO[str]", Messages(cast(TextIO, console.file)))
    return console


def say_at_once(message: str) -> None:
    """Write to standard error past all buffers, for signal handlers; lost where that fails."""
    with contextlib.suppress(OSError):
        os.write(2, message.encode())


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop: Ctrl-C, SIGTERM and, when the terminal goes, SIGHUP.

    With `nohup`, which has SIGHUP ignored from the start, it stays ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Context of a command line: standard error never fails, writing to a standard output that is closed does.

    The number of one that is closed is taken: the next file that is opened would get it, and what C++ libraries have to
    say would land in a checkpoint. A closed standard input stays None (ziggurat.cli.output.check_input).
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):  # reading and writing results must fail
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
    """Let what is still buffered go nowhere: Python would try again on its way out, and end with status 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
