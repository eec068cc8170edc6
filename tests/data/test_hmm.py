"""The hidden Markov model against a sum over all alignments, and training against its own likelihood."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from ziggurat.data.aligner import Direction, TrainingOptions, _batches, train_direction
from ziggurat.data.hmm import JUMPS, Emissions, JumpCounts, Jumps, Lexicon, digamma, posteriors

DRAW = np.random.default_rng(5)
EMPTY = 0.3


def drawn_jumps() -> Jumps:
    return Jumps(*(DRAW.uniform(0.1, 2.0, size) for size in (2 * JUMPS + 1, JUMPS, JUMPS)))


def plain_transition(jumps: Jumps, before: int, position: int, length: int) -> float:
    """p(position | last position, no empty word), positions from 1; 0 is the beginning."""

    def weight(to: int) -> float:
        return float(jumps.first[to - 1] if before == 0 else jumps.between[JUMPS + to - before])

    return 0.9 * weight(position) / sum(weight(to) for to in range(1, length + 1)) + 0.1 / length


def plain_posteriors(words: np.ndarray, empty: np.ndarray, jumps: Jumps):  # type: ignore[no-untyped-def]
    """Return sums over all alignments of one pair: likelihood, links [J, I], jumps [I + 1, I], endings [I + 1]."""
    target, source = words.shape
    ends = [jumps.last[source - last] for last in range(source + 1)]
    total, links = 0.0, np.zeros((target, source))
    counted, endings = np.zeros((source + 1, source)), np.zeros(source + 1)
    for path in product(range(source + 1), repeat=target):  # 0: the empty word
        probability, last, jumped = 1.0, 0, []
        for j, position in enumerate(path):
            if position == 0:
                probability *= EMPTY * empty[j]
                continue
            probability *= (1 - EMPTY) * plain_transition(jumps, last, position, source) * words[j, position - 1]
            jumped.append((last, position - 1))
            last = position
        probability *= ends[last] / sum(ends)
        total += probability
        endings[last] += probability
        for j, position in enumerate(path):
            if position:
                links[j, position - 1] += probability
        for jump in jumped:
            counted[jump] += probability
    return total, links / total, counted / total, endings / total


@pytest.mark.parametrize("source", [1, 3])
def test_posteriors_are_those_of_all_alignments(source: int) -> None:
    jumps, lengths = drawn_jumps(), np.array([4, 3, 3, 1])
    words, empty = DRAW.uniform(0.01, 1, (4, 4, source)), DRAW.uniform(0.01, 1, (4, 4))
    found = posteriors(Emissions(words, empty, lengths), jumps, EMPTY)
    expected = [plain_posteriors(words[row, :n], empty[row, :n], jumps) for row, n in enumerate(lengths)]
    assert found.log_likelihood == pytest.approx(sum(math.log(likelihood) for likelihood, *_ in expected), rel=1e-12)
    for row, (_, links, _, _) in enumerate(expected):
        np.testing.assert_allclose(found.links[row, : lengths[row]], links, rtol=1e-10)
        assert not found.links[row, lengths[row] :].any()
    np.testing.assert_allclose(found.jumps, sum(jumped for *_, jumped, _ in expected), rtol=1e-10)
    np.testing.assert_allclose(found.endings, sum(ended for *_, ended in expected), rtol=1e-10)


def test_long_sentences_do_not_underflow() -> None:
    words = np.full((1, 300, 150), 1e-9)
    found = posteriors(Emissions(words, np.full((1, 300), 1e-9), np.array([300])), drawn_jumps(), EMPTY)
    assert found.log_likelihood < -6000
    assert found.jumps.sum() == pytest.approx(found.links.sum())
    assert found.endings.sum() == pytest.approx(1.0)


def test_jumps_are_counted_by_their_width() -> None:
    counts = JumpCounts()
    jumps = np.zeros((4, 3))
    jumps[0, 1], jumps[1, 2], jumps[3, 2], jumps[3, 0] = 1, 2, 4, 8  # start to 2; 1 to 3; 3 to 3; 3 to 1
    counts.add(jumps, np.array([0.0, 0, 16, 32]))
    found = counts.weights()
    assert {width - JUMPS: weight - 0.5 for width, weight in enumerate(found.between) if weight > 0.5} == {
        2: 2,
        0: 4,
        -2: 8,
    }
    assert found.first[1] == 1.5
    assert (found.last[0], found.last[1]) == (32.5, 16.5)


def test_digamma_is_the_derivative_of_log_gamma() -> None:
    for x in (0.01, 0.3, 1.0, 7.7, 1e5):
        step = 1e-5 * x
        slope = (math.lgamma(x + step) - math.lgamma(x - step)) / (2 * step)
        assert digamma(np.array([x]))[0] == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert digamma(np.array([1.0]))[0] == pytest.approx(-0.57721566490153286, rel=1e-11)


def test_unseen_pairs_of_words_share_one_entry() -> None:
    lexicon = Lexicon(np.array([1, 5]), np.array([0.25, 0.75]), 2, 3)  # (0, 1), (1, 2); the empty word is number 2
    places = lexicon.places(np.array([[0, 1, 1, -1, 2]]), np.array([[1, 2, 1, 1, 0]]))
    assert places.tolist() == [[0, 1, 2, 2, 2]]
    assert lexicon[places].tolist() == [[0.25, 0.75, 1e-9, 1e-9, 1e-9]]


def test_an_iteration_counts_what_plain_loops_count() -> None:
    """One iteration of expectation maximisation on sentences of unequal lengths, one with an empty side."""
    sources = [np.array(s, np.int32) for s in ([0, 1], [1], [], [0, 1], [2, 0])]
    targets = [np.array(t, np.int32) for t in ([1, 0, 1], [2], [1], [2], [])]
    keys, jumps = np.arange(12), drawn_jumps()
    before = Lexicon(keys, DRAW.uniform(0.05, 1, 12), 3, 3)
    after, likelihood = Direction(before, jumps, EMPTY).improved(sources, targets)
    counts, total = np.zeros((4, 3)), 0.0
    table = before.probabilities.reshape(4, 3)
    for source, target in zip(sources, targets, strict=True):
        if not len(source) or not len(target):
            continue
        words, empty = table[source][:, target].T, table[3, target]
        pair, links, _, _ = plain_posteriors(words, empty, jumps)
        total += math.log(pair)
        for j, t in enumerate(target):
            counts[3, t] += 1 - links[j].sum()
            for i, s in enumerate(source):
                counts[s, t] += links[j, i]
    assert likelihood == pytest.approx(total)
    expected = np.exp(digamma(counts + 0.01) - digamma(counts.sum(1, keepdims=True) + 0.03))
    np.testing.assert_allclose(after.lexicon.probabilities.reshape(4, 3), np.maximum(expected, 1e-12), rtol=1e-9)


def test_every_pair_with_words_is_in_one_batch() -> None:
    sources = [np.zeros(n % 4, np.int32) for n in range(40)]
    targets = [np.full(n % 7, n, np.int32) for n in range(40)]
    seen = []
    for batch in _batches(sources, targets):
        assert (np.diff(batch.lengths) <= 0).all()
        for row, pair in enumerate(batch.pairs):
            assert batch.target[row][batch.present[row]].tolist() == targets[pair].tolist()
            assert len(batch.source[row]) == len(sources[pair])
            seen.append(pair)
    assert sorted(seen) == [n for n in range(40) if n % 4 and n % 7]


def test_words_are_translated_by_the_word_they_always_occur_with() -> None:
    sources, targets = [], []
    for _ in range(200):
        words = DRAW.integers(0, 20, DRAW.integers(1, 6)).astype(np.int32)
        sources.append(words)
        targets.append(words[::-1].copy())
    direction = train_direction(sources, targets, (20, 20), TrainingOptions())
    for words, links in zip(sources, direction.links(sources, targets), strict=True):
        # Each word is linked to an equal one, not necessarily to the same one if a word occurs twice.
        assert words[links].tolist() == words[::-1].tolist()
