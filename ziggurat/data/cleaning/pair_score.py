"""The pair score: how likely two sentences are to be translations of each other, learned from the corpus itself.

The corpus is split into halves. Each half trains a lexicon in both directions (IBM Model 1) and counts of neighbouring
words. A pair's features come from the other half; otherwise the model would have learned from a wrong pair itself that
its rare words translate each other. A logistic regression then separates the corpus's pairs from wrong ones made from
them: targets swapped, words left out at an end, words shuffled, sides copied, sentences joined. A fifth of the corpus
itself may be wrong (experiments/cleaning).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.data.aligner import split_words
from ziggurat.data.cleaning.filters import greek_questions
from ziggurat.data.hmm import Lexicon, translation_table
from ziggurat.system.errors import DataError
from ziggurat.system.small_files import arrays_content, read_arrays

Floats = NDArray[np.float64]
Tokens = Sequence[NDArray[np.int32]]
"""Word ids of each sentence; -1: a word that is not in the vocabulary."""

_DIRECTED = ("translation", "covered", "uncovered run", "unknown", "order")
_OF_PAIR = ("length ratio", "character ratio", "copied words", "words", "same start", "same end")
FEATURES = (*(f"{name}, {way}" for way in ("forward", "backward") for name in _DIRECTED), *_OF_PAIR)
"""Names of the columns of `features`."""

_WAYS = ("forward", "backward")
_FLOOR = 1e-6  # floor for the probability of a word given the other side, so that no single odd word is decisive
_COVERED = 0.1  # t(f | e) at which a word counts as the translation of another
_KEPT = 100  # translations of a word
_ITERATIONS = 4  # of IBM Model 1
_BIGRAMS = 1 << 21  # counts of neighbouring words, by hash


class PairTokens(NamedTuple):
    """Pairs in the form needed for the features."""

    words: tuple[Tokens, Tokens]
    characters: tuple[Floats, Floats]
    copied: Floats
    """Share of the words of both sides that are also on the other side, [pairs]."""
    marks: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    """True if first and last characters are of the same kind, [pairs] each."""


class CorpusStatistics(NamedTuple):
    """Statistics of all pairs: sizes of the vocabularies, and mean and deviation of the log length ratios."""

    sizes: tuple[int, int]
    words: tuple[float, float]
    characters: tuple[float, float]


class WordOrder:
    """Counts of words and of neighbouring words of one side, for judging the word order of a sentence.

    `words` are counts of each word, int64 [words], `pairs` of each hash of two neighbouring words, int32 [_BIGRAMS].
    """

    def __init__(self, words: NDArray[np.int64], pairs: NDArray[np.int32]) -> None:
        self.words, self.pairs = words, pairs
        self._words = words + 0.1
        self._words_total = self._words.sum()

    @classmethod
    def learn(cls, sentences: Tokens, size: int) -> WordOrder:
        """Return the counts of sentences; `size`: number of words."""
        ids, inner = _joined(sentences)
        pairs = np.bincount(cls._keys(ids)[inner], minlength=_BIGRAMS).astype(np.int32)
        return cls(np.bincount(ids[ids >= 0], minlength=size), pairs)

    @staticmethod
    def _keys(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each word the index of its count with the previous word."""
        before = np.concatenate([[-1], ids[:-1]])
        mixed = (before + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ (ids + 2).astype(np.uint64)
        mixed *= np.uint64(0xC2B2AE3D27D4EB4F)
        return (mixed >> np.uint64(64 - 21)).astype(np.int64)

    def unigram(self, ids: NDArray[np.int64]) -> Floats:
        """Return the probability of each word; an unknown word has that of a rare one."""
        return np.where(ids >= 0, self._words[ids], 0.1) / self._words_total

    def scores(self, sentences: Tokens) -> Floats:
        """Return the mean of log p(word | previous word) / p(word) over each sentence, 0 if it has only one word."""
        ids, inner = _joined(sentences)
        before = np.concatenate([[-1], ids[:-1]])
        alone = self.unigram(ids)
        of_before = np.where(before >= 0, self._words[before], 0.1)
        # Interpolated with the word's own probability, because an unseen pair of words means little.
        both = (self.pairs[self._keys(ids)] + 2.0 * alone) / (of_before + 2.0)
        gain = np.where(inner, np.log(both / alone), 0.0)
        return _means(gain, sentences, less=1)


class HalfModel(NamedTuple):
    """Model learned from one half of the corpus: lexicons of both directions, and word order on both sides."""

    lexicons: tuple[Lexicon, Lexicon]
    order: tuple[WordOrder, WordOrder]

    @classmethod
    def learn(cls, words: tuple[Tokens, Tokens], sizes: tuple[int, int]) -> HalfModel:
        """Return the model of pairs; `words` has both sides, `sizes` those of both vocabularies."""
        known = [[ids[ids >= 0] for ids in side] for side in words]

        def lexicon(source: int) -> Lexicon:
            a, b = source, 1 - source
            rows = translation_table(known[a], known[b], sizes[a], sizes[b], iterations=_ITERATIONS, top=_KEPT)
            return Lexicon.of_rows(rows, sizes[a], sizes[b])

        return cls((lexicon(0), lexicon(1)), (WordOrder.learn(words[0], sizes[0]), WordOrder.learn(words[1], sizes[1])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the model as named arrays; see `of_arrays`."""
        found: dict[str, NDArray[Any]] = {}
        for way, lexicon, order in zip(_WAYS, self.lexicons, self.order, strict=True):
            found |= {f"{way}.keys": lexicon.keys, f"{way}.probabilities": lexicon.probabilities}
            found |= {f"{way}.words": order.words, f"{way}.pairs": order.pairs}
        return found

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]], sizes: tuple[int, int]) -> HalfModel:
        """Return the model from the result of `arrays`. Raises KeyError if an array is missing."""
        lexicons, orders = [], []
        for way, ends in zip(_WAYS, (sizes, sizes[::-1]), strict=True):
            lexicons.append(Lexicon(arrays[f"{way}.keys"], arrays[f"{way}.probabilities"], *ends))
            orders.append(WordOrder(arrays[f"{way}.words"], arrays[f"{way}.pairs"]))
        return cls((lexicons[0], lexicons[1]), (orders[0], orders[1]))


def features(sides: PairTokens, half: HalfModel, corpus: CorpusStatistics) -> Floats:
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


def _directed(source: Tokens, target: Tokens, lexicon: Lexicon, order: WordOrder) -> list[Floats]:
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
    # For each target word all words of its source: one long list, with the start of each word's part.
    repeats = np.repeat(lengths, of_target)
    ends = repeats.cumsum()
    starts = np.repeat(lengths.cumsum() - lengths, of_target)
    places = np.arange(int(repeats.sum())) - np.repeat(ends - repeats, repeats) + np.repeat(starts, repeats)
    found = lexicon[lexicon.places(ids[places], np.repeat(words, repeats))]
    empty = lexicon[lexicon.places(np.full(len(words), lexicon.source_size), words)]
    sums, best = np.add.reduceat(found, ends - repeats), np.maximum.reduceat(found, ends - repeats)
    return (sums + empty) / (repeats + 1), best


def _usual_ratio(first: Sequence[int], second: Sequence[int]) -> tuple[float, float]:
    """Return mean and deviation of the log ratio of two lengths, as medians, which are robust to noise."""
    ratio = np.log((np.array(first) + 1.0) / (np.array(second) + 1.0))
    mean = float(np.median(ratio))
    away = np.abs(ratio - mean) * np.sqrt(np.minimum(first, second) + 1.0)
    return mean, 1.4826 * float(np.median(away)) + 1e-3


def _strangeness(first: Floats, second: Floats, usual: tuple[float, float]) -> Floats:
    """Return by how many deviations the log ratio of two lengths differs from the usual one; at most 6.

    The deviation of a ratio decreases with length: 10 words paired with 14 are more likely than 50 with 70.
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
    """Return the sums of the values of each sentence's words, divided by its number of words minus `less`."""
    lengths = _lengths(sentences)
    return np.add.reduceat(values, lengths.cumsum() - lengths) / np.maximum(lengths - less, 1)


def _longest_runs(mask: NDArray[np.bool_], sentences: Tokens) -> Floats:
    """Return the length of the longest run of True among each sentence's words."""
    lengths = _lengths(sentences)
    starts = lengths.cumsum() - lengths
    # A run is counted up, and restarts after a False and at the start of a sentence.
    places = np.arange(len(mask))
    resets = np.where(mask, -1, places)
    resets[starts] = np.where(mask[starts], starts - 1, starts)
    counts = places - np.maximum.accumulate(resets)
    return np.maximum.reduceat(counts, starts).astype(np.float64)


def vocabulary(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of the words that occur twice or more, since others cannot be in both halves."""
    return {word: number for number, word in enumerate(word for word, count in counts.items() if count > 1)}


LEAST_PAIRS = 100
"""LEAST_PAIRS is the fewest pairs that a score can be learned from."""
_MOST_WORDS = 250  # maximum number of words of a side that are used; the rest of a longer one is ignored
_PART = 2000  # pairs that are split into words at a time
_CELLS = 1 << 20
"""Approximate limit on pairs of words, one from either side, compared at a time; each takes about 60 bytes."""
_TAUGHT = 100_000  # pairs that the regression sees
_SEED = 20_24  # an arbitrary seed, fixed so that the score is the same every time
_RIDGE = 1e-2
_ROUNDS = 25  # maximum number of rounds of Newton's method
_FORMAT = "ziggurat-pair-score-1"
_SIDES = ("source", "target")
_CREDIBLE = 0.5  # score at which a pair of the corpus is an example of a right pair


class PairScorer:
    """A trained pair score.

    Args:
        words: vocabularies of both sides.
        corpus: statistics of all pairs.
        halves: models of the pairs with even and with odd hashes.
        scale: mean and deviation of each feature, [2, FEATURES].
        weights: weights of the scaled features and their squares, and the bias, [2 FEATURES + 1].
    """

    def __init__(
        self,
        words: tuple[dict[str, int], dict[str, int]],
        corpus: CorpusStatistics,
        halves: tuple[HalfModel, HalfModel],
        scale: Floats,
        weights: Floats,
    ) -> None:
        self._words, self._corpus, self._halves = words, corpus, halves
        self._scale, self._weights = scale, weights

    @classmethod
    def train(cls, pairs: Iterable[tuple[str, str]]) -> PairScorer:
        """Return a score learned from `pairs`, which must have text on both sides.

        Raises DataError if there are too few, or if no word of a side occurs twice.
        """
        sources, targets = ([*side] for side in zip(*pairs, strict=True)) if (pairs := [*pairs]) else ([], [])
        if len(pairs) < LEAST_PAIRS:
            raise DataError(
                f"the pair score (data.filters.pair_score) needs {LEAST_PAIRS} pairs to learn from, and there are "
                f"{len(pairs)}; switch it off with `pair_score: null`",
                key="data.filters.pair_score",
            )
        # (1) Words, lengths
        words, ids, lengths = zip(*(_numbered(side) for side in (sources, targets)), strict=True)
        if not all(words):
            raise DataError(
                "the pair score (data.filters.pair_score) learns from words that occur twice or more, and no word of "
                f"the {_SIDES[1 if words[0] else 0]} side does; switch it off with `pair_score: null`",
                key="data.filters.pair_score",
            )
        corpus = CorpusStatistics(
            (len(words[0]), len(words[1])),
            _usual_ratio(lengths[0], lengths[1]),
            _usual_ratio([len(s) for s in sources], [len(t) for t in targets]),
        )
        # (2) Lexicons and order
        odd = _odd(sources, targets)
        even, other = ([list(compress(side, odd == n)) for side in ids] for n in (False, True))
        halves = HalfModel.learn((even[0], even[1]), corpus.sizes), HalfModel.learn((other[0], other[1]), corpus.sizes)
        del ids, even, other
        untrained = cls(
            (words[0], words[1]), corpus, halves, np.zeros((2, len(FEATURES))), np.zeros(2 * len(FEATURES) + 1)
        )
        # (3) Separation of right and wrong pairs
        chosen = np.linspace(0, len(pairs) - 1, min(len(pairs), _TAUGHT)).astype(np.int64)
        right = [sources[n] for n in chosen], [targets[n] for n in chosen]
        of = odd[chosen]
        found = untrained._features(*right, of)
        wrong = untrained._features(*wrong_pairs(*right, of), of)
        both = np.concatenate([found, wrong])
        scale = np.stack([both.mean(0), both.std(0) + 1e-9])
        inputs = _expanded(both, scale)
        labels = np.repeat([1.0, 0.0], len(chosen))
        weights = _regression(inputs, labels)
        # (4) Repeat this without the corpus's pairs that look wrong: if it were clean, it would need no score.
        credible = (labels == 0.0) | (_sigmoid(inputs @ weights) >= _CREDIBLE)
        weights = _regression(inputs[credible], labels[credible])
        return cls((words[0], words[1]), corpus, halves, scale, weights)

    def scores(self, sources: Sequence[str], targets: Sequence[str]) -> Floats:
        """Return the score of each pair, [pairs]: the probability that it is right if half of all pairs are.

        It depends only on the pair's text.
        """
        if not sources:
            return np.zeros(0)
        found = self._features(sources, targets, _odd(sources, targets))
        # Summed by rows: the last digits of a matrix product depend on the number of rows.
        return _sigmoid((_expanded(found, self._scale) * self._weights).sum(1))

    def content(self) -> bytes:
        """Return the score as a safetensors file, the same bytes every time; see `read_pair_score`."""
        tensors: dict[str, NDArray[Any]] = {"scale": self._scale, "weights": self._weights}
        for side, words in zip(_SIDES, self._words, strict=True):
            tensors[f"{side}_words"] = np.frombuffer("\n".join(words).encode(), np.uint8)
        for name in ("words", "characters"):
            tensors[f"usual_{name}"] = np.array(getattr(self._corpus, name))
        for number, half in enumerate(self._halves):
            tensors |= {f"{number}.{name}": array for name, array in half.arrays().items()}
        return arrays_content(tensors, {"format": _FORMAT})

    def _features(self, sources: Sequence[str], targets: Sequence[str], odd: NDArray[np.bool_]) -> Floats:
        """Return the features of pairs of the even or odd half from the model of the other half."""
        found = np.zeros((len(sources), len(FEATURES)))
        for first in range(0, len(sources), _PART):
            part = slice(first, first + _PART)
            split = [[_words(text) for text in side[part]] for side in (sources, targets)]
            ids = [[_ids(self._words[n], words) for words in split[n]] for n in (0, 1)]
            cells = np.array([len(source) * len(target) for source, target in zip(*ids, strict=True)])
            for half in (0, 1):
                own = np.flatnonzero(odd[part] == half)
                for chosen in np.split(own, np.flatnonzero(np.diff(cells[own].cumsum() // _CELLS)) + 1):
                    if len(chosen):  # without pairs of this half, `split` gives an empty part
                        sides = _sides(sources[part], targets[part], split, ids, chosen)
                        found[first + chosen] = features(sides, self._halves[1 - half], self._corpus)
        return found


def read_pair_score(path: Path) -> PairScorer:
    """Read a file made by PairScorer.content. Raises DataError if it is damaged or missing."""
    try:
        _, tensors = read_arrays(path, _FORMAT, "pair score", "remove it and run this again")
        texts = (bytes(tensors[f"{side}_words"]).decode() for side in _SIDES)
        source, target = ({word: n for n, word in enumerate(text.split("\n") if text else [])} for text in texts)
        sizes = len(source), len(target)
        usual = [tuple(tensors[f"usual_{name}"].tolist()) for name in ("words", "characters")]
        parts = [{k[2:]: v for k, v in tensors.items() if k.startswith(f"{n}.")} for n in (0, 1)]
        halves = HalfModel.of_arrays(parts[0], sizes), HalfModel.of_arrays(parts[1], sizes)
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error}); remove it and run this again") from None
    return PairScorer((source, target), CorpusStatistics(sizes, *usual), halves, tensors["scale"], tensors["weights"])


def wrong_pairs(sources: Sequence[str], targets: Sequence[str], odd: NDArray[np.bool_]) -> tuple[list[str], list[str]]:
    """Return a wrong pair made of each right one, with text only of pairs of the same half."""
    generator = np.random.default_rng(_SEED)
    lengths = np.array([len(t) for t in targets])
    # The neighbour by length, or else any pair, since its target is wrong whatever its length.
    by_length = np.lexsort((lengths, odd))
    near = np.empty(len(sources), np.int64)
    near[by_length] = np.roll(by_length, 1 + int(generator.integers(3)))
    others = np.empty(len(sources), np.int64)
    for half in (0, 1):
        own = np.flatnonzero(odd == half)
        mixed = generator.permutation(own)
        others[mixed] = np.roll(mixed, 1)
    made: tuple[list[str], list[str]] = ([], [])
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        kind, side = number % 6, int(generator.integers(2))
        pair = [source, target]
        if kind < 2:
            pair[1] = targets[(near, others)[kind][number]]
        elif kind < 4:
            text = pair[side].strip()  # otherwise only white space may be left; text without spaces is handled below
            blank, words = (" ", text.split()) if " " in text else ("", [*text])
            left = _cut(words, generator) if kind == 2 else [words[n] for n in generator.permutation(len(words))]
            pair[side] = blank.join(left)
        elif kind == 4:
            pair[1 - side] = pair[side]
        else:
            pair[side] = f"{pair[side]} {(sources, targets)[side][others[number]]}"
        made[0].append(pair[0])
        made[1].append(pair[1])
    return made


def _cut(words: list[str], generator: np.random.Generator) -> list[str]:
    """Return the first or last 30 to 70 per cent of words, at least one."""
    kept = max(1, round(len(words) * generator.uniform(0.3, 0.7)))
    return words[:kept] if generator.random() < 0.5 else words[-kept:]


def _words(text: str) -> list[str]:
    return split_words(text.lower(), "split")[:_MOST_WORDS]


def _numbered(texts: Sequence[str]) -> tuple[dict[str, int], list[NDArray[np.int32]], list[int]]:
    """Return the vocabulary of texts, the word ids of each (-1: unknown), and their lengths."""
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        found.append(np.array([numbers.setdefault(word, len(numbers)) for word in _words(text)], np.int32))
    counts = np.bincount(np.concatenate(found), minlength=len(numbers)).tolist()
    known = vocabulary(dict(zip(numbers, counts, strict=True)))
    new = np.fromiter((known.get(word, -1) for word in numbers), np.int32, len(numbers))
    return known, [new[ids] for ids in found], [len(ids) for ids in found]


def _ids(words: dict[str, int], text: Sequence[str]) -> NDArray[np.int32]:
    return np.fromiter((words.get(word, -1) for word in text), np.int32, len(text))


def _odd(sources: Sequence[str], targets: Sequence[str]) -> NDArray[np.bool_]:
    """Return for each pair whether its hash is odd, so that copies of a pair are in one half."""
    digest = xxhash.xxh3_64_intdigest
    pairs = zip(sources, targets, strict=True)
    return np.fromiter((digest(f"{s}\n{t}".lower().encode()) & 1 for s, t in pairs), np.bool_, len(sources))


def _sides(
    sources: Sequence[str],
    targets: Sequence[str],
    split: Sequence[Sequence[Sequence[str]]],
    ids: Sequence[Sequence[NDArray[np.int32]]],
    chosen: NDArray[np.int64],
) -> PairTokens:
    texts = [[greek_questions(side[n]) for n in chosen] for side in (sources, targets)]
    bags = [[set(side[n]) for n in chosen] for side in split]
    common = [len(a & b) / min(len(a), len(b)) for a, b in zip(*bags, strict=True)]
    return PairTokens(
        ([ids[0][n] for n in chosen], [ids[1][n] for n in chosen]),
        (np.array([len(t) for t in texts[0]], np.float64), np.array([len(t) for t in texts[1]], np.float64)),
        np.array(common),
        (
            np.array([_sort(s[0]) == _sort(t[0]) for s, t in zip(*texts, strict=True)]),
            np.array([_sort(s[-1]) == _sort(t[-1]) for s, t in zip(*texts, strict=True)]),
        ),
    )


_ENDS = {mark: sort for sort, marks in enumerate((".。．｡।۔…", "?？؟\u037e", "!！", ":：", ",、，،")) for mark in marks}


def _sort(mark: str) -> int | str:
    """Return the kind of a character: capital, other letter, digit, a kind of mark, or other."""
    if mark.isalpha():
        return "capital" if mark.isupper() else "letter"
    return "digit" if mark.isdigit() else _ENDS.get(mark, "other")


def _expanded(found: Floats, scale: Floats) -> Floats:
    scaled = np.clip((found - scale[0]) / scale[1], -5.0, 5.0)
    return np.concatenate([scaled, scaled**2, np.ones((len(found), 1))], 1)


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -40.0, 40.0)))


def _regression(inputs: Floats, labels: Floats) -> Floats:
    """Return the weights of a logistic regression with a small ridge term, by Newton's method."""
    weights = np.zeros(inputs.shape[1])
    penalty = np.full(inputs.shape[1], _RIDGE)
    penalty[-1] = 0.0
    for _ in range(_ROUNDS):
        shares = _sigmoid(inputs @ weights)
        gradient = inputs.T @ (shares - labels) / len(labels) + penalty * weights
        curvature = (inputs * (shares * (1 - shares))[:, None]).T @ inputs / len(labels)
        step = np.linalg.solve(curvature + np.diag(penalty + 1e-9), gradient)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    # The last digits of a matrix product depend on the number of threads, but the dropped pairs must not.
    return weights.round(6)
