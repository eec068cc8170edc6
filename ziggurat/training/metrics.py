"""One record, three readers: the console, `metrics.jsonl` and trackers such as TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console

from ziggurat.data.files import write_atomically
from ziggurat.documents import parse_json
from ziggurat.errors import DataError
from ziggurat.tracking.heat import draw
from ziggurat.tracking.listener import Listener

__all__ = ["MetricsWriter", "RunLog"]

_METRICS = "metrics.jsonl"
_CLOSING_SECONDS = 30.0


class MetricsWriter:
    """Appends records to `metrics.jsonl` and tells them to trackers.

    Args:
        run: folder of the run; None: nothing is written (all processes but the first).
        log: is told once when records cannot be written (a full disk does not end a run here), and when a tracker
            fails.
        update: where training starts; records after it, left by a run that was killed, are removed.
        trackers: who listen; one that fails is left out from then on.
        validated: False when the validation of `update` is still to be done; a record of it, left by a run that was
            killed right after, is removed too.
    """

    def __init__(
        self,
        run: Path | None,
        log: RunLog,
        *,
        update: int,
        trackers: Sequence[Listener] = (),
        validated: bool = True,
    ) -> None:
        self._log, self._gaps = log, False
        self._trackers = list(trackers)
        path = Path(os.devnull) if run is None else run / _METRICS
        if run is not None and path.exists():
            last = {"train": update, "validation": update if validated else update - 1}
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _is_until(line, last)]
            write_atomically(path, b"".join(kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, update: int, values: Mapping[str, float | int | None], *, partial: bool = False) -> None:
        """Add one record; `kind` is `train` or `validation`, `partial` marks one that its cadence did not ask for."""
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        record |= {"partial": True} if partial else {}
        try:
            self._file.write(json.dumps({k: v for k, v in record.items() if v is not None}) + "\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)
        self.tell(kind, update, {name: value for name, value in values.items() if value is not None})

    def tell(self, kind: str, update: int, values: Mapping[str, float | int]) -> None:
        """Tell trackers alone: figures `kind/name`."""
        figures = {f"{kind}/{name}": float(value) for name, value in values.items()}
        for tracker in self._working():
            tracker.scalars(update, figures)

    def draw(self, name: str, update: int, rows: Sequence[Sequence[float | None]]) -> None:
        """Show trackers a heat map of shares from 0 to 1, the top row first (ziggurat.tracking.heat)."""
        for tracker in self._working():
            tracker.image(update, name, partial(draw, rows))

    def _working(self) -> list[Listener]:
        """Return the trackers that have not failed; of one that has, say why, once."""
        for tracker in self._trackers:
            if tracker.failure is not None:
                self._log.say(f"{tracker.name} is left out from here on; training goes on: {tracker.failure}", "yellow")
        self._trackers = [tracker for tracker in self._trackers if tracker.failure is None]
        return self._trackers

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._log.say(f"{self._file.name} cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Flush and close; trackers get half a minute in all to send what they still have."""
        try:
            with self._file:
                self._file.flush()
                if self._file.name != os.devnull:
                    os.fsync(self._file.fileno())
        except OSError as error:
            self._complain(error)
        end = time.monotonic() + _CLOSING_SECONDS
        for tracker in self._working():
            if not tracker.close(max(0.0, end - time.monotonic())):
                self._log.say(f"{tracker.name} has not taken all it was told; not waited for any longer", "yellow")
            elif tracker.left_out:
                self._log.say(f"{tracker.name} was too slow for {tracker.left_out} records, which it lacks", "yellow")
        self._working()


def _is_until(line: bytes, last: Mapping[str, int]) -> bool:
    """Whether a record is of the last update of its kind or before; a line cut off by a kill is not."""
    try:
        record = parse_json(line, "")
        return bool(record["update"] <= last[record["kind"]])
    except (DataError, KeyError, TypeError):
        return False


class RunLog:
    """Says what happens, to the console (standard error) and to `log.txt` with the time.

    A full disk does not end a run here: the console is told once that the file has gaps. Without `run` nothing is
    written.
    """

    def __init__(self, run: Path | None, console: Console) -> None:
        path = Path(os.devnull) if run is None else run / "log.txt"
        self._file = path.open("a", encoding="utf-8")
        self._console = console
        self._gaps = False

    def say(self, message: str, style: str | None = None) -> None:
        """Print and log one line; markup in it has no meaning."""
        self._console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
            self._file.flush()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._console.print(f"{self._file.name} cannot be written: {error.strerror}", style="bold red")

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._complain(error)
