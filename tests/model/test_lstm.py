"""Layer-normalised LSTM layers (Chen et al. 2018; Ba et al. 2016) compared with a loop over steps and gates in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.model.lstm_reference import plain_layer
from ziggurat.model import lstm
from ziggurat.model.lstm import LstmCell, LstmLayer, step_order

B, T, IN, C = 3, 5, 4, 6
EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 0.0}
RIGHT = torch.arange(T) < torch.tensor([[5], [2], [4]])


def random_layer(directions: int, seed: int = 0, inputs: int = IN, width: int = C) -> LstmLayer:
    """A layer in fp64 with every parameter away from its neutral value."""
    generator = torch.Generator().manual_seed(seed)
    layer = LstmLayer(inputs, width, directions).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.0 + 0.3 * values if name.endswith("gain") else 0.5 * values)
    return layer


def inputs(seed: int = 1, length: int = T) -> Tensor:
    return torch.randn(B, length, IN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(layer: LstmLayer, x: Tensor, y: Tensor) -> list[Tensor]:
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    return list(torch.autograd.grad(y, [x, *layer.parameters()], upstream))


@pytest.mark.parametrize("directions", [1, 2])
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), padded=st.lists(st.booleans(), min_size=B * T, max_size=B * T))
def test_values_and_gradients_are_those_of_a_plain_loop(directions: int, seed: int, padded: list[bool]) -> None:
    """This holds for any mask: padding on the right, on the left, within a sentence, none, or only padding."""
    layer, x = random_layer(directions, seed), inputs(seed).requires_grad_()
    mask = ~torch.tensor(padded).view(B, T)
    expected = plain_layer(layer.cells, x, mask)
    y = layer(x, step_order(mask, directions))
    torch.testing.assert_close(y, expected, **EXACT)
    for ours, reference in zip(gradients(layer, x, y), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, reference, **EXACT)


def test_cells_are_clipped_and_the_output_has_no_tanh() -> None:
    """With open input and forget gates the cell gains about 1 per step; it stops at 10, where no gradient passes."""
    layer, x = random_layer(2), inputs(length=14).requires_grad_()
    mask = torch.ones(B, 14, dtype=torch.bool)
    with torch.no_grad():
        for cell in layer.cells:
            cell.get_parameter("bias").add_(8.0)
    expected = plain_layer(layer.cells, x, mask)
    y = layer(x, step_order(mask, 2))
    assert 9.9 < float(y.detach().abs().max()) <= 10.0
    torch.testing.assert_close(y, expected, **EXACT)
    for ours, reference in zip(gradients(layer, x, y), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(ours, reference, **EXACT)


@pytest.mark.parametrize("directions", [1, 2])
def test_the_backward_pass_is_the_derivative_of_the_forward_pass(directions: int) -> None:
    layer, batch, steps = random_layer(directions, inputs=2, width=3), 2, 3
    x = torch.randn(directions, steps * batch, 2, dtype=torch.float64, requires_grad=True)
    weights = [cell.get_parameter("weight") for cell in layer.cells]
    gain = torch.stack([cell.get_parameter("gain") for cell in layer.cells]).detach().requires_grad_()
    bias = torch.stack([cell.get_parameter("bias") for cell in layer.cells]).detach().requires_grad_()

    def run(x: Tensor, gain: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return lstm.recur(x, weights, gain, bias, batch)

    assert torch.autograd.gradcheck(run, (x, gain, bias, *weights))


@pytest.mark.parametrize("gate", range(4))
def test_the_scale_of_a_gates_weights_does_not_matter(gate: int) -> None:
    layer, x, order = random_layer(2), inputs(), step_order(RIGHT, 2)
    before = layer(x, order)
    with torch.no_grad():
        for cell in layer.cells:
            cell.get_parameter("weight")[gate * C : (gate + 1) * C] *= 3.7
    torch.testing.assert_close(layer(x, order), before, atol=1e-6, rtol=0)  # epsilon is not scaled with the weights
    with torch.no_grad():
        for cell in layer.cells:
            cell.get_parameter("weight")[gate * C] *= 3.7
    assert float((layer(x, order) - before).detach().abs().max()) > 1e-3  # scaling a single row does matter


def test_padded_steps_keep_the_state() -> None:
    y = random_layer(2)(inputs(), step_order(RIGHT, 2))
    forward, backward = y.split(C, dim=-1)
    for sentence, length in enumerate(RIGHT.sum(1).tolist()):
        for t in range(length, T):
            assert torch.equal(forward[sentence, t], forward[sentence, length - 1])
            assert torch.equal(backward[sentence, t], torch.zeros(C, dtype=torch.float64))


def test_right_padding_does_not_reach_the_backward_direction() -> None:
    layer, x = random_layer(2), inputs()
    before = layer(x, step_order(RIGHT, 2))
    changed = torch.where(RIGHT[..., None], x, 1e6)
    assert torch.equal(layer(changed, step_order(RIGHT, 2)), before)
    longer = nn.functional.pad(x, (0, 0, 0, 4), value=3.0)
    y = layer(longer, step_order(nn.functional.pad(RIGHT, (0, 4)), 2))
    torch.testing.assert_close(y[:, :T], before, **EXACT)
    alone = layer(x[1:2, :2], step_order(RIGHT[1:2, :2], 2))
    torch.testing.assert_close(alone, before[1:2, :2], **EXACT)
    assert not torch.equal(layer(x, step_order(torch.ones_like(RIGHT), 2))[1, :2, C:], before[1, :2, C:])


def test_step_by_step_is_the_whole_layer() -> None:
    layer, x = random_layer(1), inputs()
    whole = layer(x, step_order(torch.ones(B, T, dtype=torch.bool), 1))
    state = layer.first.start(B)
    for t in range(T):
        state = layer.first.step(x[:, t], state)
        torch.testing.assert_close(state.output, whole[:, t], **EXACT)


def test_parameters_of_a_cell() -> None:
    cell = LstmCell(5, 7)
    assert sum(p.numel() for p in cell.parameters()) == 4 * 7 * (5 + 7) + 8 * 7
    assert torch.equal(cell.gain, torch.ones(4, 7))
    assert torch.equal(cell.bias, torch.zeros(4, 7))


def test_under_autocast_products_are_narrow_and_states_are_not() -> None:
    layer, x = random_layer(2).float(), inputs().float().requires_grad_()
    order = step_order(RIGHT, 2)
    exact = layer(x, order)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, order)
        state = layer.first.step(x[:, 0], layer.first.start(B))
    assert y.dtype == state.cell.dtype == torch.float32
    error = (y - exact).detach().abs().max()
    assert 0 < float(error) < 0.05
    torch.testing.assert_close(state.output, y[:, 0, :C], atol=0.02, rtol=0)
    ours = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    for narrow, wide in zip(ours, torch.autograd.grad(exact.square().sum(), [x, *layer.parameters()]), strict=True):
        assert narrow.dtype == torch.float32
        assert float(nn.functional.cosine_similarity(narrow.flatten(), wide.flatten(), dim=0)) > 0.99


@pytest.mark.slow
def test_a_compiled_layer_holds_one_call_whatever_the_length() -> None:
    layer = random_layer(2)
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Any:
        counts.append(sum("ziggurat.lstm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 7, 11):
        x, mask = inputs(length=length), torch.ones(B, length, dtype=torch.bool)
        torch.testing.assert_close(compiled(x, step_order(mask, 2)), plain_layer(layer.cells, x, mask), **EXACT)
    assert counts == [1]


def test_the_operators_declare_what_they_do() -> None:
    layer = random_layer(2)
    x = torch.randn(2, 2 * B, IN, dtype=torch.float64, requires_grad=True)
    gain, bias = (torch.rand(2, 4, C, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = [cell.get_parameter("weight") for cell in layer.cells]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.ziggurat.lstm.default, (x, weights, gain, bias, B), test_utils=checks)
    with torch.no_grad():
        kept = torch.ops.ziggurat.lstm(x, weights, gain, bias, B)
    arguments = (torch.rand_like(kept[0]), x.detach(), [w.detach() for w in weights], gain.detach(), *kept)
    torch.library.opcheck(torch.ops.ziggurat.lstm_backward.default, arguments, test_utils=checks)
