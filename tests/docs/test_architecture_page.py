"""docs/architecture.md: the functions in its three lists are called in the listed order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import tiny_experiment
from tests.corpora.pipeline.conftest import place as place
from tests.corpora.pipeline.conftest import whole
from tests.train.runs import QUIET
from ziggurat.cli.app import app
from ziggurat.data.prepare import prepare
from ziggurat.train.loop import train

ROOT = Path(__file__).resolve().parents[2]


def steps(heading: str) -> list[str]:
    """Return the functions of one section's numbered list, as `file: name`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\d+\. `([\w/]+\.py: [\w.]+)`", section, flags=re.MULTILINE)
    assert 10 <= len(found) <= 15
    assert len(found) == len(re.findall(r"^\d+\. ", section, flags=re.MULTILINE))
    return found


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect the functions of the package that are called, in order, in every thread."""
    package, calls = str(ROOT / "ziggurat") + "/", []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(f"{frame.f_code.co_filename.removeprefix(package)}: {frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def assert_in_order(wanted: list[str], calls: list[str]) -> None:
    """Assert that `calls` contain `wanted` in this order, possibly with others between them."""
    following = iter(calls)
    for step in wanted:
        assert step in calls, f"{step} is never called"
        assert step in following, f"{step} is not called after the step before it"


@pytest.mark.slow
def test_batches_and_sentences_take_the_documented_path(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path, stop={"updates": 1}, validation={"decode": False})
    with watched() as calls:
        prepare(experiment.data, threads=1)
        train(tmp_path / "run", experiment, console=QUIET)
    assert_in_order(steps("From a file to an update"), calls)
    with watched() as calls:
        result = CliRunner().invoke(app, ["translate", str(tmp_path / "run")], input="a b\n")
    assert result.exit_code == 0, result.output
    assert_in_order(steps("From stdin to stdout"), calls)


@pytest.mark.slow
def test_a_distillation_step_takes_the_documented_path(place: Path) -> None:
    (place / "tiny").mkdir()
    experiment, run = tiny_experiment(place / "tiny", stop={"updates": 1}, validation={"decode": False}), place / "run"
    prepare(experiment.data, threads=1)
    train(run, experiment, console=QUIET)
    unwanted = ("backward", "backtranslation", "monolingual", "filter", "quantisation", "shortlist", "export")
    content = whole(**dict.fromkeys(unwanted), teacher={"existing": str(run)})
    (place / "my.yaml").write_text(yaml.safe_dump(content))
    with watched() as calls:  # a model of one update writes no pairs, so its corpus is not checked
        CliRunner().invoke(app, ["pipeline", "my.yaml", "--until", "distil"])
    wanted = steps("From a pipeline's file to a distilled sentence")
    assert_in_order(wanted, calls)
    assert len({name.partition(":")[0] for name in wanted}) + len(["system/processes.py"]) <= 15
