"""A step of a pipeline: what it reads, does and makes; its settings; and the manifest that says that it is done.

NAME/begun.json      everything that the result of step NAME depends on, before it starts
NAME/manifest.json   the same with sizes and checksums of its outputs; written last
NAME/...             its results, and whatever it keeps to resume after an interruption
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from ziggurat.config.base import Section
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY

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
