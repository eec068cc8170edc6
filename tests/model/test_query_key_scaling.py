"""QK-norm in both forms and the scale per dimension, compared with their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.stepping import assert_steps_equal_whole, attend_to_self, causal, draw, linear, randomised, weights_of
from ziggurat.model.attention.cache import padding_mask
from ziggurat.model.attention.multihead import CrossAttention, QueryKeyScaling, SelfAttention
from ziggurat.model.attention.variants import RelativeAttention
from ziggurat.model.dropout import Dropout
from ziggurat.model.roles import Role, assign_roles

D_MODEL, HEADS, D_HEAD, EPSILON = 8, 2, 4, 1e-3
KINDS = [("layer", False), ("rms", False), ("l2", False), ("none", True), ("layer", True), ("l2", True)]
VALUES = [("none", False, "layer"), ("none", False, "rms"), ("rms", False, "rms")]  # the last one is that of HybridNorm


def scaling(norm: Any, per_dimension: bool, length: int = 50, value_norm: Any = "none") -> QueryKeyScaling:
    options = {"norm": norm, "length": length, "per_dimension": per_dimension, "value_norm": value_norm}
    return QueryKeyScaling(D_HEAD, epsilon=EPSILON, **options)


def normalised(vector: Tensor, norm: str, gain: Tensor | None) -> Tensor:
    numbers = vector.tolist()
    if norm == "layer":
        mean = sum(numbers) / D_HEAD
        numbers = [x - mean for x in numbers]
    if norm in ("layer", "rms"):
        assert gain is not None
        root = math.sqrt(sum(x * x for x in numbers) / D_HEAD + EPSILON)
        numbers = [float(g) * x / root for g, x in zip(gain, numbers, strict=True)]
    if norm == "l2":
        size = math.sqrt(sum(x * x for x in numbers))
        numbers = [x / size for x in numbers]
    return torch.tensor(numbers, dtype=torch.float64)


def logit(module: QueryKeyScaling, norm: str, query: Tensor, key: Tensor) -> float:
    """Return the logit of one query and one key from the papers' formulas."""
    gains = [None if part is None else part.weight for part in (module.query_norm, module.key_norm)]
    query, key = normalised(query, norm, gains[0]), normalised(key, norm, gains[1])
    if module.dimensions is not None:
        query = torch.stack(
            [q * math.log(1 + math.exp(a)) / math.log(2) for q, a in zip(query, module.dimensions, strict=True)]
        )
    factor = 1 / math.sqrt(D_HEAD) if norm != "l2" else float(module.factor)  # type: ignore[arg-type]
    return factor * float(query @ key)


@pytest.mark.parametrize(("norm", "per_dimension", "values"), [(*kind, "none") for kind in KINDS] + VALUES)
def test_self_attention_has_the_logits_and_the_values_of_the_formula(
    norm: str, per_dimension: bool, values: str
) -> None:
    chosen = scaling(norm, per_dimension, value_norm=values)
    module = randomised(SelfAttention(D_MODEL, HEADS, Dropout(0.0), scaling=chosen))
    x, part = draw(2, 4, D_MODEL), module.scaling
    assert part is not None
    gain = None if part.value_norm is None else part.value_norm.weight
    expected = attend_to_self(
        module,
        x,
        lambda _, i: range(i + 1),
        lambda q, k, i, j: logit(part, norm, q, k),
        lambda v: normalised(v, values, gain),
    )
    torch.testing.assert_close(module(x, causal(4)), expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("values", ["none", "layer", "rms"])
@pytest.mark.parametrize(("norm", "per_dimension"), [*KINDS, ("none", False)])
def test_cross_attention_is_the_mean_of_the_formula(norm: str, per_dimension: bool, values: str) -> None:
    chosen = scaling(norm, per_dimension, value_norm=values)
    module = randomised(CrossAttention(D_MODEL, 6, HEADS, Dropout(0.0), scaling=chosen))
    part, maps = module.scaling, module.kv_proj
    assert part is not None
    x, memory = draw(2, 3, D_MODEL, seed=1), draw(2, 5, 6, seed=2)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    query = linear(x, module.q_proj.weight, module.q_proj.bias)
    key, value = (linear(memory, maps.weight[n : n + 8], maps.bias[n : n + 8]) for n in (0, 8))
    context = torch.zeros_like(x)
    for b in range(2):
        seen = range(int(mask[b].sum()))
        for head in torch.arange(D_MODEL).chunk(HEADS):
            for i in range(3):
                weights = weights_of(
                    query[b, i, head], key[b][:, head], i, seen, lambda q, k, i, j: logit(part, norm, q, k)
                )
                gain = None if part.value_norm is None else part.value_norm.weight
                means = [w * normalised(value[b, j, head], values, gain) for j, w in zip(seen, weights, strict=True)]
                context[b, i, head] = sum(means)
    assert module.out_proj is not None
    expected = linear(context, module.out_proj.weight, module.out_proj.bias)
    got = module(x, module.remember(memory, padding_mask(mask, torch.float64)))
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("norm", "per_dimension"), [*KINDS, ("none", False)])
def test_steps_equal_whole_sequences(norm: str, per_dimension: bool, relative: bool) -> None:
    part = scaling(norm, per_dimension, value_norm="rms")
    module = (
        RelativeAttention(D_MODEL, HEADS, Dropout(0.0), clip=2, scaling=part)
        if relative
        else SelfAttention(D_MODEL, HEADS, Dropout(0.0), scaling=part)
    )
    assert_steps_equal_whole(randomised(module), D_MODEL)


def test_factor_starts_at_log2_of_the_number_of_pairs() -> None:
    """Logits are then g times the cosine: log2(L^2 - L) for equal directions, whatever their lengths."""
    module = scaling("l2", False, length=100).double()
    x = draw(1, 1, 1, D_HEAD)
    product = (module.query(7 * x) * module.key(0.2 * x)).sum().detach() / math.sqrt(D_HEAD)
    assert float(product) == pytest.approx(math.log2(100**2 - 100), rel=1e-6)
    assert module.factor is not None
    assert module.factor.shape == (1,)


def test_scale_per_dimension_starts_at_one() -> None:
    query = draw(1, 2, 3, D_HEAD)
    torch.testing.assert_close(scaling("none", True).double().query(query), query, atol=1e-15, rtol=0)


@pytest.mark.parametrize("norm", ["layer", "rms", "l2"])
def test_size_of_queries_and_keys_does_not_matter(norm: str) -> None:
    module = QueryKeyScaling(D_HEAD, norm=norm, length=50, per_dimension=True, epsilon=1e-30).double()  # type: ignore[arg-type]
    x = draw(1, 2, 3, D_HEAD)
    torch.testing.assert_close(module.query(1000 * x), module.query(x), atol=1e-10, rtol=0)
    torch.testing.assert_close(module.key(1000 * x), module.key(x), atol=1e-10, rtol=0)


def test_with_l2_queries_and_keys_shorter_than_epsilon_are_divided_by_it() -> None:
    module, x = scaling("l2", False).double(), torch.full((1, 1, 1, D_HEAD), 0.1 * EPSILON, dtype=torch.float64)
    torch.testing.assert_close(module.key(x), x / EPSILON)


def test_a_zero_query_stays_finite() -> None:
    for norm, per_dimension in KINDS:
        x = torch.zeros(1, 1, 1, D_HEAD, requires_grad=True)
        scaling(norm, per_dimension).query(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(("norm", "per_dimension"), KINDS)
def test_type_is_kept(norm: str, per_dimension: bool) -> None:
    """Parameters stay in fp32 under autocast; queries and keys must keep their type."""
    module, x = scaling(norm, per_dimension), torch.randn(1, 2, 3, D_HEAD, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (module.query(x).dtype, module.key(x).dtype) == (torch.bfloat16, torch.bfloat16)


def test_heads_share_parameters_and_each_has_a_role() -> None:
    shapes = {
        ("none", True): {"dimensions": (D_HEAD,)},
        ("l2", False): {"factor": (1,)},
        ("layer", False): {"query_norm.weight": (D_HEAD,), "key_norm.weight": (D_HEAD,)},
        ("rms", True): {"dimensions": (D_HEAD,), "query_norm.weight": (D_HEAD,), "key_norm.weight": (D_HEAD,)},
    }
    for (norm, per_dimension), expected in shapes.items():
        slots = assign_roles(scaling(norm, per_dimension))
        assert {slot.name: tuple(slot.values.shape) for slot in slots} == expected
        for slot in slots:
            assert slot.role is (Role.NORM_GAIN if "norm" in slot.name else Role.WIRING)


@pytest.mark.parametrize(("norm", "per_dimension"), KINDS)
def test_gradients(norm: str, per_dimension: bool) -> None:
    module = randomised(scaling(norm, per_dimension))
    x = draw(1, 1, 2, D_HEAD).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: (module.query(x), module.key(x)), (x, *module.parameters()))
