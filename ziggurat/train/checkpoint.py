"""Checkpoints of a run, written atomically and with checksums; a damaged one is reported and passed over.

checkpoints/step-00001000/
  model.safetensors                        weights, always whole
  state/optimiser/shard-00000.safetensors  moments, by parameter name; one file per process
  meta.json                                position, counters, checksums of the files above and of itself
best, last                                 links to checkpoints

There are no states of random generators: random numbers of training follow from the seed and the position in the data.

Moments are in shards: each process writes its part, and any number of processes can read them. A shard has the headers
of torch.distributed.checkpoint: `DCP_SHARDING_INFO` says where in its tensor each slice begins. A process that is alone
needs no more than that of it; several agree through torch.distributed.checkpoint, which takes a second to import. It
plans which process writes which slice, agrees on errors and reads the slices back. Its own writers are not used:
FileSystemWriter leaves a pickled `.metadata` (filesystem.py, `finish`), and HuggingFaceStorageWriter assembles a
process's whole shard in memory before it writes it (filesystem.py, `stream.write(save(tensor_dict, ...))`) and syncs no
checksum with it. The files here have the headers that HuggingFaceStorageReader reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

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
from ziggurat.system.errors import CheckpointError, DataError, MachineError, refuse_passing
from ziggurat.system.staging import Staging, staged
from ziggurat.train.processes import Processes
from ziggurat.train.run_state import Progress


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Write `tensors` into `folder`, `shard-00000.safetensors` by the first process and so on; return checksums.

    All processes of `group` (default: every one) call this together, each with its own view of the same tensors: of a
    DTensor each writes its slice, of an ordinary tensor one process writes the whole. The tensors are on the CPU.

    Returns, in the first process of the group, the fingerprint of every process's file by its name; elsewhere {}.
    Raises OSError, in every process, when one of them cannot write.
    """
    if dist.is_available() and dist.is_initialized():
        return write_slices(folder, tensors, group)
    folder.mkdir(parents=True, exist_ok=True)
    header = shard_header({name: [0] * tensor.dim() for name, tensor in tensors.items()})
    return {shard_name(0): write_tensors(folder / shard_name(0), tensors, header)} if tensors else {}


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of `folder` whole, each process for itself, however many have written them.

    Raises CheckpointError when a file is missing or damaged.
    """
    # One file has all tensors whole: of several processes that hold slices, each has written some.
    if [file.name for file in folder.glob("*.safetensors")] == [shard_name(0)]:
        return read_tensors(folder / shard_name(0))

    return read_slices(folder)


def shard_name(rank: int) -> str:
    """Return the name of a process's file."""
    return f"shard-{rank:05d}.safetensors"


def shard_header(begins: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the header of a shard whose slice of each tensor begins at these places, one for each dimension."""
    offsets = {name: {"saved_offsets": list(begin)} for name, begin in begins.items()}
    return {"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True), "DCP_VERSION": "1.0"}


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


# torch warns on every save and load of a single process, where that is intended.
warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled, unavailable or uninitialized")


def write_slices(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, str]:
    """Write this process's slices of `tensors`; see ziggurat.train.checkpoint.write_shards."""
    writer = _ShardWriter(folder)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _cause(error) from None
    return writer.checksums


def read_slices(folder: Path) -> dict[str, Tensor]:
    """Put the tensors of a folder together; see ziggurat.train.checkpoint.read_shards."""
    try:
        reader = HuggingFaceStorageReader(str(folder))
        found = reader.read_metadata().state_dict_metadata
        # `load` fills tensors in place: empty ones of the sizes in the headers ask for all of them, whole.
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in found.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(tensors, storage_reader=reader, planner=planner, no_dist=True)  # each process by itself
    except CheckpointException as error:
        refuse_passing(folder, _cause(error))
        raise CheckpointError(f"{folder}: damaged ({_cause(error)})") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        refuse_passing(folder, error)
        raise CheckpointError(f"{folder}: damaged or missing ({error})") from None
    return tensors


def _cause(error: CheckpointException) -> BaseException:
    """Return the error of the first process that failed."""
    return error.failures[min(error.failures)][0]


class _ShardWriter(StorageWriter):
    """Writes one safetensors file per process.

    Attributes:
        checksums: fingerprint of each file by its name; filled in the first process when all have written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: every process does the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each process the name of its file, by its rank."""
        names = map(shard_name, range(len(plans)))
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's slices, if it has any."""
        slices: dict[str, Tensor] = {}
        begins: dict[str, list[int]] = {}
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
            # One slice per process: the file's keys are the tensors' names, as torch's reader expects.
            assert item.index.fqn not in slices, f"{item.index.fqn}: more than one slice in one process"
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            slices[item.index.fqn] = part
            begins[item.index.fqn] = list(item.tensor_data.chunk.offsets)
        results = []
        if slices:
            checksum = write_tensors(self.folder / plan.storage_data, slices, shard_header(begins))
            sizes = {name: part.numel() * part.element_size() for name, part in slices.items()}
            written = (plan.storage_data, checksum)
            results = [WriteResult(item.index, sizes[item.index.fqn], written) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect the checksums; readers need nothing but the headers of the files."""
        self.checksums = dict(written.storage_data for part in results for written in part)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: folders are given to the constructor."""
        return False
