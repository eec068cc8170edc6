"""Temporary files: one way to name them, a lock that says whose writer lives, and what to do where locks are missing.

`.NAME.<8 letters>.tmp` beside NAME is made by nobody else, and locked (flock) as long as its writer lives: the kernel
lets go of the lock when the process dies, however it dies. Who can lock such a file may remove it. Folders go by the
same pattern: ziggurat.data.workspace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path

from ziggurat.errors import DataError

__all__ = [
    "TEMPORARY",
    "is_same",
    "lock_missing",
    "make_temporary",
    "remove_dead",
    "remove_if_dead",
    "sync_folder",
    "sync_tree",
    "try_lock",
]

TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>[a-z0-9_]{8})\.tmp", re.DOTALL)
"""Names of temporary files (`kind` as tempfile.mkstemp makes it up) and folders."""

_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def try_lock(descriptor: int) -> bool:
    """Lock an open file until its last descriptor is closed; False when another process holds it.

    Raises OSError where the file system has no locks (lock_missing). The file is to be open for writing: NFS turns
    flock into locks of bytes, which it gives on such files alone, and on folders within one machine alone.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_missing(path: Path, error: OSError) -> DataError:
    """Return what to say when `path` cannot be locked: that nobody holds it, and what to do."""
    if error.errno in _WITHOUT_LOCKS:
        return DataError(
            f"{path}: the file system there cannot lock files ({error.strerror}); without locks two processes could "
            "write the same folder at once. Mount it with locks (NFS without `nolock`, Lustre with `-o flock`), or put "
            "the folder on another file system"
        )
    return DataError(f"{path}: cannot be locked: {error.strerror or error}")


def is_same(path: Path, descriptor: int) -> bool:
    """Whether `path` is (still) the file or folder that `descriptor` was opened on."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def make_temporary(path: Path) -> tuple[int, Path]:
    """Make a temporary file beside `path` and lock it; return its descriptor, open for writing, and its name.

    Raises OSError when it cannot be made.
    """
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            held = try_lock(descriptor)
        except OSError:  # no locks here: nobody can lock it to remove it either
            return descriptor, Path(name)
        # Between its making and its locking another process may have taken it for a dead one's.
        if held and is_same(Path(name), descriptor):
            return descriptor, Path(name)
        os.close(descriptor)


def remove_dead(path: Path) -> None:
    """Remove the temporary files of `path` that no living process writes."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            if match is not None and match["name"] == path.name:
                remove_if_dead(Path(entry.path))


def remove_if_dead(file: Path) -> None:
    """Remove a temporary file that no living process writes; what cannot be locked, or is no regular file, stays."""
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            return
        # Not through a link, not waiting at a pipe: anybody can give a file such a name.
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # Under the same name another file may lie by now, and not be locked yet.
        if try_lock(descriptor) and is_same(file, descriptor):
            file.unlink()
    except OSError:  # no locks, or no right to remove it
        pass
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put the folder's entries on the disk, where its file system can and its rights allow it. Raises OSError (EIO)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder that may be written and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS | {errno.EBADF}:  # file systems over networks sync no folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put all files under `folder`, and its folders, on the disk, whoever wrote them. Raises OSError."""
    for place, _, files in os.walk(folder):
        for name in files:
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(place))
