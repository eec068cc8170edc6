"""Runs with low-rank adaptation: what they train, keep, resume and leave behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.corpora.pipeline.conftest import parsed, whole
from tests.train.launch import run_together
from tests.train.runs import QUIET, outcome, same_records, train_part
from ziggurat.config import Experiment
from ziggurat.config.load import change_section, load_experiment
from ziggurat.config.pipeline_models import EvaluationConfig
from ziggurat.corpora.jobs.tasks import ModelChoice
from ziggurat.corpora.jobs.tasks import opened as job_opened
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.evaluation import _bytes_of, _models, _systems
from ziggurat.corpora.pipeline.models import model_files
from ziggurat.data.corpus import Store
from ziggurat.model.directory import open_model, write_model_directory
from ziggurat.model.low_rank import is_update
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.tensors import read_tensors, weights
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.train.average import CheckpointSelection, average_run
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.learner import Learner
from ziggurat.train.loop import train
from ziggurat.train.run import reopen_run

LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "maps": ["query", "value", "feed_forward"]}
SETTINGS: dict[str, Any] = {
    "checkpoint": {"every_updates": 4, "keep_last": 3},
    "validation": {"every_updates": 4, "max_sentences": 4},
    "log_every_updates": 4,
    "batch": {"max_tokens": 150, "accumulate": 2},
    "optimiser": {"weight_decay": 0.01, "kind": "adamw"},
    "clip_norm": 1.0,
}


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is adapted."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run, tiny_experiment(tiny_folder, stop={"updates": 3}), console=QUIET)
    return run


def adapting(folder: Path, model: Path, updates: int = 8, **changes: Any) -> Experiment:
    given: dict[str, Any] = {
        **SETTINGS,
        "stop": {"updates": updates},
        "start_from": str(model),
        "lora": LORA,
        **changes,
    }
    return tiny_experiment(folder, **given)


@pytest.fixture(scope="module")
def adapted(tiny_folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("adapted") / "run"
    train(run, adapting(tiny_folder, model), console=QUIET)
    return run


def test_only_the_updates_are_trained_and_kept(adapted: Path, model: Path) -> None:
    checkpoint = load_checkpoint(checkpoint_folders(adapted)[-1])
    assert checkpoint.weights
    assert all(map(is_update, checkpoint.weights))
    assert {name.rpartition("/")[0] for name in checkpoint.optimiser} == set(checkpoint.weights)
    assert all(tensor.abs().max() > 0 for name, tensor in checkpoint.weights.items() if name.endswith("up"))
    before, base = weights(open_model(model).model), read_tensors(adapted / "base" / "model.safetensors")
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], before[name]) for name in base)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (adapted / "base", adapted / "last")]
    assert 2 * sizes[1] < sizes[0]
    log = (adapted / "log.txt").read_text(encoding="utf-8")
    trained = sum(tensor.numel() for tensor in checkpoint.weights.values())
    assert f"low-rank updates (rank 2) of query, value, feed_forward: {trained:,} of them trained" in log


def test_opening_the_run_gives_merged_weights(adapted: Path, model: Path, tiny_folder: Path) -> None:
    opened, before = open_model(adapted, which="last"), weights(open_model(model).model)
    assert opened.experiment.training.lora is None
    found, updates = weights(opened.model), load_checkpoint(checkpoint_folders(adapted)[-1]).weights
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert changed == {name.partition(".low_rank.")[0] + ".weight" for name in updates}
    name = "decoder.layers.1.ffn.in_proj"
    up, down = (updates[f"{name}.low_rank.0.{factor}"].double() for factor in ("up", "down"))
    whole = (before[f"{name}.weight"].double() + 2.0 * up @ down).float()
    assert torch.equal(found[f"{name}.weight"], whole)
    # The model as trained computes the same.
    store = Store.open(adapting(tiny_folder, model).data.store)
    learner = Learner(load_experiment(adapted / "config.yaml"), store, torch.device("cpu"))
    learner.restore(load_checkpoint(checkpoint_folders(adapted)[-1]), adapted)
    ids, mask = torch.tensor([[5, 9, 7, 3]]), torch.ones(1, 4, dtype=torch.bool)
    with torch.inference_mode():
        both = [m.logits(m(ids, mask, ids)) for m in (learner.model.eval(), opened.model)]
    torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=0)
    assert open_model(adapted, which="base").origin.endswith("model directory")


def test_averages_are_of_merged_weights(adapted: Path, tmp_path: Path) -> None:
    average_run(adapted, CheckpointSelection("last", 2), out=tmp_path / "mean")
    mean, each = open_model(tmp_path / "mean"), [open_model(adapted, which=name) for name in ("4", "8")]
    assert mean.experiment.training.lora is None
    both = [weights(opened.model) for opened in each]
    for name, tensor in weights(mean.model).items():
        wanted = (both[0][name].double() + both[1][name].double()) / 2
        assert torch.equal(tensor, wanted.float()), name


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(adapted: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """This also holds if the model from which it started is gone."""
    trained, run = tmp_path / "trained", tmp_path / "parts"
    shutil.copytree(adapted / "base", trained)
    train(run, adapting(tiny_folder, trained, 4), console=QUIET)
    shutil.rmtree(trained)
    train(run, reopen_run(run, ["training.stop.updates=8"]), resume=True, console=QUIET)
    assert outcome(run) == outcome(adapted)
    same_records(adapted, run)


@pytest.mark.slow
def test_before_its_first_checkpoint_a_run_restarts_from_its_own_copy(
    adapted: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    trained, run = tmp_path / "trained", tmp_path / "again"
    shutil.copytree(adapted / "base", trained)
    train(run, adapting(tiny_folder, trained), console=QUIET)
    shutil.rmtree(trained)
    for folder in checkpoint_folders(run):
        shutil.rmtree(folder)
    train(run, reopen_run(run, []), resume=True, console=QUIET)
    assert outcome(run) == outcome(adapted)


def test_a_different_base_makes_a_different_model(adapted: Path, tmp_path: Path) -> None:
    """Jobs, pipelines and exports treat it as another model, and its size on disk is that of both files."""
    run = tmp_path / "run"
    shutil.copytree(adapted, run, symlinks=True)
    before = ModelChoice((str(run),)).identified()
    files = [run / folder / "model.safetensors" for folder in ("best", "base")]
    unwanted = ("backward", "backtranslation", "filter", "distillation", "student", "alignment", "quantisation")
    sections: dict[str, Any] = dict.fromkeys((*unwanted, "shortlist", "export"))
    context = PipelineContext(parsed(whole(teacher={"existing": str(run)}, **sections)))
    assert model_files(context, "teacher")["teacher.existing"][:2] == files
    size = sum(file.stat().st_size for file in files)
    assert [row.bytes for row in _models(context)] == [size]
    assert [_bytes_of(system) for system in _systems(context, EvaluationConfig(int8=False))] == [size]
    base = open_model(run, which="base")
    tensors = {name: tensor * 2 for name, tensor in weights(base.model).items()}
    write_model_directory(run / "base", tensors, base.experiment, base.directory)
    with pytest.raises(CheckpointError, match="its weights changed after the job had started"):
        job_opened(before.choice)
    (one,), (other,) = (each["models"] for each in (before.settings, ModelChoice((str(run),)).identified().settings))
    assert {name for name in one if one[name] != other[name]} == {"weights"}


def test_updates_without_their_base_are_refused(adapted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted, run, symlinks=True)
    (run / "base" / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"base/model\.safetensors"):
        open_model(run)
    shutil.rmtree(run / "base")
    with pytest.raises(CheckpointError, match=r"base/model\.safetensors: missing, and .* holds low-rank updates of it"):
        open_model(run)
    with pytest.raises(CheckpointError, match=r"base"):
        train(run, reopen_run(run, ["training.stop.updates=9"]), resume=True, console=QUIET)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start_from": None}, "it adapts a trained model: name one with `training.start_from`"),
        ({"growth": {"stages": [{"layers": 1, "updates": 2}]}}, "`training.growth` adds layers"),
        ({"quantise": "int8"}, "`training.quantise` adapts weights to bytes"),
        ({"optimiser": {"kind": "muon"}}, "muon` orthogonalises whole matrices"),
        ({"lora": {"rank": 17}}, "`rank: 17` exceeds the width of the model, 16"),
        ({"lora": {"maps": ["key", "key"]}}, "names one twice"),
        ({"lora": {"maps": []}}, "at least 1 item"),
        ({"lora": {"maps": ["head"]}}, "'query', 'key', 'value', 'output', 'feed_forward' or 'gate'"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], reason: str, tiny_folder: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        adapting(tiny_folder, model, **changes)


def test_layer_drop_is_refused_with_the_way_out(tiny_folder: Path, model: Path) -> None:
    experiment = adapting(tiny_folder, model)
    dropping = change_section(experiment.model, {"encoder": {"layer_drop": 0.2}}, "model")
    with pytest.raises(ConfigError, match=r"`training\.lora`: LayerDrop .* set `model\.encoder\.layer_drop: 0`"):
        change_section(experiment, {"model": dropping}, "experiment")


def test_a_resumed_run_cannot_change_it(adapted: Path) -> None:
    with pytest.raises(ConfigError, match=r"a resumed run cannot change `training\.lora`"):
        reopen_run(adapted, ["training.lora.alpha=5"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_same(kind: str, adapted: Path, tiny_folder: Path, model: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {"distributed": {"kind": kind}, "threads": 1}
    document = adapting(tiny_folder, model, 4, **settings).model_dump_json()
    run_together("tests.train.test_lora", "train_part", 2, str(run), document, "")
    run_together(
        "tests.train.test_lora", "train_part", 2, str(run), document.replace('"updates":4', '"updates":8'), "resume"
    )
    found, wanted = (load_checkpoint(checkpoint_folders(path)[-1]) for path in (run, adapted))
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, atol=2e-5, rtol=1e-3)


assert train_part  # it runs in other processes
