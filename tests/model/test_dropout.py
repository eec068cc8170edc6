from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from ziggurat.model.dropout import Dropout, random_bytes


@pytest.mark.parametrize("p", [0.1, 0.3, 0.001, 0.5])
@pytest.mark.parametrize("exact", [True, False])
def test_share_and_scale(p: float, exact: bool) -> None:
    torch.manual_seed(0)
    n = 400_000
    y = Dropout(p, exact)(torch.ones(n))
    rate = p if exact else max(1, round(256 * p)) / 256
    dropped = float((y == 0).double().mean())
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))


def test_every_byte_of_a_draw_is_uniform() -> None:
    """A draw without its sign bit would drop every eighth element too often."""
    torch.manual_seed(1)
    n = 800_000
    share = (random_bytes(torch.empty(n)) < 128).double().view(-1, 8).mean(0)
    assert float((share - 0.5).abs().max()) < 5 * math.sqrt(0.25 / (n / 8))


def test_neighbours_are_independent() -> None:
    torch.manual_seed(2)
    mask = (random_bytes(torch.empty(800_000)) >= 128).double() * 2 - 1
    for lag in (1, 2, 7, 8, 9):
        assert abs(float((mask[lag:] * mask[:-lag]).mean())) < 5 / math.sqrt(800_000)


def test_the_gradient_passes_exactly_where_the_value_did() -> None:
    torch.manual_seed(3)
    x = torch.randn(7, 13, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.25)(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    factor = torch.where(y == 0, 0.0, 1 / 0.75).double()
    assert x.grad is not None
    torch.testing.assert_close(y, x * factor)
    torch.testing.assert_close(x.grad, upstream * factor)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sum_with_a_residual(exact: bool, dtype: torch.dtype) -> None:
    """Mask, value and gradients equal those of dropout followed by the sum, in the wider of the two types."""
    x = torch.randn(7, 13).to(dtype).requires_grad_()
    residual = torch.randn(7, 13, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    dropout = Dropout(0.25, exact)
    torch.manual_seed(5)
    expected = residual + dropout(x)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, residual), upstream)
    torch.manual_seed(5)
    y = dropout(x, residual)
    assert y.dtype == residual.dtype
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-14, "atol": 1e-14}
    torch.testing.assert_close(y, expected, **tolerance)
    for found, gradient in zip(torch.autograd.grad(y, (x, residual), upstream), wanted, strict=True):
        assert found.dtype == gradient.dtype
        torch.testing.assert_close(found, gradient, **tolerance)
    assert torch.equal(dropout.eval()(x, residual), residual + x)


def test_evaluation_and_zero_probability_are_the_identity() -> None:
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_the_seed_fixes_the_mask() -> None:
    x = torch.ones(1001)
    torch.manual_seed(4)
    first = Dropout(0.4)(x)
    torch.manual_seed(4)
    assert torch.equal(Dropout(0.4)(x), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_relu_is_relu_then_dropout(dtype: torch.dtype) -> None:
    """They agree bit for bit, including gradients; NaN stays NaN, and the gradient at 0 is 0."""
    dropout = Dropout(0.3)
    x = torch.randn(40, 60).to(dtype)
    x[0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    x[1, :20] = -math.inf
    gradient = torch.randn(40, 60).to(dtype)
    found = []
    for work in (lambda t: dropout(torch.relu(t)), partial(dropout, relu=True)):
        torch.manual_seed(3)
        inner = x.clone().requires_grad_()
        y = work(inner)
        y.backward(gradient)
        assert inner.grad is not None
        inner.grad[0, 2] = 0.0  # the gradient of NaN is meaningless
        found.append((y.detach(), inner.grad))
    kept = found[1][0].nan_to_num() > 0
    assert 0.25 < float(kept.float().mean()) < 0.45  # half of the elements are positive, and 70 % of those are kept
    for apart, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=0, atol=0, equal_nan=True)
    dropout.eval()
    assert torch.equal(dropout(x[1:], relu=True), torch.relu(x[1:]))


def test_dropout_of_relu_saves_only_its_result() -> None:
    """The linear map that reads the result saves it anyway, so nothing is saved twice."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = Dropout(0.1)(torch.randn(8, 8, requires_grad=True), relu=True)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
