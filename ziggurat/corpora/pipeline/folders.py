"""Folders that are there already: what no pipeline made is left alone, and that is said before anything is done."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ziggurat.corpora.pipeline.step import BEGUN, read_manifest
from ziggurat.system.errors import DataError
from ziggurat.system.temporary import TEMPORARY

_OWN = {".lock", "times.json", "hashes.json", "corpora.yaml"}  # the last is of the demo, whose corpora come first
_SHOWN = 3


def refuse_foreign(folder: Path, steps: Collection[str]) -> None:
    """Raise DataError where a pipeline's folder, or that of one of its steps, holds what no pipeline made."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise DataError(f"folder: {there} is a file; give the name of a folder for the results")
    if not folder.is_dir():
        return
    found = {path.name for path in folder.iterdir() if TEMPORARY.fullmatch(path.name) is None}
    others = sorted(found - set(steps))
    if others and not found & _OWN and not any(folder.glob(f"*/{BEGUN}")):
        shown = f"{', '.join(others[:_SHOWN])}{', ...' if len(others) > _SHOWN else ''}"
        raise DataError(
            f"folder: {folder} holds other things ({shown}): results need a folder of their own, such as "
            f"`folder: {folder / 'pipeline'}`"
        )
    for step in steps:
        place = folder / step
        if os.path.lexists(place) and read_manifest(place) is None and not made_here(place):
            raise DataError(f"{place}: is in the way, and no pipeline made it; move it, or give another `folder`")


def made_here(folder: Path) -> bool:
    """Return whether a pipeline made the folder of a step."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / BEGUN).is_file() or all(TEMPORARY.fullmatch(path.name) is not None for path in folder.iterdir())
