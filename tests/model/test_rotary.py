"""Rotary positions compared with complex numbers and with Hugging Face's formula."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.model.stepping import assert_steps_equal_whole, attend_to_self, causal, draw, randomised
from ziggurat.model.attention.multihead import SelfAttention
from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import Rotary

D_HEAD = 6
EXACT = {"atol": 1e-12, "rtol": 0.0}


def turned(vector: Tensor, position: int) -> Tensor:
    """Treat pairs of channels as complex numbers, times e^(i position 10000^(-2 pair / d_head))."""
    half = len(vector) // 2
    result = torch.empty_like(vector)
    for pair in range(half):
        angle = position * 10000 ** (-2 * pair / len(vector))
        number = complex(vector[pair], vector[pair + half]) * cmath.exp(1j * angle)
        result[pair], result[pair + half] = number.real, number.imag
    return result


def test_channels_turn_as_complex_numbers() -> None:
    x = draw(2, 3, 5, D_HEAD)
    got = Rotary(D_HEAD).double()(x, 40)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():
        torch.testing.assert_close(got[tuple(index)], turned(x[tuple(index)], 40 + index[2]), **EXACT)


def test_rotary_equals_the_formula_of_hugging_face() -> None:
    x = draw(2, 3, 5, D_HEAD)
    frequencies = 1.0 / (10000 ** (torch.arange(0, D_HEAD, 2, dtype=torch.float64) / D_HEAD))
    angles = torch.outer(torch.arange(5, dtype=torch.float64), frequencies).repeat(1, 2)
    half_turned = torch.cat([-x[..., D_HEAD // 2 :], x[..., : D_HEAD // 2]], dim=-1)
    expected = x * angles.cos() + half_turned * angles.sin()
    torch.testing.assert_close(Rotary(D_HEAD).double()(x, 0), expected, **EXACT)


def test_products_depend_on_distance_only_and_lengths_stay() -> None:
    rotary = Rotary(D_HEAD).double()
    query, key = draw(1, 1, 1, D_HEAD, seed=1), draw(1, 1, 1, D_HEAD, seed=2)
    products = {
        (i, j): float((rotary(query, i) * rotary(key, j)).sum()) for i in (0, 3, 70, 900) for j in (0, 3, 70, 900)
    }
    for shift in (1, 17, 400):
        for (i, j), product in products.items():
            shifted = float((rotary(query, i + shift) * rotary(key, j + shift)).sum())
            assert shifted == pytest.approx(product, abs=1e-12)
    assert products[0, 3] != pytest.approx(products[3, 0], abs=1e-3)
    torch.testing.assert_close(rotary(query, 123).norm(), query.norm(), **EXACT)
    torch.testing.assert_close(rotary(query, 0), query, atol=0, rtol=0)


def test_the_table_grows_and_is_not_saved() -> None:
    rotary = Rotary(D_HEAD, length=4).double()
    x = draw(1, 1, 3, D_HEAD)
    for start in (0, 1, 2, 50, 3):
        for place in range(3):
            torch.testing.assert_close(rotary(x, start)[0, 0, place], turned(x[0, 0, place], start + place), **EXACT)
    assert list(rotary.state_dict()) == []


def test_a_table_made_while_decoding_serves_training() -> None:
    rotary = Rotary(D_HEAD, length=4)
    x = torch.randn(1, 1, 9, D_HEAD, requires_grad=True)
    with torch.inference_mode():
        rotary(x, 0)
    rotary(x, 0).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_positions_apart(dtype: torch.dtype) -> None:
    """Angles of late positions in a 16-bit type would be off by whole turns."""
    x = draw(1, 1, 1, D_HEAD).to(dtype)
    got = Rotary(D_HEAD).to(dtype)(x, 1001)
    assert got.dtype == dtype
    precision = torch.finfo(dtype).eps * float(x.abs().max()) * 2
    torch.testing.assert_close(got[0, 0, 0].double(), turned(x[0, 0, 0].double(), 1001), atol=precision, rtol=0)


def test_double_precision_table_is_not_a_rounded_one() -> None:
    for path in (torch.float64,), (torch.bfloat16, torch.float64), (torch.float64, torch.float32, torch.float64):
        rotary = Rotary(2)
        for dtype in path:
            rotary = rotary.to(dtype)
        x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
        expected = torch.tensor([math.cos(700.0), math.sin(700.0)], dtype=torch.float64)
        torch.testing.assert_close(rotary(x, 700)[0, 0, 0], expected, **EXACT)


def attention(rotary: Rotary) -> SelfAttention:
    return randomised(SelfAttention(12, 2, Dropout(0.0), rotary=rotary))


def test_self_attention_turns_queries_and_keys_not_values() -> None:
    module, x = attention(Rotary(D_HEAD)), draw(2, 5, 12)

    def logit(query: Tensor, key: Tensor, i: int, j: int) -> float:
        return float(turned(query, i) @ turned(key, j)) / math.sqrt(D_HEAD)

    expected = attend_to_self(module, x, lambda _, i: range(i + 1), logit)
    torch.testing.assert_close(module(x, causal(5)), expected, atol=1e-10, rtol=0)


def test_steps_equal_whole_sequences() -> None:
    assert_steps_equal_whole(attention(Rotary(D_HEAD, length=3)), 12)


@pytest.mark.slow
def test_one_graph_serves_all_lengths() -> None:
    module, counter = attention(Rotary(D_HEAD)), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    # The first length is treated as a constant, the second as a variable; from 257 on the kernel differs.
    for length in (3, 4, 5, 9, 250):
        x = draw(2, length, 12, seed=length)
        torch.testing.assert_close(compiled(x, causal(length)), module(x, causal(length)), atol=1e-10, rtol=0)
    assert counter.frame_count <= 2
