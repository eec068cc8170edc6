"""Fixtures for tests of the command line: a function that calls it, and a trained run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import tiny_experiment
from ziggurat.cli import main
from ziggurat.config import dump


class Result(NamedTuple):
    """The result of one call to the command line."""

    status: int
    out: str
    err: str


Ziggurat = Callable[..., Result]


def tiny_config(folder: Path, corpus: Path, **training: Any) -> Path:
    """Write the tiny experiment with the corpus in `corpus` to a file in `folder`; return the file."""
    config = folder / "tiny.yaml"
    config.write_text(dump(tiny_experiment(corpus, **training)))
    return config


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of two sentences."""
    path = tmp_path / "test.qlo"
    path.write_text("Su divusim ne gokun.\nMadona dogun.\n", encoding="utf-8")
    return path


@pytest.fixture
def ziggurat(capfd: pytest.CaptureFixture[str]) -> Ziggurat:
    """Call the command line with these arguments."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        captured = capfd.readouterr()
        return Result(int(stop.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few updates, trained through the command line."""
    folder = tmp_path_factory.mktemp("cli")
    training = {"stop": {"updates": 4}, "validation": {"decode": False}, "checkpoint": {"every_updates": 2}}
    config = tiny_config(folder, tiny_folder, **training)
    with pytest.raises(SystemExit) as stop:
        main(["train", str(config), "--run", str(folder / "run")])
    assert stop.value.code == 0
    return folder / "run"
