from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.inspect.runs import train_record, validation_record, write_run
from ziggurat.inspect.report.runs import MAX_RUNS, read_run, read_runs
from ziggurat.system.errors import CheckpointError, ConfigError, DataError


def test_records_are_sorted_by_kind_and_update_and_the_last_one_counts(tmp_path: Path) -> None:
    metrics = [train_record(10), train_record(20, loss=1.0), validation_record(20), train_record(20, loss=2.0)]
    metrics += [train_record(15), {"kind": "something new", "update": 3}]
    run = read_run(write_run(tmp_path / "a", metrics))
    assert [record["update"] for record in run.train] == [10, 15, 20]
    assert run.train[-1]["loss"] == 2.0
    assert [record["update"] for record in run.validations] == [20]
    assert (run.name, run.colour, run.depth) == ("a", 0, [])
    assert run.experiment.model.d_model == 16


def test_a_run_that_failed_before_its_first_record_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    (folder / "log.txt").unlink()
    run = read_run(folder)
    assert run.train == run.validations == []
    assert not run.ending.finished
    assert "killed" in run.ending.text


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [train_record(1, loss=math.nan), train_record(2, loss=math.inf)]))
    assert math.isnan(run.train[0]["loss"])
    assert run.train[1]["loss"] == math.inf


@pytest.mark.slow
def test_only_the_last_line_may_be_cut_off(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [train_record(1), train_record(2)])
    whole = (folder / "metrics.jsonl").read_bytes()
    second = whole.index(b"\n") + 1
    for cut in (*range(second, len(whole) - 3, 9), *range(len(whole) - 3, len(whole))):
        (folder / "metrics.jsonl").write_bytes(whole[:cut])
        assert [r["update"] for r in read_run(folder).train] in ([1], [1, 2])
    (folder / "metrics.jsonl").write_bytes(whole[:30] + b"\n" + whole)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: damaged, not a record"):
        read_run(folder)


@pytest.mark.parametrize(
    ("log", "finished", "said"),
    [
        (["first update: loss 1", "stopped after update 1500: `training.stop.updates` reached (5:26 of training; w"],
         True, "ended: `training.stop.updates` reached, after update 1,500"),
        (["first update: loss 1", "stopped after update 34: SIGTERM (2 s of training; waited)", "to resume: `zig`"],
         False, "stopped by SIGTERM, after update 34"),
        (["stopped after update 34: SIGTERM (2 s)", "resumed after update 34", "update 40  epoch 1"],
         False, "does not report an end"),
        (["stopped after update 9: no better bleu in 3 validations (2 s)", "averaged checkpoints 1, 2 into x"],
         True, "ended: no better bleu in 3 validations, after update 9"),
        (["stopped after update 9: `training.stop.updates` reached (2 s)", "resumed after update 9",
          "nothing to do after update 9: `training.stop.updates` reached; to continue, raise that limit: `zig"],
         True, "ended: `training.stop.updates` reached, after update 9"),
    ],
)  # fmt: skip
def test_the_log_shows_how_a_run_ended(tmp_path: Path, log: list[str], finished: bool, said: str) -> None:
    ending = read_run(write_run(tmp_path / "a", log=log)).ending
    assert ending.finished is finished
    assert said in ending.text


def test_names_tell_runs_apart_and_colours_follow_their_order(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("x/run", "y/run", "z")]
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["x/run", "y/run", f"{tmp_path.name}/z"]
    assert [run.colour for run in runs] == [0, 1, 2]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "z"]


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([folder, folder / ".." / "a"])
    with pytest.raises(ConfigError, match="too many"):
        read_runs([tmp_path / str(i) for i in range(MAX_RUNS + 1)])
    with pytest.raises(CheckpointError, match="no such run"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="not a run"):
        read_run(tmp_path / "model")
