"""Sentences of development and test sets that training pairs have too, case, punctuation and blanks aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.config.languages import main_language
from ziggurat.data.cleaning.sketches import folded

Languages = tuple[str, str]
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

    Either side of a training pair is compared with the sentences of its language on either side of a set, so a set is
    found in pairs of the other direction, and half of it in pairs with a third language. Pairs of a set's own two
    languages are compared whatever is said to be on which side: two directions in one file of two languages need not
    say. A pair is in a set as a whole where its sides are two sides of the set.

    Sentences of unknown language are compared with all. The two sides of a test set are such sentences, in two files:
    so a pair is in a set of them as a whole where one side is in it and the other in any such set.
    """

    def __init__(self) -> None:
        self._sets: dict[str, _Set] = {}
        self._pairs: Counter[str] = Counter()
        self._sides: Counter[str] = Counter()
        self._any: SentenceSet | None = None
        """All sets together; None: they changed since."""

    def __bool__(self) -> bool:
        return bool(self._sets)

    def add_pairs(
        self, name: str, blocks: Iterable[tuple[Sequence[str], Sequence[str]]], languages: Languages | None = None
    ) -> None:
        """Add a set of pairs, in blocks of its two sides; `languages`: codes of these, None where they do not matter.

        They do not where all pairs are of the set's two languages.
        """
        hashes = [(sentence_hashes(source), sentence_hashes(target)) for source, target in blocks]
        sides = SentenceSet(source for source, _ in hashes), SentenceSet(target for _, target in hashes)
        self._sets[name] = _Set(sides, languages and _main(languages))
        self._any = None

    def add_lines(self, name: str, blocks: Iterable[Sequence[str]]) -> None:
        """Add a set of sentences of either language, in blocks."""
        self._sets[name] = _Set((SentenceSet(map(sentence_hashes, blocks)),), None)
        self._any = None

    def look(self, hashes: Hashes, languages: Languages | None = None) -> tuple[Mask, Mask]:
        """Count what pairs share with each set; return masks of the pairs with both sides, and with either, in one.

        Args:
            hashes: of both sides of each pair, [pairs, 2], by `side_hashes`.
            languages: codes of source and target; None: not known, all sentences are compared.
        """
        both, either = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        # First in all sets at once: few pairs have a sentence of any, and there may be many sets.
        if self._any is None:
            self._any = SentenceSet(side.hashes for known in self._sets.values() for side in known.sides)
        rows = np.flatnonzero(self._any.look(hashes[:, 0]) | self._any.look(hashes[:, 1]))
        both[rows], either[rows] = self._looked(hashes[rows], languages and _main(languages))
        return both, either

    def _looked(self, hashes: Hashes, languages: Languages | None) -> tuple[Mask, Mask]:
        """Do what `look` says, set by set."""
        both, either = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        looked = {name: known.look(hashes, languages) for name, known in self._sets.items()}
        in_lines = np.zeros_like(hashes, np.bool_)
        for found in looked.values():
            if found.shape[2] == 1:
                in_lines |= found[:, :, 0]
        for name, found in looked.items():
            # Both sides of the pair, each in the other side of the set; of sentences of either language in any set.
            others = in_lines[:, ::-1, None] if found.shape[2] == 1 else found[:, ::-1, ::-1]
            whole, one = (found & others).any((1, 2)), found.any((1, 2))
            self._pairs[name] += int(whole.sum())
            self._sides[name] += int(one.sum())
            both |= whole
            either |= one
        return both, either

    def overlaps(self) -> dict[str, Overlap]:
        """Return what was found so far, by set."""
        return {
            name: Overlap(
                sum(len(side.hashes) for side in known.sides),
                sum(int(side.found.sum()) for side in known.sides),
                self._pairs[name],
                self._sides[name],
            )
            for name, known in self._sets.items()
        }


class _Set(NamedTuple):
    """One set."""

    sides: tuple[SentenceSet, ...]
    """Its sources and its targets, or its sentences of either language."""
    languages: Languages | None
    """Main language of each side, where that matters."""

    def look(self, hashes: Hashes, languages: Languages | None) -> Mask:
        """Return which side of each pair is in which side of the set, [pairs, 2, sides]."""
        found = np.zeros((*hashes.shape, len(self.sides)), np.bool_)
        own = self.languages
        for place, side in enumerate(self.sides):
            for number in (0, 1):
                if own is None or languages is None or {*own} == {*languages} or own[place] == languages[number]:
                    found[:, number, place] = side.look(hashes[:, number])
        return found


def _main(languages: Languages) -> Languages:
    """Return codes without what they say of region and script: `pt-BR` is compared with `pt`."""
    return main_language(languages[0]), main_language(languages[1])


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
