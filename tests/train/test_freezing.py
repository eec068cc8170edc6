"""Runs with frozen parts of the model: what stays, what is trained, and what cannot be frozen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_experiment
from tests.train.launch import run_together
from tests.train.runs import QUIET, outcome, records, same_records
from ziggurat.config import Experiment
from ziggurat.config.depth import LeftOut
from ziggurat.config.load import load_experiment
from ziggurat.config.notices import notices
from ziggurat.model.depth import pruned_experiment
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.diagnosis.health import readings
from ziggurat.train.growth import grow_model
from ziggurat.train.loop import train
from ziggurat.train.records import read_records
from ziggurat.train.run import reopen_run

SETTINGS: dict[str, Any] = {
    "checkpoint": {"every_updates": 4, "keep_last": 3},
    "validation": {"every_updates": 4, "decode": False},
    "log_every_updates": 1,
    "batch": {"max_tokens": 150, "accumulate": 2},
    "optimiser": {"weight_decay": 0.1, "kind": "adamw"},
    "clip_norm": 1.0,
}
NAMES = ["encoder.1", "decoder.2", "source_embedding", "target_embedding", "output"]
FROZEN = re.compile(r"encoder\.layers\.0\.|decoder\.layers\.1\.|(source_embedding|target_embedding|output)\.")


def freezing(
    folder: Path, names: list[str], updates: int = 8, model: dict[str, Any] | None = None, **training: Any
) -> Experiment:
    """The tiny experiment, two layers in each stack and one matrix for all embeddings, with frozen parts."""
    return tiny_experiment(folder, model, **{**SETTINGS, "stop": {"updates": updates}, "freeze": names, **training})


@pytest.fixture(scope="module")
def start(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is trained further."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run, tiny_experiment(tiny_folder, stop={"updates": 3}), console=QUIET)
    return run


@pytest.fixture(scope="module")
def frozen(tiny_folder: Path, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("frozen") / "run"
    train(run, freezing(tiny_folder, NAMES, start_from=str(start)), console=QUIET)
    return run


def newest(run: Path) -> dict[str, Tensor]:
    return dict(load_checkpoint(checkpoint_folders(run)[-1]).weights)


def test_frozen_weights_stay_as_they_are_and_have_no_moments(frozen: Path, start: Path) -> None:
    before, checkpoint = weights(open_model(start).model), load_checkpoint(checkpoint_folders(frozen)[-1])
    assert checkpoint.weights.keys() == before.keys()
    unchanged = {name for name, tensor in checkpoint.weights.items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if FROZEN.match(name)}
    assert len(unchanged) > 10
    assert {key.rpartition("/")[0] for key in checkpoint.optimiser} == before.keys() - unchanged
    fixed, trained = (sum(t.numel() for n, t in before.items() if (n in unchanged) == kept) for kept in (True, False))
    log = (frozen / "log.txt").read_text(encoding="utf-8")
    assert f"frozen: {', '.join(NAMES)}, {fixed:,} parameters; {trained:,} of them trained" in log


def test_unfrozen_parts_are_trained_as_in_full_training(tiny_folder: Path, start: Path, tmp_path: Path) -> None:
    """The gradients of the first update do not depend on frozen parts; their norm covers only trained parameters."""
    more: dict[str, Any] = {"start_from": str(start), "clip_norm": None}
    for name, names in (("all", []), ("some", NAMES)):
        train(tmp_path / name, freezing(tiny_folder, names, 1, **more), console=QUIET)
    before, whole, some = weights(open_model(start).model), newest(tmp_path / "all"), newest(tmp_path / "some")
    for name, tensor in some.items():
        torch.testing.assert_close(
            tensor, before[name] if FROZEN.match(name) else whole[name], atol=0, rtol=0, msg=name
        )
    moments = load_checkpoint(checkpoint_folders(tmp_path / "all")[-1]).optimiser  # exp_avg = (1 - beta1) gradient
    gradients = {key.rpartition("/")[0]: m.double() / 0.1 for key, m in moments.items() if key.endswith("/exp_avg")}
    norms = [
        sum(g.square().sum() for n, g in gradients.items() if all_of_it or not FROZEN.match(n)) ** 0.5
        for all_of_it in (True, False)
    ]
    for name, norm in zip(("all", "some"), norms, strict=True):
        (record,) = records(tmp_path / name, "train")
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(
    frozen: Path, tiny_folder: Path, start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "parts"
    train(run, freezing(tiny_folder, NAMES, 4, start_from=str(start)), console=QUIET)
    with pytest.raises(ConfigError, match=r"a resumed run cannot change `training\.freeze`"):
        reopen_run(run, ["training.freeze=[]"])
    train(run, reopen_run(run, ["training.stop.updates=8"]), resume=True, console=QUIET)
    assert outcome(run) == outcome(frozen)
    same_records(frozen, run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_same(kind: str, frozen: Path, tiny_folder: Path, start: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"distributed": {"kind": kind}, "threads": 1, "start_from": str(start)}
    document = freezing(tiny_folder, NAMES, **settings).model_dump_json()
    run_together("tests.train.runs", "train_part", 2, str(tmp_path / "run"), document, "")
    found, wanted = newest(tmp_path / "run"), newest(frozen)
    for name, tensor in wanted.items():
        if FROZEN.match(name):
            assert torch.equal(found[name], tensor), name
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": {"encoder": 1, "decoder": "segments"}},
        {"optimiser": {"kind": "muon"}},
        {"optimiser": {"kind": "radam", "moments": "bf16"}},
        {"quantise": "int8"},
    ],
    ids=str,
)
def test_together_with_other_training_options(
    more: dict[str, Any], tiny_folder: Path, start: Path, tmp_path: Path
) -> None:
    names = ["source_embedding", "target_embedding", "output", "encoder.1", "decoder.1"]
    train(tmp_path / "run", freezing(tiny_folder, names, 4, start_from=str(start), **more), console=QUIET)
    before, after = weights(open_model(start).model), newest(tmp_path / "run")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    layers = {".".join(name.split(".")[:3]) for name in changed if ".layers." in name}
    assert layers == {"encoder.layers.1", "decoder.layers.1"}
    assert not {name for name in changed if "embedding" in name or "output." in name}


@pytest.mark.slow
def test_layers_without_gradients_are_not_a_warning(tiny_folder: Path, start: Path, tmp_path: Path) -> None:
    names = ["source_embedding", "target_embedding", "output", "encoder.1", "decoder.1"]
    more: dict[str, Any] = {"diagnostics": {"every_updates": 1, "max_share": 0.9}, "start_from": str(start)}
    train(tmp_path / "run", freezing(tiny_folder, names, **more), console=QUIET)
    depth = read_records(tmp_path / "run")
    assert len(depth) > 3
    for number, record in enumerate(depth):
        encoder: Any = record.values["gradient_norm"]["encoder"]
        assert encoder[0] == 0 < encoder[1]
        assert record.values["r"]["encoder"] is None
        unhealthy = [
            r.measure for r in readings(record, depth[:number], warmup_updates=0, frozen=names) if not r.healthy
        ]
        assert not [m for m in unhealthy if m.startswith(("gradient_ratio", "r.", "finite"))]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["g_top", "random"])
def test_a_grown_model_is_trained_above_its_old_layers(
    strategy: Any, tiny_folder: Path, start: Path, tmp_path: Path
) -> None:
    """As with the 12-layer model of Li et al. 2020, which is stacked on a trained 6-layer model."""
    grow_model(start, tmp_path / "grown", layers=4, strategy=strategy)
    more: dict[str, Any] = {"start_from": str(tmp_path / "grown"), "model": {"encoder": {"layers": 4}}}
    run = tmp_path / "run"
    train(run, freezing(tiny_folder, ["encoder.1-2"], 3, **more), console=QUIET)
    old, after = weights(open_model(start).model), newest(run)
    kept = [name for name in old if name.startswith("encoder.layers.")]
    assert all(torch.equal(after[name], old[name]) for name in kept)
    grown = weights(open_model(tmp_path / "grown").model)
    assert not any(torch.equal(after[n], grown[n]) for n in grown if re.match(r"encoder\.layers\.[23]\..*weight", n))
    grow_model(run, tmp_path / "deeper", layers=8, strategy="interpolate")
    assert load_experiment(tmp_path / "deeper" / "config.yaml").training.freeze == []


@pytest.mark.slow
def test_a_growing_run_keeps_the_layers_that_it_began_with(tiny_folder: Path, start: Path, tmp_path: Path) -> None:
    growth = {"stages": [{"layers": 2, "updates": 2}, {"layers": 3, "updates": 4}]}
    more: dict[str, Any] = {"start_from": str(start), "growth": growth, "model": {"encoder": {"layers": 4}}}
    train(tmp_path / "run", freezing(tiny_folder, ["encoder.1-2"], 6, **more), console=QUIET)
    old, after = weights(open_model(start).model), newest(tmp_path / "run")
    assert all(torch.equal(after[name], old[name]) for name in old if name.startswith("encoder.layers."))
    assert not torch.equal(after["decoder.layers.0.ffn.in_proj.weight"], old["decoder.layers.0.ffn.in_proj.weight"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"freeze": ["encoders.1"]}, r"`encoders\.1` is not a part of a model; did you mean `encoder`"),
        ({"freeze": ["source"]}, r"did you mean `source_embedding`\?"),
        ({"freeze": ["encoder.0-5"]}, r"`encoder\.0-5` is not a part .* where 1 is the lowest"),
        ({"freeze": ["encoder.2-3"]}, "the encoder has 2 layers, no layer 3"),
        ({"freeze": ["output"]}, "`model.embedding.sharing: all` .* name all of them or none"),
        ({"freeze": ["output"], "model": {"embedding": {"sharing": "decoder"}}}, "target_embedding, output share"),
        ({"freeze": ["source_embedding"], "model": {"embedding": {"sharing": "none", "shared_bias": True}}},
         "`model.embedding.shared_bias`"),
        ({"freeze": ["encoder.1-2", "decoder", *NAMES[2:]]}, "nothing would be trained"),
        ({"freeze": ["encoder", "decoder.1-2"], "optimiser": {"kind": "muon"}}, "use `adamw`"),
        ({"freeze": ["decoder", *NAMES[2:]], "model": {"encoder": {"layer_drop": 0.2}}},
         r"set `model\.encoder\.layer_drop: 0`"),
        ({"freeze": ["encoder"], "lora": {"rank": 2}, "start_from": "model"}, "leave `training.freeze` out"),
        ({"freeze": ["encoder.2"], "growth": {"stages": [{"layers": 1, "updates": 2}]}}, "name layers up to 1"),
        ({"freeze": ["encoder"], "growth": {"stages": [{"layers": 1, "updates": 2}]}}, "be frozen and never trained"),
        *(({"freeze": ["encoder.1"], "growth": {"stages": [{"layers": 1, "updates": 2}], "copy_strategy": strategy}},
           "renumbers") for strategy in ("interpolate", "g_interpolate")),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(changes: dict[str, Any], reason: str, tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        freezing(tiny_folder, changes.pop("freeze"), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"freeze": ["encoder", "decoder"]},
        {"freeze": ["source_embedding"], "model": {"embedding": {"sharing": "decoder"}}},
        {"freeze": ["output"], "model": {"embedding": {"sharing": "none"}}},
        {"freeze": ["encoder.1", *NAMES[2:]], "model": {"encoder": {"layer_drop": 0.2}}},
        {"freeze": ["decoder.2"], "growth": {"stages": [{"layers": 1, "updates": 2}], "copy_strategy": "interpolate"}},
    ],
)
def test_parts_that_can_be_frozen(changes: dict[str, Any], tiny_folder: Path) -> None:
    names = changes.pop("freeze")
    assert freezing(tiny_folder, names, **changes).training.freeze == names


def test_frozen_initial_weights_get_a_notice(tiny_folder: Path) -> None:
    cases: tuple[tuple[dict[str, Any], int], ...] = (({}, 1), ({"start_from": "model"}, 0))
    for more, count in cases:
        found = notices(freezing(tiny_folder, ["encoder.1"], **more))
        assert [problem.key for problem in found] == ["training.freeze"] * count


def test_a_model_without_some_layers_freezes_none(tiny_folder: Path) -> None:
    experiment = freezing(tiny_folder, ["encoder.2"])
    smaller = experiment.model.model_copy(update={"encoder": experiment.model.encoder.model_copy(update={"layers": 1})})
    pruned = pruned_experiment(experiment, smaller, LeftOut.parse("encoder.1"))
    assert Experiment.model_validate(pruned.model_dump()).training.freeze == []
