"""Temporary files: their names, and a lock that tells whether the writer lives.

A file on its way to NAME is called `.NAME.<8 letters>.tmp` and locked (flock) while its writer lives: the kernel
releases the lock when the process dies, however it dies. Whoever can lock such a file may remove it. Folders follow
the same pattern (ziggurat.system.staging). In order: locks, temporary files, putting content on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ziggurat.system.errors import DataError

TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>[a-z0-9_]{8})\.tmp", re.DOTALL)
"""Names of temporary files (`kind` is tempfile.mkstemp's random part) and folders (`kind` is a word)."""

_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def try_lock(descriptor: int) -> bool:
    """Lock an open file until its last descriptor is closed; return False when another process holds it.

    Raises OSError where the file system has no locks (lock_missing). The file must be open for writing: NFS implements
    flock by byte-range locks, which need that, and which do not lock folders across machines.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_missing(path: Path, error: OSError) -> DataError:
    """Return the error to raise when `path` cannot be locked although no process holds it, with the way out."""
    if error.errno in _WITHOUT_LOCKS:
        return DataError(
            f"{path}: the file system there cannot lock files ({error.strerror}); without locks two processes could "
            "write the same folder at once. Mount it with locks (NFS without `nolock`, Lustre with `-o flock`), or put "
            "the folder on another file system"
        )
    return DataError(f"{path}: cannot be locked: {error.strerror or error}")


@contextlib.contextmanager
def locked(file: Path, how: int, busy: str) -> Iterator[None]:
    """Context that holds the lock of a file, made where it is missing; not of a folder, which NFS locks on one machine.

    Args:
        file: the file.
        how: LOCK_EX or LOCK_SH of fcntl; with LOCK_NB another process's lock is an error, else it is waited for.
        busy: what the error then says.

    Raises DataError: another process holds it, or the file system has no locks.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise DataError(busy) from None
        except OSError as error:
            raise lock_missing(file.parent, error) from None
        yield
    finally:
        os.close(descriptor)


def held(file: Path) -> bool:
    """Return whether a process holds the lock of a file, for itself alone; False where that cannot be known."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def is_same(path: Path, descriptor: int) -> bool:
    """Return True if `path` is (still) the file or folder that `descriptor` refers to."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def make_temporary(path: Path) -> tuple[int, Path]:
    """Create a temporary file beside `path` and lock it; return its descriptor, open for writing, and its name.

    Raises OSError when it cannot be created.
    """
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            held = try_lock(descriptor)
        except OSError:  # no locks here, so no other process can lock it and remove it either
            return descriptor, Path(name)
        # Between creation and locking, another process may have taken it for a dead writer's and removed it.
        if held and is_same(Path(name), descriptor):
            return descriptor, Path(name)
        os.close(descriptor)


def remove_dead(path: Path) -> None:
    """Remove the temporary files of `path` whose writers are dead."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            if match is not None and match["name"] == path.name:
                remove_if_dead(Path(entry.path))


def remove_if_dead(file: Path) -> None:
    """Remove a temporary file whose writer is dead; anything that cannot be locked or is not a regular file stays."""
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            return
        # Anybody can give a link or a pipe such a name: do not follow the one, do not wait for the other.
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # The name may belong to a new file by now, which its writer has not locked yet.
        if try_lock(descriptor) and is_same(file, descriptor):
            file.unlink()
    except OSError:  # no locks, or no permission to remove it
        pass
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk, where file system and permissions allow it. Raises OSError (EIO)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder with permission to write but not to read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network file systems that cannot sync folders answer with these numbers, as they do for locks.
        if error.errno not in _WITHOUT_LOCKS | {errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write all files and folders under `folder` to the disk, whoever wrote them. Raises OSError."""
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
