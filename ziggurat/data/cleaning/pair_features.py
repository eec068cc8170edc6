"""Features of sentence pairs for the pair score: translation, coverage, length, copied words, word order.

Words are known by a model of one half of the corpus, and a pair is described by the model of the half that it is not in
(ziggurat.data.cleaning.pair_score). Else the two sides of a wrong pair would have taught the model each other's rare
words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.alignment.hmm import Lexicon, translation_table

Floats = NDArray[np.float64]
Tokens = Sequence[NDArray[np.int32]]
"""Word ids of each sentence; -1: a word that the vocabulary does not have."""

_DIRECTED = ("translation", "covered", "uncovered run", "unknown", "order")
_OF_PAIR = ("length ratio", "character ratio", "copied words", "words", "same start", "same end")
FEATURES = (*(f"{name}, {way}" for way in ("forward", "backward") for name in _DIRECTED), *_OF_PAIR)
"""Names of the columns of `features`."""

_WAYS = ("forward", "backward")
_FLOOR = 1e-6
"""Least probability of a word given the other side, so that one strange word does not decide."""
_COVERED = 0.1
"""t(f | e) from which a word counts as the translation of another."""
_KEPT = 100  # translations of a word
_ITERATIONS = 4  # of IBM Model 1
_BIGRAMS = 1 << 21  # counts of neighbouring words, by hash


class Sides(NamedTuple):
    """Pairs as the features see them."""

    words: tuple[Tokens, Tokens]
    """Word ids of both sides."""
    characters: tuple[Floats, Floats]
    """Characters of both sides, [pairs]."""
    copied: Floats
    """Share of the words of both sides that are on the other too, [pairs]."""
    marks: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    """Whether first and last characters are of one sort, [pairs] each."""


class Corpus(NamedTuple):
    """What all pairs have in common: sizes of the vocabularies, and mean and deviation of the log length ratios."""

    sizes: tuple[int, int]
    words: tuple[float, float]
    characters: tuple[float, float]


class Order:
    """Counts of words and of neighbouring words of one side: does a sentence have the order of the others?

    Args:
        words: count of each word, int64 [words].
        pairs: count of each hash of two neighbouring words, int32 [_BIGRAMS].
    """

    def __init__(self, words: NDArray[np.int64], pairs: NDArray[np.int32]) -> None:
        self.words, self.pairs = words, pairs
        self._words = words + 0.1
        self._words_total = self._words.sum()

    @classmethod
    def learn(cls, sentences: Tokens, size: int) -> Order:
        """Return the counts of sentences; `size`: number of words."""
        ids, inner = _joined(sentences)
        pairs = np.bincount(cls._keys(ids)[inner], minlength=_BIGRAMS).astype(np.int32)
        return cls(np.bincount(ids[ids >= 0], minlength=size), pairs)

    @staticmethod
    def _keys(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each word the place of its count together with the word before."""
        before = np.concatenate([[-1], ids[:-1]])
        mixed = (before + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ (ids + 2).astype(np.uint64)
        mixed *= np.uint64(0xC2B2AE3D27D4EB4F)
        return (mixed >> np.uint64(64 - 21)).astype(np.int64)

    def unigram(self, ids: NDArray[np.int64]) -> Floats:
        """Return the probability of each word; one that is not known has that of a rare one."""
        return np.where(ids >= 0, self._words[ids], 0.1) / self._words_total

    def scores(self, sentences: Tokens) -> Floats:
        """Return the mean of log p(word | word before) / p(word) over each sentence, 0 where there is one word only."""
        ids, inner = _joined(sentences)
        before = np.concatenate([[-1], ids[:-1]])
        alone = self.unigram(ids)
        of_before = np.where(before >= 0, self._words[before], 0.1)
        # Interpolated with the word's own probability: a pair of words that was never seen tells little.
        both = (self.pairs[self._keys(ids)] + 2.0 * alone) / (of_before + 2.0)
        gain = np.where(inner, np.log(both / alone), 0.0)
        return _means(gain, sentences, less=1)


class Half(NamedTuple):
    """What one half of the corpus teaches: lexicons of both directions, and the order of words on both sides."""

    lexicons: tuple[Lexicon, Lexicon]
    order: tuple[Order, Order]

    @classmethod
    def learn(cls, words: tuple[Tokens, Tokens], sizes: tuple[int, int]) -> Half:
        """Return what the pairs teach, of which `words` has both sides; `sizes` of both vocabularies."""
        known = [[ids[ids >= 0] for ids in side] for side in words]

        def lexicon(source: int) -> Lexicon:
            a, b = source, 1 - source
            rows = translation_table(known[a], known[b], sizes[a], sizes[b], iterations=_ITERATIONS, kept=_KEPT)
            return Lexicon.of_rows(rows, sizes[a], sizes[b])

        return cls((lexicon(0), lexicon(1)), (Order.learn(words[0], sizes[0]), Order.learn(words[1], sizes[1])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as named arrays; see `of_arrays`."""
        found: dict[str, NDArray[Any]] = {}
        for way, lexicon, order in zip(_WAYS, self.lexicons, self.order, strict=True):
            found |= {f"{way}.keys": lexicon.keys, f"{way}.probabilities": lexicon.probabilities}
            found |= {f"{way}.words": order.words, f"{way}.pairs": order.pairs}
        return found

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]], sizes: tuple[int, int]) -> Half:
        """Return what `arrays` gave. Raises KeyError where one is missing."""
        lexicons, orders = [], []
        for way, ends in zip(_WAYS, (sizes, sizes[::-1]), strict=True):
            lexicons.append(Lexicon(arrays[f"{way}.keys"], arrays[f"{way}.probabilities"], *ends))
            orders.append(Order(arrays[f"{way}.words"], arrays[f"{way}.pairs"]))
        return cls((lexicons[0], lexicons[1]), (orders[0], orders[1]))


def features(sides: Sides, half: Half, corpus: Corpus) -> Floats:
    """Return the features of pairs that `half` does not contain, [pairs, FEATURES]."""
    columns: list[Floats] = []
    for a in (0, 1):
        columns += _directed(sides.words[a], sides.words[1 - a], half.lexicons[a], half.order[1 - a])
    lengths = [_lengths(side).astype(np.float64) for side in sides.words]
    columns.append(_strangeness(lengths[0], lengths[1], corpus.words))
    columns.append(_strangeness(sides.characters[0], sides.characters[1], corpus.characters))
    columns.append(sides.copied)
    columns.append(np.log(np.minimum(lengths[0], lengths[1])))
    columns += [marks.astype(np.float64) for marks in sides.marks]
    return np.stack(columns, 1)


def _directed(source: Tokens, target: Tokens, lexicon: Lexicon, order: Order) -> list[Floats]:
    """Return the features of one direction: how well the source explains the target."""
    ids, _ = _joined(target)
    likely, best = _explained(source, target, lexicon)
    gain = np.log(np.maximum(likely, _FLOOR) / np.maximum(order.unigram(ids), _FLOOR))
    known = ids >= 0
    covered = (best >= _COVERED).astype(np.float64)
    return [
        _means(np.where(known, gain, 0.0), target),
        _means(covered, target),
        _longest_runs(best < _COVERED, target) / _lengths(target),
        _means((~known).astype(np.float64), target),
        order.scores(target),
    ]


def _explained(source: Tokens, target: Tokens, lexicon: Lexicon) -> tuple[Floats, Floats]:
    """Return p(word | source) by IBM Model 1 and max t(word | source word), for each target word of all pairs."""
    lengths, of_target = _lengths(source), _lengths(target)
    ids, _ = _joined(source)
    words, _ = _joined(target)
    # For each target word all words of its source: one long list, with the places where each word's part begins.
    repeats = np.repeat(lengths, of_target)
    ends = repeats.cumsum()
    starts = np.repeat(lengths.cumsum() - lengths, of_target)
    places = np.arange(int(repeats.sum())) - np.repeat(ends - repeats, repeats) + np.repeat(starts, repeats)
    found = lexicon[lexicon.places(ids[places], np.repeat(words, repeats))]
    empty = lexicon[lexicon.places(np.full(len(words), lexicon.source_size), words)]
    sums, best = np.add.reduceat(found, ends - repeats), np.maximum.reduceat(found, ends - repeats)
    return (sums + empty) / (repeats + 1), best


def usual_ratio(first: Sequence[int], second: Sequence[int]) -> tuple[float, float]:
    """Return mean and deviation of the log ratio of two lengths, as medians, which noise does not move."""
    ratio = np.log((np.array(first) + 1.0) / (np.array(second) + 1.0))
    mean = float(np.median(ratio))
    away = np.abs(ratio - mean) * np.sqrt(np.minimum(first, second) + 1.0)
    return mean, 1.4826 * float(np.median(away)) + 1e-3


def _strangeness(first: Floats, second: Floats, usual: tuple[float, float]) -> Floats:
    """Return by how many deviations the log ratio of two lengths is off the usual one; at most 6.

    The deviation of a ratio falls with length: 10 words beside 14 are more likely than 50 beside 70.
    """
    mean, deviation = usual
    away = np.abs(np.log((first + 1) / (second + 1)) - mean) * np.sqrt(np.minimum(first, second) + 1)
    return np.minimum(away / deviation, 6.0)


def _joined(sentences: Tokens) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of all sentences, and a mask that is False at the first word of each."""
    ids = np.concatenate([np.zeros(0, np.int64), *sentences]).astype(np.int64)
    lengths = _lengths(sentences)
    inner = np.ones(len(ids), np.bool_)
    inner[lengths.cumsum() - lengths] = False
    return ids, inner


def _lengths(sentences: Tokens) -> NDArray[np.int64]:
    return np.fromiter(map(len, sentences), np.int64, len(sentences))


def _means(values: Floats, sentences: Tokens, less: int = 0) -> Floats:
    """Return the means of the values of each sentence's words, over `less` words less than it has."""
    lengths = _lengths(sentences)
    return np.add.reduceat(values, lengths.cumsum() - lengths) / np.maximum(lengths - less, 1)


def _longest_runs(mask: NDArray[np.bool_], sentences: Tokens) -> Floats:
    """Return the length of the longest run of True among each sentence's words."""
    lengths = _lengths(sentences)
    starts = lengths.cumsum() - lengths
    # A run is counted up, and begins anew behind a False and at the start of a sentence.
    places = np.arange(len(mask))
    resets = np.where(mask, -1, places)
    resets[starts] = np.where(mask[starts], starts - 1, starts)
    counts = places - np.maximum.accumulate(resets)
    return np.maximum.reduceat(counts, starts).astype(np.float64)


def vocabulary(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of the words that occur twice or more: others cannot be in both halves."""
    return {word: number for number, word in enumerate(word for word, count in counts.items() if count > 1)}
