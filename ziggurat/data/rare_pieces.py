"""Pieces of a vocabulary that training hardly ever sees: counted while a store is written, told if they are many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import SubwordConfig

_OFTEN = 10
"""Occurrences from which on a piece counts as seen often. On 3,599 pairs of captions 85 % of 8,000 joint pieces have
fewer, and 25 % of 2,000; on 157,571 pairs of Tatoeba 8 % of 8,000."""
_TOO_MANY = 0.5
"""Share of rare pieces from which on there is a notice."""
_SMALL = 1000  # smaller vocabularies are for trials
_BYTES = 256  # pieces that only characters outside the vocabulary need


class PieceCounts:
    """The number of occurrences of each piece."""

    def __init__(self) -> None:
        self.of: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, ids: NDArray[np.int32]) -> None:
        """Count the pieces with these numbers."""
        found = np.bincount(ids, minlength=len(self.of))
        found[: len(self.of)] += self.of
        self.of = found


def rare_notices(config: SubwordConfig, sizes: tuple[int, int], counts: tuple[PieceCounts, PieceCounts]) -> list[str]:
    """Return a sentence for each vocabulary trained for this store most of whose pieces occur less than 10 times.

    Args:
        config: section `data.subword`.
        sizes: numbers of source and target pieces.
        counts: those of both sides' training text.
    """
    if config.kind not in ("bpe", "unigram"):
        return []
    source, target = (np.pad(count.of, (0, size - len(count.of))) for count, size in zip(counts, sizes, strict=True))
    if config.joint:
        return _notice(config, "vocabulary_size", "", source + target)
    of_target = "target_vocabulary_size" if config.target_vocabulary_size is not None else "vocabulary_size"
    return _notice(config, "vocabulary_size", "source ", source) + _notice(config, of_target, "target ", target)


def _notice(config: SubwordConfig, key: str, side: str, counts: NDArray[np.int64]) -> list[str]:
    often = int(np.count_nonzero(counts >= _OFTEN))
    learnt = len(counts) - (_BYTES if config.byte_fallback else 0)
    if len(counts) < _SMALL or learnt - often <= _TOO_MANY * learnt:
        return []
    fewer = -(-often * 3 // 2 // 100) * 100
    return [
        f"{learnt - often:,} of {learnt:,} {side}pieces occur fewer than {_OFTEN} times in the training text: too "
        f"rarely to be learnt well. With so little text, lower `data.subword.{key}`, to {max(fewer, 500)}, say, and "
        "prepare again"
    ]
