"""Warnings of a run: each said once, when a measure leaves its band, and taken back when it has come back to stay."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ziggurat.diagnosis.health import Reading, readings
from ziggurat.diagnosis.records import Record
from ziggurat.documents import built, read_json_lines
from ziggurat.errors import DataError, printable

__all__ = ["CALM", "WARNINGS_FILE", "WARNING_FORMAT", "Warned", "Watch", "read_warnings"]

WARNINGS_FILE = Path("diagnostics") / "warnings.jsonl"
"""Where warnings lie in a run, one JSON object per line."""

WARNING_FORMAT = 1
"""Version of these lines."""

CALM = 3
"""Healthy readings in a row after which a warning is taken back, so that one at the edge is not said on and on."""


@dataclass(frozen=True)
class Warned:
    """One line of the file.

    Attributes:
        kind: `warning`: the measure left its band; `recovered`: it is back.
        update: of the record that showed it.
        time: of that record, seconds since 1970.
        measure: what was measured and where, `gradient_ratio.decoder`.
        value: the number; None when it was not finite.
        low, high: the band; None: no limit on that side.
        message: one sentence for people; a warning's says what to do.
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
        """Return it as one line of the file, line feed included."""
        return json.dumps({"format": WARNING_FORMAT, **asdict(self)}, allow_nan=False) + "\n"


class Watch:
    """Sees the records of a run in order and says what is new.

    Args:
        warmup_updates: `training.schedule.warmup_updates`.
    """

    def __init__(self, warmup_updates: int) -> None:
        self._warmup = warmup_updates
        self._seen: list[Record] = []
        self._calm: dict[str, int] = {}
        self.standing: dict[str, Reading] = {}
        """Warnings that have not been taken back, by measure; the one said last comes last."""

    def see(self, record: Record) -> list[Warned]:
        """Return the warnings that this record raises or takes back."""
        found = []
        for reading in readings(record, self._seen, warmup_updates=self._warmup):
            measure = reading.measure
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
        """Whether a value has not come back into the band that it left; bands of growth move on with it."""
        left = self.standing.get(reading.measure)
        if left is None or left.high is None or reading.value is None:
            return False
        return reading.value > left.high


def _warned(kind: Literal["warning", "recovered"], record: Record, reading: Reading, message: str) -> Warned:
    where = (reading.measure, reading.value, reading.low, reading.high)
    return Warned(kind, record.update, record.time, *where, message)


def read_warnings(run: Path) -> list[Warned]:
    """Return the warnings of a run, oldest first; none where there is no file.

    Raises DataError with file and line: a damaged line, or one of another format. The last line of a run that was
    killed may be cut off; it is left out.
    """
    return list(read_json_lines(run / WARNINGS_FILE, _line, "a warning of a run"))


def _line(document: Any, place: str) -> Warned:
    version = document.pop("format")
    if version != WARNING_FORMAT:
        raise DataError(f"{place}: format {printable(str(version))}, this version reads {WARNING_FORMAT}")
    return built(Warned, document)
