"""Markdown: what a parser (markdown-it) calls text is translated, and every other byte stays.

The parser says which lines are a paragraph, a heading, a row or a block of HTML, and where in each line the text begins
behind the marks of quotations, items and notes.

Inline markup of Markdown, found by pattern: the parser tells no places of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import regex

from ziggurat.serve.text.charsets import decoded
from ziggurat.serve.text.documents.archive import Settings
from ziggurat.serve.text.documents.lines import LINE, file_work
from ziggurat.serve.text.markup import (
    HTML,
    HTML_ATTRIBUTES,
    MarkupSlot,
    Spellings,
    Template,
    add,
    filled,
    markup_template,
    shown_text,
)
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText, Verbatim
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import html_tokens
from ziggurat.system.errors import ConfigError

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

    def _image(self, found: regex.Match[str], raw: str, escaped: str) -> EmptyElement:
        """Return an image, whose description is translated."""
        if not (self.attributes and found["alt"].strip()) or "\n" in found[0]:
            return EmptyElement(raw)
        form = _Form(escaped=f"[]{escaped}")
        form.spellings.add(found["alt"], found["alt"])
        return EmptyElement(["![", MarkupSlot(SpannedText(found["alt"]), form), found["source"]])


def _mark(kind: str, raw: str) -> Piece:
    """Return the piece of a sign or tag."""
    if kind in ("code", "math"):
        return Verbatim(raw, raw.strip("`$").strip() if "\n" not in raw and "\r" not in raw else "")
    if kind == "escape":
        return Verbatim(raw, raw[1:])
    if kind == "hard":
        return EmptyElement(raw, "\n")
    if kind == "kept":
        return Verbatim(raw, shown_text(list(html_tokens(raw))))
    tag = regex.match(r"</?([A-Za-z][^\s/>]*)", raw) if kind == "tag" else None
    if tag is None or tag[1].lower() not in HTML.inline - HTML.void:
        return EmptyElement(raw)
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


_ALERT = regex.compile(r"\[![A-Za-z]{1,20}\][-+]?\s*")
_TASK = regex.compile(r"\[[ xX]\]\s+")


def markdown(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating Markdown: paragraphs, headings, items, cells, notes; code and addresses stay.

    Raises ConfigError where the parser is not installed.
    """
    text, charset = decoded(content, name)
    template = _Reader(LINE.findall(text), attributes=settings.attributes).template()
    return (yield from file_work(template, charset, settings))


@lru_cache(maxsize=1)
def _parser() -> Any:
    """Return a parser of CommonMark with tables, notes, front matter and blocks of formulas.

    Its tokens of text have in `meta["begins"]` the character at which each of their lines begins.
    """
    try:
        from markdown_it import MarkdownIt
        from markdown_it.parser_block import ParserBlock
        from markdown_it.rules_block import StateBlock
        from mdit_py_plugins.dollarmath import dollarmath_plugin
        from mdit_py_plugins.footnote import footnote_plugin
        from mdit_py_plugins.front_matter import front_matter_plugin
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`{error.name}`, which reads Markdown, is not installed: pip install 'ziggurat-mt[serve]'"
        ) from None

    class Block(ParserBlock):
        """The parser of blocks, which notes places while it still knows them."""

        def tokenize(self, state: StateBlock, startLine: int, endLine: int) -> None:
            done = len(state.tokens)
            super().tokenize(state, startLine, endLine)
            for token in state.tokens[done:]:  # those of inner blocks have theirs
                if token.map and token.type in ("inline", "tr_open", "html_block") and "begins" not in token.meta:
                    token.meta["begins"] = [state.bMarks[line] + state.tShift[line] for line in range(*token.map)]

    parser = MarkdownIt("commonmark", {"maxNesting": 40})
    parser.block = Block()
    return parser.use(footnote_plugin).use(front_matter_plugin).use(dollarmath_plugin)


class _Reader:
    """Reader of one file, of which it has the lines with their ends."""

    def __init__(self, lines: Sequence[str], *, attributes: bool) -> None:
        self.lines, self.attributes = lines, attributes
        self.bodies = [line.rstrip("\r\n") for line in lines]
        self.starts = [0]  # of each line in what the parser reads
        for body in self.bodies:
            self.starts.append(self.starts[-1] + len(body) + 1)
        self.inline = Inline(attributes=attributes)

    def template(self) -> Template:
        parser, known, tokens = _parser(), dict[str, Any](), list[Any]()
        parser.block.parse("\n".join(self.bodies), parser, known, tokens)
        self.inline.labels = {folded(label) for label in known.get("references", ())}
        template: Template = []
        at = 0  # line
        for number, token in enumerate(tokens):
            parent = tokens[number - 1].type
            if "begins" not in token.meta or parent in ("th_open", "td_open"):
                continue
            first, last = token.map
            template += self.lines[at:first]
            columns = [begin - self.starts[line] for line, begin in enumerate(token.meta["begins"], first)]
            if token.type == "html_block":
                template += self._html(first, columns)
            elif token.type == "tr_open":
                template += self._row(first, columns[0])
            elif parent == "heading_open" and tokens[number - 1].markup.startswith("#"):
                template += self._heading(first, columns[0])
            else:
                is_item = number > 1 and tokens[number - 2].type == "list_item_open"
                template += self._paragraph(first, columns, is_item=is_item)
            at = last
        return [*template, *self.lines[at:]]

    def _end(self, line: int) -> str:
        return self.lines[line][len(self.bodies[line]) :]

    def _html(self, first: int, columns: Sequence[int]) -> Template:
        """Return the template of a block of HTML; in a quotation it stays as it is."""
        lines = self.lines[first : first + len(columns)]
        if any(line[:column].strip() for line, column in zip(lines[1:], columns[1:], strict=True)):
            return list(lines)
        rules = replace(HTML, attributes=HTML_ATTRIBUTES) if self.attributes else HTML
        text = "".join(lines)[columns[0] :]
        return [lines[0][: columns[0]], *markup_template(list(html_tokens(text)), rules)]

    def _row(self, line: int, column: int) -> Template:
        """Return the template of a table's row."""
        template: Template = [self.bodies[line][:column]]
        for part in regex.split(r"((?<!\\)\|)", self.bodies[line][column:]):
            template += [part] if part == "|" or not part.strip() else self.inline.template(part, escaped="|")
        return [*template, self._end(line)]

    def _heading(self, line: int, column: int) -> Template:
        """Return the template of a heading in one line: `# Title # {#id}`."""
        text = self.bodies[line][column:]
        begin = len(text) - len(text.lstrip("#").lstrip(" \t"))
        title = text[begin:].rstrip(" \t")
        if title.endswith("}") and title[(at := title.rfind("{")) :].startswith(("{#", "{.", "{:")):
            title = title[:at].rstrip(" \t")
        bare = title.rstrip("#")
        if not bare or bare[-1] in " \t":
            title = bare.rstrip(" \t")
        end = column + begin + len(title)
        return [self.lines[line][: column + begin], *self.inline.template(title), self.lines[line][end:]]

    def _paragraph(self, first: int, columns: Sequence[int], *, is_item: bool) -> Template:
        """Return the template of a paragraph: its lines are one text, as they are for readers."""
        columns, last = list(columns), first + len(columns) - 1
        template: Template = []
        if len(columns) > 1 and _ALERT.fullmatch(self.bodies[first], columns[0]):  # `> [!NOTE]`
            template, first, columns = [self.lines[first]], first + 1, columns[1:]
        if is_item and (task := _TASK.match(self.bodies[first], columns[0])):
            columns[0] = task.end()
        parts = [self.bodies[line][column:] for line, column in enumerate(columns, first)]
        breaks = [
            self._end(line) + self.lines[line + 1][:column] for line, column in enumerate(columns[1:], first)
        ]  # fmt: skip
        template.append(self.lines[first][: columns[0]])
        return [*template, *self.inline.template("\n".join(parts), breaks, begins=True), self._end(last)]
