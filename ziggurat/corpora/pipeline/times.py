"""Time that each step took, interruptions counted, in a file of the pipeline's folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ziggurat.corpora.pipeline.step import read_document, write_document
from ziggurat.system.small_files import built


@dataclass(frozen=True)
class Spent:
    """Time spent on a step.

    Attributes:
        seconds: wall time of all calls that worked on it; of one that was killed, until the last change in its folder.
        calls: how many there were.
        running: when the present call began, in seconds since 1970; None: none is at work.
    """

    seconds: float = 0.0
    calls: int = 0
    running: float | None = None


class Times:
    """The times of all steps.

    Args:
        path: the file; a damaged one counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spent: dict[str, Spent] = {}
        for name, entry in (read_document(path) or {}).items():
            with contextlib.suppress(ValueError, TypeError):
                self._spent[name] = built(Spent, entry)

    def of(self, step: str) -> Spent:
        """Return the time spent on a step."""
        return self._spent.get(step, Spent())

    def so_far(self, step: str, folder: Path) -> float:
        """Return the seconds spent on a step, whose folder tells when a killed call ended."""
        before = self.of(step)
        killed = 0.0 if before.running is None else max(0.0, _last_change(folder) - before.running)
        return before.seconds + killed

    def restart(self, step: str) -> None:
        """Forget a step, which is to be done anew."""
        self._spent.pop(step, None)

    def leave_running(self, step: str) -> None:
        """Count time for a step from now, as for a call that is killed: parts of it may end in any order, or never."""
        before = self.of(step)
        running = time.time() if before.running is None else before.running
        self._write(step, Spent(before.seconds, before.calls + 1, running))

    @contextlib.contextmanager
    def measuring(self, step: str, folder: Path) -> Iterator[None]:
        """Context in which time counts for a step."""
        seconds, calls = self.so_far(step, folder), self.of(step).calls + 1
        began = time.monotonic()
        self._write(step, Spent(seconds, calls, time.time()))
        try:
            yield
        finally:
            self._write(step, Spent(seconds + time.monotonic() - began, calls))

    def _write(self, step: str, spent: Spent) -> None:
        self._spent[step] = spent
        write_document(self._path, {name: asdict(entry) for name, entry in self._spent.items()})


def _last_change(folder: Path) -> float:
    """Return when anything in a folder was last written, in seconds since 1970."""
    newest = 0.0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(place, name)).st_mtime)
    return newest
