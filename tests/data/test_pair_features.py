"""Features of pairs compared with plain loops in double precision."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ziggurat.data.cleaning import pair_score
from ziggurat.data.cleaning.pair_score import (
    FEATURES,
    CorpusStatistics,
    HalfModel,
    PairTokens,
    WordOrder,
    features,
    vocabulary,
)
from ziggurat.data.hmm import Lexicon

SIZES = (6, 5)
IDS = st.lists(st.integers(-1, 4), min_size=1, max_size=6)
PAIRS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=8)
Arrays = list[NDArray[np.int32]]


def _arrays(sentences: list[list[int]]) -> Arrays:
    return [np.array(ids, np.int32) for ids in sentences]


@pytest.fixture(scope="module")
def half() -> HalfModel:
    generator = np.random.default_rng(2)
    sides = [[generator.integers(-1, size, generator.integers(1, 7)).tolist() for _ in range(60)] for size in SIZES]
    return HalfModel.learn((_arrays(sides[0]), _arrays(sides[1])), SIZES)


def _t(lexicon: Lexicon, source: int, target: int, target_size: int) -> float:
    key = source * target_size + target
    places = (lexicon.keys == key).nonzero()[0]
    known = len(places) and source >= 0 and target >= 0
    return float(max(1e-12, lexicon.probabilities[places[0]])) if known else 1e-9


def _directed(source: list[int], target: list[int], lexicon: Lexicon, order: WordOrder, a: int) -> list[float]:
    """Return the features of one direction, word by word, as the docstrings define them."""
    counts = [count + 0.1 for count in order.words.tolist()]

    def alone(word: int) -> float:
        return (counts[word] if word >= 0 else 0.1) / sum(counts)

    gain = covered = unknown = 0.0
    uncovered, run, longest = [], 0, 0
    for word in target:
        best = max(_t(lexicon, other, word, SIZES[1 - a]) for other in source)
        every = [_t(lexicon, other, word, SIZES[1 - a]) for other in [*source, SIZES[a]]]
        likely = sum(every) / len(every)
        gain += math.log(max(likely, 1e-6) / max(alone(word), 1e-6)) if word >= 0 else 0.0
        covered += best >= 0.1
        unknown += word < 0
        uncovered.append(best < 0.1)
    for missing in uncovered:
        run = run + 1 if missing else 0
        longest = max(longest, run)
    following = 0.0
    for before, word in pairwise(target):
        key = int(WordOrder._keys(np.array([before, word], np.int64))[1])
        both = (order.pairs[key] + 2 * alone(word)) / ((counts[before] if before >= 0 else 0.1) + 2)
        following += math.log(both / alone(word))
    n = len(target)
    return [gain / n, covered / n, longest / n, unknown / n, following / max(n - 1, 1)]


@settings(max_examples=60)
@given(PAIRS)
def test_features_by_plain_loops(half: HalfModel, pairs: list[tuple[list[int], list[int]]]) -> None:
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    generator = np.random.default_rng(len(pairs))
    characters = tuple(generator.integers(1, 40, len(pairs)).astype(float) for _ in range(2))
    copied, marks = generator.random(len(pairs)), tuple(generator.random(len(pairs)) < 0.5 for _ in range(2))
    sides = PairTokens(
        (_arrays(sources), _arrays(targets)), (characters[0], characters[1]), copied, (marks[0], marks[1])
    )
    corpus = CorpusStatistics(SIZES, (0.1, 0.5), (0.2, 0.7))
    found = features(sides, half, corpus)
    assert found.shape == (len(pairs), len(FEATURES))

    def strangeness(one: float, other: float, mean: float, deviation: float) -> float:
        away = abs(math.log((one + 1) / (other + 1)) - mean) * math.sqrt(min(one, other) + 1)
        return min(away / deviation, 6.0)

    for n, (source, target) in enumerate(pairs):
        wanted = [
            *_directed(source, target, half.lexicons[0], half.order[1], 0),
            *_directed(target, source, half.lexicons[1], half.order[0], 1),
            strangeness(len(source), len(target), 0.1, 0.5),
            strangeness(characters[0][n], characters[1][n], 0.2, 0.7),
            copied[n],
            math.log(min(len(source), len(target))),
            marks[0][n],
            marks[1][n],
        ]
        np.testing.assert_allclose(found[n], wanted, rtol=1e-9, atol=1e-12)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6))
def test_longest_runs_end_with_their_sentence(masks: list[list[bool]]) -> None:
    found = pair_score._longest_runs(
        np.concatenate([np.array(m) for m in masks]), _arrays([[0] * len(m) for m in masks])
    )
    wanted = [max(map(len, "".join("x" if m else " " for m in mask).split()), default=0) for mask in masks]
    assert found.tolist() == wanted


def test_words_are_counted_with_their_neighbours() -> None:
    order = WordOrder.learn(_arrays([[0, 1], [0, 1, 2], [-1, 0]]), 4)
    assert order.words.tolist() == [3, 2, 1, 0]
    assert int(order.pairs.sum()) == 4  # none across sentences
    scores = order.scores(_arrays([[0, 1], [1, 0], [2]]))
    assert scores[0] > 0 > scores[1]
    assert scores[2] == 0


def test_vocabulary_has_the_words_that_both_halves_can_have() -> None:
    assert vocabulary({"a": 2, "b": 1, "c": 5}) == {"a": 0, "c": 1}


def test_a_half_comes_back_from_its_arrays(half: HalfModel) -> None:
    arrays: dict[str, Any] = half.arrays()
    again = HalfModel.of_arrays(arrays, SIZES)
    assert {name: value.tolist() for name, value in again.arrays().items()} == {
        name: value.tolist() for name, value in arrays.items()
    }
    assert [lexicon.source_size for lexicon in again.lexicons] == list(SIZES)
