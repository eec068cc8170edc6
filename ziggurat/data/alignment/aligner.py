"""The aligner: both directions trained on the same pairs, their symmetrised links, and the file it is kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ziggurat.data.alignment.direction import Direction, TrainingOptions, train_direction
from ziggurat.data.alignment.hmm import JUMPS, Jumps
from ziggurat.data.alignment.lexicon import Lexicon
from ziggurat.data.alignment.links import Link
from ziggurat.data.alignment.symmetry import Symmetrisation, symmetrise
from ziggurat.data.alignment.words import WordRule, split_words
from ziggurat.system.errors import DataError, refuse_passing
from ziggurat.system.small_files import check_opens, check_regular, with_sorted_header

MOST_WORDS = 1000
"""A pair with more words on a side is not aligned: time grows with the square of one side times the other."""
TRAINING_WORDS = 200
"""A pair with more words on a side is not trained on."""

_FORMAT = "ziggurat-aligner-1"
_MOST_BYTES = 1 << 34
_RULES: tuple[WordRule, ...] = get_args(WordRule)
_DIRECTIONS = ("forward", "backward")


class Aligner:
    """A trained word aligner.

    Args:
        rule: how it splits text into words.
        words: the words of source and target in the order of their numbers, lower-cased.
        directions: source to target, target to source.
    """

    def __init__(
        self, rule: WordRule, words: tuple[Sequence[str], Sequence[str]], directions: tuple[Direction, Direction]
    ) -> None:
        self.rule = rule
        self.words = words
        self.directions = directions
        self._numbers = [{word: number for number, word in enumerate(side)} for side in words]

    @classmethod
    def train(
        cls,
        pairs: Iterable[tuple[str, str]],
        rule: WordRule = "split",
        options: TrainingOptions | None = None,
        report: Callable[[str, int, float], None] = lambda direction, iteration, likelihood: None,
    ) -> Aligner:
        """Return an aligner trained on pairs of texts, read once; it takes about 1 kB of memory for a pair of 10 words.

        Pairs with an empty side or more than TRAINING_WORDS words on one are left out. The two directions run in two
        threads, without influence on the result.

        Args:
            pairs: source and target texts.
            rule: how they are split into words.
            options: None: the defaults.
            report: called after each iteration of the HMM: direction, its number, log-likelihood before it in nats.

        Raises DataError when no pair is left.
        """
        numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        sides: tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]] = ([], [])
        for texts in pairs:
            split = [split_words(text.lower(), rule) for text in texts]
            if not all(0 < len(words) <= TRAINING_WORDS for words in split):
                continue
            for words, known, side in zip(split, numbers, sides, strict=True):
                side.append(np.array([known.setdefault(word, len(known)) for word in words], np.int32))
        if not sides[0]:
            raise DataError(f"no pair to train an aligner on: all have an empty side, or over {TRAINING_WORDS} words")

        def train(source: int) -> Direction:
            target = 1 - source
            return train_direction(
                sides[source],
                sides[target],
                (len(numbers[source]), len(numbers[target])),
                options or TrainingOptions(),
                lambda iteration, likelihood: report(_DIRECTIONS[source], iteration, likelihood),
            )

        with ThreadPoolExecutor(2) as pool:  # numpy releases Python's lock in all that takes long
            forward, backward = pool.map(train, (0, 1))
        return cls(rule, (list(numbers[0]), list(numbers[1])), (forward, backward))

    def align(
        self, sources: Sequence[str], targets: Sequence[str], how: Symmetrisation = "grow-diag-final-and"
    ) -> list[set[Link]]:
        """Return the links of each pair of texts, as numbers of the words that `rule` finds.

        A pair with an empty side, or with more than MOST_WORDS words on a side, has no links.
        """
        split = [[split_words(text.lower(), self.rule) for text in texts] for texts in (sources, targets)]
        for source, target in zip(*split, strict=True):
            if max(len(source), len(target)) > MOST_WORDS:
                source.clear()
                target.clear()
        sides = [
            [np.array([numbers.get(word, -1) for word in words], np.int32) for words in side]
            for side, numbers in zip(split, self._numbers, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            ahead = pool.submit(self.directions[0].links, *sides)
            back = pool.submit(self.directions[1].links, *sides[::-1])
            found = zip(ahead.result(), back.result(), strict=True)
            return [
                symmetrise(
                    {(i, j) for j, i in enumerate(forward.tolist()) if i >= 0},
                    {(i, j) for i, j in enumerate(backward.tolist()) if j >= 0},
                    how,
                )
                for forward, backward in found
            ]

    def content(self) -> bytes:
        """Return the aligner as a safetensors file, the same bytes every time; see read_aligner."""
        tensors: dict[str, NDArray[Any]] = {}
        for side, words in zip(("source", "target"), self.words, strict=True):
            tensors[f"{side}_words"] = np.frombuffer("\n".join(words).encode(), np.uint8)
        for name, direction in zip(_DIRECTIONS, self.directions, strict=True):
            tensors[f"{name}.keys"] = direction.lexicon.keys
            tensors[f"{name}.probabilities"] = direction.lexicon.probabilities
            tensors |= {f"{name}.{part}": weights for part, weights in direction.jumps._asdict().items()}
            tensors[f"{name}.empty"] = np.array([direction.empty])
        return with_sorted_header(save(tensors, {"format": _FORMAT, "rule": self.rule}))


def read_aligner(path: Path | str) -> Aligner:
    """Read the file that Aligner.content made.

    Raises DataError when it is missing, damaged, or of another format.
    """
    try:
        if check_regular(Path(path)) > _MOST_BYTES:
            raise DataError(f"{path}: too large for an aligner of `ziggurat align --save-model`")
        check_opens(path)
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `ziggurat align ... --save-model {path}` writes one") from None
    except (SafetensorError, OSError) as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged, or no aligner ({error}); train it again") from None
    rule = next((rule for rule in _RULES if rule == metadata.get("rule")), None)
    if metadata.get("format") != _FORMAT or rule is None:
        raise DataError(f"{path}: no aligner that this version of ziggurat reads ({_FORMAT}); train it again")
    try:
        words = [bytes(_part(tensors, f"{side}_words", np.uint8)).decode() for side in ("source", "target")]
        sides = [text.split("\n") for text in words]
        forward = _direction(tensors, "forward", len(sides[0]), len(sides[1]))
        backward = _direction(tensors, "backward", len(sides[1]), len(sides[0]))
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: damaged ({error}); train it again") from None
    return Aligner(rule, (sides[0], sides[1]), (forward, backward))


def _part(tensors: dict[str, NDArray[Any]], name: str, dtype: type, size: int | None = None) -> NDArray[Any]:
    """Return a tensor. Raises ValueError unless it has one dimension, this type and, where given, this size."""
    found = tensors.get(name)
    if found is None or found.ndim != 1 or found.dtype != dtype or size not in (None, len(found)):
        raise ValueError(f"`{name}` is missing or has another form")
    return found


def _direction(tensors: dict[str, NDArray[Any]], name: str, source_size: int, target_size: int) -> Direction:
    """Return a direction of the file. Raises ValueError for numbers that none has."""
    keys = _part(tensors, f"{name}.keys", np.int64)
    probabilities = _part(tensors, f"{name}.probabilities", np.float64, len(keys))
    sizes = {"between": 2 * JUMPS + 1, "first": JUMPS, "last": JUMPS}
    jumps = Jumps(**{part: _part(tensors, f"{name}.{part}", np.float64, size) for part, size in sizes.items()})
    empty = float(_part(tensors, f"{name}.empty", np.float64, 1)[0])
    ordered = not len(keys) or (
        keys[0] >= 0 and keys[-1] < (source_size + 1) * target_size and (np.diff(keys) > 0).all()
    )
    positive = all(np.isfinite(weights).all() and (weights > 0).all() for weights in (*jumps, probabilities))
    if not (ordered and positive and 0.0 < empty < 1.0):
        raise ValueError(f"`{name}` has numbers that no aligner has")
    return Direction(Lexicon(keys, probabilities, source_size, target_size), jumps, empty)
