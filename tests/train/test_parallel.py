"""Two and three processes over gloo train like one, with DDP and FSDP2, however the work is divided."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.launch import run_together
from tests.train.runs import QUIET, final_bytes, records
from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.config.load import change_section
from ziggurat.data.prepare import prepare
from ziggurat.system.errors import ZigguratError
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.loop import train

HERE = "tests.train.test_parallel"
UPDATES = 6


def train_in_process(run: str, config: str, resume: str = "") -> None:
    """Run in every process: train with `config`."""
    console = Console(file=io.StringIO())
    try:
        train(Path(run), load_experiment(Path(config)), resume=bool(resume), console=console)
    except ZigguratError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(3)


def together(run: Path, experiment: Experiment, count: int, resume: bool = False) -> Path:
    """Train in `count` processes; returns the folder."""
    config = run.parent / f"{run.name}.yaml"
    config.write_text(dump(experiment), encoding="utf-8")
    run_together(HERE, "train_in_process", count, str(run), str(config), "resume" if resume else "")
    return run


def tiny(folder: Path, model: dict[str, Any] | None = None, **training: Any) -> Experiment:
    """Updates have three batches; dropout stays on, since its masks belong to batches, not to processes.

    The gradient of a key bias is only rounding errors, which Adam would amplify with a smaller epsilon.
    """
    defaults: dict[str, Any] = {
        "optimiser": {"epsilon": 1e-3},
        "batch": {"max_tokens": 200, "accumulate": 3},
        "validation": {"every_updates": 3},
        "checkpoint": {"every_updates": 3, "keep_last": 3},
        "stop": {"updates": UPDATES},
        "log_every_updates": 1,
    }
    return tiny_experiment(folder, model, **{**defaults, **training})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare(tiny(folder).data)
    return folder


@pytest.fixture(scope="module")
def alone(data: Path) -> Path:
    """A run of one process."""
    train(data / "alone", tiny(data), console=QUIET)
    return data / "alone"


def assert_alike(run: Path, alone: Path, tolerance: float = 2e-5) -> None:
    """Weights, moments, counters and records equal those of one process, up to rounding."""
    for folder in sorted((alone / "checkpoints").iterdir()):
        mine, theirs = load_checkpoint(run / "checkpoints" / folder.name), load_checkpoint(folder)
        for kind in ("weights", "optimiser"):
            ours, others = getattr(mine, kind), getattr(theirs, kind)
            assert ours.keys() == others.keys()
            for name, tensor in others.items():
                torch.testing.assert_close(ours[name], tensor, atol=tolerance, rtol=tolerance, msg=name)
        progress, expected = mine.progress, theirs.progress
        assert (progress.update, progress.epoch, progress.batch) == (expected.update, expected.epoch, expected.batch)
        assert (progress.target_tokens, progress.best_update) == (expected.target_tokens, expected.best_update)
    ours, others = records(run), records(alone)
    assert [r["update"] for r in ours] == [r["update"] for r in others]
    for one, other in zip(ours, others, strict=True):
        assert one.keys() == other.keys()
        for key in ("loss", "nll", "grad_norm", "perplexity", "bleu", "chrf", "learning_rate", "sentences_per_update"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=2e-4), key
        for key in ("unfinished", "target_tokens", "kind", "skipped"):
            assert one.get(key) == other.get(key)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("ddp", 3), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("ddp", 2), ("fsdp", 2), ("fsdp", 3)))],
)
def test_processes_train_like_one_with_as_many_batches(
    kind: str, count: int, data: Path, alone: Path, tmp_path: Path
) -> None:
    """With three batches per update, two processes have unequal shares; at the end of an epoch one may have none."""
    run = together(tmp_path / "run", tiny(data, distributed={"kind": kind}), count)
    assert_alike(run, alone)
    shards = list((run / "last" / "state" / "optimiser").iterdir())
    assert len(shards) == count
    assert (run / "best").resolve().name == (alone / "best").resolve().name
    logs = [(folder / "log.txt").read_text().splitlines() for folder in (run, alone)]
    one, other = ([line for line in log if "the machine is busy" not in line] for log in logs)  # of one process
    assert len(one) == len(other)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("ddp", 3), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_stopped_and_resumed_processes_end_alike_bit_for_bit(kind: str, count: int, data: Path, tmp_path: Path) -> None:
    """Sums of three depend on their order, so DDP's buckets must be laid out as before. (For two:
    test_parallel_faults.)
    """
    whole, parts = tiny(data, distributed={"kind": kind}), tiny(data, distributed={"kind": kind}, stop={"updates": 3})
    together(tmp_path / "whole", whole, count)
    together(tmp_path / "parts", parts, count)
    together(tmp_path / "parts", whole, count, resume=True)
    assert final_bytes(tmp_path / "parts", UPDATES) == final_bytes(tmp_path / "whole", UPDATES)


TIED: dict[str, Any] = {
    "residual": "branch_norm",
    "wiring": {"branch_updates": 4},
    "encoder": {"layers": 4, "tied_layers": [1, 2], "solver": "rk2_gated"},
    "decoder": {"layers": 4, "tied_layers": [1, 1, 2, 2], "history": "cross_module"},
    "memory": "hierarchical",
    "combination": {"period": 2},
}
TWICE: dict[str, Any] = {
    "optimiser": {"epsilon": 1e-3, "weight_smoothing": 0.1},
    "loss": {"r_drop": 5.0},
    "schedule": {"kind": "wsd", "peak": 3e-3, "warmup_updates": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_means_of_weights_and_layers_used_twice_are_those_of_one_process(kind: str, data: Path, tmp_path: Path) -> None:
    """The run has running means of weights, R-Drop and tied layers; it resumes in two processes and one."""
    whole = tiny(data, TIED, **TWICE, distributed={"kind": kind})
    train(tmp_path / "alone", tiny(data, TIED, **TWICE), console=QUIET)
    run = together(tmp_path / "run", whole, 2)
    assert_alike(run, tmp_path / "alone")
    parts = tiny(data, TIED, **TWICE, distributed={"kind": kind}, stop={"updates": 3})
    parts = change_section(parts, {"training": {"schedule": {"decay_updates": 6}}}, "")
    half = together(tmp_path / "half", parts, 2)
    shutil.copytree(half, tmp_path / "moved", symlinks=True)
    together(half, whole, 2, resume=True)
    assert final_bytes(half, UPDATES) == final_bytes(run, UPDATES)
    train(tmp_path / "moved", tiny(data, TIED, **TWICE), resume=True, console=QUIET)
    assert_alike(tmp_path / "moved", tmp_path / "alone")


CHANGES = [("ddp", 1, 3), ("ddp", 2, 1), ("ddp", 3, 2), ("fsdp", 1, 3), ("fsdp", 2, 1), ("fsdp", 3, 2)]
QUICK = [("fsdp", 2, 1)]
UNNAMED = pytest.mark.cpu("groups of the pretend accelerator have no names, which FSDP's mesh asks for")


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [pytest.param(*c, marks=[*[pytest.mark.slow] * (c not in QUICK), *[UNNAMED] * (c[0] == "fsdp")]) for c in CHANGES],
)
def test_a_run_continues_with_another_number_of_processes(
    kind: str, first: int, second: int, data: Path, alone: Path, tmp_path: Path
) -> None:
    whole, part = tiny(data, distributed={"kind": kind}), tiny(data, distributed={"kind": kind}, stop={"updates": 3})
    together(tmp_path / "run", part, first)
    together(tmp_path / "run", whole, second, resume=True)
    assert_alike(tmp_path / "run", alone)
