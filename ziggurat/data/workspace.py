"""Folders that appear whole or not at all, written by one process at a time, and the sweep of what the dead left.

While NAME is built there lies beside it `.NAME.building.tmp`:

    lock    held by the process that builds; a file, since on NFS the lock of a folder does not reach other machines
    new/    what will be NAME
    old/    what was NAME until new/ takes its place: the whole journal; found while there is no NAME, it is put back
    gone/   what was NAME and is being deleted

Two renames replace a folder. renameat2(RENAME_EXCHANGE) would be one, but NFS does not have it: the journal would be
needed all the same. `.NAME.deleting.tmp` is a folder on its way out, of no use to anybody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ziggurat.data.temporary import (
    TEMPORARY,
    is_same,
    lock_missing,
    remove_if_dead,
    sync_folder,
    sync_tree,
    try_lock,
)
from ziggurat.errors import DataError

__all__ = ["Staging", "building", "discard", "recover", "staged", "sweep", "tidy"]

_BUILDING, _DELETING = "building", "deleting"  # eight letters, as in the names of temporary files
_WAIT_SECONDS = 1.0


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Give an empty folder; when the block ends without an error it becomes `target`, in place of what was there.

    Its content is on the disk before it has its name. After an error nothing of it is left, and `target` is as it was.

    Raises:
        DataError: another process is building the same folder, or the folder cannot be made, or not be put there.
    """
    try:
        staging = Staging(target)
    except OSError as error:
        raise _unmade(target, error) from None
    try:
        yield staging.begin()
        staging.put_in_place()
    finally:
        staging.close()


def staged(target: Path) -> Path:
    """Return where the next content of `target` is made; for processes that fill one folder together."""
    return _beside(_real(target), _BUILDING) / "new"


class Staging:
    """The place where a folder is built, held by this process until `close`; `building` is this as a context.

    What an earlier process left there is removed; a folder that it had set aside is put back.

    Args:
        target: the folder; where it is a link, the folder that it points to.

    Raises DataError when another process is building the same folder or there are no locks, OSError when the place
    cannot be made.
    """

    def __init__(self, target: Path) -> None:
        self.target = _real(target)
        self._place = _beside(self.target, _BUILDING)
        self._new, self._old, self._gone = (self._place / name for name in ("new", "old", "gone"))
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._enter()
        try:
            _take_over(self.target)
            self._tidy()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> int:
        """Make the place and lock it; return the descriptor that holds the lock."""
        file = self._place / "lock"
        while True:
            self._place.mkdir(exist_ok=True)
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # its owner finished just now
                continue
            try:
                held = try_lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                self._leave_unlocked()
                raise lock_missing(self.target, error) from None
            if not held:
                os.close(descriptor)
                raise _busy(self.target)
            if is_same(file, descriptor):
                return descriptor
            os.close(descriptor)  # its owner finished between opening and locking

    def _leave_unlocked(self) -> None:
        """Leave no trace where there are no locks, and touch nothing of what others may have there."""
        with contextlib.suppress(OSError):
            if os.listdir(self._place) == ["lock"]:
                os.unlink(self._place / "lock")
                os.rmdir(self._place)

    def _tidy(self) -> None:
        """Put back what was set aside, and remove all else but the lock."""
        if self._old.exists():
            if os.path.lexists(self.target):
                self._forget_old()
            else:
                os.rename(self._old, self.target)
                sync_folder(self.target.parent)
        for entry in list(os.scandir(self._place)):
            if entry.name != "lock":
                _remove(Path(entry.path))
        _remove(_beside(self.target, _DELETING))

    def _forget_old(self) -> None:
        # Renamed before it is deleted: a half deleted one must never be put back.
        _remove(self._gone)
        os.rename(self._old, self._gone)

    def begin(self) -> Path:
        """Make the empty folder to fill, and return it. Raises OSError."""
        self._new.mkdir()
        return self._new

    def put_in_place(self) -> None:
        """Give the folder its name. Raises OSError: it could not be done, and nothing has changed; DataError: a mount.

        Content comes to the disk before the name, the name before the old content goes.
        """
        sync_tree(self._new)
        if self.target.exists() and not self.target.is_dir():
            raise DataError(f"{self.target}: is a file, expected a folder to write; give another one")
        try:
            os.rename(self._new, self.target)  # nothing there, or an empty folder: one rename does
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise _unmade(self.target, error) from None
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._replace()
        sync_folder(self.target.parent)
        if self._old.exists():
            sync_folder(self._place)
            self._forget_old()

    def _replace(self) -> None:
        try:
            os.rename(self.target, self._old)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise _unmade(self.target, error) from None
            raise
        try:
            os.rename(self._new, self.target)
        except OSError:
            os.rename(self._old, self.target)
            raise

    def close(self) -> None:
        """Remove what is left of the place, and let others in."""
        try:
            if self._old.exists():  # an error right after it was set aside
                self._tidy()
            for entry in list(os.scandir(self._place)):
                if entry.name != "lock":
                    shutil.rmtree(entry.path, ignore_errors=True)
            (self._place / "lock").unlink()
            self._place.rmdir()
        except OSError:  # not ours to remove any more, or a disk in trouble: the next one here tries again
            pass
        finally:
            os.close(self._lock)


def recover(target: str | Path) -> None:
    """Put a folder back that a process left aside when it was killed between its two renames; call it before reading.

    Where `target` is there it costs one look. A living process is waited for: it is about to put the new one there.

    Raises DataError when the folder lies aside and cannot be put back, on a file system that is read-only, say.
    """
    path = _real(Path(target))
    end = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        aside = [old for old in (_beside(path, _BUILDING) / "old", _earlier(path, "replaced")) if old.exists()]
        if not aside:
            return
        try:
            Staging(path).close()
        except DataError:  # between the two renames just now
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        except OSError as error:
            raise DataError(
                f"{path}: a process was killed while it replaced this folder, which lies at {aside[0]} and cannot be "
                f"put back ({error.strerror}); rename it back"
            ) from None


def tidy(target: str | Path) -> None:
    """Put back or remove what a dead process left beside `target`; for verbs that may find it whole and write nothing.

    Raises DataError: another process is building it, or the remains cannot be removed.
    """
    path = _real(Path(target))
    remains = [
        _beside(path, _BUILDING),
        _beside(path, _DELETING),
        *(_earlier(path, e) for e in ("partial", "replaced")),
    ]
    if not any(map(os.path.lexists, remains)):
        return
    try:
        Staging(path).close()
    except OSError as error:
        raise DataError(f"{path}: what a killed process left beside it cannot be removed: {error}") from None


def discard(folder: Path) -> None:
    """Delete a folder, renamed first: a kill on the way leaves no half of it under its name. Raises OSError.

    Nothing is made for it, so it can be done on a disk that is full.
    """
    folder = _real(folder)
    doomed = _beside(folder, _DELETING)
    _remove(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path, name: str | None = None, *, deep: bool = False) -> None:
    """Remove what dead processes left of temporary files and folders; what a living one holds stays.

    Args:
        folder: a folder of ours; with `name` any folder.
        name: of a file or folder; only what was to be this is removed, since others name their files so too.
        deep: also in all folders under it.

    Nothing is raised: what cannot be removed is in nobody's way.
    """
    for place, folders, files in os.walk(folder):
        found = [*folders, *files]
        folders[:] = [other for other in folders if deep and not TEMPORARY.fullmatch(other)]
        for entry in found:
            match = TEMPORARY.fullmatch(entry)
            if match is None or name not in (None, match["name"]):
                continue
            path = Path(place, entry)
            if path.is_symlink():  # cannot be locked
                continue
            if not path.is_dir():
                remove_if_dead(path)
            elif match["kind"] == _DELETING:
                shutil.rmtree(path, ignore_errors=True)
            elif match["kind"] == _BUILDING:
                with contextlib.suppress(DataError, OSError):
                    Staging(Path(place, match["name"])).close()


def _real(target: Path) -> Path:
    """Return the absolute path without links: what is renamed is the folder itself."""
    return Path(os.path.realpath(target))


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}.tmp")


def _earlier(target: Path, ending: str) -> Path:
    return target.with_name(f"{target.name}.{ending}")


def _take_over(target: Path) -> None:
    """Do with what earlier versions called `NAME.partial` (a folder, locked itself) and `NAME.replaced` as they did."""
    partial, replaced = _earlier(target, "partial"), _earlier(target, "replaced")
    if not replaced.is_dir() and not partial.is_dir():
        return
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor):
            raise _busy(target)
        if replaced.is_dir():
            if target.exists():
                shutil.rmtree(replaced)
            else:
                os.rename(replaced, target)
        if is_same(partial, descriptor):
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _busy(target: Path) -> DataError:
    return DataError(f"{target}: another process of ziggurat is building this folder; wait for it to end")


def _unmade(target: Path, error: OSError) -> DataError:
    parent = _real(target).parent
    where = ""
    if error.errno == errno.EBUSY:  # where a container has its volume, say
        where = f". A file system is mounted there, so it cannot be replaced: name a folder inside, such as {target}/1"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = f". Folders are built beside their place, so {parent} must be writable"
    return DataError(f"{target}: cannot be made: {error.strerror or error}{where}")
