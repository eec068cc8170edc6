"""A folder of the wrong kind is recognised, and the message says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ziggurat.data.corpus import Store
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.model.directory import locate_weights
from ziggurat.system.errors import CheckpointError, DataError
from ziggurat.system.files import folder_kind


def filled(folder: Path, **files: object) -> Path:
    """Make a folder of files: `_` in a name stands for the dot before the suffix, and values are their content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = folder / ".".join(name.rsplit("_", 1))
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("target", "reader"),
    [
        ("ctranslate2", "`ziggurat translate {0}` reads"),
        ("huggingface", "`ziggurat import {0} --out FOLDER`"),
        ("argos", "install the .argosmodel file in it"),
        ("onnx", 'load_onnx("{0}")'),
    ],
)
def test_exports(target: str, reader: str, tmp_path: Path) -> None:
    files = {"config_yaml": "", "config_json": {"model_type": "marian"}, "model_bin": "", "model_safetensors": ""}
    folder = filled(tmp_path / "out", export_json={"target": target, "model": "runs/a: best, update 7"}, **files)
    if target == "huggingface":
        (folder / "config.yaml").unlink()
    else:
        (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        locate_weights(folder)
    assert f"{folder}: no run or model directory, but an export for" in str(caught.value)
    assert reader.format(folder) in str(caught.value)
    assert "made from runs/a: best, update 7" in str(caught.value)


def test_an_export_without_its_config_is_written_again_and_not_imported(tmp_path: Path) -> None:
    folder = filled(tmp_path / "out", export_json={"target": "huggingface", "model": "runs/a"}, model_safetensors="")
    with pytest.raises(DataError) as caught:
        import_checkpoint(folder, tmp_path / "imported")
    assert f"`ziggurat export MODEL --to huggingface --out {folder} --force`" in str(caught.value)
    assert "ziggurat import" not in str(caught.value)
    assert "made from runs/a" in str(caught.value)


def test_folders_of_other_programs(tmp_path: Path) -> None:
    hub = filled(tmp_path / "hub", config_json={"model_type": "marian"}, model_safetensors="")
    with pytest.raises(CheckpointError, match="a directory of transformers; `ziggurat import"):
        locate_weights(hub)
    other = filled(tmp_path / "other", model_bin="")
    assert f"`ziggurat translate {other}` translates" in str(folder_kind(other))


def test_runs_and_stores_are_distinguished(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", manifest_json={"tables": {}, "prepared_from": {}})
    run = filled(tmp_path / "runs" / "a", config_yaml="")
    filled(run / "checkpoints" / "step-00000001", model_safetensors="")
    with pytest.raises(CheckpointError, match="but a store of `ziggurat prepare`"):
        locate_weights(store)
    with pytest.raises(CheckpointError, match=rf"but the checkpoints of the run {run}: name the run"):
        locate_weights(run / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"but a folder of models; name one of its contents: {run}$"):
        locate_weights(tmp_path / "runs")
    with pytest.raises(DataError, match="not a store of `ziggurat prepare`, but a run"):
        Store.open(run)
    with pytest.raises(DataError, match="but a model directory"):
        Store.open(filled(tmp_path / "model", config_yaml="", model_safetensors=""))


def test_a_pipeline_and_its_steps_name_the_models_in_them(tmp_path: Path) -> None:
    work = tmp_path / "w"
    for name in ("clean", "teacher", "student", "export-ctranslate2", "export-onnx"):
        filled(work / name, begun_json={})
    runs = [work / name / "run" for name in ("student", "teacher")]
    for run in runs:
        filled(run, config_yaml="")
        (run / "checkpoints").mkdir()
    exports = [work / f"export-{to}" / to for to in ("ctranslate2", "onnx")]
    for export in exports:
        filled(export, export_json={"target": export.name, "model": "w/student/run"}, model_bin="")
    for folder, said in (
        (work, f"the folder of a pipeline; name one of its contents: {exports[0]}, {runs[0]}, {runs[1]}"),
        (work / "student", f"a folder of models; name one of its contents: {runs[0]}"),
        (exports[0].parent, f"a folder of models; name one of its contents: {exports[0]}"),
    ):
        with pytest.raises(CheckpointError) as caught:
            locate_weights(folder)
        assert str(caught.value) == f"{folder}: no run or model directory, but {said}"
    for other in (work / "clean", exports[1].parent):
        with pytest.raises(CheckpointError, match="neither a run"):
            locate_weights(other)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"target": 1}', '{"target": "other", "model": 2}'])
def test_unknown_folders_have_no_kind(content: str, tmp_path: Path) -> None:
    assert folder_kind(filled(tmp_path / "x", export_json=content, manifest_json=content)) is None
    with pytest.raises(CheckpointError, match="neither a run"):
        locate_weights(tmp_path / "x")
    assert folder_kind(tmp_path / "nothing") is None
