"""Templates: a document with its paragraphs taken out, into which their translations are written.

A template is a list of strings, which are written as they are, and slots. What a mark carries (`raw`) may be a template
itself: a tag with an attribute that is translated, a footnote in the middle of a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias

from ziggurat.serve.text.marked import Marked, Piece, marked
from ziggurat.serve.text.paragraphs import paragraphs
from ziggurat.serve.text.sentences import Options
from ziggurat.serve.text.tokens import Spelling
from ziggurat.serve.text.work import Work


class Form(Protocol):
    """The way in which a format writes the pieces of a translated paragraph."""

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots of nested paragraphs."""


@dataclass(eq=False)
class Slot:
    """The place of a paragraph."""

    text: Marked
    form: Form


Template: TypeAlias = "list[str | Slot]"
Raw: TypeAlias = "str | Template"


class Spellings:
    """The way in which a source writes the texts between marks, in order: the same text may be written in two ways."""

    __slots__ = ("_known", "_taken")

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}
        self._taken: dict[str, int] = {}

    def add(self, text: str, raw: str) -> None:
        """Take the next text and how it is written."""
        self._known.setdefault(text, []).append(raw)

    def next(self, text: str) -> str | None:
        """Return how the source writes the next text that is like this; None for a new one."""
        known = self._known.get(text)
        if known is None:
            return None
        place = self._taken.get(text, 0)
        self._taken[text] = min(place + 1, len(known) - 1)
        return known[place]


@dataclass
class MarkupForm:
    """Paragraphs of HTML or XML: text is escaped, marks are written as they were.

    Attributes:
        raw: the source of the paragraph, whose entities are used again.
        spellings: the sources of the texts in it, by text.
        xml: whether every `&` must be an entity.
        quote: around an attribute's value; empty for text.
    """

    raw: str
    spellings: Spellings = field(default_factory=Spellings)
    xml: bool = False
    quote: str = ""

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.raw, xml=self.xml)

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        for piece in pieces:
            if isinstance(piece, str):
                said = self.spellings.next(piece)
                if said is None:
                    said = self._spelling.of(piece)
                    if self.quote:
                        said = said.replace(self.quote, "&quot;" if self.quote == '"' else "&#39;")
                template.append(said)
            else:
                add(template, piece.raw)
        return template


class PlainForm:
    """Paragraphs of text without escapes: text and marks are written as they are."""

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        for piece in pieces:
            add(template, piece if isinstance(piece, str) else piece.raw)
        return template


def add(template: Template, raw: Raw) -> None:
    """Append what a mark carries to a template."""
    if isinstance(raw, str):
        template.append(raw)
    else:
        template += raw


def filled(pieces: Sequence[Piece], form: Form) -> Template:
    """Return the template of a run of pieces: slots for its paragraphs, and what divides them."""
    template: Template = []
    for part in marked(pieces):
        if isinstance(part, Marked):
            template.append(Slot(part, form))
        else:
            add(template, part.raw)
    return template


def slots(template: Template) -> Iterator[Slot]:
    """Yield the slots of a template and of those in its marks, in the order of the document."""
    waiting: list[str | Slot] = list(reversed(template))
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            continue
        yield part
        nested: Template = []
        for mark in part.text.all_marks():
            for raw in (mark.piece.raw, mark.close.raw if mark.close else ""):
                if not isinstance(raw, str) and isinstance(raw, list):
                    nested += raw
        waiting += reversed(nested)


def written(template: Template, options: Options, notices: Counter[str]) -> Work[str]:
    """Return the work of translating the paragraphs of a template; its result is the document."""
    places = list(slots(template))
    done = yield from paragraphs([slot.text for slot in places], options, notices)
    pieces = {id(slot): said for slot, said in zip(places, done, strict=True)}
    out: list[str] = []
    waiting: list[str | Slot] = list(reversed(template))
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            out.append(part)
        else:
            waiting += reversed(part.form.write(pieces[id(part)]))
    return "".join(out)
