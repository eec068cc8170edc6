"""Records and log of a run whose disk is full."""

from __future__ import annotations

import errno
import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.train.runs import records
from ziggurat.config.model import ModelConfig
from ziggurat.model.run_folder import locked
from ziggurat.train.run_log import MetricsWriter, RunLog


def test_a_full_disk_is_reported_once_and_training_continues(tmp_path: Path) -> None:
    """/dev/full accepts nothing, like a full disk; what was written before stays."""
    said = io.StringIO()
    log = RunLog(tmp_path, Console(file=said, width=500))
    metrics = MetricsWriter(tmp_path, log, update=0)
    metrics.write("train", 1, {"loss": 2.0})
    log.say("before")
    for writer in (log, metrics):
        writer._file.close()
        writer._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - the writer closes it
    for update in (2, 3):
        metrics.write("train", update, {"loss": 2.0})
        log.say(f"line {update}")
    metrics.close()
    log.close()
    assert said.getvalue().count("No space left on device") == 2  # once for each file
    assert "line 3" in said.getvalue()
    assert [r["update"] for r in records(tmp_path)] == [1]
    assert (tmp_path / "log.txt").read_text().endswith("before\n")


@pytest.mark.parametrize("instead", ["nothing", "a file", "a moved file", "a folder", "no folder", "another run"])
def test_output_to_a_removed_file_is_not_lost_silently(instead: str, tmp_path: Path) -> None:
    said, run = io.StringIO(), tmp_path / "run"
    run.mkdir()
    with locked(run):
        log = RunLog(run, Console(file=said, width=500))
        metrics = MetricsWriter(run, log, update=0)
        metrics.write("train", 1, {"loss": 2.0})
        for name in ("metrics.jsonl", "log.txt"):
            if instead == "a moved file":  # nothing is lost, because output goes there
                (run / name).rename(run / f"{name}.1")
                continue
            (run / name).unlink()
            if instead == "a folder":
                (run / name).mkdir()
            elif instead == "a file":
                (run / name).write_text("")
        if instead in ("no folder", "another run"):
            shutil.rmtree(run)
        if instead == "another run":
            run.mkdir()
            (run / ".lock").touch()
            (run / "metrics.jsonl").touch()
        for update in (2, 3):
            metrics.write("train", update, {"loss": 2.0})
            log.say(f"line {update}")
        metrics.close()
        log.close()
    if instead in ("nothing", "a file"):
        assert [r["update"] for r in records(run)] == [2, 3]
        logged = (run / "log.txt").read_text()
        assert [line[21:] for line in logged.splitlines() if "line" in line] == ["line 2", "line 3"]
        assert said.getvalue().count("was removed or replaced") == 1
        assert logged.count("was removed or replaced") == 2  # one for each file
    elif instead == "a folder":
        assert said.getvalue().count("Is a directory") == 2
    elif instead == "another run":
        assert (run / "metrics.jsonl").read_text() == ""  # the other run's files have none of our records
        assert not (run / "log.txt").exists()
    elif instead == "a moved file":
        assert not (run / "log.txt").exists()


def test_non_finite_values_are_left_out_of_a_record(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Console(file=io.StringIO()))
    metrics = MetricsWriter(tmp_path, log, update=0)
    metrics.write("validation", 1, {"nll": math.nan, "perplexity": math.inf, "bleu": 0.5, "chrf": None}, partial=True)
    metrics.close()
    log.close()
    (record,) = records(tmp_path)
    del record["time"]
    assert record == {"kind": "validation", "update": 1, "bleu": 0.5, "partial": True}


def test_records_that_cannot_be_removed_are_reported_and_none_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run continues; once there is room, the next start removes the records."""
    said = io.StringIO()
    log = RunLog(tmp_path, Console(file=said, width=500))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "update": 7}\n')
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr("ziggurat.train.records.write_atomically", lambda *_: (_ for _ in ()).throw(full))
        metrics = MetricsWriter(tmp_path, log, update=5)
    metrics.write("train", 6, {"loss": 2.0})
    metrics.close()
    assert said.getvalue() == f"{tmp_path}/metrics.jsonl cannot be written: No space left on device\n"
    assert [r["update"] for r in records(tmp_path)] == [7]
    MetricsWriter(tmp_path, log, update=5).close()
    log.close()
    assert records(tmp_path) == []


def test_records_after_the_resumed_update_are_removed(tmp_path: Path) -> None:
    log = RunLog(tmp_path, Console(file=io.StringIO()))
    first = MetricsWriter(tmp_path, log, update=0)
    for update in (5, 10, 15):
        first.write("train", update, {})
        first.write("validation", update, {})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    MetricsWriter(tmp_path, log, update=10, validated=False).close()
    log.close()
    assert [(r["kind"], r["update"]) for r in records(tmp_path)] == [("train", 5), ("validation", 5), ("train", 10)]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "pre"),
        ({"residual": "post", "init": {"kind": "depth_scaled"}, "decoder": {"attention": "merged"}},
         "post + merged + depth_scaled"),
        ({"encoder": {"history": "dlcl"}, "decoder": {"history": "dlcl"}}, "pre + dlcl"),
        ({"residual": "admin", "init": {"kind": "admin"}}, "admin"),
        ({"memory": "transparent"}, "pre + transparent"),
        ({"encoder": {"residual": "post"}}, "post + pre"),
        ({"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}, "rnmt"),
    ],
)  # fmt: skip
def test_headlines_name_the_methods(model: dict[str, Any], said: str) -> None:
    assert " + ".join(ModelConfig.model_validate(model).methods()) == said
