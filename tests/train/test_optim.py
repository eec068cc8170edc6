from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.small import small_config
from ziggurat.config.train import OptimiserConfig
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import CheckpointError
from ziggurat.train.optim import Optimiser

KINDS = ["adam", "adamw", "radam", "muon"]


def tiny(seed: int = 1, **more: Any) -> Seq2Seq:
    embedding = {"positions": "learned", "sharing": "none", "max_positions": 9}
    return build_model(small_config(1, 1, **{"embedding": embedding, **more}), 11, 13, seed=seed)


def optimiser_of(model: Seq2Seq, kind: str, **more: Any) -> Optimiser:
    return Optimiser(model, parameter_roles(model), OptimiserConfig.model_validate({"kind": kind, **more}))


def fill_gradients(model: Seq2Seq, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_owned_once_and_moves(kind: str) -> None:
    model = tiny()
    optimiser = optimiser_of(model, kind)
    assert sorted(map(id, optimiser.parameters)) == sorted(map(id, model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    optimiser.set_rate(0.01)
    for seed in range(7):  # radam adapts only from its sixth step on
        fill_gradients(model, seed)
        optimiser.step()
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        assert bool((parameter != old).any()), name


@pytest.mark.parametrize("unused", [None, "decoder.layers.0.ffn.out_proj.weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_bit_for_bit(kind: str, unused: str | None) -> None:
    """This holds even if LayerDrop left a parameter out of every update before the state was saved."""
    straight, stopped = tiny(), tiny()
    a, b = optimiser_of(straight, kind), optimiser_of(stopped, kind)
    for optimiser in (a, b):
        optimiser.set_rate(0.01)
    for seed in range(3):
        for model, optimiser in ((straight, a), (stopped, b)):
            fill_gradients(model, seed)
            if unused is not None:
                model.get_parameter(unused).grad = None
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


def radam_by_the_papers_formulas(
    value: Tensor, gradients: list[Tensor], rate: float, *, beta2: float, decay: float, rectified_only: bool
) -> list[Tensor]:
    """Values after each update, in float64 (Liu et al. 2020a, algorithm 2, with epsilon 1e-9)."""
    beta1, m, v = 0.9, torch.zeros_like(value), torch.zeros_like(value)
    value, values = value.clone(), []
    rho_inf = 2 / (1 - beta2) - 1
    for t, g in enumerate(gradients, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
        if rho > 5:
            r = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
            step = r * (1 - beta2**t) ** 0.5 / (1 - beta1**t) * m / (v.sqrt() + 1e-9)
        elif rectified_only:
            step = torch.zeros_like(m)
        else:
            step = m / (1 - beta1**t)
        value = (1 - rate * decay) * value - rate * step
        values.append(value.clone())
    return values


@pytest.mark.parametrize("rectified_only", [False, True])
@pytest.mark.parametrize(("beta2", "first"), [(0.98, 6), (0.999, 6), (0.7, 10)])
def test_radam_equals_the_published_update(beta2: float, first: int, rectified_only: bool) -> None:
    """With `rectified_only` only weight decay acts while the rate's variance is intractable: t < 6 for beta2 0.98."""
    model = tiny().double()
    optimiser = optimiser_of(model, "radam", betas=[0.9, beta2], weight_decay=0.1, rectified_only=rectified_only)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameter, bias = (model.get_parameter(f"encoder.layers.0.ffn.in_proj.{kind}") for kind in ("weight", "bias"))
    gradients: list[tuple[Tensor, Tensor]] = []
    found: list[tuple[Tensor, Tensor]] = []
    for t in range(1, 13):
        fill_gradients(model, t)
        assert parameter.grad is not None
        assert bias.grad is not None
        gradients.append((parameter.grad.clone(), bias.grad.clone()))
        optimiser.set_rate(0.01)
        optimiser.step()
        found.append((parameter.detach().clone(), bias.detach().clone()))
        if rectified_only:
            undecayed = {name for name, p in model.named_parameters() if p.dim() < 2 or ".layers." not in name}
            moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            assert bool(moved & undecayed) == (t >= first)
            assert moved - undecayed == set(before) - undecayed
    options: dict[str, Any] = {"beta2": beta2, "rectified_only": rectified_only}
    for which, decay, name in ((0, 0.1, "weight"), (1, 0.0, "bias")):
        start = before[f"encoder.layers.0.ffn.in_proj.{name}"]
        expected = radam_by_the_papers_formulas(start, [g[which] for g in gradients], 0.01, decay=decay, **options)
        for t, values in enumerate(expected):
            torch.testing.assert_close(found[t][which], values, atol=1e-10, rtol=0)


def test_radam_resumed_before_its_first_move_still_waits() -> None:
    straight, stopped = tiny(), tiny()
    a, b = (optimiser_of(model, "radam", rectified_only=True) for model in (straight, stopped))
    for t in range(1, 9):
        if t == 4:
            saved = {name: tensor.clone() for name, tensor in b.state().items()}
            b = optimiser_of(stopped, "radam", rectified_only=True)
            b.load_state(saved)
        for model, optimiser in ((straight, a), (stopped, b)):
            fill_gradients(model, t)
            optimiser.set_rate(0.01)
            optimiser.step()
        for x, y in zip(straight.parameters(), stopped.parameters(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_rectified_only_is_of_radam(kind: str) -> None:
    with pytest.raises(ValueError, match="option of `kind: radam`"):
        OptimiserConfig.model_validate({"kind": kind, "rectified_only": True})


def test_a_beta_that_would_prevent_every_update_is_refused() -> None:
    with pytest.raises(ValueError, match="must exceed 2/3"):
        OptimiserConfig.model_validate({"kind": "radam", "rectified_only": True, "betas": [0.9, 0.6]})


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimiser_omits_fixed_parameters(kind: str) -> None:
    """A fixed omega is saved with the model but is no parameter of the optimiser, so it does not decay."""
    model = tiny(residual="admin", wiring={"omega_trainable": False})
    optimiser = optimiser_of(model, kind, weight_decay=0.5)
    fixed = {name: p for name, p in model.named_parameters() if name.endswith(".skip")}
    assert len(fixed) == 5
    assert not {id(p) for p in fixed.values()} & {id(p) for p in optimiser.parameters}
    assert len(optimiser.parameters) == len(list(model.parameters())) - 5
    optimiser.set_rate(0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    assert all(bool((p == 1).all()) for p in fixed.values())
    resumed = optimiser_of(model, kind, weight_decay=0.5)
    resumed.load_state(optimiser.state())


@pytest.mark.parametrize("kind", KINDS)
def test_trained_omega_relative_positions_and_the_input_vector_do_not_decay(kind: str) -> None:
    more: dict[str, Any] = {"residual": "admin", "encoder": {"layers": 1, "attention": "relative"}}
    more["embedding"] = {"sharing": "none", "shared_bias": True}
    model = tiny(**more)
    optimiser = optimiser_of(model, kind, weight_decay=0.5)
    decayed = {id(p) for part in optimiser.parts for g in part.param_groups if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert names
    assert all(name.endswith("proj.weight") for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimiser_accepts_the_vectors_of_additive_attention(kind: str) -> None:
    config = small_config(1, 1, family="rnmt", embedding={"sharing": "none", "positions": "none"})
    model = build_model(config, 11, 13)
    optimiser = optimiser_of(model, kind)
    assert sorted(map(id, optimiser.parameters)) == sorted(map(id, model.parameters()))
    fill_gradients(model, 1)
    optimiser.step()


def test_a_state_of_another_model_is_refused() -> None:
    optimiser = optimiser_of(tiny(), "adam")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        optimiser.load_state({"nothing/exp_avg": torch.zeros(1)})
