"""Folders that appear whole or not at all, written by one process at a time, and the sweep of what the dead left.

How a folder is built, and what lies beside it meanwhile: ziggurat.data.staging. `.NAME.deleting.tmp` is a folder on its
way out, of no use to anybody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ziggurat.data.staging import (
    BUILDING,
    DELETING,
    Staging,
    beside,
    half_built_earlier,
    real_path,
    remove,
    set_aside_earlier,
    unmade,
)
from ziggurat.data.temporary import TEMPORARY, remove_if_dead
from ziggurat.errors import DataError, written_whole

__all__ = ["building", "discard", "recover", "sweep", "tidy"]

_WAIT_SECONDS = 1.0


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Give an empty folder; when the block ends without an error it becomes `target`, in place of what was there.

    Its content is on the disk before it has its name. After an error nothing of it is left, and `target` is as it was.

    Raises:
        DataError: another process is building the same folder, or the folder cannot be made, or not be put there.
    """
    with written_whole(target):
        yield from _building(target)


def _building(target: Path) -> Iterator[Path]:
    try:
        staging = Staging(target)
    except OSError as error:
        raise unmade(target, error) from None
    try:
        yield staging.begin()
        staging.put_in_place()
    finally:
        staging.close()


def recover(target: str | Path) -> None:
    """Put a folder back that a process left aside when it was killed between its two renames; call it before reading.

    Where `target` is there it costs one look. A living process is waited for: it is about to put the new one there.

    Raises DataError when the folder lies aside and cannot be put back, on a file system that is read-only, say.
    """
    path = real_path(Path(target))
    end = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        aside = [old for old in (beside(path, BUILDING) / "old", set_aside_earlier(path)) if old and old.exists()]
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
    path = real_path(Path(target))
    remains = [beside(path, BUILDING), beside(path, DELETING)]
    if not (
        any(map(os.path.lexists, remains))
        or half_built_earlier(path)
        or (not path.exists() and set_aside_earlier(path))
    ):
        return
    try:
        Staging(path).close()
    except OSError as error:
        raise DataError(f"{path}: what a killed process left beside it cannot be removed: {error}") from None


def discard(folder: Path) -> None:
    """Delete a folder, renamed first: a kill on the way leaves no half of it under its name. Raises OSError.

    Nothing is made for it, so it can be done on a disk that is full.
    """
    folder = real_path(folder)
    doomed = beside(folder, DELETING)
    remove(doomed)
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
            elif match["kind"] == DELETING:
                shutil.rmtree(path, ignore_errors=True)
            elif match["kind"] == BUILDING:
                with contextlib.suppress(DataError, OSError):
                    Staging(Path(place, match["name"])).close()
