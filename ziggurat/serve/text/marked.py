"""Marked text: the text of a paragraph and the marks in it (tags, runs, breaks), as a tree of character spans.

A reader of a format gives a paragraph as a list of pieces: text, and openings, closings and points that carry whatever
the reader needs to write them again. What cannot be nested stays where it is and divides the paragraph.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

MAX_DEPTH = 100
"""Deepest nesting of marks in a paragraph; deeper ones divide it."""


@dataclass(frozen=True)
class Open:
    """Beginning of an element.

    Attributes:
        raw: what the reader needs to write it.
        name: closed by a Close of this name.
    """

    raw: Any
    name: str = ""


@dataclass(frozen=True)
class Close:
    """End of the innermost open element, which must have this name."""

    raw: Any
    name: str = ""


@dataclass(frozen=True)
class Point:
    """A mark without text of its own: an image, a break, a footnote's number.

    Attributes:
        raw: what the reader needs to write it.
        blank: the text that it stands for, a blank where it divides words as a line's end does; else empty.
    """

    raw: Any
    blank: str = ""


@dataclass(frozen=True)
class Copied:
    """An element that must come through untouched, such as code; `text` is what a reader sees of it."""

    raw: Any
    text: str


Piece: TypeAlias = str | Open | Close | Point | Copied


@dataclass(eq=False)
class Mark:
    """An element, point or copied element in a text.

    Attributes:
        piece: its Open, Point or Copied.
        start, end: its characters, `end` exclusive; equal for an element without text and for most points.
        close: the Close of an element.
        children: of an element, in order.
    """

    piece: Open | Point | Copied
    start: int
    end: int
    close: Close | None = None
    children: list[Mark] = field(default_factory=list)


@dataclass
class Marked:
    """A paragraph: its text, and its marks in order."""

    text: str
    marks: list[Mark] = field(default_factory=list)

    def all_marks(self) -> Iterable[Mark]:
        """Yield every mark, parents before their children."""
        waiting = list(reversed(self.marks))
        while waiting:
            mark = waiting.pop()
            yield mark
            waiting += reversed(mark.children)


def marked(pieces: Sequence[Piece]) -> list[Marked | Open | Close]:
    """Return the paragraphs of a list of pieces, and between them the openings and closings that do not pair up.

    A pair around such a one, or nested deeper than MAX_DEPTH, is itself among them: broken markup keeps its order, and
    the text between two of its tags is a paragraph of its own.
    """
    partners = _partners(pieces)
    paragraphs: list[Marked | Open | Close] = []
    text: list[str] = []
    length = 0
    marks: list[Mark] = []
    open_marks: list[Mark] = []

    def end_paragraph() -> None:
        nonlocal text, length, marks
        if text or marks:
            paragraphs.append(Marked("".join(text), marks))
        text, length, marks = [], 0, []

    for place, piece in enumerate(pieces):
        siblings = open_marks[-1].children if open_marks else marks
        if isinstance(piece, str):
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
            shown = piece.blank if isinstance(piece, Point) else piece.text
            siblings.append(Mark(piece, length, length + len(shown)))
            text.append(shown)
            length += len(shown)
    end_paragraph()
    return paragraphs


def _partners(pieces: Sequence[Piece]) -> set[int]:
    """Return the places of openings and closings that pair up, with only pairs between them."""
    stack: list[int] = []
    pairs: list[tuple[int, int]] = []
    names: dict[str, int] = {}  # open elements by name: a closing of another name must not search the whole stack
    single: list[int] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, Open):
            stack.append(place)
            names[piece.name] = names.get(piece.name, 0) + 1
        elif isinstance(piece, Close):
            if not names.get(piece.name):
                single.append(place)
                continue
            while True:
                opened = stack.pop()
                name = _name(pieces[opened])
                names[name] -= 1
                if name == piece.name:
                    break
                single.append(opened)
            if len(stack) < MAX_DEPTH:
                pairs.append((opened, place))
            else:
                single += [opened, place]
    single = sorted(single + stack)
    # A pair that holds a single one is no pair; pairs are ordered by their ends, so those inside come first, and a pair
    # broken up is itself inside of those around it, which hold the same single one.
    partners: set[int] = set()
    for opened, closed in pairs:
        inside = bisect.bisect_right(single, opened)
        if inside == len(single) or single[inside] > closed:
            partners |= {opened, closed}
    return partners


def _name(piece: Piece) -> str:
    return piece.name if isinstance(piece, Open) else ""


def plain_pieces(pieces: Iterable[Piece]) -> str:
    """Return the text of pieces without their marks."""
    return "".join(
        piece if isinstance(piece, str) else piece.blank if isinstance(piece, Point) else getattr(piece, "text", "")
        for piece in pieces
    )
