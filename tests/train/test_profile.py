from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from ziggurat.config import Experiment
from ziggurat.config.modifiers import StageConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model, stack_residuals
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import read_tensors
from ziggurat.train.loop import train
from ziggurat.train.profiling import profile_admin, profile_batch, profile_batches

ADMIN: dict[str, Any] = {"residual": "admin", "init": {"kind": "admin", "profile_tokens": 500}}


def experiment(folder: Path, model: dict[str, Any] = ADMIN, **training: Any) -> Experiment:
    return tiny_experiment(folder, model, **training)


def store_of(folder: Path) -> Store:
    return Store.open(folder / "store")


def model_of(experiment: Experiment, store: Store) -> Seq2Seq:
    return build_model(experiment.model, store.source.size, store.target.size)


def omegas(model: Seq2Seq) -> list[float]:
    return [
        float(residual.get_parameter("skip")[0].detach())
        for stack in (model.encoder, model.decoder)
        for residual in stack_residuals(stack)
    ]


def test_the_batch_is_a_sample_of_the_requested_size(tiny_folder: Path) -> None:
    store = store_of(tiny_folder)
    cost = np.maximum(store.train.source_lengths, store.train.target_lengths) + 1
    batch = profile_batch(store, 900, seed=1)
    tokens = cost[batch.indices].sum()
    assert 900 <= tokens < 900 + cost.max()
    assert len(set(batch.indices.tolist())) == batch.sentences
    assert cost[batch.indices].max() <= np.quantile(cost, 0.95)
    assert len(set(cost[batch.indices].tolist())) > 5  # unlike a training batch, it has all lengths
    again, other = profile_batch(store, 900, seed=1), profile_batch(store, 900, seed=2)
    assert torch.equal(batch.source, again.source)
    assert set(batch.indices.tolist()) != set(other.indices.tolist())


def test_a_small_store_is_used_except_for_its_longest_pairs(tiny_folder: Path) -> None:
    store = store_of(tiny_folder)
    cost = np.maximum(store.train.source_lengths, store.train.target_lengths) + 1
    usual = np.flatnonzero(cost <= np.quantile(cost, 0.95))
    assert 0.95 * len(cost) <= len(usual) < len(cost)
    assert sorted(profile_batch(store, 10**9, seed=1).indices.tolist()) == usual.tolist()
    assert profile_batch(store, 1, seed=1).sentences == 1


def test_several_batches_share_no_pair_and_end_with_the_epoch(tiny_folder: Path) -> None:
    store = store_of(tiny_folder)
    cost = np.maximum(store.train.source_lengths, store.train.target_lengths) + 1
    batches = profile_batches(store, 200, 3, seed=1)
    assert torch.equal(batches[0].source, profile_batch(store, 200, seed=1).source)
    assert all(200 <= cost[one.indices].sum() <= 200 + cost.max() for one in batches)
    pairs = np.concatenate([one.indices for one in batches])
    assert len(batches) == 3
    assert len(set(pairs.tolist())) == len(pairs)
    whole = np.concatenate([one.indices for one in profile_batches(store, 200, 10**6, seed=1)])
    assert sorted(whole.tolist()) == sorted(profile_batch(store, 10**9, seed=1).indices.tolist())


def test_the_batch_is_of_the_first_stage(tiny_folder: Path) -> None:
    store = store_of(tiny_folder)
    store.train.corpora, store.train.corpus_names = np.arange(len(store.train)) % 2, ["even", "odd"]
    until = {"corpus": "odd", "epochs": 1}
    stages = [StageConfig.model_validate({"mix": mix, "until": until}) for mix in ({"odd": 1}, {"even": 1, "odd": 1})]
    batch = profile_batch(store, 900, seed=1, stages=stages)
    assert {int(index) % 2 for index in batch.indices} == {1}


@pytest.mark.parametrize(
    "model", [{}, {"residual": "deepnorm"}, {"residual": "admin"}, {**ADMIN, "init": {"kind": "admin", "omega": "log"}}]
)
def test_nothing_else_is_profiled(tiny_folder: Path, model: dict[str, Any]) -> None:
    config, store = experiment(tiny_folder, model), store_of(tiny_folder)
    built = model_of(config, store)
    before = {name: p.detach().clone() for name, p in built.named_parameters()}
    assert profile_admin(built, config, store) is None
    assert all(torch.equal(p, before[name]) for name, p in built.named_parameters())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_omegas_of_one_stack_are_profiled(tiny_folder: Path, side: str) -> None:
    """The encoder's values equal those of a model that profiles both; the decoder reads the memory, which differs."""
    store = store_of(tiny_folder)
    own = {"residual": "admin", side: {"init": ADMIN["init"]}}
    both, one = experiment(tiny_folder), experiment(tiny_folder, own)
    whole, half = model_of(both, store), model_of(one, store)
    profile_admin(whole, both, store)
    line = profile_admin(half, one, store)
    assert line is not None
    assert side in line
    assert ("encoder" in line) + ("decoder" in line) == 1
    for name, omega in half.named_parameters():
        if not name.endswith("_residual.skip"):
            continue
        if not name.startswith(side):
            assert (omega == 1).all(), name
        elif side == "encoder":
            assert torch.equal(omega, whole.get_parameter(name)), name
        else:
            assert (omega[0] == 1) == (name == "decoder.layers.0.self_attn_residual.skip"), name


def test_profiling_depends_only_on_data_and_seed(tiny_folder: Path) -> None:
    """Profiling must not depend on batches, accumulation or earlier random draws, which differ between processes."""
    store, found = store_of(tiny_folder), []
    for number, training in enumerate([{}, {}, {"batch": {"max_tokens": 90, "accumulate": 3}}, {"seed": 2}]):
        config = experiment(tiny_folder, **training)
        model = model_of(config, store).train(number == 1)
        torch.manual_seed(number)
        state = torch.get_rng_state()
        line = profile_admin(model, config, store)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training == (number == 1)
        values = omegas(model)
        assert line is not None
        assert "omega profiled on" in line
        assert f"encoder 1.000 to {max(values[:4]):.3f}, decoder 1.000 to {max(values[4:]):.3f}" in line
        found.append(values)
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]
    assert all(values[0] == values[4] == 1.0 for values in found)
    assert min(min(values[1:4] + values[5:]) for values in found) > 1.0


def test_layer_drop_does_not_hide_layers_from_profiling(tiny_folder: Path) -> None:
    dropping = {"encoder": {"layers": 2, "layer_drop": 0.9}, "decoder": {"layers": 2, "layer_drop": 0.9}}
    store, found = store_of(tiny_folder), []
    for more in ({}, dropping):
        config = experiment(tiny_folder, {**ADMIN, **more})
        model = model_of(config, store)
        profile_admin(model, config, store)
        assert model.encoder.layer_drop == model.decoder.layer_drop == (0.9 if more else 0.0)
        found.append(omegas(model))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_run_profiles_once_before_its_first_update(tiny_folder: Path, tmp_path: Path) -> None:
    """Omega is saved with the weights, and a resumed run ends like an uninterrupted one."""
    kept: dict[str, Any] = {"model": {**ADMIN, "wiring": {"omega_trainable": False}}, "validation": {"decode": False}}
    runs = []
    for name, stops in (("whole", [6]), ("resumed", [3, 6])):
        run = tmp_path / name
        for number, updates in enumerate(stops):
            config = experiment(tiny_folder, **kept, threads=1, stop={"updates": updates})
            train(run, config, resume=number > 0, console=QUIET)
        assert (run / "log.txt").read_text().count("omega profiled on") == 1
        runs.append(read_tensors(checkpoint_folders(run)[-1] / "model.safetensors"))
    whole, resumed = runs
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    config, store = experiment(tiny_folder, **kept), store_of(tiny_folder)
    model = build_model(config.model, store.source.size, store.target.size, seed=config.training.seed)
    profile_admin(model, config, store)
    skips = [name for name in whole if name.endswith(".skip")]
    assert len(skips) == 2 * 2 + 2 * 3
    for name in skips:
        assert torch.equal(whole[name], model.get_parameter(name)), name
    matrix = "encoder.layers.0.ffn.in_proj.weight"
    assert not torch.equal(whole[matrix], model.get_parameter(matrix))


@pytest.mark.slow
def test_weights_that_training_starts_from_keep_their_omega(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "first", experiment(tiny_folder, stop={"updates": 2}), console=QUIET)
    config = experiment(tiny_folder, stop={"updates": 1}, start_from=str(tmp_path / "first"))
    train(tmp_path / "second", config, console=QUIET)
    assert "omega profiled" not in (tmp_path / "second" / "log.txt").read_text()
