"""Folders that appear whole or not at all, written by one process at a time, and the clean-up after killed processes.

While NAME is written, its file is called `.NAME.<8 letters>.tmp` and locked (flock) as long as its writer lives: the
kernel releases the lock when the process dies, however that happens. Any process that can lock such a file may remove
it. Folders follow the same pattern: while NAME is built, `.NAME.building.tmp` is next to it:

    lock    held by the building process; a file, since on NFS the lock of a folder does not reach other machines
    new/    the future NAME
    old/    the former NAME, until new/ has replaced it. If there is no NAME, old/ is put back
    gone/   the former NAME, being deleted

`.NAME.deleting.tmp` is a folder that is being deleted without a successor. Two renames replace a folder.
renameat2(RENAME_EXCHANGE) would need only one, but NFS lacks it, so the journal would be needed anyway.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ziggurat.system.errors import DataError, written_whole
from ziggurat.system.small_files import check_name

TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>[a-z0-9_]{8})\.tmp", re.DOTALL)
"""TEMPORARY matches names of temporary files (`kind` is mkstemp's random part) and folders (`kind` is a word)."""

_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def try_lock(descriptor: int) -> bool:
    """Lock an open file until its last descriptor is closed; return False if another process holds it.

    Raises OSError if the file system has no locks (lock_missing). The file must be open for writing: NFS implements
    flock with byte-range locks, which require that and do not lock folders across machines.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_missing(path: Path, error: OSError) -> DataError:
    """Return the error to raise if `path` cannot be locked although no process holds it, with a remedy."""
    if error.errno in _WITHOUT_LOCKS:
        return DataError(
            f"{path}: the file system there cannot lock files ({error.strerror}); without locks two processes could "
            "write the same folder at once. Mount it with locks (NFS without `nolock`, Lustre with `-o flock`), or put "
            "the folder on another file system"
        )
    return DataError(f"{path}: cannot be locked: {error.strerror or error}")


@contextlib.contextmanager
def locked(file: Path, how: int, busy: str) -> Iterator[None]:
    """Context that holds the lock of a file, created if missing; not of a folder, which NFS locks on one machine only.

    `how` is fcntl's LOCK_EX or LOCK_SH. With LOCK_NB another process's lock raises DataError with the text `busy`;
    otherwise it is waited for. Also raises DataError if the file system has no locks.
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
    """Return whether a process holds the exclusive lock of a file; False if that is unknown."""
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
    """Create a temporary file next to `path` and lock it; return its descriptor, open for writing, and its name.

    Raises OSError if it cannot be created.
    """
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            held = try_lock(descriptor)
        except OSError:  # no locks here, so no other process can lock and remove it either
            return descriptor, Path(name)
        # Before it was locked, another process may have taken it for a dead writer's file and removed it.
        if held and is_same(Path(name), descriptor):
            return descriptor, Path(name)
        os.close(descriptor)


def remove_dead(path: Path) -> None:
    """Remove the temporary files of `path` whose writers are dead."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            if match is not None and match["name"] == path.name:
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(file: Path) -> None:
    """Remove a temporary file whose writer is dead; anything that cannot be locked or is not a regular file stays."""
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            return
        # A link or a pipe may have such a name: do not follow a link, and do not wait for a pipe.
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # The name may now belong to a new file that its writer has not locked yet.
        if try_lock(descriptor) and is_same(file, descriptor):
            file.unlink()
    except OSError:  # no locks, or no permission to remove it
        pass
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk if file system and permissions allow it. Raises OSError (EIO)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # the folder is writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network file systems that cannot sync folders return these numbers, as they do for locks.
        if error.errno not in _WITHOUT_LOCKS | {errno.EBADF}:
            raise
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Write all files and folders under `folder` to disk, including those of other processes. Raises OSError."""
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


BUILDING, DELETING = "building", "deleting"
"""BUILDING and DELETING are kinds of temporary folders: eight letters, to match the names of temporary files."""


class BeingBuiltError(DataError):
    """Raised if another process is building the folder; waiting may help."""


def staged(target: Path) -> Path:
    """Return the folder where the next content of `target` is built, for processes that fill it together."""
    return beside(_real_path(target), BUILDING) / "new"


class Staging:
    """The right of this process to build a folder, held until `close`; `building` is the same as a context.

    Remains of an earlier process are removed; a folder that it had set aside is put back. If the target is a link, the
    folder that it points to is built. Raises DataError if another process is building the same folder or there are no
    locks, ConfigError for a name that is not UTF-8, and OSError if the folder next to it cannot be created.
    """

    def __init__(self, target: Path) -> None:
        self.target = _real_path(target)
        check_name(self.target)  # now, not after hours spent on a folder that other libraries cannot open
        self._place = beside(self.target, BUILDING)
        self._new, self._old, self._gone = (self._place / name for name in ("new", "old", "gone"))
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._enter()
        try:
            self._tidy()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> int:
        """Create the folder next to the target and lock it; return the descriptor that holds the lock."""
        file = self._place / "lock"
        while True:
            self._place.mkdir(exist_ok=True)
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the previous owner just finished and removed the folder
                continue
            except OSError:  # for example too many open files, or a full disk
                with contextlib.suppress(OSError):
                    self._place.rmdir()
                raise
            try:
                held = try_lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                self._leave_unlocked()
                raise lock_missing(self.target, error) from None
            if not held:
                os.close(descriptor)
                raise BeingBuiltError(
                    f"{self.target}: another process of ziggurat is building this folder; wait for it to end"
                )
            if is_same(file, descriptor):
                return descriptor
            os.close(descriptor)  # the previous owner removed the file between its opening and its locking here

    def _leave_unlocked(self) -> None:
        """Leave no trace on a file system without locks, but keep files that may belong to another process."""
        with contextlib.suppress(OSError):
            if os.listdir(self._place) == ["lock"]:
                os.unlink(self._place / "lock")
                os.rmdir(self._place)

    def _tidy(self) -> None:
        """Put back a folder that was set aside; remove everything else except the lock."""
        if self._old.exists():
            if os.path.lexists(self.target):
                self._forget_old()
            else:
                os.rename(self._old, self.target)
                sync_folder(self.target.parent)
        for entry in list(os.scandir(self._place)):
            if entry.name != "lock":
                remove(Path(entry.path))
        remove(beside(self.target, DELETING))

    def _forget_old(self) -> None:
        # Renamed before it is deleted: a half-deleted folder must never be put back.
        remove(self._gone)
        os.rename(self._old, self._gone)

    def begin(self) -> Path:
        """Create and return the empty folder to fill. Raises OSError."""
        self._new.mkdir()
        return self._new

    def put_in_place(self) -> None:
        """Give the folder its name.

        Raises OSError if that fails, in which case nothing has changed; DataError for a file or a mount point.
        """
        # The content must be on disk before the name, and the name before the old content is deleted.
        _sync_tree(self._new)
        if self.target.exists() and not self.target.is_dir():
            raise DataError(f"{self.target}: is a file, expected a folder to write; give another one")
        try:
            os.rename(self._new, self.target)  # enough if there is nothing, or an empty folder
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._replace()
            elif error.errno == errno.EBUSY:
                raise _cannot_be_made(self.target, error) from None
            else:
                raise
        sync_folder(self.target.parent)
        if self._old.exists():
            sync_folder(self._place)
            self._forget_old()

    def _replace(self) -> None:
        try:
            os.rename(self.target, self._old)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise _cannot_be_made(self.target, error) from None
            raise
        try:
            os.rename(self._new, self.target)
        except OSError:
            os.rename(self._old, self.target)
            raise

    def close(self) -> None:
        """Remove the temporary folder next to the target and release the lock."""
        try:
            if self._old.exists():  # an error occurred right after the target was set aside
                self._tidy()
            for entry in list(os.scandir(self._place)):
                if entry.name != "lock":
                    shutil.rmtree(entry.path, ignore_errors=True)
            (self._place / "lock").unlink()
            self._place.rmdir()
        except OSError:  # no permission to remove it, or a failing disk: the next process here tries again
            pass
        finally:
            os.close(self._lock)


def _real_path(target: str | Path) -> Path:
    """Return the absolute path without links, since the folder itself is renamed and not a link to it."""
    return Path(os.path.realpath(target))


def beside(target: Path, kind: str) -> Path:
    """Return the path next to `target` for a folder of this kind (BUILDING, DELETING)."""
    return target.with_name(f".{target.name}.{kind}.tmp")


def remove(path: Path) -> None:
    """Remove a folder with everything in it, or a file; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _cannot_be_made(target: Path, error: OSError) -> DataError:
    """Return the error for a folder that cannot be created or replaced, with a remedy."""
    parent = _real_path(target).parent
    where = ""
    if error.errno == errno.EBUSY:  # for example the volume of a container
        where = f". A file system is mounted there, so it cannot be replaced: name a folder inside, such as {target}/1"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = f". Folders are built next to their final path, so {parent} must be writable"
    return DataError(f"{target}: cannot be created: {error.strerror or error}{where}")


_WAIT_SECONDS = 1.0


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` when the block ends without an error.

    The content is on disk before the folder gets its name. After an error none of it is left, and `target` is
    unchanged. Raises DataError if another process is building the same folder, or if it cannot be created or put in
    place.
    """
    with written_whole(target):
        try:
            staging = Staging(target)
        except OSError as error:
            raise _cannot_be_made(target, error) from None
        try:
            yield staging.begin()
            staging.put_in_place()
        finally:
            staging.close()


def recover(target: str | Path) -> None:
    """Put `target` back if a process was killed between the two renames that replace it; call this before reading.

    If `target` exists, this costs one check. If a living process is between its renames, this waits for it. Raises
    DataError if the folder was set aside and cannot be put back, for example on a read-only file system.
    """
    path = _real_path(Path(target))
    end = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        aside = beside(path, BUILDING) / "old"
        if not aside.exists():
            return
        try:
            Staging(path).close()
        except BeingBuiltError:  # a living process is between its two renames just now
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        except OSError as error:
            raise DataError(
                f"{path}: a process was killed while it replaced this folder, which is now at {aside} and cannot be "
                f"put back ({error.strerror}); rename it back"
            ) from None


def tidy(target: str | Path) -> None:
    """Put back or remove the remains of a dead process next to `target`, for verbs that may not need to write `target`.

    Raises DataError if another process is building it or the remains cannot be removed.
    """
    path = _real_path(Path(target))
    if not any(os.path.lexists(beside(path, kind)) for kind in (BUILDING, DELETING)):
        return
    try:
        Staging(path).close()
    except OSError as error:
        raise DataError(f"{path}: the remains of a killed process next to it cannot be removed: {error}") from None


def discard(folder: Path) -> None:
    """Rename and then delete a folder, so that a kill never leaves half of it under its name. Raises OSError.

    It creates nothing, so it works on a full disk.
    """
    folder = _real_path(folder)
    doomed = beside(folder, DELETING)
    remove(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path, *, deep: bool = False) -> None:
    """Remove temporary files and folders of dead processes, but none of living ones; those that cannot be removed stay.

    Only ziggurat may write to `folder`, because other programs use such names as well. `deep`: also in all folders
    under it.
    """
    for place, folders, files in os.walk(folder):
        found = [*folders, *files]
        folders[:] = [other for other in folders if deep and not TEMPORARY.fullmatch(other)]
        for entry in found:
            match = TEMPORARY.fullmatch(entry)
            if match is None:
                continue
            path = Path(place, entry)
            if path.is_symlink():  # it cannot be locked
                continue
            if not path.is_dir():
                _remove_if_dead(path)
            elif match["kind"] == DELETING:
                shutil.rmtree(path, ignore_errors=True)
            elif match["kind"] == BUILDING:
                with contextlib.suppress(DataError, OSError):
                    Staging(Path(place, match["name"])).close()
