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
"""Path in the step's folder -> size in bytes, checksum, and `read`, a hash of the part that is read, if not all is."""


@dataclass(frozen=True)
class Expected:
    """Time and memory that a step is expected to take."""

    seconds: float | None = None
    memory: int | None = None
    """Peak memory in bytes; None: unknown."""
    said: str = ""
    """Basis of the estimate, and remarks."""


@dataclass(frozen=True)
class StepProgress:
    """Progress of a step that has been started."""

    share: float
    """Share of its work, from 0 to 1."""
    said: str
    """The same in words: `400 of 800 updates`."""
    seconds: float | None = None
    """Time that this took; None: the time spent on the step until now."""


class Step(ABC):
    """A step; its result is a function of its settings, the content of its inputs and outputs of earlier steps."""

    name: str
    title: str
    settings: Mapping[str, Any]
    """Everything in the configuration that the result depends on, as JSON."""
    after: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Name of an earlier step -> patterns of its files that this step reads; other files do not matter."""
    outputs: tuple[str, ...] = ("**/*",)
    """Patterns of the files in its folder that later steps may read. Files that may differ between two calls, such as
    logs with times, are not among them."""
    pages: tuple[str, ...] = ()
    """Files in its folder that are for readers or the report; if one is missing or outdated, `work` makes it again from
    the existing results."""
    version: int = 1
    """Version of the step's code, raised if the result changes for the same inputs, so that the step is redone."""
    is_job: bool = False
    """True if it is a job (ziggurat.corpora.jobs), so that several calls can each do a part of it."""

    @abstractmethod
    def work(self, folder: Path) -> int | None:
        """Do the step in its folder, resuming from whatever an interrupted call left there.

        Returns the number of the signal that stopped it, or None.
        """

    def inputs(self) -> Mapping[str, Sequence[Path]]:
        """Return the external files that it reads, in order, by the key that names them.

        Moving a file from one corpus to the next is a change. Raises DataError for missing files.
        """
        return {}

    def check(self) -> None:  # noqa: B027 - most steps have nothing to refuse
        """Raise the error that the step would end with, if it is known before any step runs."""

    def machine(self) -> Mapping[str, Any]:
        """Return the settings of the machine that affect rounding, such as threads.

        If they change, a finished result stays, but an unfinished one is restarted, so that its parts are consistent.
        Call this only if necessary, because resolving the device `auto` takes seconds.
        """
        return {}

    def cost(self) -> Expected:
        """Return the expected cost of the step."""
        return Expected()

    def progress(self) -> StepProgress | None:
        """Return how much of it is done; None: unknown."""
        return None

    def outdated(self) -> str | None:
        """Return why its pages are outdated although its dependencies are unchanged; None: they are not."""
        return None

    def read_hash(self, name: str, path: Path) -> str | None:
        """Return a hash of all that later steps read of an output; None: the whole file counts."""
        return None


class StepSettings(dict[str, Any]):
    """All settings by key, with those that differ from the default in `given`."""

    def __init__(self, content: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.given = given


def settings_of(section: Section, *, include: Any = None, exclude: Any = None) -> StepSettings:
    """Return the settings of a section, or of the keys selected as in pydantic's `model_dump`."""
    dumped = partial(section.model_dump, mode="json", include=include, exclude=exclude)
    return StepSettings(dumped(), dumped(exclude_defaults=True))


def joined(*parts: Mapping[str, Any]) -> StepSettings:
    """Return the joined settings of several parts; settings outside sections count as given."""
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
    """The record of a finished step."""

    wanted: Mapping[str, Any]
    """Everything that its result depends on."""
    outputs: Outputs

    def fingerprint(self, patterns: Sequence[str]) -> str:
        """Return the hash of the outputs whose names match; `*` also matches slashes."""
        read = {name: entry.get("read", entry) for name, entry in self.outputs.items()}
        taken = {name: entry for name, entry in read.items() if any(fnmatchcase(name, p) for p in patterns)}
        return str(xxhash.xxh3_128_hexdigest(json.dumps(taken, sort_keys=True).encode()))

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {**self.wanted, "outputs": self.outputs}


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file written by the pipeline; None if it is missing or damaged."""
    try:
        document = parse_json(read_bounded(path), str(path))
    except (OSError, DataError):
        return None
    return document if isinstance(document, dict) else None


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n")


def read_manifest(folder: Path) -> StepManifest | None:
    """Return the manifest in a step's folder; None if the step is not done."""
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
"""Age below which a file may change again, unnoticed, within the clock's resolution."""


class Fingerprints:
    """Fingerprints by path, recomputed only if a file's size, inode or times of change differ.

    No program can set the time of an inode's last change (ctime), so new content is always noticed. The fingerprints
    are cached in the file `memory`.
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
        """Return the fingerprint of a file. Raises DataError if it cannot be read."""
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
        """Write the cache, if there is anything new."""
        if self._new:
            write_atomically(self._memory, json.dumps(self._known, indent=0, sort_keys=True).encode() + b"\n")
            self._new = False


def _stamp(file: Path) -> list[int] | None:
    """Return size, inode and times of the last change in nanoseconds; None if there is no such file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


AUTO = "auto: "
"""AUTO is the prefix, in `Step.machine`, of the device that `auto` stands for."""
_FORMAT = 1
_CHANGED = "settings changed (there -> now)"


def wanted_of(
    step: Step, manifests: Mapping[str, StepManifest | None], fingerprint: Callable[[Path], str]
) -> dict[str, Any]:
    """Return everything that the result of a step depends on except its `machine`, without steps that are not done."""
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
    """Return in words why a step done with `before` is stale; None: no known difference."""
    if before.get("format") != _FORMAT:
        return "done by another version of ziggurat"
    if (version := before.get("version")) != step.version:
        earlier = isinstance(version, int) and version < step.version
        return f"done by {'an earlier' if earlier else 'a later'} version of ziggurat, which gives another result"
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
    """Return the differences in the steps that are read and in their outputs."""
    reads, read, handed = now["reads"], before.get("reads", {}), before.get("after", {})
    new = " and ".join(name for name in reads if name not in read)
    gone = " and ".join(name for name in read if name not in reads)
    reasons = []
    if new:
        reasons.append(f"now reads {new}" + (f" instead of {gone}" if gone else ""))
    elif gone:
        reasons.append(f"no longer reads {gone}")
    both = [name for name in reads if name in read]
    if others := [name for name in both if reads[name] != read[name]]:
        reasons.append(f"reads other files of {' and '.join(others)}")
    same = [name for name in both if name not in others and name in now["after"]]
    if others := [name for name in same if now["after"][name] != handed.get(name)]:
        reasons.append(f"{' and '.join(others)} gave another result")
    return reasons


def _other_files(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the first difference in the external files."""
    was, found = before.get("files", {}), now["files"]
    for key, paths in step.inputs().items():
        if len(old := was.get(key, [])) != len(paths):
            return [f"{key}: {len(old)} input files before, {len(paths)} now"]
        if other := [path for path, *digests in zip(paths, old, found[key], strict=True) if len(set(digests)) > 1]:
            return [f"{other[0]} changed"]
    return [f"{key}: {len(was[key])} input files before, 0 now" for key in was if key not in found][:1]


def settings_changed(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every setting that differs from a manifest.

    A setting introduced by a later version is missing in earlier manifests. If it has its default, this is not a
    change: the result is as before, or the step's version is raised (`Step.version`).
    """
    return changed(_completed(before, now, given_settings(now)), dict(now))


def _completed(before: Any, now: Any, given: Any) -> Any:
    """Return the settings of a manifest, completed by those that it lacks and that now have their default."""
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
    """Wall time of all calls that worked on it; for a killed call, until the last change in its folder."""
    calls: int = 0
    running: float | None = None
    """Start of the current call, in seconds since 1970; None: no call is at work."""


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
        """Return the seconds spent on a step; its folder shows when a killed call ended."""
        before = self.of(step)
        killed = 0.0 if before.running is None else max(0.0, _last_change(folder) - before.running)
        return before.seconds + killed

    def restart(self, step: str) -> None:
        """Reset the time of a step that is restarted."""
        self._spent.pop(step, None)

    def leave_running(self, step: str) -> None:
        """Count a step's time from now on as that of a killed call: its parts may end in any order, or never."""
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
"""DEAR is the work in seconds above which a restart sets results aside, since a changed setting is often a slip."""

State = Literal["done", "begun", "running", "page", "new", "changed", "damaged", "forced", "after", "kept", "missing"]


@dataclass(frozen=True)
class StepStatus:
    """Status of a step: what a call does with it, and why."""

    step: Step
    state: State
    """`done`; `kept`: used unchecked; `begun`: resumes where it was interrupted; `running`: another call is at work on
    it; `page`: done, but a page is missing or outdated and is made again; `new`, `changed`, `damaged`, `forced`: done
    from scratch; `after`: depends on the output of an earlier step; `missing`: to be used unchecked, but not done."""
    why: str
    """The reason, in words."""
    spent: Spent
    finished: bool = False
    """True if it has a result, even if with other settings."""
    spent_by_now: Callable[[], float] | None = None
    """Function that rereads the seconds spent on it, to which another call may be adding; None: as in `spent`."""

    @property
    def settled(self) -> bool:
        """True if nothing has to be done."""
        return self.state in ("done", "kept")

    @property
    def resumes(self) -> bool:
        """True if the step resumes from its existing files."""
        return self.state in ("begun", "page")

    @property
    def explanation(self) -> str:
        """The reason and, if the step is restarted, what happens to the work so far."""
        if self.state not in ("changed", "damaged", "forced") or self.spent.seconds < 1:
            return self.why
        goes = "moves to `earlier`" if self.spent.seconds >= DEAR else "is discarded"
        return f"{self.why}; it starts over, and work that took {duration(self.spent.seconds)} {goes}"

    def expected(self) -> Expected:
        """Return the expected cost of the rest, from its estimate, its progress or the previous time."""
        if self.state in ("begun", "running"):
            # Read first and all at once: another call may be at work, and measuring costs takes minutes.
            spent = self.spent.seconds if self.spent_by_now is None else self.spent_by_now()
            done = self.step.progress()
            return _rest(self.step.cost(), done, spent)
        cost = self.step.cost()
        if cost.seconds is None and self.finished and self.spent.calls:
            said = "at most what the whole step took" if self.state == "page" else "what it took before"
            return replace(cost, seconds=self.spent.seconds, said=f"{cost.said}; {said}" if cost.said else said)
        return cost


def _rest(cost: Expected, done: StepProgress | None, spent: float) -> Expected:
    if done is None or not done.share:
        said = f"for the whole step; {duration(spent)} have already been spent on it"
        return replace(cost, said=f"{cost.said}; {said}" if cost.said else said)
    rest, said = 1 - done.share, f"{done.said} are done"
    spent = spent if done.seconds is None else done.seconds
    if spent:
        seconds: float | None = spent * rest / done.share
        return replace(cost, seconds=seconds, said=f"{said}, in {duration(spent)}; the rest at that speed")
    seconds = None if cost.seconds is None else cost.seconds * rest
    return replace(cost, seconds=seconds, said=said)
