"""Checkpoints of a run: atomic, checksummed, pruned; a damaged one is named and passed over.

checkpoints/step-00001000/
  model.safetensors            weights
  state/optimiser.safetensors  moments, by parameter name
  state/random.safetensors     torch's generators
  meta.json                    position, counters, checksums of the files above
best, last                     links to checkpoints
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.data.files import fingerprint, write_atomically
from ziggurat.errors import CheckpointError, DataError
from ziggurat.models.directory import CHECKPOINTS, META_FILE, MODEL_FILE, read_tensors, write_tensors

__all__ = [
    "CHECKPOINT_FORMAT",
    "Checkpoint",
    "Progress",
    "checkpoint_folders",
    "latest_checkpoint",
    "load_checkpoint",
    "prune",
    "random_state",
    "read_progress",
    "restore_random_state",
    "save_checkpoint",
]

CHECKPOINT_FORMAT = 3
_OPTIMISER = "state/optimiser.safetensors"
_RANDOM = "state/random.safetensors"


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
        losses: nats per target token of the latest updates taken, at most `training.divergence.window`; empty unless
            spikes are looked for.
        roll_backs: times that the run went back to a good checkpoint.
        rate_factor: what the schedule's rate is multiplied by since then.
        good: name of the checkpoint to roll back to; None unless the run is to do so.
        out_of_memory: updates skipped for want of memory.
        out_of_memory_in_a_row: of these, the latest in a row.
        rejected: updates skipped for a large gradient (training.adaptive_clip).
        gradient_norms: running sums of their logarithms (ziggurat.training.clipping).
        best: best value of the validation metric so far.
        best_update: its update.
        validations_since_best: in a row without a better one.
        scores: validation metric by name of the checkpoints kept.
        stage: stage of growth that is trained now, from 0 (training.growth).
        schedule_update: the learning rate's counter t; behind `update` where growing set it back.
        interim: names of the checkpoints kept that no schedule asked for, written when training stopped. They make
            way for the next one, so that a run keeps the same checkpoints however often it was stopped.
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
    validations_since_best: int = 0
    stage: int = 0
    schedule_update: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    interim: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to go on as if nothing had happened."""

    progress: Progress
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    random: dict[str, Tensor]
    store: str


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's generators."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state |= {f"cuda-{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Put torch's generators back into a saved state."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        saved = [state[k] for k in sorted(state, key=lambda k: int(k[5:] or 0) if k != "cpu" else -1) if k != "cpu"]
        for device, generator in enumerate(saved[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)


def save_checkpoint(
    run: Path,
    progress: Progress,
    weights: dict[str, Tensor],
    optimiser: dict[str, Tensor],
    store: str,
    encoder_layers: int,
) -> Path:
    """Write a checkpoint under `run`; the folder appears under its name only when all of it is on disk.

    `store` is the fingerprint of the training data, `encoder_layers` the depth of this stage. Returns the folder.
    """
    folder = run / CHECKPOINTS / f"step-{progress.update:08d}"
    building = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    (building / "state").mkdir(parents=True)
    files = {MODEL_FILE: weights, _OPTIMISER: optimiser, _RANDOM: random_state()}
    for name, tensors in files.items():
        write_tensors(building / name, tensors)
    meta = {
        "format": CHECKPOINT_FORMAT,
        "progress": asdict(progress),
        "store": store,
        "encoder_layers": encoder_layers,
        "checksums": {name: fingerprint(building / name) for name in files},
    }
    write_atomically(building / META_FILE, json.dumps(meta, indent=1).encode())
    if folder.exists():  # the same update again, after a resume from an older checkpoint
        _delete(folder)
    os.replace(building, folder)
    _sync_folder(folder.parent)
    _link(run / "last", folder)
    return folder


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8))


def read_progress(folder: Path) -> Progress:
    """Return where the run stood at a checkpoint. Raises CheckpointError when its `meta.json` cannot be read."""
    return _read_meta(folder).progress


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    meta = _read_meta(folder)
    for name, expected in meta.checksums.items():
        try:
            actual = fingerprint(folder / name)
        except DataError as error:
            raise CheckpointError(str(error)) from None
        if actual != expected:
            raise CheckpointError(f"{folder / name}: damaged (checksum {actual}, expected {expected})")
    return Checkpoint(
        meta.progress,
        read_tensors(folder / MODEL_FILE),
        read_tensors(folder / _OPTIMISER),
        read_tensors(folder / _RANDOM),
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


def prune(run: Path, progress: Progress, *, keep_last: int, keep_best: int, smaller_is_better: bool) -> None:
    """Delete checkpoints that are neither among the newest nor among the best, and mend the link `best`.

    The one that the run would roll back to stays too.

    `progress.scores` and `progress.interim` lose the names that are gone.
    """
    folders = checkpoint_folders(run)
    regular = [folder for folder in folders if folder.name not in progress.interim]
    scores = {folder: progress.scores[folder.name] for folder in folders if folder.name in progress.scores}
    ranked = sorted(scores, key=lambda f: (scores[f] if smaller_is_better else -scores[f], f.name))
    kept = {*regular[-keep_last:], *folders[-1:], *ranked[:keep_best]}
    kept |= {folder for folder in folders if folder.name == progress.good}
    for folder in folders:
        if folder not in kept:
            _delete(folder)
    if ranked and keep_best:
        _link(run / "best", ranked[0])
    names = {folder.name for folder in kept}
    progress.scores = {name: score for name, score in progress.scores.items() if name in names}
    progress.interim = [name for name in progress.interim if name in names]


def _delete(folder: Path) -> None:
    """Remove a checkpoint; renamed first, so that a kill on the way leaves no half checkpoint under its name."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class _Meta(NamedTuple):
    """Content of `meta.json`."""

    progress: Progress
    store: str
    checksums: dict[str, str]


def _read_meta(folder: Path) -> _Meta:
    path = folder / META_FILE
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["format"] == 1:  # before growth: the schedule counted every update
            document["progress"]["schedule_update"] = document["progress"]["update"]
        elif document["format"] not in (2, CHECKPOINT_FORMAT):  # 2: before roll backs; their counters start at zero
            raise CheckpointError(
                f"{path}: checkpoint format {document['format']}, this version reads 1 to {CHECKPOINT_FORMAT}"
            )
        return _Meta(Progress(**document["progress"]), document["store"], dict(document["checksums"]))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: damaged") from None


def _link(link: Path, folder: Path) -> None:
    """Point `link` at `folder`, atomically, relative so that a run can be moved."""
    temporary = link.with_name(f".{link.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
    os.replace(temporary, link)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
