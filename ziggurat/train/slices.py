"""Shards of a checkpoint that several processes write and read together, through torch.distributed.checkpoint.

That package plans which process writes which slice, agrees on errors and reads the slices back. Its writers are not
used: FileSystemWriter leaves a pickled `.metadata` (filesystem.py, `finish`), and HuggingFaceStorageWriter assembles a
process's whole shard in memory before it writes it (filesystem.py, `stream.write(save(tensor_dict, ...))`) and syncs no
checksum with it. The files here have the headers that HuggingFaceStorageReader reads.

The module takes most of a second to import, so ziggurat.train.checkpoint imports it only when needed.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

from ziggurat.model.tensors import write_tensors
from ziggurat.system.errors import CheckpointError, refuse_passing
from ziggurat.train.distributed import shard_header, shard_name

# torch warns on every save and load in a single process, which is intended here.
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
        # `load` fills tensors in place: empty ones with the sizes in the headers request all of them, whole.
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in found.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(tensors, storage_reader=reader, planner=planner, no_dist=True)  # each process separately
    except CheckpointException as error:
        refuse_passing(folder, _cause(error))
        raise CheckpointError(f"{folder}: damaged ({_cause(error)})") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        refuse_passing(folder, error)
        raise CheckpointError(f"{folder}: damaged or missing ({error})") from None
    return tensors


def _cause(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0]


class _ShardWriter(StorageWriter):
    """Writes one safetensors file per process.

    Attributes:
        checksums: fingerprint of each file by name; filled in the first process when all have written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because every process does the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each process its file name, by rank."""
        names = map(shard_name, range(len(plans)))
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's slices, if it has any."""
        slices: dict[str, Tensor] = {}
        begins: dict[str, list[int]] = {}
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
            # One slice per process, because torch's reader expects tensor names as the file's keys.
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
        """Collect the checksums; readers need only the headers of the files."""
        self.checksums = dict(written.storage_data for part in results for written in part)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: folders are given to the constructor."""
        return False
