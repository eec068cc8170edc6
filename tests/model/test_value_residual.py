"""Value residuals compared with their formula, head by head in float64, with gradients of the first layer's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.model.stepping import draw, randomised
from ziggurat.config.depth import GrowthConfig, growth_refused
from ziggurat.config.train import RecomputeConfig
from ziggurat.model.attention.multihead import CrossAttention, FirstValues, SelfAttention, ValueResidual
from ziggurat.model.attention.variants import RelativeAttention
from ziggurat.model.build import build_model, set_recompute
from ziggurat.model.dropout import Dropout

D, HEADS, KINDS = 8, 2, ("half", "learned", "single")


def mixed(kind: str, module: SelfAttention | CrossAttention, first: Tensor, own: Tensor | None) -> Tensor:
    """V_n' of layer n > 1 by the formula."""
    if kind == "single":
        assert own is None
        return first
    assert own is not None
    a, b = (0.5, 0.5) if kind == "half" else module.residual.shares.unbind()  # type: ignore[union-attr]
    return a * first + b * own


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Softmax attention of [length, D] each, head by head and query by query."""
    rows = []
    for i in range(len(query)):
        heads = []
        for head in torch.arange(D).chunk(HEADS):
            seen = range(i + 1 if causal else len(key))
            logits = torch.stack([query[i, head] @ key[j, head] / (D / HEADS) ** 0.5 for j in seen])
            weights = logits.exp() / logits.exp().sum()
            heads.append(sum(weights[n] * value[j, head] for n, j in enumerate(seen)))
        rows.append(torch.cat(heads))  # type: ignore[arg-type]
    return torch.stack(rows)


def parts(weight: Tensor, bias: Tensor, x: Tensor, count: int) -> list[Tensor]:
    return [x @ weight[n * D : (n + 1) * D].T + bias[n * D : (n + 1) * D] for n in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_self_attention_has_the_formula_and_its_gradients(kind: Any) -> None:
    layers = [
        randomised(SelfAttention(D, HEADS, Dropout(0.0), residual=ValueResidual(kind, first=n == 0)), seed=n)
        for n in range(3)
    ]
    assert [len(layer.qkv_proj.weight) for layer in layers] == [3 * D, *[2 * D if kind == "single" else 3 * D] * 2]
    inputs = [draw(1, 4, D, seed=9 + n) for n in range(3)]
    first, expected_first = FirstValues(), torch.empty(0)
    found, expected = [], []
    for n, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
        found.append(layer(x, None, first)[0])
        query, key, *own = parts(layer.qkv_proj.weight, layer.qkv_proj.bias, x[0], 2 if kind == "single" and n else 3)  # type: ignore[arg-type]
        if n == 0:
            expected_first = own[0]
        value = own[0] if n == 0 else mixed(kind, layer, expected_first, own[0] if own else None)
        context = attention(query, key, value, causal=False)
        expected.append(context @ layer.out_proj.weight.T + layer.out_proj.bias)
    parameters = [p for layer in layers for p in layer.parameters()]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    upstream = [draw(4, D, seed=20 + n) for n in range(3)]
    grads = [torch.autograd.grad(outputs, parameters, upstream, retain_graph=True) for outputs in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_to_the_memory_has_the_formula(kind: Any) -> None:
    layers = [
        randomised(CrossAttention(D, 6, HEADS, Dropout(0.0), residual=ValueResidual(kind, first=n == 0)), seed=n)
        for n in range(2)
    ]
    memory, first, of_first = draw(1, 5, 6, seed=3), FirstValues(), torch.empty(0)
    for n, layer in enumerate(layers):
        x = draw(1, 3, D, seed=30 + n)
        found = layer(x, layer.remember(memory, None, first=first))[0]
        key, *own = parts(layer.kv_proj.weight, layer.kv_proj.bias, memory[0], 1 if kind == "single" and n else 2)  # type: ignore[arg-type]
        of_first = own[0] if n == 0 else of_first
        value = own[0] if n == 0 else mixed(kind, layer, of_first, own[0] if own else None)
        query = x[0] @ layer.q_proj.weight.T + layer.q_proj.bias
        context = attention(query, key, value, causal=False)
        assert layer.out_proj is not None
        torch.testing.assert_close(found, context @ layer.out_proj.weight.T + layer.out_proj.bias, atol=1e-12, rtol=0)


def test_learned_shares_start_as_half() -> None:
    layers = [
        SelfAttention(D, HEADS, Dropout(0.0), residual=ValueResidual(kind, first=False)) for kind in ("half", "learned")
    ]
    layers[1].load_state_dict(layers[0].state_dict(), strict=False)
    x = torch.randn(2, 4, D)
    given = FirstValues()
    given.values = torch.randn(2, HEADS, 4, D // HEADS)
    torch.testing.assert_close(layers[0](x, None, given), layers[1](x, None, given))


def test_with_equal_values_in_all_layers_nothing_changes() -> None:
    """If layers have the same values at every depth, mixing in the first layer's values changes nothing."""
    plain = randomised(RelativeAttention(D, HEADS, Dropout(0.0), clip=2))
    other = RelativeAttention(D, HEADS, Dropout(0.0), clip=2, residual=ValueResidual("half", first=False)).double()
    other.load_state_dict(plain.state_dict())
    x, first = draw(2, 4, D), FirstValues()
    above = randomised(RelativeAttention(D, HEADS, Dropout(0.0), clip=2, residual=ValueResidual("half", first=True)))
    above.load_state_dict(plain.state_dict())
    torch.testing.assert_close(above(x, None, first), plain(x, None))
    torch.testing.assert_close(other(x, None, first), plain(x, None))


@pytest.mark.parametrize("recompute", ["segments", 1])
def test_recomputed_layers_have_the_same_gradients(recompute: Any) -> None:
    choices = {"attention.value_residual": "learned", "attention.cross_value_residual": "half"}
    built = build_model(small_model({**choices, "encoder.layers": 4, "decoder.layers": 4}), 11, 11).double()
    source, mask = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    found = []
    for setting in (None, recompute):
        set_recompute(built, RecomputeConfig(encoder=setting, decoder=setting))
        torch.manual_seed(1)
        built.zero_grad()
        built(source, mask, source).square().sum().backward()
        found.append({n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.parametrize(
    ("kind", "strategy", "grows"),
    [("half", "copy_all", True), ("learned", "copy_all", False), ("single", "copy_all", False)],
)
def test_a_first_layer_unlike_the_others_is_not_copied(kind: str, strategy: str, grows: bool) -> None:
    deep = small_model({"attention.value_residual": kind, "encoder.layers": 4})
    growth = GrowthConfig.model_validate({"stages": [{"layers": 2, "updates": 1}], "copy_strategy": strategy})
    problems = growth_refused(growth, deep)
    assert [problem.key for problem in problems] == ["training.growth.copy_strategy"] * (not grows)
    assert grows or f"`attention.value_residual: {kind}`" in str(problems[0])
