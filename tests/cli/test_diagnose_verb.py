"""`ziggurat diagnose`: measures of models after training."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from ziggurat.inspect.diagnose import LAYER_MEASURES
from ziggurat.train.diagnosis.gradients import STACKS
from ziggurat.train.loop import train
from ziggurat.train.records import DEPTH_FILE, read_records, write_records


@pytest.fixture(scope="module")
def measured_run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates with a checkpoint and a record at updates 2 and 4."""
    run = tmp_path_factory.mktemp("diagnose") / "run"
    watched = {"every_updates": 2, "tokens": 100, "max_share": None}
    training = {"stop": {"updates": 4}, "checkpoint": {"every_updates": 2}, "validation": {"decode": False}}
    train(run, tiny_experiment(tiny_folder, diagnostics=watched, **training), console=QUIET)
    return run


@pytest.mark.slow
def test_checkpoints_give_the_records_that_training_left(
    measured_run: Path, tmp_path: Path, ziggurat: Ziggurat
) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured_run, run, symlinks=True)
    left = read_records(run)
    assert [r.update for r in left] == [0, 2, 4]
    (run / DEPTH_FILE).unlink()
    result = ziggurat("diagnose", run, "--json")
    assert result.status == 0
    assert result.err.splitlines() == [f"measuring {run}: update 2", f"measuring {run}: update 4"]
    found = read_records(run)
    assert [r.update for r in found] == [2, 4]
    assert json.loads(result.out)["records"] == [r.as_dict() for r in found]
    for one, other in zip(left[1:], found, strict=True):
        assert one.layers == other.layers
        assert one.values.keys() - other.values.keys() == {"scaled_gradient_norm", "update_ratio"}
        for name in other.values:
            assert one.values[name] == other.values[name], name


@pytest.mark.slow
def test_records_are_added_to_existing_ones(measured_run: Path, tmp_path: Path, ziggurat: Ziggurat) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured_run, run, symlinks=True)
    result = ziggurat("diagnose", run)
    assert result.status == 0
    assert [r.values for r in read_records(run)] == [r.values for r in read_records(measured_run)]
    lines = result.out.splitlines()
    assert lines[0].startswith("update 2: nll ")
    assert [line.split()[:2] for line in lines[2:4]] == [["encoder", "2"], ["decoder", "2"]]
    assert lines[-1] == f"all measures: {run / DEPTH_FILE}"


def test_a_model_directory(measured_run: Path, tmp_path: Path, ziggurat: Ziggurat) -> None:
    model = tmp_path / "model"
    assert ziggurat("average", measured_run, "--last", 1, "--out", model).status == 0
    assert ziggurat("diagnose", model).status == 0
    (record,) = read_records(model)
    assert record.update == 0
    assert record.values["nll"] == pytest.approx(read_records(measured_run)[-1].values["nll"], rel=1e-6)
    assert ziggurat("diagnose", model).status == 0  # the verb may replace its own record, but not those of training
    write_records(model, read_records(measured_run))
    refused = ziggurat("diagnose", model)
    assert refused.status == 2
    assert "records of a training run" in refused.err
    assert read_records(model) == read_records(measured_run)


@pytest.mark.slow
def test_runs_that_cannot_be_measured_are_refused(
    measured_run: Path, tiny_folder: Path, tmp_path: Path, ziggurat: Ziggurat
) -> None:
    def fails(*arguments: object) -> str:
        result = ziggurat("diagnose", *arguments)
        assert result.status == 2
        assert "Traceback" not in result.err
        return result.err

    assert "no such run or model directory" in fails(tmp_path / "nothing")
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    assert "no checkpoint yet; nothing to measure" in fails(empty)
    assert "nowhere" in fails(measured_run, "--store", tmp_path / "nowhere")
    run = tmp_path / "run"
    shutil.copytree(measured_run, run, symlinks=True)
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is training in this folder" in fails(run)
    before = (run / DEPTH_FILE).read_text()
    (run / DEPTH_FILE).write_text("damage\n" + before)
    assert "depth.jsonl, line 1: damaged" in fails(run)


def test_data_of_another_vocabulary_is_refused(measured_run: Path, tmp_path: Path, ziggurat: Ziggurat) -> None:
    from ziggurat.config.load import change_section
    from ziggurat.data.prepare import prepare

    data = tiny_experiment(tmp_path).data
    prepare(change_section(data, {"subword": {"vocabulary_size": 350}}, "data"))
    result = ziggurat("diagnose", measured_run, "--store", tmp_path / "store")
    assert result.status == 2
    assert "its source vocabulary is not that of the store" in result.err


@pytest.mark.slow
def test_layers_are_measured_and_left_out_of_translations(
    measured_run: Path, tmp_path: Path, ziggurat: Ziggurat
) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured_run, run, symlinks=True)
    result = ziggurat("diagnose", run, "--layers", "--translate", "3")
    assert result.status == 0, result.err
    values = read_records(run)[-1].values
    assert set(LAYER_MEASURES) < set(values)
    assert [len(values[key][stack]) for key in ("pruning_curve", "pruning_bleu") for stack in STACKS] == [2] * 4
    assert values["nll"] == read_records(measured_run)[-1].values["nll"]
    assert "encoder: effective depth " in result.out
    assert "(BLEU)" in result.out
    refused = ziggurat("diagnose", run, "--translate", "3")
    assert refused.status == 2
    assert "--layers" in refused.err


@pytest.mark.slow
def test_translation_without_layers(measured_run: Path, tmp_path: Path, ziggurat: Ziggurat) -> None:
    (text := tmp_path / "text").write_text("ein Haus\nzwei Häuser\n", encoding="utf-8")
    found = {}
    for layers in (None, "encoder.2", "encoder.1,decoder.2"):
        options = [] if layers is None else ["--without-layers", layers]
        result = ziggurat("translate", measured_run, "-i", text, "--workers", "1", *options)
        assert result.status == 0, result.err
        assert (f"without layers {layers}" in result.err) == (layers is not None)
        found[layers] = result.out
    out = tmp_path / "exported"
    exported = ziggurat("export", measured_run, "--to", "ziggurat", "--out", out, "--without-layers", "encoder.2")
    assert exported.status == 0, exported.err
    assert ziggurat("translate", out, "-i", text).out == found["encoder.2"]
    wrong = ziggurat("translate", measured_run, "-i", text, "--without-layers", "encoder.3")
    assert wrong.status == 2
    assert "no layer 3" in wrong.err
    both = ziggurat("translate", measured_run, "-i", text, "--ensemble", measured_run, "--without-layers", "encoder.1")
    assert both.status == 2
    assert "ensemble" in both.err
