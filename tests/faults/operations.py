"""File operations of a process, counted; at the n-th one it is killed, or the operation fails.

Python's audit events report opening, renaming, creating and removing. Writing and syncing have no events, so
replacements of `open` and `os.fsync` count them, and can cut a file off in the middle of a write, as a full disk or a
kill does. Writes by C++ libraries (Arrow) are not seen; small file systems (experiments/faults/disks.py) and kills at
random times cover those.

An audit hook cannot be removed: use it in a process that ends afterwards (tests/faults/nursery.py).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "fcntl.flock",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}
"""_EVENTS are the functions that shutil and tempfile call in turn."""

ERRORS: dict[str, tuple[int, ...]] = {
    "open": (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES),
    "read": (errno.EIO, errno.EMFILE, errno.EACCES),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EACCES),
    "rename": (errno.EIO, errno.ENOSPC, errno.EACCES),
    "link": (errno.ENOSPC, errno.EIO, errno.EACCES),
    "symlink": (errno.ENOSPC, errno.EIO, errno.EACCES),
    "remove": (errno.EIO, errno.EACCES),
    "rmdir": (errno.EIO, errno.EACCES),
    "truncate": (errno.EIO,),
    "chmod": (errno.EIO,),
    "flock": (errno.ENOLCK, errno.EIO),
}
"""ERRORS are the errors that an operation of this kind can meet; a file system raises no others."""

_BY_NUMBER = {"write", "fsync", "chmod", "flock", "truncate"}
_TAKES_ROOM = {"open", "write", "fsync", "mkdir", "link", "symlink"}


class Operation(NamedTuple):
    """One file operation."""

    kind: str
    """A key of ERRORS."""
    path: str
    """The file or folder; for a rename, the new name."""


class Fault(NamedTuple):
    """The disturbance at the n-th operation (from 1), counting those that write, or all with `reads`."""

    number: int
    error: int | None = None
    """The `errno` with which the operation fails; None: SIGKILL."""
    lasting: bool = False
    """Return whether all later ones that need disk space also fail, as on a full disk."""
    reads: bool = False
    """Return whether opening for reading counts as well."""


def watch(folder: Path, fault: Fault | None, told: Callable[[Operation], object]) -> None:
    """From now on, report every operation below `folder` to `told`, and cause `fault`."""
    watcher = _Watcher(folder, fault, told)
    sys.addaudithook(watcher.hear)
    real_fsync = os.fsync

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        watcher.happens("fsync", _named(number))
        if not watcher.holds(_named(number)):  # the watched files are in memory anyway
            real_fsync(number)

    os.fsync = fsync  # type: ignore[assignment]
    io.open = builtins.open = _Opener(watcher)  # type: ignore[assignment]
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # so that copying uses `write`


class _Watcher:
    """Counts operations, and knows when the fault is due."""

    def __init__(self, folder: Path, fault: Fault | None, told: Callable[[Operation], object]) -> None:
        self._folder = os.path.realpath(folder) + os.sep
        self._fault, self._told = fault, told
        self._count = 0
        self._lock = threading.Lock()
        self._inside = threading.local()  # looking at a path must not count

    def holds(self, path: str) -> bool:
        return path.startswith(self._folder)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in _EVENTS:
            return
        if getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            found = _operation(event, arguments)
        finally:
            self._inside.now = False
        if found is not None:
            self.happens(*found)

    def happens(self, kind: str, path: str, before: Callable[[], object] = lambda: None) -> None:
        """Count an operation; `before` does half of it, if that is possible."""
        if not self.holds(path):
            return
        fault = self._fault
        with self._lock:
            self._told(Operation(kind, path))
            if kind == "read" and not (fault is not None and fault.reads):
                return
            self._count += 1
            count = self._count
        if fault is None or count < fault.number or (count > fault.number and not fault.lasting):
            return
        if fault.error is None:
            before()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.lasting and kind not in _TAKES_ROOM:
            return
        before()
        assert fault.error is not None
        # Given only a descriptor, the system names no file, so the code that knows the file must name it.
        raise OSError(fault.error, os.strerror(fault.error), *([] if kind in _BY_NUMBER else [path]))


def _operation(event: str, arguments: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return kind and path of an audit event; None if it concerns no file."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return None
        return ("open" if flags & _WRITING else "read"), _absolute(path)
    kind = event.rpartition(".")[2]
    if kind == "rename":  # source, destination, folder of either
        return kind, _absolute(arguments[1], arguments[3])
    if kind in ("link", "symlink"):
        return kind, _absolute(arguments[1], arguments[-1])
    if kind in ("truncate", "flock"):
        return kind, _absolute(arguments[0])
    return kind, _absolute(arguments[0], arguments[-1])


def _absolute(path: Any, folder: int = -1) -> str:
    """Return the path of a file given by a path relative to an open folder or the current one, or by its descriptor."""
    if isinstance(path, int):
        return _named(path)
    text = os.fsdecode(path)
    if not os.path.isabs(text) and folder >= 0:
        text = os.path.join(_named(folder), text)
    return os.path.abspath(text)


def _named(descriptor: int) -> str:
    """Return the path of an open file."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


class _Raw(io.FileIO):
    """A file whose writes are counted; half of the bytes of a failing write get through."""

    def __init__(self, watcher: _Watcher, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self._watcher = watcher

    def write(self, data: Any, /) -> int | None:  # type: ignore[override]
        def half() -> None:
            content = memoryview(data).cast("B")
            super(_Raw, self).write(content[: len(content) // 2])

        self._watcher.happens("write", _named(self.fileno()), half)
        return super().write(data)


class _Opener:
    """`open`, with counted writes to files below the folder."""

    def __init__(self, watcher: _Watcher) -> None:
        self._watcher, self._open = watcher, io.open

    def __call__(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or not self._watcher.holds(_absolute(file)):
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _Raw(self._watcher, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text
