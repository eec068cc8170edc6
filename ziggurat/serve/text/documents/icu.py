"""Messages in ICU's MessageFormat: `{count, plural, one {# file} other {# files}}`, select, selectordinal, nested.

The texts of the branches are translated one by one; names, keywords, offsets and the layout between them are preserved.
An argument is shown to the model as `{count}` and handled like any placeholder.

https://unicode-org.github.io/icu/userguide/format_parse/messages/ describes how to read such a message, including `''`
and quoted braces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import regex

from ziggurat.serve.text.elements import PAGES
from ziggurat.serve.text.markup import Template, add, filled
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, Verbatim
from ziggurat.serve.text.tokens import Spelling, Spellings, Token, html_tokens

MAX_DEPTH = 20
"""MAX_DEPTH is the deepest nesting of arguments; a deeper message is not parsed."""

FORMATTED = regex.compile(r"(?<!\{)\{\s*+[^\s{},']++\s*+,\s*+[a-z]++\s*+[,}]|'[{}]'")
"""FORMATTED matches further syntax of such a message: an argument with a type, a quoted brace. A quoted `'{name}'` does
not count, because in most other formats it is a placeholder between quotation marks."""

_NAME = regex.compile(r"\s*+([^\s{},']++)\s*+")
_OFFSET = regex.compile(r"\s*+offset\s*+:\s*+\d++")
_SELECTOR = regex.compile(r"\s*+(?:=\s*+\d++|[^\s{},='#]++)\s*+\{")
_BLANKS = regex.compile(r"\s*+")
_QUOTED = regex.compile(r"((?:[^']++|'')*+)'?")  # an unclosed one extends to the end of the message
_ENDING = regex.compile(r"(?:<sup>)?\p{L}{1,3}\.?(?:</sup>)?|[.ºª]")
_EMPTY = frozenset(("br", "hr", "img", "input", "wbr"))
_STAND_IN = "\ue000"
"""_STAND_IN is a meaningless character that stands for an argument while the tags around it are read."""
_LONGEST_SHOWN = 100


class MessageError(ValueError):
    """A text is not a message in ICU's format."""


class IcuText(NamedTuple):
    """Text: `raw` is its spelling, `text` what readers see, `places` the index in `raw` of each character of `text`.

    Quoted text has one index, for its first character; its other characters have -1.
    """

    raw: str
    text: str
    places: list[int]

    def source(self, begin: int, end: int) -> str | None:
        """Return the spelling of these characters; None if that would split a quotation."""
        first, last = (self.places[at] if at < len(self.text) else len(self.raw) for at in (begin, end))
        return None if first < 0 or last < 0 else self.raw[first:last]


class Argument(NamedTuple):
    """An argument without branches, or the `#` of a plural, with its spelling."""

    raw: str
    name: str


class IcuChoice(NamedTuple):
    """An argument with branches: each is the spelling before its text, and its parts; `end` closes them all."""

    name: str
    kind: str
    branches: list[tuple[str, list[Part]]]
    end: str

    @property
    def plural(self) -> bool:
        """True if `#` stands for a number in its branches."""
        return self.kind != "select"

    @property
    def raw(self) -> str:
        """The spelling of the whole argument."""
        inner = (before + "".join(part.raw for part in branch) for before, branch in self.branches)
        return "".join(inner) + self.end


Tags: TypeAlias = Callable[[str], Iterable[Token]]
Part: TypeAlias = IcuText | Argument | IcuChoice


def parse(text: str) -> list[Part]:
    """Return the parts of a message, whose spellings joined are `text`. Raises MessageError."""
    return _Parser(text).message(0, plural=False)


class _Parser:
    """Reader of one message; `at` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def message(self, depth: int, *, plural: bool) -> list[Part]:
        """Return the parts up to the end, or to the brace that closes a branch."""
        if depth > MAX_DEPTH:
            raise MessageError("nested too deeply")
        parts: list[Part] = []
        said, places = list[str](), list[int]()
        first = self.at

        def end_text() -> None:
            nonlocal said, places
            if said:
                parts.append(IcuText(self.text[first : self.at], "".join(said), places))
            said, places = [], []

        while self.at < len(self.text):
            sign, begin = self.text[self.at], self.at
            if sign == "}":
                if not depth:
                    raise MessageError(f"an unmatched closing brace, at character {self.at}")
                break
            if sign == "{" or (sign == "#" and plural):
                end_text()
                if sign == "{":
                    parts.append(self._argument(depth))
                else:
                    parts.append(Argument("#", "#"))
                    self.at += 1
                first = self.at
                continue
            if sign == "'":
                said.append(self._quoted(plural=plural))
            else:
                said.append(sign)
                self.at += 1
            places += [begin - first, *[-1] * (len(said[-1]) - 1)]
        end_text()
        return parts

    def _quoted(self, *, plural: bool) -> str:
        """Return what an apostrophe and the text it quotes stand for."""
        following = self.text[self.at + 1 : self.at + 2]
        if following == "'":
            self.at += 2
            return "'"
        self.at += 1
        if not following or following not in ("{}#" if plural else "{}"):
            return "'"
        found = _QUOTED.match(self.text, self.at)
        self.at = found.end()
        return found[1].replace("''", "'")

    def _argument(self, depth: int) -> Argument | IcuChoice:
        begin = self.at
        name = self._take(_NAME, self.at + 1)[1]
        if self._next(",") == "}":
            return Argument(self.text[begin : self.at], name)
        kind = self._take(_NAME, self.at)[1].lower()
        if kind == "choice":
            raise MessageError("`choice`, which is not supported")
        if self._next(",") == "}":
            if kind in ("plural", "selectordinal", "select"):
                raise MessageError(f"`{kind}` without branches")
            return Argument(self.text[begin : self.at], name)
        if kind not in ("plural", "selectordinal", "select"):
            self._style()
            return Argument(self.text[begin : self.at], name)
        plural = kind != "select"
        if plural and (offset := _OFFSET.match(self.text, self.at)):
            self.at = offset.end()
        branches = []
        while found := _SELECTOR.match(self.text, self.at):
            self.at = found.end()
            before = self.text[begin : self.at]
            parts = self.message(depth + 1, plural=plural)
            branches.append((before, parts))
            begin = self.at
            self._next("")
        if not branches:
            raise MessageError(f"`{kind}` without branches")
        self.at = _BLANKS.match(self.text, self.at).end()
        self._next("")
        return IcuChoice(name, kind, branches, self.text[begin : self.at])

    def _take(self, pattern: regex.Pattern[str], at: int) -> regex.Match[str]:
        found = pattern.match(self.text, at)
        if found is None:
            raise MessageError(f"no name at character {at}")
        self.at = found.end()
        return found

    def _next(self, other: str) -> str:
        """Return the next character, which must be a closing brace or `other`."""
        sign = self.text[self.at : self.at + 1]
        if not sign or sign not in ("}", other):
            raise MessageError(f"no closing brace at character {self.at}")
        self.at += 1
        return sign

    def _style(self) -> None:
        """Skip the style of an argument and the brace that closes it."""
        depth = 0
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == "'":
                self._quoted(plural=False)
                continue
            self.at += 1
            depth += (sign == "{") - (sign == "}")
            if depth < 0:
                return
        raise MessageError("a style without an end")


# Templates


def icu_template(
    parts: Sequence[Part], notices: Counter[str], apostrophe: str = "''", tags: Tags | None = None
) -> Template:
    """Return the template of a message, in which each line is a paragraph.

    `apostrophe` is the spelling of an apostrophe that would quote. With `tags`, which yields tokens, texts are HTML.

    Endings of ordinal numbers (`{#st}`) are kept and counted, since no translation of them alone would be right.
    """
    doubled = _doubles(parts)
    return _Writer(notices, doubled, "''" if doubled else apostrophe, tags).template(parts, plural=False)


def _doubles(parts: Sequence[Part]) -> bool:
    """Return whether the message doubles its apostrophes; where that is optional, most messages do not."""
    waiting = list(parts)
    while waiting:
        part = waiting.pop()
        if isinstance(part, IcuChoice):
            waiting += [inner for _, branch in part.branches for inner in branch]
        elif isinstance(part, IcuText) and "''" in part.raw:
            return True
    return False


class _LineEnd(NamedTuple):
    """The end of a line, with its spelling; it separates paragraphs."""

    raw: str


@dataclass
class _Writer:
    """Builder of the templates of one message.

    Attributes:
        notices: counter of the endings that are kept, and of tags whose attributes have text.
        doubled: whether every apostrophe is doubled.
        apostrophe: the spelling of an apostrophe that would quote what follows.
        tags: yields the tokens of texts that are HTML.
    """

    notices: Counter[str]
    doubled: bool
    apostrophe: str
    tags: Tags | None

    def template(self, parts: Sequence[Part], *, plural: bool) -> Template:
        """Return the template of a message or a branch."""
        source = "".join(part.raw for part in parts if isinstance(part, IcuText)) if self.tags else ""
        form = _Form(self.doubled, self.apostrophe, plural, source)
        template: Template = []
        pieces: list[Piece] = []
        for piece in self._pieces(parts, form):
            if isinstance(piece, _LineEnd):
                template += [*filled(pieces, form), piece.raw]
                pieces = []
            else:
                pieces.append(piece)
        return [*template, *filled(pieces, form)]

    def _pieces(self, parts: Sequence[Part], form: _Form) -> Iterator[Piece | _LineEnd]:
        """Yield the pieces of a message or a branch, and the ends of its lines."""
        if self.tags is None or any(isinstance(part, IcuText) and _STAND_IN in part.text for part in parts):
            for part in parts:
                if isinstance(part, IcuText):
                    yield from form.text(part, 0, len(part.text), part.text)
                else:
                    yield self._argument(part)
            return
        # A tag may contain arguments, as in `<a href="{url}">`, so tags are searched for in the whole branch.
        shown = "".join(part.text if isinstance(part, IcuText) else _STAND_IN for part in parts)
        ends = list(accumulate(len(part.text) if isinstance(part, IcuText) else 1 for part in parts))

        def parts_in(begin: int, end: int) -> Iterator[tuple[Part, int, int]]:
            """Yield each part with characters in this range, with the range of its own characters inside it."""
            for number in range(bisect_right(ends, begin), len(parts)):
                start = ends[number - 1] if number else 0
                if start >= end:
                    return
                yield parts[number], max(begin, start) - start, min(end, ends[number]) - start

        begin = 0
        for token in self.tags(shown):
            end = begin + len(token.raw)
            if token.kind == "text":
                for part, first, last in parts_in(begin, end):
                    if isinstance(part, IcuText):
                        (said,) = (one.text for one in html_tokens(part.text[first:last]))
                        yield from form.text(part, first, last, said)
                    else:
                        yield self._argument(part)
            else:
                source = "".join(
                    form.source(part, first, last) if isinstance(part, IcuText) else part.raw
                    for part, first, last in parts_in(begin, end)
                )
                if any(token.attributes.get(name, "").strip() for name in PAGES.attributes):
                    self.notices["not_read"] += 1
                yield form.tag(token, source)
            begin = end

    def _argument(self, part: Argument | IcuChoice) -> Piece:
        if isinstance(part, IcuChoice):
            return self._choice(part)
        short = len(part.raw) <= _LONGEST_SHOWN and part.raw.isprintable()
        return Verbatim(part.raw, part.raw if short else f"{{{part.name}}}")

    def _choice(self, part: IcuChoice) -> Verbatim:
        """Return an argument with branches, whose texts become paragraphs."""
        raw: Template = []
        for before, branch in part.branches:
            raw.append(before)
            if part.kind == "selectordinal" and _is_ending(branch):
                self.notices["endings_kept"] += 1
                raw += [inner.raw for inner in branch]
            else:
                raw += self.template(branch, plural=part.plural)
        return Verbatim([*raw, part.end], f"{{{part.name}}}")


def _is_ending(parts: Sequence[Part]) -> bool:
    """Return whether a branch consists of a number and the letters attached to it."""
    if len(parts) != 2 or not isinstance(parts[0], Argument) or not isinstance(parts[1], IcuText):
        return False
    return _ENDING.fullmatch(parts[1].raw) is not None


@dataclass
class _Form:
    """Spelling of a message's texts: braces, and `#` in a plural, are quoted; apostrophes are escaped.

    Attributes:
        doubled: whether every apostrophe is doubled.
        apostrophe: the spelling of an apostrophe that would quote what follows.
        plural: whether `#` stands for a number.
        tags: source of the texts if they are HTML; otherwise empty.
        spellings: spellings of the source's texts.
    """

    doubled: bool
    apostrophe: str
    plural: bool
    tags: str
    spellings: Spellings = field(default_factory=Spellings)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tags, xml=False)

    def source(self, part: IcuText, begin: int, end: int) -> str:
        """Return the spelling of part of a text."""
        source = part.source(begin, end)
        return self._quoted(part.text[begin:end]) if source is None else source

    def text(self, part: IcuText, begin: int, end: int, said: str) -> Iterator[Piece | _LineEnd]:
        """Yield part of a text in lines; `said` is the part with its entities decoded."""
        if said != part.text[begin:end]:  # entities: its lines cannot be found by index
            self.spellings.add(said, self.source(part, begin, end))
            yield said
            return
        first = begin
        for found in regex.finditer(r"\r?\n|$", said):
            last = begin + found.start()
            if last > first:
                self.spellings.add(part.text[first:last], self.source(part, first, last))
                yield part.text[first:last]
            if found[0]:
                yield _LineEnd(self.source(part, last, last + len(found[0])))
            first = begin + found.end()

    def tag(self, token: Token, source: str) -> Piece:
        """Return a tag, spelt as `source`."""
        if token.kind in ("open", "close") and token.name not in _EMPTY:
            return (Open if token.kind == "open" else Close)(source, token.name)
        return EmptyElement(source, "\n" if token.name == "br" else "")

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        for piece in pieces:
            if not isinstance(piece, str):
                add(template, piece.raw)
            elif (known := self.spellings.next(piece)) is not None:
                template.append(known)
            else:
                template.append(self._quoted(self._spelling.of(piece) if self.tags else piece))
        return template

    def _quoted(self, text: str) -> str:
        special = "{}#" if self.plural else "{}"
        # At the end, the following text is unknown.
        text = regex.sub("'" if self.doubled else rf"'(?=['{special}]|$)", self.apostrophe, text)
        return regex.sub(rf"[{special}]++", lambda found: f"'{found[0]}'", text)
