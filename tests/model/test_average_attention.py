"""Average attention, gated (Zhang et al. 2018) and simplified (Zhang et al. 2019)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.model.stepping import assert_steps_equal_whole, causal, draw, linear, randomised
from ziggurat.model.attention.cache import LiveBeams
from ziggurat.model.attention.multihead import SelfAttention
from ziggurat.model.attention.variants import (
    AverageAttention,
    AverageCache,
    SimplifiedAverageAttention,
    causal_average,
)
from ziggurat.model.build import count_parameters as count
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import FeedForward, ShiftedLinear
from ziggurat.model.residual.base import Residual
from ziggurat.model.roles import Role, assign_roles

D_MODEL = 6
TOLERANCE = {"atol": 1e-10, "rtol": 0.0}


def means(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of the real positions up to each one, zero at padding, position by position."""
    result = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            if mask is None or mask[b, j]:
                real = [k for k in range(j + 1) if mask is None or mask[b, k]]
                for k in real:
                    result[b, j] += x[b, k] / len(real)
    return result


def average_attention(*, gate: bool = True, ffn: bool = False, shifted: bool = False) -> AverageAttention:
    make = ShiftedLinear if shifted else nn.Linear
    network = FeedForward(D_MODEL, 10, "relu", Dropout(0.0), linear=make) if ffn else None
    return randomised(AverageAttention(D_MODEL, gate=gate, ffn=network, linear=make))


def simplified(*, shifted: bool = False) -> SimplifiedAverageAttention:
    return randomised(SimplifiedAverageAttention(D_MODEL, linear=ShiftedLinear if shifted else nn.Linear))


KINDS = {
    "gate": lambda: average_attention(),
    "gate and network": lambda: average_attention(ffn=True),
    "network": lambda: average_attention(gate=False, ffn=True),
    "nothing": lambda: average_attention(gate=False),
    "shifted": lambda: average_attention(ffn=True, shifted=True),
    "simplified": simplified,
    "simplified, shifted": lambda: simplified(shifted=True),
}


def test_the_average_is_the_cumulative_sum_over_the_position() -> None:
    x = draw(2, 5, D_MODEL)
    positions = torch.arange(1, 6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(causal_average(x), x.cumsum(1) / positions, **TOLERANCE)
    torch.testing.assert_close(causal_average(x), means(x), **TOLERANCE)


def test_padded_rows_are_zero_and_padding_is_not_averaged() -> None:
    """The mask need not be a prefix. The reference is the authors' matrix with normalised rows."""
    mask = torch.tensor([[True] * 4 + [False], [True, False, True, True, False], [False, False, True, True, True]])
    x = draw(3, 5, D_MODEL)
    matrix = (mask[:, :, None] & mask[:, None, :]).double().tril()
    matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=1)
    x_with_noise = x.masked_fill(~mask[..., None], math.nan)
    got = causal_average(x_with_noise, mask)
    torch.testing.assert_close(got, matrix @ x, **TOLERANCE)
    torch.testing.assert_close(got, means(x, mask), **TOLERANCE)
    assert torch.equal(got[~mask], torch.zeros(5, D_MODEL, dtype=torch.float64))


@pytest.mark.parametrize("heads", [1, 3])
def test_simplified_average_attention_is_uniform_causal_attention(heads: int) -> None:
    module, attention = simplified(), randomised(SelfAttention(D_MODEL, heads, Dropout(0.0)), seed=1)
    with torch.no_grad():
        for part in ("weight", "bias"):
            fused = attention.qkv_proj.get_parameter(part)
            fused[: 2 * D_MODEL] = 0  # queries and keys: all logits equal
            fused[2 * D_MODEL :] = module.v_proj.get_parameter(part)
    attention.out_proj = module.out_proj
    x = draw(2, 7, D_MODEL)
    torch.testing.assert_close(module(x, causal(7)), attention(x, causal(7)), **TOLERANCE)


def test_simplified_average_attention_equals_its_formula() -> None:
    module, x = simplified(), draw(2, 5, D_MODEL)
    with torch.no_grad():
        values = linear(x, module.v_proj.weight, module.v_proj.bias)
        expected = linear(means(values), module.out_proj.weight, module.out_proj.bias)
    torch.testing.assert_close(module(x, None), expected, **TOLERANCE)


def test_open_gate_of_the_average_alone_gives_ln_of_x_plus_average() -> None:
    module = average_attention()
    assert module.gate_proj is not None
    with torch.no_grad():
        module.gate_proj.weight.zero_()
        module.gate_proj.bias.copy_(torch.tensor([-1e4] * D_MODEL + [1e4] * D_MODEL))
    residual = Residual(Dropout(0.0), out_norm=nn.LayerNorm(D_MODEL)).double()
    x = draw(2, 5, D_MODEL)
    total = x + means(x)
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(residual(x, module(x, None), x), expected, **TOLERANCE)


def test_running_sum_equals_the_matrix_form() -> None:
    x = draw(3, 8, D_MODEL)
    matrix = torch.ones(8, 8, dtype=torch.float64).tril() / torch.arange(1, 9, dtype=torch.float64)[:, None]
    live = one_beam(3)
    cache = AverageCache(live)
    for t in range(8):
        torch.testing.assert_close(cache.append(x[:, t, None])[:, 0], (matrix @ x)[:, t], **TOLERANCE)
        live.end()


@pytest.mark.parametrize("ffn", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_gated_average_equals_its_formula(gate: bool, ffn: bool) -> None:
    module, x = average_attention(gate=gate, ffn=ffn), draw(2, 5, D_MODEL)
    with torch.no_grad():
        y = means(x)
        if module.ffn is not None:
            inner, outer = module.ffn.get_submodule("in_proj"), module.ffn.get_submodule("out_proj")
            y = linear(linear(y, inner.weight, inner.bias).clamp(min=0), outer.weight, outer.bias)
        expected = y
        if module.gate_proj is not None:
            both = linear(torch.cat([x, y], dim=-1), module.gate_proj.weight, module.gate_proj.bias)
            gates = 1 / (1 + torch.exp(-both))
            expected = gates[..., :D_MODEL] * x + gates[..., D_MODEL:] * y
    torch.testing.assert_close(module(x, None), expected, **TOLERANCE)


def one_beam(sentences: int) -> LiveBeams:
    live = LiveBeams(1, sentences)
    live.admit(torch.ones(sentences, 1, dtype=torch.bool), torch.empty(0))
    return live


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_whole_sequences(kind: str) -> None:
    assert_steps_equal_whole(KINDS[kind](), D_MODEL)


def test_the_cache_does_not_grow() -> None:
    module, live = simplified(), one_beam(2)
    cache = AverageCache(live)
    for step in range(5):
        module.step(draw(2, 1, D_MODEL, seed=step), cache)
        live.end()
        assert cache.state is not None
        assert cache.state.shape == (2, 1, D_MODEL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_types_are_summed_in_single_precision(dtype: torch.dtype) -> None:
    """A sum of 2500 hundreds overflows in fp16 and stops growing in bf16."""
    x = torch.full((1, 2500, 1), 100.0, dtype=dtype)
    assert torch.equal(causal_average(x), x)
    assert torch.equal(causal_average(x, torch.ones(1, 2500, dtype=torch.bool)), x)
    live = one_beam(1)
    cache = AverageCache(live)
    for t in range(2500):
        average = cache.append(x[:, t, None])
        live.end()
    assert (average.dtype, float(average)) == (dtype, 100.0)


def test_sizes_are_those_of_the_papers() -> None:
    """The gate has 4d^2 + 2d parameters (2d fewer than self-attention), its network 2df + f + d, SAAN 2d^2 + 2d."""
    d, f = D_MODEL, 10
    assert count(average_attention()) == 4 * d * d + 2 * d == count(SelfAttention(d, 2, Dropout(0.0))) - 2 * d
    assert count(average_attention(ffn=True)) == 4 * d * d + 2 * d + 2 * d * f + f + d
    assert count(average_attention(gate=False)) == 0
    assert count(simplified()) == 2 * d * d + 2 * d


def test_every_parameter_has_its_role() -> None:
    gated = {slot.name: slot for slot in assign_roles(average_attention(ffn=True))}
    assert gated["gate_proj.weight"].role is Role.GATE
    assert gated["gate_proj.weight"].values.shape == (2 * D_MODEL, 2 * D_MODEL)
    assert gated["ffn.in_proj.weight"].role is Role.FFN_IN
    saan = {slot.name: (slot.role, slot.fused_out) for slot in assign_roles(simplified())}
    assert saan == {
        "v_proj.weight": (Role.ATTENTION_VALUE, 3 * D_MODEL),
        "v_proj.bias": (Role.BIAS, 0),
        "out_proj.weight": (Role.ATTENTION_OUT, 0),
        "out_proj.bias": (Role.BIAS, 0),
    }


def test_gradients() -> None:
    x, mask = draw(2, 4, 2).requires_grad_(), torch.tensor([[False, True, True, True], [True, True, False, False]])
    assert torch.autograd.gradcheck(lambda x: (causal_average(x), causal_average(x, mask)), x)
    module, x = average_attention(), draw(1, 3, D_MODEL).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x, None), (x, *module.parameters()))
