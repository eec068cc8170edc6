"""The pairs that a pipeline takes out of its bitext for development and test."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappush, heapreplace
from itertools import compress

import numpy as np
import xxhash

from ziggurat.config.pipeline_corpora import HoldOutConfig
from ziggurat.corpora.pipeline.road import Road, write_sides
from ziggurat.data.cleaning.comparisons import MANY
from ziggurat.data.cleaning.held_out import NOTHING, HeldOut, side_hashes
from ziggurat.data.readers import PairBlock
from ziggurat.system.errors import DataError


class HeldOutPairs:
    """The pairs that are held out: a random choice that depends on nothing but the pairs.

    Case, punctuation and blanks do not count: a pair that differs from another in nothing else is the same one.

    Args:
        sizes: how many for development and for test.
    """

    def __init__(self, sizes: HoldOutConfig) -> None:
        self._sizes = sizes
        self._wanted = sizes.dev + sizes.test
        # Those of the smallest hash, and these hashes, negative, as a heap with the largest in front.
        self._chosen: dict[int, tuple[str, str]] = {}
        self._heap: list[int] = []
        self._texts = HeldOut()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def seeing(self, blocks: Iterator[PairBlock]) -> Iterator[PairBlock]:
        """Yield the blocks, having looked at their pairs."""
        for block in blocks:
            if self._wanted:
                self._see(block)
            yield block

    def _see(self, block: PairBlock) -> None:
        sides = side_hashes(*block)
        # A pair without letters and digits on a side tests nothing.
        for number in np.flatnonzero((sides != NOTHING).all(1)):
            key, pair = -xxhash.xxh3_64_intdigest(sides[number].tobytes()), (block[0][number], block[1][number])
            full = len(self._heap) == self._wanted
            if (known := self._chosen.get(key)) is not None:
                self._chosen[key] = min(known, pair)  # whichever came first
            elif not full or key > self._heap[0]:
                self._chosen[key] = pair
                if full:
                    del self._chosen[heapreplace(self._heap, key)]
                else:
                    heappush(self._heap, key)

    def write(self, road: Road) -> None:
        """Write the sets. Raises DataError where there are too few pairs."""
        if len(self._heap) < self._wanted:
            raise DataError(
                f"bitext.hold_out: asks for {self._wanted:,} pairs, but cleaning leaves only {len(self._heap):,} that "
                "differ in more than case and punctuation"
            )
        pairs = [self._chosen[key] for key in sorted(self._heap, reverse=True)]
        for name, chosen in (("dev", pairs[: self._sizes.dev]), ("test", pairs[self._sizes.dev :])):
            if chosen:
                block = [source for source, _ in chosen], [target for _, target in chosen]
                write_sides(road.sides("clean", "held-out", name), [block])
                self._texts.add_pairs(name, [block])

    def without(self, block: PairBlock) -> PairBlock:
        """Return the pairs of a block that have neither side in common with what is held out."""
        _, either = self._texts.look(side_hashes(*block))
        source, target = (list(compress(side, ~either)) for side in block)
        return source, target

    def nothing_left(self, dropped: int) -> DataError:
        """Return the error where no pair is left to train on, of `dropped` that cleaning had left."""
        return DataError(
            f"bitext.hold_out: all {dropped:,} pairs that cleaning leaves have a side of the {self._wanted:,} that are "
            "held out, so nothing is left to train on; hold out fewer, or name sets of your own (`bitext.dev`, `test`)"
        )

    def notices(self, dropped: int, left: int) -> list[str]:
        """Return notices where few pairs are left, or `dropped`, those not trained on, are many more than held out."""
        found = []
        if (more := dropped - self._wanted) >= max(1, MANY * self._wanted):
            found.append(
                f"{more:,} more pairs have a side of the {self._wanted:,} that are held out, case and punctuation "
                "aside, and were dropped (bitext.hold_out)"
            )
        if left < self._wanted:
            found.append(f"{self._wanted:,} pairs are held out and {left:,} left to train on (bitext.hold_out)")
        return found
