"""Inline markup of Markdown, found by patterns, because the parser gives no positions for it.

Formulas, templates (`{% tag %}`, `{{name}}`), emoji short names, citations and attributes are preserved. Escapes and
entities are decoded, and encoded again in the translation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import groupby
from typing import NamedTuple

import regex

from ziggurat.serve.text.markup import HTML, MarkupSlot, Raw, Template, add, filled, shown_text
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText, Verbatim
from ziggurat.serve.text.sentences import SPACED
from ziggurat.serve.text.tokens import Spellings, html_tokens

_TARGET = r"""\(\s*+(?:<(?:[^<>\\\n]|\\.){0,500}+>
    |(?:\{\{[^{}\n]{0,200}+\}\}
      |\{%[^%\n]{0,200}+%\}
      |[^()\s<\\{]++
      |\{
      |\\\S|\((?:[^()\s\\]++|\\\S|\((?:[^()\s\\]|\\\S){0,100}+\)){0,20}+\)){0,50}+)
  (?:\s++(?:"(?:[^"\\]|\\.){0,300}+"|'(?:[^'\\]|\\.){0,300}+'|\((?:[^()\\]|\\.){0,300}+\)))?\s*+\)"""
_ENTITY = r"&(?:\#\d{1,7}|\#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
# Words in a formula are text between two dollars or escaped brackets, unless there is a sign of TeX.
_FORMULA = r"(?:(?=[^$]{0,300}?[\\^_={}])|(?![^$]{0,300}?[A-Za-z]{2,}\s[A-Za-z]{2,}))"
_INLINE = regex.compile(
    rf"""(?P<code>(?<!`)(?P<ticks>`{{1,8}})(?!`)[^`].{{0,500}}?(?<!`)(?P=ticks)(?!`))
      | (?P<comment><!--.{{0,1000}}?-->)
      | (?P<auto><(?:https?|ftp|mailto):[^<>\s]{{1,500}}>)
      | (?P<kept><(?P<name>(?i:{"|".join(sorted(HTML.copied | HTML.nested))})|[A-Za-z]{{1,10}}\b
            (?=[^<>]{{0,300}}(?:\btranslate=["']?no\b|\bnotranslate\b)))\b[^<>]{{0,300}}>.{{0,500}}?</(?P=name)\s*+>)
      | (?P<tag></?[A-Za-z](?>\{{[^{{}}\n]{{0,300}}+\}}|=\s?"[^"]{{0,500}}+"|=\s?'[^']{{0,500}}+'|[^<>]){{0,500}}+>)
      | (?P<math>\$\$[^$]{{1,1000}}\$\$|\$`[^`\n]{{1,300}}`\$
          |(?<![\w$\\])\${_FORMULA}(?=[^\s$])(?:[^$\\]|\\.){{1,300}}+(?<![\s])\$(?![\w$])
          |\\\\\(.{{1,500}}?\\\\\)|\\\\\[.{{1,1000}}?\\\\\]
          |\\\((?![^\n]{{0,300}}?[A-Za-z]{{2,}}\s[A-Za-z]{{3,}}[^\n]{{0,300}}?\\\)).{{1,500}}?\\\)
          |\\\[(?=[^\]]{{0,500}}?(?:\\[A-Za-z]|[\^_={{}}])).{{1,1000}}?\\\]
          |\\begin\{{(?P<env>[A-Za-z*]{{1,20}})\}}.{{0,2000}}?\\end\{{(?P=env)\}})
      | (?P<template>\{{%.{{0,500}}?%\}}|\{{/\*.{{0,1000}}?\*/\}}
          |\{{:?\x20?(?:[\#.][\w\-]|[\w\-]{{1,40}}=)[^{{}}\n]{{0,200}}\}})
      | (?P<shown>\\[A-Za-z]{{2,30}}+\*?(?:\[[^\[\]\n]{{0,100}}\])?(?:\{{[^{{}}\s]{{0,100}}\}}){{0,3}}+(?![\w{{])
          |\{{\{{.{{1,500}}?\}}\}}
          |(?<![\w:]):[a-z+\-][a-z0-9_+\-]{{0,40}}:(?![\w:])
          |\[-?@\w[^\[\]\n]{{0,200}}\])
      | (?P<entity>{_ENTITY})
      | (?P<note>\[\^[^\]\s]{{1,80}}\])
      | (?P<image>!\[(?P<alt>(?:[^\[\]\\]|\\[\[\]]?+){{0,300}})(?P<source>\](?:{_TARGET}|\[[^\[\]]{{0,200}}\])))
      | (?P<link>\[)
      | (?P<end>\](?:{_TARGET}|\[[^\[\]]{{1,200}}\]))
      | (?P<short>\](?:\[\])?)
      | (?P<hard>(?:(?<!\x20)\x20{{2,}}+|\\)\n)
      | (?P<line>\n)
      | (?P<escape>\\[!-/:-@\[-`{{-~])
      | (?P<strong>(?<!\*)\*{{3}}(?=[^\s*][^*]{{0,300}}(?<=\S)\*{{3}}(?!\*))
          |(?<=(?<!\*)\*{{3}}[^\s*][^*]{{0,300}})(?<=\S)\*{{3}}(?!\*)
          |\*\*
          |~~
          |(?<![^\W_])__(?=\S)
          |(?<=\S)__(?![^\W_]))
      | (?P<emphasis>(?<![*\w])\*(?=[^\s*])|(?<=[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])|(?<=[^\s_])_(?!\w))""",
    flags=regex.VERBOSE | regex.DOTALL,
)
# What would start a block at the start of a paragraph's line, or a rule after an item's marker (`* **`); a backslash
# makes it text.
_BEGINS_BLOCK = regex.compile(
    r"\s*+(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+*](?:\s|$)|>|#{1,6}(?:\s|$)|[-=]+\s*$|(?:[-*_]\s*){2,}$|`{3}|~{3}))"
)
_BRACES = r"\{[^{}]{0,300}+\}"
# `{a + b}` in MDX, with nested braces.
_EXPRESSION = rf"(?P<shown>\{{(?:[^{{}}]|{_BRACES}|\{{(?:[^{{}}]|{_BRACES}){{0,300}}+\}}){{0,500}}+\}})"
_WITH_EXPRESSIONS = regex.compile(f"{_INLINE.pattern}|{_EXPRESSION}", flags=_INLINE.flags)
_TITLE = regex.compile(r"(?P<before>.*[\s\n])(?P<quote>[\"'])(?P<title>[^\n]+)(?P=quote)(?P<after>\s*\))")
_LONGEST_LABEL = 999  # CommonMark's
_ENDS_LINE = regex.compile(r"[\r\n][ \t>]*+$")
_BEGINS_LINE = regex.compile(r"[\r\n][ \t>]*+(?P<marks>[*_~]*+)$")
_ONLY_MARKS = regex.compile(r"\A\s*+(?=[-*_][-*_\s]*+\Z)")
_UNESCAPED = r"(?<!\\)(?:\\\\)*+"
_LONE_BACKSLASH = regex.compile(rf"{_UNESCAPED}\\(?=\n|\Z)")
_ENDS_LINK = regex.compile(r"(?<!\\)\](?=[(\[:])")
_BEGINS_IMAGE = regex.compile(r"(?<!\\)!\Z")


class Inline:
    """Reader of text with inline markup; `labels` are the file's link labels, folded."""

    def __init__(self, *, is_mdx: bool = False) -> None:
        self.labels: set[str] = set()
        self.is_mdx = is_mdx

    def template(self, text: str, breaks: Sequence[str] = (), *, escaped: str = "", begins: bool = False) -> Template:
        """Return the template of text with inline markup.

        Args:
            text: lines separated by `\\n`.
            breaks: the file's text for each `\\n`: the line's end and the marks before the next line.
            escaped: characters that have a meaning where this text stands.
            begins: whether it is at the start of a paragraph.
        """
        reader = _Run(self, text, breaks, escaped)
        reader.read()
        line = breaks[0] if breaks else "\n"
        bare = "".join(piece for piece in reader.pieces if isinstance(piece, str))
        escaped += _marks_not_in(bare)
        spellings = _spellings(reader.pieces, reader.sources)
        form = _Form(spellings, escaped, begins, line, _respelt(reader), not _ENDS_LINK.search(bare))
        template = filled(reader.pieces, form)
        form.is_whole = len(template) == 1
        return template

    def image(self, found: regex.Match[str], raw: str, escaped: str) -> EmptyElement:
        """Return an image, whose description is translated."""
        if not found["alt"].strip() or "\n" in found[0]:
            return EmptyElement(raw)
        shown = unescape(found["alt"])
        form = _Form(escaped=f"[]{escaped}{_marks_not_in(shown)}")
        form.spellings.add(shown, found["alt"])
        template: Template = ["![", MarkupSlot(SpannedText(shown), form)]
        add(template, _titled(found["source"], escaped))
        return EmptyElement(template)


class _Run:
    """Reader of one text: its pieces, and the file's spelling of those that are text."""

    def __init__(self, inline: Inline, text: str, breaks: Sequence[str], escaped: str) -> None:
        self.inline, self.text, self.escaped = inline, text, escaped
        self.ends = iter(breaks)
        self.pieces: list[Piece] = []
        self.sources: list[str] = []
        self.links: list[tuple[int, int]] = []  # indices of open brackets, in `pieces` and in `text`
        self.opened: list[tuple[str, int]] = []  # open emphasis and its index in `pieces`
        self.closed: list[tuple[str, int, int]] = []
        self.written: dict[str, str] = {}  # characters written as escapes or entities

    def read(self) -> None:
        """Read the whole text."""
        at = 0
        pattern = _WITH_EXPRESSIONS if self.inline.is_mdx else _INLINE
        while found := pattern.search(self.text, at):
            self._add_text(self.text[at : found.start()])
            at = found.end()
            kind = str(found.lastgroup)
            if kind == "end" and self._is_only_bracket(found, at):
                kind, at = "bracket", found.start() + 1
            span = self.text[found.start() : at]
            raw = regex.sub("\n", lambda _: next(self.ends), span)
            if kind == "link":
                before = self.pieces[-1] if self.pieces else None
                is_glued = isinstance(before, str) and SPACED.match(before[-1:]) and SPACED.match(self.text, at)
                if is_glued or (isinstance(before, Close) and before.name == "["):
                    self._add(EmptyElement("", " "))  # adjacent links, or a link next to a word, are two texts
                self.links.append((len(self.pieces), at))
                self._add_text("[")
            elif kind == "bracket":
                self._add_text(span, raw)
            elif kind in ("end", "short"):
                self._end_link(kind, found.start(), span, raw)
            elif kind == "line":
                self._add_text("\n", raw)
            elif kind == "image":
                self._add(self.inline.image(found, raw, self.escaped))
            elif kind in ("strong", "emphasis"):
                self._emphasis(raw)
            elif kind in ("escape", "entity"):
                said = raw[1:] if kind == "escape" else unescape(raw)
                if (len(said) == 1 and said.isprintable()) or said == "\xa0":
                    self.written.setdefault(said, raw)
                else:
                    said = raw
                self._add_text(said, raw)
            else:
                self._add(_mark(kind, raw))
        self._add_text(self.text[at:])
        for raw, place in self.opened:  # never closed
            self._as_text(place, raw)

    def _add(self, piece: Piece, source: str = "") -> None:
        self.pieces.append(piece)
        self.sources.append(source)

    def _add_text(self, text: str, source: str | None = None) -> None:
        if text:
            self._add(text, text if source is None else source)

    def _as_text(self, place: int, raw: str) -> None:
        self.pieces[place] = self.sources[place] = raw

    def _is_only_bracket(self, found: regex.Match[str], end: int) -> bool:
        """Return whether `][label]` does not end a link: the label is unknown, and the end of another link follows."""
        if not found[0].startswith("]["):
            return False
        following = regex.match(r"\[([^\[\]]{1,200})\]", self.text[end : end + 202])
        labels = self.inline.labels
        return following is not None and folded(found[0][2:-1]) not in labels and folded(following[1]) in labels

    def _emphasis(self, raw: str) -> None:
        for number in reversed(range(len(self.opened))):
            if self.opened[number][0] == raw and self.opened[number][1] == len(self.pieces) - 1:  # it is empty
                self.opened.pop()
                self._as_text(-1, raw)
                self._add_text(raw)
                return
            if self.opened[number][0] == raw:
                self.closed.append((raw, self.opened.pop(number)[1], len(self.pieces)))
                self._add(Close(raw, raw))
                return
        self.opened.append((raw, len(self.pieces)))
        self._add(Open(raw, raw))

    def _end_link(self, kind: str, start: int, span: str, raw: str) -> None:
        place, begin = self.links.pop() if self.links else (-1, 0)
        label = " ".join(self.text[begin : min(start, begin + _LONGEST_LABEL)].split())
        if place < 0 or (kind == "short" and folded(label) not in self.inline.labels):
            self._add_text(span, raw)
            return
        self._whole_inside(place)
        inside: Template = []
        for piece, source in zip(self.pieces[place + 1 :], self.sources[place + 1 :], strict=True):
            add(inside, source if isinstance(piece, str) else piece.raw)
        written = _Shortcut(raw, label, _flat(inside)) if kind == "short" else _titled(raw, self.escaped)
        self._add(Close(written, "["))
        self.pieces[place] = Open("[", "[")
        self.links.clear()  # links cannot be nested

    def _whole_inside(self, place: int) -> None:
        """Treat emphasis that crosses the start of a link as text inside it, because a link binds more tightly."""
        for raw, mark in self.opened:
            if mark > place:
                self._as_text(mark, raw)
        self.opened = [(raw, mark) for raw, mark in self.opened if mark < place]
        for raw, begin, end in self.closed:
            if begin < place < end:
                self._as_text(end, raw)
                self.opened.append((raw, begin))
        self.closed.clear()  # the next link starts after all of these


def _respelt(run: _Run) -> dict[str, str]:
    """Return how to spell characters in new text: as escapes or entities if the source does so."""
    bare = {
        letter
        for piece, source in zip(run.pieces, run.sources, strict=True)
        if isinstance(piece, str) and piece == source
        for letter in piece
    }
    return {
        letter: raw
        for letter, raw in run.written.items()
        if raw[0] == "\\" or letter in "&<>*_`[]" or letter not in bare
    }


def _marks_not_in(text: str) -> str:
    """Return the signs that would start code or a tag in a translation, and that the source does not use as text."""
    return "".join(sign for sign in "`<" if sign not in text)


def _mark(kind: str, raw: str) -> Piece:
    if kind in ("code", "math"):
        return Verbatim(raw, raw.strip("`$").strip() if "\n" not in raw and "\r" not in raw else "")
    if kind == "shown":
        return Verbatim(raw, raw if raw.isprintable() and len(raw) <= 100 else "")
    if kind == "hard":
        return EmptyElement(raw, "\n")
    if kind == "kept":
        return Verbatim(raw, shown_text(list(html_tokens(raw))))
    tag = regex.match(r"</?([A-Za-z][^\s/>]*)", raw) if kind == "tag" else None
    name = "" if tag is None else tag[1].lower()
    if name not in HTML.inline - HTML.void:
        return EmptyElement(raw, "\n" if name == "br" else "", is_seen=name in HTML.seen)
    return Close(raw, name) if raw.startswith("</") else Open(raw, name)


def _titled(raw: str, escaped: str) -> Raw:
    """Return the end of a link or image, with a slot for its title."""
    found = None if "\n" in raw else _TITLE.search(raw)
    if found is None:
        return raw
    form = _Form(escaped=found["quote"] + escaped)
    text = unescape(regex.sub(r"\\([!-/:-@\[-`{-~])", r"\1", found["title"]))
    form.spellings.add(text, found["title"])
    end = raw[found.end("title") :]
    return [raw[: found.start("title")], MarkupSlot(SpannedText(text), form), end]


def _spellings(pieces: Sequence[Piece], sources: Sequence[str]) -> Spellings:
    """Return the file's spelling of each text between marks."""
    spellings = Spellings()
    for is_text, group in groupby(zip(pieces, sources, strict=True), lambda pair: isinstance(pair[0], str)):
        if is_text:
            texts, raws = zip(*group, strict=True)
            spellings.add("".join(texts), "".join(raws))
    return spellings


def folded(label: str) -> str:
    """Return a link's label in the form that the parser compares."""
    return " ".join(label.split()).lower().upper()


def _is_empty(pieces: Sequence[Piece], number: int) -> bool:
    """Return whether emphasis without text starts at a piece: `**` would be read as a different mark."""
    first, second = pieces[max(number, 0)], pieces[number + 1] if number + 1 < len(pieces) else None
    return isinstance(first, Open) and isinstance(second, Close) and first.name in ("*", "_", "**", "__", "~~", "***")


def _without_empty_marks(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces without empty emphasis; what stood around it is one text, to be looked at as a whole."""
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
            if not has_text:
                continue
            before = next(n for n in range(len(kept) - 1, -1, -1) if not isinstance(kept[n], Open | Close))
            if isinstance(text := kept[before], str):
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


class _Shortcut(NamedTuple):
    """The end of a link whose text is also its label (`[text]`); if the text changes, the label must be added."""

    raw: str
    label: str
    source: str  # the text with its marks, as returned by `_flat`


def _flat(template: Template) -> str:
    """Return a template as one line, without image descriptions and quotation marks of blocks."""
    return regex.sub(r"[\s>]+", " ", "".join(part for part in template if isinstance(part, str)))


@dataclass(eq=False)
class _Form:
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
        begin, in_link = 0, False  # start of a link's text
        for number, piece in enumerate(pieces):
            if isinstance(piece, str):
                following = pieces[number + 1] if number + 1 < len(pieces) else None
                before_link = isinstance(following, Open) and following.name == "["
                template.append(self._text(piece, template, in_link=in_link, before_link=before_link))
                continue
            if isinstance(piece, Open | Close) and piece.name == "[":
                in_link = isinstance(piece, Open)
            raw = piece.raw
            if isinstance(raw, _Shortcut):
                raw = raw.raw if _flat(template[begin:]) == raw.source else f"][{raw.label}]"
            add(template, raw)
            if isinstance(piece, Open) and piece.name == "[":
                begin = len(template)
        return template

    def _line_before(self, before: Template) -> str:
        """Return what stands before a text, as far back as to the end of a line or the last that is no mark."""
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
            text = _ENDS_LINK.sub(r"\\\g<0>", text)
        if escaped := self.escaped + ("[]" if in_link else ""):
            text = regex.sub(rf"{_UNESCAPED}(?=[{regex.escape(escaped)}])", r"\g<0>\\", text)
        text = _LONE_BACKSLASH.sub(r"\g<0>\\", text)  # otherwise the next character would be escaped
        if before_link:
            text = _BEGINS_IMAGE.sub(r"\\!", text)
        last = self._line_before(before)
        if last.endswith("]") and text[:1] in ("(", "[", ":"):  # behind a note or citation, which is no link
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
