"""Errors that a user can fix, and the causes behind errors of the system: a full disk, too little memory, open files.

Every message says what is wrong, where, and what to do about it. Problems and the errors that hold them come first,
then `printable` for text of unknown origin in messages, then the functions that distinguish failures of the machine
from damaged files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

Severity = Literal["error", "warning", "note"]


class Remedy(StrEnum):
    """Remedies as the command line words them; a caller with a different one replaces them by `Problem.shown`."""

    PREPARE = "run `ziggurat prepare` again"
    PREPARE_ANEW = "run `ziggurat prepare --force` again"
    REBUILD = "rebuild it with `--force`"
    THEN_PREPARE = " and run `ziggurat prepare` again"
    PREPARE_AFTER = " and prepare again"
    RESUME = "`--resume`"


@dataclass(frozen=True)
class Problem:
    """A fault of one setting or file in words, with the names in it as data, since callers may use other names."""

    key: str
    """Dotted key of the setting, as in the reason; "" if none."""
    reason: str
    """The fault and its cause; one that ends with a colon or comma leads to its remedy."""
    remedy: str = ""
    """The way out; "" if the reason states it."""
    severity: Severity = "error"
    named: tuple[str, ...] = ()
    """Other keys and members of `Remedy` that the text contains, most important first."""

    @classmethod
    def of(cls, setting: str, said: str, remedy: str = "", **more: Any) -> Problem:
        """Return a problem whose reason starts with `setting` (`key` or `key: value`); `more` are fields by name."""
        return cls(setting.partition(":")[0], f"`{setting}`{'' if said[0] == ':' else ' '}{said}", remedy, **more)

    def __str__(self) -> str:
        """Return the text with its original names."""
        if not self.remedy:
            return self.reason
        return f"{self.reason}{' ' if self.reason.endswith((':', ',')) else '; '}{self.remedy}"

    def shown(self, names: Mapping[str, str]) -> str:
        """Return the text with other names for keys, for the sections above them, and for remedies."""
        known: dict[str, str] = {}
        for key in self.names:
            above, rest = key.partition(" (")[0], ""  # a label, KEY (NAME), is replaced as a whole
            if key in names:
                above = key
            while above and above not in names:
                above, dot, last = above.rpartition(".")
                rest = f"{dot}{last}{rest}"
            if above:
                known[key] = names[above] + rest
        if not known:
            return str(self)
        longest = map(re.escape, sorted(known, key=len, reverse=True))
        # Only whole names: `data.train.1` is not a part of `data.train.10`, nor of a path.
        return re.sub(rf"(?:(?<![\w./-])|(?= ))(?:{'|'.join(longest)})(?![\w-])", lambda at: known[at[0]], str(self))

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the text that a caller may replace, the key first."""
        return tuple(filter(None, (self.key, *self.named, self.remedy)))


class ZigguratError(Exception):
    """Base of every error that a user can fix; the command line prints it without a traceback and exits with status 2.

    Plain text is a problem of `key` that mentions `named` (see Problem); `between` separates several problems.
    """

    def __init__(self, *problems: Problem | str, key: str = "", named: Sequence[str] = (), between: str = "; ") -> None:
        self.problems = tuple(
            problem if isinstance(problem, Problem) else Problem(key, str(problem), named=tuple(named))
            for problem in problems
        )
        self.between = between
        super().__init__(between.join(map(str, self.problems)))

    @classmethod
    def of(cls, setting: str, said: str, remedy: str = "", named: Sequence[str] = ()) -> Self:
        """Return the error of one problem (`Problem.of`)."""
        return cls(Problem.of(setting, said, remedy, named=tuple(named)))

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `with_names` may replace, for each problem the key first."""
        return tuple(name for problem in self.problems for name in problem.names)

    def with_names(self, names: Mapping[str, str]) -> Self:
        """Return the error with other names in its text (`Problem.shown`)."""
        shown = (replace(one, reason=one.shown(names), remedy="", named=()) for one in self.problems)
        return type(self)(*shown, between=self.between)


@contextlib.contextmanager
def about(key: str) -> Iterator[None]:
    """Context for reading the file that the setting `key` names; problems without a key get that key."""
    try:
        yield
    except ZigguratError as error:
        error.problems = tuple(replace(one, key=one.key or key) for one in error.problems)
        raise


class ConfigError(ZigguratError, ValueError):
    """A configuration key is unknown, ill-typed, out of range or in conflict with another key.

    It is a ValueError so that a section's rule can raise it, with the key relative to the section; pydantic then adds
    the location of the section.
    """


class DataError(ZigguratError):
    """A corpus, vocabulary or store cannot be used; the message names file and line, and the byte for encodings."""


class DamageError(DataError):
    """A corpus file did not arrive intact: it is cut short, was changed in transit, or is not of the claimed kind."""


class CheckpointError(ZigguratError):
    """A checkpoint or model directory is missing, damaged, or has a different format version."""


class ExportError(ZigguratError):
    """A model cannot be exported or imported, or the result computes something else; the message gives all reasons."""


class TrainingError(ZigguratError):
    """Training cannot continue (for example after too many consecutive non-finite updates)."""


class MachineError(ZigguratError):
    """The system could not read or write a file for a reason other than its content; the file may be intact."""


def printable(text: str, limit: int = 80) -> str:
    """Return `text` safe for a terminal or a log: control and bidirectional characters escaped, cut at `limit`.

    Corpora contain terminal escape sequences and right-to-left overrides. Printed raw, they can rewrite the terminal's
    content or reverse the displayed text.
    """
    # Ranges: LRE to RLO (U+202A-E), LRI to PDI (U+2066-9), and the Arabic letter mark.
    shown = "".join(
        c
        if c.isprintable() and not (0x202A <= ord(c) <= 0x202E or 0x2066 <= ord(c) <= 0x2069 or ord(c) == 0x061C)
        else c.encode("unicode_escape").decode("ascii")
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def other_format(path: object, found: object, reads: object, remedy: str) -> Problem:
    """Return the problem of a file or folder whose format number is not the one that this version reads.

    Every file had format 1 in the first release, so other numbers are from a development version or a later one.
    """
    return Problem(
        "",
        f"{path}: format {printable(str(found))}, but this version of ziggurat reads {reads}: written by a development "
        "version or a later one",
        remedy,
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
    """Raise MachineError if `error`, from reading `path`, has a transient cause in the system; otherwise return.

    Without this, too many open files would look like damage, and intact data would be rebuilt or set aside.
    """
    if isinstance(error, OSError) and error.errno in _PASSING:
        raise MachineError(f"{path}: cannot be read: {os.strerror(error.errno)}{_PASSING[error.errno]}") from None


def is_full_disk(error: BaseException) -> bool:
    """Return True if a write failed for lack of room: a full disk, a used-up quota, or the file size limit."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """Context for writing the file or folder `path`: errors without a file name, or with a temporary one, get its name.

    The system does not name the file when writing to or syncing an open one fails. A library's OSError without a number
    becomes MachineError, with the system's reason from the chain of causes.
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
    """Return the system's message for the first numbered OSError behind `error`; None if there is none."""
    earlier = error.__cause__ or error.__context__
    while earlier is not None:
        if isinstance(earlier, OSError) and earlier.errno is not None:
            return os.strerror(earlier.errno)
        earlier = earlier.__cause__ or earlier.__context__
    return None


def why_unwritten(error: OSError) -> str:
    """Return the message for an error of `is_full_disk`: the file, the room left, and what to do."""
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
    """Return True if memory ran out, by the messages of Python, C++, torch's CPU allocator or the GPU."""
    if isinstance(error, MemoryError):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's; compared by name to avoid importing torch
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
    """Return "memory" or "threads" if `error`, or one in its chain of causes, means that these ran out; otherwise None.

    The command line checks every error that reaches it, because a reader may have taken it for damage.
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
    "annot allocate memory",  # the system's message, capitalised or not
    "mkl_malloc: failed",
)
_WORDS_FOR_NO_THREADS = ("can't start new thread", "Failed to launch worker thread")
_EAGAIN = "Resource temporarily unavailable"  # std::thread's RuntimeError; for locked files an OSError
