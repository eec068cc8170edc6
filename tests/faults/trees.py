"""Snapshots of folders for comparisons: every file's bytes, except what depends on the clock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ziggurat.train.run_log import CLOCK_FIELDS

CLOCK = CLOCK_FIELDS | {"data_wait"}
"""CLOCK are the fields of `metrics.jsonl`, `depth.jsonl` and a checkpoint's progress that depend on the clock, besides
rates (`..._per_second`).
"""

_LEFTOVER = re.compile(r"(.*\.(tmp|partial|replaced|old|new|staged|journal)|\.tmp.*|\.shared)")


def snapshot(folder: Path, timed: Iterable[str] = ()) -> dict[str, Any]:
    """Return a map from each path below `folder` to its content without what depends on the clock, or a link's target.

    For files named in `timed` only their existence counts.
    """
    found: dict[str, Any] = {}
    readers = {**_READERS, **dict.fromkeys(timed, _there)}
    for where, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(where) / name
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"-> {os.readlink(path)}"
            elif path.is_dir():
                found[f"{key}/"] = None
            else:
                found[key] = readers.get(name, _page if path.suffix == ".html" else Path.read_bytes)(path)
    return found


def leftovers(folder: Path) -> list[str]:
    """Return what only a running process may have: temporary files, and folders that are half built or set aside."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(name for name in names if _LEFTOVER.fullmatch(os.path.basename(name)))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the differences of two snapshots in words, file by file."""
    said = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    said += [f"{name} is too much" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            said.append(f"{name} differs{_place(found[name], expected[name])}")
    return said


def _place(found: Any, expected: Any) -> str:
    """Return the first difference of two files, if it can be described in a line."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f": {len(found)} records instead of {len(expected)}"
        number = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f", record {number + 1}{_place(found[number], expected[number])}"
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
        return ": " + "; ".join(f"{key}{_place(found.get(key), expected.get(key))}" for key in keys[:4])
    if isinstance(found, str | bytes) and isinstance(expected, str | bytes) and len(found) != len(expected) > 99:
        return f": length {len(found)} instead of {len(expected)}"
    if isinstance(found, bytes) or isinstance(expected, bytes):
        return ""
    return f" {found!r:.60} instead of {expected!r:.60}"


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key not in CLOCK and not key.endswith("_per_second")}
    return {key: _timeless(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _records(path: Path) -> list[dict[str, Any]]:
    return [_timeless(_document(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _document(text: str) -> dict[str, Any]:
    """Return a JSON object, or the text itself if it is cut off."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {"unreadable": text}


def _meta(path: Path) -> dict[str, Any]:
    """Return a checkpoint's `meta.json` without the training time in it, and the checksum over that.

    Only scores of existing checkpoints count; the file may name one that was deleted right after it was written.
    """
    document = _document(path.read_text(encoding="utf-8"))
    document.pop("checksum", None)
    if isinstance(progress := document.get("progress"), dict):
        there = {folder.name for folder in path.parents[1].iterdir()}
        scores = {name: score for name, score in progress.get("scores", {}).items() if name in there}
        document["progress"] = {**_timeless(progress), "scores": scores}
    return document


def _page(path: Path) -> str:
    """Return a report without the time at which it was made."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "", path.read_text(encoding="utf-8"))


def _there(path: Path) -> str:
    return "there"


_READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": _records,
    "depth.jsonl": _records,
    "meta.json": _meta,
    ".job": _there,  # the process that trains
    "log.txt": _there,  # records when and how often the run was interrupted
}
