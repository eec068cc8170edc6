"""Word alignments on pieces: where words and pieces lie in a text, so that links between words become links of pieces.

Both are measured in units: characters other than blanks for SentencePiece, pieces for text that is already segmented.
The store keeps each link as two spans of units, which say nothing of pieces: they hold for every segmentation of the
text, those that training samples included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.alignment.links import Link
from ziggurat.data.alignment.words import WordRule, split_words, word_spans
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.data.subword import Tokenizer, escape_blank_marks
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import DataError

_BLANK_MARK = "\u2581"  # SentencePiece's
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CONTINUES = "@@"
_BLANKS = str.maketrans("", "", " \t\r\n")


_ESCAPED = [code for code in (0x2581, 0xFDD0) if len(escape_blank_marks([chr(code)])[0]) == 2]
"""Characters that are escaped by another one, and so count twice (ziggurat.data.subword)."""


class Words:
    """The words of one side's lines, as alignments count them.

    Args:
        rule: how text is split.
        tokenizer: of the side. Segmented text has the words that its pieces spell, whatever the rule. None: a
            SentencePiece model that is still to be trained.
    """

    def __init__(self, rule: WordRule, tokenizer: Tokenizer | None = None) -> None:
        self._rule = rule
        self._segmented = isinstance(tokenizer, VocabularyTokenizer)
        self._form: UnicodeForm = "none" if tokenizer is None else tokenizer.unicode

    def count(self, line: str) -> int:
        """Return the number of words of a line as it stands in the file."""
        return len(self._ends(line)) if self._segmented else len(split_words(line, self._rule))

    def plain(self, line: str) -> str:
        """Return the text that an aligner is to read: without segmentation."""
        return VocabularyTokenizer.joined(normalise([line], "none")[0]) if self._segmented else line

    @property
    def rule(self) -> WordRule:
        """The rule by which an aligner finds the same words in `plain`."""
        return "blanks" if self._segmented else self._rule

    @staticmethod
    def _ends(line: str) -> list[int]:
        """Return the number of pieces up to the end of each word of a segmented line."""
        pieces = normalise([line], "none")[0].split(" ")
        ends = [n for n, piece in enumerate(pieces, start=1) if not piece.endswith(_CONTINUES)]
        last = [len(pieces)] if pieces[-1].endswith(_CONTINUES) else []
        return [*ends, *last] if pieces != [""] else []

    def units(self, line: str, text: str) -> tuple[list[tuple[int, int]], int]:
        """Return the units of each word of a line, (first, end), and the number of units of the line.

        Args:
            line: as it stands in the file.
            text: the same, normalised.

        Where words and blanks, each normalised alone, differ from the line normalised as a whole, there are no words.
        """
        if self._segmented:
            ends = self._ends(line)
            return list(zip([0, *ends], ends, strict=False)), ends[-1] if ends else 0
        total, bare = len(_spelt(text)), line.translate(_BLANKS)
        same = bare == text.replace(" ", "") and len(bare) == total  # normalisation changed nothing but blanks
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
    """Return the characters that SentencePiece's pieces spell, without blanks."""
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
    """Number of the pair."""
    target: NDArray[np.int64]
    """Number of the target piece."""
    source: NDArray[np.int64]
    """Number of the source piece; a tag counts."""

    def shares(self) -> NDArray[np.float32]:
        """Return for each link 1 / number of links of its target piece."""
        same = np.ones(len(self.row), np.bool_)
        same[1:] = (self.row[1:] != self.row[:-1]) | (self.target[1:] != self.target[:-1])
        counts = np.bincount(np.cumsum(same) - 1)
        return np.repeat(1.0 / counts, counts).astype(np.float32)


class PieceUnits:
    """Units that each piece of a vocabulary stands for.

    A piece that only marks a blank belongs to the character after it, a byte that continues a character to that
    character. Tags and control symbols stand for nothing.
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
        # Of pieces without units: 0 they belong to the unit after them, -1 to that before, _NONE to none.
        self._shifts = np.array([_NONE if n in nothing else shift for n, shift in enumerate(shifts)], np.int64)

    def totals(self, sentences: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Return the number of units of each sentence; below 0 where an unknown piece hides it."""
        return np.array([int(self._sizes[ids].sum()) for ids in sentences], np.int64)

    def find(
        self, sentences: Sequence[NDArray[np.int32]], rows: NDArray[np.int64], spans: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first piece and end of those that share a unit with each span.

        Args:
            sentences: ids of a batch, without unknown pieces where there are spans.
            rows: [n] sentence of each span.
            spans: [n, 2] first unit and end.
        """
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        ids = np.concatenate([np.zeros(0, np.int64), *sentences])
        sizes, shifts = self._sizes[ids], self._shifts[ids]
        sizes = np.maximum(sizes, 0)
        # All sentences on one line, with a unit between any two, so that no piece of one is found for another.
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


_UNKNOWN = -(1 << 40)
"""Size of the unknown piece: below 0 by more than any sentence has units."""
_NONE = 1


def _of_piece(piece: str) -> tuple[int, int]:
    """Return size and shift of a SentencePiece piece."""
    if found := _BYTE.fullmatch(piece):
        return (0, -1) if 0x80 <= int(found[1], 16) < 0xC0 else (1, 0)
    return len(piece.replace(_BLANK_MARK, "")), 0


def link_spans(
    links: Sequence[Link], source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the units of each link's source and target word, four numbers a link, as a store keeps them."""
    return [unit for i, j in links for unit in (*source[i], *target[j])]


class LinkMapper:
    """Makes the links that a store keeps into links of pieces.

    Args:
        source: tokenizer of the source side.
        target: tokenizer of the target side.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        self.units = (PieceUnits(source), PieceUnits(target))

    def traceable(
        self,
        links: Sequence[NDArray[np.int32]],
        stored: tuple[Sequence[NDArray[np.int32]], Sequence[NDArray[np.int32]]],
        sampled: tuple[Sequence[NDArray[np.int32]], Sequence[NDArray[np.int32]]],
    ) -> list[NDArray[np.int32]]:
        """Return `links` without those of pairs whose `sampled` pieces do not spell what the `stored` ones do."""
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

        Args:
            links: of each pair, [links, 4]: units of the source word, then of the target word.
            sources: ids of each pair, tag included.
            targets: ids of each pair.

        Raises DataError: a link reaches beyond the text of its pair.
        """
        counts = np.fromiter(map(len, links), np.int64, len(links))
        rows = np.repeat(np.arange(len(links)), counts)
        spans = np.concatenate([np.zeros((0, 4), np.int64), *links])
        found = []
        for side, (units, sentences) in enumerate(zip(self.units, (sources, targets), strict=True)):
            of_side = spans[:, 2 * side : 2 * side + 2]
            if len(rows) and (of_side[:, 1] > units.totals(sentences)[rows]).any():
                raise DataError(
                    "the store's word alignments do not belong to its text; run `ziggurat prepare --force` again"
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
