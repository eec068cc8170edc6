"""Records and messages of a run: `metrics.jsonl`, trackers such as TensorBoard, `log.txt` and the console.

None of these ends a run: what cannot be written is reported once, and training goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from ziggurat.system.errors import CheckpointError
from ziggurat.system.small_files import check_regular
from ziggurat.system.terminal import safe
from ziggurat.train.diagnosis.records import keep_lines
from ziggurat.train.trackers import Listener, draw

CLOCK_FIELDS = frozenset(
    (
        *("time", "seconds", "target_tokens_per_second", "source_tokens_per_second"),
        *("data_wait_share", "checkpoint_wait"),
    )
)
"""The values of a record that depend on the clock; all others are the same in any run of one configuration, data and
seed, however often it was stopped or killed."""

_METRICS = "metrics.jsonl"
_CLOSING_SECONDS = 30.0
"""Time for all trackers together to send what is left at the end."""


class MetricsWriter:
    """Appends records to `metrics.jsonl` and passes them on to trackers.

    Args:
        run: folder of the run; None: nothing is written (all processes but the first).
        log: where it is reported, once each, that records cannot be written and that a tracker failed.
        update: where training starts; records after it, left by a run that was killed, are removed.
        trackers: receive the records; one that fails is left out from then on.
        validated: False when the validation of `update` is still to be done; a record of it, left by a run that was
            killed right after, is removed too.
        goes_on: True when the window of a partial record of `update` is continued, so that the record is removed.
    """

    def __init__(
        self,
        run: Path | None,
        log: RunLog,
        *,
        update: int,
        trackers: Sequence[Listener] = (),
        validated: bool = True,
        goes_on: bool = False,
    ) -> None:
        self._log, self._gaps = log, False
        self._trackers = list(trackers)
        # Other processes write to nowhere, so that all run the same code.
        self._path = Path(os.devnull) if run is None else run / _METRICS
        last = {"train": update, "validation": update if validated else update - 1}
        if run is not None and self._path.exists():
            check_regular(self._path, error=CheckpointError)

        def stays(record: Any) -> bool:
            taken_back = goes_on and record["update"] == update and "partial" in record
            return bool(record["update"] <= last[record["kind"]]) and not taken_back

        self._file = self._open(stays)

    def _open(self, stays: Callable[[Any], bool]) -> TextIO:
        try:
            keep_lines(self._path, stays)
            return self._path.open("a", encoding="utf-8")
        except OSError as error:
            # Nothing is appended to records that could not be removed: some would then be there twice.
            self._complain(error)
            return Path(os.devnull).open("a", encoding="utf-8")

    def write(
        self,
        kind: str,
        update: int,
        values: Mapping[str, float | int | None],
        *,
        partial: bool = False,
        track: bool = True,
    ) -> None:
        """Add one record.

        Figures that are None are left out, and of the file those that are not finite. `partial` marks one that is not
        at a multiple of `training.log_every_updates`; `track` passes it on to trackers, too.
        """
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        record |= {"partial": True} if partial else {}
        # JSON has no numbers that are not finite.
        record = {k: v for k, v in record.items() if isinstance(v, str) or (v is not None and math.isfinite(v))}
        try:
            # Flushed at once: a killed run that resumes from a later checkpoint does not write this record again.
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)
        if track:
            self.tell(kind, update, {name: value for name, value in values.items() if value is not None})

    def tell(self, kind: str, update: int, values: Mapping[str, float | int]) -> None:
        """Pass figures on to trackers alone, as `kind/name`."""
        figures = {f"{kind}/{name}": float(value) for name, value in values.items()}
        for tracker in self._working():
            tracker.scalars(update, figures)

    def draw(self, name: str, update: int, rows: Sequence[Sequence[float | None]]) -> None:
        """Pass a heat map of shares from 0 to 1 on to trackers, the top row first (ziggurat.train.trackers)."""
        for tracker in self._working():
            tracker.image(update, name, partial(draw, rows))

    def _working(self) -> list[Listener]:
        """Return the trackers that have not failed; log once why one has."""
        for tracker in self._trackers:
            if tracker.failure is not None:
                self._log.say(f"{tracker.name} is left out from here on; training goes on: {tracker.failure}", "yellow")
        self._trackers = [tracker for tracker in self._trackers if tracker.failure is None]
        return self._trackers

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._log.say(f"{self._path} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Flush and close; trackers get half a minute together to send what is left."""
        try:
            with self._file:
                self._file.flush()
                # fsync refuses /dev/null, to which all processes but the first write.
                if self._file.name != os.devnull:
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._complain(error)
        end = time.monotonic() + _CLOSING_SECONDS
        for tracker in self._working():
            if not tracker.close(max(0.0, end - time.monotonic())):
                self._log.say(
                    f"{tracker.name} has not taken all records in time; training no longer waits for it", "yellow"
                )
            elif tracker.left_out:
                self._log.say(f"{tracker.name} was too slow: {tracker.left_out} records are missing there", "yellow")
        self._working()  # one may have failed while it sent the rest


class RunLog:
    """Messages of a run, to the console (standard error) and, with the time, to `log.txt`.

    When one of them cannot be written, the other says so once. Without `run` there is no file.
    """

    def __init__(self, run: Path | None, console: Console) -> None:
        self._path = Path(os.devnull) if run is None else run / "log.txt"
        self._console = safe(console)
        self._gaps = self._deaf = False
        if run is not None and self._path.exists():
            check_regular(self._path, error=CheckpointError)
        self._file = self._open()

    def _open(self) -> TextIO:
        # A path in a message may hold bytes that are not UTF-8; written as escapes they do not end a run.
        try:
            return self._path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._complain(error)
            return Path(os.devnull).open("a", encoding="utf-8")

    def say(self, message: str, style: str | None = None) -> None:
        """Print and log one line; markup in it is printed as it is."""
        self._console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)
        self._write(message)
        # ziggurat.system.terminal.Messages, to which the console writes, remembers why a message was lost.
        reason = getattr(self._console.file, "failure", None)
        if reason is not None and not self._deaf:
            self._deaf = True
            self._write(
                f"standard error cannot be written ({reason}): from here on messages may appear in this file only"
            )

    def _write(self, message: str) -> None:
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            said = f"{self._path} cannot be written: {error.strerror}"
            self._console.print(said, style="bold red", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._complain(error)
