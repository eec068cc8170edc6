"""Moments in bf16: unbiased rounding, updates as in fp32, half the memory, bit-exact resumption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, final_bytes
from tests.train.test_optim import fill_gradients, optimiser_of, tiny
from ziggurat.config.train import OptimiserConfig
from ziggurat.data.corpus import Store
from ziggurat.model import seq2seq
from ziggurat.model.build import parameter_roles
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.transformer import Encoder
from ziggurat.train import loop, optim, setup
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.learner import Learner
from ziggurat.train.loop import train
from ziggurat.train.optim import NarrowAdam, Optimiser, rounded

KINDS = ["adam", "adamw", "radam"]


def narrow(parameters: dict[str, nn.Parameter], kind: str, seed: int = 1, **more: Any) -> NarrowAdam:
    config = OptimiserConfig.model_validate({"kind": kind, "moments": "bf16", **more})
    groups = [{"params": list(parameters.values()), "weight_decay": config.weight_decay}]
    return NarrowAdam(groups, {p: name for name, p in parameters.items()}, config, seed)


def by_the_formulas(
    kind: str, value: Tensor, gradients: list[Tensor], rate: float, betas: tuple[float, float], decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and moments after the last update, in float64 (Kingma and Ba 2015; Loshchilov and Hutter 2019; Liu et
    al. 2020a), with epsilon 1e-9.
    """
    (beta1, beta2), m, v = betas, torch.zeros_like(value), torch.zeros_like(value)
    rho_inf = 2 / (1 - beta2) - 1
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + decay * value if kind == "adam" else gradient
        if kind != "adam":
            value = value - rate * decay * value
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
        step = m_hat / (v_hat.sqrt() + 1e-9)
        if kind == "radam" and rho > 5:
            step = step * ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        elif kind == "radam":
            step = m_hat
        value = value - rate * step
    return value, m, v


def test_rounding_is_unbiased_over_all_noise() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    for number in (1.0001, -3.14159, 0.1, 255.999, 1e-40, 6.5e-12, -1e30, 1.9999999):
        x = torch.tensor(number)
        found = rounded(x.expand(every.shape).contiguous(), every)
        assert found.dtype == torch.bfloat16
        neighbours = found.double().unique()
        assert len(neighbours) <= 2
        assert float(found.double().mean()) == float(x.double())  # dyadic numbers: the mean is exact


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 2.0**-133])
def test_numbers_representable_in_bf16_are_unchanged(number: float) -> None:
    noise = torch.tensor([0, 1, 32768, 65535], dtype=torch.int32)
    found = rounded(torch.full((4,), number), noise)
    assert torch.equal(found, torch.full((4,), number, dtype=torch.bfloat16))
    assert bool((found.float().signbit() == (math.copysign(1, number) < 0)).all())


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_update_equals_fp64_up_to_the_rounding_of_moments(kind: str, decay: float) -> None:
    """Moments are rounded after use, so the first update is not affected, and exact to fp32."""
    start = torch.randn(300, generator=torch.Generator().manual_seed(1))
    gradient = torch.randn(300, generator=torch.Generator().manual_seed(2))
    parameter = nn.Parameter(start.clone())
    optimiser = narrow({"p": parameter}, kind, weight_decay=decay)
    optimiser.param_groups[0]["lr"] = 0.01
    parameter.grad = gradient.clone()
    optimiser.step()
    value, m, v = by_the_formulas(kind, start.double(), [gradient.double()], 0.01, (0.9, 0.98), decay)
    torch.testing.assert_close(parameter.detach().double(), value, atol=1e-7, rtol=1e-6)
    state = optimiser.state[parameter]
    torch.testing.assert_close(state["exp_avg"].double(), m, atol=0, rtol=2**-7)
    torch.testing.assert_close(state["exp_avg_sq"].double(), v, atol=0, rtol=2**-7)
    assert torch.equal(parameter.grad, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_updates_stay_near_those_of_fp64_and_their_moments_are_right_on_average(kind: str) -> None:
    """40 updates of 64 values under 80 names, so that each is rounded in 80 ways."""
    copies, betas, rate = 80, (0.9, 0.999), 0.01
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(64, generator=generator)
    gradients = [torch.randn(64, generator=generator) + 0.3 for _ in range(40)]
    parameters = {f"p{number}": nn.Parameter(start.clone()) for number in range(copies)}
    optimiser = narrow(parameters, kind, betas=betas, weight_decay=0.1)
    optimiser.param_groups[0]["lr"] = rate
    for gradient in gradients:
        for parameter in parameters.values():
            parameter.grad = gradient
        optimiser.step()
    value, m, v = by_the_formulas(kind, start.double(), [g.double() for g in gradients], rate, betas, 0.1)
    found = torch.stack([p.detach().double() for p in parameters.values()])
    moved = (value - start).abs().mean()
    assert float((found - value).abs().mean() / moved) < 0.01
    assert float((found - value).abs().max() / moved) < 0.1
    for key, expected in (("exp_avg", m), ("exp_avg_sq", v)):
        every = torch.stack([optimiser.state[p][key].double() for p in parameters.values()])
        error = every.std(0) / copies**0.5
        assert bool((error > 0).all()), "nothing was rounded at random"
        if kind == "adam":  # decay feeds the value, which differs between copies, back into the gradient
            error = error + 1e-4 * expected.abs()
        assert bool(((every.mean(0) - expected).abs() < 5 * error).all())


def test_changes_too_small_for_bf16_are_not_lost() -> None:
    """The bf16 number nearest to 0.999 v is v itself (steps of 2^-8): rounding to nearest would keep v for ever."""
    parameter = nn.Parameter(torch.zeros(4000))
    optimiser = narrow({"p": parameter}, "adam", betas=(0.9, 0.999))
    parameter.grad = torch.ones(4000)
    optimiser.step()
    optimiser.state[parameter]["exp_avg_sq"].fill_(1.0)
    parameter.grad = torch.zeros(4000)
    for _ in range(500):
        optimiser.step()
    mean = float(optimiser.state[parameter]["exp_avg_sq"].double().mean())
    assert mean == pytest.approx(0.999**500, rel=0.01)


def test_bf16_halves_the_memory_without_large_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "_CHUNK", 16)
    model = tiny()
    optimiser = optimiser_of(model, "adamw", moments="bf16", weight_decay=0.1)
    fill_gradients(model, 1)
    optimiser.step()  # makes the moments
    state = optimiser.state()
    values = sum(p.numel() for p in model.parameters())
    assert sum(v.nbytes for v in state.values() if v.dim()) == 2 * 2 * values
    assert {v.dtype for k, v in state.items() if not k.endswith("/step")} == {torch.bfloat16}
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *state.values())}
    held |= {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in held:
                    sizes.append(value.untyped_storage().nbytes())
            return result

    with Sizes():
        optimiser.step()
    assert max(sizes) <= 16 * 4


@pytest.mark.slow
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (2, 64, 1 << 18):
        monkeypatch.setattr(optim, "_CHUNK", chunk)
        model = tiny()
        optimiser = optimiser_of(model, "adam", moments="bf16")
        optimiser.set_rate(0.01)
        for seed in range(3):
            fill_gradients(model, seed)
            optimiser.step()
        found.append([*model.parameters(), *optimiser.state().values()])
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_bit_for_bit(kind: str) -> None:
    """Rounding neither depends on torch's own generator nor advances it, so replicas agree, too."""
    straight, stopped = tiny(), tiny()
    a, b = (optimiser_of(model, kind, moments="bf16") for model in (straight, stopped))
    for optimiser in (a, b):
        optimiser.set_rate(0.01)
    for seed in range(8):
        if seed == 4:
            saved = {name: tensor.clone() for name, tensor in b.state().items()}
            b = optimiser_of(stopped, kind, moments="bf16")
            b.load_state(saved)
            b.set_rate(0.01)
            assert {k: v.dtype for k, v in b.state().items()} == {k: v.dtype for k, v in a.state().items()}
        for number, (model, optimiser) in enumerate(((straight, a), (stopped, b))):
            fill_gradients(model, seed)
            torch.manual_seed(seed + 100 * number)
            before = torch.get_rng_state()
            optimiser.step()
            assert torch.equal(torch.get_rng_state(), before)
    for (name, x), y in zip(straight.named_parameters(), stopped.parameters(), strict=True):
        assert torch.equal(x, y), name
    assert all(torch.equal(v, b.state()[k]) for k, v in a.state().items())


def test_seeds_names_and_steps_round_differently() -> None:
    def kept(name: str, seed: int, updates: int) -> Tensor:
        parameter = nn.Parameter(torch.zeros(500))
        optimiser = narrow({name: parameter}, "adam", seed)
        for _ in range(updates):
            parameter.grad = torch.linspace(0.1, 0.2, 500)
            optimiser.step()
            optimiser.state[parameter]["exp_avg"].mul_(updates - 1)  # the same gradient at another step
        optimiser.state[parameter]["exp_avg"].zero_()
        optimiser.step()
        first: Tensor = optimiser.state[parameter]["exp_avg"]
        return first.clone()

    assert torch.equal(kept("p", 1, 1), kept("p", 1, 1))
    for other in (("p", 2, 1), ("q", 1, 1), ("p", 1, 2)):
        assert not torch.equal(kept("p", 1, 1), kept(*other)), other


def test_a_run_rounds_by_its_seed() -> None:
    found = []
    for seed in (1, 2):
        model = tiny()
        config = OptimiserConfig(moments="bf16")
        optimiser = Optimiser(model, parameter_roles(model), config, seed=seed)
        fill_gradients(model, 1)
        optimiser.step()
        found.append(optimiser.state()["encoder.layers.0.ffn.in_proj.weight/exp_avg"])
    assert not torch.equal(*found)


def test_a_sharded_parameter_is_updated_in_place() -> None:
    """There is only one process, so its shard is the whole parameter."""
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = nn.Parameter(start.clone())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
        plain.grad, sharded.grad = gradient, distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        optimisers = [narrow({"p": parameter}, "adam") for parameter in (plain, sharded)]
        for optimiser in optimisers:
            optimiser.param_groups[0]["lr"] = 0.1
            optimiser.step()
        assert not torch.equal(plain, start)
        assert torch.equal(sharded.full_tensor(), plain)  # type: ignore[attr-defined]
        kept = optimisers[1].state[sharded]["exp_avg"]
        assert isinstance(kept, DTensor)
        assert torch.equal(kept.full_tensor(), optimisers[0].state[plain]["exp_avg"])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("rows", "rank"), [(7, 0), (7, 1), (7, 2), (4, 2)])
def test_a_part_of_a_parameter_is_rounded_as_in_one_process(
    rows: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three processes; chunks end within rows, and the third process has none of four rows."""
    monkeypatch.setattr(optim, "_CHUNK", 8)
    start, gradient = torch.linspace(-1, 1, rows * 5).view(rows, 5), torch.linspace(0.1, 0.9, rows * 5).view(rows, 5)

    def part(values: Tensor) -> Tensor:
        mine = values[rank * -(-rows // 3) :][: -(-rows // 3)].clone()
        return DTensor.from_local(mine, mesh, [Shard(0)], shape=values.shape, stride=values.stride())

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        parameters = nn.Parameter(start.clone()), nn.Parameter(part(start))
        optimisers = [narrow({"p": parameter}, "adam") for parameter in parameters]
        for _ in range(3):
            parameters[0].grad, parameters[1].grad = gradient, part(gradient)
            for optimiser in optimisers:
                optimiser.step()
        for key in ("exp_avg", "exp_avg_sq"):
            whole, cut = (each.state[p][key] for each, p in zip(optimisers, parameters, strict=True))
            assert torch.equal(cut.to_local(), part(whole).to_local()), key  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()


def test_muon_refuses() -> None:
    with pytest.raises(ValueError, match="`moments: bf16` is for adam, adamw and radam"):
        OptimiserConfig.model_validate({"kind": "muon", "moments": "bf16"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", pytest.param("radam", marks=pytest.mark.slow)])
def test_a_run_resumed_gives_the_same_weights_and_may_change_what_it_recomputes(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    settings: dict[str, Any] = {
        "optimiser": {"kind": kind, "moments": "bf16", "rectified_only": kind == "radam"},
        "growth": {"stages": [{"layers": 1, "updates": 4}], "copy_strategy": "g_top", "moments": "copy"},
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, tiny_experiment(tiny_folder, **settings, stop={"updates": 10}), console=QUIET)
    for updates, rule in ((3, 1), (7, None), (10, "segments")):
        experiment = tiny_experiment(
            tiny_folder, **settings, stop={"updates": updates}, recompute={"encoder": rule, "decoder": rule}
        )
        train(parts, experiment, resume=parts.exists(), console=QUIET)
    assert final_bytes(parts, 10) == final_bytes(whole, 10)
    kept = load_checkpoint(checkpoint_folders(parts)[-1]).optimiser
    assert {v.dtype for v in kept.values()} == {torch.float32, torch.bfloat16}


def test_a_run_recomputes_at_every_depth_and_rounds_by_its_own_seed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is rebuilt when it grows; the encoder's runs come before the decoder's."""
    calls: list[tuple[range, bool]] = []

    def spy(function: Any, layers: range, *inputs: Any, use_reentrant: bool) -> Any:
        calls.append((layers, isinstance(function.__self__, Encoder)))
        return checkpoint(function, layers, *inputs, use_reentrant=use_reentrant)

    given_back: list[bool] = []
    monkeypatch.setattr(seq2seq, "checkpoint", spy)
    for module in (setup, loop):
        monkeypatch.setattr(module, "refuse_too_large", lambda *_, **__: None)  # it would also run the model
    monkeypatch.setattr(setup, "give_back_freed_memory", lambda: given_back.append(True))
    settings: dict[str, Any] = {
        "growth": {"stages": [{"layers": 1, "updates": 1}]},
        "optimiser": {"moments": "bf16"},
        "recompute": {"encoder": 1, "decoder": 2, "compact": True},
        "seed": 5,
        "stop": {"updates": 2},
    }
    experiment = tiny_experiment(tiny_folder, **settings)
    train(tmp_path / "run", experiment, console=QUIET)
    first, second, top = range(1), range(1, 2), range(1, 2)
    assert calls == [(first, True), (top, False), (first, True), (second, True), (top, False)]
    assert given_back == [True]
    (part,) = Learner(experiment, Store.open(experiment.data.store), torch.device("cpu")).optimiser.parts
    assert isinstance(part, NarrowAdam)
    assert part.seed == 5
