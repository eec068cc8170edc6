"""Runs a back-translation: worker processes over the shards that are not complete, then the merge."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from ziggurat.backtranslation.job import Job
from ziggurat.backtranslation.merge import Report, merge, merged
from ziggurat.backtranslation.plan import Plan, make_plan
from ziggurat.backtranslation.shards import Manifest, StageFiles, cut
from ziggurat.backtranslation.stages import make_shard
from ziggurat.data.temporary import lock_missing
from ziggurat.data.workspace import sweep
from ziggurat.decoding.pool import worker_pool
from ziggurat.errors import DataError
from ziggurat.terminal import stop_signals

__all__ = ["Outcome", "back_translate"]

Progress = Callable[[int, int, int], None]
"""Called with the lines that were done before, those that are done now, and those of this process's shards."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        plan: What was to be done.
        report: The merged corpus; None when the call was stopped or did only a part of the shards.
        signal: Number of the signal that stopped it, or None.
    """

    plan: Plan
    report: Report | None
    signal: int | None = None


def back_translate(
    job: Job,
    *,
    workers: int = 1,
    part: tuple[int, int] = (0, 1),
    only_merge: bool = False,
    progress: Progress = lambda before, now, total: None,
) -> Outcome:
    """Do what is left of `job`: after any number of kills, with any number of workers, the result is the same.

    Args:
        job: What to do.
        workers: Processes; each loads the models and has `job.threads` threads.
        part: (i, n): only every n-th shard, from i on, and no merge, so that others can do the rest.
        only_merge: Only put complete shards together.
        progress: Told about each shard.

    SIGINT, SIGTERM and SIGHUP end it within a second; the shards that were under way are begun anew by the next call.

    Raises:
        DataError: inputs that cannot be used, a folder that is in the way or in use, shards missing for the merge.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan = make_plan(job)
    with _at_work(job.out, alone=part[1] == 1):
        sweep(job.out, deep=True)
        report = merged(job.out, plan)
        if report is not None:
            return Outcome(plan, report)
        if not only_merge:
            with _Signals() as signals:
                _work(job, plan, workers, part, progress, signals)
            sweep(job.out, deep=True)  # of workers that were stopped
            if signals.received is not None or part[1] > 1:
                return Outcome(plan, None, signals.received)
        return Outcome(plan, merge(job.out, plan))


def _work(job: Job, plan: Plan, workers: int, part: tuple[int, int], progress: Progress, signals: _Signals) -> None:
    """Make the shards of `part` that are not complete, until there are none or a signal comes."""
    filtered = StageFiles(job.out, "filtered", plan.fingerprint)
    mine = range(part[0], plan.shards, part[1])
    missing = {index for index in mine if filtered.complete(index) is None}
    total = sum(map(plan.lines_of, mine))
    before = done = total - sum(map(plan.lines_of, missing))
    progress(before, 0, total)
    if not missing:
        return
    with _pool(min(workers, len(missing))) as submit:
        pending: set[Future[Manifest]] = set()
        shards, left = cut(plan.files, plan.shard_lines, missing.__contains__), len(missing)
        while (left or pending) and signals.received is None:
            if left and len(pending) < 2 * workers:
                shard = next(shards, None)
                if shard is None:
                    raise DataError("--input: the files became shorter while they were read")
                pending.add(submit(job, plan.fingerprint, shard))
                left -= 1
                continue
            ended, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in ended:
                done += future.result().read
                progress(before, done - before, total)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Future[Manifest]]]:
    """Give a function that has one of some new processes do `make_shard`; at the end of the block none is left."""
    # A shard is complete or absent, whenever a worker ends.
    with worker_pool(workers, when_killed=". What was done is kept") as submit:
        yield partial(submit, make_shard)


class _Signals:
    """Context in which SIGINT, SIGTERM and SIGHUP are remembered; a second one ends the process at once.

    Outside the main thread, where Python forbids handlers, signals keep their ordinary effect.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGHUP:  # the shell and the kernel both tell that the terminal is gone
                return
            os._exit(128 + number)
        self.received = number


@contextlib.contextmanager
def _at_work(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold a lock on `folder`: parts that are made side by side share it, whoever merges has it alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{folder}: another backtranslate is at work here; wait for it to end") from None
    except OSError as error:
        raise lock_missing(folder, error) from None
    else:
        yield
    finally:
        os.close(descriptor)
