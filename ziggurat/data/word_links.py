"""Word alignments of corpora: an aligner trained on an even sample of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ziggurat.data.readers import PairBlock

__all__ = ["TRAINING_PAIRS", "spread_pairs"]

TRAINING_PAIRS = 1_000_000
"""Pairs that an aligner is trained on at most, unless told otherwise; its memory grows with them."""


def spread_pairs(blocks: Iterable[PairBlock], total: int, most: int) -> Iterator[tuple[str, str]]:
    """Yield at most `most` of the `total` pairs of `blocks`, evenly spread over them."""
    number = 0
    for block in blocks:
        for pair in zip(*block, strict=True):
            # Every pair where there are no more than `most`; else the first of each of `most` equal parts.
            if total <= most or (number * most) // total != ((number - 1) * most) // total:
                yield pair
            number += 1
