"""Errors that a user can fix, and the causes behind errors of the system: a full disk, too little memory, open files.

Every message says what is wrong, where, and what to do about it. First come the classes, then `printable` for text of
unknown origin in messages, then the functions that tell the machine's troubles from damaged files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class ZigguratError(Exception):
    """Base of every error that a user can fix; the command line prints it without a traceback, exit status 2."""


class ConfigError(ZigguratError):
    """A configuration key is unknown, ill-typed, out of range or in conflict with another key."""


class DataError(ZigguratError):
    """A corpus, vocabulary or store cannot be used; the message names file and line, and the byte for encodings."""


class DamageError(DataError):
    """The bytes of a corpus file did not come whole: cut short, changed on the way, or not of the kind they claim."""


class CheckpointError(ZigguratError):
    """A checkpoint or model directory is missing, damaged or of another format version."""


class ExportError(ZigguratError):
    """A model cannot be exported or imported, or the result computes something else; the message has all reasons."""


class TrainingError(ZigguratError):
    """Training cannot go on (for example: too many non-finite updates in a row)."""


class MachineError(ZigguratError):
    """The system refused to read or write a file for a reason other than its content: the file may well be intact."""


def printable(text: str, limit: int = 80) -> str:
    """Return `text` safe for a terminal or a log: control and bidirectional characters escaped, cut at `limit`.

    Corpora contain terminal escape sequences and right-to-left overrides. Printed raw, they can rewrite the terminal's
    content or reverse what a reader sees.
    """
    # The ranges: LRE to RLO (U+202A-E), LRI to PDI (U+2066-9), and the Arabic letter mark.
    shown = "".join(
        c
        if c.isprintable() and not (0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 or ord(c) == 0x061C)
        else c.encode("unicode_escape").decode("ascii")
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def other_format(path: object, found: object, reads: object, remedy: str) -> str:
    """Return the message for a file or folder whose format number is not the one that this version reads.

    Nothing was released before format 1 of every file, so another number is of a development version or a later one.
    """
    return (
        f"{path}: format {printable(str(found))}, but this version of ziggurat reads {reads}: written by a development "
        f"version or a later one; {remedy}"
    )


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
    """Raise MachineError if `error`, from reading `path`, has a passing cause in the system; else return.

    Without this, too many open files would look like damage, and intact data would be rebuilt or set aside.
    """
    if isinstance(error, OSError) and error.errno in _PASSING:
        raise MachineError(f"{path}: cannot be read: {os.strerror(error.errno)}{_PASSING[error.errno]}") from None


def is_full_disk(error: BaseException) -> bool:
    """Return True if a write failed for lack of room: a full disk, a used-up quota, or the file size limit."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """Context of writing the file or folder `path`: errors that name no file, or a temporary one, get its name.

    The system names no file when it fails to write to one that is already open, or to sync it. Raises MachineError in
    place of a library's OSError without a number, with the system's reason from the chain of causes.
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
    """Return the system's words for the first numbered OSError behind `error`; None where there is none."""
    earlier = error.__cause__ or error.__context__
    while earlier is not None:
        if isinstance(earlier, OSError) and earlier.errno is not None:
            return os.strerror(earlier.errno)
        earlier = earlier.__cause__ or earlier.__context__
    return None


def why_unwritten(error: OSError) -> str:
    """Return the message for an error of `is_full_disk`: what was being written, the room left, and what to do."""
    said = f"cannot be written: {os.strerror(error.errno or 0)}"
    if error.filename is None:  # standard output without a buffer, for example
        return f"the output {said}; make room, or write elsewhere"
    place = Path(error.filename).absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    with contextlib.suppress(OSError):
        if error.errno == errno.ENOSPC:  # a quota or size limit can be used up while the disk still has room
            said += f", {shutil.disk_usage(place).free / 1e6:,.1f} MB are free in {place}"
    return (
        f"{error.filename}: {said}. Nothing half-written is left, and what was there before is unchanged: make room, "
        "or write elsewhere"
    )


def out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out, by the words of Python, C++, torch's CPU allocator (RuntimeError) or the GPU."""
    if isinstance(error, MemoryError):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's; compared by name, so as not to import torch
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS_FOR_NO_MEMORY)


_WORDS_FOR_NO_MEMORY = (
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "could not create a primitive",  # oneDNN gives no reason; unsupported shapes are refused before it is called
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def shortage(error: BaseException) -> str | None:
    """Return "memory" or "threads" where `error`, or one in its chain of causes, means that these ran out; else None.

    The command line asks this of every error that reaches it: a reader may have taken it for damage.
    """
    at: BaseException | None = error
    while at is not None:
        said = str(at)
        if out_of_memory(at) or any(words in said for words in _WORDS_FOR_NO_ADDRESSES):
            return "memory"
        if any(words in said for words in _WORDS_FOR_NO_THREADS) or (type(at) is RuntimeError and said == _EAGAIN):
            return "threads"
        at = at.__cause__ or at.__context__
    return None


_WORDS_FOR_NO_ADDRESSES = (
    "failed to map segment from shared object",  # the dynamic loader
    "annot allocate memory",  # the system's words, with or without a capital
    "mkl_malloc: failed",
)
_WORDS_FOR_NO_THREADS = ("can't start new thread", "Failed to launch worker thread")
_EAGAIN = "Resource temporarily unavailable"  # std::thread's RuntimeError; a locked file says it too, as an OSError
