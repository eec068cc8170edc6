"""The pretend accelerator, present only for the tests in this folder, and the models that they translate with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ziggurat
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from tools.pretend_device import NAME, present
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.train.loop import train
from ziggurat.translate.translator import Translator

DEVICES = ("cpu", NAME)
LINES = ["Vi vados.", "", "Madona dogun nobelim."]


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with present():
        yield


def experiment_of(folder: Path, model: dict[str, Any] | None = None, **training: Any) -> Experiment:
    """The tiny experiment with changes, without dropout, whose random numbers depend on the device."""
    quiet = {"dropout": {"residual": 0.0, "embedding": 0.0, "attention": 0.0, "activation": 0.0}}
    tiny = tiny_experiment(folder, **{"stop": {"updates": 4}, "device": "cpu", **training})
    return tiny.model_copy(update={"model": change_section(tiny.model, {**quiet, **(model or {})}, "model")})


@pytest.fixture(scope="session")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models, trained on the CPU."""
    folder = tmp_path_factory.mktemp("pretend")
    for seed in (1, 2):
        train(folder / str(seed), experiment_of(tiny_folder, seed=seed), console=QUIET)
    return folder / "1", folder / "2"


@cache
def opened(device: str, *runs: Path, **options: Any) -> Translator:
    """Return a translator of these runs that many tests share."""
    return ziggurat.load(list(runs), device=device, **options)
