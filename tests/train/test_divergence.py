"""Spikes, and naming the first layer and tensor with non-finite values."""

from __future__ import annotations

import math
import random as stdlib_random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.composition import covering, model
from tests.small import moved, small_config
from tests.train.batches import batches
from ziggurat.config.lifecycle import DivergenceConfig
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import LossConfig
from ziggurat.model.build import build_model, compile_layers
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.recovery import all_finite, find_fault, highest_nll, remember_loss


def small() -> Seq2Seq:
    return moved(build_model(small_config(3, 3, dropout={"residual": 0.2}), 20, 20), 0.05)


def fault(model: Seq2Seq, precision: str = "fp32", seed: int = 0) -> str:
    update = [replace(batch, seed=seed + number) for number, batch in enumerate(batches([3, 4]))]
    return find_fault(model, update, LossConfig(), precision=precision).place


def spoil(model: Seq2Seq, name: str, value: float) -> None:
    """Set one element of a module's output to `value`."""

    def hook(_module: object, _inputs: object, output: Tensor) -> Tensor:
        spoilt = output.clone()
        spoilt[0, 0, 0] = value
        return spoilt

    model.get_submodule(name).register_forward_hook(hook)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf")])
@pytest.mark.parametrize("name", ["decoder.layers.1.ffn.in_proj", "encoder.layers.0.self_attn.qkv_proj"])
def test_the_module_that_first_returns_it_is_named(name: str, value: float, kind: str, precision: str) -> None:
    model = small()
    spoil(model, name, value)
    assert fault(model, precision=precision) == f"{name}: output is {kind} in the forward pass"


def test_values_arising_between_two_modules_are_found_at_the_input_of_the_second() -> None:
    """Queries and keys are finite, their products are not."""
    model = small()
    with torch.no_grad():
        model.get_parameter("encoder.layers.2.self_attn.qkv_proj.weight").mul_(1e25)
    assert fault(model) == "encoder.layers.2.self_attn.dropout: input is NaN in the forward pass"


def test_a_non_finite_parameter_is_reported_first() -> None:
    model = small()
    spoil(model, "encoder.layers.0.ffn.in_proj", math.nan)
    with torch.no_grad():
        model.get_parameter("decoder.layers.2.ffn.out_proj.bias")[1] = math.inf
    assert fault(model) == "parameter decoder.layers.2.ffn.out_proj.bias is inf"


def test_the_named_gradient_is_the_first_that_fails() -> None:
    """Everything below inherits it, so the last layer in module order is the culprit."""
    model = small()

    def hook(_module: object, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.inf)

    model.get_submodule("encoder.layers.1.ffn.out_proj").register_forward_hook(hook)
    found = fault(model)
    assert found.startswith("gradient of encoder.layers.1.ffn.out_proj.")
    assert found.endswith((" is inf", " is NaN"))


def test_a_single_gradient_that_overflows_is_named() -> None:
    model = small()
    name = "encoder.layers.0.self_attn.qkv_proj.weight"
    model.get_parameter(name).register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    assert fault(model) == f"gradient of {name} is inf"


def test_a_loss_that_overflows_after_finite_states_is_reported() -> None:
    separate = small_config(1, 1, embedding={"sharing": "none"})
    model = build_model(separate, 20, 20)
    with torch.no_grad():
        model.output.weight.mul_(1e38)
    assert fault(model).startswith("the loss is ")


def test_a_spike_or_an_overflowing_norm_names_the_largest_gradient() -> None:
    model = small()
    name = "decoder.layers.0.ffn.out_proj.weight"
    model.get_parameter(name).register_hook(lambda gradient: torch.full_like(gradient, 1e25))
    assert f"the largest gradient is that of {name} (norm" in fault(model)
    assert "100 % of the sum of squares" in fault(model)


def test_the_dropout_masks_are_those_of_the_update_and_nothing_is_left_behind() -> None:
    """If only half of the batch seeds give NaN, it is found for exactly those."""
    model = small().train()

    def hook(_module: object, _inputs: object, output: Tensor) -> Tensor | None:
        return output * math.nan if float(torch.rand(())) < 0.5 else None

    model.get_submodule("encoder.layers.1.ffn.in_proj").register_forward_hook(hook)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    found: dict[bool, int] = {True: 0, False: 0}
    for seed in range(8):
        hidden = []
        for number, b in enumerate(batches([3, 4])):
            torch.manual_seed(seed + number)
            hidden.append(model(b.source, b.source_mask, b.target_in))
        nan = not all(torch.isfinite(h).all() for h in hidden)
        message = fault(model, seed=seed)
        assert nan == message.startswith("encoder.layers.1.ffn.in_proj: output is NaN")
        found[nan] += 1
    assert min(found.values()) > 0
    assert all(p.grad is None for p in model.parameters())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


RNMT = small_config(2, 2, family="rnmt", embedding={"positions": "none", "sharing": "none"})


@pytest.mark.parametrize("config", [RNMT, *map(model, covering(1))])
def test_a_healthy_model_shows_no_fault(config: ModelConfig) -> None:
    """This includes any part of the model: a bias of -inf does not count as a fault."""
    assert fault(build_model(config, 20, 20)).startswith("run again, every state and gradient is finite")


@pytest.mark.slow
def test_inner_modules_of_compiled_layers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are marked but not compiled, because the second run works without the compiler."""
    model = small()
    compile_layers(model)
    spoil(model, "decoder.layers.1.ffn.in_proj", math.nan)
    assert fault(model) == "decoder.layers.1.ffn.in_proj: output is NaN in the forward pass"


def test_a_spike_is_measured_by_the_median_of_the_window() -> None:
    config = DivergenceConfig(loss_spike=2.0, window=5)
    generator = stdlib_random.Random(0)
    losses: list[float] = []
    seen: list[float] = []
    for number in range(12):
        expected = 2.0 * float(np.median(seen[-5:])) if number >= 5 else math.inf
        assert highest_nll(losses, config) == pytest.approx(expected)
        seen.append(generator.uniform(1.0, 9.0))
        losses = remember_loss(losses, seen[-1], config)
        assert losses == seen[-5:]
    assert remember_loss([], 1.0, DivergenceConfig()) == []
    assert highest_nll([1.0] * 200, DivergenceConfig()) == math.inf


def test_all_finite_looks_at_every_tensor() -> None:
    fine = {"a": torch.ones(2), "b": torch.tensor(3)}
    assert all_finite(fine)
    assert not all_finite({**fine, "c": torch.tensor([0.0, -math.inf])})
