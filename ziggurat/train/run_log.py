"""Output of a run while it trains: messages (`log.txt`), and metrics (`metrics.jsonl`) with their trackers."""

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

from ziggurat.model.run_folder import refuse_replaced
from ziggurat.system.errors import CheckpointError, TrainingError
from ziggurat.system.small_files import check_regular
from ziggurat.system.terminal import print_message, safe
from ziggurat.train.records import keep_lines
from ziggurat.train.trackers import Listener, draw

CLOCK_FIELDS = frozenset(
    (
        *("time", "seconds", "target_tokens_per_second", "source_tokens_per_second"),
        *("data_wait_share", "checkpoint_wait"),
    )
)
"""CLOCK_FIELDS are the values of a record that depend on the clock; all others are the same in any run with one
configuration, data and seed, regardless of interruptions."""

_METRICS = "metrics.jsonl"

_GONE = "was removed or replaced while training wrote to it; from here on there is a new file"

_CLOSING_SECONDS = 30.0
"""_CLOSING_SECONDS is the time for all trackers together to send their last records at the end."""


def _is_gone(path: Path, file: TextIO) -> bool:
    """Return whether an open file of a run was removed or replaced, so that writes to it would be lost."""
    if os.fstat(file.fileno()).st_nlink:
        return False
    try:
        refuse_replaced(path.parent)
    except TrainingError:  # the whole folder, as the next checkpoint reports; new content belongs to another run
        return False
    return True


class MetricsWriter:
    """Appends records to `metrics.jsonl` and passes them to trackers.

    Args:
        run: folder of the run; None: nothing is written (all processes except the first).
        log: reports, once each, that records cannot be written and that a tracker failed.
        update: where training starts; records after it, left by a run that was killed, are removed.
        trackers: receivers of the records; one that fails is left out from then on.
        validated: False when the validation of `update` is still to be done; a record of it, left by a run that was
            killed right after, is also removed.
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
        # Other processes write to the null device, so that all run the same code.
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
            # Nothing is appended to records that could not be removed, because some would then be duplicated.
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

        Figures that are None are left out, and in the file also those that are not finite. `partial` marks a record
        that is not at a multiple of `training.log_every_updates`; `track` also passes it to trackers.
        """
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        record |= {"partial": True} if partial else {}
        # JSON has no numbers that are not finite.
        record = {k: v for k, v in record.items() if isinstance(v, str) or (v is not None and math.isfinite(v))}
        try:
            if not self._gaps and _is_gone(self._path, self._file):
                self._log.say(f"{self._path} {_GONE}", "yellow")
                self._file = self._path.open("a", encoding="utf-8")
            # Flushed at once: a killed run that resumes from a later checkpoint does not write this record again.
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)
        if track:
            self.tell(kind, update, {name: value for name, value in values.items() if value is not None})

    def tell(self, kind: str, update: int, values: Mapping[str, float | int]) -> None:
        """Pass figures to trackers only, as `kind/name`."""
        figures = {f"{kind}/{name}": float(value) for name, value in values.items()}
        for tracker in self._working():
            tracker.scalars(update, figures)

    def draw(self, name: str, update: int, rows: Sequence[Sequence[float | None]]) -> None:
        """Pass a heat map of shares from 0 to 1 to trackers, top row first (ziggurat.train.trackers)."""
        for tracker in self._working():
            tracker.image(update, name, partial(draw, rows))

    def _working(self) -> list[Listener]:
        """Return the trackers that have not failed; log once why one has."""
        for tracker in self._trackers:
            if tracker.failure is not None:
                self._log.say(
                    f"{tracker.name} is left out from now on; training continues: {tracker.failure}", "yellow"
                )
        self._trackers = [tracker for tracker in self._trackers if tracker.failure is None]
        return self._trackers

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._log.say(f"{self._path} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Flush and close; trackers have half a minute in total to send their last records."""
        try:
            with self._file:
                self._file.flush()
                # fsync fails on /dev/null, to which all processes except the first write.
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
        self._working()  # a tracker may have failed while it sent the rest


class RunLog:
    """Messages of a run, to the console (standard error) and, with the time, to `log.txt`.

    When one of them cannot be written, the other reports it once. Without `run` there is no file.
    """

    def __init__(self, run: Path | None, console: Console) -> None:
        self._path = Path(os.devnull) if run is None else run / "log.txt"
        self._console = safe(console)
        self._gaps = self._deaf = False
        if run is not None and self._path.exists():
            check_regular(self._path, error=CheckpointError)
        self._file = self._open()

    def _open(self) -> TextIO:
        # A path in a message may contain bytes that are not UTF-8; written as escapes, they do not end a run.
        try:
            return self._path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._complain(error)
            return Path(os.devnull).open("a", encoding="utf-8")

    def say(self, message: str, style: str | None = None) -> None:
        """Print and log one line; markup in it is printed verbatim."""
        print_message(self._console, message, style)
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
            if not self._gaps and _is_gone(self._path, self._file):
                self._file = self._open()
                message = f"{self._path} {_GONE}\n{message}"
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            print_message(self._console, f"{self._path} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._complain(error)
