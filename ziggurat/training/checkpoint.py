"""Checkpoints of a run: atomic and checksummed; a damaged one is named and passed over.

checkpoints/step-00001000/
  model.safetensors                        weights
  state/optimiser/shard-00000.safetensors  moments, by parameter name; one file per process
  meta.json                                position, counters, checksums of the files above and of itself
best, last                                 links to checkpoints

There are no states of random generators: what is random in training follows from the seed and the place in the data.
Formats that still open: 4 had no configuration in `meta.json`; 3 had such states; 2 one `state/optimiser.safetensors`
and no checksum of `meta.json`; 1 no growth.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ziggurat.data.staging import Staging, staged
from ziggurat.errors import CheckpointError, DataError
from ziggurat.models.directory import verify
from ziggurat.models.run_folder import (
    CHECKPOINTS,
    META_FILE,
    MODEL_FILE,
    checkpoint_folders,
    link,
    read_meta,
    write_meta,
)
from ziggurat.models.tensors import read_tensors, write_tensors
from ziggurat.training.processes import Processes
from ziggurat.training.shards import read_shards, write_shards

__all__ = [
    "CHECKPOINT_FORMAT",
    "Checkpoint",
    "Progress",
    "checkpoint_folders",
    "latest_checkpoint",
    "load_checkpoint",
    "read_progress",
    "same_for_all",
    "save_checkpoint",
]

CHECKPOINT_FORMAT = 5
_STATE = "state"
_OPTIMISER = f"{_STATE}/optimiser"
_OPTIMISER_BEFORE_3 = f"{_STATE}/optimiser.safetensors"


@dataclass
class Progress:
    """Where a run stands; everything that is not a tensor.

    Attributes:
        update: optimiser updates done, skipped ones included.
        epoch, batch: place in the data (ziggurat.data.loader.LoaderState).
        seconds: wall time of training so far.
        target_tokens: target tokens trained on so far.
        skipped: updates skipped for a non-finite loss or gradient, or a loss spike.
        skipped_in_a_row: of these, the latest in a row.
        fault: what the first of the latest in a row suffered from, in words; None when there is none.
        spikes: of the updates skipped, those with a loss spike (training.divergence.loss_spike).
        losses: nats per target token of the latest updates taken, where spikes are looked for.
        roll_backs: times that the run went back to a good checkpoint.
        rate_factor: what the schedule's rate is multiplied by since then.
        good: name of the checkpoint to roll back to; None unless the run is to do so.
        out_of_memory: updates skipped for want of memory.
        out_of_memory_in_a_row: of these, the latest in a row.
        rejected: updates skipped for a large gradient (training.adaptive_clip).
        gradient_norms: running sums of their logarithms (ziggurat.training.clipping).
        best: best value of the validation metric so far.
        best_update: its update.
        best_by: how it is measured (ziggurat.training.validate.rank_anew).
        validations_since_best: in a row without a better one.
        validation_due: whether the validation of this update was interrupted; it is the next thing to do.
        scores: validation metric by name of the checkpoints kept.
        stage: stage of growth that is trained now, from 0 (training.growth).
        schedule_update: the learning rate's counter t; behind `update` where growing set it back.
        interim: names of the checkpoints kept that no schedule asked for, only a stop; they make way for the next one.
        by_clock: whether this checkpoint is there only because the clock asked for it (`every_minutes`).
        window: sums of the updates since the last record (ziggurat.training.progress.Window).
    """

    update: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    fault: str | None = None
    spikes: int = 0
    losses: list[float] = field(default_factory=list)
    roll_backs: int = 0
    rate_factor: float = 1.0
    good: str | None = None
    out_of_memory: int = 0
    out_of_memory_in_a_row: int = 0
    rejected: int = 0
    gradient_norms: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best: float | None = None
    best_update: int | None = None
    best_by: dict[str, Any] = field(default_factory=dict)
    validations_since_best: int = 0
    validation_due: bool = False
    stage: int = 0
    schedule_update: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    interim: list[str] = field(default_factory=list)
    by_clock: bool = False
    window: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to go on as if nothing had happened.

    Attributes:
        progress: where the run stands.
        weights: parameters by name.
        optimiser: its state, `<parameter>/<moment>` (ziggurat.training.optim).
        store: fingerprint of the training data.
        configuration: of the run, as a JSON document; not read back.
    """

    progress: Progress
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    store: str
    configuration: Mapping[str, Any] | None = None


def save_checkpoint(run: Path, checkpoint: Checkpoint, encoder_layers: int, processes: Processes | None = None) -> Path:
    """Write a checkpoint under `run`; the folder appears under its name only when all of it is on disk.

    `encoder_layers` is the depth of this stage. Several `processes` write together: each its moments, the first one all
    else. Returns the folder. Raises CheckpointError, in all of them, when it cannot be written: nothing of it is left
    then, and the checkpoints before it are as they were.
    """
    processes = processes or Processes()
    folder = run / CHECKPOINTS / f"step-{checkpoint.progress.update:08d}"
    place: list[Staging] = []  # of the first process

    def begin() -> None:
        place.append(Staging(folder))
        (place[0].begin() / _OPTIMISER).mkdir(parents=True)

    def end() -> None:
        _write_rest(staged(folder), checkpoint, encoder_layers, shards)
        place[0].put_in_place()
        link(run / "last", folder)

    try:
        processes.first_does(begin)
        shards = write_shards(staged(folder) / _OPTIMISER, checkpoint.optimiser, processes.group)
        processes.first_does(end)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        size = sum(
            t.numel() * t.element_size() for part in (checkpoint.weights, checkpoint.optimiser) for t in part.values()
        )
        raise CheckpointError(_unwritten(folder, size, error)) from None
    finally:
        for staging in place:
            staging.close()
    return folder


def _write_rest(folder: Path, checkpoint: Checkpoint, encoder_layers: int, shards: Mapping[str, str]) -> None:
    """Write all but the moments."""
    checksums = {MODEL_FILE: write_tensors(folder / MODEL_FILE, checkpoint.weights)}
    checksums |= {f"{_OPTIMISER}/{name}": checksum for name, checksum in shards.items()}
    meta = {
        "format": CHECKPOINT_FORMAT,
        "progress": asdict(checkpoint.progress),
        "store": checkpoint.store,
        "encoder_layers": encoder_layers,
        "configuration": checkpoint.configuration,
        "checksums": checksums,
    }
    write_meta(folder, meta)


def _unwritten(folder: Path, size: int, error: OSError) -> str:
    """Say why a checkpoint of `size` bytes could not be written, and what to do about it."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(folder.parent).free / 1e6:,.1f} MB are free there"
    return (
        f"{folder}: cannot be written: {error.strerror or error}. A checkpoint takes {size / 1e6:,.1f} MB{free}. "
        "Those before it, if any, are whole: make room (or lower `training.checkpoint.keep_last`), then `--resume`"
    )


def read_progress(folder: Path) -> Progress:
    """Return where the run stood at a checkpoint. Raises CheckpointError when its `meta.json` cannot be read."""
    return _read_meta(folder).progress


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    meta = _read_meta(folder)
    for name, expected in meta.checksums.items():
        verify(folder / name, expected)
    for shard in (folder / _OPTIMISER).glob("*.safetensors"):
        if f"{_OPTIMISER}/{shard.name}" not in meta.checksums:
            raise CheckpointError(f"{shard}: not of this checkpoint; remove it")
    one_file = meta.format < 3
    return Checkpoint(
        meta.progress,
        read_tensors(folder / MODEL_FILE),
        read_tensors(folder / _OPTIMISER_BEFORE_3) if one_file else read_shards(folder / _OPTIMISER),
        meta.store,
    )


def latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; each damaged one on the way is reported through `warn`.

    Returns None when the run has no checkpoint at all. Raises CheckpointError when every one is damaged.
    """
    folders = checkpoint_folders(run)
    for folder in reversed(folders):
        try:
            return load_checkpoint(folder)
        except CheckpointError as error:
            warn(f"CHECKPOINT DAMAGED: {error}; trying the one before")
    if folders:
        raise CheckpointError(f"{run}: all {len(folders)} checkpoints are damaged; start a new run")
    return None


def same_for_all(run: Path, find: Callable[[], Checkpoint | None], processes: Processes) -> Checkpoint | None:
    """Return in every process the checkpoint that `find` returns in the first one; the others read that.

    Left to themselves, two machines could choose differently, where one of them cannot read a file. Raises
    CheckpointError when this process cannot, and what `find` raises (ziggurat.training.processes.first_does).
    """
    found: list[Checkpoint | None] = []
    processes.first_does(lambda: found.append(find()))
    update = processes.of_first(found[0].progress.update if found and found[0] is not None else -1)
    if update < 0:
        return None
    return found[0] if found else load_checkpoint(run / CHECKPOINTS / f"step-{update:08d}")


class _Meta(NamedTuple):
    """Content of `meta.json`."""

    format: int
    progress: Progress
    store: str
    checksums: dict[str, str]


def _read_meta(folder: Path) -> _Meta:
    document, path = read_meta(folder), folder / META_FILE
    version = document["format"]
    if version not in range(1, CHECKPOINT_FORMAT + 1):
        raise CheckpointError(f"{path}: checkpoint format {version}, this version reads 1 to {CHECKPOINT_FORMAT}")
    if version == 1:  # before growth: the schedule counted every update
        document["progress"]["schedule_update"] = document["progress"]["update"]
    try:
        return _Meta(version, Progress(**document["progress"]), document["store"], dict(document["checksums"]))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: damaged") from None
