"""Markup as templates of paragraphs: HTML, and XML whose text is written in the same way.

Some tags break sentences, others occur inside them, and some elements are copied. The rules are Bergamot's if it has
any: every element that is not listed as inline breaks a sentence.

A template is a list of strings, which are written unchanged, and slots for the translations of paragraphs. The content
of a mark (`raw`) may itself be a template: a tag with a translated attribute, a footnote in the middle of a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from html import unescape
from typing import Protocol, TypeAlias

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.elements import (
    HTML,
    MarkupRules,
    Wishes,
    in_target,
    names_in,
    shown_blank,
    text_attributes,
    turns,
)
from ziggurat.serve.text.pairing import marked
from ziggurat.serve.text.paragraphs import original_pieces, paragraphs
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText, Verbatim
from ziggurat.serve.text.sentences import Options, Result, SentenceRequests
from ziggurat.serve.text.tokens import (
    ATTRIBUTE,
    MAX_XML_DEPTH,
    Spelling,
    Spellings,
    Token,
    element_ends,
    html_tokens,
    read_xml,
)
from ziggurat.system.errors import DataError, printable


class Form(Protocol):
    """Rules by which a format writes the pieces of a translated paragraph."""

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots of nested paragraphs."""


@dataclass(eq=False)
class MarkupSlot:
    """A slot for a paragraph."""

    text: SpannedText
    form: Form


@dataclass(eq=False)
class TemplateGroup:
    """A part of a template that is written as a whole.

    Attributes:
        template: the part.
        source: the file's spelling of it, which is kept if none of its paragraphs changed; its slots are also in
            `template` or in that one's marks.
        finish: a final step applied to the text, such as checking its length.
    """

    template: Template
    source: Template | None = None
    finish: Callable[[str], str] | None = None


Template: TypeAlias = "list[str | MarkupSlot | TemplateGroup]"
Raw: TypeAlias = "str | Template"


@dataclass
class MarkupForm:
    """Paragraphs of HTML or XML: text is escaped, marks are written unchanged.

    Attributes:
        raw: the source of the paragraph, whose entities are reused.
        spellings: the sources of the texts in it, by text.
        xml: whether every `&` must be an entity.
        quote: the quote around an attribute's value; empty for text.
        escape: the format's own escaping of text, applied before that of markup.
    """

    raw: str
    spellings: Spellings = field(default_factory=Spellings)
    xml: bool = False
    quote: str = ""
    escape: Callable[[str], str] = str

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
                    said = self._spelling.of(self.escape(piece))
                    if self.quote:
                        said = said.replace(self.quote, "&quot;" if self.quote == '"' else "&#39;")
                template.append(said)
            else:
                add(template, piece.raw)
        return template


class PlainForm:
    """Paragraphs of text without escapes: text and marks are written unchanged."""

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        for piece in pieces:
            add(template, piece if isinstance(piece, str) else piece.raw)
        return template


def add(template: Template, raw: Raw) -> None:
    """Append the content of a mark to a template."""
    if isinstance(raw, str):
        template.append(raw)
    else:
        template += raw


def filled(pieces: Sequence[Piece], form: Form) -> Template:
    """Return the template of a run of pieces: slots for its paragraphs, and the dividers."""
    template: Template = []
    for part in marked(pieces):
        if isinstance(part, SpannedText):
            template.append(MarkupSlot(part, form))
        else:
            add(template, part.raw)
    return template


def slots(template: Template) -> Iterator[MarkupSlot]:
    """Yield the slots of a template and of those in its marks, in the order of the document."""
    waiting: Template = list(reversed(template))
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            continue
        if isinstance(part, TemplateGroup):
            waiting += reversed(part.template)
            continue
        yield part
        nested: Template = []
        for mark in part.text.all_marks():
            for raw in (mark.piece.raw, mark.close.raw if mark.close else ""):
                if not isinstance(raw, str) and isinstance(raw, list):
                    nested += raw
        waiting += reversed(nested)


def written(template: Template, options: Options, notices: Counter[str]) -> SentenceRequests[str]:
    """Yield the texts of a template's paragraphs to translate; return the finished document."""
    places = list(slots(template))
    done = yield from paragraphs([slot.text for slot in places], options, notices)
    pieces = {id(slot): said for slot, said in zip(places, done, strict=True)}
    return _text_of(template, pieces)


def _text_of(template: Template, pieces: Mapping[int, list[Piece]]) -> str:
    """Return the text of a template, with the pieces of each slot looked up by its id."""
    out: list[str] = []
    waiting: Template = list(reversed(template))
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, MarkupSlot):
            said = pieces[id(part)] if id(part) in pieces else original_pieces(part.text)  # only in a source
            waiting += reversed(part.form.write(said))
        elif part.finish is not None:
            out.append(part.finish(_text_of(part.template, pieces)))
        else:
            is_same = all(pieces[id(slot)] == original_pieces(slot.text) for slot in slots(part.template))
            waiting += reversed(part.source if is_same and part.source is not None else part.template)
    return "".join(out)


_LONGEST_COPY = 100
"""_LONGEST_COPY is the maximum length of a copied element whose text the model sees; more would confuse the model."""

# Copied elements whose text is hidden from the reader or does not belong to the sentence.
_UNREAD = names_in("iframe math metadata noembed noframes rp rt rtc script style") | HTML.nested
_MOST_NESTED = 8
"""_MOST_NESTED is how deeply paragraphs of HTML may be nested; deeper ones divide those around them."""
_IN_WORDS = names_in("sub sup ruby rb wbr tt bdi bdo text:ruby text:ruby-base")  # elements inside words
_STYLES = names_in("b i em u s font big small strike strong ins del g pc text:span")
_BESIDE = regex.compile(r"[^\s(\[{«“‘„¿¡/\-][^\s\p{P}]")  # there is no space in between, although one is needed
_CODE, _RUBY = names_in("code kbd samp var"), names_in("ruby rb")
_DIVIDING = names_in("pre textarea xmp plaintext")  # copied elements that stand between sentences
_GAP = regex.compile(r"\s{2,}+")
_QUOTED_EXPRESSION = regex.compile(r"\{\s*+[\"'`<]")


def html(text: str, options: Options, rules: MarkupRules = HTML) -> SentenceRequests[Result[str]]:
    """Yield the texts of HTML, a document or a fragment, to translate; return it with nothing added around it."""
    return (yield from page(list(html_tokens(text)), options, rules))


def page(tokens: Sequence[Token], options: Options, rules: MarkupRules) -> SentenceRequests[Result[str]]:
    """Yield the texts of a page, or of a part of one, in HTML or XHTML, to translate; return the finished page."""
    notices = TextNotices()
    if turns(rules.languages) and not any(token.name == "html" for token in tokens):
        notices["direction"] += 1
    said = yield from written(markup_template(tokens, rules, notices), options, notices)
    return Result(said, notices)


def xml(text: str, options: Options, rules: MarkupRules) -> SentenceRequests[Result[str]]:
    """Yield the texts of XML to translate; return the finished XML.

    It is a document, or a fragment with several elements or with text next to them.
    Raises DataError, when started, if it is not well-formed.
    """
    notices = TextNotices()
    said = yield from written(markup_template(xml_tokens(text), rules), options, notices)
    return Result(said, notices)


def xml_tokens(text: str) -> list[Token]:
    """Return the tokens of a document or a fragment. Raises DataError if it is not well-formed."""
    try:
        return read_xml(text, "the text").tokens
    except DataError:
        return read_xml(f"<x>{text}</x>", "the text").tokens[1:-1] if text else []


def markup_template(tokens: Sequence[Token], rules: MarkupRules, notices: TextNotices | None = None) -> Template:
    """Return the template of markup; content that may be text but is not translated is counted in `notices`."""
    return _Segmenter(tokens, rules, TextNotices() if notices is None else notices).template()


def _one_line_end(gap: str) -> str:
    """Return white space of the same length that keeps only its first line end."""
    head, end, rest = gap.partition("\n")
    return head + end + (" " * len(rest) if "\n" in rest else rest)


class _Segmenter:
    """Collects runs of text and inline tags between tags that break sentences."""

    def __init__(self, tokens: Sequence[Token], rules: MarkupRules, notices: TextNotices, depth: int = 0) -> None:
        self.tokens, self.rules, self.notices, self.depth = tokens, rules, notices, depth
        self.ends = element_ends(tokens, rules.void, rules.inline - _RUBY | _CODE, xml=rules.xml)
        self.done: Template = []
        self.run: list[Piece] = []
        self.run_raw: list[Token] = []
        self.last = ""  # last character of the run's text
        self.most_nested = MAX_XML_DEPTH if rules.xml else _MOST_NESTED
        self.wishes = Wishes(tokens, self.ends, rules.void, rules.languages[0], notices)

    def template(self) -> Template:
        place = 0
        while place < len(self.tokens):
            token, becomes = self.tokens[place], self.wishes.of(place)
            if becomes == "taken":
                place = self._take(place, token)
            elif becomes == "copied":
                self._copy(place, self.ends[place], token.raw)
                place = self.ends[place] + 1
            else:
                takes = token.kind in ("open", "empty") and self.wishes.takes(token)  # an element without content
                self._divide(self._raw(token) if takes else token.raw)
                place += 1
        self._flush()
        return self.done

    def _take(self, place: int, token: Token) -> int:
        """Take the token at `place`, which is translated, and return the next index."""
        name = token.name
        is_void = token.kind == "empty" or name in self.rules.void
        if token.kind == "text":
            token = token._replace(text=self._collapsed(token.text))
            self._add(token, token.text)
        elif token.kind == "other":
            if token.raw.startswith("<!--"):
                self._add(token, EmptyElement(token.raw))
            else:
                self._divide(token.raw)
        elif token.kind == "close":
            # The end tag of a void element has no meaning, except that browsers read `</br>` as a break.
            if name in self.rules.inline and name not in self.rules.void:
                self._add(token, Close(token.raw, name))
            else:
                self._divide(token.raw)
        elif not is_void and name in self.rules.copied and place in self.ends:
            self.wishes.tell_unread(place)
            self._copy(place, self.ends[place], self._raw(token))
            return self.ends[place] + 1
        elif name in self.rules.spaces and token.kind == "empty":
            self._add(token, EmptyElement(token.raw, " "))
        elif name in self.rules.points or (name in self.rules.nested and self.depth < self.most_nested):
            end = self.ends.get(place, place)
            inside = "".join(part.text for part in self.tokens[place + 1 : min(end, place + 4)])
            blank = shown_blank(token, inside) if name in self.rules.points else ""
            self._add(
                token._replace(kind="other"), EmptyElement(self._whole(place, end), blank, name in self.rules.seen)
            )
            return end + 1
        elif name in self.rules.blank:
            if self._goes_on(place):
                self._add(token, EmptyElement(self._raw(token), self._collapsed("\n")))
            else:
                self._divide(self._raw(token))
        elif name not in self.rules.inline:
            self._divide(self._raw(token))
        else:
            self._inline(place, token, is_void=is_void)
        return place + 1

    def _inline(self, place: int, token: Token, *, is_void: bool) -> None:
        """Take the opening tag of an inline element, which divides the text if another element ends right before it."""
        if is_void:
            self._add(token, EmptyElement(self._raw(token), is_seen=token.name in self.rules.seen))
            return
        if self.run and isinstance(self.run[-1], Close) and self._are_two(place):
            self._flush()
        self._add(token, Open(self._raw(token), token.name))

    def _are_two(self, place: int) -> bool:
        """Return whether the text before the element at `place` and the text inside it are two texts, not one word."""
        texts = (t.text for t in self.tokens[place : place + 8] if t.kind == "text" and t.text)
        after = next(texts, "")[:1]
        token, ended, before = self.tokens[place], self.run_raw[-1], self.last
        if {token.name, ended.name} & _IN_WORDS or not _BESIDE.fullmatch(f"{before}{after}"):
            return False
        # Programs that write pages split words only at changes of style.
        is_styled = token.name in _STYLES or (token.name == "span" and {"style", "lang"} & token.attributes.keys())
        return not (is_styled and before.isalpha() and after.islower())

    def _collapsed(self, text: str) -> str:
        """Return text without repeated line ends, if the format requires it, because a splitter would split there."""
        if not self.rules.collapses or "\n" not in text:
            return text
        text = _GAP.sub(lambda found: _one_line_end(found[0]), text)
        gap = len(text) - len(text.lstrip())
        return _one_line_end(f"\n{text[:gap]}")[1:] + text[gap:] if self.last == "\n" else text

    def _add(self, token: Token, piece: Piece) -> None:
        self.run.append(piece)
        self.run_raw.append(token)
        shown = piece.blank if isinstance(piece, EmptyElement) else piece if isinstance(piece, str) else ""
        self.last = shown[-1:] or self.last

    def _divide(self, raw: Raw) -> None:
        self._flush()
        add(self.done, raw)

    def _flush(self) -> None:
        if self.run:
            texts = [token for token in self.run_raw if token.kind == "text"]
            spellings = Spellings()
            for token in texts:
                spellings.add(token.text, token.raw)
            raw = "".join(token.raw for token in texts)
            form = MarkupForm(raw, spellings, self.rules.xml, escape=self.rules.escape)
            self.done += filled(self.run, form)
            self.run, self.run_raw, self.last = [], [], ""

    def _copy(self, place: int, end: int, tag: Raw) -> None:
        """Take an element that is copied unchanged, except for translated parts of its tag."""
        inside = self.tokens[place : end + 1]
        rest = "".join(token.raw for token in inside[1:])
        raw = tag + rest if isinstance(tag, str) else [*tag, rest]
        name = self.tokens[place].name
        if name in _DIVIDING or name not in self.rules.inline | self.rules.copied:
            self._divide(raw)
        else:
            shown = shown_text(inside)
            is_seen = not shown and name in self.rules.seen
            self.run.append(EmptyElement(raw, is_seen=True) if is_seen else Verbatim(raw, shown))
            self.run_raw.append(Token("other", ""))

    def _whole(self, place: int, end: int) -> Raw:
        """Return an element with its content: unchanged, or with its paragraphs as slots."""
        inside = list(self.tokens[place : end + 1])
        if inside[0].name in self.rules.points:
            return "".join(token.raw for token in inside)
        if place == end and self.rules.xml:
            return self._raw(inside[0])
        last = [inside.pop()] if inside[-1].kind == "close" and inside[-1].name == inside[0].name else []
        nested = _Segmenter(inside[1:], self.rules, self.notices, self.depth + 1).template()
        template: Template = []
        add(template, self._raw(inside[0]))
        return [*template, *nested, *(token.raw for token in last)]

    def _goes_on(self, place: int) -> bool:
        """Return whether a sentence continues after a break: lower case follows, or a comma precedes it."""
        before = next((p.rstrip() for p in reversed(self.run) if isinstance(p, str) and p.strip()), "")
        for token in self.tokens[place + 1 : place + 8]:
            if token.kind == "text" and token.text.strip():
                return bool(before) and (token.text.lstrip()[0].islower() or before[-1] in ",;(–-")
            if token.kind in ("open", "close", "empty") and (
                token.name not in self.rules.inline or token.name in self.rules.blank
            ):
                return False
        return False

    def _raw(self, token: Token) -> Raw:
        """Return a tag with its original spelling, with slots for the attributes that are translated."""
        if token.name not in self.rules.copied:
            is_block = token.name not in self.rules.inline | self.rules.void | self.rules.blank
            token = in_target(token, self.rules.languages, is_block=is_block)
        has_texts = any(token.attributes[name].strip() for name in _texts_of(token, self.rules))
        return with_texts(token, self.rules, self.notices) if has_texts and self.wishes.takes(token) else token.raw


def _texts_of(token: Token, rules: MarkupRules) -> Set[str]:
    """Return the names of a tag's attributes that are text by these rules."""
    names = rules.attributes | (text_attributes(token) if rules.attributes else frozenset())
    return names & token.attributes.keys()


def with_texts(token: Token, rules: MarkupRules, notices: TextNotices) -> Template:
    """Return a tag with slots for the attributes that are text by these rules; text in an expression is counted."""
    names = _texts_of(token, rules)
    if any(_QUOTED_EXPRESSION.match(token.attributes[name]) for name in names):  # title={"Words"} in MDX
        notices.add("not_read", f"element {printable(token.raw, 60)}")
    return with_attributes(token, names, xml=rules.xml, escape=rules.escape)


def with_attributes(token: Token, names: Set[str], *, xml: bool, escape: Callable[[str], str] = str) -> Template:
    """Return a tag with slots for the attributes of these names, given in lower case."""
    template: Template = []
    begin = 0
    for found in ATTRIBUTE.finditer(token.raw, 1 + len(token.name)):
        group = found.lastindex or 1  # 1: there is no value
        text = unescape(found[group]) if group > 1 else ""
        is_expression = group == 4 and text.startswith("{")
        if found[1].lower() in names and text.strip() and not is_expression:
            quote = '"' if group == 4 else token.raw[found.start(group) - 1]
            form = MarkupForm(found[group], Spellings(), xml, quote, escape)
            form.spellings.add(text, found[group])
            slot = MarkupSlot(SpannedText(text), form)
            # A value without quotes gets them only if it changes, since a translation may have spaces.
            value = TemplateGroup([quote, slot, quote], source=[slot]) if group == 4 else slot
            template += [token.raw[begin : found.start(group)], value]
            begin = found.end(group)
    return [*template, token.raw[begin:]]


def shown_text(element: Sequence[Token]) -> str:
    """Return the text of a copied element, given as tokens, that the model sees."""
    text = "" if element[0].name in _UNREAD else "".join(token.text for token in element)
    return text if text == text.strip() and len(text) <= _LONGEST_COPY and "\n" not in text else ""
