"""Damaged data during training: the run stops, names the file, and keeps nothing that was trained on the damage."""

from __future__ import annotations

import json
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.store_checks import Verification
from ziggurat.data.table import ArrowShard
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.train.loop import train
from ziggurat.train.run import reopen_run


@pytest.fixture
def experiment(tiny_folder: Path, tmp_path: Path) -> Experiment:
    shutil.copytree(tiny_folder / "store", tmp_path / "store")
    return tiny_experiment(tmp_path, stop={"updates": 6}, checkpoint={"every_updates": 3})


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny_folder / "store", folder / "store")
    train(folder / "run", tiny_experiment(folder, stop={"updates": 4}), console=QUIET)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "run", tmp_path / "run", symlinks=True))


def rot(store: Path) -> None:
    """Flip the lowest bit of an id: the text changes, and nothing else shows it."""
    path = store / "train-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_no_run_starts_from_a_damaged_store(experiment: Experiment, tmp_path: Path) -> None:
    rot(tmp_path / "store")
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged"):
        train(tmp_path / "run", experiment, console=QUIET)
    assert not (tmp_path / "run").exists()


def test_no_checkpoint_is_written_before_the_store_is_known_to_be_whole(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(tmp_path / "store")
    asked = threading.Event()
    compare, ask = ArrowShard.verify, Verification.found_damage

    def slow(shard: ArrowShard) -> None:
        assert asked.wait(60), "nobody waits for the comparison"
        compare(shard)

    def asking(verification: Verification) -> bool:
        asked.set()
        return ask(verification)

    monkeypatch.setattr(ArrowShard, "verify", slow)
    monkeypatch.setattr(Verification, "found_damage", asking)
    monkeypatch.setattr("ziggurat.train.saving.Verification", partial(Verification, patience=0.01))
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged.*no weights were saved"):
        train(tmp_path / "run", experiment, console=QUIET)
    assert checkpoint_folders(tmp_path / "run") == []
    assert not (tmp_path / "run" / "averaged").exists()


def test_damage_found_during_training_ends_it_before_the_next_save(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(tmp_path / "store")
    compare = ArrowShard.verify

    def slow(shard: ArrowShard) -> None:
        time.sleep(0.5)
        compare(shard)

    monkeypatch.setattr(ArrowShard, "verify", slow)
    monkeypatch.setattr("ziggurat.train.saving.Verification", partial(Verification, patience=0.01))
    endless = {"stop": {"updates": 1_000_000}, "checkpoint": {"every_updates": 1_000_000}}
    section = change_section(experiment.training, endless, "training")
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged"):
        train(tmp_path / "run", experiment.model_copy(update={"training": section}), console=QUIET)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 1", "seed: 2", r"training\.seed: 1 -> 2"),
        ("attention: 0.1", "attention: 0.3", r"model\.dropout\.attention: 0\.1 -> 0\.3"),
        ("max_tokens: 400", "max_tokens: 300", r"training\.batch\.max_tokens: 400 -> 300"),
        ("sampling_temperature: 1.0", "sampling_temperature: 2.0", r"data\.sampling_temperature: 1\.0 -> 2\.0"),
    ],
)
def test_an_edited_configuration_is_refused_like_an_override(old: str, new: str, message: str, run: Path) -> None:
    path = run / "config.yaml"
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))
    with pytest.raises(
        ConfigError, match=rf"config\.yaml: changed since step-00000004 was written: {message}\. .*back"
    ):
        reopen_run(run, [])


def test_a_run_without_its_configuration_points_to_a_copy(run: Path) -> None:
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml: missing.*`configuration`.*meta\.json"):
        reopen_run(run, [])
    newest = max((run / "checkpoints").iterdir())
    kept = json.loads((newest / "meta.json").read_text())["configuration"]
    (run / "config.yaml").write_text(json.dumps(kept))
    assert reopen_run(run, []).model_dump(mode="json") == kept
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="checkpoints: no such folder"):
        reopen_run(run, [])


def test_a_run_is_reopened_without_its_device(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several processes reopens it before it knows its GPU; otherwise all would open the first GPU."""
    used: list[str] = []
    monkeypatch.setattr("ziggurat.train.run.usable_device", lambda name, _: used.append(name))
    reopen_run(run, ["training.device=cuda"])
    assert used == []


def test_settings_that_a_resumed_run_may_change_may_be_edited(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("updates: 4\n", "updates: 5\n"))
    assert train(run, reopen_run(run, []), resume=True, console=QUIET).update == 5


def test_the_python_api_is_refused_too(run: Path) -> None:
    experiment = reopen_run(run, [])
    other = change_section(experiment, {"training": {"seed": 9}}, "")
    before = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"training\.seed: 1 -> 9"):
        train(run, other, resume=True, console=QUIET)
    assert (run / "config.yaml").read_text() == before


def test_a_run_is_not_translated_with_under_another_model_section(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("  heads: 2\n", "  heads: 4\n", 1))
    with pytest.raises(CheckpointError, match=r"config\.yaml: edited .*model\.heads: 2 -> 4"):
        open_model(run, which="last")


def test_a_runs_vocabulary_is_protected(run: Path) -> None:
    path = run / "joint.spm"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for which in (None, "last"):
        with pytest.raises(CheckpointError, match=r"joint\.spm: damaged .*copy it from the store"):
            open_model(run, which=which)
