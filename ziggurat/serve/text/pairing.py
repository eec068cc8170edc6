"""Pairing of openings and closings in a list of pieces, which turns it into paragraphs with marks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import regex

from ziggurat.serve.text.projection import Close, EmptyElement, Mark, Open, Piece, SpannedText

MAX_DEPTH = 100
"""MAX_DEPTH is the deepest nesting of marks in a paragraph; deeper marks divide it."""


def marked(pieces: Sequence[Piece]) -> list[SpannedText | Open | Close]:
    """Return the paragraphs of a list of pieces and, between them, the openings and closings without a partner.

    A pair around one of the latter, or nested deeper than MAX_DEPTH, is also returned unpaired: broken markup keeps its
    order, and the text between two of its tags is a separate paragraph.
    """
    partners = _partners(pieces)
    following = _following(pieces, partners)
    paragraphs: list[SpannedText | Open | Close] = []
    text: list[str] = []
    length = 0
    marks: list[Mark] = []
    open_marks: list[Mark] = []

    def end_paragraph() -> None:
        nonlocal text, length, marks
        if text or marks:
            paragraphs.append(SpannedText("".join(text), marks))
        text, length, marks = [], 0, []

    for place, piece in enumerate(pieces):
        siblings = open_marks[-1].children if open_marks else marks
        if isinstance(piece, str):
            if piece:
                text.append(piece)
            length += len(piece)
        elif isinstance(piece, Open | Close):
            if place not in partners:
                end_paragraph()
                paragraphs.append(piece)
            elif isinstance(piece, Open):
                open_marks.append(Mark(piece, length, length))
                siblings.append(open_marks[-1])
            else:
                mark = open_marks.pop()
                mark.end, mark.close = length, piece
        else:
            shown = piece.blank if isinstance(piece, EmptyElement) else piece.text
            if isinstance(piece, EmptyElement) and piece.is_seen and _BESIDE.match("".join(text[-1:])[-1:]):
                shown = " " if following[place].isalnum() else ""
            siblings.append(Mark(piece, length, length + len(shown)))
            if shown:
                text.append(shown)
            length += len(shown)
    end_paragraph()
    return paragraphs


_BESIDE = regex.compile(r"[^\s(\[{«“‘„¿¡/-]")  # a character that a space may follow


def _following(pieces: Sequence[Piece], partners: set[int]) -> list[str]:
    """Return, for each piece, the first character of the text after it, empty at the end of its paragraph."""
    found, first = [""] * len(pieces), ""
    for place in range(len(pieces) - 1, -1, -1):
        found[place] = first
        piece = pieces[place]
        if isinstance(piece, Open | Close):
            first = first if place in partners else ""
        else:
            text = piece if isinstance(piece, str) else piece.blank if isinstance(piece, EmptyElement) else piece.text
            first = text[:1] or first
    return found


def _partners(pieces: Sequence[Piece]) -> set[int]:
    """Return the indices of openings and closings that form pairs, with nothing but pairs between them."""
    stack: list[tuple[int, str]] = []
    pairs: list[tuple[int, int]] = []
    names: dict[str, int] = {}  # open elements by name: a closing with another name must not search the whole stack
    single: list[int] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, Open):
            stack.append((place, piece.name))
            names[piece.name] = names.get(piece.name, 0) + 1
        elif isinstance(piece, Close):
            if not names.get(piece.name):
                single.append(place)
                continue
            while True:
                opened, name = stack.pop()
                names[name] -= 1
                if name == piece.name:
                    break
                single.append(opened)
            if len(stack) < MAX_DEPTH:
                pairs.append((opened, place))
            else:
                single += [opened, place]
    single = sorted(single + [place for place, _ in stack])
    # A pair around an unpaired tag does not count. Pairs are ordered by their ends, so inner ones come first, and a
    # pair that was discarded lies inside outer ones, which contain the same unpaired tag.
    partners: set[int] = set()
    for opened, closed in pairs:
        inside = bisect_right(single, opened)
        if inside == len(single) or single[inside] > closed:
            partners |= {opened, closed}
    return partners
