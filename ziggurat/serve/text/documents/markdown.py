"""Markdown: whatever a parser (markdown-it) considers text is translated, and every other byte is preserved.

The parser reports which lines form a paragraph, a heading, a row or an HTML block, and where in each line the text
starts, after the marks of quotations, items and notes.

Marks of site generators, which the parser does not know, are preserved, but their titles are translated
(ziggurat.serve.text.documents.markdown_marks).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from html import escape, unescape
from typing import Any
from urllib.parse import unquote

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.front_matter import front_matter
from ziggurat.serve.text.documents.lines import LINE, file_work
from ziggurat.serve.text.documents.markdown_inline import Inline, folded
from ziggurat.serve.text.documents.markdown_marks import GRID, MarkedLine, Marks
from ziggurat.serve.text.elements import PAGES, MarkupRules
from ziggurat.serve.text.files import Settings, decoded
from ziggurat.serve.text.markup import Template, TemplateGroup, markup_template, slots
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.splitting import has_words
from ziggurat.serve.text.tokens import html_tokens
from ziggurat.system.errors import ConfigError, printable

_ALERT = regex.compile(r"\[![A-Za-z]{1,20}\][-+]?\s*")
_TASK = regex.compile(r"\[[ xX]\]\s+")

# Links to headings

# A link's target, after its text, in a definition or in a tag: a heading in this file, or in another one.
_LEADS = r"""(?:\]\(\s*+<?|\]:[ \t]*+<?|\bhref\s*+=\s*+["']?)"""
_TO_HEADING = regex.compile(rf"""{_LEADS}\#([^\s"'<>()]++)""")
_TO_OTHER_FILE = regex.compile(rf"""{_LEADS}([^\s"'<>()#:]{{1,300}}+\#[^\s"'<>()]++)""")
_ID = regex.compile(r"""\b(?:id|name)\s*+=\s*+["']?([^\s"'<>]++)|\{:?\s*+\#([^\s{}]++)""")
_ATTRIBUTES = regex.compile(r"\{(?=[#.:])(:?)[^{}]*+\}\s*+$")  # after a heading
# Parts that are removed from the names of headings: tags, link targets, images, marks of emphasis next to words.
_UNNAMED = regex.compile(
    r"<[^<>]*+>|!\[[^\[\]]*+\]\([^()]*+\)|(?<=\])(?:\([^()]*+\)|\[[^\[\]]*+\])|(?<!\w)_++|(?<!_)_++(?!\w)"
)
_NO_LETTER = regex.compile(r"[^\p{L}\p{M}\p{N}\p{Pc}\- ]")


def _heading_name(title: str) -> str:
    """Return a heading's name in links, by the rule of GitHub, Docusaurus and Hugo: lower case, `-` for spaces."""
    title = _ATTRIBUTES.sub("", title)
    return _NO_LETTER.sub("", unescape(_UNNAMED.sub("", title)).strip().lower()).replace(" ", "-")


def _ascii_name(name: str) -> str:
    """Return a name as MkDocs and VitePress build it: without accents, and without adjacent hyphens."""
    ascii_only = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return regex.sub("-{2,}", "-", ascii_only).strip("-")


def _linked(titles: Sequence[str], text: str) -> dict[int, str]:
    """Return the headings of a file that its links lead to, by number, with the name in these links.

    Headings with an explicit name, `{#id}` or an `id` in a tag, are not included.
    """
    named = {name for names in _ID.findall(text) for name in names}
    wanted = {unquote(name).lower(): unquote(name) for name in _TO_HEADING.findall(text) if name not in named}
    found: dict[int, str] = {}
    times = Counter[str]()
    for number, title in enumerate(titles):
        name = _heading_name(title)
        again = times[name]
        times[name] += 1
        for one in (name, _ascii_name(name)):
            for known in (f"{one}-{again}", f"{one}_{again}") if again else (one,):
                if known in wanted:
                    found.setdefault(number, wanted.pop(known))
    return found


def markdown(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of Markdown to translate, but not code or addresses; return the file.

    Raises ConfigError if the parser is not installed.
    """
    text, charset = decoded(content, name)
    notices = TextNotices()
    rules = replace(PAGES, languages=(settings.source, settings.target))
    reader = _Reader(LINE.findall(text), rules, notices, is_mdx=name.lower().endswith(".mdx"))
    for number, body in enumerate(reader.bodies):
        before = reader.bodies[number - 1].lstrip()[:1] if number else ""
        if number in reader.marks.of and GRID.fullmatch(body) and before not in ("|", "+"):
            notices.add("left_out", f"line {number + 1}")
    for elsewhere in _TO_OTHER_FILE.finditer(text):
        notices.add("headings_elsewhere", printable(elsewhere[1], 60))
    return (yield from file_work(reader.template(), charset, settings, notices))


@lru_cache(maxsize=2)
def _parser(*, is_mdx: bool) -> Any:
    """Return a parser of CommonMark with tables, notes and blocks of formulas; MDX has no indented code.

    Its text tokens have in `meta["begins"]` the index at which each of their lines starts. Lines in `env["text"]` do
    not start code, however far they are indented.
    """
    try:
        from markdown_it import MarkdownIt
        from markdown_it.parser_block import ParserBlock
        from markdown_it.rules_block import StateBlock, code
        from mdit_py_plugins.dollarmath import dollarmath_plugin
        from mdit_py_plugins.footnote import footnote_plugin
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`{error.name}`, which reads Markdown, is not installed: pip install 'ziggurat-mt[serve]'"
        ) from None

    class Block(ParserBlock):
        """The parser of blocks, which records positions while it still has them."""

        def tokenize(self, state: StateBlock, startLine: int, endLine: int) -> None:
            done = len(state.tokens)
            super().tokenize(state, startLine, endLine)
            for token in state.tokens[done:]:  # tokens of inner blocks already have their positions
                if token.map and token.type in ("inline", "tr_open", "html_block") and "begins" not in token.meta:
                    token.meta["begins"] = [state.bMarks[line] + state.tShift[line] for line in range(*token.map)]

    def code_unless_text(state: StateBlock, startLine: int, endLine: int, silent: bool) -> bool:
        if startLine in state.env["text"]:
            state.sCount[startLine] = min(state.sCount[startLine], state.blkIndent + 3)
        return code(state, startLine, endLine, silent)

    parser = MarkdownIt("commonmark", {"maxNesting": 40})
    parser.block = Block()
    parser.block.ruler.at("code", code_unless_text)
    if is_mdx:
        parser.disable("code")
    return parser.use(footnote_plugin).use(dollarmath_plugin)


def _anchored(heading: Template, title: str, name: str, *, takes_ids: bool) -> TemplateGroup:
    """Return a heading that keeps the name in links to it, if its translation would have a different one.

    In a file whose headings have ids it gets an id; otherwise it gets a tag, which all dialects accept.
    """
    first, last = heading[0], heading[-1]
    begin, length = (len(part) if isinstance(part, str) else 0 for part in (first, last))

    def finish(text: str) -> str:
        end = len(text) - length
        if _heading_name(text[begin:end]) == _heading_name(title):
            return text
        if not takes_ids:
            return f'{text[:begin]}<a id="{escape(name)}"></a>{text[begin:]}'
        if has := _ATTRIBUTES.search(text, end):
            at = has.end(1)
            return f"{text[:at]}#{name} {text[at:].lstrip()}" if not has[1] else f"{text[:at]} #{name}{text[at:]}"
        rest = text[end:].rstrip("\r\n")
        return f"{text[:end]}{rest} {{#{name}}}{text[end + len(rest) :]}"

    return TemplateGroup(heading, finish=finish)


class _Reader:
    """Reader of one file, with its lines and their ends."""

    def __init__(self, lines: Sequence[str], rules: MarkupRules, notices: TextNotices, *, is_mdx: bool) -> None:
        self.lines, self.rules, self.notices = lines, rules, notices
        self.bodies = [line.rstrip("\r\n") for line in lines]
        self.starts = [0]  # start of each line in the parser's input
        for body in self.bodies:
            self.starts.append(self.starts[-1] + len(body) + 1)
        self.inline = Inline(rules, notices, is_mdx=is_mdx)
        self.marks = Marks(self.bodies, notices, is_mdx=is_mdx)

    def template(self) -> Template:
        parser, tokens = _parser(is_mdx=self.inline.is_mdx), list[Any]()
        known: dict[str, Any] = {"text": self.marks.text_lines()}
        parser.block.parse("\n".join(self.marks.parsed), parser, known, tokens)
        self.inline.labels = {folded(label) for label in known.get("references", ())}
        headings = [n for n, token in enumerate(tokens) if n and tokens[n - 1].type == "heading_open"]
        linked = _linked([tokens[n].content for n in headings], "".join(self.lines))
        anchors = {headings[number]: name for number, name in linked.items()}
        takes_ids = any(map(_ATTRIBUTES.search, (tokens[n].content for n in headings)))
        at = self.marks.front  # line
        template = front_matter(self.lines[:at], self._value, self.notices) if at else []
        for number, token in enumerate(tokens):
            parent = tokens[number - 1].type
            if "begins" not in token.meta or parent in ("th_open", "td_open"):
                continue
            first, last = token.map
            template += self._between(at, first)
            columns = [begin - self.starts[line] for line, begin in enumerate(token.meta["begins"], first)]
            if token.type == "html_block":
                template += self._html(first, columns)
            elif token.type == "tr_open":
                template += self._row(first, columns[0])
            elif parent == "heading_open":
                is_line = tokens[number - 1].markup.startswith("#")
                heading = (
                    self._heading(first, columns[0]) if is_line else self._paragraph(first, columns, is_item=False)
                )
                name = anchors.get(number)
                template += heading if name is None else [_anchored(heading, token.content, name, takes_ids=takes_ids)]
            else:
                is_item = number > 1 and tokens[number - 2].type == "list_item_open"
                template += self._paragraph(first, columns, is_item=is_item)
            at = last
        return [*template, *self._between(at, len(self.lines))]

    def _between(self, first: int, last: int) -> Template:
        """Return the lines between paragraphs, which may contain the title of a directive."""
        template: Template = []
        for number in range(first, last):
            begin, end, has_tags = self.marks.of.get(number, MarkedLine())
            line = self.lines[number]
            if has_tags:
                template += self.inline.tag_texts(line)
            else:
                title = self.inline.template(line[begin:end], escaped=line[end : end + 1] if begin else "")
                template += [line[:begin], *title, line[end:]] if begin < end else [line]
        return template

    def _value(self, text: str) -> Template:
        """Return the template of a value in front matter."""
        return self.inline.template(text, ["\n"] * text.count("\n"))

    def _end(self, line: int) -> str:
        return self.lines[line][len(self.bodies[line]) :]

    def _html(self, first: int, columns: Sequence[int]) -> Template:
        """Return the template of an HTML block.

        One of several lines inside a quotation is preserved and counted, and so is one whose first tag has no end.
        """
        lines = self.lines[first : first + len(columns)]
        is_quoted = any(line[:column].strip() for line, column in zip(lines[1:], columns[1:], strict=True))
        begins = columns if is_quoted else [columns[0], *[0] * (len(lines) - 1)]
        tokens = list(html_tokens("".join(line[begin:] for line, begin in zip(lines, begins, strict=True))))
        if is_quoted or tokens[0].kind == "text":
            if any(has_words(slot.text.text, []) for slot in slots(markup_template(tokens, self.rules))):
                self.notices.add("not_read", f"line {first + 1}")
            return list(lines)
        return [lines[0][: columns[0]], *markup_template(tokens, self.rules, self.notices)]

    def _row(self, line: int, column: int) -> Template:
        template: Template = [self.bodies[line][:column]]
        for part in regex.split(r"((?<!\\)\|)", self.bodies[line][column:]):
            template += [part] if part == "|" or not part.strip() else self.inline.template(part, escaped="|")
        return [*template, self._end(line)]

    def _heading(self, line: int, column: int) -> Template:
        """Return the template of a one-line heading: `# Title # {#id}`."""
        text = self.bodies[line][column:]
        begin = len(text) - len(text.lstrip("#").lstrip(" \t"))
        title = text[begin:].rstrip(" \t")
        if title.endswith("}") and title[(at := title.rfind("{")) :].startswith(("{#", "{.", "{:")):
            if len(self.inline.tag_texts(title[at:])) > 1:  # {title="Words"}
                self.notices.add("not_read", f"line {line + 1}")
            title = title[:at].rstrip(" \t")
        bare = title.rstrip("#")
        if not bare or bare[-1] in " \t":
            title = bare.rstrip(" \t")
        end = column + begin + len(title)
        return [self.lines[line][: column + begin], *self.inline.template(title), self.lines[line][end:]]

    def _paragraph(self, first: int, columns: Sequence[int], *, is_item: bool) -> Template:
        """Return the template of a paragraph, whose lines form one text, as readers see it."""
        columns, last = list(columns), first + len(columns) - 1
        template: Template = []
        is_mark = first in self.marks.of and self.marks.parsed[first] != self.bodies[first]
        if is_mark:  # an admonition's line, which the parser takes for an item
            template, first, columns = self._between(first, first + 1), first + 1, columns[1:]
        elif alert := _ALERT.match(self.bodies[first], columns[0]):  # `> [!NOTE]`, possibly with a title
            line, begin = self.bodies[first], alert.end()
            template = [line[:begin], *self.inline.template(line[begin:]), self._end(first)]
            first, columns = first + 1, columns[1:]
        if not columns:
            return template
        if is_item and (task := _TASK.match(self.bodies[first], columns[0])):
            columns[0] = task.end()
        parts = [self.bodies[line][column:] for line, column in enumerate(columns, first)]
        breaks = [
            self._end(line) + self.lines[line + 1][:column] for line, column in enumerate(columns[1:], first)
        ]  # fmt: skip
        template.append(self.lines[first][: columns[0]])
        return [*template, *self.inline.template("\n".join(parts), breaks, begins=True), self._end(last)]
