from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ziggurat.errors import ConfigError
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.embedding import InputEmbedding, LearnedPositions, SinusoidalPositions, sinusoids


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
    torch.testing.assert_close(positions(0, 3), sinusoids(3, 8).float())
    torch.testing.assert_close(positions(50, 2), sinusoids(52, 8)[50:].float())
    assert list(positions.state_dict()) == []


def test_double_precision_table_is_not_a_rounded_one() -> None:
    torch.testing.assert_close(SinusoidalPositions(8).double()(3, 4), sinusoids(7, 8)[3:], atol=0, rtol=0)


def test_embedding_is_scaled_and_offset() -> None:
    tokens = nn.Embedding(11, 6, dtype=torch.float64)
    embedding = InputEmbedding(tokens, SinusoidalPositions(6).double(), math.sqrt(6), Dropout(0.0))
    ids = torch.tensor([[3, 4, 5], [1, 0, 2]])
    table = sinusoids(5, 6)
    for b in range(2):
        for t in range(3):
            expected = tokens.weight[ids[b, t]] * math.sqrt(6) + table[2 + t]
            torch.testing.assert_close(embedding(ids, 2)[b, t], expected)
    torch.testing.assert_close(embedding.step(ids[:, :2], 4), embedding(ids[:, :2].reshape(-1, 1), 4).view(2, 2, 6))


def test_learned_positions_refuse_what_they_cannot_hold() -> None:
    positions = LearnedPositions(4, 8)
    assert positions(2, 6).shape == (6, 4)
    with pytest.raises(ConfigError, match=r"9 tokens is longer than `model\.embedding\.max_positions` \(8\)"):
        positions(8, 1)
