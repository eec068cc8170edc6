"""Running a job: any number of calls on any machines do the incomplete shards, which are then merged.

The plan contains everything that the result depends on and is written once, into the job's folder.

Models and inputs are identified by their content. A later call in the same folder must have the same plan.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash

from ziggurat.corpora.jobs.launchers import Do, Launcher, Manifest, Shard, StageFiles, cut, processes
from ziggurat.data.store_checks import InputWatch, differences
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY, locked, sweep
from ziggurat.system.yaml_text import keys_of, shown
from ziggurat.train.signals import GracefulStop

PLAN_FILE = "plan.json"
_FORMAT = 1
_LOCK = f".{PLAN_FILE}.lock"


@dataclass(frozen=True)
class Plan:
    """Work to be done in a folder, and the settings that its result depends on."""

    folder: Path
    verb: str
    settings: dict[str, Any]
    lines: int
    """Lines or pairs of all inputs."""
    shard_lines: int
    watch: InputWatch

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.lines // self.shard_lines)

    @property
    def fingerprint(self) -> str:
        """128-bit xxHash of settings and lines in hexadecimal; each shard's manifest contains it."""
        return str(xxhash.xxh3_128_hexdigest(json.dumps([self.settings, self.lines], sort_keys=True).encode()))

    def check_inputs(self) -> None:
        """Raise DataError if an input's content may have changed at any time since the plan was made."""
        self.watch.check(f"start again in another folder than {self.folder}, whose shards may be from either version")

    def lines_of(self, shard: int) -> int:
        """Return the number of lines of a shard."""
        return min(self.shard_lines, self.lines - shard * self.shard_lines)


def fix_plan(
    folder: Path,
    verb: str,
    settings: dict[str, Any],
    watch: InputWatch,
    shard_lines: int,
    count: Callable[[], int],
) -> Plan:
    """Return the plan of a job and write it into its folder, unless the folder already has it.

    Args:
        folder: folder of the job.
        verb: its verb.
        settings: everything that the result depends on, in a form that JSON represents without loss.
        watch: watch over the inputs, which also provides the fingerprints in the settings.
        shard_lines: lines of a shard.
        count: returns the number of lines, at least one, by a pass over the input; called only if the folder is new.

    Raises DataError for a folder with another plan or foreign files, and the errors of `count`.
    """
    path = folder / PLAN_FILE
    lines = _lines_known(path, verb, settings)
    if lines is None:
        counted = count()
        # Written only now: a folder with a plan has passed all checks.
        folder.mkdir(parents=True, exist_ok=True)
        # Another call may have taken the folder meanwhile; it belongs to the first to get the lock.
        with locked(folder / _LOCK, fcntl.LOCK_EX, ""):
            lines = _lines_known(path, verb, settings)
            if lines is None:
                lines = counted
                document = {"format": _FORMAT, "settings": settings, "lines": lines}
                write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return Plan(folder, verb, settings, lines, shard_lines, watch)


def _lines_known(path: Path, verb: str, settings: dict[str, Any]) -> int | None:
    """Return the lines of the plan in the folder; None if there is no plan yet. Raises DataError for another plan."""
    known = _known(path, verb)
    if known is None:
        return None
    if changed := differences(known["settings"], settings, verb):
        changed = [name.removeprefix(f"{verb}.") for name in changed]
        raise DataError(
            f"{path.parent}: was started with other settings or files (there -> now): {shown(changed)}. Continue with "
            "the same ones, or name another folder",
            named=keys_of(changed),
        )
    return int(known["lines"])


def _known(path: Path, verb: str) -> dict[str, Any] | None:
    """Return the plan in the folder, or None for a new or empty folder. Raises DataError for anything else."""
    folder = path.parent

    def passing(name: str) -> bool:  # left by a call that has not yet written its plan
        return name == _LOCK or TEMPORARY.fullmatch(name) is not None

    if not path.exists():
        if not folder.exists() or (folder.is_dir() and all(passing(p.name) for p in folder.iterdir())):
            return None
        if not path.exists():  # a call for another part may have written it, and its lock, before this call looked
            raise DataError(f"{folder}: exists and is not a folder of a `{verb}`; name another one")
    try:
        plan: dict[str, Any] = parse_json(read_bounded(path), str(path))
        if plan["format"] == _FORMAT:
            return {"settings": dict(plan["settings"]), "lines": int(plan["lines"])}
    except (OSError, DataError, ValueError, KeyError, TypeError, OverflowError):
        pass
    raise DataError(f"{path}: damaged, or written by another version of ziggurat; name another folder")


Merged = TypeVar("Merged")
Progress = Callable[[int, int, int | None], None]
"""Function called with the lines done by earlier calls, those done by this call, and the total of this call's shards
(None: unknown)."""


@dataclass(frozen=True)
class Work:
    """Execution settings of one call's share of a job, which do not affect the result."""

    launch: Launcher = field(default_factory=lambda: partial(processes, 1))
    part: tuple[int, int] = (0, 1)
    """(i, n): only every n-th shard, starting with shard i, and no merge; other calls can do the rest."""
    only_merge: bool = False
    progress: Progress = lambda before, now, total: None
    """Function called before the first shard and after each shard."""


@dataclass(frozen=True)
class JobOutcome(Generic[Merged]):
    """End of a call: merged shards, a part of them, or a signal."""

    shards: int | None
    """Number of shards of the whole job; None: unknown."""
    report: Merged | None
    """Result of the merge; None if the call was stopped or did only a part of the shards."""
    signal: int | None = None
    """Number of the signal that stopped it."""


def run_job(
    plan: Plan,
    last: StageFiles,
    do: Do,
    items: Callable[[], Iterable[Any]],
    merge: Callable[[], Merged],
    work: Work,
    *,
    merged: Callable[[], Merged | None] = lambda: None,
) -> JobOutcome[Merged]:
    """Do the rest of a job; the merged result does not depend on interruptions or on the number of workers.

    Args:
        plan: the plan.
        last: files of the last stage.
        do: does all stages of a shard, in another process, and returns the manifest of the last stage.
        items: returns all items, in order.
        merge: merges the complete shards.
        work: what this call does.
        merged: returns the result merged by an earlier call, if it still exists.

    Stop signals (Ctrl-C, SIGTERM and the like) end the call within a second; the next call restarts unfinished shards.

    Raises DataError if the folder is in use or inputs changed, and the errors of `do` and `merge`.
    """
    with at_work(plan, alone=work.part[1] == 1):
        if (report := merged()) is not None:
            return JobOutcome(plan.shards, report)
        stopped_by = None if work.only_merge else _do_missing(plan, last, do, items, work)
        plan.check_inputs()
        if stopped_by is not None or work.part[1] > 1:
            return JobOutcome(plan.shards, None, stopped_by)
        return JobOutcome(plan.shards, merge())


def _do_missing(plan: Plan, last: StageFiles, do: Do, items: Callable[[], Iterable[Any]], work: Work) -> int | None:
    """Do the incomplete shards of this call's part; return the number of the signal that stopped it, or None."""
    mine = range(work.part[0], plan.shards, work.part[1])
    missing = {index for index in mine if last.complete(index) is None}
    total = sum(map(plan.lines_of, mine))
    before = total - sum(map(plan.lines_of, missing))
    if not missing:
        work.progress(before, 0, total)
        return None
    shards = cut(items(), plan.shard_lines, missing.__contains__)
    stopped_by = do_shards(do, shards, work, before, total)
    if stopped_by is None and (late := sum(last.complete(index) is None for index in missing)):
        raise DataError(
            f"{plan.folder}: the input became shorter while it was read, {late} shards are missing, one may have ended "
            "early; start again in another folder"
        )
    return stopped_by


def do_shards(do: Do, shards: Iterator[Shard[Any]], work: Work, before: int, total: int | None) -> int | None:
    """Do these shards; return the number of the signal that stopped it, or None."""
    done = 0
    work.progress(before, 0, total)
    with GracefulStop(says=False) as signals, work.launch() as run:
        signals.listen()  # Ray has replaced the handlers
        for manifest in run(do, shards, lambda: signals.received is not None):
            done += manifest.read
            work.progress(before, done, total)
    return signals.received


def complete_shards(plan: Plan, files: StageFiles) -> Iterator[Manifest]:
    """Yield the manifests of all shards, in order. Raises DataError at a missing shard."""
    for index in range(plan.shards):
        if (manifest := files.complete(index)) is None:
            raise DataError(
                f"{plan.folder}: shard {index} of {plan.shards} is missing; run the same command without `--merge`"
            )
        yield manifest


@contextlib.contextmanager
def at_work(plan: Plan, *, alone: bool) -> Iterator[None]:
    """Lock and sweep a job's folder; calls for parts share the lock, a merging call holds it exclusively."""
    busy = f"{plan.folder}: another {plan.verb} is at work here; wait for it to end"
    with locked(plan.folder / ".lock", (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB, busy):
        sweep(plan.folder, deep=True)
        try:
            yield
        finally:
            sweep(plan.folder, deep=True)  # temporary files of workers that were stopped


@contextlib.contextmanager
def made_once(plan: Plan, name: str) -> Iterator[Path]:
    """Context in which only this call may create a job's file or folder `name`; calls for other parts wait."""
    with locked(plan.folder / f".{name}.lock", fcntl.LOCK_EX, ""):
        yield plan.folder / name
