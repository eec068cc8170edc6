"""One waiting process and one set of starting points for all tests of a worker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.ground import Ground
from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, if the system has one, because thousands of folders are created and removed."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path_factory.getbasetemp()))
    yield folder.resolve()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def ground(place: Path) -> Iterator[Ground]:
    with Nursery(place / "scratch") as nursery:
        yield Ground(place / "ground", nursery)
