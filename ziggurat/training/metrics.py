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
        run: folder of the run.
        update: where training starts; records after it, left by a run that was killed, are removed.
        tensorboard: also write event files under `tensorboard/`.
    """

    def __init__(self, run: Path, *, update: int, tensorboard: bool) -> None:
        path = run / _METRICS
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _update_of(line) <= update]
            write_atomically(path, b"".join(kept))
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, so only when wanted

            self._events = SummaryWriter(str(run / "tensorboard"), purge_step=update + 1)

    def write(self, kind: str, update: int, values: Mapping[str, float | int | None]) -> None:
        """Add one record; `kind` is `train` or `validation`."""
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps({k: v for k, v in record.items() if v is not None}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(f"{kind}/{name}", value, update)

    def close(self) -> None:
        """Flush and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._events is not None:
            self._events.close()


def _update_of(line: bytes) -> float:
    """Return the update of a record; a line cut off by a kill counts as the last of all."""
    try:
        return float(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class RunLog:
    """Says what happens, to the console (standard error) and to `log.txt` with the time."""

    def __init__(self, run: Path, console: Console) -> None:
        self._file = (run / "log.txt").open("a", encoding="utf-8")
        self._console = console

    def say(self, message: str, style: str | None = None) -> None:
        """Print and log one line; markup in it has no meaning."""
        self._console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
