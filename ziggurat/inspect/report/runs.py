"""A run as reports read it: its configuration and the records of its training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import RootModel

from ziggurat.config import Experiment, load_experiment
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    DecodingSpeed,
    KeptScore,
    read_scores,
    read_speed,
    refuse_missing,
)
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.files import folder_kind
from ziggurat.system.small_files import read_json, read_json_lines
from ziggurat.train.diagnosis.records import Record, read_records

MAX_DRAWN = 8
"""Runs at most whose own curves a report draws: the number of colours that can be told apart."""
MAX_RUNS = 200
"""Runs in one report at most. Of more than MAX_DRAWN it has only what is drawn against depth, a line for a method."""

_METRICS = "metrics.jsonl"
_LOG = "log.txt"


@dataclass(frozen=True)
class Ending:
    """The end of the latest training in a run.

    Attributes:
        finished: True when a limit of `training.stop` was reached; False when it was stopped, failed, was killed, or
            still trains.
        text: a description.
    """

    finished: bool
    text: str


@dataclass(frozen=True)
class ReportRun:
    """A run without its weights, so that reading it takes milliseconds.

    Attributes:
        name: unique among the runs of the report.
        folder: folder of the run.
        colour: index of its colour, from 0; the same in every figure.
        experiment: its configuration.
        train: records of kind `train` from `metrics.jsonl`, by update; a number may be NaN or infinite.
        validations: records of kind `validation`, by update.
        depth: diagnostics, by update; empty where none were collected.
        ending: the end of the latest training.
        environment: versions and hardware at its latest start, by name; empty where the file is missing.
        scores: scores on test sets, by name of the test set; see ziggurat.model.run_folder.
        speed: decoding speed; None where none was measured.
    """

    name: str
    folder: Path
    colour: int
    experiment: Experiment
    train: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    depth: list[Record]
    ending: Ending
    environment: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Sequence[KeptScore]] = field(default_factory=dict)
    speed: DecodingSpeed | None = None


def read_runs(folders: Sequence[str | Path]) -> list[ReportRun]:
    """Return the runs in `folders`, in this order, each with a different colour and name.

    Raises:
        ConfigError: a folder is named twice, or there are more than MAX_RUNS.
        CheckpointError: a folder is not a run.
        DataError: records are damaged.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    if twice := next((p for i, p in enumerate(paths) if resolved[i] in resolved[:i]), None):
        raise ConfigError(f"{twice}: this run is named twice")
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs are too many for one report; at most {MAX_RUNS}")
    return [
        read_run(path, colour=i, name=name) for i, (path, name) in enumerate(zip(paths, _names(resolved), strict=True))
    ]


def read_run(folder: str | Path, *, colour: int = 0, name: str | None = None) -> ReportRun:
    """Return the run in `folder`; its name is that of the folder unless another is given.

    Raises:
        CheckpointError: the folder is not a run.
        ConfigError: its configuration cannot be read.
        DataError: records are damaged; the message has file and line.
    """
    run = Path(folder)
    refuse_missing(run, "run")
    if not (run / CONFIG_FILE).is_file() or not (run / CHECKPOINTS).is_dir():
        kind = folder_kind(run)
        what = f"not a run, but {kind}" if kind else f"not a run (no {CONFIG_FILE} or no {CHECKPOINTS}/)"
        raise CheckpointError(f"{run}: {what}; reports are made of runs")
    # Of several records of one update the last counts.
    by_kind: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    for record in _records(run / _METRICS):
        if record["kind"] in by_kind:
            by_kind[record["kind"]][record["update"]] = record
    train, validations = ([records[update] for update in sorted(records)] for records in by_kind.values())
    return ReportRun(
        name or run.resolve().name,
        run,
        colour,
        load_experiment(run / CONFIG_FILE),
        train,
        validations,
        read_records(run),
        _ending(run / _LOG),
        _environment(run / ENVIRONMENT_FILE),
        read_scores(run),
        read_speed(run),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of the paths, with as many parts as are needed to tell them apart."""
    longest = max((len(folder.parts) for folder in folders), default=0)
    for count in range(1, longest + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return read_json_lines(path, _record, "a record of a run")


def _record(record: Any, where: str) -> dict[str, Any]:
    """Return a line of `metrics.jsonl`. Raises ValueError unless it has a kind, an update, and else numbers."""
    numbers = [value for key, value in record.items() if key not in ("kind", "partial") and value is not None]
    if not isinstance(record["kind"], str) or type(record["update"]) is not int:
        raise ValueError(where)
    if not all(type(value) in (int, float) and (type(value) is float or abs(value) < 1 << 63) for value in numbers):
        raise ValueError(where)
    return dict(record)


def _ending(path: Path) -> Ending:
    """Return the end of the run, from the last message of its log that tells it."""
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    messages = [line.partition("  ")[2] for line in lines]
    for line in reversed(messages):
        stopped = re.match(r"stopped after update (\d+): (.+) \(", line)
        # A run that had ended, resumed as it was
        stopped = stopped or re.match(r"nothing to do after update (\d+): (.+?)(?:; to go on|$)", line)
        if stopped:
            by_signal = stopped[2].startswith("SIG")
            reached = f"{'stopped by' if by_signal else 'ended:'} {stopped[2]}, after update {int(stopped[1]):,}"
            return Ending(not by_signal, reached)
        if line.startswith(("first update", "resumed after update")):
            break  # what stands before belongs to an earlier training
    return Ending(False, "no word of its end in the log: it failed, was killed, or still trains")


class _Environment(RootModel[dict[str, Any]]):
    """The content of `environment.json`: values by name."""


def _environment(path: Path) -> dict[str, str]:
    try:
        found = read_json(path, _Environment, error=DataError, remedy="remove the file").root
    except FileNotFoundError:
        return {}
    return {key: str(value)[:1000] for key, value in found.items()}
