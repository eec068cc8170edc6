"""Building a folder that appears whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ziggurat.errors import DataError, written_whole

__all__ = ["building", "recover"]


@contextlib.contextmanager
def building(store: Path) -> Iterator[Path]:
    """Give an empty folder `<store>.partial`; when the block ends without an error it becomes `store`.

    What an interrupted process left there is removed. A whole folder already at `store` is replaced only at
    the end. Between the two renames that takes, a killed process leaves the old one as `<store>.replaced`;
    `recover` puts it back.

    Raises:
        DataError: another process is building the same store, or the folder cannot be made.
    """
    with written_whole(store):
        yield from _building(store)


def _building(store: Path) -> Iterator[Path]:
    partial, replaced = _beside(store, "partial"), _beside(store, "replaced")
    lock = _make_and_lock(partial)
    try:
        _recover(store, replaced)
        _empty(partial)
        yield partial
        _sync_folder(partial)
        if store.exists():
            os.rename(store, replaced)
        os.rename(partial, store)
        _sync_folder(store.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        if _is_same(partial, lock):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def recover(store: Path) -> None:
    """Put the store back that a process left aside when it was killed between its two renames.

    Raises:
        DataError: another process is building the same store.
    """
    partial, replaced = _beside(store, "partial"), _beside(store, "replaced")
    if not replaced.exists():
        return
    lock = _make_and_lock(partial)
    try:
        _recover(store, replaced)
        shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def _beside(store: Path, ending: str) -> Path:
    return store.with_name(f"{store.name}.{ending}")


def _make_and_lock(folder: Path) -> int:
    """Make `folder` and its parents and lock it. Raises DataError when that cannot be done."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _locked_folder(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}") from None


def _locked_folder(folder: Path) -> int:
    """Make `folder` and lock it; return the descriptor that holds the lock."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process finished just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(
                f"{folder}: another process of ziggurat is building this folder; wait for it to end"
            ) from None
        if _is_same(folder, descriptor):
            return descriptor
        os.close(descriptor)  # it was renamed between opening and locking


def _is_same(folder: Path, descriptor: int) -> bool:
    """Whether `folder` is (still) the one that `descriptor` was opened on."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _recover(store: Path, replaced: Path) -> None:
    """Put back what a process killed between the two renames moved away; remove what it did not come to remove."""
    if replaced.exists():
        if store.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, store)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync_folder(folder: Path) -> None:
    """Put the folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
