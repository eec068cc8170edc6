"""Folders that appear whole or not at all, written by one process at a time, and the clean-up after killed processes.

ziggurat.system.staging has the protocol and the layout on disk; here are the operations for the rest of the package:
`building` writes a folder, `recover` and `tidy` repair what a killed process left, `discard` deletes, `sweep` removes
temporary files and folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ziggurat.system.errors import DataError, written_whole
from ziggurat.system.staging import (
    BUILDING,
    DELETING,
    BeingBuiltError,
    Staging,
    beside,
    cannot_be_made,
    real_path,
    remove,
)
from ziggurat.system.temporary import TEMPORARY, remove_if_dead

_WAIT_SECONDS = 1.0


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `target` when the block ends without an error.

    The content is on the disk before the folder gets its name. After an error nothing of it is left, and `target` is
    unchanged.

    Raises:
        DataError: another process is building the same folder, or it cannot be created or put in place.
    """
    with written_whole(target):
        try:
            staging = Staging(target)
        except OSError as error:
            raise cannot_be_made(target, error) from None
        try:
            yield staging.begin()
            staging.put_in_place()
        finally:
            staging.close()


def recover(target: str | Path) -> None:
    """Put `target` back if a process was killed between the two renames that replace it; call this before reading.

    If `target` exists, this costs one look. If a living process is between its renames, this waits for it.

    Raises DataError when the folder was set aside and cannot be put back, for example on a read-only file system.
    """
    path = real_path(Path(target))
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
                f"{path}: a process was killed while it replaced this folder, which lies at {aside} and cannot be "
                f"put back ({error.strerror}); rename it back"
            ) from None


def tidy(target: str | Path) -> None:
    """Put back or remove what a dead process left beside `target`, for verbs that may not need to write `target`.

    Raises DataError: another process is building it, or the remains cannot be removed.
    """
    path = real_path(Path(target))
    if not any(os.path.lexists(beside(path, kind)) for kind in (BUILDING, DELETING)):
        return
    try:
        Staging(path).close()
    except OSError as error:
        raise DataError(f"{path}: what a killed process left beside it cannot be removed: {error}") from None


def discard(folder: Path) -> None:
    """Delete a folder, after renaming it, so that a kill never leaves half of it under its name. Raises OSError.

    It creates nothing, so it works on a full disk.
    """
    folder = real_path(folder)
    doomed = beside(folder, DELETING)
    remove(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path, *, deep: bool = False) -> None:
    """Remove temporary files and folders of dead processes; those of living ones stay.

    Args:
        folder: a folder that only ziggurat writes: other programs use such names for temporary files as well.
        deep: also in all folders under it.

    Raises nothing: what cannot be removed does no harm.
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
                remove_if_dead(path)
            elif match["kind"] == DELETING:
                shutil.rmtree(path, ignore_errors=True)
            elif match["kind"] == BUILDING:
                with contextlib.suppress(DataError, OSError):
                    Staging(Path(place, match["name"])).close()
