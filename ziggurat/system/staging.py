"""Building of folders: one process builds the next content beside a folder, which gets its name when all is on disk.

While NAME is built, `.NAME.building.tmp` lies beside it:

    lock    held by the building process; a file, since on NFS the lock of a folder does not reach other machines
    new/    the future NAME
    old/    the former NAME, until new/ has taken its place. This is the whole journal: if there is no NAME, old/ is
            put back
    gone/   the former NAME, being deleted

`.NAME.deleting.tmp` is a folder that is being deleted without a successor. Two renames replace a folder;
renameat2(RENAME_EXCHANGE) would take one, but NFS lacks it, so the journal would be needed anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from ziggurat.system.errors import DataError
from ziggurat.system.small_files import check_name
from ziggurat.system.temporary import is_same, lock_missing, sync_folder, sync_tree, try_lock

BUILDING, DELETING = "building", "deleting"
"""Kinds of folders on their way in and out: words of eight letters, to fit the names of temporary files."""


class BeingBuiltError(DataError):
    """Another process is building the folder; waiting may help."""


def staged(target: Path) -> Path:
    """Return the folder where the next content of `target` is built, for processes that fill it together."""
    return beside(real_path(target), BUILDING) / "new"


class Staging:
    """The right of this process to build a folder, held until `close`; workspace.building is the same as a context.

    Remains of an earlier process are removed; a folder that it had set aside is put back.

    Args:
        target: the folder; for a link, the folder that it points to.

    Raises DataError when another process is building the same folder or there are no locks, ConfigError for a name that
    is not UTF-8, OSError when the folder beside it cannot be created.
    """

    def __init__(self, target: Path) -> None:
        self.target = real_path(target)
        check_name(self.target)  # now, not after hours of filling a folder that other libraries cannot open
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
        """Create the folder beside the target and lock it; return the descriptor that holds the lock."""
        file = self._place / "lock"
        while True:
            self._place.mkdir(exist_ok=True)
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the former owner just finished and removed the folder
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
            os.close(descriptor)  # the former owner removed the file between our opening and our locking it

    def _leave_unlocked(self) -> None:
        """Leave no trace on a file system without locks, but touch nothing that another process may have there."""
        with contextlib.suppress(OSError):
            if os.listdir(self._place) == ["lock"]:
                os.unlink(self._place / "lock")
                os.rmdir(self._place)

    def _tidy(self) -> None:
        """Put back a folder that was set aside; remove everything else but the lock."""
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
        """Create the empty folder to fill, and return it. Raises OSError."""
        self._new.mkdir()
        return self._new

    def put_in_place(self) -> None:
        """Give the folder its name.

        Raises OSError when it cannot be done, and nothing has changed; DataError for a file or a mount point.
        """
        # Content must be on the disk before the name, and the name before the old content is deleted.
        sync_tree(self._new)
        if self.target.exists() and not self.target.is_dir():
            raise DataError(f"{self.target}: is a file, expected a folder to write; give another one")
        try:
            os.rename(self._new, self.target)  # enough where there is nothing, or an empty folder
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise cannot_be_made(self.target, error) from None
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
                raise cannot_be_made(self.target, error) from None
            raise
        try:
            os.rename(self._new, self.target)
        except OSError:
            os.rename(self._old, self.target)
            raise

    def close(self) -> None:
        """Remove what is left beside the target, and release the lock."""
        try:
            if self._old.exists():  # there was an error right after the target was set aside
                self._tidy()
            for entry in list(os.scandir(self._place)):
                if entry.name != "lock":
                    shutil.rmtree(entry.path, ignore_errors=True)
            (self._place / "lock").unlink()
            self._place.rmdir()
        except OSError:  # no longer ours to remove, or a failing disk: the next process here tries again
            pass
        finally:
            os.close(self._lock)


def real_path(target: str | Path) -> Path:
    """Return the absolute path without links, since the folder itself is renamed and not a link to it."""
    return Path(os.path.realpath(target))


def beside(target: Path, kind: str) -> Path:
    """Return the path beside `target` for a folder of this kind (BUILDING, DELETING)."""
    return target.with_name(f".{target.name}.{kind}.tmp")


def remove(path: Path) -> None:
    """Remove a folder with everything in it, or a file; it may be missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def cannot_be_made(target: Path, error: OSError) -> DataError:
    """Return the error to raise for a folder that cannot be created or replaced, with the way out."""
    parent = real_path(target).parent
    where = ""
    if error.errno == errno.EBUSY:  # for example the volume of a container
        where = f". A file system is mounted there, so it cannot be replaced: name a folder inside, such as {target}/1"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = f". Folders are built beside their place, so {parent} must be writable"
    return DataError(f"{target}: cannot be made: {error.strerror or error}{where}")
