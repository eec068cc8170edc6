"""Layers tied across depth: the repeated function, what is shared, and how they are grown, pruned and folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.composition import refusal
from tests.model.sentences import MASK, SOURCE, TARGET, V, built
from tests.small import moved
from ziggurat.config.depth import CopyStrategy, GrowthConfig, LeftOut, growth_refused
from ziggurat.config.freezing import Frozen, freeze_refused
from ziggurat.config.model import StackConfig
from ziggurat.config.train import LoraConfig, TrainingConfig
from ziggurat.exchange.plain import fold
from ziggurat.model.build import build_model, count_parameters, model_slots
from ziggurat.model.depth import at_depth, deepening, grow_moments, grow_weights, prune, untied
from ziggurat.model.low_rank import adapt, merged
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import check_fit, load_weights, weights, write_tensors
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.train.diagnosis.gradients import parts_of

LOOP: dict[str, Any] = {"encoder.layers": 6, "encoder.tied_layers": [1, 2, 3], "decoder.tied_layers": [7, 7, 8]}


def model_of(**choices: Any) -> Seq2Seq:
    named = {key.replace(".", "__"): value for key, value in {**LOOP, **choices}.items()}
    return moved(built(**named), 0.1)


def output(model: Seq2Seq) -> Tensor:
    return model(SOURCE, MASK, TARGET)


def written_out(model: Seq2Seq, choices: dict[str, Any]) -> Seq2Seq:
    """Return the model with the same weights but without ties: the reference, in which equal layers are repeated."""
    config, tensors = untied(small_model({**LOOP, **choices}), weights(model))
    plain = build_model(config, V, V).double().eval()
    load_weights(plain, tensors, "untied")
    return plain


@pytest.mark.parametrize(
    "choices",
    [
        {"residual": "pre"},
        {"residual": "admin", "init.kind": "admin", "encoder.history": "dlcl"},
        {"residual": "hyper", "wiring.dynamic": True},
        {"residual": "ln_scaling", "attention.value_residual": "half", "memory": "transparent"},
    ],
    ids=str,
)
def test_tied_layers_are_one_function_with_the_gradients_of_all_uses(choices: dict[str, Any]) -> None:
    """y_l = F(y_(l-1), theta_g(l)), and d loss / d theta is the sum over all l with that g(l)."""
    tied = model_of(**choices)
    plain = written_out(tied, choices)
    torch.testing.assert_close(output(tied), output(plain), atol=1e-12, rtol=0)
    for model in (tied, plain):
        output(model).square().sum().backward()
    of_plain = {name: p.grad for name, p in plain.named_parameters()}
    groups = {"encoder": [0, 1, 2, 0, 1, 2], "decoder": [0, 0, 2]}
    for name, parameter in tied.named_parameters():
        stack, kind, number, *rest = [*name.split("."), "", "", ""]
        expected = of_plain[name]
        inner = ".".join(part for part in rest if part)
        own = "_residual." in inner and inner.count(".") == 1
        if kind == "layers" and not own:
            uses = [layer for layer, owner in enumerate(groups[stack]) if owner == int(number)]
            expected = sum(of_plain[f"{stack}.layers.{layer}.{inner}"] for layer in uses)
        torch.testing.assert_close(parameter.grad, expected, atol=1e-10, rtol=1e-9, msg=name)


def test_the_orders_of_takase_and_kiyono() -> None:
    """Figure 1 of their paper, for 6 layers of 3: sequence, cycle, cycle (rev), as in their code; and one for all."""
    orders = {
        (1, 1, 2, 2, 3, 3): [0, 0, 2, 2, 4, 4],
        (1, 2, 3): [0, 1, 2, 0, 1, 2],
        (1, 2, 3, 3, 2, 1): [0, 1, 2, 2, 1, 0],
        (1,): [0] * 6,
        (): list(range(6)),
    }
    for labels, owners in orders.items():
        assert StackConfig(layers=6, tied_layers=list(labels)).owners() == owners


@pytest.mark.parametrize(
    "choices",
    [
        {"residual": "keel"},
        {"attention.value_residual": "learned"},
        {"attention.value_residual": "single"},
        {"encoder.ranges": [{"layers": 1, "residual": "post"}]},
    ],
    ids=str,
)
def test_layers_that_are_built_differently_are_not_tied(choices: dict[str, Any]) -> None:
    reason = refusal({**choices, "encoder.tied_layers": [1]})
    assert reason is not None
    assert reason.problems[0].key == "encoder.tied_layers"
    assert refusal({**choices, "encoder.tied_layers": [1, 2, 2]}) is None


def test_parameters_count_once_and_belong_to_the_lowest_layer() -> None:
    tied, loop = model_of(residual="pre"), model_of(**{"encoder.layers": 3, "decoder.layers": 3})
    assert count_parameters(tied) == count_parameters(loop)
    slots = [slot for slot in model_slots(tied) if slot.name.startswith("encoder.layers.")]
    assert {slot.layer for slot in slots} == {1, 2, 3}, "which depth-scaled initialisation goes by"
    groups = [set(group) for group in parts_of(tied)["encoder"]]
    assert [len(group) for group in groups] == [len(groups[0])] * 6
    assert groups[3] == groups[0]
    assert not groups[0] & groups[1]
    omega = model_of(residual="admin", **{"init.kind": "admin"})
    assert len([n for n, _ in omega.named_parameters() if n.endswith(".skip")]) == 2 * 6 + 3 * 3, (
        "each layer has its own"
    )


def grow(old: int, new: int, strategy: CopyStrategy, labels: list[int]) -> tuple[Seq2Seq, Seq2Seq, Any]:
    deep = small_model({"residual": "layer_scale", "encoder.layers": new, "encoder.tied_layers": labels})
    before = at_depth(deep, old)
    shallow = moved(build_model(before, V, V, seed=1), 0.1)
    grown, plan = build_model(deep, V, V, seed=2), deepening(strategy, before, deep)
    grow_weights(grown, weights(shallow), plan)
    return shallow, grown, plan


def test_a_loop_grows_by_whole_rounds_and_groups_by_whole_groups() -> None:
    shallow, grown, plan = grow(4, 6, "g_top", [1, 2])
    assert plan.encoder.sources == [0, 1, 2, 3, 2, 3]
    for number, source in enumerate(plan.encoder.sources):
        ours, theirs = (m.get_submodule(f"encoder.layers.{n}") for m, n in ((grown, number), (shallow, source)))
        for (name, values), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(values, its), name
    state = {f"{name}/exp_avg": p.detach() for name, p in shallow.named_parameters()}
    moments = grow_moments(dict(grown.named_parameters()), state, plan)
    key = "encoder.layers.4.ffn_residual.branch"
    assert torch.equal(moments[f"{key}/exp_avg"], shallow.get_parameter("encoder.layers.2.ffn_residual.branch"))
    grow(3, 6, "interpolate", [1])
    with pytest.raises(ConfigError) as refused:
        grow(4, 7, "g_top", [1, 2])
    assert refused.value.problems[0].key == "model.encoder.tied_layers"
    growth = GrowthConfig.model_validate({"stages": [{"layers": 3, "updates": 1}], "copy_strategy": "random"})
    [problem] = growth_refused(growth, small_model({"encoder.layers": 6, "encoder.tied_layers": [1]}))
    assert problem.key == "model.encoder.tied_layers"


def test_a_round_of_a_loop_is_left_out() -> None:
    tied = model_of(residual="layer_scale")
    config, tensors = prune(
        small_model({**LOOP, "residual": "layer_scale"}), weights(tied), LeftOut.parse("encoder.1-3")
    )
    assert config.encoder.owners() == [0, 1, 2]
    pruned = build_model(config, V, V).double().eval()
    load_weights(pruned, tensors, "pruned")
    tied.encoder.layers = tied.encoder.layers[3:]  # type: ignore[assignment, index]
    torch.testing.assert_close(output(pruned), output(tied), atol=0, rtol=0)


def test_folding_unties_layers() -> None:
    config = small_model({**LOOP, "residual": "layer_scale", "encoder.layers": 6})
    tied = model_of(residual="layer_scale")
    plain_config, tensors = fold(config, weights(tied))
    assert plain_config.encoder.tied_layers == plain_config.decoder.tied_layers == []
    plain = build_model(plain_config, V, V).double().eval()
    load_weights(plain, tensors, "folded")
    torch.testing.assert_close(output(plain), output(tied), atol=1e-12, rtol=0)


@pytest.mark.cpu("changes the type of a model half of which is frozen: the pretend accelerator swaps tensors")
def test_low_rank_updates_are_tied_too() -> None:
    model = model_of(residual="pre")
    base = {name: values.clone() for name, values in weights(model).items()}
    before = output(model)
    config = LoraConfig(rank=2, alpha=3.0, maps=["query", "feed_forward"])
    adapt(model, config, seed=1)
    model.double()
    torch.testing.assert_close(output(model), before)
    updates = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in updates if name.startswith(tuple(f"encoder.layers.{n}." for n in (3, 4, 5)))]
    with torch.no_grad():
        for parameter in updates.values():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    whole = model_of(residual="pre")
    load_weights(whole, merged(base, updates, 1.5, "here"), "merged")
    torch.testing.assert_close(output(model), output(whole), atol=1e-9, rtol=1e-9)


def test_only_whole_groups_are_frozen() -> None:
    model = small_model(LOOP)
    training = TrainingConfig(freeze=["encoder.1-2", "encoder.4-5"])
    assert freeze_refused(training, model) == []
    assert Frozen.parse(training.freeze).has("encoder", 5)
    [problem] = freeze_refused(TrainingConfig(freeze=["encoder.1-2"]), model)
    assert problem.key == "model.encoder.tied_layers"


def test_a_file_of_fewer_groups_or_layers_does_not_fit(tmp_path: Path) -> None:
    config, file = small_model({**LOOP, "residual": "layer_scale"}), tmp_path / "model.safetensors"
    write_tensors(file, weights(model_of(residual="layer_scale")))
    check_fit(config, (V, V), file)
    with pytest.raises(CheckpointError, match="says 4"):
        check_fit(at_depth(config, 4), (V, V), file)
    other = small_model({**LOOP, "residual": "layer_scale", "encoder.tied_layers": []})
    with pytest.raises(CheckpointError, match="missing"):
        check_fit(other, (V, V), file)
