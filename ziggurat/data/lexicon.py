"""Which target pieces translate a source piece: IBM Model 1 (Brown et al. 1993), estimated from pairs of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Row", "translation_table"]

Ids = NDArray[np.integer[Any]]


class Row(NamedTuple):
    """Target pieces that a source piece becomes, ids ascending; probabilities add up to 1 before any are left out."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def translation_table(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    source_size: int,
    target_size: int,
    *,
    iterations: int = 5,
    kept: int = 500,
) -> list[Row]:
    """Return p(target piece | source piece) for every source id, and for the empty piece as the last row.

    p(target | source) = prod_j sum_i t(target_j | source_i) / (length + 1), where i also runs over an empty piece that
    every source has; from uniform t, each iteration is one of expectation maximisation. A piece that is in no source
    has an empty row.

    Memory is that of the pairs and of the rows, of which those of source pieces keep the `kept` best after each
    iteration; co-occurrences are made piece by piece and never all at once.

    Args:
        sources: ids of each pair, [pairs] arrays.
        targets: the same for the other side.
        source_size: number of ids.
        target_size: the same for the other side.
        iterations: at least 1.
        kept: most target pieces of a row between iterations.
    """
    text = _Text(sources, targets, source_size)
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    # What uniform probabilities add up to, but for a factor that cancels.
    norm = np.repeat(lengths + 1.0, text.lengths)
    rows: list[Row] = []
    dense = np.zeros(target_size)
    for iteration in range(iterations):
        after, new_rows = np.zeros(len(text.target)), []
        for piece in range(source_size + 1):
            places, counts = text.occurrences(piece)
            beside = text.target[places]
            share = counts / norm[places]
            if iteration:
                dense[rows[piece].ids] = rows[piece].probabilities
                share *= dense[beside]
                dense[rows[piece].ids] = 0
            expected: NDArray[Any] = np.bincount(beside, share, target_size)
            row = _normalised(expected, kept if piece < source_size else target_size)
            dense[row.ids] = row.probabilities
            after[places] += counts * dense[beside]
            dense[row.ids] = 0
            new_rows.append(row)
        rows, norm = new_rows, after
    return rows


class _Text:
    """All targets behind each other, and where source pieces occur."""

    def __init__(self, sources: Sequence[Ids], targets: Sequence[Ids], source_size: int) -> None:
        self.lengths = np.fromiter(map(len, targets), np.int64, len(targets))
        self.target = np.concatenate([np.zeros(0, np.int64), *targets])
        self._starts = self.lengths.cumsum() - self.lengths
        pair = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
        keys = np.concatenate([np.zeros(0, np.int64), *sources]) * len(sources) + pair
        keys, self._counts = np.unique(keys, return_counts=True)
        self._pairs = keys % max(1, len(sources))
        self._of_piece = np.searchsorted(keys, np.arange(source_size + 1) * len(sources))

    def occurrences(self, piece: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places in `target` beside which `piece` is, and how many times; beside all is the empty one."""
        if piece == len(self._of_piece) - 1:
            return np.arange(len(self.target)), np.ones(len(self.target), np.int64)
        own = slice(self._of_piece[piece], self._of_piece[piece + 1])
        pairs = self._pairs[own]
        lengths: NDArray[np.int64] = self.lengths[pairs]
        shift = self._starts[pairs] - (lengths.cumsum() - lengths)
        places: NDArray[Any] = np.repeat(shift, lengths) + np.arange(int(lengths.sum()))
        return places, np.repeat(self._counts[own], lengths)


def _normalised(expected: NDArray[np.float64], kept: int) -> Row:
    """Return expected counts [target ids] as a distribution, of which the `kept` largest values stay."""
    ids = expected.nonzero()[0]
    values = expected[ids]
    total = values.sum()
    if len(ids) > kept:
        # Ties go to the smaller id on every machine.
        best = np.sort(np.argsort(-values, kind="stable")[:kept])
        ids, values = ids[best], values[best]
    return Row(ids, values / total)
