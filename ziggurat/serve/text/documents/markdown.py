"""Markdown: what a parser (markdown-it) calls text is translated, and every other byte stays.

The parser says which lines are a paragraph, a heading, a row or a block of HTML, and where in each line the text begins
behind the marks of quotations, items and notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import regex

from ziggurat.serve.text.charsets import decoded
from ziggurat.serve.text.documents.lines import LINE, file_work
from ziggurat.serve.text.documents.markdown_inline import Inline, folded
from ziggurat.serve.text.documents.settings import Settings
from ziggurat.serve.text.markup import HTML, HTML_ATTRIBUTES, markup_template
from ziggurat.serve.text.template import Template
from ziggurat.serve.text.tokens import html_tokens
from ziggurat.serve.text.work import Outcome, Work
from ziggurat.system.errors import ConfigError

_ALERT = regex.compile(r"\[![A-Za-z]{1,20}\][-+]?\s*")
_TASK = regex.compile(r"\[[ xX]\]\s+")


def markdown(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
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
