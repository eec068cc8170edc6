"""Run of a back-translation: worker processes do the shards that are not complete, then the corpus is merged."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ziggurat.backtranslation.merge import Report, merge, merged
from ziggurat.backtranslation.plan import Job, Plan, make_plan
from ziggurat.backtranslation.shards import Manifest, StageFiles, cut
from ziggurat.backtranslation.stages import make_shard
from ziggurat.data.temporary import lock_missing
from ziggurat.data.workspace import sweep
from ziggurat.decoding.pool import worker_pool
from ziggurat.errors import DataError
from ziggurat.terminal import stop_signals

__all__ = ["BackTranslationOutcome", "back_translate"]

Progress = Callable[[int, int, int], None]
"""Called with the lines done by earlier calls, those done by this one, and the total of this call's shards."""


@dataclass(frozen=True)
class BackTranslationOutcome:
    """End of a call: a merged corpus, a part of the shards, or a signal.

    Attributes:
        plan: The plan.
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
) -> BackTranslationOutcome:
    """Do the rest of `job`; the result does not depend on interruptions or on the number of workers.

    Args:
        job: The job.
        workers: Number of processes; each loads the models and has `job.threads` threads.
        part: (i, n): do only every n-th shard, from shard i, and do not merge; other calls can do the rest.
        only_merge: Only merge the shards, all of which must be complete.
        progress: Called once before the first shard, and after each.

    SIGINT, SIGTERM and SIGHUP end the call within a second; the next call starts unfinished shards again.

    Raises:
        DataError: inputs that cannot be used, a folder that is in the way or in use, shards missing for the merge.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan = make_plan(job)
    with _at_work(job.out, alone=part[1] == 1):
        sweep(job.out, deep=True)
        report = merged(job.out, plan)
        if report is not None:
            return BackTranslationOutcome(plan, report)
        if not only_merge:
            with _Signals() as signals:
                _work(job, plan, workers, part, progress, signals)
            sweep(job.out, deep=True)  # temporary files of workers that were stopped
            if signals.received is not None or part[1] > 1:
                return BackTranslationOutcome(plan, None, signals.received)
        return BackTranslationOutcome(plan, merge(job.out, plan))


def _work(job: Job, plan: Plan, workers: int, part: tuple[int, int], progress: Progress, signals: _Signals) -> None:
    """Do the incomplete shards of `part`, until none is left or a signal arrives."""
    filtered = StageFiles(job.out, "filtered", plan.fingerprint)
    mine = range(part[0], plan.shards, part[1])
    missing = {index for index in mine if filtered.complete(index) is None}
    total = sum(map(plan.lines_of, mine))
    before = done = total - sum(map(plan.lines_of, missing))
    progress(before, 0, total)
    if not missing:
        return
    # Workers may be ended at any time: a shard is complete or absent.
    with worker_pool(min(workers, len(missing)), when_killed=". What was done is kept") as submit:
        pending: set[Future[Manifest]] = set()
        shards, left = cut(plan.files, plan.shard_lines, missing.__contains__), len(missing)
        while (left or pending) and signals.received is None:
            # One shard per worker waits behind the one that it does; more would only take memory.
            if left and len(pending) < 2 * workers:
                shard = next(shards, None)
                if shard is None:
                    raise DataError("--input: the files became shorter while they were read")
                pending.add(submit(make_shard, job, plan.fingerprint, shard))
                left -= 1
                continue
            # With a timeout, since a signal does not end the wait.
            ended, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in ended:
                done += future.result().read
                progress(before, done - before, total)


class _Signals:
    """Context that records SIGINT, SIGTERM and SIGHUP; a second signal ends the process at once.

    Outside the main thread Python allows no handlers, so signals keep their ordinary effect.
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
            if number == signal.SIGHUP:  # the shell and the kernel each send one when the terminal goes away
                return
            os._exit(128 + number)
        self.received = number


@contextlib.contextmanager
def _at_work(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of `folder`: calls for parts share it, a call that merges holds it alone."""
    # A file, since on NFS the lock of a folder does not reach other machines.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
