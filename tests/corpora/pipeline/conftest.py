"""A whole pipeline as small as possible, on files of the embedded language pair."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tests.small import merged
from ziggurat.config.load import parse_as
from ziggurat.config.pipeline import PipelineConfig
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.step import Step
from ziggurat.data.babel import generate, write_corpus

MakeContext = Callable[..., PipelineContext]
TRAINING: dict[str, Any] = {
    "seed": 1,
    "threads": 1,
    "batch": {"max_tokens": 400},
    "schedule": {"peak": 1e-2, "warmup_updates": 10},
    "validation": {"every_updates": 60, "max_sentences": 4},
    "checkpoint": {"every_updates": 30, "keep_last": 2, "asynchronous": False},
    "stop": {"updates": 60},
    "tensorboard": False,
    "diagnostics": {"every_updates": None},
}
MODEL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "heads": 2,
    "encoder": {"layers": 1},
    "decoder": {"layers": 1},
}


def trained(layers: int = 1, **training: Any) -> dict[str, Any]:
    """Return a model's section with that many encoder layers."""
    return {
        "subword": {"vocabulary_size": 150, "byte_fallback": False},
        "model": merged(MODEL, {"encoder": {"layers": layers}}),
        "training": merged(TRAINING, training),
        "decoding": {"max_length": {"ratio": 1.0, "extra": 20}, "unknown": True},
    }


def whole(**sections: Any) -> dict[str, Any]:
    """Return all sections except `fetch` and those that are None."""
    content: dict[str, Any] = {
        "folder": "w",
        "source_language": "qlo",
        "target_language": "qhi",
        "bitext": {
            "train": [{"source": "data/train.qlo", "target": "data/train.qhi"}],
            "dev": [{"source": "data/dev.qlo", "target": "data/dev.qhi"}],
        },
        "test": [{"name": "babel", "source": "data/test.qlo", "target": "data/test.qhi"}],
        "monolingual": {"source": [{"path": "data/text.qlo"}], "target": [{"path": "data/text.qhi"}]},
        "backward": trained(),
        "backtranslation": {"max_ratio": 1000.0, "shard_lines": 20, "device": "cpu", "workers": 1},
        "teacher": trained(2, growth={"stages": [{"layers": 1, "updates": 20}]}),
        "distillation": {"max_ratio": 1000.0, "shard_lines": 60, "n_best": 2, "device": "cpu", "workers": 1},
        "filter": {"device": "cpu", "workers": 1},
        "alignment": {"hmm_iterations": 1, "model1_iterations": 1},
        "student": trained(loss={"alignment": {}}),
        "quantisation": {"updates": 2},
        "shortlist": {},
        "export": {"ctranslate2": {"quantization": "int8", "lines": 8}},
        "evaluation": {"perturb": ["caps"], "perturb_lines": 4, "speed_lines": 4, "threads": 1, "device": "cpu"},
    }
    return {key: value for key, value in {**content, **sections}.items() if value is not None}


def parsed(content: dict[str, Any], *overrides: str) -> PipelineConfig:
    """Return the configuration with this content."""
    return parse_as(PipelineConfig, yaml.safe_dump(content), "my.yaml", overrides)


class SmallStep(Step):
    """A step with the given attributes and methods."""

    def work(self, folder: Path) -> int | None:
        """Do nothing."""


def small_step(name: str, work: Callable[[Path], int | None] = lambda folder: None, **given: Any) -> Step:
    """Make a step that does `work`; everything not given is as in `Step`."""
    return changed(SmallStep(), **{"name": name, "title": "", "settings": {}, "work": work, **given})


def changed(step: Step, **changes: Any) -> Step:
    """Return a copy of the step with these attributes or methods replaced."""
    found = copy(step)
    vars(found).update(changes)
    return found


def write_data(folder: Path) -> None:
    """Write the corpora of `whole`."""
    write_corpus(folder / "data", train=120, dev=10, test=8)
    for side, language in enumerate(("qlo", "qhi")):
        lines = [pair[side] + "\n" for pair in generate(30, seed=7 + side)]
        (folder / "data" / f"text.{language}").write_text("".join(lines), encoding="utf-8")


@contextlib.contextmanager
def here(workers: int, way_out: str) -> Iterator[Callable[..., Future[Any]]]:
    """A stand-in for the process pool that does the work at once, in this process."""

    def submit(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future

    yield submit


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the corpora of `whole`, in which the test runs; one process does everything, without waiting for
    the disk.
    """
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launchers, "worker_pool", here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path


@pytest.fixture
def said() -> list[str]:
    """The messages of a pipeline."""
    return []


@pytest.fixture
def context(said: list[str]) -> MakeContext:
    """Make the context for a configuration with this content."""

    def make(content: dict[str, Any], *overrides: str) -> PipelineContext:
        return PipelineContext(parsed(content, *overrides), said.append, Console(file=io.StringIO()))

    return make
