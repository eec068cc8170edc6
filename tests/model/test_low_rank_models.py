"""Low-rank adaptation of whole models: every kind starts unchanged, and merged weights compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composition import covering, model
from tests.small import moved, small_config
from tests.test_composition import VOCABULARY, padded_batch, stepwise
from ziggurat.config import ModelConfig
from ziggurat.config.train import LoraConfig
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.low_rank import adapt, is_update, maps_of, merged
from ziggurat.model.roles import Role
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, weights
from ziggurat.system.errors import CheckpointError, ConfigError

LORA = LoraConfig(rank=3, alpha=4.5)
SCALE = 1.5
COVERING = list(covering(1))
QUICK = 5
"""QUICK is how many of the compositions that cover every value are in the quick suite."""
RNMT = {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}


def updates_of(network: Seq2Seq) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights(network).items() if is_update(name)}


@torch.no_grad()
def logits(network: Seq2Seq) -> Tensor:
    batch = padded_batch()
    return network.logits(network.decode(batch.target_in, network.encode(batch.source, batch.source_mask)))


def check(config: ModelConfig, *, steps: bool) -> None:
    plain = moved(build_model(config, VOCABULARY, VOCABULARY, seed=3).double().eval(), 0.1)
    adapted = build_model(config, VOCABULARY, VOCABULARY, seed=3)
    assert config.family == "rnmt" or {"query", "value"} <= set(maps_of(adapted))  # the default
    adapt(adapted, LORA.model_copy(update={"maps": maps_of(adapted)}), seed=1)
    adapted = adapted.double().eval()
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in adapted.named_parameters() if not is_update(name)} == names
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained == set(updates_of(adapted))
    assert all(role is Role.LOW_RANK for name, role in parameter_roles(adapted).items() if name in trained)
    load_weights(adapted, {**weights(plain), **updates_of(adapted)}, "both")
    before = logits(plain)
    # Not to the last bit, because on some processors the rounding of an LSTM's products depends on memory addresses.
    torch.testing.assert_close(logits(adapted), before, rtol=0, atol=1e-14)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in updates_of(adapted).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    whole = build_model(config, VOCABULARY, VOCABULARY).double().eval()
    load_weights(whole, merged(weights(plain), updates_of(adapted), SCALE, "both"), "merged")
    after = logits(adapted)
    size = float(after.abs().max())
    assert float((after - before).abs().max()) > 1e-2 * size
    torch.testing.assert_close(logits(whole), after, atol=1e-13 * size, rtol=0)
    if steps:
        found, wanted = stepwise(adapted, padded_batch())
        done = ~found.isnan()
        torch.testing.assert_close(found[done], wanted[done], atol=1e-10 * size, rtol=0)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(len(COVERING))]
)
def test_every_kind_starts_unchanged_and_merges_up_to_rounding(number: int) -> None:
    check(model(COVERING[number]), steps=True)


@pytest.mark.parametrize(
    "choices",
    [
        RNMT,
        {"decoder": {"attention": "merged"}, "attention": {"share_value": True}},
        {"decoder": {"history": "mudd"}, "encoder": {"history": "mudd"}},
        {"residual": "fixup", "decoder": {"attention": "merged"}},
        {"residual": "sub_ln", "activation": "swiglu"},
    ],
)
def test_maps_that_are_used_in_other_ways(choices: dict[str, Any]) -> None:
    """Such maps are shared by two attentions, used in parts, with shifts, after a norm, or with a gate."""
    check(small_config(2, 2, **choices), steps=False)


def test_roles_choose_the_parts_of_fused_maps() -> None:
    network = build_model(small_config(1, 1), VOCABULARY, VOCABULARY)
    adapt(network, LoraConfig(rank=2, maps=["query", "value"]), seed=1)
    found = {name: tuple(tensor.shape) for name, tensor in updates_of(network).items() if name.startswith("decoder")}
    layer = "decoder.layers.0"
    wanted = {
        f"{layer}.self_attn.qkv_proj.low_rank.0": 8,
        f"{layer}.self_attn.qkv_proj.low_rank.2": 8,
        f"{layer}.cross_attn.q_proj.low_rank.0": 8,
        f"{layer}.cross_attn.kv_proj.low_rank.1": 8,
    }
    assert found == {f"{k}.down": (2, n) for k, n in wanted.items()} | {f"{k}.up": (n, 2) for k, n in wanted.items()}


def test_maps_that_the_model_lacks_are_refused_by_name() -> None:
    message = r"maps: \[query, gate\]`: this model has no `gate`; it has query, key, value, output, feed_forward$"
    with pytest.raises(ConfigError, match=message):
        adapt(build_model(small_config(1, 1), VOCABULARY, VOCABULARY), LoraConfig(maps=["query", "gate"]))


def test_updates_that_do_not_fit_are_refused() -> None:
    network = build_model(small_config(1, 1), VOCABULARY, VOCABULARY)
    base = {name: tensor.clone() for name, tensor in weights(network).items()}
    adapt(network, LORA, seed=1)
    updates = updates_of(network)
    name = "encoder.layers.0.self_attn.qkv_proj.low_rank"
    for changed in (
        {f"{name}.0.down": torch.zeros(3, 7)},
        {f"{name}.0.down": torch.zeros(3)},
        {f"{name}.3.down": updates[f"{name}.0.down"], f"{name}.3.up": updates[f"{name}.0.up"]},
        {f"{name}.1.up": torch.zeros(8, 4)},
    ):
        with pytest.raises(
            CheckpointError, match=r"x: the update of part \d does not fit encoder\.layers\.0\.self_attn"
        ):
            merged(base, {**updates, **changed}, SCALE, "x")
    alone = {key: tensor for key, tensor in updates.items() if key != f"{name}.0.up"}
    with pytest.raises(CheckpointError, match="does not fit"):
        merged(base, alone, SCALE, "x")
    with pytest.raises(CheckpointError, match="belongs to no map"):
        merged(base, {"encoder.layers.7.ffn.in_proj.low_rank.0.up": torch.zeros(1)}, SCALE, "x")
    assert torch.equal(base["encoder.layers.0.self_attn.qkv_proj.weight"], weights(network)[name[:-9] + ".weight"])
