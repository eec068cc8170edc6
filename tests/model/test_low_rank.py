"""Low-rank updates of linear maps, compared with the equation of Hu et al. 2021 and with the library peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear, ShiftedLinear
from ziggurat.model.low_rank import Factors, LowRank

RANK, SCALE = 2, 1.5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def updates(width_in: int, width_out: int, parts: int, chosen: list[int], dropout: float = 0.0) -> LowRank:
    """Return updates in fp64, moved away from their initial values."""
    made = LowRank(
        width_in,
        width_out,
        parts=parts,
        chosen=chosen,
        rank=RANK,
        scale=SCALE,
        dropout=Dropout(dropout, exact=True),
        device=torch.device("cpu"),
    ).double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters(), start=10):
            parameter.copy_(drawn(*parameter.shape, seed=number))
    return made


@torch.no_grad()
def equation(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """Return h = W_0 x + alpha / r B A x (Hu et al. 2021, equation 3), number by number."""
    height = weight.shape[0] // low_rank.parts
    rows = []
    for row in x:
        values = []
        for out in range(weight.shape[0]):
            value = sum(float(weight[out, i] * row[i]) for i in range(len(row)))
            value += 0.0 if bias is None else float(bias[out])
            if out // height in low_rank.chosen:
                factors = low_rank.get_submodule(str(out // height))
                assert isinstance(factors, Factors)
                inner = [sum(float(a[i] * row[i]) for i in range(len(row))) for a in factors.down]
                value += SCALE * sum(float(factors.up[out % height, k]) * inner[k] for k in range(RANK))
            values.append(value)
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("parts", "chosen"), [(1, [0]), (3, [2, 0]), (3, [1]), (2, [0, 1])])
@pytest.mark.parametrize("bias", [True, False])
def test_a_map_with_updates_follows_the_paper(parts: int, chosen: list[int], bias: bool) -> None:
    x, module = drawn(4, 5), Linear(5, 12, bias=bias).double()
    module.low_rank = updates(5, 12, parts, chosen)
    wanted = equation(x, module.weight, module.bias, module.low_rank)
    torch.testing.assert_close(module(x), wanted, atol=1e-12, rtol=0)
    for number in range(parts):
        part = wanted.chunk(parts, dim=-1)[number]
        torch.testing.assert_close(module.part(x, number, parts), part, atol=1e-12, rtol=0)


def test_updates_of_a_shifted_map_read_the_shifted_input() -> None:
    x, module = drawn(4, 5), ShiftedLinear(5, 12).double()
    with torch.no_grad():
        module.weight.copy_(drawn(12, 5, seed=1))
        module.shift.fill_(0.7)
    module.low_rank = updates(5, 12, 2, [1])
    torch.testing.assert_close(module(x), equation(x + 0.7, module.weight, None, module.low_rank), atol=1e-12, rtol=0)
    alone = equation(x, module.weight, None, module.low_rank).chunk(2, dim=-1)[1]
    torch.testing.assert_close(module.part(x, 1, 2), alone, atol=1e-12, rtol=0)


def test_at_first_nothing_changes_and_a_is_drawn_by_the_seed() -> None:
    x, module = drawn(4, 5).float(), Linear(5, 12)
    before, made = module(x), []
    for seed in (1, 1, 2):
        module.low_rank = updates(5, 12, 3, [0, 2]).float()
        module.low_rank.reset(torch.Generator().manual_seed(seed))
        assert torch.equal(module(x), before)
        made.append([p.clone() for name, p in module.low_rank.named_parameters() if name.endswith("down")])
    assert all(map(torch.equal, made[0], made[1]))
    assert not any(map(torch.equal, made[0], made[2]))
    assert not torch.equal(*made[0])
    assert 0.6 < max(float(a.detach().abs().max()) for a in made[0]) * 5**0.5 <= 1


def test_dropout_acts_only_on_the_input_of_the_updates() -> None:
    x, module = torch.ones(400, 5, dtype=torch.float64), Linear(5, 4).double()
    plain = module(x)
    module.low_rank = updates(5, 4, 1, [0], dropout=0.5)
    torch.manual_seed(3)
    y = module(x)
    assert len({tuple(row) for row in (y - plain).tolist()}) > 10
    torch.testing.assert_close((y - plain).mean(0), (module.eval()(x) - plain)[0], atol=1.0, rtol=0)
    assert len({tuple(row) for row in (module(x) - plain).tolist()}) == 1


@pytest.mark.slow  # importing it takes seconds
def test_the_library_peft_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    peft = pytest.importorskip("peft")
    theirs: Any = nn.Sequential()
    theirs.add_module("q", nn.Linear(5, 6).double())
    ours = Linear(5, 6).double()
    ours.load_state_dict(theirs.q.state_dict())
    config = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=["q"], lora_dropout=0.0)
    adapted = peft.get_peft_model(theirs, config)
    layer = adapted.base_model.model.q
    bound = layer.lora_A["default"].weight.abs().max() * 5**0.5
    assert 0 < float(bound) <= 1  # A is drawn as in our code
    ours.low_rank = updates(5, 6, 1, [0])
    factors = ours.low_rank.get_submodule("0")
    assert isinstance(factors, Factors)
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(factors.down)
        layer.lora_B["default"].weight.copy_(factors.up)
    x, above = drawn(3, 5), drawn(3, 6, seed=1)
    ours(x).backward(above)
    adapted(x).backward(above)
    torch.testing.assert_close(ours(x), adapted(x), atol=1e-6, rtol=0)  # peft keeps its factors in fp32
    torch.testing.assert_close(
        factors.down.grad, layer.lora_A["default"].weight.grad, check_dtype=False, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        factors.up.grad, layer.lora_B["default"].weight.grad, check_dtype=False, atol=1e-6, rtol=0
    )
    with torch.no_grad():
        whole = ours.weight + SCALE * factors.up @ factors.down
        torch.testing.assert_close(adapted.merge_and_unload().q.weight, whole, atol=1e-6, rtol=0)
