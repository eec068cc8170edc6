"""Word alignments of corpora for a store: read from files or made by an aligner, then converted to units.

A unit is a non-space character for SentencePiece, or a piece for text that is already segmented. The store keeps each
link as two spans of units, which are valid for every segmentation of the text, including sampled ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig, Symmetrisation
from ziggurat.data.aligner import (
    Aligner,
    Link,
    WordRule,
    parse_links,
    split_words,
    word_spans,
)
from ziggurat.data.lines import LineStream, UnicodeForm, normalise
from ziggurat.data.readers import CorpusReader, PairBlock, ReadNotes
from ziggurat.data.subword import Tokenizer, escape_blank_marks
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import DataError, Problem, Remedy

_BLANK_MARK = "\u2581"  # SentencePiece's
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANKS = str.maketrans("", "", " \t\r\n")


_ESCAPED = [code for code in (0x2581, 0xFDD0) if len(escape_blank_marks([chr(code)])[0]) == 2]
"""Characters that another character escapes, and which therefore count twice (ziggurat.data.subword)."""


class WordCounter:
    """The words of one side's lines, as alignments count them, by the rule of the text.

    In segmented text the words are those that its pieces spell, whatever the rule. There is no tokenizer while a
    SentencePiece model has yet to be trained.
    """

    def __init__(self, rule: WordRule, tokenizer: Tokenizer | None = None) -> None:
        self._rule = rule
        self._segmented = tokenizer if isinstance(tokenizer, VocabularyTokenizer) else None
        self._form: UnicodeForm = "none" if tokenizer is None else tokenizer.unicode

    def count(self, line: str) -> int:
        """Return the number of words of an unchanged line of the file."""
        return len(self._ends(line, self._segmented)) if self._segmented else len(split_words(line, self._rule))

    def plain(self, line: str) -> str:
        """Return the text for an aligner, without segmentation."""
        return self._segmented.joined(normalise([line], "none")[0]) if self._segmented else line

    @property
    def rule(self) -> WordRule:
        """The rule by which an aligner finds the same words in `plain`."""
        return "blanks" if self._segmented else self._rule

    @staticmethod
    def _ends(line: str, segmented: VocabularyTokenizer) -> list[int]:
        """Return the number of pieces up to the end of each word of a segmented line."""
        pieces = normalise([line], "none")[0].split(" ")
        return [n + 1 for n in range(len(pieces)) if segmented.ends_word(pieces, n)] if pieces != [""] else []

    def units(self, line: str, text: str) -> tuple[list[tuple[int, int]], int]:
        """Return the units of each word of a line, (first, end), and the number of units of the line.

        `text` is the normalised line. If separately normalised words and spaces differ from the line normalised as a
        whole, there are no words.
        """
        if self._segmented:
            ends = self._ends(line, self._segmented)
            return list(zip([0, *ends], ends, strict=False)), ends[-1] if ends else 0
        total, bare = len(_spelt(text)), line.translate(_BLANKS)
        same = bare == text.replace(" ", "") and len(bare) == total  # normalisation changed nothing but spaces
        found, at, units = [], 0, 0
        for first, end in word_spans(line, self._rule):
            units += self._size(line[at:first], same)
            begin, at = units, end
            units += self._size(line[first:end], same)
            found.append((begin, units))
        return (found, total) if units + self._size(line[at:], same) == total else ([], total)

    def _size(self, part: str, same: bool) -> int:
        """Return the units of a part of a line; `same`: normalisation does not change it."""
        bare = "" if part == " " else part.translate(_BLANKS)
        return len(bare) if same or not bare else len(_spelt(normalise([bare], self._form)[0]))


def _spelt(text: str) -> str:
    """Return the characters that SentencePiece's pieces spell, without spaces."""
    return escape_blank_marks([text])[0].replace(" ", "")


def unit_ends(text: str) -> NDArray[np.int64]:
    """Return the number of units up to the end of each character of a text for SentencePiece."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = (codes != ord(" ")).astype(np.int64)
    for escaped in _ESCAPED:
        sizes += codes == escaped
    return np.cumsum(sizes)


class PieceLinks(NamedTuple):
    """Links between pieces of a batch, [n] each: sorted by pair, target and source, each once."""

    row: NDArray[np.int64]
    target: NDArray[np.int64]
    source: NDArray[np.int64]
    """Number of the source piece; a tag counts."""

    def shares(self) -> NDArray[np.float32]:
        """Return for each link 1 / number of links of its target piece."""
        same = np.ones(len(self.row), np.bool_)
        same[1:] = (self.row[1:] != self.row[:-1]) | (self.target[1:] != self.target[:-1])
        counts = np.bincount(np.cumsum(same) - 1)
        return np.repeat(1.0 / counts, counts).astype(np.float32)


class PieceUnits:
    """Units of each piece of a vocabulary.

    A piece that only marks a space belongs to the character after it, and a continuation byte to its character. Tags
    and control symbols have no units.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces(range(tokenizer.size))
        nothing = {tokenizer.pad, tokenizer.bos, tokenizer.eos, *tokenizer.tags.values()}
        if isinstance(tokenizer, VocabularyTokenizer):
            sizes, shifts = [1] * len(pieces), [0] * len(pieces)
        else:
            sizes, shifts = map(list, zip(*map(_of_piece, pieces), strict=True))
            sizes[tokenizer.unk] = _UNKNOWN
        self._sizes = np.array([0 if n in nothing else size for n, size in enumerate(sizes)], np.int64)
        # For pieces without units: 0 if they belong to the next unit, -1 for the previous unit, _NONE for none.
        self._shifts = np.array([_NONE if n in nothing else shift for n, shift in enumerate(shifts)], np.int64)

    def totals(self, sentences: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Return the number of units of each sentence; below 0 if an unknown piece hides it."""
        return np.array([int(self._sizes[ids].sum()) for ids in sentences], np.int64)

    def find(
        self, sentences: Sequence[NDArray[np.int32]], rows: NDArray[np.int64], spans: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first piece that shares a unit with each span, in sentence `rows` [n], and the end of the last.

        `spans` are [n, 2], first unit and end; sentences that have any are without unknown pieces.
        """
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        ids = np.concatenate([np.zeros(0, np.int64), *sentences])
        sizes, shifts = self._sizes[ids], self._shifts[ids]
        sizes = np.maximum(sizes, 0)
        # All sentences in one sequence, with a unit between any two, so that no piece of one is found for another.
        sentence = np.repeat(np.arange(len(sentences)), lengths)
        before = np.cumsum(sizes) - sizes
        starts = before + sentence
        first_units = starts[np.minimum(np.cumsum(lengths) - lengths, max(0, len(ids) - 1))] if len(ids) else starts
        first = np.where(sizes > 0, starts, starts + np.where(shifts == -1, -1, 0))
        last = np.where(sizes > 0, starts + sizes - 1, np.where(shifts == _NONE, starts - 1, first))
        wanted = spans + first_units[rows, None]
        begin = np.searchsorted(last, wanted[:, 0], "left")
        end = np.searchsorted(first, wanted[:, 1] - 1, "right")
        offsets = (np.cumsum(lengths) - lengths)[rows]
        return begin - offsets, np.maximum(begin, end) - offsets


_UNKNOWN = -(1 << 40)  # size of the unknown piece: below 0 by more than any sentence has units
_NONE = 1


def _of_piece(piece: str) -> tuple[int, int]:
    if found := _BYTE.fullmatch(piece):
        return (0, -1) if 0x80 <= int(found[1], 16) < 0xC0 else (1, 0)
    return len(piece.replace(_BLANK_MARK, "")), 0


def link_spans(
    links: Sequence[Link], source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the units of each link's source and target word, four numbers a link, as a store keeps them."""
    return [unit for i, j in links for unit in (*source[i], *target[j])]


class LinkMapper:
    """Converter from the links in a store to links of pieces."""

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self.units = (PieceUnits(source), PieceUnits(target))

    def traceable(
        self,
        links: Sequence[NDArray[np.int32]],
        stored: tuple[Sequence[NDArray[np.int32]], Sequence[NDArray[np.int32]]],
        sampled: tuple[Sequence[NDArray[np.int32]], Sequence[NDArray[np.int32]]],
    ) -> list[NDArray[np.int32]]:
        """Return `links` without those of pairs whose `sampled` pieces spell other text than the `stored` ones."""
        same = np.ones(len(links), np.bool_)
        for units, before, after in zip(self.units, stored, sampled, strict=True):
            same &= units.totals(before) == units.totals(after)
        return [of_pair if whole else of_pair[:0] for of_pair, whole in zip(links, same, strict=True)]

    def piece_links(
        self,
        links: Sequence[NDArray[np.int32]],
        sources: Sequence[NDArray[np.int32]],
        targets: Sequence[NDArray[np.int32]],
    ) -> PieceLinks:
        """Return the links of a batch: every piece of a word to every piece of the words it is linked to.

        `links` are those of each pair, [links, 4]: units of the source word, then of the target word. Sources have
        their tags. Raises DataError: a link reaches beyond the text of its pair.
        """
        counts = np.fromiter(map(len, links), np.int64, len(links))
        rows = np.repeat(np.arange(len(links)), counts)
        spans = np.concatenate([np.zeros((0, 4), np.int64), *links])
        found = []
        for side, (units, sentences) in enumerate(zip(self.units, (sources, targets), strict=True)):
            of_side = spans[:, 2 * side : 2 * side + 2]
            if len(rows) and (of_side[:, 1] > units.totals(sentences)[rows]).any():
                raise DataError(
                    Problem("", "the store's word alignments do not belong to its text", Remedy.PREPARE_ANEW)
                )
            found.append(units.find(sentences, rows, of_side))
        (s_begin, s_end), (t_begin, t_end) = found
        widths = s_end - s_begin
        cells = widths * (t_end - t_begin)
        link = np.repeat(np.arange(len(rows)), cells)
        within = np.arange(int(cells.sum())) - np.repeat(np.cumsum(cells) - cells, cells)
        row, source, target = rows[link], s_begin[link] + within % widths[link], t_begin[link] + within // widths[link]
        longest = [max(map(len, side), default=0) + 1 for side in (sources, targets)]
        keys = np.unique((row * longest[1] + target) * longest[0] + source)
        return PieceLinks(keys // (longest[0] * longest[1]), keys // longest[0] % longest[1], keys % longest[0])


TRAINING_PAIRS = 1_000_000
"""TRAINING_PAIRS is the default limit on the pairs that an aligner is trained on; its memory grows with them."""

Sides = tuple[WordCounter, WordCounter]


def words_of(config: DataConfig, tokenizers: tuple[Tokenizer, Tokenizer] | None) -> Sides:
    """Return the words of both sides that alignments count; `tokenizers` is None if they have yet to be trained."""
    source, target = tokenizers or (None, None)
    return WordCounter(config.alignment.words, source), WordCounter(config.alignment.words, target)


class AlignmentFiles(NamedTuple):
    """The files with the word alignments of a corpus, one for each of its parts."""

    paths: Sequence[Path]
    column: int | None = None
    """Column that holds the alignments, from 0, in TSV files."""

    def blocks(self, reader: CorpusReader, words: Sides) -> Iterator[tuple[PairBlock, list[list[Link]]]]:
        """Yield the blocks of the corpus with their links; `reader.notes` counts the corrections of this pass.

        Raises DataError: unequal numbers of lines, or a faulty line, with its file and number.
        """
        notes = ReadNotes()
        for number, (part, path) in enumerate(zip(reader.files, self.paths, strict=True)):
            reader.part = number
            if reader.row_columns is not None and self.column is not None:  # rows of the corpus's own file
                for numbers, rows, *sides in reader.wide_rows(path, notes):
                    block = sides[0], sides[1]
                    yield block, _parsed([row[self.column] for row in rows], block, words, path, numbers)
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
                yield block, _parsed(lines, block, words, path, range(first + 1, first + 1 + len(lines)))
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
    lines: list[str] = []
    while len(lines) < count and (available := stream.available()):
        lines += stream.take(min(available, count - len(lines)))
    return lines


def _parsed(
    cells: Sequence[str], block: PairBlock, words: Sides, path: Path, numbers: Sequence[int]
) -> list[list[Link]]:
    return [
        parse_links(cell, words[0].count(source), words[1].count(target), f"{path}, line {number}")
        for cell, source, target, number in zip(cells, *block, numbers, strict=True)
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

    Each reader comes with its number of pairs. Raises DataError when no pair can be trained on.
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
            # Every pair if there are no more than `most`; otherwise the first of each of `most` equal parts.
            if total <= most or (number * most) // total != ((number - 1) * most) // total:
                yield pair
            number += 1


class TracedLinks(NamedTuple):
    """The word alignment of one pair."""

    spans: list[int]
    """Four numbers a link; see ziggurat.data.word_links.link_spans."""
    units: tuple[int, int]
    """Units of the whole source and target."""


class LinkTracer:
    """Converter of links from words to the units of the store."""

    def __init__(self, words: Sides, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
        self._words = words
        self._pieces = [PieceUnits(tokenizer) for tokenizer in tokenizers]

    def traced(
        self, links: list[list[Link]] | None, lines: PairBlock, kept: NDArray[np.bool_], texts: PairBlock
    ) -> list[TracedLinks]:
        """Return the links of the remaining pairs of a block.

        `links` are those of all pairs that were read, or None, and `lines` both sides of these as in the file. `kept`
        is the mask of the remaining pairs, and `texts` both sides of those, normalised.
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
        that the vocabulary lacks, or that a SentencePiece model itself changes.
        """
        spelt = np.ones(len(links), np.bool_)
        for side, units in enumerate(self._pieces):
            found = units.totals([np.array(ids, np.int32) for ids in sides[side]])
            spelt &= found == np.array([of_pair.units[side] for of_pair in links], np.int64)
        spans = [of_pair.spans if whole else [] for of_pair, whole in zip(links, spelt, strict=True)]
        lengths = np.fromiter(map(len, spans), np.int32, len(spans))
        return np.fromiter(chain.from_iterable(spans), np.int32, int(lengths.sum())), lengths
