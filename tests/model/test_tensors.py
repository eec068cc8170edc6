from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from ziggurat.exchange import import_huggingface
from ziggurat.model.tensors import read_shapes, read_tensors, system_errors, write_tensors
from ziggurat.system.errors import ConfigError, MachineError
from ziggurat.system.files import fingerprint
from ziggurat.system.staging import building

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8)


def test_the_bytes_equal_those_of_the_library(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in (("b", (3, 5)), ("ä", ()), ("a", (7,)))}
    tensors["z"] = torch.arange(6).reshape(2, 3)  # wider elements come first
    checksum = write_tensors(tmp_path / "x", tensors, {"more": "1"})
    written = (tmp_path / "x").read_bytes()
    library = save(tensors, metadata={"format": "1", "more": "1"})
    header = 8 + int.from_bytes(written[:8], "little")
    assert written[header:] == library[8 + int.from_bytes(library[:8], "little") :]
    assert len(written) == len(library)  # the library writes its header's entries in any order
    assert checksum == fingerprint(tmp_path / "x")


def test_a_folder_whose_name_is_not_utf8_is_refused_before_it_is_filled(tmp_path: Path) -> None:
    """Such a folder must not count as damaged: a run would set aside all its checkpoints, although they are intact."""
    folder = tmp_path / "\udcff"  # the byte FF
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system does not accept such names")
    with pytest.raises(ConfigError, match="is not UTF-8; rename it"), building(folder / "run"):
        pass
    assert not list(folder.iterdir())
    write_tensors(folder / "x", {"a": torch.arange(3)})
    with pytest.raises(ConfigError, match="is not UTF-8; rename it"):
        read_tensors(folder / "x")


@pytest.mark.parametrize("dtype", [*TYPES, torch.uint8, torch.bool])
def test_every_type_and_shape_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    tensors = {"scalar": wide[1, 1], "turned": wide.T, "strided": wide[::2, 1::2], "none": wide[:0], "wide": wide}
    write_tensors(tmp_path / "x", tensors)
    for read in (read_tensors(tmp_path / "x"), load((tmp_path / "x").read_bytes())):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == dtype
            assert read[name].shape == tensor.shape
            assert torch.equal(read[name], tensor)


def test_tensors_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.model.tensors._BLOCK_BYTES", 10)
    tensors = {"a": torch.arange(101.0), "b": torch.arange(5.0)}
    assert write_tensors(tmp_path / "x", tensors) == fingerprint(tmp_path / "x")
    assert all(torch.equal(read, tensors[name]) for name, read in read_tensors(tmp_path / "x").items())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.zeros(3)})
    before = (tmp_path / "x").read_bytes()

    class Full(torch.Tensor):
        def contiguous(self, **_: object) -> torch.Tensor:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x", {"a": torch.ones(3).as_subclass(Full)})
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == before


@pytest.mark.parametrize("read", [read_tensors, read_shapes, import_huggingface._safetensors])
def test_too_many_open_files_are_reported_for_every_opener(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """The library opens the file, then PyTorch opens it again, with its own error message."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(3)})
    read(path)  # files that were opened for imports are closed again
    before, seen = resource.getrlimit(resource.RLIMIT_NOFILE), set()
    for spare in range(5):
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(max(taken) + spare + 2) if number not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, ((free[spare - 1] + 1) if spare else free[0], before[1]))
        try:
            seen.add(len(read(path)))
        except MachineError as error:
            seen.add("Too many open files; raise the limit" in str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == {True}


@pytest.mark.parametrize(
    "message", ["unable to mmap 12 bytes from file <x>: Input/output error (5)", "out of memory (12)"]
)
def test_other_errors_are_unchanged(message: str) -> None:
    with pytest.raises(OSError if message.startswith("unable") else RuntimeError), system_errors():
        raise RuntimeError(message)
