"""Errors that a user can mend. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExportError",
    "MachineError",
    "TrainingError",
    "ZigguratError",
    "is_full_disk",
    "out_of_memory",
    "printable",
    "refuse_passing",
    "shortage",
    "why_unwritten",
    "written_whole",
]


class ZigguratError(Exception):
    """Base of every error a user can mend; the command line prints it without a traceback, exit status 2."""


class ConfigError(ZigguratError):
    """A configuration key is unknown, ill-typed, out of range or in conflict with another key."""


class DataError(ZigguratError):
    """A corpus, vocabulary or store cannot be used; the message names file, line and (encodings) byte."""


class CheckpointError(ZigguratError):
    """A checkpoint or model directory is missing, damaged or of another format version."""


class ExportError(ZigguratError):
    """A model cannot be exported or taken in, or the result is not the model; the message has all reasons."""


class TrainingError(ZigguratError):
    """Training cannot go on (for example: too many non-finite updates in a row)."""


class MachineError(ZigguratError):
    """The system refused a file for a reason that says nothing about its content: it may well be whole."""


_PASSING = {
    errno.EMFILE: "; raise the limit (`ulimit -n 65536`)",
    errno.ENFILE: "; the whole machine has too many open",
    errno.ENOMEM: "",
    errno.EACCES: "",
    errno.EPERM: "",
    errno.ESTALE: "; the network file system changed, try again",
    errno.ETIMEDOUT: "; the network file system does not answer, try again",
}


def refuse_passing(path: object, error: BaseException) -> None:
    """Raise MachineError when `error`, from reading `path`, is the machine's and not the file's; else return.

    Else too many open files would be taken for damage, and whole data be made anew or set aside.
    """
    if isinstance(error, OSError) and error.errno in _PASSING:
        raise MachineError(f"{path}: cannot be read: {os.strerror(error.errno)}{_PASSING[error.errno]}") from None


def is_full_disk(error: BaseException) -> bool:
    """Whether it says that there is no room to write: on the disk, in the quota, or in a file of its size limit."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """Context of writing the file or folder `path`: an error that names no file, or a temporary one, gets this name.

    The system names none when it cannot write to or sync what is open already. Raises MachineError for an OSError of a
    library that has words of its own instead of a number, with what the system said before it.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            said = f" ({behind})" if (behind := _system_reason(error)) else ""
            raise MachineError(f"{path}: {error}{said}") from error
        if is_full_disk(error) or error.filename is None or ".tmp" in str(error.filename):
            error.filename = str(path)
        raise


def _system_reason(error: BaseException) -> str | None:
    """Return what the system said, in words, before an error was raised in its place; None: nothing."""
    earlier = error.__cause__ or error.__context__
    while earlier is not None:
        if isinstance(earlier, OSError) and earlier.errno is not None:
            return os.strerror(earlier.errno)
        earlier = earlier.__cause__ or earlier.__context__
    return None


def why_unwritten(error: OSError) -> str:
    """Return for people why there was no room to write, how much is left, and what to do; needs `is_full_disk`."""
    said = f"cannot be written: {os.strerror(error.errno or 0)}"
    if error.filename is None:  # standard output without a buffer, for example
        return f"the output {said}; make room, or write elsewhere"
    place = Path(error.filename).absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    with contextlib.suppress(OSError):
        if error.errno == errno.ENOSPC:  # a quota or a limit is used up while the disk has room
            said += f", {shutil.disk_usage(place).free / 1e6:,.1f} MB are free in {place}"
    return (
        f"{error.filename}: {said}. Nothing half-written is left, and what was there before is as it was: make room, "
        "or write elsewhere"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether it is Python's, C++'s, torch's CPU allocator's (a plain RuntimeError) or the GPU's way of saying so."""
    if isinstance(error, MemoryError):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's, by name: torch stays unimported
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID_WITHOUT_MEMORY)


_SAID_WITHOUT_MEMORY = (
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "could not create a primitive",  # oneDNN, which does not say why; a shape that it cannot do is refused earlier
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def shortage(error: BaseException) -> str | None:
    """Return what the system had too little of, where `error` or one that led to it comes of that: memory, threads.

    A reader that takes whatever a parser raises for damage is otherwise wrong about a whole file.
    """
    at: BaseException | None = error
    while at is not None:
        said = str(at)
        if out_of_memory(at) or any(words in said for words in _SAID_WITHOUT_ADDRESSES):
            return "memory"
        if any(words in said for words in _SAID_WITHOUT_THREADS) or (type(at) is RuntimeError and said == _EAGAIN):
            return "threads"
        at = at.__cause__ or at.__context__
    return None


_SAID_WITHOUT_ADDRESSES = (
    "failed to map segment from shared object",  # the loader's
    "annot allocate memory",  # the system's own words, in whatever a library makes of them
    "mkl_malloc: failed",
)
_SAID_WITHOUT_THREADS = ("can't start new thread", "Failed to launch worker thread")
_EAGAIN = "Resource temporarily unavailable"  # std::thread's words, and of files that are locked: those are OSErrors


def printable(text: str, limit: int = 80) -> str:
    """Return `text` fit for a terminal or a log: control and bidirectional characters escaped, cut at `limit`.

    Corpora hold terminal escape sequences and right-to-left overrides; shown raw they can rewrite a
    terminal's content or reverse what a reader sees.
    """
    shown = "".join(
        c
        if c.isprintable() and not (0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 or ord(c) == 0x061C)
        else c.encode("unicode_escape").decode("ascii")
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
