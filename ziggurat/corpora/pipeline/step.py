"""A step of a pipeline: what it reads, does and makes, its manifest, and whether and why it is stale."""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import xxhash

from ziggurat.config.section import Section
from ziggurat.system.errors import DataError
from ziggurat.system.files import fingerprint, write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY
from ziggurat.system.terminal import duration
from ziggurat.system.yaml_text import changed, shown

BEGUN, MANIFEST = "begun.json", "manifest.json"

Outputs = Mapping[str, Mapping[str, Any]]
"""Path inside the step's folder -> size in bytes, checksum, and `read`, if not all of it is read: hash of what is."""


@dataclass(frozen=True)
class Expected:
    """Time and memory that a step is expected to take."""

    seconds: float | None = None
    memory: int | None = None
    """Bytes of memory at the peak; None: not known."""
    said: str = ""
    """What that rests on, or what else is to be known."""


@dataclass(frozen=True)
class StepProgress:
    """Progress of a step that was begun."""

    share: float
    """Share of its work, from 0 to 1."""
    said: str
    """The same in words: `400 of 800 updates`."""
    seconds: float | None = None
    """The time that it took; None: what was spent on the step until now."""


class Step(ABC):
    """A step; its result is a function of its settings, of the content of its inputs and of what earlier steps made."""

    name: str
    title: str
    settings: Mapping[str, Any]
    """Everything in the configuration that the result depends on, as JSON."""
    after: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Name of an earlier step -> patterns of the files that are read there; other files do not concern it."""
    outputs: tuple[str, ...] = ("**/*",)
    """Patterns of the files in its folder that later steps may read; what may differ between two calls, such as logs
    with times, is not among them."""
    pages: tuple[str, ...] = ()
    """Files in its folder that are for readers or the report; where one is missing or outdated, `work` makes it again
    from what is there."""
    version: int = 1
    """Raised when the code makes another result of the same, so that the step is done again."""
    is_job: bool = False
    """It is a job (ziggurat.corpora.jobs), so that several calls can each do a part of it."""

    @abstractmethod
    def work(self, folder: Path) -> int | None:
        """Do the step in its folder, resuming from whatever an interrupted call left there.

        Returns the number of the signal that stopped it, or None.
        """

    def inputs(self) -> Mapping[str, Sequence[Path]]:
        """Return the files from outside that it reads, in order, by the key that names them.

        A file that goes from one corpus to the next is a change. Raises DataError for those that are missing.
        """
        return {}

    def check(self) -> None:  # noqa: B027 - most steps have nothing to refuse
        """Raise the error that the step would end with, if that can be known before any step works."""

    def machine(self) -> Mapping[str, Any]:
        """Return the settings of what computes, such as threads, by which results are rounded.

        With others a finished result stays, but an unfinished one is restarted, so that its parts are of one kind. Only
        asked where it matters: to know the device of `auto` takes seconds.
        """
        return {}

    def cost(self) -> Expected:
        """Return what the step is expected to take."""
        return Expected()

    def progress(self) -> StepProgress | None:
        """Return how much of it is done; None: not known."""
        return None

    def outdated(self) -> str | None:
        """Return why its pages are outdated although all that it depends on is as before; None: they are not."""
        return None

    def read_hash(self, name: str, path: Path) -> str | None:
        """Return a hash of all that later steps read of an output; None: the whole file counts."""
        return None


class StepSettings(dict[str, Any]):
    """All settings by key, and in `given` those that are not the default."""

    def __init__(self, content: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.given = given


def settings_of(section: Section, *, include: Any = None, exclude: Any = None) -> StepSettings:
    """Return the settings of a section, or of the keys that are chosen as by pydantic's `model_dump`."""
    dumped = partial(section.model_dump, mode="json", include=include, exclude=exclude)
    return StepSettings(dumped(), dumped(exclude_defaults=True))


def joined(*parts: Mapping[str, Any]) -> StepSettings:
    """Return the settings of several parts together; what is not of a section counts as given."""
    return StepSettings(
        {key: value for part in parts for key, value in part.items()},
        {key: value for part in parts for key, value in given_settings(part).items()},
    )


def given_settings(settings: Any) -> Any:
    """Return settings without those that are the default."""
    if isinstance(settings, StepSettings):
        return settings.given
    if isinstance(settings, Mapping):
        return {key: given_settings(value) for key, value in settings.items()}
    return [given_settings(value) for value in settings] if isinstance(settings, list) else settings


@dataclass(frozen=True)
class StepManifest:
    """The record of a step that is done."""

    wanted: Mapping[str, Any]
    """All that its result depends on."""
    outputs: Outputs

    def fingerprint(self, patterns: Sequence[str]) -> str:
        """Return the hash of the outputs whose names match; `*` is anything, also in several folders."""
        read = {name: entry.get("read", entry) for name, entry in self.outputs.items()}
        taken = {name: entry for name, entry in read.items() if any(fnmatchcase(name, p) for p in patterns)}
        return str(xxhash.xxh3_128_hexdigest(json.dumps(taken, sort_keys=True).encode()))

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {**self.wanted, "outputs": self.outputs}


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file that we wrote; None where there is none, or it is damaged."""
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
    """Return the files in a step's folder that are outputs, with sizes and checksums."""
    found: dict[str, dict[str, Any]] = {}
    for pattern in step.outputs:
        for path in folder.glob(pattern):
            name = path.relative_to(folder).as_posix()
            hidden = any(TEMPORARY.fullmatch(part) or part == ".lock" for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and name not in (BEGUN, MANIFEST):
                found[name] = {"bytes": path.stat().st_size, "xxh3_128": fingerprint(path)}
                if (read := step.read_hash(name, path)) is not None:
                    found[name]["read"] = read
    return dict(sorted(found.items()))


_SETTLED_NS = 2_000_000_000
"""A file touched later than this before it was read may change again within the clock's resolution, unnoticed."""


class Fingerprints:
    """Fingerprints by path; of a file of the same size, inode and times of change it is not computed again.

    No program can set the time of an inode's last change (ctime), so new content is always noticed. They are remembered
    in the file `memory`.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, tuple[list[int], str]] = {}
        try:
            for path, (stamp, digest) in parse_json(read_bounded(memory), str(memory)).items():
                self._known[str(path)] = ([int(number) for number in stamp], str(digest))
        except (OSError, DataError, ValueError, TypeError, AttributeError):
            self._known = {}  # nothing is lost but time
        self._new = False

    def of(self, file: Path) -> str:
        """Return the fingerprint of a file. Raises DataError where it cannot be read."""
        name, stamp = os.path.abspath(file), _stamp(file)
        known = self._known.get(name)
        if known is not None and stamp is not None and known[0] == stamp:
            return known[1]
        digest = fingerprint(file)
        if stamp is not None and stamp == _stamp(file) and time.time_ns() - max(stamp[2:]) > _SETTLED_NS:
            self._known[name] = (stamp, digest)
            self._new = True
        return digest

    def keep(self) -> None:
        """Write what is known, if there is anything new."""
        if self._new:
            write_atomically(self._memory, json.dumps(self._known, indent=0, sort_keys=True).encode() + b"\n")
            self._new = False


def _stamp(file: Path) -> list[int] | None:
    """Return size, inode and times of the last change in nanoseconds; None where there is no such file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


AUTO = "auto: "
"""AUTO stands before the device that `auto` is, in `Step.machine`."""
_FORMAT = 1
_CHANGED = "settings changed (there -> now)"


def wanted_of(
    step: Step, manifests: Mapping[str, StepManifest | None], fingerprint: Callable[[Path], str]
) -> dict[str, Any]:
    """Return all that the result of a step depends on but its `machine`; steps that are not done are left out."""
    known = {name: (manifests[name], patterns) for name, patterns in step.after.items()}
    return {
        "format": _FORMAT,
        "step": step.name,
        "version": step.version,
        "settings": dict(step.settings),
        "files": {key: [fingerprint(path) for path in paths] for key, paths in step.inputs().items()},
        "reads": {name: list(patterns) for name, patterns in step.after.items()},
        "after": {name: found.fingerprint(patterns) for name, (found, patterns) in known.items() if found is not None},
    }


def why_stale(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in words why a step is not done by what `before` says; None: it differs in nothing that is known."""
    if before.get("format") != _FORMAT:
        return "done by another version of ziggurat"
    if (version := before.get("version")) != step.version:
        earlier = isinstance(version, int) and version < step.version
        return f"done by {'an earlier' if earlier else 'a later'} version of ziggurat, by which it comes out otherwise"
    if changes := settings_changed(before.get("settings"), step.settings):
        return f"{_CHANGED}: {shown(changes, 3)}"
    reasons = [*_other_steps(before, now), *_other_files(step, before, now)]
    return "; ".join(reasons) if reasons else None


def other_machine(step: Step, before: Mapping[str, Any]) -> str | None:
    """Return in words why a partial result cannot be resumed although the result would be the same."""
    was, here = before.get("machine"), dict(step.machine())
    changes = changed(was, here)
    return f"{_CHANGED}, and it was not finished: {shown(changes, 3)}" if changes else None


def _other_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs in the steps that are read and in their outputs."""
    reads, read, handed = now["reads"], before.get("reads", {}), before.get("after", {})
    new = " and ".join(name for name in reads if name not in read)
    gone = " and ".join(name for name in read if name not in reads)
    reasons = []
    if new:
        reasons.append(f"now reads {new}" + (f" in place of {gone}" if gone else ""))
    elif gone:
        reasons.append(f"no longer reads {gone}")
    both = [name for name in reads if name in read]
    if others := [name for name in both if reads[name] != read[name]]:
        reasons.append(f"reads other files of {' and '.join(others)}")
    same = [name for name in both if name not in others and name in now["after"]]
    if others := [name for name in same if now["after"][name] != handed.get(name)]:
        reasons.append(f"{' and '.join(others)} handed on something else")
    return reasons


def _other_files(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the first that differs in the files from outside."""
    was, found = before.get("files", {}), now["files"]
    for key, paths in step.inputs().items():
        if len(old := was.get(key, [])) != len(paths):
            return [f"{key}: {len(old)} input files before, {len(paths)} now"]
        if other := [path for path, *digests in zip(paths, old, found[key], strict=True) if len(set(digests)) > 1]:
            return [f"{other[0]} changed"]
    return [f"{key}: {len(was[key])} input files before, 0 now" for key in was if key not in found][:1]


def settings_changed(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every setting that differs from what a manifest says.

    A setting that came with a later version is not in the manifests of an earlier one. Where it has its default, that
    is no change: the result is as before, or the step's number is raised (`Step.version`).
    """
    return changed(_completed(before, now, given_settings(now)), dict(now))


def _completed(before: Any, now: Any, given: Any) -> Any:
    """Return the settings of a manifest with those that it does not know where they are the default now."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        inside = given if isinstance(given, Mapping) else {}
        known = {key: _completed(value, now.get(key), inside.get(key)) for key, value in before.items()}
        return known | {key: value for key, value in now.items() if key not in before and key not in inside}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        items = given if isinstance(given, list) and len(given) == len(now) else [None] * len(now)
        return [_completed(*parts) for parts in zip(before, now, items, strict=True)]
    return before


@dataclass(frozen=True)
class Spent:
    """Time spent on a step."""

    seconds: float = 0.0
    """Wall time of all calls that worked on it; of one that was killed, until the last change in its folder."""
    calls: int = 0
    running: float | None = None
    """When the present call began, in seconds since 1970; None: none is at work."""


class Times:
    """The times of all steps, kept in a file; a damaged one counts as empty."""

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
        """Return the seconds spent on a step, whose folder shows when a killed call ended."""
        before = self.of(step)
        killed = 0.0 if before.running is None else max(0.0, _last_change(folder) - before.running)
        return before.seconds + killed

    def restart(self, step: str) -> None:
        """Forget the time of a step, which is restarted."""
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
    newest = 0.0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(place, name)).st_mtime)
    return newest


DEAR = 600.0
"""DEAR is the seconds of work from which results are set aside on a restart: a changed setting is often a slip."""

State = Literal["done", "begun", "running", "page", "new", "changed", "damaged", "forced", "after", "kept", "missing"]


@dataclass(frozen=True)
class StepStatus:
    """Status of a step: what is to be done with it, and why."""

    step: Step
    state: State
    """`done`; `kept`: taken as it is; `begun`: goes on where it was interrupted; `running`: another call is at work
    on it; `page`: done, but a page is gone or does not hold any more, and is made again; `new`, `changed`, `damaged`,
    `forced`: done from its beginning; `after`: depends on the output of an earlier one; `missing`: to be taken as it
    is, but not done."""
    why: str
    """The reason, in words."""
    spent: Spent
    finished: bool = False
    """True if it has a result, if only one of other settings."""
    spent_by_now: Callable[[], float] | None = None
    """Reads the seconds spent on it again, which another call may be adding to; None: as in `spent`."""

    @property
    def settled(self) -> bool:
        """True where nothing is to be done."""
        return self.state in ("done", "kept")

    @property
    def resumes(self) -> bool:
        """True if the step resumes from its existing files."""
        return self.state in ("begun", "page")

    @property
    def explanation(self) -> str:
        """The reason, and what becomes of the work so far where a step is restarted."""
        if self.state not in ("changed", "damaged", "forced") or self.spent.seconds < 1:
            return self.why
        goes = "moves to `earlier`" if self.spent.seconds >= DEAR else "is discarded"
        return f"{self.why}; it starts over, what took {duration(self.spent.seconds)} {goes}"

    def expected(self) -> Expected:
        """Return what the rest of it will take: by its estimate, by what is done of it, or by the last time."""
        if self.state in ("begun", "running"):
            # Of one moment, and first: another call may be at work, and costs take minutes to measure.
            spent = self.spent.seconds if self.spent_by_now is None else self.spent_by_now()
            done = self.step.progress()
            return _rest(self.step.cost(), done, spent)
        cost = self.step.cost()
        if cost.seconds is None and self.finished and self.spent.calls:
            said = "at most what all of it took" if self.state == "page" else "what it took before"
            return replace(cost, seconds=self.spent.seconds, said=f"{cost.said}; {said}" if cost.said else said)
        return cost


def _rest(cost: Expected, done: StepProgress | None, spent: float) -> Expected:
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
