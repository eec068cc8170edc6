"""One record, three readers: the console, `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from ziggurat.data.files import write_atomically

__all__ = ["MetricsWriter", "RunLog"]

_METRICS = "metrics.jsonl"


class MetricsWriter:
    """Appends records to `metrics.jsonl` and, if wanted, TensorBoard.

    Args:
        run: folder of the run; None: nothing is written (all processes but the first).
        update: where training starts; records after it, left by a run that was killed, are removed.
        tensorboard: also write event files under `tensorboard/`.
        validated: False when the validation of `update` is still to be done; a record of it, left by a run that was
            killed right after, is removed too.
        log: is told once when records cannot be written; a full disk does not end a run here.
    """

    def __init__(
        self, run: Path | None, log: RunLog, *, update: int, tensorboard: bool, validated: bool = True
    ) -> None:
        self._log, self._gaps = log, False
        path = Path(os.devnull) if run is None else run / _METRICS
        if run is not None and path.exists():
            last = {"train": update, "validation": update if validated else update - 1}
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _is_until(line, last)]
            write_atomically(path, b"".join(kept))
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard and run is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, so only when wanted

            self._events = SummaryWriter(str(run / "tensorboard"), purge_step=update + 1)

    def write(self, kind: str, update: int, values: Mapping[str, float | int | None], *, partial: bool = False) -> None:
        """Add one record; `kind` is `train` or `validation`, `partial` marks one that its cadence did not ask for."""
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        record |= {"partial": True} if partial else {}
        try:
            self._file.write(json.dumps({k: v for k, v in record.items() if v is not None}) + "\n")
            self._file.flush()
            if self._events is not None:
                for name, value in values.items():
                    if value is not None:
                        self._events.add_scalar(f"{kind}/{name}", value, update)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._gaps:
            self._gaps = True
            self._log.say(f"{self._file.name} or TensorBoard's file cannot be written: {error.strerror}", "bold red")

    def close(self) -> None:
        """Flush and close."""
        try:
            with self._file:
                self._file.flush()
                if self._file.name != os.devnull:
                    os.fsync(self._file.fileno())
            if self._events is not None:
                self._events.close()
        except OSError as error:
            self._complain(error)


def _is_until(line: bytes, last: Mapping[str, int]) -> bool:
    """Whether a record is of the last update of its kind or before; a line cut off by a kill is not."""
    try:
        record = json.loads(line)
        return bool(record["update"] <= last[record["kind"]])
    except (ValueError, KeyError, TypeError):
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
