from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import FeedForward, GatedFeedForward, ShiftedLinear
from ziggurat.model.roles import Role, assign_roles


class Masking(nn.Module):
    """A stand-in for dropout that keeps every other channel and doubles it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 * (torch.arange(x.shape[-1]) % 2)).to(x.dtype)


def drawn(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module.double()


def vector(d: int) -> Tensor:
    return torch.randn(2, 3, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_relu_network_follows_the_formula() -> None:
    """max(0, x W_1 + b_1) W_2 + b_2, dropout after the activation (Vaswani et al. 2017, equation 2)."""
    d, f = 4, 6
    network, x = drawn(FeedForward(d, f, "relu", Masking())), vector(d)
    w1, b1, w2, b2 = (parameter.detach() for parameter in network.parameters())
    y = network(x)
    for b in range(2):
        for t in range(3):
            inner = [max(0.0, float(sum(x[b, t, i] * w1[j, i] for i in range(d)) + b1[j])) for j in range(f)]
            kept = [2 * value if j % 2 else 0.0 for j, value in enumerate(inner)]
            expected = [float(sum(kept[j] * w2[i, j] for j in range(f)) + b2[i]) for i in range(d)]
            assert y[b, t].tolist() == pytest.approx(expected, abs=1e-10)


def test_gelu_network_uses_the_exact_gelu() -> None:
    network, x = drawn(FeedForward(4, 6, "gelu", Masking())), vector(4)
    w1, b1, w2, b2 = network.parameters()
    inner = x @ w1.T + b1
    expected = Masking()(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ w2.T + b2
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)


def test_silu_network_is_x_times_its_sigmoid() -> None:
    network, x = drawn(FeedForward(4, 6, "silu", Masking())), vector(4)
    w1, b1, w2, b2 = network.parameters()
    inner = x @ w1.T + b1
    expected = Masking()(inner / (1 + torch.exp(-inner))) @ w2.T + b2
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)


def test_shifted_network_has_a_scalar_before_each_map_and_the_activation() -> None:
    """As in zero's modules/fixup.py: shift, W_1, shift, relu, dropout, shift, W_2, and no biases."""
    network = FeedForward(4, 6, "relu", Masking(), linear=ShiftedLinear, shifted=True)
    slots = {slot.name: slot.role for slot in assign_roles(network)}
    assert slots == {
        "in_proj.weight": Role.FFN_IN,
        "out_proj.weight": Role.FFN_OUT,
        "shift": Role.WIRING,
        "in_proj.shift": Role.WIRING,
        "out_proj.shift": Role.WIRING,
    }
    shifts = [p for n, p in network.named_parameters() if n.endswith("shift")]
    assert all(p.shape == (1,) and not p.any() for p in shifts)
    x = vector(4)
    network = drawn(network)
    w1, w2 = network.in_proj.weight, network.out_proj.weight
    inner = torch.relu((x + network.in_proj.shift) @ w1.T + network.shift)
    expected = (Masking()(inner) + network.out_proj.shift) @ w2.T
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)


def test_swiglu_follows_the_formula_of_llama() -> None:
    """down_proj(silu(gate_proj(x)) * up_proj(x)), without biases; dropout before the last map."""
    d, f = 4, 6
    network, x = drawn(GatedFeedForward(d, f, Masking())), vector(d)
    assert sorted(dict(network.named_parameters())) == ["in_proj.weight", "out_proj.weight"]
    gate_proj, up_proj = network.in_proj.weight.chunk(2)
    gate, up = x @ gate_proj.T, x @ up_proj.T
    expected = Masking()(gate / (1 + torch.exp(-gate)) * up) @ network.out_proj.weight.T
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)


def test_shifted_swiglu_has_a_scalar_before_each_map_and_the_activation() -> None:
    network = GatedFeedForward(4, 6, Masking(), linear=ShiftedLinear, shifted=True)
    roles = {slot.name: slot.role for slot in assign_roles(network)}
    assert roles["shift"] is roles["in_proj.shift"] is roles["out_proj.shift"] is Role.WIRING
    x, network = vector(4), drawn(network)
    gate_proj, up_proj = network.in_proj.weight.chunk(2)
    shifted = x + network.in_proj.shift
    gate = shifted @ gate_proj.T + network.shift
    inner = gate / (1 + torch.exp(-gate)) * (shifted @ up_proj.T)
    expected = (Masking()(inner) + network.out_proj.shift) @ network.out_proj.weight.T
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("d_ff", "width"), [(2048, 1408), (4096, 2752), (512, 384), (96, 64), (100, 68), (6, 4), (7, 5), (1, 1)]
)
def test_swiglu_has_the_width_with_the_same_number_of_parameters(d_ff: int, width: int) -> None:
    network = GatedFeedForward(8, d_ff, Dropout(0.0))
    assert network.out_proj.in_features == width
    assert network.in_proj.out_features == 2 * width
    step = math.gcd(64, d_ff)
    assert width % step == 0
    assert width - step < 2 * d_ff / 3 <= width


def test_every_matrix_has_its_role() -> None:
    plain = {slot.name: slot.role for slot in assign_roles(FeedForward(4, 6, "relu", Dropout(0.0)))}
    assert plain == {
        "in_proj.weight": Role.FFN_IN,
        "in_proj.bias": Role.BIAS,
        "out_proj.weight": Role.FFN_OUT,
        "out_proj.bias": Role.BIAS,
    }
    gated = assign_roles(GatedFeedForward(4, 6, Dropout(0.0)))
    assert [(slot.role, tuple(slot.values.shape)) for slot in gated] == [
        (Role.FFN_IN, (4, 4)),
        (Role.FFN_IN, (4, 4)),
        (Role.FFN_OUT, (4, 4)),
    ]


def test_a_deeper_network_has_square_maps_between_the_two() -> None:
    network, x = drawn(FeedForward(4, 6, "silu", Masking(), depth=4)), vector(4)
    maps = dict(network.named_parameters())
    assert maps["between.1.weight"].shape == (6, 6)
    inner = x
    for name in ("in_proj", "between.0", "between.1"):
        inner = inner @ maps[f"{name}.weight"].T + maps[f"{name}.bias"]
        inner = Masking()(inner / (1 + torch.exp(-inner)))
    expected = inner @ maps["out_proj.weight"].T + maps["out_proj.bias"]
    torch.testing.assert_close(network(x), expected, atol=1e-10, rtol=0)
    assert [slot.role for slot in assign_roles(network)].count(Role.FFN_IN) == 3
