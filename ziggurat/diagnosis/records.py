"""Measures on disk: `diagnostics/depth.jsonl` of a run, one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.errors import DataError

__all__ = ["DEPTH_FILE", "RECORD_FORMAT", "Record", "read_records"]

RECORD_FORMAT = 1
"""Version of the records."""

DEPTH_FILE = Path("diagnostics") / "depth.jsonl"
"""Where the records lie in a run."""


@dataclass(frozen=True)
class Record:
    """What was measured at one moment of training.

    Attributes:
        update: updates done before it.
        time: seconds since 1970.
        layers: layers of `encoder` and `decoder` at that moment; a growing run has several depths.
        values: measures by name; None stands for a number that was not finite.
    """

    update: int
    time: float
    layers: dict[str, int]
    values: dict[str, Any]


def read_records(run: Path) -> list[Record]:
    """Return the records of a run by update, of two for one update the later; none where nothing was collected.

    Raises DataError with file and line: a damaged record, or one of another format. The last line of a run that was
    killed may be cut off; it is left out.
    """
    path = run / DEPTH_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    found: dict[int, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
            version = document.pop("format")
            record = Record(**document)
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise DataError(f"{path}, line {number}: damaged; remove the line") from None
        if version != RECORD_FORMAT:
            raise DataError(f"{path}, line {number}: format {version}, this version reads {RECORD_FORMAT}")
        found[record.update] = record
    return [found[update] for update in sorted(found)]
