"""The place beside a folder where its next content is built by one process; it gets the name when all is on the disk.

While NAME is built there lies beside it `.NAME.building.tmp`:

    lock    held by the process that builds; a file, since on NFS the lock of a folder does not reach other machines
    new/    what will be NAME
    old/    what was NAME until new/ takes its place: the whole journal; found while there is no NAME, it is put back
    gone/   what was NAME and is being deleted

Two renames replace a folder. renameat2(RENAME_EXCHANGE) would be one, but NFS does not have it: the journal would be
needed all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from ziggurat.data.temporary import is_same, lock_missing, sync_folder, sync_tree, try_lock
from ziggurat.documents import check_name
from ziggurat.errors import DataError

__all__ = [
    "BUILDING",
    "DELETING",
    "BeingBuiltError",
    "Staging",
    "beside",
    "half_built_earlier",
    "of_earlier_versions",
    "real_path",
    "remove",
    "set_aside_earlier",
    "staged",
    "unmade",
]

BUILDING, DELETING = "building", "deleting"
"""Kinds of folders on their way in and out, of eight letters as in the names of temporary files."""

_OF_WHOLE_ONES = ("manifest.json", "model.safetensors", "export.json", "checkpoints")
_OF_EARLIER_VERSIONS = re.compile(
    r"(train|dev)-.*\.(arrow|npy)|(config|generation_config|tokenizer_config|manifest|export|onnx|meta)\.json"
    r"|(source_|target_|shared_)?vocab(ulary)?\.json|config\.yaml|model\.(safetensors|bin)|.*\.(onnx|spm|vocab)"
)
"""What earlier versions wrote into folders that they built beside their place."""


class BeingBuiltError(DataError):
    """Another process is building the folder, so it may help to wait."""


def staged(target: Path) -> Path:
    """Return where the next content of `target` is made; for processes that fill one folder together."""
    return beside(real_path(target), BUILDING) / "new"


class Staging:
    """The place where a folder is built, held by this process until `close`; `building` is this as a context.

    What an earlier process left there is removed; a folder that it had set aside is put back.

    Args:
        target: the folder; where it is a link, the folder that it points to.

    Raises DataError when another process is building the same folder or there are no locks, ConfigError for
    a name that is not UTF-8, OSError when the place cannot be made.
    """

    def __init__(self, target: Path) -> None:
        self.target = real_path(target)
        check_name(self.target)  # now, not when what is in it has taken hours and cannot be read
        self._place = beside(self.target, BUILDING)
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
            except OSError:  # too many open files, a full disk
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
                remove(Path(entry.path))
        remove(beside(self.target, DELETING))

    def _forget_old(self) -> None:
        # Renamed before it is deleted: a half deleted one must never be put back.
        remove(self._gone)
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
                raise unmade(self.target, error) from None
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
                raise unmade(self.target, error) from None
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


def real_path(target: str | Path) -> Path:
    """Return the absolute path without links: what is renamed is the folder itself."""
    return Path(os.path.realpath(target))


def beside(target: Path, kind: str) -> Path:
    """Return the name of a folder of this kind on its way to or from being `target`."""
    return target.with_name(f".{target.name}.{kind}.tmp")


def of_earlier_versions(target: Path, ending: str) -> Path:
    """Return what earlier versions called the new (`partial`) and the old folder (`replaced`)."""
    return target.with_name(f"{target.name}.{ending}")


def set_aside_earlier(target: Path) -> Path | None:
    """Return `NAME.replaced` where an earlier version set it aside; None where there is none, or it is somebody's own.

    People call folders so too, so it must hold what we write.
    """
    folder = of_earlier_versions(target, "replaced")
    return folder if any((folder / name).exists() for name in _OF_WHOLE_ONES) else None


def half_built_earlier(target: Path) -> Path | None:
    """Return `NAME.partial` where an earlier version began it; None where there is none, or it is somebody's own."""
    folder = of_earlier_versions(target, "partial")
    try:
        ours = not folder.is_symlink() and all(map(_OF_EARLIER_VERSIONS.fullmatch, os.listdir(folder)))
    except OSError:
        return None
    return folder if ours else None


def _take_over(target: Path) -> None:
    """Put back what earlier versions called `NAME.replaced`, and remove their `NAME.partial`, a folder locked itself.

    A `NAME.replaced` beside `target` stays: they would have deleted it, but it may be a copy that somebody keeps.
    """
    replaced = None if os.path.lexists(target) else set_aside_earlier(target)
    partial = half_built_earlier(target)
    if partial is None:
        if replaced is not None:
            os.rename(replaced, target)
        return
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor):
            raise _busy(target)
        if replaced is not None:
            os.rename(replaced, target)
        if is_same(partial, descriptor):
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder with all in it, or a file; nothing there is well too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _busy(target: Path) -> BeingBuiltError:
    return BeingBuiltError(f"{target}: another process of ziggurat is building this folder; wait for it to end")


def unmade(target: Path, error: OSError) -> DataError:
    """Return what to say of a folder that cannot be made, and the way out."""
    parent = real_path(target).parent
    where = ""
    if error.errno == errno.EBUSY:  # where a container has its volume, say
        where = f". A file system is mounted there, so it cannot be replaced: name a folder inside, such as {target}/1"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = f". Folders are built beside their place, so {parent} must be writable"
    return DataError(f"{target}: cannot be made: {error.strerror or error}{where}")
