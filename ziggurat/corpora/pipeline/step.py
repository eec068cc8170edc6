"""A step of a pipeline: what it reads, what it does, what it hands on; and the manifest that says that it is done.

NAME/begun.json      all that the result of step NAME depends on, before it begins
NAME/manifest.json   the same with sizes and checksums of what it hands on; written last
NAME/...             its results, and whatever it keeps to go on after an interruption

How a step stands: what is to be done with it and why, and what that will take.

Time that each step took, interruptions counted, in a file of the pipeline's folder.

The share of begun steps that is done, by what is in their folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import xxhash

from ziggurat.system.errors import CheckpointError, ConfigError, DataError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY
from ziggurat.system.terminal import duration

BEGUN, MANIFEST = "begun.json", "manifest.json"

Outputs = Mapping[str, Mapping[str, Any]]
"""Path inside the step's folder -> size in bytes, checksum, and `read`, if not all of it is read: hash of what is."""


@dataclass(frozen=True)
class Expected:
    """Time and memory that a step is expected to take.

    Attributes:
        seconds: time; None: not known.
        memory: bytes of memory at the peak; None: not known.
        said: what that rests on, or what else is to be known.
    """

    seconds: float | None = None
    memory: int | None = None
    said: str = ""


@dataclass(frozen=True)
class Done:
    """Progress of a step that was begun.

    Attributes:
        share: of its work, from 0 to 1.
        said: the same in words: `400 of 800 updates`.
        seconds: the time that it took; None: what was spent on the step until now.
    """

    share: float
    said: str
    seconds: float | None = None


@dataclass(frozen=True)
class Step:
    """A step; its result is a function of `settings`, of the content of `files` and of what `after` hand on.

    Attributes:
        name: that of its folder.
        title: what it does, in a few words.
        settings: all of the configuration that the result depends on, as JSON (ziggurat.corpora.pipeline.settings).
        work: does it, in the step's folder: what an interrupted call left there is gone on with. Returns the number of
            the signal that stopped it, or None.
        after: steps whose results it reads, each with patterns of those that it reads; others do not concern it.
        files: returns the files from outside that it reads, in order, by the key that names them: a file that goes from
            one corpus to the next is a change. Raises DataError for those that are missing.
        outputs: patterns of what it hands on, inside its folder; what may differ between two calls, such as logs with
            times, is none of it.
        cost: estimates what it takes.
        check: raises the error of ziggurat.system.errors that the step would end with, if that can be known before any
        step
            works: a missing package, say.
        pages: files in its folder that are for readers or the report, and none of what it hands on; where one is gone,
            or does not hold any more, `work` makes it again from what is there.
        stale: tells in words why its pages no longer hold although all that it depends on is as before; None: they do.
        machine: returns the settings of what computes, such as threads. Another one rounds differently, as another
            machine does: a result stays, but what is not finished begins anew, so that its parts are of one kind. Only
            asked where it matters: to know the device of `auto` takes seconds.
        done: tells how much of it is done where it was begun; None: not known.
        version: raised when the code makes another result of the same, so that the step is done again.
        is_job: it is a job (ziggurat.corpora.jobs), so that several calls can each do a part of it.
        read_as: functions by the names of files that it hands on: each returns a hash of all that later steps read of
            its file, which may hold other things besides. For other files the whole counts.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    work: Callable[[Path], int | None]
    after: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Callable[[], Mapping[str, Sequence[Path]]] = dict
    outputs: tuple[str, ...] = ("**/*",)
    cost: Callable[[], Expected] = field(default=Expected)
    check: Callable[[], None] = lambda: None
    pages: tuple[str, ...] = ()
    stale: Callable[[], str | None] = lambda: None
    machine: Callable[[], Mapping[str, Any]] = dict
    done: Callable[[], Done | None] = lambda: None
    version: int = 1
    is_job: bool = False
    read_as: Mapping[str, Callable[[Path], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The steps of a call.

    Attributes:
        first: name of the first; None: the first of all. Results of the steps before it are taken as they stand.
        last: name of the last; None: the last of all.
        forced: names of steps to be done again although they are done.
    """

    first: str | None = None
    last: str | None = None
    forced: frozenset[str] = frozenset()

    def numbers(self, steps: Sequence[Step]) -> range:
        """Return the numbers of the chosen steps. Raises ConfigError for a step that is none of `steps`."""
        names = [step.name for step in steps]
        for name in (self.first, self.last, *sorted(self.forced)):
            if name is not None and name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean `{near[0]}`? It" if near else "it"
                raise ConfigError(f"no step `{printable(name)}` in this pipeline; {hint} has {', '.join(names)}")
        first = 0 if self.first is None else names.index(self.first)
        last = len(names) - 1 if self.last is None else names.index(self.last)
        if last < first:
            raise ConfigError(f"`{names[last]}` comes before `{names[first]}`: no step is between them")
        if outside := [name for name in sorted(self.forced) if not first <= names.index(name) <= last]:
            raise ConfigError(f"`--force {outside[0]}`: this step is not among those chosen")
        return range(first, last + 1)


@dataclass(frozen=True)
class StepManifest:
    """The record of a step that is done.

    Attributes:
        wanted: all that its result depends on.
        outputs: what it hands on.
    """

    wanted: Mapping[str, Any]
    outputs: Outputs

    def fingerprint(self, patterns: Sequence[str]) -> str:
        """Return the hash of what is handed on under names that match; `*` is anything, also in several folders."""
        read = {name: entry.get("read", entry) for name, entry in self.outputs.items()}
        taken = {name: entry for name, entry in read.items() if any(fnmatchcase(name, p) for p in patterns)}
        return str(xxhash.xxh3_128_hexdigest(json.dumps(taken, sort_keys=True).encode()))

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {**self.wanted, "outputs": self.outputs}


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of ours; None where there is none, or it is damaged."""
    try:
        document = parse_json(read_bounded(path), str(path))
    except (OSError, DataError):
        return None
    return document if isinstance(document, dict) else None


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n")


def read_manifest(folder: Path) -> StepManifest | None:
    """Return the manifest of a step's folder; None where it is not done."""
    document = read_document(folder / MANIFEST)
    try:
        outputs = {} if document is None else document.pop("outputs")
        for name, entry in outputs.items():
            if (
                not isinstance(entry["bytes"], int)
                or not isinstance(entry["xxh3_128"], str)
                or Path(name).is_absolute()
            ):
                return None
    except (KeyError, TypeError, AttributeError):
        return None
    return None if document is None else StepManifest(document, outputs)


def outputs_of(step: Step, folder: Path, fingerprint: Callable[[Path], str]) -> dict[str, dict[str, Any]]:
    """Return what a step hands on: the files in its folder that are outputs, with sizes and checksums."""
    found: dict[str, dict[str, Any]] = {}
    for pattern in step.outputs:
        for path in folder.glob(pattern):
            name = path.relative_to(folder).as_posix()
            hidden = any(TEMPORARY.fullmatch(part) or part == ".lock" for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and name not in (BEGUN, MANIFEST):
                found[name] = {"bytes": path.stat().st_size, "xxh3_128": fingerprint(path)}
                if name in step.read_as:
                    found[name]["read"] = step.read_as[name](path)
    return dict(sorted(found.items()))


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


DEAR = 600.0
"""Seconds of work from which a step's results are set aside when it is done anew: a changed setting is often a slip."""

State = Literal["done", "begun", "running", "page", "new", "changed", "damaged", "forced", "after", "kept", "missing"]


@dataclass(frozen=True)
class StepState:
    """Status of a step: what is to be done with it, and why.

    Attributes:
        step: the step.
        state: `done`; `kept`: taken as it stands; `begun`: goes on where it was interrupted; `running`: another call is
            at work on it; `page`: done, but a page is gone or does not hold any more, and is made again; `new`,
            `changed`, `damaged`, `forced`: done from its beginning; `after`: depends on what an earlier one will hand
            on; `missing`: to be taken as it stands, but not done.
        why: the reason, in words.
        spent: the time spent on it.
        finished: whether a result of it is there, be it of other settings.
        spent_by_now: reads the seconds spent on it again, which another call may be adding to; None: as in `spent`.
    """

    step: Step
    state: State
    why: str
    spent: Spent
    finished: bool = False
    spent_by_now: Callable[[], float] | None = None

    @property
    def settled(self) -> bool:
        """True where nothing is to be done."""
        return self.state in ("done", "kept")

    @property
    def goes_on(self) -> bool:
        """True where what is there stays, and is gone on with."""
        return self.state in ("begun", "page")

    @property
    def told(self) -> str:
        """The reason, and what becomes of the work so far where a step begins anew."""
        if self.state not in ("changed", "damaged", "forced") or self.spent.seconds < 1:
            return self.why
        goes = "moves to `earlier`" if self.spent.seconds >= DEAR else "is discarded"
        return f"{self.why}; it begins anew, what took {duration(self.spent.seconds)} {goes}"

    def expected(self) -> Expected:
        """Return what the rest of it will take: by its estimate, by what is done of it, or by the last time."""
        if self.state in ("begun", "running"):
            # Of one moment, and first: another call may be at work, and costs take minutes to measure.
            spent = self.spent.seconds if self.spent_by_now is None else self.spent_by_now()
            done = self.step.done()
            return _rest(self.step.cost(), done, spent)
        cost = self.step.cost()
        if cost.seconds is None and self.finished and self.spent.calls:
            said = "at most what all of it took" if self.state == "page" else "what it took before"
            return replace(cost, seconds=self.spent.seconds, said=f"{cost.said}; {said}" if cost.said else said)
        return cost


def _rest(cost: Expected, done: Done | None, spent: float) -> Expected:
    """Return what is left of a step that was begun, on which so many seconds were spent."""
    if done is None or not done.share:
        said = f"all of it, on which {duration(spent)} were spent already"
        return replace(cost, said=f"{cost.said}; {said}" if cost.said else said)
    rest, said = 1 - done.share, f"{done.said} are done"
    spent = spent if done.seconds is None else done.seconds
    if spent:
        seconds: float | None = spent * rest / done.share
        return replace(cost, seconds=seconds, said=f"{said}, in {duration(spent)}; the rest at that speed")
    seconds = None if cost.seconds is None else cost.seconds * rest
    return replace(cost, seconds=seconds, said=said)


def updates_done(run: Path) -> tuple[int, float]:
    """Return the updates of a run's newest checkpoint, from which training goes on, and the seconds they took."""
    from ziggurat.model.run_folder import checkpoint_folders, checkpoint_update, read_meta

    for folder in reversed(checkpoint_folders(run)):
        try:
            return checkpoint_update(folder), float(read_meta(folder)["progress"]["seconds"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return 0, 0.0


def lines_done(job: Path, stage: str, noun: str) -> Done | None:
    """Return the share of a job's lines whose shards are through its last stage; None where it has no plan yet."""
    from ziggurat.corpora.jobs.run import PLAN_FILE

    plan = read_document(job / PLAN_FILE)
    try:
        lines, size = (int(number) for number in (plan["lines"], plan["settings"]["shard_lines"]))  # type: ignore[index]
        shards = sum(name.endswith(".json") for name in os.listdir(job / stage))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    done = min(lines, shards * size)
    return Done(done / lines, f"{done:,} of {lines:,} {noun}") if lines > 0 else None
