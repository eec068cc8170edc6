"""The pair score: how likely two sentences translate each other, learnt from the corpus itself, noise and all.

Two halves of the corpus each train a lexicon in both directions (IBM Model 1) and counts of neighbouring words; each
pair is described by the half that it is not in. A logistic regression then tells the corpus's pairs from wrong ones
made of them: targets exchanged, words left out at an end, words shuffled, sides copied, sentences glued together. A
fifth of the corpus may be wrong itself (experiments/cleaning).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ziggurat.data.alignment.aligner import split_words
from ziggurat.data.cleaning.clean import greek_questions
from ziggurat.data.cleaning.pair_features import FEATURES, Corpus, Half, Sides, features, usual_ratio, vocabulary
from ziggurat.system.errors import DataError
from ziggurat.system.small_files import check_regular, with_sorted_header

LEAST_PAIRS = 100
"""Pairs to learn from at least."""
_MOST_WORDS = 250  # of a side, for training and scoring: the rest of a longer one is not looked at
_PART = 2000  # pairs that are split up into words at a time
_CELLS = 1 << 20
"""About the most pairs of words, one of either side, that are compared at a time; each takes some 60 bytes."""
_TAUGHT = 100_000  # pairs that the regression sees
_SEED = 20_24  # any number: the score must only be the same every time
_RIDGE = 1e-2
_ROUNDS = 25  # of Newton's method, at most
_FORMAT = "ziggurat-pair-score-1"
_SIDES = ("source", "target")
_CREDIBLE = 0.5  # score from which a pair of the corpus is an example of a right one

Floats = NDArray[np.float64]


class PairScorer:
    """A trained pair score.

    Args:
        words: vocabularies of both sides.
        corpus: lengths.
        halves: what the pairs of even and of odd hash teach.
        scale: mean and deviation of each feature, [2, FEATURES].
        weights: of the scaled features and their squares, and the bias, [2 FEATURES + 1].
    """

    def __init__(
        self,
        words: tuple[dict[str, int], dict[str, int]],
        corpus: Corpus,
        halves: tuple[Half, Half],
        scale: Floats,
        weights: Floats,
    ) -> None:
        self._words, self._corpus, self._halves = words, corpus, halves
        self._scale, self._weights = scale, weights

    @classmethod
    def train(cls, pairs: Iterable[tuple[str, str]]) -> PairScorer:
        """Return a score learnt from `pairs`, which must have text on both sides.

        Raises DataError where there are too few, or no word of a side occurs twice.
        """
        sources, targets = ([*side] for side in zip(*pairs, strict=True)) if (pairs := [*pairs]) else ([], [])
        if len(pairs) < LEAST_PAIRS:
            raise DataError(
                f"the pair score (data.filters.pair_score) needs {LEAST_PAIRS} pairs to learn from, and there are "
                f"{len(pairs)}; switch it off with `pair_score: null`"
            )
        # (1) Words, lengths
        words, ids, lengths = zip(*(_numbered(side) for side in (sources, targets)), strict=True)
        if not all(words):
            raise DataError(
                "the pair score (data.filters.pair_score) learns from words that occur twice or more, and no word of "
                f"the {_SIDES[1 if words[0] else 0]} side does; switch it off with `pair_score: null`"
            )
        corpus = Corpus(
            (len(words[0]), len(words[1])),
            usual_ratio(lengths[0], lengths[1]),
            usual_ratio([len(s) for s in sources], [len(t) for t in targets]),
        )
        # (2) Lexicons and order
        odd = _odd(sources, targets)
        even, other = ([list(compress(side, odd == n)) for side in ids] for n in (False, True))
        halves = Half.learn((even[0], even[1]), corpus.sizes), Half.learn((other[0], other[1]), corpus.sizes)
        del ids, even, other
        untrained = cls(
            (words[0], words[1]), corpus, halves, np.zeros((2, len(FEATURES))), np.zeros(2 * len(FEATURES) + 1)
        )
        # (3) Right and wrong pairs, told apart
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
        # (4) Once more without the corpus's pairs that look wrong: it is not clean, or it needed no score.
        credible = (labels == 0.0) | (_sigmoid(inputs @ weights) >= _CREDIBLE)
        weights = _regression(inputs[credible], labels[credible])
        return cls((words[0], words[1]), corpus, halves, scale, weights)

    def scores(self, sources: Sequence[str], targets: Sequence[str]) -> Floats:
        """Return the score of each pair, [pairs]: the probability that it is right, where half of all pairs are.

        It is a function of the pair's text alone.
        """
        if not sources:
            return np.zeros(0)
        found = self._features(sources, targets, _odd(sources, targets))
        # Summed by rows: a product of matrices gives other last digits for other numbers of rows.
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
        return with_sorted_header(save(tensors, {"format": _FORMAT}))

    def _features(self, sources: Sequence[str], targets: Sequence[str], odd: NDArray[np.bool_]) -> Floats:
        """Return the features of pairs of the even or odd half, by what the other half has learnt."""
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
    """Read the file that PairScorer.content made. Raises DataError where it is damaged or missing."""
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("format") != _FORMAT:
                raise DataError(f"{path}: not a pair score of this version of ziggurat; remove it and run this again")
            tensors: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = (bytes(tensors[f"{side}_words"]).decode() for side in _SIDES)
        source, target = ({word: n for n, word in enumerate(text.split("\n") if text else [])} for text in texts)
        sizes = len(source), len(target)
        usual = [tuple(tensors[f"usual_{name}"].tolist()) for name in ("words", "characters")]
        parts = [{k[2:]: v for k, v in tensors.items() if k.startswith(f"{n}.")} for n in (0, 1)]
        halves = Half.of_arrays(parts[0], sizes), Half.of_arrays(parts[1], sizes)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error}); remove it and run this again") from None
    return PairScorer((source, target), Corpus(sizes, *usual), halves, tensors["scale"], tensors["weights"])


def wrong_pairs(sources: Sequence[str], targets: Sequence[str], odd: NDArray[np.bool_]) -> tuple[list[str], list[str]]:
    """Return a wrong pair made of each right one, with text only of pairs of the same half."""
    generator = np.random.default_rng(_SEED)
    lengths = np.array([len(t) for t in targets])
    # The neighbour by length, or any other: its target is wrong whatever its length.
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
            text = pair[side].strip()  # else nothing but white space may be left; below: characters without blanks
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
    """Return the vocabulary of texts, the word ids of each (-1: a word that it does not have), and their lengths."""
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
    """Return for each pair whether its hash is odd: copies of a pair are in one half."""
    digest = xxhash.xxh3_64_intdigest
    pairs = zip(sources, targets, strict=True)
    return np.fromiter((digest(f"{s}\n{t}".lower().encode()) & 1 for s, t in pairs), np.bool_, len(sources))


def _sides(
    sources: Sequence[str],
    targets: Sequence[str],
    split: Sequence[Sequence[Sequence[str]]],
    ids: Sequence[Sequence[NDArray[np.int32]]],
    chosen: NDArray[np.int64],
) -> Sides:
    """Return the chosen pairs as the features see them."""
    texts = [[greek_questions(side[n]) for n in chosen] for side in (sources, targets)]
    bags = [[set(side[n]) for n in chosen] for side in split]
    common = [len(a & b) / min(len(a), len(b)) for a, b in zip(*bags, strict=True)]
    return Sides(
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
    """Return the sort of a character: capital, other letter, digit, a mark's sort, or other."""
    if mark.isalpha():
        return "capital" if mark.isupper() else "letter"
    return "digit" if mark.isdigit() else _ENDS.get(mark, "other")


def _expanded(found: Floats, scale: Floats) -> Floats:
    """Return scaled features, their squares and a column of ones."""
    scaled = np.clip((found - scale[0]) / scale[1], -5.0, 5.0)
    return np.concatenate([scaled, scaled**2, np.ones((len(found), 1))], 1)


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -40.0, 40.0)))


def _regression(inputs: Floats, labels: Floats) -> Floats:
    """Return the weights of a logistic regression with a little ridge, by Newton's method."""
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
    # The last digits of a product of matrices depend on the number of threads; what is dropped must not.
    return weights.round(6)
