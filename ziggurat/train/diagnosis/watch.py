"""Warnings of a run: one when a measure leaves its healthy band, and one message when it has recovered.

A measure has recovered after CALM healthy readings in a row, so that one at the edge of its band does not warn again
and again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ziggurat.system.errors import DataError, other_format
from ziggurat.system.small_files import built, read_json_lines
from ziggurat.train.diagnosis.health import Reading, readings
from ziggurat.train.diagnosis.records import Record

WARNINGS_FILE = Path("diagnostics") / "warnings.jsonl"
"""File of the warnings in a run's folder, one JSON object per line."""

WARNING_FORMAT = 1
"""Version of these lines."""

CALM = 3
"""Healthy readings in a row after which a measure has recovered."""


@dataclass(frozen=True)
class RunWarning:
    """One line of the file.

    Attributes:
        kind: `warning`: the measure left its band; `recovered`: it is back.
        update: update of the record that showed it.
        time: time of that record, seconds since 1970.
        measure: measure and place, such as `gradient_ratio.decoder`.
        value: the number; None if it was not finite.
        low, high: the band; None: no limit on that side.
        message: one sentence; that of a warning says what to do.
    """

    kind: Literal["warning", "recovered"]
    update: int
    time: float
    measure: str
    value: float | None
    low: float | None
    high: float | None
    message: str

    def line(self) -> str:
        """Return the warning as one line of the file, with its line feed."""
        return json.dumps({"format": WARNING_FORMAT, **asdict(self)}, allow_nan=False) + "\n"


class Watch:
    """State of a run's warnings, which the records of the run change in order.

    Args:
        warmup_updates: `training.schedule.warmup_updates`.
        frozen: `training.freeze`.
    """

    def __init__(self, warmup_updates: int, frozen: Sequence[str] = ()) -> None:
        self._warmup, self._frozen = warmup_updates, frozen
        self._seen: list[Record] = []
        self._calm: dict[str, int] = {}
        self.standing: dict[str, Reading] = {}
        """Warnings from which the run has not recovered, by measure, the newest last."""

    def see(self, record: Record) -> list[RunWarning]:
        """Return the warnings of this record, and the recoveries that it completes."""
        found = []
        for reading in readings(record, self._seen, warmup_updates=self._warmup, frozen=self._frozen):
            measure = reading.measure
            # The count of healthy readings starts again at every unhealthy one.
            if not reading.healthy or self._still_above(reading):
                self._calm[measure] = 0
                if measure not in self.standing:
                    found.append(_warned("warning", record, reading, reading.message))
                    self.standing[measure] = reading
            elif measure in self.standing:
                self._calm[measure] += 1
                if self._calm[measure] == CALM:
                    del self.standing[measure]
                    found.append(_warned("recovered", record, reading, f"{measure} is back in its healthy band"))
        self._seen.append(record)
        return found

    def _still_above(self, reading: Reading) -> bool:
        """Return whether a value is above the band that it left; a band of growth has moved up with it since."""
        left = self.standing.get(reading.measure)
        if left is None or left.high is None or reading.value is None:
            return False
        return reading.value > left.high


def _warned(kind: Literal["warning", "recovered"], record: Record, reading: Reading, message: str) -> RunWarning:
    where = (reading.measure, reading.value, reading.low, reading.high)
    return RunWarning(kind, record.update, record.time, *where, message)


def read_warnings(run: Path) -> list[RunWarning]:
    """Return the warnings of a run, oldest first; none if there is no file.

    A last line that a kill cut off is left out. Raises DataError, with file and line, for a damaged line, or one of
    another format.
    """
    return list(read_json_lines(run / WARNINGS_FILE, _line, "a warning of a run"))


def _line(document: Any, place: str) -> RunWarning:
    version = document.pop("format")
    if version != WARNING_FORMAT:
        raise DataError(other_format(place, version, WARNING_FORMAT, "remove the file"))
    return built(RunWarning, document)
