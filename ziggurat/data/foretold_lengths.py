"""The length that a modifier gives to a pair, foretold without its text: batches are planned before it is read.

Each modifier is tried on a sample of pairs. Where it changes every word, the new length is foretold from the pieces of
the pair, by what the modifier makes of each piece alone; else from their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.edits import Pair
from ziggurat.data.subword import Tokenizer

Ids = NDArray[np.int32]

SHARE = 0.95
"""Share of the sample that fits into the length that is foretold."""


class ForetoldLength(NamedTuple):
    """The length of one side after one modifier: most pairs then have at most factor * sum + constant pieces."""

    by_piece: NDArray[np.float64] | None
    """[vocabulary] what is summed over the pieces of a text; None: 1 for each."""
    factor: float
    constant: float

    def ratio(self, sentences: Sequence[Ids]) -> NDArray[np.float64] | float:
        """Return factor * sum / pieces of each sentence; without `by_piece` that is the factor, whatever they are."""
        if self.by_piece is None:
            return self.factor
        return self.factor * _sums(self.by_piece, sentences) / np.maximum(1, [len(ids) for ids in sentences])


def foretold_lengths(
    modify: Callable[[Pair, int], None], every_word: bool, sample: Sequence[Pair], tokenizers: Sequence[Tokenizer]
) -> list[ForetoldLength]:
    """Return what foretells the length of either side after a modifier.

    Args:
        modify: changes a pair, as a function of the pair and a number.
        every_word: it changes words, whatever words they are; the length is then foretold by pieces.
        sample: pairs to try it on; they stay as they are.
        tokenizers: of both sides.
    """
    modified = [pair.copy() for pair in sample]
    for number, pair in enumerate(modified):
        modify(pair, number)
    found = []
    for side, tokenizer in enumerate(tokenizers):
        ids = [np.array(each, np.int32) for each in tokenizer.encode([pair.texts[side] for pair in sample])]
        new = np.array([len(each) for each in tokenizer.encode([pair.texts[side] for pair in modified])], np.float64)
        by_piece = _by_piece(modify, side, tokenizer) if every_word else None
        sums = np.array([len(each) for each in ids], np.float64) if by_piece is None else _sums(by_piece, ids)
        found.append(_fitted(by_piece, sums, new))
    return found


def _fitted(
    by_piece: NDArray[np.float64] | None, sums: NDArray[np.float64], new: NDArray[np.float64]
) -> ForetoldLength:
    """Return the length that most of the sample fits into: by a factor or by a constant, whichever is tighter."""
    tried = []
    for factor in (1.0, float(new.sum() / max(1.0, float(sums.sum())))):
        beyond = new - factor * sums
        constant = float(np.quantile(beyond, SHARE, method="higher")) if len(beyond) else 0.0
        tried.append(ForetoldLength(by_piece, factor, constant))
    return min(tried, key=lambda foretold: foretold.factor * float(sums.sum()) + foretold.constant * len(sums))


def _by_piece(modify: Callable[[Pair, int], None], side: int, tokenizer: Tokenizer) -> NDArray[np.float64]:
    """Return for each id of a vocabulary the pieces of its text after a modifier; 1 for those without text."""
    texts = [tokenizer.decode([index]).strip() for index in range(tokenizer.size)]
    pairs = [Pair(text, text) for text in texts]
    for pair in pairs:
        modify(pair, 0)
    return np.array([max(1, len(ids)) for ids in tokenizer.encode([pair.texts[side] for pair in pairs])], np.float64)


def _sums(values: NDArray[np.float64], sentences: Sequence[Ids]) -> NDArray[np.float64]:
    """Return the sum of `values` over the ids of each sentence."""
    together = np.concatenate([np.zeros(1), np.cumsum(values[np.concatenate([np.zeros(0, np.int32), *sentences])])])
    ends = np.cumsum([len(ids) for ids in sentences], dtype=np.int64)
    return np.diff(together[np.concatenate([np.zeros(1, np.int64), ends])])
