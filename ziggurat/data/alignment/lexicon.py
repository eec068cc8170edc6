"""Translation probabilities t(target word | source word) as a sparse table that is looked up and re-estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.alignment.hmm import digamma
from ziggurat.data.alignment.model1 import Row

_UNSEEN = 1e-9
"""Probability of a pair of words that the table does not have."""
_LEAST = 1e-12
"""Least probability of one that it has: seen, but never likely."""
_CONCENTRATION = 0.01
"""Of the Dirichlet prior on each source word's translations; small: few of them."""


class Lexicon:
    """t(target | source) for S source words and the empty word, which has the number S.

    Args:
        keys: [entries] int64, ascending: source word * target_size + target word.
        probabilities: [entries], of the same pairs of words.
        source_size: S.
        target_size: number of target words.
    """

    def __init__(
        self, keys: NDArray[np.int64], probabilities: NDArray[np.float64], source_size: int, target_size: int
    ) -> None:
        self.keys = keys
        self.source_size = source_size
        self.target_size = target_size
        # One more entry at the end, for all pairs of words that the table does not have.
        self._values = np.append(np.maximum(probabilities, _LEAST), _UNSEEN)

    @classmethod
    def of_rows(cls, rows: Sequence[Row], source_size: int, target_size: int) -> Lexicon:
        """Return the table of IBM Model 1's rows, one per source word and one for the empty word."""
        ids = [number * target_size + row.ids for number, row in enumerate(rows)]
        return cls(
            np.concatenate([np.zeros(0, np.int64), *ids]),
            np.concatenate([np.zeros(0), *(row.probabilities for row in rows)]),
            source_size,
            target_size,
        )

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """[entries], in the order of `keys`."""
        return self._values[:-1]

    def places(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entry of each pair of words, in the shape to which the two arrays broadcast.

        A word below 0 is unknown; its entry is that of unseen pairs, the last.
        """
        wanted = source * self.target_size + target
        found = np.searchsorted(self.keys, wanted)
        known = (found < len(self.keys)) & (source >= 0) & (target >= 0)
        known[known] = self.keys[found[known]] == wanted[known]
        return np.where(known, found, len(self.keys))

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the probabilities of entries."""
        return self._values[places]

    def counts(self) -> NDArray[np.float64]:
        """Return zeros to add expected counts to, one for each entry that `places` may name."""
        return np.zeros(len(self._values))

    def estimate(self, counts: NDArray[np.float64]) -> Lexicon:
        """Return the table that expected `counts` lead to, by variational Bayes with a sparse Dirichlet prior.

        t = exp(psi(c + alpha) - psi(sum c + alpha T)), as in fast_align (Dyer, Chahuneau and Smith 2013): rare source
        words do not become the translation of everything ("garbage collectors").
        """
        counts, rows = counts[:-1], self.keys // self.target_size
        totals = np.bincount(rows, counts, self.source_size + 1)
        below = digamma(totals + _CONCENTRATION * self.target_size)
        values = np.exp(digamma(counts + _CONCENTRATION) - below[rows])
        return Lexicon(self.keys, values, self.source_size, self.target_size)
