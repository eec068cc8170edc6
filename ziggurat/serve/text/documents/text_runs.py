"""Runs of Word and PowerPoint: the spelling of uniformly formatted text, and the pieces of a paragraph made of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import regex

from ziggurat.serve.text.markup import Template, add
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece
from ziggurat.serve.text.tokens import spelt

DIVIDER = ""
"""DIVIDER is the name of an unmatched end, which divides a paragraph: a tab stays between the same two texts."""
_HYPHEN = regex.compile(r"(?<=\w)-(?=\w)")


@dataclass(eq=False)
class Run:
    """Spelling of a run: everything before its text, and everything after it."""

    before: str
    after: str


@dataclass
class RunForm:
    """Spelling of a paragraph of runs.

    Attributes:
        ground: the run of text outside all elements.
        hyphens: non-breaking hyphens, each as the end of a text, its tag and the start of the next; in the translation
            they replace the first hyphens inside words.
    """

    ground: Run
    hyphens: list[str] = field(default_factory=list)

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        runs = [self.ground]
        for piece in pieces:
            if isinstance(piece, str):
                template += [runs[-1].before, self._spelt(piece), runs[-1].after]
            elif isinstance(piece.raw, Run):
                if isinstance(piece, Open):
                    runs.append(piece.raw)
                else:
                    runs.pop()
            else:
                add(template, piece.raw)
        return template

    def _spelt(self, text: str) -> str:
        parts = _HYPHEN.split(spelt(text), maxsplit=len(self.hyphens)) if self.hyphens else [spelt(text)]
        between = [self.hyphens.pop(0) for _ in parts[1:]]
        return "".join(text + end for text, end in zip(parts, [*between, ""], strict=True))


def joined(pieces: Sequence[Piece], ground: Run) -> list[Piece]:
    """Return the pieces with adjacent runs joined, and text of the ground without a run."""
    together: list[Piece] = []
    for piece in pieces:
        raw = None if isinstance(piece, str) else piece.raw
        if raw is ground:
            continue
        before = together[-1] if together else None
        if isinstance(piece, Open) and isinstance(before, Close) and isinstance(raw, Run) and before.raw is raw:
            together.pop()  # the same run continues
        elif isinstance(piece, str) and isinstance(before, str):
            together[-1] = before + piece
        elif piece != "":
            together.append(piece)
    return _divided(together)


def _divided(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with dividers at line ends that end a text: not before lower case, and not after a comma."""
    after, following = [""] * len(pieces), ""
    for place in range(len(pieces) - 1, -1, -1):
        after[place], piece = following, pieces[place]
        if isinstance(piece, str):
            following = piece.strip()[:1] or following
    divided: list[Piece] = []
    before = ""
    for piece, begins in zip(pieces, after, strict=True):
        if isinstance(piece, str):
            before = piece.strip()[-1:] or before
        goes_on = bool(before) and bool(begins) and (begins.islower() or before in ",;(–-")
        is_end = isinstance(piece, EmptyElement) and piece.blank == "\n" and not goes_on
        divided.append(Close(piece.raw, DIVIDER) if isinstance(piece, EmptyElement) and is_end else piece)
    return divided
