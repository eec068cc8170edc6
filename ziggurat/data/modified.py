"""Modification of training pairs for a batch: which are drawn, their planned lengths, and their ids and links.

For one store, the modification of a pair depends only on (seed, epoch, index), so any process draws the same at any
time. The text of the few drawn pairs is decoded from the stored ids and segmented again.

Batches are planned before that, with the length that most pairs of a drawn pair's kind have after modification. A pair
that becomes longer, or gets a piece that the vocabulary lacks, stays unmodified, so batches never exceed their budget.
To predict lengths, each modifier is tried on a sample of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from ziggurat.config.modifiers import ModifiersConfig
from ziggurat.data.modifiers import BY_WORD, MODIFIERS, EditablePair, Span, merged, one_to_one_count
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import PairTable
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import PieceUnits, unit_ends
from ziggurat.system.errors import DataError

Ids = NDArray[np.int32]

SHARE = 0.95
"""Share of the sample that fits into the predicted length."""


class PredictedLength(NamedTuple):
    """The length of one side after one modifier: most pairs then have at most factor * sum + constant pieces."""

    by_piece: NDArray[np.float64] | None
    """[vocabulary] summand for each piece of a text; None: 1 for each."""
    factor: float
    constant: float

    def ratio(self, sentences: Sequence[Ids]) -> NDArray[np.float64] | float:
        """Return factor * sum / pieces of each sentence; without `by_piece` this is the factor."""
        if self.by_piece is None:
            return self.factor
        return self.factor * _sums(self.by_piece, sentences) / np.maximum(1, [len(ids) for ids in sentences])


def _fitted(
    by_piece: NDArray[np.float64] | None, sums: NDArray[np.float64], new: NDArray[np.float64]
) -> PredictedLength:
    """Return the length that most of the sample fits into, with a factor or a constant, whichever is tighter."""
    tried = []
    for factor in (1.0, float(new.sum() / max(1.0, float(sums.sum())))):
        beyond = new - factor * sums
        constant = float(np.quantile(beyond, SHARE, method="higher")) if len(beyond) else 0.0
        tried.append(PredictedLength(by_piece, factor, constant))
    return min(tried, key=lambda predicted: predicted.factor * float(sums.sum()) + predicted.constant * len(sums))


def _sums(values: NDArray[np.float64], sentences: Sequence[Ids]) -> NDArray[np.float64]:
    together = np.concatenate([np.zeros(1), np.cumsum(values[np.concatenate([np.zeros(0, np.int32), *sentences])])])
    ends = np.cumsum([len(ids) for ids in sentences], dtype=np.int64)
    return np.diff(together[np.concatenate([np.zeros(1, np.int64), ends])])


Indices = NDArray[np.int64]

_SAMPLE = 128  # pairs on which a modifier is tried, to predict lengths
_EVERY_WORD = ("upper_case", "title_case")
"""Modifiers that change every word, so that the new length of a pair depends on its words."""
_CHUNK = 1 << 20  # pairs planned at a time, to bound memory


class ModifiedPairs(NamedTuple):
    """The pairs of a batch, after modification of those that were drawn and could be modified."""

    sources: list[Ids]
    targets: list[Ids]
    links: list[Ids]
    """Word alignments in the form of a store, for all pairs or for none."""
    texts: dict[int, list[str]]
    """Index in the batch -> source and target of a modified pair."""


class PairModifier:
    """The modifiers of one stage of training; a modified pair has at most `longest` pieces on either side.

    Raises DataError if text is already segmented, or if the table lacks the word alignments that a modifier needs.
    """

    def __init__(
        self,
        config: ModifiersConfig,
        table: PairTable,
        tokenizers: tuple[Tokenizer, Tokenizer],
        languages: tuple[str, str],
        *,
        seed: int,
        longest: int,
    ) -> None:
        if any(isinstance(tokenizer, VocabularyTokenizer) for tokenizer in tokenizers):
            raise DataError(
                "text that is already segmented (`data.subword.kind: vocabulary`) cannot be modified",
                key="data.subword.kind",
            )
        if config.need_links and not table.has_links:
            name = "inline" if "inline" in config.chosen else "terms"
            raise DataError(
                f"the store holds no word alignments, which `data.modifiers.{name}` needs; set `alignment` of the "
                "corpora in data.train, or `data.alignment.compute=hmm`, and run `ziggurat prepare --force`",
                key=f"data.modifiers.{name}",
                named=["data.train", "data.alignment.compute"],
            )
        self._config, self._table, self._tokenizers, self._languages = config, table, tokenizers, languages
        self._seed, self._longest = seed, longest
        self._sections = {name: section for name, section in config.chosen.items() if name != "merge"}
        self._units = [PieceUnits(tokenizer) for tokenizer in tokenizers]
        self._sample = self._sampled()
        self._predicted = {name: self._predict(name) for name in self._sections}

    def lengths(self, epoch: int, rows: Indices | None = None) -> tuple[Ids, Ids]:
        """Return the planned number of pieces of every pair of the table in an epoch, int32 [pairs].

        With `rows`, in any order and possibly repeated, other pairs have their stored number.
        """
        rows = None if rows is None else np.unique(rows)
        planned = np.array(self._table.source_lengths), np.array(self._table.target_lengths)
        count = len(self._table) if rows is None else len(rows)
        for start in range(0, count, _CHUNK):
            end = min(start + _CHUNK, count)
            part = np.arange(start, end) if rows is None else rows[start:end]
            _, _, both = self._drawn(part, epoch)
            for side, rooms in zip(planned, both, strict=True):
                side[part] = rooms
        return planned

    def modified(
        self, indices: Indices, epoch: int, sources: list[Ids], targets: list[Ids], links: list[Ids]
    ) -> ModifiedPairs:
        """Return the pairs at `indices` as modified in an epoch, given their ids and links; `links` may be empty."""
        found = ModifiedPairs(list(sources), list(targets), list(links), {})
        hits, partners, rooms = self._drawn(indices, epoch)
        rows = np.flatnonzero((hits >= 0).any(axis=0) | (partners >= 0).any(axis=1)).tolist()
        groups = [[int(indices[row]), *partners[row][partners[row] >= 0].tolist()] for row in rows]
        changed: list[tuple[int, EditablePair]] = []
        for row, group, pair in zip(rows, groups, self._pairs(groups, with_links=bool(links)), strict=True):
            if pair is None:
                continue
            before = list(pair.texts)
            for number, name in enumerate(self._sections):
                if hits[number, row] >= 0:
                    self._modify(name, pair, epoch, int(indices[row]), int(hits[number, row]))
            if len(group) > 1 or pair.texts != before:
                changed.append((row, pair))
        new = [self._encoded(side, [pair.texts[side] for _, pair in changed]) for side in (0, 1)]
        for (row, pair), source, target in zip(changed, *new, strict=True):
            tag = self._tag(sources[row])
            source = np.concatenate([tag, source])
            fits = len(tag) < len(source) <= rooms[0][row] and 0 < len(target) <= rooms[1][row]
            if not fits or self._has_unknown((source, target)):  # such a target would teach the model to write `<unk>`
                continue
            found.sources[row], found.targets[row] = source, target
            found.texts[row] = pair.texts
            if links:
                found.links[row] = self._stored_links(pair, source, target)
        return found

    def _uniform(self, name: str, epoch: int, indices: Indices) -> NDArray[np.float64]:
        """Return a number in [0, 1) for each pair, a function of (seed, epoch, name, index): splitmix64's mixing."""
        mixed = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64(xxh3_64_intdigest(f"{self._seed} {epoch} {name}".encode()))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _hits(self, indices: Indices, epoch: int) -> NDArray[np.int64]:
        """Return for each modifier and pair, [modifiers, pairs], the number of the first word to change; -1: none.

        Each word of a pair is chosen with the modifier's probability, so the number of the first chosen word has a
        geometric distribution. A pair is drawn if it has that many words with one partner; whether the modifier may
        change them is determined when their text is read.
        """
        found = np.full((len(self._sections), len(indices)), -1, np.int64)
        for number, (name, section) in enumerate(self._sections.items()):
            uniform = self._uniform(name, epoch, indices)
            if name not in BY_WORD:
                found[number][uniform < section.probability] = 0
                continue
            with np.errstate(divide="ignore"):  # probability 1: the first word
                first = np.floor(np.log1p(-uniform) / np.log1p(-section.probability))
            rows = np.flatnonzero(first < self._table.source_lengths[indices])  # few pairs have more words than pieces
            links = self._table.links(indices[rows])
            for row, of_pair in zip(rows.tolist(), links, strict=True):
                found[number, row] = first[row] if first[row] < one_to_one_count(of_pair.tolist()) else -1
        if "noise" in self._sections:  # no need to change pairs that are then replaced
            found[1:, found[0] >= 0] = -1
        return found

    def _partners(self, indices: Indices, epoch: int) -> Indices:
        """Return the pairs that are merged to each one, [pairs, most]; -1: none."""
        merge = self._config.chosen.get("merge")
        if merge is None:
            return np.full((len(indices), 0), -1, np.int64)
        most = merge.max_pairs - 1
        partners = np.full((len(indices), most), -1, np.int64)
        rows = np.flatnonzero(self._uniform("merge", epoch, indices) < merge.probability)
        chosen, table = indices[rows], self._table
        # The pairs of a corpus are contiguous in the table.
        first, end = (np.searchsorted(table.corpora, table.corpora[chosen], side) for side in ("left", "right"))
        drawn = np.stack([self._uniform(f"merge {n}", epoch, chosen) for n in range(most)], axis=1)
        others = first[:, None] + np.floor(drawn * (end - first)[:, None]).astype(np.int64)
        span = merge.max_pairs - merge.min_pairs + 1
        count = merge.min_pairs - 1 + np.floor(self._uniform("merge pairs", epoch, chosen) * span)
        fits = np.arange(most) < count[:, None]
        for lengths in (table.source_lengths, table.target_lengths):
            together = lengths[chosen][:, None] + np.cumsum(lengths[others], axis=1)
            fits &= together <= min(merge.max_pieces, self._longest)
        partners[rows] = np.where(fits, others, -1)
        return partners

    def _drawn(self, indices: Indices, epoch: int) -> tuple[Indices, Indices, tuple[Ids, Ids]]:
        """Return `_hits`, `_partners`, and the maximum number of source and target pieces in an epoch, [pairs]."""
        hits, partners = self._hits(indices, epoch), self._partners(indices, epoch)
        both = (self._table.source_lengths, self._table.target_lengths)
        stored = [lengths[indices].astype(np.int64) for lengths in both]
        whole = [
            (one + np.where(partners >= 0, lengths[partners], 0).sum(axis=1)).astype(np.float64)
            for one, lengths in zip(stored, both, strict=True)
        ]
        rooms = [one.copy() for one in whole]
        recased = np.zeros(len(indices), bool)
        for number, (name, predicted) in enumerate(self._predicted.items()):
            rows = np.flatnonzero(hits[number] >= 0)
            if name in _EVERY_WORD:  # after upper case, title case changes nothing
                rows = rows[~recased[rows]]
                recased[rows] = True
            ids = self._table.pairs(indices[rows]) if name in _EVERY_WORD else ([], [])
            for side in (0, 1):  # added, because a product of factors would be far too large or too small
                rooms[side][rows] += (
                    whole[side][rows] * (predicted[side].ratio(ids[side]) - 1) + predicted[side].constant
                )
        source, target = (
            np.maximum(one, np.minimum(np.ceil(room), self._longest)).astype(np.int32)
            for one, room in zip(stored, rooms, strict=True)
        )
        return hits, partners, (source, target)

    def _sampled(self) -> list[EditablePair]:
        indices = np.unique(np.linspace(0, len(self._table) - 1, _SAMPLE).astype(np.int64)).tolist()
        return [pair for pair in self._pairs([[index] for index in indices], with_links=False) if pair is not None]

    def _predict(self, name: str) -> list[PredictedLength]:
        """Return the predictors of both sides' lengths after a modifier, which is tried on the sample."""
        modified = [pair.copy() for pair in self._sample]
        for number, pair in enumerate(modified):
            self._modify(name, pair, 0, number, 0)
        found = []
        for side, tokenizer in enumerate(self._tokenizers):
            before, after = (
                tokenizer.encode([pair.texts[side] for pair in pairs]) for pairs in (self._sample, modified)
            )
            by_piece = self._by_piece(name, side) if name in _EVERY_WORD else None
            if by_piece is None:
                sums = np.array([len(ids) for ids in before], np.float64)
            else:
                sums = _sums(by_piece, [np.array(ids, np.int32) for ids in before])
            found.append(_fitted(by_piece, sums, np.array([len(ids) for ids in after], np.float64)))
        return found

    def _by_piece(self, name: str, side: int) -> NDArray[np.float64]:
        """Return, for each id of a vocabulary, how many pieces its text has after a modifier; 1 if it has no text."""
        tokenizer = self._tokenizers[side]
        texts = [tokenizer.decode([index]).strip() for index in range(tokenizer.size)]
        pairs = [EditablePair(text, text) for text in texts]
        for pair in pairs:
            self._modify(name, pair, 0, 0, 0)
        new = tokenizer.encode([pair.texts[side] for pair in pairs])
        return np.array([max(1, len(ids)) for ids in new], np.float64)

    def _modify(self, name: str, pair: EditablePair, epoch: int, index: int, first: int) -> None:
        """Apply a modifier to a pair in place, as a function of (seed, epoch, index); `first`: number of a word."""
        rng = Random(xxh3_64_intdigest(f"{self._seed} {epoch} {name} {index}".encode()))
        MODIFIERS[name](pair, self._sections[name], rng, first, self._languages)

    def _tag(self, source: Ids) -> Ids:
        return source[:1] if len(source) and source[0] in self._tokenizers[0].tags.values() else source[:0]

    def _pairs(self, groups: Sequence[Sequence[int]], *, with_links: bool) -> list[EditablePair | None]:
        """Return each group of pairs as one pair; None for a group with an unknown piece, whose text is lost."""
        flat = [index for group in groups for index in group]
        ids = self._table.pairs(flat)
        linked = with_links or self._config.need_links
        links = self._table.links(flat) if linked else [np.zeros((0, 4), np.int32)] * len(flat)
        single = iter([self._pair(*of_pair) for of_pair in zip(*ids, links, strict=True)])
        found: list[EditablePair | None] = []
        for group in groups:
            pairs = [next(single) for _ in group]
            known = [pair for pair in pairs if pair is not None]
            found.append(None if len(known) < len(pairs) else merged(known) if len(known) > 1 else known[0])
        return found

    def _pair(self, source: Ids, target: Ids, links: Ids) -> EditablePair | None:
        sides = (source[len(self._tag(source)) :], target)
        if self._has_unknown(sides):
            return None
        texts = [tokenizer.decode(ids.tolist()) for ids, tokenizer in zip(sides, self._tokenizers, strict=True)]
        if not len(links):
            return EditablePair(texts[0], texts[1])
        spans: list[list[Span]] = []
        for text, ids, units, own in zip(texts, sides, self._units, (links[:, :2], links[:, 2:]), strict=True):
            ends = unit_ends(text)
            if not len(ends) or ends[-1] != units.totals([ids])[0]:
                return EditablePair(texts[0], texts[1])
            # The character of unit n is the first one that ends after it.
            first, last = np.searchsorted(ends, own[:, 0], "right"), np.searchsorted(ends, own[:, 1] - 1, "right")
            spans.append(list(zip(first.tolist(), (last + 1).tolist(), strict=True)))
        return EditablePair(texts[0], texts[1], list(zip(*spans, strict=True)))

    def _has_unknown(self, sides: tuple[Ids, Ids]) -> bool:
        return any((ids == tokenizer.unk).any() for ids, tokenizer in zip(sides, self._tokenizers, strict=True))

    def _encoded(self, side: int, texts: Sequence[str]) -> list[Ids]:
        return [np.array(ids, np.int32) for ids in self._tokenizers[side].encode(texts)] if texts else []

    def _stored_links(self, pair: EditablePair, source: Ids, target: Ids) -> Ids:
        """Return the links of a modified pair, [links, 4]; none if its pieces do not spell its text."""
        columns: list[Any] = []
        for side, (ids, units) in enumerate(zip((source, target), self._units, strict=True)):
            ends = np.concatenate([np.zeros(1, np.int64), unit_ends(pair.texts[side])])
            if ends[-1] != units.totals([ids])[0]:
                return np.zeros((0, 4), np.int32)
            spans = np.array([link[side] for link in pair.links], np.int64).reshape(-1, 2)
            columns.append(ends[spans])
        return np.concatenate(columns, axis=1).astype(np.int32)
