"""Sentences of development and test sets that training pairs have too, case, punctuation and blanks aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.cleaning.sketches import folded

__all__ = ["NOTHING", "HeldOut", "Overlap", "SentenceSet", "sentence_hashes", "side_hashes"]

Mask = NDArray[np.bool_]
Hashes = NDArray[np.uint64]


class Overlap(NamedTuple):
    """What training pairs have in common with a held-out set."""

    sentences: int
    """Of the set, unlike ones, with letters or digits."""
    found: int
    """Those of them that are in a training pair."""
    pairs: int
    """Training pairs with both sides in the set."""
    sides: int
    """Training pairs with one side in the set, or both."""

    def since(self, before: Overlap) -> Overlap:
        """Return what was found after `before`."""
        new = (now - then for now, then in zip(self[1:], before[1:], strict=True))
        return Overlap(self.sentences, *new)

    def joined(self, later: Overlap) -> Overlap:
        """Return what was found in both of two stretches of pairs, of which `later` was counted by `since`."""
        return Overlap(self.sentences, *map(sum, zip(self[1:], later[1:], strict=True)))

    def staying(self, rule: str) -> tuple[int, int]:
        """Return how many of `pairs` and of `sides` are trained on under this rule (`data.filters.held_out`).

        That many at most: filters that come later, and other sets, may drop more of them.
        """
        return {"pairs": (0, self.sides - self.pairs), "sides": (0, 0)}.get(rule, (self.pairs, self.sides))


class HeldOut:
    """Sentences that must not be trained on, by set, and what training pairs were found to share with them.

    A source is compared with the sources of a set and a target with its targets; sentences of unknown side with both.
    The two sides of a test set are such sentences, in two files: so a pair is in a set of them as a whole where one
    side is in it and the other in any such set.
    """

    def __init__(self) -> None:
        self._sets: dict[str, tuple[SentenceSet, SentenceSet]] = {}
        self._pairs: Counter[str] = Counter()
        self._sides: Counter[str] = Counter()
        self._of_lines: list[str] = []
        self._any: tuple[SentenceSet, SentenceSet] | None = None
        """All sets together; None: they changed since."""

    def __bool__(self) -> bool:
        return bool(self._sets)

    def add_pairs(self, name: str, blocks: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Add a set of pairs, in blocks of its two sides."""
        hashes = [(sentence_hashes(source), sentence_hashes(target)) for source, target in blocks]
        self._sets[name] = SentenceSet(source for source, _ in hashes), SentenceSet(target for _, target in hashes)
        self._any = None

    def add_lines(self, name: str, blocks: Iterable[Sequence[str]]) -> None:
        """Add a set of sentences of either language, in blocks."""
        found = SentenceSet(map(sentence_hashes, blocks))
        self._sets[name] = found, found
        self._of_lines.append(name)
        self._any = None

    def look(self, hashes: Hashes) -> tuple[Mask, Mask]:
        """Count what pairs share with each set; return masks of the pairs with both sides, and with either, in one.

        `hashes`: of both sides of each pair, [pairs, 2], by `side_hashes`.
        """
        both, either = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        # First in all sets at once: few pairs have a sentence of any, and there may be many sets.
        if self._any is None:
            first, second = ([sides[n].hashes for sides in self._sets.values()] for n in (0, 1))
            self._any = SentenceSet(first), SentenceSet(second)
        rows = np.flatnonzero(self._any[0].look(hashes[:, 0]) | self._any[1].look(hashes[:, 1]))
        both[rows], either[rows] = self._looked(hashes[rows])
        return both, either

    def _looked(self, hashes: Hashes) -> tuple[Mask, Mask]:
        """Do what `look` says, set by set."""
        both, either = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        looked = {
            name: tuple(side.look(hashes[:, number]) for number, side in enumerate(sides))
            for name, sides in self._sets.items()
        }
        in_lines = [np.any([looked[name][side] for name in self._of_lines], axis=0) for side in (0, 1)]
        for name, (source, target) in looked.items():
            whole = source & target
            if name in self._of_lines:
                whole = (source & in_lines[1]) | (target & in_lines[0])
            self._pairs[name] += int(whole.sum())
            self._sides[name] += int((source | target).sum())
            both |= whole
            either |= source | target
        return both, either

    def overlaps(self) -> dict[str, Overlap]:
        """Return what was found so far, by set."""
        return {
            name: Overlap(
                sum(len(side.hashes) for side in {*sides}),
                sum(int(side.found.sum()) for side in {*sides}),
                self._pairs[name],
                self._sides[name],
            )
            for name, sides in self._sets.items()
        }


class SentenceSet:
    """Hashes of sentences, with those that were found.

    Args:
        blocks: hashes of the sentences (`sentence_hashes`), in blocks.
    """

    def __init__(self, blocks: Iterable[Hashes]) -> None:
        hashes = np.unique(np.concatenate([np.zeros(0, np.uint64), *blocks]))
        self.hashes = hashes[hashes != NOTHING]
        self.found = np.zeros(len(self.hashes), np.bool_)

    def look(self, hashes: Hashes) -> Mask:
        """Return a mask of the hashes that are in the set."""
        if not len(self.hashes):
            return np.zeros(len(hashes), np.bool_)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        known = self.hashes[places] == hashes
        self.found[places[known]] = True
        return known


NOTHING = np.uint64(xxhash.xxh3_64_intdigest(b""))
"""Hash of what has neither letters nor digits; it is in no set."""


def side_hashes(sources: Sequence[str], targets: Sequence[str]) -> Hashes:
    """Return what `HeldOut.look` looks at: a hash of each side of each pair, uint64 [pairs, 2]."""
    return np.stack([sentence_hashes(sources), sentence_hashes(targets)], 1)


def sentence_hashes(texts: Sequence[str]) -> Hashes:
    """Return a hash of each text's letters, marks and numbers, in lower case."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(text.encode()) for text in folded(texts)), np.uint64, len(texts))
