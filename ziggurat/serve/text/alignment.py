"""Alignment of characters from alignment of pieces: which part of the source became which part of the target.

A Translation aligns pieces, by weights of the source pieces for each target piece; placing markup and placeholders
takes character positions. The pieces are located in the original text, whatever the tokenizer: SentencePiece (spaces as
U+2581, characters as bytes) or subword-nmt (`@@`). If they cannot be located, the translation has no links, and the
code that needs them falls back.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

import regex

from ziggurat.data.subword import Tokenizer
from ziggurat.serve.text.sentences import Link, SentenceTranslation
from ziggurat.translate.results import Alignment, Translation

_BLANK = "\u2581"
_CONTINUES = "@@"
_BYTE = regex.compile(r"<0x([0-9A-Fa-f]{2})>")
_WEAK = 0.1
"""_WEAK is the least weight at which a source piece that is no target piece's maximum is linked to its best target
piece."""

_UNKNOWN = ("<unk>", "\u2047")  # pieces whose text is unknown


def control_pieces(tokenizer: Tokenizer) -> frozenset[str]:
    """Return a tokenizer's pieces that no text contains: tags, padding, begin- and end-of-sentence."""
    ids = [tokenizer.pad, tokenizer.bos, tokenizer.eos, *tokenizer.tags.values()]
    return frozenset(tokenizer.pieces(ids))


def rendered(translation: Translation, control: Collection[str] = ("<pad>", "<s>", "</s>")) -> SentenceTranslation:
    """Return the best hypothesis with its text and, if it has an alignment, links between characters.

    `control` are the source pieces that stand for no text (control_pieces of the source tokenizer).
    """
    best = translation.hypotheses[0]
    if best.alignment is None or not best.text:
        return SentenceTranslation(best.text, None)
    pieces = best.alignment.source_tokens
    source = piece_spans(translation.source, ["" if piece in control else piece for piece in pieces])
    target = piece_spans(best.text, best.tokens)
    if source is None or target is None or len(best.alignment.hard) != len(target):
        return SentenceTranslation(best.text, None)
    links = [
        Link(*source[at], *target[place])
        for at, place in _pairs(best.alignment, [start < end for start, end in source])
        if source[at][0] < source[at][1] and target[place][0] < target[place][1]
    ]
    return SentenceTranslation(best.text, links)


def _pairs(alignment: Alignment, is_text: Sequence[bool]) -> list[tuple[int, int]]:
    """Return pairs of a source and a target piece: first the hard alignment, then the pieces that it leaves out."""
    pairs = [(at, place) for place, at in enumerate(alignment.hard)]
    seen = set(alignment.hard)
    for at, text in enumerate(is_text):
        if text and at not in seen and alignment.soft:
            place = max(range(len(alignment.soft)), key=lambda p: alignment.soft[p][at])
            if alignment.soft[place][at] >= _WEAK:
                pairs.append((at, place))
    return pairs


def piece_spans(text: str, pieces: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the characters of `text` that each piece stands for, or None if the pieces do not match the text.

    A piece without letters (a space) has an empty span. Spaces, letter case and Unicode's compatibility forms may
    differ, since tokenizers change them. An unknown piece stands for the text between its neighbours.
    """
    # (1) The text's letters, each with the character it comes from, since normalisation expands some. Characters are
    # decomposed one by one; together, their marks would also be reordered.
    letters: list[str] = []
    owners: list[int] = []
    for place, character in enumerate(text):
        for letter in _folded(character):
            letters.append(letter)
            owners.append(place)
    whole = "".join(letters)
    # (2) Each piece's letters are at the current position; after an unknown piece, at the next position that has them.
    spans: list[tuple[int, int]] = []
    at, open_from = 0, -1  # open_from: index of the first unknown piece whose end is not known yet
    for surface in _surfaces(pieces):
        if surface is None:
            open_from = len(spans) if open_from < 0 else open_from
            spans.append((at, at))
            continue
        if surface and open_from >= 0:
            found = whole.find(surface, at + 1)
            if found < 0:
                return None
            spans[open_from] = (at, found)  # several unknown pieces in a row: the first takes all
            at, open_from = found, -1
        if not whole.startswith(surface, at):
            return None
        spans.append((at, at + len(surface)))
        at += len(surface)
    if open_from >= 0:
        spans[open_from] = (at, len(whole))
        at = len(whole)
    if at != len(whole):
        return None
    # (3) From letters to characters of the text.
    return [(owners[a], owners[b - 1] + 1) if a < b else (0, 0) for a, b in spans]


def _surfaces(pieces: Sequence[str]) -> list[str | None]:
    """Return the folded letters of each piece; None for an unknown one."""
    surfaces: list[str | None] = []
    # subword-nmt marks the ends of pieces; if SentencePiece's space symbol occurs, `@@` is text.
    joined_by_marks = not any(_BLANK in piece for piece in pieces)
    place = 0
    while place < len(pieces):
        piece = pieces[place]
        if piece in _UNKNOWN:
            surfaces.append(None)
        elif _BYTE.fullmatch(piece):
            end = place
            while end < len(pieces) and _BYTE.fullmatch(pieces[end]):
                end += 1
            surfaces += _of_bytes(pieces[place:end])
            place = end
            continue
        else:
            if joined_by_marks and piece.endswith(_CONTINUES):
                piece = piece.removesuffix(_CONTINUES)
            surfaces.append(_folded(piece.replace(_BLANK, " ")))
        place += 1
    return surfaces


def _of_bytes(pieces: Sequence[str]) -> list[str | None]:
    """Return the letters of single-byte pieces: each character belongs to its first byte, the others have none."""
    content = bytes(int(piece[3:5], 16) for piece in pieces)
    surfaces: list[str | None] = [""] * len(content)
    place = 0
    for letter in content.decode("utf-8", "replace"):
        surfaces[place] = None if letter == "\ufffd" else _folded(letter)
        place += len(letter.encode()) if letter != "\ufffd" else 1
        if place >= len(content):
            break
    return surfaces


def _folded(text: str) -> str:
    """Return `text` without spaces, letter case and compatibility forms."""
    apart = "".join(unicodedata.normalize("NFKD", character) for character in text)
    return "".join(unicodedata.normalize("NFKD", letter) for letter in "".join(apart.split()).casefold())
