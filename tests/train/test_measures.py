"""Similarities of states compared with plain loops over sentences and positions."""

from __future__ import annotations

import math

import pytest
import torch

from tests.small import small_config
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.measures import (
    inter_similarities,
    inter_similarity,
    similarities,
)

LENGTHS = [4, 1, 6]
MASK = torch.arange(6) < torch.tensor(LENGTHS)[:, None]


def states(count: int = 4, width: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 6, width, generator=generator, dtype=torch.float64) + 0.3 for _ in range(count)]


def cosine(a: list[float], b: list[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a)) / math.sqrt(math.fsum(y * y for y in b))


def sim(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """sim(i, j) of each sentence."""
    rows = zip(one.tolist(), other.tolist(), LENGTHS, strict=True)
    return [math.fsum(cosine(a[p], b[p]) for p in range(n)) / n for a, b, n in rows]


def sim_in(state: torch.Tensor) -> list[float]:
    found = []
    for row, n in zip(state.tolist(), LENGTHS, strict=True):
        mean = [math.fsum(row[p][c] for p in range(n)) / n for c in range(len(row[0]))]
        found.append(math.fsum(cosine(row[p], mean) for p in range(n)) / n)
    return found


def close(got: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)


def test_similarities_are_mean_cosines_over_real_positions() -> None:
    layers = states()
    close(inter_similarity(layers[1], MASK), sim_in(layers[1]))
    close(inter_similarities(layers, MASK), [sim_in(layer) for layer in layers])
    every = similarities(layers, MASK)
    assert every.shape == (4, 4, 3)
    for i in range(4):
        close(every[i], [sim(layers[i], other) for other in layers])


def test_a_layer_has_similarity_1_with_itself_and_all_are_symmetric_and_within_bounds() -> None:
    layers = states(6)
    layers[5] = -layers[4]
    every = similarities(layers, MASK)
    torch.testing.assert_close(every.diagonal().T, torch.ones(6, 3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(every, every.transpose(0, 1), atol=1e-12, rtol=0)
    assert float(every.abs().max()) <= 1 + 1e-12
    close(every[4, 5], [-1.0] * 3)
    assert float(inter_similarities(layers, MASK).abs().max()) <= 1 + 1e-12


def test_pads_are_ignored_whatever_they_contain() -> None:
    layers = states()
    for filler in (math.nan, math.inf, 1e300):
        spoilt = [layer.masked_fill(~MASK[..., None], filler).requires_grad_() for layer in layers]
        for measure in (similarities, inter_similarities):
            got = measure(spoilt, MASK)
            torch.testing.assert_close(got, measure(layers, MASK), atol=0, rtol=0)
            gradients = torch.autograd.grad(got.sum(), spoilt)
            assert all(bool(g.isfinite().all()) and not bool(g[~MASK].any()) for g in gradients)
    shorter = [layer[:, :4] for layer in layers]
    assert torch.equal(inter_similarities(shorter, MASK[:, :4])[:, 0], inter_similarities(layers, MASK)[:, 0])


def test_equal_positions_have_inter_similarity_1() -> None:
    same = states(1)[0][:, :1].expand(3, 6, 5)
    close(inter_similarity(same, MASK), [1.0] * 3)
    close(inter_similarity(same * torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0, 4.0])[:, None], MASK), [1.0] * 3)  # any length
    close(inter_similarity(states(1)[0], MASK)[1:2], [1.0])  # a single position is its own mean
    opposed = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    close(inter_similarity(opposed, torch.ones(1, 2, dtype=torch.bool)), [math.sqrt(0.5)])


def encoder_states(model: Seq2Seq, source: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """y_0, ..., y_N of a model."""
    outputs: list[torch.Tensor] = []
    model.encode(source, mask, outputs)
    return [model.source_embedding(source), *outputs]


def tiny(**choices: object) -> Seq2Seq:
    return build_model(small_config(4, 1, **choices), 20, 20).double().eval()


@torch.no_grad()
def test_a_layer_that_changes_nothing_has_adjacent_similarity_1() -> None:
    model = tiny()
    third = model.encoder.layers[2]
    for name in ("self_attn.out_proj", "ffn.out_proj"):
        third.get_parameter(f"{name}.weight").zero_()
        third.get_parameter(f"{name}.bias").zero_()
    source = torch.tensor([[4, 7, 5, 9, 3, 0], [3, 0, 0, 0, 0, 0], [6, 5, 4, 8, 9, 3]])
    layers = encoder_states(model, source, source != 0)
    assert len(layers) == 5
    adjacent = similarities(layers, source != 0).diagonal(1).T
    close(adjacent[2], [1.0] * 3)
    assert float(adjacent[[0, 1, 3]].max()) < 1 - 1e-4


@torch.no_grad()
def test_a_sentence_of_one_token_repeated_is_inter_similar_in_every_layer() -> None:
    model = tiny(embedding={"positions": "none"})
    source = torch.tensor([[5, 5, 5, 5], [6, 6, 0, 0], [4, 5, 6, 7]])
    found = inter_similarities(encoder_states(model, source, source != 0), source != 0)
    close(found[:, :2], [[1.0, 1.0]] * 5)
    assert float(found[:, 2].max()) < 0.999


def test_half_precision_is_measured_in_fp32() -> None:
    layers = [layer.bfloat16() for layer in states()]
    exact = [layer.float() for layer in layers]
    for measure in (similarities, inter_similarities):
        assert measure(layers, MASK).dtype == torch.float32
        assert torch.equal(measure(layers, MASK), measure(exact, MASK))


def test_states_of_other_shapes_are_refused_and_a_state_of_length_0_resembles_nothing() -> None:
    narrow, wide = states(1)[0], states(1, 10)[0]
    with pytest.raises(ValueError, match=r"\[3, 6, 5\] and \[3, 6, 10\] cannot be compared"):
        similarities([narrow, wide], MASK)
    close(similarities([torch.zeros_like(narrow), narrow], MASK)[0, 1], [0.0] * 3)
    close(inter_similarity(torch.zeros_like(narrow), MASK), [0.0] * 3)
