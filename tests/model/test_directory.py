from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_experiment
from ziggurat.model.build import build_model
from ziggurat.model.directory import common_weights, open_model, write_model_directory
from ziggurat.model.run_folder import CHECKPOINTS, MODEL_FILE
from ziggurat.model.tensors import load_weights, read_tensors, weights
from ziggurat.system.errors import CheckpointError, ConfigError


@pytest.fixture
def directory(tiny_folder: Path, tmp_path: Path) -> Path:
    experiment = tiny_experiment(tmp_path)
    model = build_model(experiment.model, 400, 400, seed=9)
    write_model_directory(tmp_path / "m", weights(model), experiment, tiny_folder / "store")
    return tmp_path / "m"


def test_a_model_directory_reads_back_bit_for_bit(directory: Path) -> None:
    opened = open_model(directory)
    original = build_model(opened.experiment.model, 400, 400, seed=9)
    assert not opened.model.training
    for (name, mine), (other_name, other) in zip(
        opened.model.named_parameters(), original.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(mine, other)
    assert {p.name for p in directory.iterdir()} == {
        "model.safetensors",
        "config.yaml",
        "joint.spm",
        "vocabulary.json",
        "checksums.json",
    }


def test_damaged_and_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run or model directory"):
        open_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither a run"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match="it has no checkpoint `best`"):
        open_model(directory, which="best")
    with pytest.raises(ConfigError, match="`device: cuda:99` cannot be used"):
        open_model(directory, device="cuda:99")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        open_model(directory)
    file.write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        open_model(directory)


def test_weights_that_do_not_fit_are_refused(directory: Path) -> None:
    model = open_model(directory).model
    tensors = read_tensors(directory / "model.safetensors")
    name = "encoder.layers.0.ffn.in_proj.bias"
    with pytest.raises(CheckpointError, match=f"x: parameter {name} is missing"):
        load_weights(model, {k: v for k, v in tensors.items() if k != name}, "x")
    with pytest.raises(CheckpointError, match="parameter more is unknown"):
        load_weights(model, {**tensors, "more": torch.zeros(1)}, "x")
    with pytest.raises(CheckpointError, match=r"has shape \[3\], the configuration needs \[32\]"):
        load_weights(model, {**tensors, name: torch.zeros(3)}, "x")


@pytest.mark.slow
def test_shapes_are_known_without_torchs_compiler() -> None:
    """Importing the compiler would take over a second whenever a verb opens a model."""
    code = """
import sys, torch
from ziggurat.config import ModelConfig
from ziggurat.model.build import assemble
with torch.device("meta"):
    assemble(ModelConfig(), 20, 20)
print("torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize(
    ("kept", "which"),
    [
        ([{"best", "last"}, {"best", "last"}], None),
        ([{"averaged", "best", "last"}, {"averaged", "last"}], None),
        ([{"averaged", "best", "last"}, {"best", "last"}], "best"),
        ([{"averaged", "best", "last"}, {"last"}], "last"),
        ([{"averaged", "last"}, {"best", "last"}], "last"),
        ([{"averaged", "best", "last"}, set()], None),  # the other one has nothing to translate with
    ],
)
def test_runs_are_compared_by_weights_of_one_kind(tmp_path: Path, kept: list[set[str]], which: str | None) -> None:
    folders = [tmp_path / str(n) for n in range(len(kept))]
    for folder, names in zip(folders, kept, strict=True):
        (folder / CHECKPOINTS).mkdir(parents=True)
        for name in names:
            (folder / name).mkdir()
            (folder / name / MODEL_FILE).touch()
    assert common_weights(folders) == which
