"""The simpler simple recurrent unit (Kim et al. 2019), and the operator of its cells."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.model.stepping import assert_steps_equal_whole, draw, linear, randomised
from ziggurat.model.attention.variants import Ssru
from ziggurat.model.build import count_parameters as count
from ziggurat.model.linear import Linear, ShiftedLinear
from ziggurat.model.lstm import decayed_sum
from ziggurat.model.roles import Role, assign_roles

D_MODEL = 6
TOLERANCE = {"atol": 1e-12, "rtol": 0.0}


def unit(*, shifted: bool = False) -> Ssru:
    make = ShiftedLinear if shifted else nn.Linear
    value = ShiftedLinear if shifted else lambda d_in, d_out: Linear(d_in, d_out, bias=False)
    return randomised(Ssru(D_MODEL, linear=make, value=value))


def sums(x: Tensor, keep: Tensor) -> Tensor:
    """c_j = keep_j c_{j-1} + x_j, position by position, with torch's own derivatives."""
    cells, cell = [], torch.zeros_like(x[:, 0])
    for j in range(x.shape[1]):
        cell = keep[:, j] * cell + x[:, j]
        cells.append(cell)
    return torch.stack(cells, 1)


def test_the_unit_equals_its_formula() -> None:
    module, x = unit(), draw(2, 5, D_MODEL)
    with torch.no_grad():
        value = linear(x, module.v_proj.weight, None)
        gate = linear(x, module.gate_proj.weight, module.gate_proj.bias)
        expected = torch.zeros_like(x)
        for b in range(2):
            for channel in range(D_MODEL):
                cell = 0.0
                for j in range(5):
                    forget = 1 / (1 + math.exp(-float(gate[b, j, channel])))
                    cell = forget * cell + (1 - forget) * float(value[b, j, channel])
                    expected[b, j, channel] = max(cell, 0.0)
    assert bool((expected > 0).any())
    torch.testing.assert_close(module(x, None), expected, **TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_sums_and_their_gradients_are_those_of_a_plain_loop(length: int) -> None:
    x, keep, into = (draw(3, length, 4, seed=seed) for seed in range(3))
    found = []
    for function in (decayed_sum, sums):
        inputs = [x.clone().requires_grad_(), torch.sigmoid(keep).requires_grad_()]
        c = function(*inputs)
        found.append([c, *torch.autograd.grad(c, inputs, into)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.slow
def test_the_operators_declare_what_they_do() -> None:
    x, keep = draw(2, 3, 4), torch.sigmoid(draw(2, 3, 4, seed=1))
    torch.library.opcheck(torch.ops.ziggurat.decayed_sum.default, (x.requires_grad_(), keep.requires_grad_()))
    torch.library.opcheck(torch.ops.ziggurat.decayed_sum_backward.default, (x.detach(), keep.detach(), x.detach()))


@pytest.mark.parametrize("shifted", [False, True])
def test_steps_equal_whole_sequences(shifted: bool) -> None:
    assert_steps_equal_whole(unit(shifted=shifted), D_MODEL)


def test_cells_are_kept_in_single_precision_under_autocast() -> None:
    """A gate of sigmoid(8) = 0.9997 is 1 in bf16, so the cell would take in nothing."""
    module = unit().float()
    with torch.no_grad():
        module.gate_proj.weight.zero_()
        module.gate_proj.bias.fill_(8.0)
        module.v_proj.weight.fill_(1.0)
    x = torch.ones(1, 400, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        last = module(x, None)[0, -1, 0].item()
    forget = 1 / (1 + math.exp(-8.0))
    assert last == pytest.approx((1 - forget**400) * D_MODEL, rel=0.01)


def test_sizes_and_roles() -> None:
    """One map without a bias and one with: 2 d^2 + d."""
    module = unit()
    assert count(module) == 2 * D_MODEL**2 + D_MODEL
    assert {slot.name: slot.role for slot in assign_roles(module)} == {
        "v_proj.weight": Role.ATTENTION_VALUE,
        "gate_proj.weight": Role.GATE,
        "gate_proj.bias": Role.BIAS,
    }
