"""Moments in shards: each process writes its part as safetensors, and any number of processes can read them.

A shard has the headers of torch.distributed.checkpoint: `DCP_SHARDING_INFO` says where in its tensor each slice begins.
A process that is alone needs no more than that of it; several agree through ziggurat.train.slices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ziggurat.model.tensors import read_tensors, write_tensors


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Write `tensors` into `folder`, `shard-00000.safetensors` by the first process and so on; return checksums.

    All processes of `group` (default: every one) call this together, each with its own view of the same tensors: of a
    DTensor each writes its slice, of an ordinary tensor one process writes the whole. The tensors are on the CPU.

    Returns, in the first process of the group, the fingerprint of every process's file by its name; elsewhere {}.
    Raises OSError, in every process, when one of them cannot write.
    """
    if dist.is_available() and dist.is_initialized():
        from ziggurat.train.slices import write_slices

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
    from ziggurat.train.slices import read_slices

    return read_slices(folder)


def shard_name(rank: int) -> str:
    """Return the name of a process's file."""
    return f"shard-{rank:05d}.safetensors"


def shard_header(begins: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the header of a shard whose slice of each tensor begins at these places, one for each dimension."""
    offsets = {name: {"saved_offsets": list(begin)} for name, begin in begins.items()}
    return {"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True), "DCP_VERSION": "1.0"}
