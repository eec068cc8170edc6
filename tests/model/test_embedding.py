from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import (
    InputEmbedding,
    LearnedPositions,
    OutputProjection,
    SinusoidalPositions,
    UnitEmbedding,
    sinusoids,
)
from ziggurat.model.roles import Role, assign_roles
from ziggurat.system.errors import ConfigError


def test_sinusoids_follow_the_formula() -> None:
    d_model, length = 10, 7
    table = sinusoids(length, d_model)
    for position in range(length):
        for i in range(d_model // 2):
            rate = 10000 ** (-i / (d_model / 2 - 1))
            assert table[position, i] == pytest.approx(math.sin(position * rate), abs=1e-14)
            assert table[position, d_model // 2 + i] == pytest.approx(math.cos(position * rate), abs=1e-14)


def test_positions_start_at_zero_and_the_table_grows() -> None:
    positions = SinusoidalPositions(8, length=4)
    torch.testing.assert_close(positions(3), sinusoids(3, 8).float())
    torch.testing.assert_close(positions(52), sinusoids(52, 8).float())
    assert list(positions.state_dict()) == []


def test_double_precision_table_is_not_a_rounded_one() -> None:
    torch.testing.assert_close(SinusoidalPositions(8).double()(7), sinusoids(7, 8), atol=0, rtol=0)


def test_embedding_is_scaled_and_offset() -> None:
    tokens = nn.Embedding(11, 6, dtype=torch.float64)
    embedding = InputEmbedding(tokens, SinusoidalPositions(6).double(), math.sqrt(6), Dropout(0.0))
    ids = torch.tensor([[3, 4, 5], [1, 0, 2]])
    table = sinusoids(5, 6)
    for b in range(2):
        for t in range(3):
            expected = tokens.weight[ids[b, t]] * math.sqrt(6) + table[t]
            torch.testing.assert_close(embedding(ids)[b, t], expected)
    at = torch.tensor([4, 1])
    expected = tokens.weight[ids[:, :2]] * math.sqrt(6) + table[at, None]
    torch.testing.assert_close(embedding.step(ids[:, :2], at, 4), expected)


def test_rows_of_length_one() -> None:
    """FixNorm (Nguyen and Salazar 2019, 2.3): w / |w| is the output row and, times sqrt(d), the input; w is trained."""
    tokens = UnitEmbedding(11, 6, dtype=torch.float64)
    assert {slot.role for slot in assign_roles(tokens)} == {Role.EMBEDDING}
    output = OutputProjection(tokens.weight, unit=True)
    ids, hidden = torch.tensor([[3, 4, 3]]), torch.randn(2, 6, dtype=torch.float64)
    embedding = InputEmbedding(tokens, None, math.sqrt(6), Dropout(0.0))
    with torch.no_grad():
        tokens.weight.mul_(torch.linspace(0.1, 5, 11, dtype=torch.float64)[:, None])
    rows = torch.stack([row / row.square().sum().sqrt() for row in tokens.weight])
    torch.testing.assert_close(embedding(ids), rows[ids] * math.sqrt(6))
    torch.testing.assert_close(output(hidden), hidden @ rows.T)
    torch.testing.assert_close(output.restricted(torch.tensor([7, 2]))(hidden), hidden @ rows[[7, 2]].T)
    embedding(ids).square().sum().backward()  # rows have constant length: no gradient
    assert tokens.weight.grad is not None
    assert tokens.weight.grad.abs().max() < 1e-12


def test_learned_positions_refuse_longer_sentences() -> None:
    positions = LearnedPositions(4, 8)
    assert positions(8).shape == (8, 4)
    with pytest.raises(ConfigError, match=r"9 tokens is longer than `model\.embedding\.max_positions` \(8\)"):
        positions(9)


@pytest.mark.parametrize("scale", [1.0, math.sqrt(6)])
@pytest.mark.parametrize("zero_start", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_bias_is_added_to_every_embedding_and_the_first_may_be_zero(
    scale: float, zero_start: bool, positions: bool
) -> None:
    tokens, bias = nn.Embedding(11, 6, dtype=torch.float64), nn.Parameter(torch.randn(6, dtype=torch.float64))
    embedding = InputEmbedding(
        tokens,
        SinusoidalPositions(6).double() if positions else None,
        scale,
        Dropout(0.0),
        bias=bias,
        zero_start=zero_start,
    )
    ids, table = torch.tensor([[3, 4, 5], [1, 0, 2]]), sinusoids(5, 6)

    def expected(token: int, position: int) -> torch.Tensor:
        x = tokens.weight[token] * scale + bias
        if zero_start and position == 0:
            x = torch.zeros(6, dtype=torch.float64)
        return x + table[position] if positions else x

    whole = embedding(ids)
    for b in range(2):
        for t in range(3):
            torch.testing.assert_close(whole[b, t], expected(int(ids[b, t]), t), atol=1e-10, rtol=0)
    for position in range(3):
        at = torch.tensor([position, 2 - position])
        step = embedding.step(ids[range(2), at, None].expand(2, 4), at, 2)
        torch.testing.assert_close(step, embedding(ids)[range(2), at, None].expand(2, 4, 6), atol=1e-10, rtol=0)


def test_a_zero_start_trains_nothing() -> None:
    tokens, bias = nn.Embedding(11, 6), nn.Parameter(torch.zeros(6))
    embedding = InputEmbedding(tokens, None, 1.0, Dropout(0.0), bias=bias, zero_start=True)
    embedding(torch.tensor([[3, 4], [3, 5]])).sum().backward()
    assert tokens.weight.grad is not None
    assert tokens.weight.grad.sum(1).nonzero().flatten().tolist() == [4, 5]
    assert bias.grad is not None
    assert bias.grad.tolist() == [2.0] * 6


def test_output_projection_is_a_linear_map_with_or_without_a_bias() -> None:
    weight, bias = (nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((11, 6), (11,)))
    hidden = torch.randn(2, 3, 6, dtype=torch.float64)
    plain, biased = OutputProjection(weight)(hidden), OutputProjection(weight, bias)(hidden)
    for v in range(11):
        product = sum(hidden[:, :, i] * weight[v, i] for i in range(6))
        torch.testing.assert_close(plain[:, :, v], product, atol=1e-10, rtol=0)
        torch.testing.assert_close(biased[:, :, v], product + bias[v], atol=1e-10, rtol=0)


def test_every_parameter_has_its_role_and_a_shared_one_appears_once() -> None:
    bias, tokens = nn.Parameter(torch.zeros(6)), nn.Embedding(11, 6)
    sides = [InputEmbedding(tokens, LearnedPositions(6, 4), 1.0, Dropout(0.0), bias=bias) for _ in range(2)]
    tied = OutputProjection(tokens.weight, nn.Parameter(torch.zeros(11)))
    roles = [slot.role for slot in assign_roles(nn.ModuleList([*sides, tied]))]
    assert roles == [Role.INPUT_BIAS, Role.EMBEDDING, Role.POSITION, Role.POSITION, Role.BIAS]
    untied = OutputProjection(nn.Parameter(torch.zeros(11, 6)))
    assert [slot.role for slot in assign_roles(untied)] == [Role.OUTPUT]
