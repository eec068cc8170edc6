"""The folder of a run: its lock, its checkpoints, the links to them, and the scores and speeds that reports show."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import Field, RootModel

from ziggurat.config import load_experiment
from ziggurat.system.errors import (
    CheckpointError,
    DataError,
    TrainingError,
    ZigguratError,
    other_format,
    refuse_passing,
)
from ziggurat.system.files import content_checksum, has_checksum, write_atomically
from ziggurat.system.small_files import JsonForm, parse_json, read_bounded, read_json
from ziggurat.system.staging import is_same, lock_missing, recover, sync_folder, try_lock

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.yaml"
META_FILE = "meta.json"
ENVIRONMENT_FILE = "environment.json"
CHECKPOINTS = "checkpoints"
BASE = "base"
"""BASE is the folder in a run that holds the weights on which its low-rank updates are based."""
_LOCK = ".lock"
_PATIENCE_SECONDS = 0.5


def refuse_missing(path: Path, what: str = "run or model directory") -> None:
    """Raise CheckpointError if the folder does not exist, suggesting a similar name. Works without PyTorch."""
    recover(path)
    if path.is_dir():
        return
    if path.is_file():
        kind = "a configuration" if path.suffix in (".yaml", ".yml") else "a file"
        raise CheckpointError(f"{path}: is {kind}, expected a {what}, such as the folder that `train --run` made")
    beside: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        beside = {folder.name.lower(): folder for folder in path.parent.iterdir() if folder.is_dir()}
    near = difflib.get_close_matches(path.name.lower(), beside, n=1, cutoff=0.7)
    hint = f"; did you mean `{beside[near[0]]}`?" if near else ""
    raise CheckpointError(f"{path}: no such {what}{hint}")


@contextlib.contextmanager
def locked(run: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Context in which no other process trains in the run.

    Raises CheckpointError if another process already trains in it, DataError if the file system has no locks.
    `patience` is the time in seconds to wait for the lock, since a process that repairs the links also holds it
    briefly.
    """
    with (run / _LOCK).open("w") as file:
        end = time.monotonic() + patience
        try:
            while not try_lock(file.fileno()):
                if time.monotonic() > end:
                    raise CheckpointError(f"{run}: another process is training in this folder")
                time.sleep(0.02)
        except OSError as error:
            raise lock_missing(run, error) from None
        _LOCKS[run] = file.fileno()
        try:
            yield
        finally:
            del _LOCKS[run]


_LOCKS: dict[Path, int] = {}
"""_LOCKS maps each run that this process has locked to the descriptor of its lock."""


def refuse_replaced(run: Path) -> None:
    """Raise TrainingError if the folder `run`, which this process has locked, was moved, removed or replaced since.

    A lock belongs to a file, whatever its name: without this check, two runs could write into one folder.
    """
    if run in _LOCKS and not is_same(run / _LOCK, _LOCKS[run]):
        raise TrainingError(
            f"{run}: this folder was moved, removed or replaced while a process trained in it; nothing more is written "
            "there. At its new path, resume it with `ziggurat train --run FOLDER --resume`"
        )


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8))


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run to which a checkpoint at this path, perhaps a link, would belong."""
    return (Path(os.path.realpath(checkpoint)) / ".." / "..").resolve()


def config_file(folder: Path) -> Path:
    """Return the configuration of a run, a checkpoint of one, a model directory or an export.

    A checkpoint has none, and its run's configuration may be deeper (ziggurat.model.directory.weights_experiment).
    Works without PyTorch.
    """
    own, of_run = folder / CONFIG_FILE, run_of(folder) / CONFIG_FILE
    return of_run if of_run.is_file() and not own.is_file() else own


def checkpoint_name(update: int) -> str:
    """Return the folder name of a checkpoint; names sort in the order of updates."""
    return f"step-{update:08d}"


def best_link(direction: str) -> str:
    """Return the name of the link to the best checkpoint for a translation direction, such as `en-de`."""
    return f"best-{direction}"


def checkpoint_update(folder: Path) -> int:
    """Return the update after which a checkpoint was written, from the name of its folder."""
    return int(folder.name.removeprefix("step-"))


CHECKPOINT_FORMAT = 1
"""CHECKPOINT_FORMAT is the version of all files of a checkpoint; others are refused."""

_META_KEYS = {"progress", "store", "corpora", "encoder_layers", "decoder_layers", "configuration"}


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `meta.json`.

    Raises CheckpointError when the file is missing, damaged (it holds a checksum of itself), or has a different format.
    """
    path = folder / META_FILE
    try:
        document = parse_json(read_bounded(path, error=CheckpointError), str(path), error=CheckpointError)
        if has_checksum(document) and (version := document["format"]) != CHECKPOINT_FORMAT:
            raise CheckpointError(other_format(path, version, CHECKPOINT_FORMAT, "train again"))
        whole = has_checksum(document) and document.keys() >= _META_KEYS and MODEL_FILE in document["checksums"]
    except OSError as error:
        refuse_passing(path, error)
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: damaged")
    return cast(dict[str, Any], document)


def write_meta(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a checkpoint's `meta.json` with a checksum of itself, atomically. Raises OSError."""
    content = {**document, "checksum": content_checksum(document)}
    write_atomically(folder / META_FILE, json.dumps(content, indent=1).encode())


def link(name: Path, folder: Path) -> None:
    """Point the link `name` at `folder`, atomically, relative so that a run can be moved.

    The caller must have locked the run, since a link itself cannot be locked. So one temporary name suffices, and a
    file left behind by a killed process is replaced by the next call.
    """
    wanted = os.path.relpath(folder, name.parent)
    if name.is_symlink() and os.readlink(name) == wanted:
        return
    if name.is_dir() and not name.is_symlink():
        raise CheckpointError(
            f"{name}: is a folder in place of a link to a checkpoint, as in a copy of a run that followed its "
            f"links; remove it (`rm -r {name}`), and the link is made again"
        )
    temporary = name.with_name(f".{name.name}.linking_.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(wanted, target_is_directory=True)
    os.replace(temporary, name)
    sync_folder(name.parent)


def ranked(scores: Mapping[str, float], *, smaller_is_better: bool) -> list[str]:
    """Return the names of checkpoints by their validation metric, best first; ties by age, oldest first."""
    return sorted(scores, key=lambda name: (scores[name] if smaller_is_better else -scores[name], name))


def mend_links(run: Path) -> None:
    """Point `last` at the newest checkpoint and `best` at the one with the best score, if a kill left them stale.

    Nothing is raised: a process that trains in the run sets the links itself, and in a read-only folder they are left
    unchanged.
    """
    with contextlib.suppress(OSError, ZigguratError):
        if any(not _leads(name, folder) for name, folder in _wanted(run).items()):
            with locked(run, patience=0):
                for name, folder in _wanted(run).items():
                    link(name, folder)


def _leads(name: Path, folder: Path) -> bool:
    return name.is_symlink() and os.path.realpath(name) == os.path.realpath(folder)


def _wanted(run: Path) -> dict[Path, Path]:
    """Return the targets of the links, from the newest readable checkpoint, which holds the scores of all."""
    folders = {folder.name: folder for folder in checkpoint_folders(run)}
    for newest in reversed(folders.values()):
        try:
            progress: dict[str, Any] = read_meta(newest)["progress"]
        except CheckpointError:
            continue
        wanted = {run / "last": newest}
        scores = {name: score for name, score in progress.get("scores", {}).items() if name in folders}
        if scores:
            config = load_experiment(run / CONFIG_FILE).training
            # The metric used for these scores, since the configuration may name a new one that has not been validated
            # yet.
            metric = progress.get("best_by", {}).get("metric", config.validation.metric)
            smaller, kept = metric == "loss", config.checkpoint
            of_each = {best_link(name): its for name, its in progress.get("direction_scores", {}).items()}
            of_each = of_each if kept.keep_best_per_direction else {}
            for name, its in {**({"best": scores} if kept.keep_best else {}), **of_each}.items():
                if known := {checkpoint: score for checkpoint, score in its.items() if checkpoint in scores}:
                    wanted[run / name] = folders[ranked(known, smaller_is_better=smaller)[0]]
        return wanted
    return {}


SCORES = "scores"
"""SCORES is the folder in a run with a file for each test set, NAME.json, in the format of `ziggurat evaluate RUN ...
--json`."""
_SPEED_FILE = "speed.json"


class KeptScore(JsonForm):
    """A score on a test set, from 0 to 100. Scores with different signatures must not be compared."""

    name: str
    """Name of the metric, such as `BLEU`."""
    value: float
    signature: str


class DecodingSpeed(JsonForm):
    """The translation speed of a run's model. Speeds with different `how` must not be compared."""

    tokens_per_second: float = Field(gt=0)
    """Output tokens per second, median of the rounds."""
    rounds: int = Field(ge=1)
    how: str
    """Text, search, machine and threads."""


class _Scores(RootModel[list[KeptScore]]):
    pass


def read_scores(run: Path) -> dict[str, list[KeptScore]]:
    """Return the scores that the run keeps, by name of the test set.

    Raises DataError naming a file that is damaged or is not what `evaluate --json` prints.
    """
    remedy = "write it again by `ziggurat evaluate RUN --source FILE --reference FILE --json`, or remove it"
    files = sorted((run / SCORES).glob("*.json"))
    return {file.stem: read_json(file, _Scores, error=DataError, remedy=remedy).root for file in files}


def keep_speed(run: Path, speed: DecodingSpeed) -> None:
    """Write the decoding speed of a run, replacing an earlier one. Raises OSError."""
    write_atomically(run / _SPEED_FILE, (json.dumps(speed.model_dump(), indent=1) + "\n").encode())


def read_speed(run: Path) -> DecodingSpeed | None:
    """Return the decoding speed that the run keeps, None if none was measured. Raises DataError for a damaged file."""
    try:
        return read_json(run / _SPEED_FILE, DecodingSpeed, error=DataError, remedy="remove it and measure again")
    except FileNotFoundError:
        return None
