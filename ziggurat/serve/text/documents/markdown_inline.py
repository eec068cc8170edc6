"""Inline markup of Markdown, found by patterns, because the parser gives no positions for it.

Formulas, templates (`{% tag %}`, `{{name}}`), emoji short names, citations and attributes are preserved. Escapes and
entities are decoded, and encoded again in the translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import unescape
from itertools import groupby
from unicodedata import category

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents.markdown_form import ENDS_LINK, MarkdownForm, Shortcut, flat
from ziggurat.serve.text.documents.markdown_marks import SHOWN_EXPRESSION
from ziggurat.serve.text.documents.program_values import is_for_programs
from ziggurat.serve.text.elements import HTML, OF_COMPONENTS, PAGES, MarkupRules, is_translated, names_in
from ziggurat.serve.text.markup import (
    MarkupSlot,
    PlainForm,
    Raw,
    Template,
    TemplateGroup,
    add,
    filled,
    markup_template,
    shown_text,
    with_texts,
)
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText, Verbatim
from ziggurat.serve.text.sentences import SPACED
from ziggurat.serve.text.splitting import has_words, protected
from ziggurat.serve.text.tokens import Spellings, html_tokens
from ziggurat.system.errors import printable

_TARGET = r"""\(\s*+(?:<(?:[^<>\\\n]|\\.){0,500}+>
    |(?:\{\{[^{}\n]{0,200}+\}\}
      |\{%[^%\n]{0,200}+%\}
      |[^()\s<\\{]++
      |\{
      |\\\S|\((?:[^()\s\\]++|\\\S|\((?:[^()\s\\]|\\\S){0,100}+\)){0,20}+\)){0,50}+)
  (?:\s++(?:"(?:[^"\\]|\\.){0,300}+"|'(?:[^'\\]|\\.){0,300}+'|\((?:[^()\\]|\\.){0,300}+\)))?\s*+\)"""
_ENTITY = r"&(?:\#\d{1,7}|\#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});"
# Words in a formula are text between two dollars or escaped brackets, unless a character of TeX's syntax is among them.
_FORMULA = r"(?:(?=[^$]{0,300}?[\\^_={}])|(?![^$]{0,300}?[A-Za-z]{2,}\s[A-Za-z]{2,}))"
_INLINE = regex.compile(
    rf"""(?P<code>(?<!`)(?P<ticks>`{{1,8}})(?!`)[^`].{{0,500}}?(?<!`)(?P=ticks)(?!`))
      | (?P<comment><!--.{{0,1000}}?-->)
      | (?P<named>(?P<head>\{{[\w\-:]{{1,40}}\}}`)(?P<words>[^`<>\n]{{1,300}}?)(?P<tail>\x20*<[^<>`\n]{{1,300}}>`)
          |(?P<head>\[\[[^\[\]|\n]{{1,200}}\|)(?P<words>[^\[\]|\n]{{1,300}})(?P<tail>\]\]))
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
          |\[-?@\w[^\[\]\n]{{0,200}}\](?![(\[]))
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
          |\*\*|~~|__)
      | (?P<emphasis>[*_])""",
    flags=regex.VERBOSE | regex.DOTALL,
)
_BRACES = r"\{[^{}]{0,300}+\}"
# `{a + b}` in MDX, with nested braces.
_EXPRESSION = rf"(?P<shown>\{{(?:[^{{}}]|{_BRACES}|\{{(?:[^{{}}]|{_BRACES}){{0,300}}+\}}){{0,500}}+\}})"
_WITH_EXPRESSIONS = regex.compile(f"{_INLINE.pattern}|{_EXPRESSION}", flags=_INLINE.flags)
_TITLE = regex.compile(r"(?P<before>.*[\s\n])(?P<quote>[\"'])(?P<title>[^\n]+)(?P=quote)(?P<after>\s*\))")
_SIDES = regex.compile(r"(?P<blank>\s)|(?P<sign>[\p{P}\p{S}])|(?P<wide>[\p{Han}\p{Hiragana}\p{Katakana}])|(?P<word>.)")
_LONGEST_LABEL = 999  # CommonMark's


class Inline:
    """Reader of text with inline markup; `labels` are the file's link labels, folded."""

    def __init__(self, rules: MarkupRules, notices: TextNotices, *, is_mdx: bool = False) -> None:
        self.labels: set[str] = set()
        self.rules, self.notices, self.is_mdx = rules, notices, is_mdx

    def template(self, text: str, breaks: Sequence[str] = (), *, escaped: str = "", begins: bool = False) -> Template:
        """Return the template of text with inline markup.

        Args:
            text: lines separated by `\\n`.
            breaks: the file's text for each `\\n`: the line's end and the marks before the next line.
            escaped: characters with a special meaning in this text's place.
            begins: whether it is at the start of a paragraph.
        """
        reader = _Run(self, text, breaks, escaped)
        reader.read()
        line = breaks[0] if breaks else "\n"
        bare = "".join(piece for piece in reader.pieces if isinstance(piece, str))
        escaped += _marks_not_in(bare)
        spellings = _spellings(reader.pieces, reader.sources)
        form = MarkdownForm(spellings, escaped, begins, line, _respelt(reader), not ENDS_LINK.search(bare))
        template = filled(reader.pieces, form)
        form.is_whole = len(template) == 1
        return template

    def image(self, found: regex.Match[str], raw: str, escaped: str) -> EmptyElement:
        """Return an image, whose description is translated."""
        if not found["alt"].strip():
            return EmptyElement(raw)
        if "\n" in found["source"]:
            self.leave(raw)
            return EmptyElement(raw)
        shown = " ".join(unescape(found["alt"]).split("\n"))
        form = MarkdownForm(escaped=f"[]{escaped}{_marks_not_in(shown)}")
        form.spellings.add(shown, raw[2 : len(raw) - len(found["source"])])
        template: Template = ["![", MarkupSlot(SpannedText(shown), form)]
        add(template, _titled(found["source"], escaped))
        return EmptyElement(template)

    def tag(self, raw: str) -> Piece:
        """Return a tag, whose attributes that readers see are translated."""
        tokens = list(html_tokens(raw))
        token = tokens[0]
        if token.kind not in ("open", "close"):
            return EmptyElement(raw)
        written: Raw = raw
        if token.kind == "open" and is_translated(token) is not False and "\n" not in raw:
            is_tag = len(tokens) == 1  # otherwise there is a `>` in an expression of MDX
            written = with_texts(token, self.rules, self.notices) if is_tag else self.tag_texts(raw)
        if token.name not in HTML.inline - HTML.void:
            return EmptyElement(written, "\n" if token.name == "br" else "", is_seen=token.name in HTML.seen)
        return Close(raw, token.name) if token.kind == "close" else Open(written, token.name)

    def element(self, raw: str) -> Piece:
        """Return an element that is copied, or one that contains paragraphs."""
        tokens = list(html_tokens(raw))
        name = tokens[0].name
        if name in HTML.nested and is_translated(tokens[0]) is not False and "\n" not in raw:
            return EmptyElement(markup_template(tokens[1:-1], self.rules, self.notices), is_seen=name in HTML.seen)
        return Verbatim(raw, shown_text(tokens))

    def named(self, found: regex.Match[str]) -> list[Piece]:
        """Return a role of MyST (`{ref}`words <label>``) or a link of a wiki (`[[page|words]]`), by its pieces."""
        name = found["head"][0]
        if name == "[" and _PAGE.fullmatch(found["words"]):  # some wikis write [[words|page]]
            self.leave(found[0])
            return [Verbatim(found[0], "")]
        return [Open(found["head"], name * 2), found["words"], Close(found["tail"], name * 2)]

    def tag_texts(self, line: str) -> Template:
        """Return the template of a line with tags, also of a site generator: `{% tab title="Words" %}`."""
        template: Template = []
        at = 0
        for found in _TEXT_OF_TAG.finditer(line):
            text, (begin, end) = unescape(regex.sub(r"""\\(["'])""", r"\1", found["text"] or "")), found.span("text")
            if found["expression"]:
                self.leave(line[found.start() :])
            elif has_words(text, protected(text)) and not is_for_programs(text) and text not in ("true", "false"):
                slot = MarkupSlot(SpannedText(text), PlainForm())
                template += [line[at:begin], TemplateGroup([slot], finish=_unquoted(line[end], text, found["text"]))]
                at = end
        return [*template, line[at:]]

    def leave(self, raw: str) -> None:
        """Count text that stays untranslated."""
        self.notices.add("not_read", f"text {printable(raw, 60)}")


_PAGE = regex.compile(r"(?=.*[\-/.#_])\S+")
_OF_MARKDOWN = names_in("attribution fig-alt fig-cap tbl-cap")
"""_OF_MARKDOWN are attributes that hold text in MyST and Quarto only."""

_TEXT_OF_TAG = regex.compile(
    rf"""(?<![\w\-:.])(?i:{"|".join(sorted(PAGES.attributes | OF_COMPONENTS | _OF_MARKDOWN))})\s?=\s?
        (?:"(?P<text>(?:[^"\\{{}}<>\n]|\\"|[<>](?=[\s\-])){{1,1000}}+)"
          |'(?P<text>(?:[^'\\{{}}<>\n]|\\'|[<>](?=[\s\-])){{1,1000}}+)'
          |(?P<expression>\{{\s?["'`<]))""",
    flags=regex.VERBOSE,
)


def _unquoted(quote: str, text: str, raw: str) -> Callable[[str], str]:
    """Return the spelling of new text between two quotes, where no escape is reliable; `text` is spelled `raw`."""
    typographic = str.maketrans({quote: "”" if quote == '"' else "’", "\\": "/"})
    return lambda said: raw if said == text else said.translate(typographic)


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
        self.marks = (0, False, False)  # where the last marks of emphasis end, and whether they may open or close it
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
                self._emphasis(found.start(), raw)
            elif kind == "named":
                for piece in self.inline.named(found):
                    self._add(piece, piece if isinstance(piece, str) else "")
            elif kind == "tag":
                self._add(self.inline.tag(raw))
            elif kind == "kept":
                self._add(self.inline.element(raw))
            elif kind in ("template", "shown") and len(texts := self.inline.tag_texts(raw)) > 1:
                self._add(EmptyElement(texts))
            elif kind in ("escape", "entity"):
                said = raw[1:] if kind == "escape" else unescape(raw)
                if len(said) == 1 and (said.isprintable() or category(said) in ("Zs", "Cf")):
                    self.written.setdefault(said, raw)
                else:
                    said = raw
                self._add_text(said, raw)
            else:
                if kind == "shown" and SHOWN_EXPRESSION.search(raw):
                    self.inline.leave(raw)
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

    def _sides(self, begin: int) -> tuple[bool, bool]:
        """Return whether a mark may open emphasis and close it, by CommonMark's rules for the characters around it.

        Characters of Chinese and Japanese count as punctuation next to `*`, as expected in text without spaces.
        """
        if begin >= self.marks[0]:
            sign, end = self.text[begin], begin
            while self.text[end : end + 1] == sign:
                end += 1
            around = (self.text[begin - 1 : begin] or " ", self.text[end : end + 1] or " ")
            before, after = (str(_SIDES.match(each).lastgroup) for each in around)
            opens = after != "blank" and (after != "sign" or before != "word")
            closes = before != "blank" and (before != "sign" or after != "word")
            if sign == "_":
                opens, closes = opens and (not closes or before == "sign"), closes and (not opens or after == "sign")
            self.marks = (end, opens, closes)
        return self.marks[1:]

    def _emphasis(self, begin: int, raw: str) -> None:
        opens, closes = self._sides(begin)
        for number in reversed(range(len(self.opened))) if closes else ():
            if self.opened[number][0] == raw and self.opened[number][1] == len(self.pieces) - 1:  # it is empty
                self.opened.pop()
                self._as_text(-1, raw)
                self._add_text(raw)
                return
            if self.opened[number][0] == raw:
                self.closed.append((raw, self.opened.pop(number)[1], len(self.pieces)))
                self._add(Close(raw, raw))
                return
        if not opens:
            self._add_text(raw)
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
        written = Shortcut(raw, label, flat(inside)) if kind == "short" else _titled(raw, self.escaped)
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
    """Return the characters that would start code or a tag in a translation and are not text in the source."""
    return "".join(sign for sign in "`<" if sign not in text)


def _mark(kind: str, raw: str) -> Piece:
    if kind in ("code", "math"):
        return Verbatim(raw, raw.strip("`$").strip() if "\n" not in raw and "\r" not in raw else "")
    if kind == "shown":
        return Verbatim(raw, raw if raw.isprintable() and len(raw) <= 100 else "")
    if kind == "hard":
        return EmptyElement(raw, "\n")
    return EmptyElement(raw)


def _titled(raw: str, escaped: str) -> Raw:
    """Return the end of a link or image, with a slot for its title."""
    found = None if "\n" in raw else _TITLE.search(raw)
    if found is None:
        return raw
    form = MarkdownForm(escaped=found["quote"] + escaped)
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
