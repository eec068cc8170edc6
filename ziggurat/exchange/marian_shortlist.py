"""Lexical shortlists of Marian: as text (`lex.s2t.gz`) and as binary files (`lex.50.50.deen.s2t.bin`).

A text has a line for each pair of pieces: target, source, probability. A binary file starts with six numbers of 8
bytes: a magic number, a checksum, how many of the target's first pieces are allowed in every sentence, the maximum
number of pieces per source piece, and the lengths of the two arrays that follow. These are the offset of each source
piece's list, 8 bytes each, and the pieces themselves, 4 bytes each, in ascending order. All of it is little-endian.

Marian also pads each sentence's list to a multiple of eight with the first pieces of the vocabulary; this is not done
here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.shortlist import ShortlistTable, vocabulary_fingerprints
from ziggurat.data.subword import Tokenizer
from ziggurat.exchange.imported import ForeignModel, first_bytes, read_file
from ziggurat.exchange.marian_files import find_files
from ziggurat.system.compressed import byte_stream
from ziggurat.system.errors import DataError, printable
from ziggurat.translate.text_lines import read_lines

_MARK = 0xF11A48D5013417F5
_HEAD = struct.Struct("<6Q")
_MASK = (1 << 64) - 1
MAX_SHORTLIST_BYTES = 1 << 28
"""MAX_SHORTLIST_BYTES is the size of the largest shortlist that is read, 256 MiB; Firefox's have 2 to 6 MiB."""

FIRST = BEST = 100
"""FIRST and BEST are Marian's defaults for a text: the target's first pieces, and the best of each source piece."""


@dataclass(frozen=True)
class MarianShortlist:
    """A shortlist in Marian's ids.

    Attributes:
        first: the pieces 0 to `first` - 1 are allowed in every sentence.
        rows: the target ids of each source id.
    """

    first: int
    rows: Sequence[NDArray[np.int64]]

    def table(
        self, source: Tokenizer, target: Tokenizer, places: tuple[Sequence[int | None], Sequence[int | None]]
    ) -> ShortlistTable:
        """Return the shortlist in ziggurat's ids; `places` has Marian's id for each of ziggurat's, None if it lacks
        one.

        As in Marian, a source piece also allows the target piece with the same spelling if both sides share one
        vocabulary.
        """
        ours = {theirs: number for number, theirs in enumerate(places[1]) if theirs is not None}
        first = {target.eos, target.unk, *(ours[number] for number in range(self.first) if number in ours)}
        joint = source is target
        listed: list[list[int]] = []
        for number, theirs in enumerate(places[0]):
            row = self.rows[theirs].tolist() if theirs is not None and theirs < len(self.rows) else []
            allowed = dict.fromkeys(ours[one] for one in row if one in ours)
            listed.append([*allowed, *([number] if joint and number not in allowed and theirs is not None else [])])
        candidates = np.full((len(listed), max(1, *map(len, listed))), target.size, np.int32)
        for number, allowed_here in enumerate(listed):
            candidates[number, : len(allowed_here)] = allowed_here
        return ShortlistTable(candidates, np.array(sorted(first), np.int32), vocabulary_fingerprints(source, target))


def shortlist_beside(path: Path, model: ForeignModel) -> ShortlistTable | None:
    """Return the shortlist next to the Marian model `path`, in the ids of `model`, its imported form; None: none.

    Raises DataError: see read_marian_shortlist.
    """
    listed = find_files(path).shortlist
    if listed is None:
        return None
    sides = []
    for ids in (model.source_ids, model.target_ids):
        by_id = {number: piece for piece, number in ids.items()}
        sides.append([by_id.get(number, "") for number in range(max(by_id, default=-1) + 1)])
    found = read_marian_shortlist(listed, (sides[0], sides[1]))
    return found.table(model.source, model.target, model.places())


def is_binary_shortlist(path: Path) -> bool:
    """Return True for a file that starts like a binary shortlist."""
    return first_bytes(path, 8) == struct.pack("<Q", _MARK)


def read_marian_shortlist(path: Path, pieces: tuple[Sequence[str], Sequence[str]]) -> MarianShortlist:
    """Read a shortlist, binary or text, compressed or not.

    Args:
        path: the file.
        pieces: Marian's vocabularies of source and target, in the order of its ids; `<unk>` stands for all others.

    Raises DataError if the file is damaged, or for larger vocabularies.
    """
    if is_binary_shortlist(path):
        first, rows = _binary(path, read_file(path, MAX_SHORTLIST_BYTES))
        if len(rows) != len(pieces[0]):
            raise DataError(
                f"{path}: a shortlist for {len(rows):,} source pieces; the vocabulary has {len(pieces[0]):,}"
            )
        largest = max((int(row.max()) for row in rows if row.size), default=0)
    else:
        first, rows, largest = FIRST, _text(path, pieces), 0
    if largest >= len(pieces[1]):
        raise DataError(f"{path}: a shortlist with target piece {largest:,}; the vocabulary has {len(pieces[1]):,}")
    return MarianShortlist(first, rows)


def _binary(path: Path, content: bytes) -> tuple[int, list[NDArray[np.int64]]]:
    if len(content) < _HEAD.size:
        raise DataError(f"{path}: damaged: ends within its header")
    _, checksum, first, _, offsets_count, pieces_count = _HEAD.unpack_from(content)
    if _HEAD.size + 8 * offsets_count + 4 * pieces_count != len(content):
        raise DataError(f"{path}: damaged: its header names {offsets_count:,} offsets and {pieces_count:,} pieces")
    if _checksum(content) != checksum:
        raise DataError(f"{path}: damaged: its checksum does not match")
    offsets = np.frombuffer(content, "<u8", offsets_count, _HEAD.size)
    pieces = np.frombuffer(content, "<u4", pieces_count, _HEAD.size + 8 * offsets_count).astype(np.int64)
    if not offsets_count or offsets[0] or offsets[-1] != pieces_count or (offsets[1:] < offsets[:-1]).any():
        raise DataError(f"{path}: damaged: offsets that are not in order")
    return first, np.split(pieces, offsets[1:-1].astype(np.int64)) if offsets_count > 1 else []


def _checksum(content: bytes) -> int:
    """Return the checksum of everything after the checksum field.

    Trailing bytes short of a 64-bit word are ignored.
    """
    found = 0
    for (word,) in struct.iter_unpack("<Q", content[16 : 16 + (len(content) - 16) // 8 * 8]):
        found ^= (word + 0x9E3779B9 + (found << 6) + (found >> 2)) & _MASK
    return found


def _text(path: Path, pieces: tuple[Sequence[str], Sequence[str]]) -> list[NDArray[np.int64]]:
    ids = [{piece: number for number, piece in enumerate(side)} for side in pieces]
    unknown = [side.get("<unk>", 0) for side in ids]
    found: list[dict[int, float]] = [{} for _ in pieces[0]]
    for target, source, probability in _pairs(path):
        row, piece = found[ids[0].get(source, unknown[0])], ids[1].get(target, unknown[1])
        row[piece] = max(row.get(piece, 0.0), probability)
    # The most probable; ties go to the largest id, as in a queue of pairs.
    best = [sorted(row, key=lambda piece: (row[piece], piece), reverse=True)[:BEST] for row in found]
    return [np.array(sorted(row), np.int64) for row in best]


def _pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    with byte_stream(path) as stream:
        for number, line in enumerate(read_lines(stream, str(path)), start=1):
            words = line.split()
            try:
                target, source, probability = words[0], words[1], float(words[2])
            except (IndexError, ValueError):
                raise DataError(
                    f"{path}: line {number}: {printable(line, 60)!r} is not `target source probability`"
                ) from None
            if "NULL" not in (target, source):
                yield target, source, probability


def binary_shortlist(rows: Iterable[Iterable[int]], *, first: int, best: int) -> bytes:
    """Return the content of a binary shortlist with the target ids of each source id, in Marian's ids.

    `first` and `best` are Marian's `firstNum` and `bestNum`; the second only records how the rows were made.
    """
    listed = [sorted(set(row)) for row in rows]
    offsets = np.cumsum([0, *map(len, listed)]).astype("<u8")
    pieces = np.array([piece for row in listed for piece in row], "<u4")
    head = _HEAD.pack(_MARK, 0, first, best, len(offsets), len(pieces))
    content = head + offsets.tobytes() + pieces.tobytes()
    return content[:8] + struct.pack("<Q", _checksum(content)) + content[16:]
