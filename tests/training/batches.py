"""Seven sentence pairs, cut into batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ziggurat.data.collate import Batch, SpecialIds, collate

__all__ = ["LENGTHS", "batches"]

SPECIAL = SpecialIds(0, 3, 0, 2, 3)
LENGTHS = [(3, 4), (5, 2), (1, 6), (4, 4), (2, 1), (6, 5), (3, 3)]
"""Source and target tokens of each pair, without end-of-sentence."""


def batches(sizes: list[int]) -> list[Batch]:
    """The first pairs of the seven, always the same ones, cut into batches of `sizes`."""
    rng = np.random.default_rng(0)
    pairs = [[rng.integers(4, 20, n).astype(np.int32) for n in lengths] for lengths in LENGTHS]
    cuts = np.cumsum([0, *sizes])
    assert cuts[-1] <= len(pairs)
    parts = [pairs[a:b] for a, b in pairwise(cuts)]
    return [collate([s for s, _ in p], [t for _, t in p], np.arange(len(p)), SPECIAL) for p in parts]
