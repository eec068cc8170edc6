"""The pretend accelerator, present only for the tests in this folder, and the models with which they translate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ziggurat
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from tools.pretend_device import NAME, Counts, present
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
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, trained on the CPU."""
    folder = tmp_path_factory.mktemp("pretend") / "1"
    train(folder, experiment_of(tiny_folder), console=QUIET)
    return folder


@pytest.fixture(scope="session")
def runs(run: Path, tiny_folder: Path) -> tuple[Path, Path]:
    """Two models."""
    train(run.with_name("2"), experiment_of(tiny_folder, seed=2), console=QUIET)
    return run, run.with_name("2")


def waits_of(counts: Counts) -> tuple[int, int]:
    """Return how often a search waited for the results of a step, and how often for anything else except copies."""
    steps = sum(n for place, n in counts.waits.items() if "hypotheses.py" in place)
    return steps, (counts.waits - counts.to_device).total() - steps


@cache
def opened(device: str, *runs: Path, **options: Any) -> Translator:
    """Return a translator of these runs that many tests share."""
    return ziggurat.load(list(runs), device=device, **options)
