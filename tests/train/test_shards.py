from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.conftest import forkserver
from ziggurat.system.errors import CheckpointError
from ziggurat.system.files import fingerprint
from ziggurat.train.checkpoint import read_shards, write_shards
from ziggurat.train.saving import Buffers
from ziggurat.train.slices import read_slices, write_slices


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "encoder.w/exp_avg": torch.randn(5, 4, generator=generator),
        "encoder.w/exp_avg_sq": torch.randn(5, 4, generator=generator).bfloat16(),
        "encoder.w/step": torch.tensor(7.0),
        "bias/exp_avg": torch.randn(3, generator=generator),
        "bias/step": torch.tensor(7),
    }


def assert_equal(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)


def test_one_process_reads_back_what_it_wrote_without_pickles(tmp_path: Path) -> None:
    checksums = write_shards(tmp_path, state())
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    assert checksums == {p.name: fingerprint(p) for p in tmp_path.iterdir()}
    assert_equal(read_shards(tmp_path), state())


def test_a_single_process_writes_what_torch_would_write(tmp_path: Path) -> None:
    """Torch reads it, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        planned = write_slices(tmp_path / "planned", state(), None)
    finally:
        dist.destroy_process_group()
    assert write_shards(tmp_path / "alone", state()) == planned
    assert_equal(read_slices(tmp_path / "alone"), state())


def test_a_state_without_tensors(tmp_path: Path) -> None:
    assert write_shards(tmp_path / "none", {}) == {}
    assert read_shards(tmp_path / "none") == {}


def test_damage_is_an_error_of_the_package(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        read_shards(tmp_path / "nothing")
    write_shards(tmp_path, state())
    file = tmp_path / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        read_shards(tmp_path)


def _one_of_two(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements = {"encoder.w/exp_avg": Shard(0), "encoder.w/exp_avg_sq": Shard(1), "bias/exp_avg": Replicate()}
    tensors: dict[str, torch.Tensor] = {
        name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor
        for name, tensor in state().items()
    }
    checksums = write_shards(folder / "two", Buffers().copy(tensors))
    (folder / f"checksums-{rank}.json").write_text(json.dumps(checksums))
    dist.barrier()
    assert_equal(read_shards(folder / "two"), state())
    if rank == 1:  # only the folder of this process cannot be created
        (folder / "file").write_text("")
    dist.barrier()
    target = folder / "file" if rank == 1 else folder / "three"
    with pytest.raises(OSError, match="file"):
        write_shards(target, tensors)
    dist.destroy_process_group()


def test_two_processes_write_one_reads(tmp_path: Path) -> None:
    """Uneven slices, slices of the second dimension, copies; an error of one process reaches the other."""
    forkserver()  # it has imported everything that the two processes need
    mp.start_processes(_one_of_two, (tmp_path,), 2, start_method="forkserver")
    files = sorted((tmp_path / "two").iterdir())
    assert [p.name for p in files] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert json.loads((tmp_path / "checksums-0.json").read_text()) == {p.name: fingerprint(p) for p in files}
    assert json.loads((tmp_path / "checksums-1.json").read_text()) == {}
    assert_equal(read_shards(tmp_path / "two"), state())
    # The layout, read without torch.distributed.
    rows, columns = [], []
    for file in files:
        with safe_open(file, framework="pt") as shard:
            begins = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
            rows.append((begins["encoder.w/exp_avg"]["saved_offsets"], shard.get_tensor("encoder.w/exp_avg")))
            columns.append((begins["encoder.w/exp_avg_sq"]["saved_offsets"], shard.get_tensor("encoder.w/exp_avg_sq")))
    assert [begin for begin, _ in rows] == [[0, 0], [3, 0]]
    assert torch.equal(torch.cat([part for _, part in rows]), state()["encoder.w/exp_avg"])
    assert [begin for begin, _ in columns] == [[0, 0], [0, 2]]
    assert torch.equal(torch.cat([part for _, part in columns], 1), state()["encoder.w/exp_avg_sq"])
