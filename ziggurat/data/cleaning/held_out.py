"""Sentences of development and test sets in training pairs, and near-duplicates among training pairs.

Near-duplicates are found by MinHash (Broder 1997) in bands. A pair is the set of the four-character sequences of its
two sides. For a random hash, the smallest value over the sequences is the same in two sets with a probability equal to
their Jaccard similarity s. A band combines `rows` such values, so bands are equal with probability s^rows. A pair is a
near-duplicate if two of its BANDS bands were seen before.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.config.languages import main_language

Keys = NDArray[np.uint64]

BANDS = 8
_NEEDED = 2  # bands in common: a single one may be a coincidence
_GRAM = 4  # characters of a sequence
_SEED = 19_97
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TARGET = np.uint64(0xD6E8FEB86659FD93)  # distinguishes the target's sequences from the source's
_PART = 1 << 16  # number of sequences hashed at a time, so that they stay in the processor's cache


def folded(texts: Sequence[str], *, digits: bool = True) -> list[str]:
    """Return texts, which must have no line feed, in lower case (casefold) and reduced to letters, marks and numbers.

    Without `digits` numbers are also removed.
    """
    # On all texts at once: many times faster than a regular expression.
    joined = "\n".join(texts).casefold().encode("utf-32-le")
    codes = np.frombuffer(joined, np.uint32)
    kept = codes[_telling(digits)[codes]]
    return kept.tobytes().decode("utf-32-le").split("\n") if texts else []


@lru_cache(maxsize=2)
def _telling(digits: bool) -> NDArray[np.bool_]:
    """Return a mask over all characters, true for those that `folded` keeps and for the line feed."""
    classes = "LMN" if digits else "LM"
    kept = (unicodedata.category(chr(code))[0] in classes for code in range(sys.maxunicode + 1))
    mask = np.fromiter(kept, np.bool_, sys.maxunicode + 1)
    mask[ord("\n")] = True
    return mask


def rows_for(similarity: float) -> int:
    """Return the largest number of rows per band with which half of the pairs of this similarity are found."""
    rows = 1
    while _found(similarity ** (rows + 1)) >= 0.5:
        rows += 1
    return rows


def _found(equal: float) -> float:
    """Return the probability that two or more bands are equal, each with probability `equal`."""
    return 1 - (1 - equal) ** BANDS - BANDS * equal * (1 - equal) ** (BANDS - 1)


def sketches(sources: Sequence[str], targets: Sequence[str], rows: int) -> Keys:
    """Return the bands of each pair, uint64 [pairs, BANDS], which are all 0 for a pair without letters.

    Case, digits, punctuation and spaces are ignored. `rows`: see `rows_for`.
    """
    if not sources:
        return np.zeros((0, BANDS), np.uint64)
    sides = [folded(side, digits=False) for side in (sources, targets)]
    lettered = np.fromiter((bool(s or t) for s, t in zip(*sides, strict=True)), np.bool_, len(sources))
    grams = [_grams(side) for side in sides]
    counts = grams[0][1] + grams[1][1]
    ends = counts.cumsum()
    values = np.empty(int(counts.sum()), np.uint64)
    shifts, salts = (np.zeros_like(counts), grams[0][1]), (np.uint64(0), _TARGET)
    for (of_side, lengths), shift, salt in zip(grams, shifts, salts, strict=True):
        starts = ends - counts + shift
        places = np.arange(len(of_side)) - np.repeat(lengths.cumsum() - lengths, lengths) + np.repeat(starts, lengths)
        values[places] = of_side ^ salt
    return np.where(lettered[:, None], _bands(values, ends - counts, rows), np.uint64(0))


def _grams(texts: Sequence[str]) -> tuple[Keys, NDArray[np.int64]]:
    """Return a hash of each sequence of characters, one text after the other, and the number of sequences per text.

    Each text is enclosed in marks, so that even a single character gives sequences.
    """
    joined = "".join(f"\x02\x02\x02{text}\x03" for text in texts)
    codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32).astype(np.uint64)
    lengths = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    starts = np.fromiter((len(text) + _GRAM for text in texts), np.int64, len(texts))
    starts = starts.cumsum() - starts
    places = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths) + np.repeat(starts, lengths)
    found = np.zeros(len(places), np.uint64)
    for step in range(_GRAM):
        found = _mixed(found ^ codes[places + step])
    return found, lengths


def _mixed(values: Keys) -> Keys:
    """Return values whose bits depend on all bits of the given values (the finaliser of SplitMix64)."""
    values = values + _MULTIPLIER
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _bands(values: Keys, starts: NDArray[np.int64], rows: int) -> Keys:
    """Return the bands of each set of hashes, where sets start at `starts`, uint64 [sets, BANDS]."""
    generator = np.random.default_rng(_SEED)
    factors = generator.integers(1 << 63, size=(BANDS, rows), dtype=np.uint64) << np.uint64(1) | np.uint64(1)
    found = np.zeros((len(starts), BANDS), np.uint64)
    # Sets are processed together, up to _PART sequences.
    cuts = [0]
    for number in range(1, len(starts)):
        if starts[number] - starts[cuts[-1]] >= _PART:
            cuts.append(number)
    for first, last in zip(cuts, [*cuts[1:], len(starts)], strict=True):
        end = int(starts[last]) if last < len(starts) else len(values)
        part, inner = values[int(starts[first]) : end], starts[first:last] - starts[first]
        for band in range(BANDS):
            for row in range(rows):
                # A product with an odd number is a permutation; its upper half is mixed well enough for an order.
                least = np.minimum.reduceat(part * factors[band, row], inner)
                found[first:last, band] = _mixed(found[first:last, band] ^ least)
    return found


class NearDuplicates:
    """The bands of earlier pairs, two bytes for each, with the newest in each slot, in a table of `memory` bytes."""

    def __init__(self, memory: int) -> None:
        self._places = memory // (2 * BANDS)
        # 0: empty. The system allocates the memory when it is first written.
        self._table = np.zeros((BANDS, self._places), np.uint16)

    def add(self, bands: Keys) -> NDArray[np.bool_]:
        """Add pairs by their bands [pairs, BANDS], see `sketches`; return a mask [pairs].

        The mask is true for pairs nearly equal to an earlier one, including those in this call, but never for a pair
        without letters. The result does not depend on how the pairs are divided into calls.
        """
        chosen = np.flatnonzero(bands.any(1))
        common = np.zeros(len(chosen), np.int64)
        for band in range(BANDS):
            common += self._seen(self._table[band], bands[chosen, band])
        found = np.zeros(len(bands), np.bool_)
        found[chosen] = common >= _NEEDED
        return found

    def _seen(self, table: NDArray[np.uint16], keys: Keys) -> NDArray[np.bool_]:
        """Write the keys into a table one after another; return a mask of those that were already there."""
        places = (keys % np.uint64(self._places)).astype(np.int64)
        marks = np.maximum(keys >> np.uint64(48), 1).astype(np.uint16)
        # Sorted by slot, each key follows the previous one in its slot.
        order = np.argsort(places, kind="stable")
        places, marks = places[order], marks[order]
        begins = np.concatenate([[True], places[1:] != places[:-1]])[: len(places)]
        before = np.where(begins, table[places], np.concatenate([[np.uint16(0)], marks[:-1]])[: len(marks)])
        found = np.zeros(len(keys), np.bool_)
        found[order] = before == marks
        ends = np.concatenate([begins[1:], [True]])[: len(places)]
        table[places[ends]] = marks[ends]
        return found


Languages = tuple[str, str]
Mask = NDArray[np.bool_]
Hashes = NDArray[np.uint64]


class Overlap(NamedTuple):
    """Overlap of training pairs with a held-out set."""

    sentences: int
    """Distinct sentences of the set that have letters or digits."""
    found: int
    """Sentences of these that are in a training pair."""
    pairs: int
    """Training pairs with both sides in the set."""
    sides: int
    """Training pairs with one side in the set, or both."""

    def since(self, before: Overlap) -> Overlap:
        """Return the overlap found after `before`."""
        new = (now - then for now, then in zip(self[1:], before[1:], strict=True))
        return Overlap(self.sentences, *new)

    def joined(self, later: Overlap) -> Overlap:
        """Return the overlap over two series of pairs, the second of which (`later`) was counted by `since`."""
        return Overlap(self.sentences, *map(sum, zip(self[1:], later[1:], strict=True)))

    def staying(self, rule: str) -> tuple[int, int]:
        """Return the numbers of `pairs` and `sides` that stay in training under a rule (`data.filters.held_out`).

        They are upper bounds, because later filters and other sets may drop more of them.
        """
        return {"pairs": (0, self.sides - self.pairs), "sides": (0, 0)}.get(rule, (self.pairs, self.sides))


class HeldOut:
    """Sentences that must not be trained on, by set, and their overlap with training pairs.

    Either side of a training pair is compared with the sentences of its language on either side of a set, so a set is
    found in pairs of the other direction, and half of it in pairs with a third language. Pairs of a set's own two
    languages are compared regardless of the declared sides, because a file with two directions does not declare them. A
    pair as a whole is in a set if its sides are two sides of the set.

    Sentences of unknown language are compared with all. A test set's two sides in two files are such sentences.
    So a pair as a whole is in such a set if one side is in it and the other in any such set.
    """

    def __init__(self) -> None:
        self._sets: dict[str, _Set] = {}
        self._pairs: Counter[str] = Counter()
        self._sides: Counter[str] = Counter()
        self._any: SentenceSet | None = None  # all sets together; None: they have changed since

    def __bool__(self) -> bool:
        return bool(self._sets)

    def add_pairs(
        self, name: str, blocks: Iterable[tuple[Sequence[str], Sequence[str]]], languages: Languages | None = None
    ) -> None:
        """Add a set of pairs, in blocks of its two sides; `languages` are their codes, None if they do not matter.

        They do not matter if all pairs are in the set's two languages.
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
        """Count the overlap of pairs with each set; return masks of pairs with both sides, and with either, in a set.

        `hashes` are those of both sides of each pair, [pairs, 2], from `side_hashes`; without `languages`, all
        sentences are compared.
        """
        both, either = np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.bool_)
        # First in all sets at once: few pairs have a sentence of any, and there may be many sets.
        if self._any is None:
            self._any = SentenceSet(side.hashes for known in self._sets.values() for side in known.sides)
        rows = np.flatnonzero(self._any.look(hashes[:, 0]) | self._any.look(hashes[:, 1]))
        main = languages and _main(languages)
        looked = {name: known.look(hashes[rows], main) for name, known in self._sets.items()}
        in_lines = np.zeros((len(rows), 2), np.bool_)
        for found in looked.values():
            if found.shape[2] == 1:
                in_lines |= found[:, :, 0]
        for name, found in looked.items():
            # Both sides of the pair in different sides of the set or, for sentences of either language, in any set.
            others = in_lines[:, ::-1, None] if found.shape[2] == 1 else found[:, ::-1, ::-1]
            whole, one = (found & others).any((1, 2)), found.any((1, 2))
            self._pairs[name] += int(whole.sum())
            self._sides[name] += int(one.sum())
            both[rows] |= whole
            either[rows] |= one
        return both, either

    def overlaps(self) -> dict[str, Overlap]:
        """Return the overlaps found so far, by set."""
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
    sides: tuple[SentenceSet, ...]
    """Its sources and its targets, or its sentences of either language."""
    languages: Languages | None
    """Main language of each side, if that matters."""

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
    """Return codes without region and script: `pt-BR` is compared with `pt`."""
    return main_language(languages[0]), main_language(languages[1])


class SentenceSet:
    """Hashes of sentences (`sentence_hashes`), and which of them were found."""

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
"""Hash of texts with neither letters nor digits; it is not in any set."""


def side_hashes(sources: Sequence[str], targets: Sequence[str]) -> Hashes:
    """Return the input of `HeldOut.look`: a hash of each side of each pair, uint64 [pairs, 2]."""
    return np.stack([sentence_hashes(sources), sentence_hashes(targets)], 1)


def sentence_hashes(texts: Sequence[str]) -> Hashes:
    """Return a hash of each text's letters, marks and numbers, in lower case."""
    digest = xxhash.xxh3_64_intdigest
    return np.fromiter((digest(text.encode()) for text in folded(texts)), np.uint64, len(texts))
