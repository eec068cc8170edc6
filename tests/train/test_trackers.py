"""TensorBoard, Weights & Biases and MLflow themselves, read back with their own readers."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import tiny_experiment
from ziggurat.config.lifecycle import MlflowConfig, WandbConfig
from ziggurat.system.errors import ConfigError
from ziggurat.train.loop import train
from ziggurat.train.trackers import TensorBoard, keep, kept, refuse_missing_trackers

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def events(run: Path) -> EventAccumulator:
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_has_scalars_and_images(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    board.scalars(5, {"train/loss": 2.5, "train/nll": 2})
    board.image(5, "depth/map", PIXELS)
    board.close()
    found = events(tmp_path)
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(5, 2.5)]
    assert [(e.step, e.value) for e in found.Scalars("train/nll")] == [(5, 2.0)]
    image = found.Images("depth/map")[0]
    assert (image.step, image.height, image.width) == (5, 4, 5)
    from PIL import Image

    assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), PIXELS)


def test_tensorboard_purges_leftovers_of_a_killed_run(tmp_path: Path) -> None:
    for start, updates in ((0, (5, 10, 15)), (10, (12, 14))):
        board = TensorBoard(tmp_path, start)
        for update in updates:
            board.scalars(update, {"x": float(start)})
        board.close()
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("x")] == [(5, 0.0), (10, 0.0), (12, 10.0), (14, 10.0)]


def test_a_missing_package_is_reported_before_training(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.train.trackers.find_spec", lambda name: None)
    run = tmp_path / "run"
    for key, extra in (("tensorboard", "train"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        value: Any = True if key == "tensorboard" else {}
        experiment = tiny_experiment(tiny_folder, **{key: value})
        with pytest.raises(ConfigError, match=rf"`training\.{key}` needs .* pip install 'ziggurat-mt\[{extra}\]'"):
            train(run, experiment, console=Console(quiet=True))
    assert not run.exists()
    refuse_missing_trackers(tiny_experiment(tiny_folder).training)


def test_names_at_services_are_kept(tmp_path: Path) -> None:
    assert kept(tmp_path, "wandb") is None
    keep(tmp_path, "wandb", "abc")
    keep(tmp_path, "mlflow", "def")
    assert (kept(tmp_path, "wandb"), kept(tmp_path, "mlflow")) == ("abc", "def")


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow-skinny is not installed")


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of an offline run: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield whole
            whole = b""


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """Return what was logged in an offline run."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    return found


@pytest.mark.slow  # W&B writes in a separate process (see the last test here)
@needs_wandb
def test_offline_wandb_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ziggurat.train.trackers import Wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "a-run"
    run.mkdir()
    config = WandbConfig(project="tests")
    for start in (0, 10):
        tracker = Wandb(run, config, {"training": {"seed": 1}})
        tracker.scalars(start + 5, {"train/loss": 2.5})
        tracker.image(start + 5, "depth/map", PIXELS)
        tracker.close()
    name = kept(run, "wandb")
    files = sorted((run / "tracking/wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2  # one for each part of the run, under one name
    logged = wandb_history(files[1])
    assert (logged[0]["update"], logged[0]["train/loss"]) == (15, 2.5)
    assert any("depth/map" in key for key in logged[1])
    assert list((files[1].parent / "files/media/images").rglob("*.png"))


@pytest.mark.slow
@needs_wandb
def test_wandb_without_a_key_does_not_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ziggurat.train.trackers import Wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="no key for Weights & Biases"):
        Wandb(tmp_path, WandbConfig(mode="online"), {})


@pytest.mark.slow
@needs_mlflow
def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    from ziggurat.train.trackers import Mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, uri = tmp_path / "a-run", (tmp_path / "mlruns").as_uri()
    run.mkdir()
    config = MlflowConfig(uri=uri, experiment="tests")
    for start, seed in ((0, 1), (10, 2)):  # a parameter that changed would be refused
        tracker = Mlflow(run, config, {"training": {"seed": seed, "stop": {}}, "format": 1})
        tracker.scalars(start + 5, {"train/loss": 2.5})
        tracker.image(start + 5, "depth/map", PIXELS)
        tracker.close()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert [r.info.run_id for r in found] == [kept(run, "mlflow")]
    assert (found[0].info.run_name, found[0].info.status) == ("a-run", "FINISHED")
    assert found[0].data.params == {"training.seed": "1", "training.stop": "{}", "format": "1"}
    history = client.get_metric_history(found[0].info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(5, 2.5), (15, 2.5)]
    assert len(client.list_artifacts(found[0].info.run_id, "images")) == 4  # each image and its thumbnail


@pytest.mark.slow  # on a busy machine W&B's own process may write late
@needs_wandb
@needs_mlflow
def test_a_whole_run_reports_to_all_three(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impossible MLflow store is reported, while training continues."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setattr("ziggurat.train.run_log._CLOSING_SECONDS", 300.0)  # however busy the machine is
    said, run = io.StringIO(), tmp_path / "run"
    experiment = tiny_experiment(
        tiny_folder,
        stop={"updates": 4},
        validation={"every_updates": 4, "decode": False},
        log_every_updates=2,
        tensorboard=True,
        wandb={"project": "tests"},
        mlflow={"uri": (tmp_path / "mlruns").as_uri()},
    )
    assert train(run, experiment, console=Console(file=said, width=500)).update == 4
    assert [e.step for e in events(run).Scalars("train/loss")] == [2, 4]
    assert [e.step for e in events(run).Scalars("validation/nll")] == [4]
    files = list((run / "tracking/wandb").glob("offline-run-*/run-*.wandb"))
    assert [r["update"] for r in wandb_history(files[0]) if "train/loss" in r] == [2, 4], said.getvalue()
    assert said.getvalue().count("MLflow is left out from now on; training continues: MlflowException") == 1
