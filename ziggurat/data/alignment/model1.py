"""IBM Model 1 (Brown et al. 1993): translation probabilities of words or pieces, from pairs of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


class Row(NamedTuple):
    """Translation distribution of a source piece: target ids in ascending order, and their probabilities.

    The probabilities sum to 1 before small ones are left out.
    """

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
    is added to every source. t is uniform at first; each iteration is one of expectation maximisation. A piece that
    occurs in no source has an empty row.

    Args:
        sources: ids of each pair, [pairs] arrays.
        targets: the same for the other side.
        source_size: number of ids.
        target_size: the same for the other side.
        iterations: at least 1.
        kept: most target pieces of a row between iterations.
    """
    # Memory is that of the pairs and the rows: co-occurrences are computed one source piece at a time, and the row of a
    # source piece keeps only its `kept` best entries.
    text = _Text(sources, targets, source_size)
    lengths = np.fromiter(map(len, sources), np.int64, len(sources))
    # Denominators of the first iteration: sums of uniform probabilities, up to a factor that cancels.
    norm = np.repeat(lengths + 1.0, text.lengths)
    rows: list[Row] = []
    dense = np.zeros(target_size)
    for iteration in range(iterations):
        after, new_rows = np.zeros(len(text.target)), []
        for piece in range(source_size + 1):
            # (1) Expectation: the expected count of each target piece beside this source piece.
            places, counts = text.occurrences(piece)
            beside = text.target[places]
            share = counts / norm[places]
            if iteration:
                dense[rows[piece].ids] = rows[piece].probabilities
                share *= dense[beside]
                dense[rows[piece].ids] = 0
            ids, expected = _sums(beside, share, target_size)
            # (2) Maximisation: the counts, normalised, are the new row.
            row = _normalised(ids, expected, kept if piece < source_size else target_size)
            new_rows.append(row)
            # (3) Add its probabilities to the denominators of the next iteration.
            dense[row.ids] = row.probabilities
            after[places] += counts * dense[beside]
            dense[row.ids] = 0
        rows, norm = new_rows, after
    return rows


class _Text:
    """The concatenated targets, and the positions in them beside which a source piece occurs."""

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
        """Return the positions in `target` whose source contains `piece`, and its count there.

        The number after the last id stands for the empty piece, which is in every source once.
        """
        if piece == len(self._of_piece) - 1:
            return np.arange(len(self.target)), np.ones(len(self.target), np.int64)
        own = slice(self._of_piece[piece], self._of_piece[piece + 1])
        pairs = self._pairs[own]
        lengths: NDArray[np.int64] = self.lengths[pairs]
        shift = self._starts[pairs] - (lengths.cumsum() - lengths)
        places: NDArray[Any] = np.repeat(shift, lengths) + np.arange(int(lengths.sum()))
        return places, np.repeat(self._counts[own], lengths)


def _sums(ids: NDArray[np.int64], shares: NDArray[np.float64], size: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the ids of which the shares do not sum to 0, ascending, and the sums; `size`: number of ids."""
    sums: Any  # numpy's types take the sums for counts
    if 16 * len(ids) + 10_000 < size:  # most words are rare, and a vector of all ids for each would take hours
        present, places = np.unique(ids, return_inverse=True)
        sums = np.bincount(places, shares, len(present))
    else:
        present, sums = np.arange(size), np.bincount(ids, shares, size)
    found = sums.nonzero()[0]
    return present[found], sums[found]


def _normalised(ids: NDArray[np.int64], values: Floats, kept: int) -> Row:
    """Return expected counts of target ids as a distribution, reduced to its `kept` largest values."""
    total = values.sum()
    if len(ids) > kept:
        # A stable sort, so that ties go to the smaller id on every machine.
        best = np.sort(np.argsort(-values, kind="stable")[:kept])
        ids, values = ids[best], values[best]
    return Row(ids, values / total)
