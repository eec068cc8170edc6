"""Training runs: the files that they leave, and the configurations for which resuming must be exact."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tests.conftest import tiny_experiment
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.files import fingerprint
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.diagnosis.health import WARNINGS_FILE
from ziggurat.train.loop import train
from ziggurat.train.records import DEPTH_FILE
from ziggurat.train.run_log import CLOCK_FIELDS

QUIET = Console(file=io.StringIO())
"""QUIET swallows a run's output."""


def records(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, only of one kind if it is given."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in found if kind in (None, record["kind"])]


def final_bytes(run: Path, updates: int) -> dict[str, bytes]:
    """Return the tensor files of the newest checkpoint, at `updates`, as they are on disk: file -> content."""
    last = checkpoint_folders(run)[-1]
    assert last.name == f"step-{updates:08d}"
    return {str(p.relative_to(last)): p.read_bytes() for p in sorted(last.rglob("*.safetensors"))}


_TIMES = ("seconds", "data_wait", "checkpoint_wait")


def timeless_progress(folder: Path) -> dict[str, Any]:
    """Return the progress of a checkpoint without clock-dependent values."""
    found = {**asdict(read_progress(folder)), "seconds": 0}
    return {**found, "window": {key: value for key, value in found["window"].items() if key not in _TIMES}}


def same_records(expected: Path, found: Path) -> None:
    """Assert that two runs have the same records in order, apart from clock-dependent values.

    It compares `metrics.jsonl`, and warnings and depth measures (which are equal only with
    `training.diagnostics.max_share: null`).
    """
    for name in ("metrics.jsonl", str(DEPTH_FILE), str(WARNINGS_FILE)):
        files = [run / name for run in (expected, found)]
        lines = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
        ours, theirs = ([json.loads(line) for line in read] for read in lines)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False), start=1):
            assert mine.keys() == other.keys(), f"{files[1]}, line {number}: {mine.keys() ^ other.keys()}"
            unlike = {key: (mine[key], other[key]) for key in mine.keys() - CLOCK_FIELDS if mine[key] != other[key]}
            assert not unlike, f"{files[1]}, line {number}, update {other['update']}: expected and found {unlike}"
        assert len(ours) == len(theirs), f"{files[1]}: {len(theirs)} records instead of {len(ours)}"
    assert (expected / "metrics.jsonl").stat().st_size > 0


def outcome(run: Path) -> dict[str, Any]:
    """Return everything that a run leaves and that does not depend on the clock: fingerprints of tensors (weights,
    moments) of every kept checkpoint, progress, links, averages, records.
    """
    kept = checkpoint_folders(run)
    tensors = [path for folder in (*kept, run / "averaged") for path in sorted(folder.rglob("*.safetensors"))]
    return {
        "tensors": {str(path.relative_to(run)): fingerprint(path) for path in tensors},
        "progress": {folder.name: timeless_progress(folder) for folder in kept},
        "links": {name: os.readlink(run / name) for name in ("best", "last") if (run / name).is_symlink()},
        "records": [{key: value for key, value in r.items() if key not in CLOCK_FIELDS} for r in records(run)],
    }


class Case(NamedTuple):
    """One configuration for which resuming must be exact."""

    precision: str = "fp32"
    growth: bool = False
    accumulate: int = 1
    compile: str = "none"

    def __str__(self) -> str:
        parts = [self.precision, *["growth"] * self.growth]
        parts += [f"accumulate-{self.accumulate}"] * (self.accumulate > 1) + ["compile"] * (self.compile != "none")
        return "-".join(parts)

    def experiment(self, folder: Path, updates: int) -> Experiment:
        """Return a run of `updates` updates on the store in `folder`; it grows before and after the middle."""
        deep = tiny_experiment(
            folder,
            {"encoder": {"layers": 3}},
            precision=self.precision,
            compile=self.compile,
            batch={"max_tokens": 150, "accumulate": self.accumulate},
            stop={"updates": updates},
            clip_norm=1.0,
            divergence={"loss_spike": 4.0, "window": 5},
            checkpoint={"every_updates": 4, "keep_last": 3},
            validation={"every_updates": 4, "decode": False},
            log_every_updates=4,
        )
        if not self.growth:
            return deep
        stages = [{"layers": 1, "updates": 5}, {"layers": 2, "updates": 11}]
        growth = {"growth": {"stages": stages, "moments": "copy", "keep_stages": False}}
        return change_section(deep, {"training": growth}, "")


def train_part(run: str, document: str, resume: str) -> None:
    """Train with the configuration in a JSON document, because tests.train.launch passes only texts."""
    train(Path(run), Experiment.model_validate_json(document), resume=resume == "resume", console=QUIET)


def assert_resumed_equals_whole(
    case: Case, corpus: Path, folder: Path, start: Callable[[str, str, str], object] = train_part
) -> None:
    """Assert that 8 updates, a restart and 8 more give the same as 16 at once, bit for bit.

    `start` trains like `train_part`, in any number of processes.
    """
    whole, parts = folder / "whole", folder / "parts"
    long = case.experiment(corpus, 16).model_dump_json()
    start(str(whole), long, "")
    start(str(parts), case.experiment(corpus, 8).model_dump_json(), "")
    assert [f.name for f in checkpoint_folders(parts)][-1] == "step-00000008"
    start(str(parts), long, "resume")
    expected, found = outcome(whole), outcome(parts)
    for what in expected:
        assert found[what] == expected[what], what
    assert len(expected["tensors"]) >= 6
    assert [r["update"] for r in expected["records"]] == [4, 4, 8, 8, 12, 12, 16, 16]
