"""Checkpoints of a run, written atomically and with checksums; a damaged one is reported and passed over.

checkpoints/step-00001000/
  model.safetensors                        weights, always whole
  state/optimiser/shard-00000.safetensors  moments, by parameter name; one file per process
  meta.json                                position, counters, checksums of the files above and of itself
best, last                                 links to checkpoints

There are no states of random generators: random numbers of training follow from the seed and the position in the data.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

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
    write_meta,
)
from ziggurat.model.tensors import read_tensors, write_tensors
from ziggurat.system.errors import CheckpointError, DataError, MachineError
from ziggurat.system.staging import Staging, staged
from ziggurat.train.processes import Processes
from ziggurat.train.run_state import Progress
from ziggurat.train.shards import read_shards, write_shards

_STATE = "state"
_OPTIMISER = f"{_STATE}/optimiser"


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run as if it had never stopped.

    Attributes:
        progress: the state of the run except its tensors.
        weights: parameters by name.
        optimiser: its state, `<parameter>/<moment>` (ziggurat.train.optim).
        store: fingerprint of the training data.
        corpora: names of the corpora in it, in their order, by which `data.stages` finds them; (): none are named.
        configuration: that of the run, as a JSON document; None in a checkpoint that was read.
    """

    progress: Progress
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    store: str
    corpora: Sequence[str] = ()
    configuration: Mapping[str, Any] | None = None


def save_checkpoint(
    run: Path, checkpoint: Checkpoint, depth: tuple[int, int], processes: Processes | None = None
) -> Path:
    """Write a checkpoint under `run`; the folder appears under its name only when all of it is on disk.

    `depth` is that of this stage, encoder first. Several `processes` write together: each its moments, the first one
    the rest. Returns the folder. Raises CheckpointError, in all of them, when it cannot be written; nothing of it is
    left then, and earlier checkpoints are untouched.
    """
    processes = processes or Processes()
    folder = run / CHECKPOINTS / checkpoint_name(checkpoint.progress.update)
    stagings: list[Staging] = []  # one, in the first process

    def begin() -> None:
        stagings.append(Staging(folder))
        (stagings[0].begin() / _OPTIMISER).mkdir(parents=True)

    def end() -> None:
        _write_rest(staged(folder), checkpoint, depth, shards)
        stagings[0].put_in_place()
        link(run / "last", folder)  # last: a kill before it leaves a link that any verb mends

    try:
        # (1) The first process makes a temporary folder; (2) all write their shards into it; (3) the first writes the
        # weights, then `meta.json`, whose checksums cover all files, and renames the folder.
        processes.first_does(begin)
        shards = write_shards(staged(folder) / _OPTIMISER, checkpoint.optimiser, processes.group)
        processes.first_does(end)
    except (DataError, MachineError) as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        size = sum(
            t.numel() * t.element_size() for part in (checkpoint.weights, checkpoint.optimiser) for t in part.values()
        )
        raise CheckpointError(_unwritten(folder, size, error)) from None
    finally:
        for staging in stagings:
            staging.close()
    return folder


def _write_rest(folder: Path, checkpoint: Checkpoint, depth: tuple[int, int], shards: Mapping[str, str]) -> None:
    """Write the weights and `meta.json`."""
    checksums = {MODEL_FILE: write_tensors(folder / MODEL_FILE, checkpoint.weights)}
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
    write_meta(folder, meta)


def _unwritten(folder: Path, size: int, error: OSError) -> str:
    """Return the message for a checkpoint of `size` bytes that could not be written, with the way out."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(folder.parent).free / 1e6:,.1f} MB are free there"
    return (
        f"{folder}: cannot be written: {error.strerror or error}. A checkpoint takes {size / 1e6:,.1f} MB{free}. "
        "Those before it, if any, are whole: make room (or lower `training.checkpoint.keep_last`), then `--resume`"
    )


def read_progress(folder: Path) -> Progress:
    """Return the progress of a run at a checkpoint. Raises CheckpointError when its `meta.json` cannot be read."""
    return _read_meta(folder).progress


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    meta = _read_meta(folder)
    # Before anything is parsed: a parser may take damaged files for others.
    for name, expected in meta.checksums.items():
        verify(folder / name, expected)
    for shard in (folder / _OPTIMISER).glob("*.safetensors"):
        # torch's reader opens every shard in the folder, so one that no checksum covers would be read as well.
        if f"{_OPTIMISER}/{shard.name}" not in meta.checksums:
            raise CheckpointError(f"{shard}: does not belong to this checkpoint; remove it")
    return Checkpoint(
        meta.progress,
        read_tensors(folder / MODEL_FILE),
        read_shards(folder / _OPTIMISER),
        meta.store,
        meta.corpora,
    )


def latest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint, and report each damaged one that is newer through `warn`.

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
    CheckpointError when this process cannot read it, and the errors of `find` (ziggurat.train.processes.first_does).
    """
    found: list[Checkpoint | None] = []
    processes.first_does(lambda: found.append(find()))
    update = processes.of_first(found[0].progress.update if found and found[0] is not None else -1)
    if update < 0:
        return None
    return found[0] if found else read(run / CHECKPOINTS / checkpoint_name(update))


class _Meta(NamedTuple):
    """Content of `meta.json`."""

    progress: Progress
    store: str
    corpora: list[str]
    checksums: dict[str, str]


def _read_meta(folder: Path) -> _Meta:
    document, path = read_meta(folder), folder / META_FILE
    try:
        progress = Progress(**document["progress"])
        return _Meta(progress, document["store"], document["corpora"], dict(document["checksums"]))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: damaged") from None
