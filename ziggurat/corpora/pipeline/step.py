"""A step of a pipeline: what it reads, what it does, what it hands on; and the manifest that says that it is done.

NAME/begun.json      all that the result of step NAME depends on, before it begins
NAME/manifest.json   the same with sizes and checksums of what it hands on; written last
NAME/...             its results, and whatever it keeps to go on after an interruption
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.temporary import TEMPORARY

BEGUN, MANIFEST = "begun.json", "manifest.json"

Outputs = Mapping[str, Mapping[str, Any]]
"""Path inside the step's folder -> size in bytes, checksum, and `read`, if not all of it is read: hash of what is."""


@dataclass(frozen=True)
class Expected:
    """What a step is expected to take.

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
    """How much is done of a step that was begun.

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
