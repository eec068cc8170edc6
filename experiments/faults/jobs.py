"""The processes that train one run together, how to wait for them and how to kill them at a given moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import psutil

from tests.faults.nursery import Nursery, Started

_ORPHANS = 20.0
"""_ORPHANS is the number of seconds by which a process may outlive the launcher or the first process that ends."""


class JobEnded(NamedTuple):
    """The end of a job.

    Attributes:
        status: exit status of the first process that did not end with 0; None: it was running when its time was up.
        said: standard output and error of all processes.
        operations: file operations of the first process, if it was watched.
        killed: whether one process was killed, as intended.
        orphans: number of processes that outlived that one for too long.
    """

    status: int | None
    said: str
    operations: list[tuple[str, str]]
    killed: bool
    orphans: int


class Job:
    """One or several processes; with `launched`, the given process started the others."""

    def __init__(self, nursery: Nursery, started: Sequence[Started], *, launched: bool = False) -> None:
        self._nursery, self._started, self._launched = nursery, started, launched
        self._pids = [one.pid for one in started]
        self._killed = False
        self._workers: list[psutil.Process] = []

    def kill_after(self, seconds: float, chance: random.Random) -> None:
        """Kill one process or all of them after that many seconds, if none has ended earlier."""
        _until(any, self._pids, time.monotonic() + seconds)
        if any(_over(pid) for pid in self._pids):
            return
        if self._launched:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._workers = psutil.Process(self._pids[0]).children(recursive=True)
            workers = [worker.pid for worker in self._workers]
            victims = chance.choice([self._pids, workers[:1], workers[-1:], [*self._pids, *workers]]) or self._pids
        else:
            victims = chance.choice([self._pids, self._pids[:1], self._pids[-1:]])
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._killed = True

    def wait(self, seconds: float) -> JobEnded:
        """Wait until all processes have ended; kill those that outlive the first one for too long."""
        end = time.monotonic() + seconds
        _until(any, self._pids, end)
        _until(all, self._pids, min(end, time.monotonic() + _ORPHANS))
        _, alive = psutil.wait_procs(self._workers, _ORPHANS)
        for worker in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(alive, 5)
        # The first thread of a process is a zombie a moment before its other threads are gone.
        ended = [self._nursery.wait(one, 10.0 if _over(one.pid) else 0.01) for one in self._started]
        killed = self._killed or any(one.killed for one in ended)
        outlived = sum(one.status is None for one in ended) if killed else 0
        status = next((one.status for one in ended if one.status != 0), 0)
        said = "".join(one.said for one in ended)
        return JobEnded(status, said, ended[0].operations, killed, outlived + len(alive))


def _until(some: Callable[[Iterable[bool]], bool], pids: Sequence[int], end: float) -> None:
    """Wait until any or all of them have ended, but not past `end`."""
    while time.monotonic() < end and not some(_over(pid) for pid in pids):
        time.sleep(0.005)


def _over(pid: int) -> bool:
    """Return whether a process has ended; it stays a zombie until the nursery is asked about it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
