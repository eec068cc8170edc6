"""Seven sentence pairs, cut into batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.data.word_links import PieceLinks

SPECIAL = SpecialIds(0, 3, 0, 2, 3)
LENGTHS = [(3, 4), (5, 2), (1, 6), (4, 4), (2, 1), (6, 5), (3, 3)]
"""LENGTHS are source and target tokens of each pair, without end-of-sentence."""
LINKS = [[(0, 0), (2, 0), (1, 3)], [(4, 1)], [(0, 0), (0, 5)], [(3, 3), (2, 2), (1, 2), (0, 2)], [(1, 0)], [(5, 4)], []]
"""LINKS are pairs of (source token, target token) for each sentence pair; nine target tokens have some."""


def batches(sizes: list[int], *, linked: bool = False) -> list[Batch]:
    """Return the first of the seven pairs, cut into batches of `sizes`, with their links if `linked`."""
    rng = np.random.default_rng(0)
    pairs = [[rng.integers(4, 20, n).astype(np.int32) for n in lengths] for lengths in LENGTHS]
    cuts = np.cumsum([0, *sizes])
    assert cuts[-1] <= len(pairs)
    found = []
    for a, b in pairwise(cuts):
        cells = sorted((row, target, source) for row in range(b - a) for source, target in LINKS[a + row])
        links = PieceLinks(*np.array(cells, np.int64).reshape(-1, 3).T) if linked else None
        sides = [s for s, _ in pairs[a:b]], [t for _, t in pairs[a:b]]
        found.append(collate(*sides, np.arange(b - a), SPECIAL, links=links))
    return found
