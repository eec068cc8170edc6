"""Fixtures of the command line's tests: a way to call it, and a trained run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import tiny_experiment
from ziggurat.cli import main
from ziggurat.config import dump


class Result(NamedTuple):
    """What a call of the command line gave."""

    status: int
    out: str
    err: str


@pytest.fixture
def ziggurat(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        captured = capfd.readouterr()
        return Result(int(stop.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few updates, made through the command line."""
    folder = tmp_path_factory.mktemp("cli")
    config = folder / "tiny.yaml"
    training = {"stop": {"updates": 4}, "validation": {"decode": False}, "checkpoint": {"every_updates": 2}}
    config.write_text(dump(tiny_experiment(tiny_folder, **training)))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(config), "--run", str(folder / "run")])
    assert stop.value.code == 0
    return folder / "run"
