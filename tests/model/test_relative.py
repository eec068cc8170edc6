"""Relative positions (Shaw et al. 2018), with and without the table of values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.model.stepping import assert_steps_equal_whole, causal, draw, linear, randomised, weights_of
from ziggurat.model.attention import multihead
from ziggurat.model.attention.cache import padding_mask
from ziggurat.model.attention.multihead import SelfAttention
from ziggurat.model.attention.variants import RelativeAttention
from ziggurat.model.build import count_parameters as count
from ziggurat.model.dropout import Dropout
from ziggurat.model.roles import Role, assign_roles

D_MODEL, HEADS, D_HEAD = 6, 2, 3
TOLERANCE = {"atol": 1e-10, "rtol": 0.0}


def relative(clip: int, values: bool, dropout: Dropout | None = None) -> RelativeAttention:
    return randomised(RelativeAttention(D_MODEL, HEADS, dropout or Dropout(0.0), clip=clip, values=values))


class Fixed(Dropout):
    """A stand-in for dropout that multiplies by given numbers, and counts its uses."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__(0.5)
        self.factors = factors
        self.uses = 0

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        self.uses += 1
        return x * self.factors


@torch.no_grad()
def written_out(module: RelativeAttention, x: Tensor, allowed: Tensor, factors: Tensor | None = None) -> Tensor:
    """sum_j a_ij (v_j + s_c), a_ij = softmax(q_i (k_j + r_c) / sqrt(d)), pair by pair; `allowed` [b, i, j]."""
    length, maps = x.shape[1], module.qkv_proj
    query, key, value = (
        linear(x, maps.weight[n : n + D_MODEL], maps.bias[n : n + D_MODEL]) for n in range(0, 3 * D_MODEL, D_MODEL)
    )

    def row(i: int, j: int) -> int:
        return min(max(j - i, -module.clip), module.clip) + module.clip

    def logit(q: Tensor, k: Tensor, i: int, j: int) -> float:
        return float(q @ (k + module.key_table[row(i, j)])) / math.sqrt(D_HEAD)

    context = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for h, head in enumerate(torch.arange(D_MODEL).chunk(HEADS)):
            for i in range(length):
                seen = [j for j in range(length) if allowed[b, i, j]]
                weights = weights_of(query[b, i, head], key[b][:, head], i, seen, logit)
                for j, weight in zip(seen, weights, strict=True):
                    part = value[b, j, head].clone()
                    if module.value_table is not None:
                        part += module.value_table[row(i, j)]
                    factor = 1.0 if factors is None else float(factors[b, h, i, j])
                    context[b, i, head] += weight * factor * part
    return linear(context, module.out_proj.weight, module.out_proj.bias)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("clip", [1, 2, 9])
def test_relative_attention_equals_the_written_out_sums(
    clip: int, values: bool, explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 1000 if explicit else 0)
    module, x = relative(clip, values), draw(2, 5, D_MODEL)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    everything = torch.ones(2, 5, 5, dtype=torch.bool)
    for hidden, allowed in (
        (None, everything),
        (padding_mask(mask, torch.float64), mask[:, None, :] & everything),
        (causal(5), everything.tril()),
    ):
        torch.testing.assert_close(module(x, hidden), written_out(module, x, allowed), **TOLERANCE)


@pytest.mark.parametrize("values", [False, True])
def test_relative_attention_with_zero_tables_is_plain_attention(values: bool) -> None:
    module, plain = relative(2, values), SelfAttention(D_MODEL, HEADS, Dropout(0.0)).double().eval()
    plain.load_state_dict({name: p for name, p in module.state_dict().items() if "table" not in name})
    x = draw(2, 6, D_MODEL)
    assert not torch.allclose(module(x, causal(6)), plain(x, causal(6)), atol=1e-3)
    for name, table in module.named_parameters():
        if "table" in name:
            torch.nn.init.zeros_(table)
    torch.testing.assert_close(module(x, causal(6)), plain(x, causal(6)), **TOLERANCE)


@pytest.mark.parametrize("values", [False, True])
def test_positions_beyond_the_clip_are_not_distinguished(values: bool) -> None:
    """For position i and clip k, all positions up to i - k may be permuted, but no two later ones."""
    module, x = relative(2, values), draw(1, 7, D_MODEL)
    swapped = x[:, [1, 0, 2, 3, 4, 5, 6]]
    same = torch.isclose(module(x, None), module(swapped, None), atol=1e-10, rtol=0).all(-1)[0]
    assert same.tolist() == [False, False, False, True, True, True, True]
    later = x[:, [0, 1, 2, 3, 4, 6, 5]]
    same = torch.isclose(module(x, None), module(later, None), atol=1e-10, rtol=0).all(-1)[0]
    assert same.tolist() == [True, True, True, True, False, False, False]


@pytest.mark.parametrize("values", [False, True])
def test_a_clip_of_the_length_minus_one_clips_nothing(values: bool) -> None:
    tight, loose = relative(5, values), relative(8, values)
    with torch.no_grad():
        for (_, narrow), (_, wide) in zip(tight.named_parameters(), loose.named_parameters(), strict=True):
            if narrow.shape == wide.shape:
                wide.copy_(narrow)
            else:
                wide.fill_(1e6)[3:-3] = narrow  # never read, or read with weight 0
    x = draw(2, 6, D_MODEL)
    torch.testing.assert_close(loose(x, causal(6)), tight(x, causal(6)), **TOLERANCE)


def test_heads_share_tables_of_2k_plus_1_rows() -> None:
    """A base layer with clip 8 has 1,088 additional parameters."""
    plain = count(SelfAttention(512, 8, Dropout(0.0)))
    key_only = RelativeAttention(512, 8, Dropout(0.0), clip=8)
    assert key_only.key_table.shape == (17, 64)
    assert count(key_only) - plain == 1088
    assert count(RelativeAttention(512, 8, Dropout(0.0), clip=8, values=True)) - plain == 2 * 1088
    roles = {slot.name: slot.role for slot in assign_roles(relative(3, True))}
    assert (roles["key_table"], roles["value_table"]) == (Role.RELATIVE, Role.RELATIVE)
    assert len(roles) == 8


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("clip", [1, 3, 20])
def test_steps_equal_whole_sequences(clip: int, values: bool) -> None:
    assert_steps_equal_whole(relative(clip, values), D_MODEL)


@pytest.mark.parametrize("values", [False, True])
def test_dropped_weights_are_the_same_in_both_sums(values: bool) -> None:
    x = draw(2, 4, D_MODEL)
    factors = 2.0 * (draw(2, HEADS, 4, 4, seed=3) > 0).double()
    dropout = Fixed(factors)
    module = relative(1, values, dropout)
    everything = torch.ones(2, 4, 4, dtype=torch.bool)
    torch.testing.assert_close(module(x, None), written_out(module, x, everything, factors), **TOLERANCE)
    assert dropout.uses == 1


@pytest.mark.parametrize("values", [False, True])
def test_gradients(values: bool) -> None:
    module, x = relative(1, values), draw(1, 3, D_MODEL).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: module(x, causal(3)), (x, *module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("values", [False, True])
def test_one_graph_serves_all_lengths(values: bool) -> None:
    module, counter = relative(2, values), CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for length in (3, 4, 5, 9, 12):  # the first length is treated as a constant, the second as a variable
        x = draw(2, length, D_MODEL, seed=length)
        torch.testing.assert_close(compiled(x, causal(length)), module(x, causal(length)), **TOLERANCE)
    assert counter.frame_count <= 2
