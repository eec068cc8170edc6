"""Checkpoints of a run, written atomically and with checksums, and the state of a run excluding its tensors.

checkpoints/step-00001000/
  model.safetensors                        weights, always whole
  state/optimiser/shard-00000.safetensors  moments, by parameter name; one file per process
  meta.json position, counters, checksums of these files and of itself
best, last                                 links to checkpoints

Random numbers in training follow from the seed and the position in the data, so no generator state is stored.
Any number of processes can read the shards, whose headers are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ziggurat.config.modifiers import StageConfig
from ziggurat.data.batching import FIRST, stages_over
from ziggurat.data.loader import LoaderState
from ziggurat.model.directory import verify
from ziggurat.model.run_folder import (
    CHECKPOINT_FORMAT,
    CHECKPOINTS,
    META_FILE,
    MODEL_FILE,
    checkpoint_folders,
    checkpoint_name,
    link,
    read_meta,
    refuse_replaced,
    write_meta,
)
from ziggurat.model.tensors import read_tensors, write_tensors
from ziggurat.system.errors import CheckpointError, DataError, MachineError, Problem, Remedy
from ziggurat.system.staging import Staging, staged
from ziggurat.train.distributed import Processes, shard_header, shard_name


@dataclass
class RunProgress:
    """The state of a run except its tensors.

    Attributes:
        update: optimiser updates done, skipped ones included.
        epoch, batch, data_stages: position in the data (ziggurat.data.loader.LoaderState); the last is the first epoch
            of each stage of `data.stages` that has started.
        stages_to_come: stages after the present one; -1 when all are over.
        seconds: wall time of training so far.
        skipped: updates skipped for a non-finite loss or gradient, or a loss spike.
        skipped_in_a_row: number of consecutive such updates up to the latest update.
        fault: the fault of the first of these updates, in words; None if there are none.
        losses: nats per target token of the latest updates taken, if spikes are detected.
        rate_factor: factor on the schedule's rate, lowered by each roll-back.
        good: name of the checkpoint to roll back to; None if the run does not roll back.
        rejected: updates skipped because of a large gradient (training.adaptive_clip).
        gradient_norms: running sums of their logarithms (ziggurat.train.update).
        best: best value of the validation metric so far.
        best_by: settings with which it is measured (ziggurat.train.setup.rank_anew).
        validation_due: True when the validation of this update was interrupted; a resumed run does it first.
        scores: validation metric by name of the checkpoints kept.
        direction_scores: the same for each translation direction, if there are several.
        stage: present stage of growth, from 0 (training.growth).
        schedule_update: the learning rate's counter t; behind `update` after growth or a roll-back has set it back.
        interim: names of kept checkpoints that were written only because of a stop; the next checkpoint replaces them.
        by_clock: True when this checkpoint was due only by the clock (`every_minutes`).
        window: sums of the updates since the last record (ziggurat.train.progress.RecordWindow).
    """

    update: int = 0
    epoch: int = 0
    batch: int = 0
    data_stages: list[int] = field(default_factory=lambda: list(FIRST))
    stages_to_come: int = 0
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
    direction_scores: dict[str, dict[str, float]] = field(default_factory=dict)
    interim: list[str] = field(default_factory=list)
    by_clock: bool = False
    window: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> LoaderState:
        """Position in the data."""
        return LoaderState(self.epoch, self.batch, tuple(self.data_stages))

    def keep(self, checkpoints: Collection[str]) -> None:
        """Forget everything recorded about checkpoints with other names."""
        self.scores = {name: score for name, score in self.scores.items() if name in checkpoints}
        self.interim = [name for name in self.interim if name in checkpoints]
        self.direction_scores = {
            direction: {name: score for name, score in scores.items() if name in checkpoints}
            for direction, scores in self.direction_scores.items()
        }

    def advance(self, target_tokens: int, position: LoaderState, stages: Sequence[StageConfig] = ()) -> None:
        """Count one update, taken or not, and advance to `position` in the data, which `stages` may divide."""
        self.update += 1
        self.schedule_update += 1
        self.target_tokens += target_tokens
        self._move(position, stages)

    def lose_patience(self, stages: Sequence[StageConfig]) -> bool:
        """Move to the next stage if a validation has just ended the present one by patience; return whether so."""
        if (self.epoch, self.batch) == (self.data_stages[-1], 0):
            self.validations_since_best = 0  # it belonged to the previous stage
        patience = stages[len(self.data_stages) - 1].until.patience if self.stages_to_come > 0 else None
        if patience is None or self.validations_since_best < patience:
            return False
        epoch = self.epoch + (self.batch > 0)  # the rest of the present one is skipped
        self._move(LoaderState(epoch, 0, (*self.data_stages, epoch)), stages)
        return True

    def _move(self, position: LoaderState, stages: Sequence[StageConfig]) -> None:
        if len(position.starts) > len(self.data_stages):
            self.validations_since_best = 0  # patience is counted per stage
        self.epoch, self.batch, self.data_stages = position.epoch, position.batch, list(position.starts)
        over = stages_over(stages, position.starts, position.epoch)
        self.stages_to_come = -1 if over else max(0, len(stages) - len(position.starts))


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Write `tensors` into `folder`, `shard-00000.safetensors` by the first process and so on; return checksums.

    All processes of `group` (default: all) call this together, each with its view of the same tensors: each writes its
    slice of a DTensor, and one process writes the whole of an ordinary tensor. The tensors are on the CPU.

    Returns the fingerprint of every process's file by name in the first process of the group, and {} elsewhere.
    Raises OSError, in every process, when one of them cannot write.
    """
    if dist.is_available() and dist.is_initialized():
        from ziggurat.train.slices import write_slices  # takes most of a second to import

        return write_slices(folder, tensors, group)
    folder.mkdir(parents=True, exist_ok=True)
    header = shard_header({name: [0] * tensor.dim() for name, tensor in tensors.items()})
    return {shard_name(0): write_tensors(folder / shard_name(0), tensors, header)} if tensors else {}


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of `folder` whole, in each process separately, however many processes wrote them.

    Raises CheckpointError when a file is missing or damaged.
    """
    # A single file has all tensors whole: if several processes held slices, each has written some.
    if [file.name for file in folder.glob("*.safetensors")] == [shard_name(0)]:
        return read_tensors(folder / shard_name(0))
    from ziggurat.train.slices import read_slices

    return read_slices(folder)


_OPTIMISER = "state/optimiser"


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run as if it had never stopped.

    Attributes:
        optimiser: state of the optimiser, `<parameter>/<moment>` (ziggurat.train.optim).
        store: fingerprint of the training data.
        corpora: names of its corpora, in order, by which `data.stages` finds them; (): none are named.
        configuration: configuration of the run, as a JSON document; None in a checkpoint that was read.
    """

    progress: RunProgress
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    store: str
    corpora: Sequence[str] = ()
    configuration: Mapping[str, Any] | None = None


def save_checkpoint(
    run: Path, checkpoint: Checkpoint, depth: tuple[int, int], processes: Processes | None = None
) -> Path:
    """Write a checkpoint under `run`; the folder appears under its name only when all of it is on disk.

    `depth` is the depth of this stage, encoder first. Several `processes` write together: each its moments, the first
    one everything else. Returns the folder. Raises CheckpointError, in all of them, when it cannot be written; then no
    trace of it remains, and earlier checkpoints are untouched.
    """
    processes = processes or Processes()
    folder = run / CHECKPOINTS / checkpoint_name(checkpoint.progress.update)
    stagings: list[Staging] = []  # one, in the first process

    def begin() -> None:
        refuse_replaced(run)
        stagings.append(Staging(folder))
        (stagings[0].begin() / _OPTIMISER).mkdir(parents=True)

    def end() -> None:
        place = staged(folder)
        checksums = {MODEL_FILE: write_tensors(place / MODEL_FILE, checkpoint.weights)}
        checksums |= {f"{_OPTIMISER}/{name}": checksum for name, checksum in shards.items()}
        meta = {
            "format": CHECKPOINT_FORMAT,
            "progress": asdict(checkpoint.progress),
            "store": checkpoint.store,
            "corpora": checkpoint.corpora,
            "encoder_layers": depth[0],
            "decoder_layers": depth[1],
            "configuration": checkpoint.configuration,
            "checksums": checksums,
        }
        write_meta(place, meta)
        stagings[0].put_in_place()
        link(run / "last", folder)  # last, because any verb repairs a link left stale by a kill before this point

    try:
        # (1) The first process makes a temporary folder; (2) all write their shards into it; (3) the first writes the
        # weights, then `meta.json`, whose checksums cover all files, and renames the folder.
        processes.first_does(begin)
        shards = write_shards(staged(folder) / _OPTIMISER, checkpoint.optimiser, processes.group)
        processes.first_does(end)
    except (DataError, MachineError) as error:
        raise CheckpointError(*error.problems, between=error.between) from None
    except OSError as error:
        refuse_replaced(run)
        size = sum(
            t.numel() * t.element_size() for part in (checkpoint.weights, checkpoint.optimiser) for t in part.values()
        )
        raise CheckpointError(_unwritten(folder, size, error)) from None
    finally:
        for staging in stagings:
            staging.close()
    return folder


def _unwritten(folder: Path, size: int, error: OSError) -> Problem:
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(folder.parent).free / 1e6:,.1f} MB are free there"
    return Problem(
        "training.checkpoint.keep_last",
        f"{folder}: cannot be written: {error.strerror or error}. A checkpoint takes {size / 1e6:,.1f} MB{free}. "
        "Those before it, if any, are whole:",
        "make room (or lower `training.checkpoint.keep_last`), then `--resume`",
        named=(Remedy.RESUME,),
    )


def read_progress(folder: Path) -> RunProgress:
    """Return the progress of a run at a checkpoint. Raises CheckpointError when its `meta.json` cannot be read."""
    return _read_meta(folder)[0]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    progress, store, corpora, checksums = _read_meta(folder)
    # Before anything is parsed, because a parser may misread damaged files.
    for name, expected in checksums.items():
        verify(folder / name, expected)
    for shard in (folder / _OPTIMISER).glob("*.safetensors"):
        # torch's reader opens every shard in the folder, so one that no checksum covers would be read as well.
        if f"{_OPTIMISER}/{shard.name}" not in checksums:
            raise CheckpointError(f"{shard}: does not belong to this checkpoint; remove it")
    weights, moments = read_tensors(folder / MODEL_FILE), read_shards(folder / _OPTIMISER)
    return Checkpoint(progress, weights, moments, store, corpora)


def latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, and report each newer damaged one through `warn`.

    Returns None when the run has no checkpoint at all. Raises CheckpointError when all are damaged.
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


def same_for_all(
    run: Path,
    find: Callable[[], Checkpoint | None],
    processes: Processes,
    read: Callable[[Path], Checkpoint] = load_checkpoint,
) -> Checkpoint | None:
    """Return, in every process, the checkpoint that `find` returns in the first one; the others `read` it.

    If each called `find`, two machines could choose differently when one of them cannot read a file. Raises
    CheckpointError when this process cannot read it, and the errors of `find` (ziggurat.train.distributed.first_does).
    """
    found: list[Checkpoint | None] = []
    processes.first_does(lambda: found.append(find()))
    update = processes.of_first(found[0].progress.update if found and found[0] is not None else -1)
    if update < 0:
        return None
    return found[0] if found else read(run / CHECKPOINTS / checkpoint_name(update))


def _read_meta(folder: Path) -> tuple[RunProgress, str, list[str], dict[str, str]]:
    """Return progress, fingerprint of the store, names of its corpora, and checksums."""
    document = read_meta(folder)
    try:
        progress = RunProgress(**document["progress"])
        return progress, document["store"], document["corpora"], dict(document["checksums"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / META_FILE}: damaged") from None
