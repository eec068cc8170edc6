"""Sampling: its random numbers, what it may draw, and how often it draws it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS
from ziggurat.config import DecodingConfig
from ziggurat.translate.choice import SampleChoice, restricted, uniform
from ziggurat.translate.hypotheses import IdHypothesis
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

MASK = (1 << 64) - 1
SAMPLE = DecodingConfig(search="sample")


def mixed(bits: int) -> int:
    """SplitMix64's finaliser, with Python's integers."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def number(key: int, sample: int, position: int) -> float:
    """The random number of a sample (from 0) at a position (from 0)."""
    own = mixed((key + (sample + 1) * 0xBF58476D1CE4E5B9) & MASK)
    return (mixed((own + position * 0x9E3779B97F4A7C15) & MASK) >> 24) / 2**40


@settings(max_examples=50)
@given(key=st.integers(0, MASK), sample=st.integers(0, 5), position=st.integers(0, 2000))
def test_draws_equal_those_with_python_integers(key: int, sample: int, position: int) -> None:
    choice = SampleChoice(6, SAMPLE, "cpu")
    choice.admit([Sentence([5], 9, key=1), Sentence([5], 9, key=key)])
    vocabulary = 50
    log_probabilities = torch.randn(2, 6, vocabulary, generator=torch.Generator().manual_seed(key % 1000)).double()
    log_probabilities = log_probabilities.log_softmax(-1)
    found = choice.candidates(torch.zeros(2, 6).double(), log_probabilities, torch.tensor([0, position]))
    draw = number(key, sample, position)
    sums = itertools.accumulate(log_probabilities[1, sample].exp().tolist())
    token = next(token for token, passed in enumerate(sums) if passed > draw)
    assert int(found.token[1, sample]) == token
    assert float(found.log_probability[1, sample]) == float(log_probabilities[1, sample, token])


def test_draws_are_spread_evenly() -> None:
    keys = [mixed(i) for i in range(20_000)]
    draws = [number(key, i % 3, i % 40) for i, key in enumerate(keys)]
    counts = Counter(int(20 * draw) for draw in draws)
    assert sum((counts[i] - 1000) ** 2 / 1000 for i in range(20)) < 43.8  # chi-square, 19 degrees, p = 0.001
    assert 0 <= min(draws) < max(draws) < 1
    assert float(uniform(torch.tensor(-1))) == 1 - 2.0**-40


@settings(max_examples=80)
@given(data=st.data())
def test_restrictions_are_those_of_hugging_face(data: st.DataObject) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    seed = data.draw(st.integers(0, 999))
    scores = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    sampling = DecodingConfig(
        search="sample",
        temperature=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 1, 5, 30])),
        top_p=data.draw(st.sampled_from([0.3, 0.8, 1.0])),
        epsilon=data.draw(st.sampled_from([0.0, 0.05, 0.3])),
    )
    ids = torch.zeros(3, 1, dtype=torch.int64)
    theirs = processors.TemperatureLogitsWarper(sampling.temperature)(ids, scores.clone())
    if sampling.top_k:
        theirs = processors.TopKLogitsWarper(sampling.top_k)(ids, theirs)
    if sampling.top_p < 1:
        theirs = processors.TopPLogitsWarper(sampling.top_p)(ids, theirs)
    if sampling.epsilon:
        theirs = processors.EpsilonLogitsWarper(sampling.epsilon)(ids, theirs)
    torch.testing.assert_close(restricted(scores, sampling), theirs)


def samples(
    wanted: int, sampling: DecodingConfig, sentences: list[Sentence], seed: int = 4, batch_sentences: int = 256
) -> list[list[IdHypothesis]]:
    table = random_log_probabilities(seed, 5, 1.0)
    asked = SearchSettings(wanted, wanted, BOS, EOS, (BOS,), sampling=sampling, batch_sentences=batch_sentences)
    return search(TableScorer(table, 5), sentences, asked)


def test_whole_translations_have_the_models_frequencies() -> None:
    """Chi-square over all outputs of up to two tokens; the probability of BOS is redistributed."""
    table = random_log_probabilities(4, 5, 1.0)
    count, temperature = 3000, 0.7

    def chance(prefix: tuple[int, ...], token: int) -> float:
        weights = {t: math.exp(p / temperature) for t, p in enumerate(table(0, prefix)) if t != BOS}
        return weights[token] / sum(weights.values())

    expected: dict[tuple[int, ...], float] = {(EOS,): chance((), EOS)}
    for a in (2, 3, 4):
        expected[a, EOS] = chance((), a) * chance((a,), EOS)
        for b in (2, 3, 4):
            expected[a, b] = chance((), a) * chance((a,), b)
    sentences = [Sentence([0], 2, key=mixed(i)) for i in range(count // 10)]
    found = samples(10, DecodingConfig(search="sample", temperature=temperature), sentences, batch_sentences=64)
    outcomes = Counter((*h.tokens, *([EOS] if len(h.tokens) < 2 else [])) for row in found for h in row)
    assert sum(outcomes.values()) == count
    assert set(outcomes) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1)
    distance = sum((outcomes[path] - count * p) ** 2 / (count * p) for path, p in expected.items())
    assert distance < 32.9  # 12 degrees of freedom, p = 0.001


def test_samples_do_not_depend_on_the_rest_of_the_batch() -> None:
    sentences = [Sentence([i] + [0] * (i % 3), 3 + i % 4, key=mixed(i)) for i in range(9)]
    whole = samples(3, SAMPLE, sentences)
    assert samples(3, SAMPLE, sentences, batch_sentences=2) == whole
    assert samples(3, SAMPLE, sentences[::-1])[::-1] == whole
    assert [samples(3, SAMPLE, [s])[0] for s in sentences] == whole
    others = [Sentence(s.source, s.max_length, key=mixed(s.key)) for s in sentences]
    assert samples(3, SAMPLE, others) != whole


def test_every_sample_even_a_cut_one_has_the_models_probability() -> None:
    table = random_log_probabilities(4, 5, 1.0)
    (found,) = samples(40, DecodingConfig(search="sample", temperature=2.0, top_k=3), [Sentence([0], 1, key=7)])
    assert len(found) == 40
    assert {h.finished for h in found} == {True, False}
    for h in found:
        path = [*h.tokens, *([EOS] if h.finished else [])]
        exact = [table(0, tuple(path[:i]))[token] for i, token in enumerate(path)]
        assert h.token_log_probabilities == pytest.approx(exact, abs=1e-12)


def test_top_k_of_one_is_greedy_search() -> None:
    sentences = [Sentence([i], 6, key=i) for i in range(5)]
    table = random_log_probabilities(4, 5, 1.0)
    greedy = search(TableScorer(table, 5), sentences, SearchSettings(1, 1, BOS, EOS, (BOS,)))
    drawn = samples(1, DecodingConfig(search="sample", top_k=1), sentences)
    assert [row[0].tokens for row in drawn] == [row[0].tokens for row in greedy]


def test_a_sample_without_an_allowed_token_ends() -> None:
    asked = SearchSettings(2, 2, BOS, EOS, (BOS, 1, 2, 3, 4), sampling=SAMPLE)
    (found,) = search(TableScorer(random_log_probabilities(1, 5, 1.0), 5), [Sentence([0], 5)], asked)
    assert [(h.tokens, h.finished) for h in found] == [([], False)] * 2
