"""Word alignments of corpora on their way into a store: read from files or made by an aligner, then traced to units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig
from ziggurat.data.alignment.aligner import Aligner
from ziggurat.data.alignment.links import Link, parse_links
from ziggurat.data.alignment.symmetry import Symmetrisation
from ziggurat.data.lines import LineStream
from ziggurat.data.readers import CorpusReader, PairBlock, ReadNotes
from ziggurat.data.subword import Tokenizer
from ziggurat.data.units import PieceUnits, Words, link_spans
from ziggurat.system.errors import DataError

TRAINING_PAIRS = 1_000_000
"""Pairs that an aligner is trained on at most, unless told otherwise; its memory grows with them."""

Sides = tuple[Words, Words]
"""Words of source and target lines."""


def words_of(config: DataConfig, tokenizers: tuple[Tokenizer, Tokenizer] | None) -> Sides:
    """Return the words of both sides that alignments count; `tokenizers` is None where they are to be trained."""
    source, target = tokenizers or (None, None)
    return Words(config.alignment.words, source), Words(config.alignment.words, target)


class AlignmentFiles(NamedTuple):
    """The files with the word alignments of a corpus, one for each of its parts."""

    paths: Sequence[Path]
    column: int | None = None
    """Where they are TSV files: the column that holds the alignments, from 0."""

    def blocks(self, reader: CorpusReader, words: Sides) -> Iterator[tuple[PairBlock, list[list[Link]]]]:
        """Yield the blocks of the corpus with their links; `reader.notes` counts the corrections of this pass.

        Raises DataError: unequal numbers of lines, or a faulty line, with its file and number.
        """
        notes = ReadNotes()
        for number, (part, path) in enumerate(zip(reader.files, self.paths, strict=True)):
            reader.part = number
            if reader.row_columns is not None and self.column is not None:  # rows of the corpus's own file
                for numbers, rows, *sides in reader.wide_rows(path, notes):
                    cells, places = [row[self.column] for row in rows], [f"{path}, line {n}" for n in numbers]
                    yield (
                        (sides[0], sides[1]),
                        [
                            parse_links(cell, words[0].count(source), words[1].count(target), place)
                            for cell, source, target, place in zip(cells, *sides, places, strict=True)
                        ],
                    )
                continue
            one, stream = replace(reader, files=[part]), LineStream(path)
            for block in (blocks := one.blocks()):
                first = stream.lines
                lines = _next_lines(stream, len(block[0]))
                if len(lines) < len(block[0]):
                    pairs = first + len(block[0]) + sum(len(rest[0]) for rest in blocks)
                    raise _unlike(path, stream.lines, one, pairs)
                if self.column is not None:
                    lines = [_cell(line, self.column, path, n) for n, line in enumerate(lines, first + 1)]
                yield block, _parsed(lines, block, words, path, first)
            pairs = stream.lines
            if stream.drain() != pairs:
                raise _unlike(path, stream.lines, one, pairs)
            notes.carriage_returns += one.notes.carriage_returns
            notes.byte_order_marks += one.notes.byte_order_marks
        reader.notes = notes


def _cell(line: str, column: int, path: Path, number: int) -> str:
    cells = line.split("\t")
    if column >= len(cells):
        raise DataError(f"{path}, line {number}: {len(cells)} columns, but column {column} (from 0) is the alignment")
    return cells[column]


def _next_lines(stream: LineStream, count: int) -> list[str]:
    """Return the next `count` lines, or fewer at the end of the file."""
    lines: list[str] = []
    while len(lines) < count and (available := stream.available()):
        lines += stream.take(min(available, count - len(lines)))
    return lines


def _parsed(lines: Sequence[str], block: PairBlock, words: Sides, path: Path, first: int) -> list[list[Link]]:
    return [
        parse_links(line, words[0].count(source), words[1].count(target), f"{path}, line {number}")
        for number, (line, source, target) in enumerate(zip(lines, *block, strict=True), start=first + 1)
    ]


def _unlike(path: Path, lines: int, reader: CorpusReader, pairs: int) -> DataError:
    return DataError(
        f"{path} has {lines:,} lines of word alignments, but {reader.described()} has {pairs:,} pairs; line i must be "
        "the alignment of pair i (an empty line for none)"
    )


class HmmLinks(NamedTuple):
    """Our own aligner."""

    aligner: Aligner
    how: Symmetrisation

    def links(self, block: PairBlock, words: Sides) -> list[list[Link]]:
        """Return the links of each pair; the order of blocks does not matter."""
        sources, targets = ([side.plain(line) for line in lines] for side, lines in zip(words, block, strict=True))
        return [sorted(links) for links in self.aligner.align(sources, targets, self.how)]


def train_aligner(
    readers: Sequence[tuple[CorpusReader, int]], words: Sides, most: int, how: Symmetrisation
) -> HmmLinks:
    """Return an aligner trained on at most `most` pairs of several corpora, evenly spread over them.

    Args:
        readers: each corpus with its number of pairs.
        words: of the two sides.
        most: see above.
        how: symmetrisation.

    Raises DataError when no pair can be trained on.
    """
    blocks = (block for reader, _ in readers for block in reader.blocks())
    pairs = spread_pairs(blocks, sum(count for _, count in readers), most)
    plain = ((words[0].plain(source), words[1].plain(target)) for source, target in pairs)
    return HmmLinks(Aligner.train(plain, words[0].rule), how)


def spread_pairs(blocks: Iterable[PairBlock], total: int, most: int) -> Iterator[tuple[str, str]]:
    """Yield at most `most` of the `total` pairs of `blocks`, evenly spread over them."""
    number = 0
    for block in blocks:
        for pair in zip(*block, strict=True):
            # Every pair where there are no more than `most`; else the first of each of `most` equal parts.
            if total <= most or (number * most) // total != ((number - 1) * most) // total:
                yield pair
            number += 1


class TracedLinks(NamedTuple):
    """The word alignment of one pair."""

    spans: list[int]
    """Four numbers a link; see ziggurat.data.units.link_spans."""
    units: tuple[int, int]
    """Units of the whole source and target."""


class LinkTracer:
    """Traces links from words to what the store keeps.

    Args:
        words: of both sides.
        tokenizers: of both sides.
    """

    def __init__(self, words: Sides, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
        self._words = words
        self._pieces = [PieceUnits(tokenizer) for tokenizer in tokenizers]

    def traced(
        self, links: list[list[Link]] | None, lines: PairBlock, kept: NDArray[np.bool_], texts: PairBlock
    ) -> list[TracedLinks]:
        """Return the links of the pairs that are left of a block.

        Args:
            links: of all pairs that were read; None: they have none.
            lines: both sides of all pairs as they stand in the file.
            kept: mask of the pairs that are left.
            texts: both sides of those, normalised.
        """
        if links is None:
            return [TracedLinks([], (0, 0))] * len(texts[0])
        found = []
        raw = (compress(side, kept) for side in lines)
        for of_pair, *sides in zip(compress(links, kept), *raw, *texts, strict=True):
            (source, total), (target, of_target) = (self._words[n].units(sides[n], sides[n + 2]) for n in (0, 1))
            spans = link_spans(of_pair, source, target) if source and target else []
            found.append(TracedLinks(spans, (total, of_target)))
        return found

    def stored(
        self, links: Sequence[TracedLinks], sides: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return numbers and lengths for TableWriter.

        A pair whose pieces, ids [pairs][pieces] of each side, do not spell its text has no links: it has characters
        that the vocabulary does not know, or that a SentencePiece model changes by itself.
        """
        spelt = np.ones(len(links), np.bool_)
        for side, units in enumerate(self._pieces):
            found = units.totals([np.array(ids, np.int32) for ids in sides[side]])
            spelt &= found == np.array([of_pair.units[side] for of_pair in links], np.int64)
        spans = [of_pair.spans if whole else [] for of_pair, whole in zip(links, spelt, strict=True)]
        lengths = np.fromiter(map(len, spans), np.int32, len(spans))
        return np.fromiter(chain.from_iterable(spans), np.int32, int(lengths.sum())), lengths
