"""Marks of site generators in Markdown, unknown to the parser: lines that are preserved, and the titles in them.

Directives (`:::note Title`, MyST's fences with a name in braces), admonitions (`!!! note "Title"` with an indented
body), tabs, imports and exports in MDX, tags over several lines, templates, comments of MyST.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.front_matter import front_matter_end
from ziggurat.serve.text.splitting import has_words

# At the start of a line, after the marks of quotations and items; `title` is translated.
_MARKS = r"^[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)])[ ]++)?"
_MARKS_OF_LINE = regex.compile(_MARKS)
_ADMONITION = (
    "abstract|admonition|attention|bug|caution|danger|details|error|example|failure|hint|important|info|note|question|"
    "quote|seealso|spoiler|success|tip|todo|warning"
)
# Directives of MyST and its extensions that contain Markdown: with a title, and with anything else after their name.
_TITLED = (
    f"{_ADMONITION}|card|centered|definition|dropdown|exercise|grid-item-card|list-table|margin|proof|prf:[a-z]++|"
    "rubric|sidebar|solution|tab-item|table|theorem|topic"
)
_UNTITLED = (
    "aside|blockquote|card-carousel|compound|container|deprecated|div|epigraph|figure|figure-md|grid|grid-item|"
    "highlights|hlist|only|pull-quote|tab-set|versionadded|versionchanged|versionremoved"
)
# Directives whose content is for programs, or comes from elsewhere.
_PROGRAMS = (
    "bibliography|class|code|code-block|code-cell|contents|doctest|graphviz|highlight|image|include|index|iframe|"
    "literalinclude|math|mermaid|raw|sourcecode|testcode|testoutput|video"
)
_DIRECTIVE = regex.compile(
    rf"""{_MARKS}(?::{{2,8}}[ ]*+(?:
        [\w\-]{{1,40}}\[(?P<title>[^\[\]\n]{{1,300}})\].*+  # :::note[Title]{{#id}}
      | \{{(?i:{_TITLED})\}}[ ]*+(?P<title>.*+)  # :::{{note}} Title
      | \{{.*+  # ::: {{.note}}, :::{{figure}} a.png
      | [\w\-]{{1,40}}(?:[ ]*+\{{[^{{}}\n]{{0,200}}\}})?
        (?:[ ]++(?![^\s]*+[./=][^\s]*+$)(?P<title>.{{1,300}}+)|[ ]++\S++)?
      |) | /{{3,8}}(?:[ ]*+[\w\-]{{1,40}}(?:[ ]*+\|[ ]*+(?P<title>.*+))?)?  # /// note | Title
      | \*\[[^\[\]\n]{{1,80}}\]:[ ]*+(?P<title>.++))[ ]*$  # *[HTML]: abbreviation""",
    flags=regex.VERBOSE,
)
_INDENTING = regex.compile(
    rf"""{_MARKS}(?:(?:!!!|\?\?\?\+?)[ ]++[\w\-][\w\-, ]{{0,80}}?(?:[ ]++"(?P<title>[^"\n]{{0,300}})")?
      | ===[!+]?[ ]++"(?P<title>[^"\n]{{1,300}})"
      | \.\.[ ]++(?i:{_ADMONITION})::[ ]*+(?P<title>.*+))[ ]*$""",
    flags=regex.VERBOSE,
)
_TEMPLATES = regex.compile(
    rf"""{_MARKS}(?:\{{%(?:[^%]|%(?!\}}))*+%\}} | \{{\{{(?:[^}}]|\}}(?!\}}))*+\}}\}}+
      | \{{/\*(?:[^*]|\*(?!/))*+\*/\}} | \{{:[^{{}}]*+\}} | [ \t]++)++\s*$""",
    flags=regex.VERBOSE,
)
_KEPT = regex.compile(
    rf"""{_MARKS}(?:\[\[?_?(?i:toc)_?\]\]?
      | \([\w\-.: ]{{1,80}}\)= | \+\+\+(?:[ ]*+\{{.*\}})?  # a target and the end of a block in MyST
      | --8<--.* | <<<\s.* | @\[[\w\-]+\]\(.*\) | \.\.[ ]++[\w\-]++::.*
      | !\[\[[^\[\]|\n]++(?:\|(?:[\dx]++|(?P<title>[^\[\]|\n]++)))?\]\])\s*$  # ![[file|words]]""",
    flags=regex.VERBOSE,
)
# The title in a link's definition; the line itself is the parser's.
_DEFINED = regex.compile(
    r"""[ ]{0,3}(?:>[ ]?)*+\[(?!\^)[^\[\]\n]++\]:[ \t]*+(?:<[^<>\n]*+>|[^\s<]\S*+)[ \t]++
        (?:"(?P<title>[^"\\\n]++)"|'(?P<title>[^'\\\n]++)'|\((?P<title>[^()\\\n]++)\))[ \t]*+$""",
    flags=regex.VERBOSE,
)
_FENCE = regex.compile(r"[ \t>]*+(?:[-*+][ ]++|\d{1,9}[.)][ ]++)?(`{3,}|~{3,}|:{3,}(?=[ ]*+\{[\w\-:]))[ ]*+(.*)")
_CLOSING = regex.compile(r"[ \t>]*+(`{3,}|~{3,}|:{3,})[ \t]*+$")
_TEXT_FENCE = regex.compile(
    rf"""(?:(?:ad-)?(?i:{_ADMONITION})(?![\w\-{{]) | \{{(?i:{_TITLED})\}})[ ]*+(?P<title>.*+)
      | \{{(?i:{_UNTITLED})\}}.*+""",
    flags=regex.VERBOSE,
)
_NAMED_FENCE = regex.compile(rf"\{{(?:(?P<programs>(?i:{_PROGRAMS}))|(?P<toctree>toctree)|(?![.#])[\w\-:]++)\}}")
_ENTRY = regex.compile(r"[ \t>]*+(?P<title>[^\s<>][^<>\n]*?)[ \t]*+<[^<>\n]++>[ \t]*+$")  # of a toctree
# Options of MyST's directives follow as `:key: value`, or between lines of `---`.
_WITH_OPTIONS = regex.compile(rf"{_MARKS}(?:(?:`{{3,}}|~{{3,}}|:{{3,}})[ ]*+\{{[\w\-:]++\}}|\.\.[ ]++[\w\-]++::)")
_OPTION = regex.compile(r"[ \t>]*+:[\w\-]{1,40}:(?:[ \t].*+)?")
_SHOWN_OPTION = regex.compile(
    r"""[ \t>]*+:?(?:alt|caption|lineno-caption|subtitle|summary|title):[ \t]++(["']?)(?P<title>\S.*?)\1[ \t]*+$"""
)
_OF_MYST = regex.compile(r"(?m)^[ \t>]*+(?:`{3,}|:{3,})\{[\w\-:]++\}|^\([\w\-.: ]{1,80}\)=|\{[\w\-:]++\}`")
_COMMENT = regex.compile(r"[ ]{0,3}%(?![%}])[ \t]*+(?P<title>.*+)")
_MODULE = regex.compile(
    r"""import\s++(?:[^\n"']{1,400}?\bfrom\s*+)?["'][^"'\n]++["'];?\s*+$ | import\s++[\w$,*\s]*+\{[^}"']*+$
      | import\s++[^\n"']{1,400}?\sfrom\s++["']
      | export\s+(?:default\b|(?:const|let|var|function|async|class)\s|\*|\{)""",
    flags=regex.VERBOSE,
)
_DEFINITION = regex.compile(r"[ ]{0,3}:[ ]{1,4}\S")
_BAR = regex.compile(r"[ ]{0,3}\|")
_RULE = regex.compile(r"[\s|:]*+-[\s|:\-]*+")
GRID = regex.compile(r"[ ]{0,3}\+(?:[:=\-]{3,}+\+)++\s*+")
"""GRID matches a line between the rows of a table that is drawn with characters."""
_TAG_BEGINS = regex.compile(r"\s*+<[A-Za-z][\w.\-]*+(?:\s[^<>]*+)?")
_MAX_TAG = 500
"""_MAX_TAG is the maximum number of lines of a tag, or of an MDX expression, that is preserved."""


SHOWN_EXPRESSION = regex.compile(
    r"""\{(?!/\*)(?:(?<!=\{)|(?!\s?["'`<]))(?:[^{}]|\{[^{}]*+\})*?  # `title={"Words"}` is counted with its tag
        (?:>(?=[^<>{}]*+</)[^<>{}]*?\p{L}{2} | (["'`])(?=[^"'`{}]*+\1)[^"'`{}]*?\p{L}{2}[,;:]?[ ]\p{L}{2})""",
    flags=regex.VERBOSE,
)
"""SHOWN_EXPRESSION matches an expression of MDX with text between tags, or with words between quotes."""


class MarkedLine(NamedTuple):
    """A line of which only a part is translated: the text from `begin` to `end`, or the texts in its tags."""

    begin: int = 0
    end: int = 0
    has_tags: bool = False


_NOTHING = MarkedLine()


class Marks:
    """The lines of a file with marks unknown to the parser, and all lines as the parser gets them.

    The parser gets spaces instead of such a line, so that paragraphs end there, and the start of an item for a mark
    with an indented body.

    Attributes:
        of: a line -> what is translated in it.
        parsed: the lines for the parser.
        front: how many lines at the start are front matter.
    """

    def __init__(self, bodies: Sequence[str], notices: TextNotices, *, is_mdx: bool) -> None:
        self.bodies, self.notices, self.is_mdx = bodies, notices, is_mdx
        self.of: dict[int, MarkedLine] = {}
        self.parsed = _as_items(bodies)
        self.front = front_matter_end(bodies)
        self._is_myst = any(map(_OF_MYST.search, bodies))
        self._options = 0  # the line after the options of a directive
        self._fence = ""  # the open fence around content that is not Markdown
        self._named: regex.Match[str] | None = None  # the directive that it belongs to
        self._opened: list[str] = []  # fences around text
        self._kept = 0  # remaining lines to preserve
        self._in_tag = False  # whether they are a tag
        self._braces = 0  # open brackets of an import or export
        self._in_module = False
        for number, line in enumerate(bodies):
            if number < self.front:
                self._keep(number)
            else:
                self._take(number, line)

    def text_lines(self) -> set[int]:
        """Return the lines that are not code, however deeply indented: after tags and templates, and after `|`."""
        tags = (n for n, mark in self.of.items() if mark.has_tags and not self.bodies[n].lstrip().startswith(":"))
        pairs = enumerate(zip(self.bodies, self.parsed, strict=True))
        blocks = (n for n, (body, said) in pairs if body.lstrip()[:1] == "|" and said.lstrip()[:1] == "*")
        return {number + 1 for number in tags} | {*blocks}

    def _keep(self, number: int, mark: MarkedLine = _NOTHING, parsed: str = "") -> None:
        self.of[number], self.parsed[number] = mark, parsed.ljust(len(self.bodies[number]))

    def _take(self, number: int, line: str) -> None:
        if number < self._options:
            shown = _SHOWN_OPTION.match(line)
            self._keep(number, MarkedLine(*shown.span("title")) if shown else _NOTHING)
        elif self._fence:
            self._inside(number, line)
        elif self._kept or (kept := _kept_lines(self.bodies, number, is_mdx=self.is_mdx)):
            if not self._kept:
                self._in_tag, self._kept = line.lstrip().startswith("<"), kept
                if self.is_mdx and SHOWN_EXPRESSION.search("\n".join(self.bodies[number : number + kept])):
                    self.notices.add("not_read", f"line {number + 1}")
            self._kept -= 1
            self._keep(number, MarkedLine(has_tags=self._in_tag))
        elif self._in_module or (
            line.startswith(("import", "export")) and _MODULE.match(line) and self._is_after_blank(number)
        ):
            self._braces += line.count("{") + line.count("(") - line.count("}") - line.count(")")
            self._in_module = bool(line.strip()) or self._braces > 0
            self._keep(number)
        elif found := _FENCE.match(line):
            self._open(number, line, found)
        else:
            self._mark(number, line)

    def _inside(self, number: int, line: str) -> None:
        """Take a line inside a fence around content that is not Markdown."""
        closing = _CLOSING.match(line)
        self.parsed[number] = line
        if closing and closing[1].startswith(self._fence):
            self._fence, self._named = "", None
        elif self._named and self._named["toctree"]:
            if entry := _ENTRY.match(line):
                self.of[number] = MarkedLine(*entry.span("title"))
        elif self._named and not self._named["programs"] and has_words(line, []):
            self.notices.add("not_read", f"line {number + 1}")
        if self._fence.startswith(":") or (closing and closing[1].startswith(":")):
            self.parsed[number] = " " * len(line)
            self.of.setdefault(number, MarkedLine())

    def _open(self, number: int, line: str, found: regex.Match[str]) -> None:
        """Take a line that opens a fence, or closes one around text."""
        mark, rest = found[1], found[2].strip()
        text = _TEXT_FENCE.fullmatch(rest) if "`" not in rest or rest.startswith("{") else None
        if _WITH_OPTIONS.match(line):
            self._options = _options_end(self.bodies, number)
        named = _NAMED_FENCE.match(rest)
        if self._opened and mark == self._opened[-1] and not rest:
            self._opened.pop()
            self._keep(number)
        elif mark.startswith(":") and (text or not named or not (named["programs"] or named["toctree"])):
            self._mark(number, line)
        elif text:
            self._opened.append(mark)
            begin, end = text.span("title")
            at = found.start(2)
            self._keep(number, MarkedLine(at + begin, at + end) if begin >= 0 else _NOTHING)
        elif mark[0] != "`" or "`" not in rest:
            self._fence, self._named = mark, named
            if mark.startswith(":"):
                self._keep(number)
            else:
                self.of[number] = MarkedLine(has_tags=True)

    def _mark(self, number: int, line: str) -> None:
        """Record a line that is a site generator's mark."""
        begin = _MARKS_OF_LINE.match(line).end()
        if line[begin : begin + 1] not in set(":*!?=.{[(-+<@/%"):
            return
        parsed = line[:begin] if ">" in line[:begin] else ""
        if found := _INDENTING.match(line):
            parsed = f"{line[:begin]}* x"
        else:
            found = _DIRECTIVE.match(line) or _KEPT.match(line) or _TEMPLATES.match(line) or self._comment(number, line)
        if found is None and (found := _DEFINED.fullmatch(line)):
            parsed = line
        if found is None:
            return
        if _WITH_OPTIONS.match(line):
            self._options = _options_end(self.bodies, number)
        title = found.span("title") if "title" in found.groupdict() else (-1, -1)
        has_title = title[0] >= 0 and line[slice(*title)].strip()
        has_tags = found.re in (_TEMPLATES, _DIRECTIVE)
        self._keep(number, MarkedLine(*title) if has_title else MarkedLine(has_tags=has_tags), parsed)

    def _comment(self, number: int, line: str) -> regex.Match[str] | None:
        """Return the match of a comment of MyST, which has no title, or of Pandoc's title at the start of a file."""
        found = _COMMENT.fullmatch(line)
        before = self.bodies[number - 1].strip() if number else ""
        if found is None or not (self._is_myst or not before or (number - 1 in self.of and before.startswith("%"))):
            return None
        return found if number == 0 and not self._is_myst else regex.fullmatch(r".*", line)

    def _is_after_blank(self, number: int) -> bool:
        before = self.bodies[number - 1].rstrip() if number else ""
        return not before or before == "---" or _MODULE.match(before) is not None


def _kept_lines(bodies: Sequence[str], number: int, *, is_mdx: bool) -> int:
    """Return how many lines, starting at `number`, form an ASCII table, a multi-line tag, or an expression."""
    line = bodies[number]
    lines = bodies[number : number + _MAX_TAG]
    if GRID.fullmatch(line):
        return next((n for n, each in enumerate(bodies[number:]) if each.lstrip()[:1] not in ("+", "|")), len(bodies))
    opened = 0  # braces
    if _TAG_BEGINS.fullmatch(line):
        for count, each in enumerate(lines, 1):
            if count > 1 and opened <= 0 and (not each.strip() or "<" in each):
                return 0
            opened += each.count("{") - each.count("}") if is_mdx else 0
            if opened <= 0 and each.rstrip().endswith(">") and not each.rstrip().endswith("=>"):
                return count
    elif is_mdx and line.lstrip().startswith("{"):
        for count, each in enumerate(lines, 1):
            opened += each.count("{") - each.count("}")
            if opened <= 0:
                return count if each.rstrip().endswith("}") and count > 1 else 0
    return 0


def _as_items(bodies: Sequence[str]) -> list[str]:
    """Return the lines with item marks in place of definition marks, and with line blocks (`| a`) kept as lines."""
    said = list(bodies)
    number = 0
    while number < len(said):
        line = said[number]
        if _DEFINITION.match(line):
            said[number] = line.replace(":", "*", 1)
        end = number
        while end < len(said) and _BAR.match(said[end]):
            end += 1
        if end - number > 1 and not any(map(_RULE.fullmatch, said[max(number - 1, 0) : number + 2])):  # not a table
            said[number:end] = [regex.sub(r"\|(?= )", "*", each, count=1) for each in said[number:end]]
        number = max(end, number + 1)
    return said


def _options_end(bodies: Sequence[str], number: int) -> int:
    """Return the line after the options of a directive that starts in line `number`."""
    end = number + 1
    while end < len(bodies) and _OPTION.fullmatch(bodies[end]):
        end += 1
    if end == number + 1 < len(bodies) and bodies[end].strip() == "---":
        closing = (n for n, each in enumerate(bodies[end + 1 : end + _MAX_TAG], end + 2) if each.strip() == "---")
        end = next(closing, end)
    return end
