"""Spelling of Markdown paragraphs: marks are preserved, and new text is kept from being read as a mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import regex

from ziggurat.serve.text.markup import Template, add
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece
from ziggurat.serve.text.tokens import Spellings

# What would start a block at the start of a paragraph's line, or a rule after an item's marker (`* **`); a backslash
# makes it text.
_BEGINS_BLOCK = regex.compile(
    r"\s*+(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+*](?:\s|$)|>|#{1,6}(?:\s|$)|[-=]+\s*$|(?:[-*_]\s*){2,}$|`{3}|~{3}))"
)
_ENDS_LINE = regex.compile(r"[\r\n][ \t>]*+$")
_BEGINS_LINE = regex.compile(r"[\r\n][ \t>]*+(?P<marks>[*_~]*+)$")
_ONLY_MARKS = regex.compile(r"\A\s*+(?=[-*_][-*_\s]*+\Z)")
_UNESCAPED = r"(?<!\\)(?:\\\\)*+"
_LONE_BACKSLASH = regex.compile(rf"{_UNESCAPED}\\(?=\n|\Z)")
ENDS_LINK = regex.compile(r"(?<!\\)\](?=[(\[:])")
_BEGINS_IMAGE = regex.compile(r"(?<!\\)!\Z")


_EMPHASIS = frozenset(("*", "_", "**", "__", "~~", "***"))
_OF_WORD = regex.compile(r"[^\s\p{P}\p{S}]")  # as Markdown parsers classify characters
_SIGN = regex.compile(r"[\p{P}\p{S}]")


def _is_empty(pieces: Sequence[Piece], number: int) -> bool:
    """Return whether emphasis without text starts at a piece: `**` would be read as a different mark."""
    first, second = pieces[max(number, 0)], pieces[number + 1] if number + 1 < len(pieces) else None
    return isinstance(first, Open) and isinstance(second, Close) and first.name in _EMPHASIS


def _without_empty_marks(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces without empty emphasis; the texts around it become one, which is examined as a whole."""
    kept: list[Piece] = []
    for number, piece in enumerate(pieces):
        if _is_empty(pieces, number) or _is_empty(pieces, number - 1):
            continue
        if isinstance(piece, str) and kept and isinstance(kept[-1], str) and isinstance(pieces[number - 1], Close):
            kept[-1] += piece
        else:
            kept.append(piece)
    return kept


def _without_empty_lines(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with only those line ends that stand between texts: an empty line ends a paragraph."""
    kept: list[Piece] = []
    last: int | None = None  # index of the last line end
    has_text = False  # whether text follows it
    for piece in pieces:
        if isinstance(piece, EmptyElement) and isinstance(piece.raw, str) and _ENDS_LINE.search(piece.raw):
            if not has_text and piece.raw[0] != "\\":  # a line with a backslash is not empty
                continue
            before = next((n for n in range(len(kept) - 1, -1, -1) if not isinstance(kept[n], Open | Close)), None)
            if before is not None and isinstance(text := kept[before], str):
                kept[before] = text.rstrip("\r\n")
            last, has_text = len(kept), False
        elif isinstance(piece, str) and last is not None and not has_text:
            piece = piece.lstrip("\r\n")
            has_text = bool(piece.strip())
        elif not isinstance(piece, Open | Close):
            has_text = has_text or not isinstance(piece, str) or bool(piece.strip())
        kept.append(piece)
    if last is not None and not has_text:
        del kept[last]
    return kept


def _edge(piece: Piece | None, *, last: bool) -> str:
    """Return the first character of a piece as it is written, or the last; empty if that is not known."""
    raw = piece if isinstance(piece, str) else "" if piece is None else piece.raw
    return (raw[-1:] if last else raw[:1]) if isinstance(raw, str) else ""


def _with_room(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with a space between a word and emphasis that parsers would not recognise next to it.

    Scripts without spaces leave none between a word and `**“menu”**` or `_menu_`, whose marks would be text there.
    """
    kept: list[Piece] = []
    for number, piece in enumerate(pieces):
        before = pieces[number - 1] if number else None
        following = pieces[number + 1] if number + 1 < len(pieces) else None
        if isinstance(piece, Open) and piece.name in _EMPHASIS and _needs_room(piece, before, following, last=True):
            kept.append(" ")
        kept.append(piece)
        if isinstance(piece, Close) and piece.name in _EMPHASIS and _needs_room(piece, following, before, last=False):
            kept.append(" ")
    return kept


def _needs_room(mark: Open | Close, outside: Piece | None, inside: Piece | None, *, last: bool) -> bool:
    is_beside = _OF_WORD.match(_edge(outside, last=last)) is not None
    return is_beside and (mark.name[0] == "_" or _SIGN.match(_edge(inside, last=not last)) is not None)


_IN_NAME = str.maketrans("`<>[]|", "'‹›()/")  # in roles and links of wikis, which have no escapes


class Shortcut(NamedTuple):
    """The end of a link whose text is also its label (`[text]`); if the text changes, the label must be added."""

    raw: str
    label: str
    source: str  # the text with its marks, as returned by `flat`


def flat(template: Template) -> str:
    """Return a template as one line, without image descriptions and the marks of quoted blocks."""
    return regex.sub(r"[\s>]+", " ", "".join(part for part in template if isinstance(part, str)))


@dataclass(eq=False)
class MarkdownForm:
    """Spelling of Markdown paragraphs: marks are preserved, and new text is kept from being read as a mark.

    Attributes:
        spellings: spellings of the source's texts.
        escaped: characters that get a backslash.
        begins: whether it is at the start of a paragraph.
        line: a line's end and the marks before the next line.
        respelt: characters that the source writes as escapes or entities.
        is_plain: whether brackets in the source's text do not belong to a link.
        is_whole: whether a paragraph is a single text that no unpaired tag divides.
    """

    spellings: Spellings = field(default_factory=Spellings)
    escaped: str = ""
    begins: bool = False
    line: str = "\n"
    respelt: Mapping[str, str] = field(default_factory=dict)
    is_plain: bool = True
    is_whole: bool = False

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        if self.is_whole:
            pieces = _without_empty_lines(pieces)
        pieces = _without_empty_marks(pieces)
        if any(isinstance(piece, str) and piece not in self.spellings for piece in pieces):
            pieces = _with_room(pieces)
        begin, in_link, in_name = 0, False, False  # start of a link's text
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                following = pieces[number + 1] if number + 1 < len(pieces) else None
                before_link = isinstance(following, Open) and following.name == "["
                said = self.spellings.next(piece) if in_name else None
                if in_name:
                    template.append(piece.translate(_IN_NAME) if said is None else said)
                else:
                    template.append(self._text(piece, template, in_link=in_link, before_link=before_link))
                continue
            if isinstance(piece, Open | Close) and piece.name in ("{{", "[["):
                in_name = isinstance(piece, Open)
            if isinstance(piece, Open | Close) and piece.name == "[":
                in_link = isinstance(piece, Open)
            raw = piece.raw
            if isinstance(raw, Shortcut):
                raw = raw.raw if flat(template[begin:]) == raw.source else f"][{raw.label}]"
            add(template, raw)
            if isinstance(piece, Open) and piece.name == "[":
                begin = len(template)
        return template

    def _line_before(self, before: Template) -> str:
        """Return everything before a text, back to the end of a line or to the last piece that is not a mark."""
        line = ""
        for part in reversed(before):
            line = f"{part if isinstance(part, str) else '-'}{line}"
            if line.lstrip(" \t>*_~"):
                return line
        return f"\n{line}" if self.begins else line

    def _text(self, text: str, before: Template, *, in_link: bool, before_link: bool) -> str:
        known = self.spellings.next(text)
        if known is not None:
            return known
        if self.respelt:
            text = "".join(self.respelt.get(letter, letter) for letter in text)
        if self.is_plain:
            text = ENDS_LINK.sub(r"\\\g<0>", text)
        if escaped := self.escaped + ("[]" if in_link else ""):
            text = regex.sub(rf"{_UNESCAPED}(?=[{regex.escape(escaped)}])", r"\g<0>\\", text)
        text = _LONE_BACKSLASH.sub(r"\g<0>\\", text)  # otherwise the next character would be escaped
        if before_link:
            text = _BEGINS_IMAGE.sub(r"\\!", text)
        last = self._line_before(before)
        if last.endswith("]") and text[:1] in ("(", "[", ":"):  # after a note or citation, which is not a link
            text = f"\\{text}"
        at = _BEGINS_LINE.search(last)
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if number == 0 and (at is None or at["marks"]):
                lines[0] = _ONLY_MARKS.sub(r"\g<0>\\", line) if at else line  # or marks and text are a rule
            elif found := _BEGINS_BLOCK.match(line):
                rest = line[found.end() :]
                fence = len(rest) - len(rest.lstrip(rest[:1])) if rest[:1] in ("`", "~") else 1
                lines[number] = "".join([found[0], *(f"\\{mark}" for mark in rest[:fence]), rest[fence:]])
        return self.line.join(lines)
