"""Inline markup of Markdown, found by pattern: the parser tells no places of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import regex

from ziggurat.serve.text.marked import Close, Copied, Marked, Open, Piece, Point
from ziggurat.serve.text.markup import HTML, shown_text
from ziggurat.serve.text.template import Slot, Spellings, Template, add, filled
from ziggurat.serve.text.tokens import html_tokens

_TARGET = r"""\(\s*+(?:<[^<>\n]{0,500}>|(?:[^()\s<]++|\([^()\s]{0,100}\)){0,50}+)
  (?:\s++(?:"[^"]{0,300}"|'[^']{0,300}'))?\s*+\)"""
_INLINE = regex.compile(
    rf"""(?P<code>(?<!`)(?P<ticks>`{{1,8}})(?!`)[^`].{{0,500}}?(?<!`)(?P=ticks)(?!`))
      | (?P<comment><!--.{{0,1000}}?-->)
      | (?P<auto><(?:https?|ftp|mailto):[^<>\s]{{1,500}}>)
      | (?P<kept><(?P<name>(?i:{"|".join(sorted(HTML.copied))})|[A-Za-z]{{1,10}}\b
            (?=[^<>]{{0,300}}(?:\btranslate=["']?no\b|\bnotranslate\b)))\b[^<>]{{0,300}}>.{{0,500}}?</(?P=name)\s*+>)
      | (?P<tag></?[A-Za-z][^<>]{{0,500}}>)
      | (?P<math>\$\$[^$\n]{{1,200}}\$\$)
      | (?P<note>\[\^[^\]\s]{{1,80}}\])
      | (?P<image>!\[(?P<alt>[^\[\]]{{0,300}})(?P<source>\](?:{_TARGET}|\[[^\[\]]{{0,200}}\])))
      | (?P<link>\[)
      | (?P<end>\](?:{_TARGET}|\[[^\[\]]{{1,200}}\]))
      | (?P<short>\](?:\[\])?)
      | (?P<hard>(?:\x20{{2,}}|\\)\n)
      | (?P<line>\n)
      | (?P<escape>\\[!-/:-@\[-`{{-~])
      | (?P<strong>\*\*|__|~~)
      | (?P<emphasis>(?<![*\w])\*(?=[^\s*])|(?<=[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])|(?<=[^\s_])_(?!\w))""",
    flags=regex.VERBOSE | regex.DOTALL,
)
# What would begin a block where a line of a paragraph begins; a backslash makes it text.
_BEGINS_BLOCK = regex.compile(
    r"\s*+(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+*](?:\s|$)|>|#{1,6}(?:\s|$)|[-=]+\s*$|(?:[-*_]\s*){3,}$|`{3}|~{3}))"
)
_LONGEST_LABEL = 999  # CommonMark's
_ENDS_LINE = regex.compile(r"[\r\n][ \t>]*+$")


class Inline:
    """Reader of text with inline markup.

    Attributes:
        attributes: whether descriptions of images are translated.
        labels: of the links that the file defines, folded.
    """

    def __init__(self, *, attributes: bool) -> None:
        self.attributes = attributes
        self.labels: set[str] = set()

    def template(self, text: str, breaks: Sequence[str] = (), *, escaped: str = "", begins: bool = False) -> Template:
        """Return the template of text with inline markup.

        Args:
            text: lines with `\\n` between them.
            breaks: what is in the file in place of each `\\n`: its line's end and the marks before the next.
            escaped: characters that mean something where this text is.
            begins: whether it is the beginning of a paragraph.
        """
        ends = iter(breaks)
        pieces: list[Piece] = []
        links: list[tuple[int, int]] = []  # places of brackets that are open, in `pieces` and in `text`
        spelt: list[str] = []  # line ends in text, as they are in the file
        opened: list[str] = []
        at = 0
        for found in _INLINE.finditer(text):
            kind = str(found.lastgroup)
            raw = regex.sub("\n", lambda _: next(ends), found[0])
            _add_text(pieces, text[at : found.start()])
            at = found.end()
            if kind == "link":
                links.append((len(pieces), at))
                pieces.append("[")
            elif kind in ("end", "short"):
                place, begin = links.pop() if links else (-1, 0)
                label = " ".join(text[begin : min(found.start(), begin + _LONGEST_LABEL)].split())
                if place < 0 or (kind == "short" and folded(label) not in self.labels):
                    pieces.append(raw)
                    continue
                inside: Template = []
                for piece in pieces[place + 1 :] if kind == "short" else ():
                    add(inside, piece if isinstance(piece, str) else piece.raw)
                pieces.append(Close(_Shortcut(raw, label, _flat(inside)) if kind == "short" else raw, "["))
                pieces[place] = Open("[", "[")
                links.clear()  # a link has no other around it
            elif kind == "line":
                pieces.append("\n")
                spelt.append(raw)
            elif kind == "image":
                pieces.append(self._image(found, raw, escaped))
            elif kind in ("strong", "emphasis"):
                pieces.append(Close(raw, raw) if raw in opened else Open(raw, raw))
                (opened.remove if raw in opened else opened.append)(raw)
            else:
                pieces.append(_mark(kind, raw))
        _add_text(pieces, text[at:])
        line = breaks[0] if breaks else "\n"
        return filled(pieces, _Form(_spellings(pieces, spelt), escaped, begins, line))

    def _image(self, found: regex.Match[str], raw: str, escaped: str) -> Point:
        """Return an image, whose description is translated."""
        if not (self.attributes and found["alt"].strip()) or "\n" in found[0]:
            return Point(raw)
        form = _Form(escaped=f"[]{escaped}")
        form.spellings.add(found["alt"], found["alt"])
        return Point(["![", Slot(Marked(found["alt"]), form), found["source"]])


def _mark(kind: str, raw: str) -> Piece:
    """Return the piece of a sign or tag."""
    if kind in ("code", "math"):
        return Copied(raw, raw.strip("`$").strip() if "\n" not in raw and "\r" not in raw else "")
    if kind == "escape":
        return Copied(raw, raw[1:])
    if kind == "hard":
        return Point(raw, "\n")
    if kind == "kept":
        return Copied(raw, shown_text(list(html_tokens(raw))))
    tag = regex.match(r"</?([A-Za-z][^\s/>]*)", raw) if kind == "tag" else None
    if tag is None or tag[1].lower() not in HTML.inline - HTML.void:
        return Point(raw)
    return Close(raw, tag[1].lower()) if raw.startswith("</") else Open(raw, tag[1].lower())


def _add_text(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(text)


def _spellings(pieces: Sequence[Piece], ends: Sequence[str]) -> Spellings:
    """Return for each text between marks how it is in the file; `ends` are the line ends in these texts."""
    waiting = iter(ends)
    spellings = Spellings()
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            text = "".join(piece for piece in group if isinstance(piece, str))
            spellings.add(text, regex.sub("\n", lambda _: next(waiting), text))
    return spellings


def folded(label: str) -> str:
    """Return a link's label as the parser compares it."""
    return " ".join(label.split()).lower().upper()


class _Shortcut(NamedTuple):
    """The end of a link whose text is also its label (`[text]`): another text needs the label beside it."""

    raw: str
    label: str
    source: str  # the text with its marks, as `_flat` gives it


def _flat(template: Template) -> str:
    """Return a template in one line, without descriptions of images and the marks of quotations."""
    return regex.sub(r"[\s>]+", " ", "".join(part for part in template if isinstance(part, str)))


@dataclass(eq=False)
class _Form:
    """Paragraphs of Markdown: marks are written as they were; a text that is new is kept from being read as a mark.

    Attributes:
        spellings: of the source's texts.
        escaped: characters that get a backslash.
        begins: whether it stands at the beginning of a paragraph.
        line: a line's end and the marks before the next.
    """

    spellings: Spellings = field(default_factory=Spellings)
    escaped: str = ""
    begins: bool = False
    line: str = "\n"

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        begin = 0  # of a link's text
        for piece in pieces:
            if isinstance(piece, str):
                template.append(self._text(piece, template))
                continue
            raw = piece.raw
            if isinstance(raw, _Shortcut):
                raw = raw.raw if _flat(template[begin:]) == raw.source else f"][{raw.label}]"
            add(template, raw)
            if isinstance(piece, Open) and piece.name == "[":
                begin = len(template)
        return template

    def _text(self, text: str, before: Template) -> str:
        known = self.spellings.next(text)
        if known is not None:
            return known
        if self.escaped:
            text = regex.sub(rf"(?<!\\)([{regex.escape(self.escaped)}])", r"\\\1", text)
        last = before[-1] if before else "\n" if self.begins else ""
        lines = text.split("\n")
        for number, line in enumerate(lines):
            begins = number > 0 or (isinstance(last, str) and _ENDS_LINE.search(last))
            if begins and (found := _BEGINS_BLOCK.match(line)):
                lines[number] = f"{found[0]}\\{line[found.end() :]}"
        return self.line.join(lines)
