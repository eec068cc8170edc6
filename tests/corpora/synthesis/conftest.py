"""Fixtures: a reverse model that ends some of its translations, and text with some lines that cannot become pairs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import tiny_experiment
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.jobs import tasks as models
from ziggurat.corpora.jobs.job import JobOutcome, Work
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob, Report, back_translate
from ziggurat.corpora.synthesis.lines import PairFilter
from ziggurat.data.babel import generate
from ziggurat.data.subword import load_tokenizers
from ziggurat.system import files
from ziggurat.train.loop import train
from ziggurat.translate.results import Hypothesis, Translation

MakeJob = Callable[..., BackTranslationJob]


@pytest.fixture(scope="session")
def reverse(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 updates, from qlo to qhi; about half of its translations end before the length limit."""
    experiment = tiny_experiment(
        tiny_folder,
        stop={"updates": 60},
        validation={"decode": False, "every_updates": 1000},
        checkpoint={"every_updates": 30},
        schedule={"peak": 1e-2, "warmup_updates": 10},
        threads=1,
    )
    folder = tmp_path_factory.mktemp("reverse") / "run"
    train(folder, experiment, console=Console(file=io.StringIO()))
    return folder


@pytest.fixture(scope="session")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """42 lines, four of which are not UTF-8, blank, very long, or hold NUL."""
    lines = [pair[0].encode() for pair in generate(38, seed=9)]
    lines[3:3] = [b"\xff\xfe broken", b" \t ", b"long " * 1000, b"nul \0 here"]
    path = tmp_path_factory.mktemp("mono") / "mono.qlo"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.fixture
def make_job(reverse: Path, mono: Path, tmp_path: Path) -> MakeJob:
    """Make a job on them with a filter that accepts pairs of unlike length."""

    def make(out: str = "out", **changes: Any) -> BackTranslationJob:
        settings: dict[str, Any] = {
            "models": (str(reverse),),
            "inputs": (str(mono),),
            "method": "noised-beam",
            "device": "cpu",
            "shard_lines": 11,
            "filters": PairFilter(max_ratio=50.0),
            "decoding": {"beam_size": 4},
        }
        return BackTranslationJob(out=tmp_path / out, **{**settings, **changes})

    return make


@contextlib.contextmanager
def here(workers: int, way_out: str) -> Iterator[Callable[..., Future[Any]]]:
    """A stand-in for the process pool that does the work at once, in this process."""

    def submit(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future

    yield submit


BackTranslate = Callable[..., JobOutcome[Report]]


def back_translated(job: BackTranslationJob, *, workers: int = 1, **work: Any) -> JobOutcome[Report]:
    """Run the job with these keywords for Work, in local processes."""
    return back_translate(job, Work(partial(launchers.processes, workers), **work))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> BackTranslate:
    """Run `back_translated` without other processes, and without waiting for the disk."""
    monkeypatch.setattr(launchers, "worker_pool", here)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: None)
    return back_translated


class StandIn:
    """A stand-in for a translator: it reverses the words of a line, and leaves every fifth line unfinished."""

    def __init__(self, model: Path) -> None:
        self.source_tokenizer, self.target_tokenizer = load_tokenizers(model)

    def translate_stream(self, lines: list[str], *, window: int, first: int, **settings: Any) -> Iterator[Translation]:
        assert window == len(lines)
        for number, line in enumerate(lines, start=first):
            text = " ".join(line.split()[::-1]) + "."
            yield Translation(line, [Hypothesis(text, 0.0, 0.0, [], [], finished=number % 5 != 0)], 1)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch, reverse: Path) -> Iterator[None]:
    """Translate with a StandIn, for tests of everything except the translation itself."""
    models.opened.cache_clear()
    monkeypatch.setattr(models, "load_translator", lambda models, **options: StandIn(reverse))
    yield
    models.opened.cache_clear()


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
