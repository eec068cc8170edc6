from __future__ import annotations

import pytest
import torch

from ziggurat.config import ModelConfig
from ziggurat.config.train import OptimiserConfig
from ziggurat.errors import CheckpointError
from ziggurat.models.build import build_model, model_slots
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.optim import Optimiser

KINDS = ["adam", "adamw", "radam", "muon"]


def tiny(seed: int = 1) -> Seq2Seq:
    config = {"d_model": 8, "d_ff": 12, "heads": 2, "encoder": {"layers": 1}, "decoder": {"layers": 1}}
    config["embedding"] = {"positions": "learned", "sharing": "none", "max_positions": 9}  # type: ignore[assignment]
    return build_model(ModelConfig.model_validate(config), 11, 13, seed=seed)


def optimiser_of(model: Seq2Seq, kind: str, **more: float) -> Optimiser:
    return Optimiser(model, model_slots(model), OptimiserConfig.model_validate({"kind": kind, **more}))


def fill_gradients(model: Seq2Seq, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_owned_once_and_moves(kind: str) -> None:
    model = tiny()
    optimiser = optimiser_of(model, kind)
    assert sorted(map(id, optimiser.parameters)) == sorted(map(id, model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    optimiser.set_rate(0.01)
    for seed in range(7):  # radam only adapts from its sixth step on
        fill_gradients(model, seed)
        optimiser.step()
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        assert bool((parameter != old).any()), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_bit_for_bit(kind: str) -> None:
    straight, stopped = tiny(), tiny()
    a, b = optimiser_of(straight, kind), optimiser_of(stopped, kind)
    for optimiser in (a, b):
        optimiser.set_rate(0.01)
    for seed in range(3):
        for model, optimiser in ((straight, a), (stopped, b)):
            fill_gradients(model, seed)
            optimiser.step()
    resumed = tiny(seed=2)
    resumed.load_state_dict(stopped.state_dict())
    c = optimiser_of(resumed, kind)
    c.load_state({name: tensor.clone() for name, tensor in b.state().items()})
    c.set_rate(0.01)
    for seed in range(3, 6):
        for model, optimiser in ((straight, a), (resumed, c)):
            fill_gradients(model, seed)
            optimiser.step()
    for x, y in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y)


def test_adam_equals_the_published_update() -> None:
    model = tiny()
    optimiser = optimiser_of(model, "adam")
    optimiser.set_rate(0.1)
    parameter = model.encoder.layers[0].get_parameter("ffn.in_proj.weight")
    value, m, v = parameter.detach().double().clone(), 0.0, 0.0
    for t in range(1, 4):
        fill_gradients(model, t)
        assert parameter.grad is not None
        g = parameter.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        value = value - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + 1e-9)
        optimiser.step()
    torch.testing.assert_close(parameter.detach().double(), value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["adamw", "radam", "muon"])
def test_decay_shrinks_matrices_of_the_layers_only(kind: str) -> None:
    model = tiny()
    optimiser = optimiser_of(model, kind, weight_decay=0.5)
    optimiser.set_rate(0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in model.named_parameters():
        in_layer_matrix = parameter.dim() == 2 and ".layers." in name
        expected = before[name] * 0.95 if in_layer_matrix else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_a_state_of_another_model_is_refused() -> None:
    optimiser = optimiser_of(tiny(), "adam")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        optimiser.load_state({"nothing/exp_avg": torch.zeros(1)})
