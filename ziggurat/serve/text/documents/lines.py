"""Plain text, HTML pages and subtitles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import unescape

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.elements import PAGES
from ziggurat.serve.text.files import Charset, Settings, decoded, is_same
from ziggurat.serve.text.markup import (
    Form,
    MarkupForm,
    MarkupSlot,
    PlainForm,
    Template,
    TemplateGroup,
    add,
    page,
    written,
)
from ziggurat.serve.text.pairing import marked
from ziggurat.serve.text.paragraphs import plain_text
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import Spellings, Token, Xml, html_tokens, read_xml
from ziggurat.system.errors import DataError

LINE = regex.compile(r"[^\r\n]*+(?:\r\n|\n|\r)|[^\r\n]++")
"""LINE matches a line with its end; str.splitlines would also split at other characters."""


def file_work(
    template: Template, form: Charset | Xml, settings: Settings, notices: TextNotices
) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of a template to translate; return the file, encoded as its form requires."""
    said = yield from written(template, settings.options, notices)
    return Result(form.encoded(said), notices)


def text_file(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of plain text to translate, in which each line is a paragraph; return the file."""
    text, charset = decoded(content, name)
    outcome = yield from plain_text(text, settings.options)
    return Result(charset.encoded(outcome.value), outcome.notices)


# Pages

# Where browsers look for the character set: an XML declaration, or a `meta` outside comments.
_DECLARED = regex.compile(
    r"""<!--.*?(?:-->|$)
      | (?:^\s*+<\?xml\b[^>]*?\bencoding\s*+=\s*+["'] | <meta\b[^>]*?\bcharset\s*+=\s*+["']?+\s*+)
        (?P<label>[A-Za-z0-9][A-Za-z0-9_.:+-]{0,40})(?=[\s"'/>;])""",
    flags=regex.VERBOSE | regex.DOTALL | regex.IGNORECASE,
)
_HEAD = 4096
"""_HEAD is the number of characters searched for it."""


def html_file(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of an HTML page to translate, or of XHTML by its name; return the page.

    It is read in the character set that it declares, or else UTF-8.

    Characters that the set lacks become references. A page that is UTF-8 but declares another set gets a correct
    declaration, and a page that declares the source language then declares the target language.

    Raises DataError for XHTML that is not well-formed.
    """
    labels = [found["label"] for found in _DECLARED.finditer(content[:_HEAD].decode("latin-1")) if found["label"]]
    text, charset = decoded(content, name, labels[0] if labels else "")
    if not charset.declared:
        text = _DECLARED.sub(_utf8_declared, text[:_HEAD]) + text[_HEAD:]
    is_xml = name.lower().endswith((".xhtml", ".xht"))  # browsers also go by the name of a file
    rules = replace(PAGES, xml=is_xml, languages=(settings.source, settings.target))
    tokens = _xhtml_tokens(text, name) if is_xml else list(html_tokens(text))
    outcome = yield from page(tokens, settings.options, rules)
    errors = "replace" if charset.codec.startswith("utf") else "xmlcharrefreplace"
    return Result(charset.encoded(outcome.value, errors), outcome.notices)


def _xhtml_tokens(text: str, name: str) -> list[Token]:
    """Return the tokens of XHTML, in which `<script/>` is a whole element.

    Raises DataError if it is not well-formed.
    """
    try:
        return read_xml(text, name).tokens
    except DataError as error:
        raise DataError(f"{error}; if it is HTML, give it a name that ends in .html") from None


def _utf8_declared(found: regex.Match[str]) -> str:
    """Return a declaration that names UTF-8."""
    return found[0] if found["label"] is None else found[0].removesuffix(found["label"]) + "utf-8"


# Subtitles

# Times as players accept them: spaces inside, any number of digits, no milliseconds, colons and points for commas.
_TIME = r"-?+\d++(?:\s*+[:.,;]\s*+\d++){1,4}+"
_TIMES = regex.compile(rf"[\s\ufeff]*+{_TIME}\s*+-->\s*+{_TIME}(?:\s(?P<rest>.*+)|\D?+)")
_SETTINGS = regex.compile(
    r"(?:\s*+\w++:\S++)*+\s*+"
)  # settings in WebVTT, coordinates in SubRip; players show no other text
_STAMP = r"(?<!\d)\d{1,9}+(?:\s?[:.,;]\s?\d{1,9}+){2,4}+"
_STAMPS = regex.compile(_STAMP)
_WITH_ARROW = regex.compile(rf"{_STAMP}\s?-->\s?{_STAMP}")
_SHORT = regex.compile(r"\d[:.,;]\d")
_ARROW = regex.compile(  # after a line recognised as times only by the number before it
    r"\s*+\d.*?(?:(?<![-=])[-=]++\s?>|[–—]>|→)\s*+\d.*+"
)
_NUMBER = regex.compile(r"\W*+\d++\W*+")
_LANGUAGE = regex.compile(r"Language[ \t]*+:[ \t]*+([A-Za-z][\w\-]*+)(?=\s*+$)", flags=regex.IGNORECASE)
_NO_CUE = ("NOTE", "STYLE", "REGION")
_IMAGE = regex.compile(r"\S+\.(?:jpe?g|png|webp|gif|avif)(?:#\S*)?", flags=regex.IGNORECASE)
_LETTER = regex.compile(r"\p{L}")
_CUE_TAGS = frozenset(("b", "i", "u", "s", "font", "c", "v", "lang", "ruby", "rt"))
_OVERRIDE = regex.compile(r"\{\\[^{}]*+\}|<\d[\d:.]*+>")
_ESCAPE = regex.compile(rf"{_OVERRIDE.pattern}|\\[Nnh]")  # in SubRip: a line end, two spaces
_SPEAKER = regex.compile(r"\s*[-–—]\s*")


def srt(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of SubRip subtitles to translate, cue by cue; return the file with its numbers and times."""
    return (yield from _subtitles(content, name, settings, entities=False))


def vtt(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of WebVTT to translate, cue by cue; return the file with its settings, notes and styles."""
    return (yield from _subtitles(content, name, settings, entities=True))


def _subtitles(content: bytes, name: str, settings: Settings, *, entities: bool) -> SentenceRequests[Result[bytes]]:
    text, charset = decoded(content, name)
    lines = LINE.findall(text)
    cues = _Cues(_in_target(lines, settings) if entities else lines, is_web=entities)
    return (yield from file_work(cues.template(), charset, settings, cues.notices))


def _in_target(lines: Sequence[str], settings: Settings) -> list[str]:
    """Return the lines of WebVTT; if the header states the source's language, that is replaced by the translation's."""
    end = next((number for number, line in enumerate(lines) if not line.strip() or "-->" in line), len(lines))
    head = list(lines[:end])
    for number, line in enumerate(head):
        found = _LANGUAGE.match(line)
        if found and settings.source and settings.target and is_same(found[1], settings.source):
            head[number] = line[: found.start(1)] + settings.target + line[found.end(1) :]
    return [*head, *lines[end:]]


class _Cues:
    """Reader of subtitles as players read them.

    Times start a cue wherever they occur, with or without an empty line before them; a line of digits before them is
    the cue's number. In SubRip everything up to the next cue is its text, even after empty lines. In WebVTT an empty
    line ends a cue, a line of spaces does not, and players ignore a block without times.
    """

    def __init__(self, lines: Sequence[str], *, is_web: bool) -> None:
        self.lines, self.is_web = lines, is_web
        self.notices = TextNotices()
        self.done: Template = []
        self.cue: list[str] = []
        self.times = 0  # index of the cue's line of times
        self.block: list[str] = []  # lines outside cues since the last empty one

    def template(self) -> Template:
        """Return the template of the file."""
        in_cue = has_cues = False
        for place, line in enumerate(self.lines):
            body = line.rstrip("\r\n")
            if self._begins(place):
                is_second = self.cue and body.lstrip().startswith("-->") and _is_time(self.cue[-1])
                half = [self.cue.pop()] if is_second else []  # half of the times
                number = [self.cue.pop()] if self.cue and _NUMBER.fullmatch(self.cue[-1].strip()) else []
                self._flush()
                self.done += [*number, *half, line]
                self.block, self.times = [], place
                in_cue = has_cues = True
                times = _TIMES.fullmatch(body)
                if times is None:
                    self._count("times_unread", place)
                elif not _SETTINGS.fullmatch(times["rest"] or ""):
                    self._count("not_shown", place)
            elif (
                in_cue and place == self.times + 1 and _is_time(body) and self.lines[self.times].rstrip().endswith(">")
            ):
                self.done.append(line)
            elif in_cue and (body if self.is_web else body.strip()):
                self.cue.append(line)
            else:
                self._flush()
                self.done.append(line)
                in_cue = in_cue and not self.is_web
                self._outside(place, body)
        self._flush()
        self._outside(len(self.lines), "")
        if not has_cues and any(map(_LETTER.search, self.lines[self.is_web :])):
            self._count("no_cues", 0)
        return self.done

    def _begins(self, place: int) -> bool:
        line = self.lines[place].rstrip("\r\n")
        if self.is_web:
            return "-->" in line
        if _TIMES.fullmatch(line) or _is_like_times(line):
            return True
        return bool(place and _NUMBER.fullmatch(self.lines[place - 1].strip()) and _ARROW.fullmatch(line))

    def _outside(self, place: int, body: str) -> None:
        """Take a line outside cues: text there is not shown, and not translated."""
        if body.strip():
            self.block.append(body)
            return
        block, self.block = self.block, []
        is_head = place == len(block) and self.is_web
        if block and not is_head and not block[0].startswith(_NO_CUE) and any(map(_LETTER.search, block)):
            self._count("not_shown", place - len(block))

    def _count(self, kind: str, place: int) -> None:
        self.notices.add(kind, f"line {place + 1}")

    def _flush(self) -> None:
        if self.cue:
            is_data = self.is_web and _is_data("".join(self.cue).strip())
            if is_data:
                self._count("data_cues", self.times)
            self.done += self.cue if is_data else [_cue(self.cue, entities=self.is_web)]
            self.cue = []


def _is_like_times(line: str) -> bool:
    """Return whether a line has times that no player accepts, with another arrow or in brackets: it is not text."""
    if _WITH_ARROW.search(line):
        return True
    if _LETTER.search(line.replace("&gt;", "")):
        return False
    return len(_STAMPS.findall(line)) > 1 or ("-->" in line and _SHORT.search(line) is not None)


def _is_time(line: str) -> bool:
    return not _LETTER.search(line) and _STAMPS.search(line) is not None


def _is_data(text: str) -> bool:
    """Return whether a cue is for programs: JSON, or the address of an image."""
    if text[:1] in ("{", "[") and text[-1:] in ("}", "]"):
        try:
            return isinstance(json.loads(text), dict | list)
        except (ValueError, RecursionError):
            return False
    return bool(_IMAGE.fullmatch(text))


@dataclass
class _CueForm:
    """Spelling of a cue's paragraph: none of its lines is empty, and nothing in it can be read as times.

    Attributes:
        form: spelling of text and marks.
        is_web: whether the file is WebVTT.
        is_after, is_before: whether text of the same cue precedes it, and follows it.
    """

    form: Form
    is_web: bool
    is_after: bool
    is_before: bool

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots, with only those line ends that stand between texts."""
        kept: list[Piece] = []
        last: int | None = None  # index of the last line end
        has_text = self.is_after  # whether text follows it
        for piece in pieces:
            if isinstance(piece, EmptyElement) and piece.blank == "\n" and not piece.raw.strip():
                if has_text:
                    last, has_text = len(kept), False
                    kept.append(piece)
            elif isinstance(piece, str):
                text = _BLANKS.sub(lambda blanks: " " if _ENDS.search(blanks[0]) else blanks[0], piece)
                text = text if self.is_web else text.replace("-->", "→")
                has_text = has_text or bool(text.strip())
                kept.append(text)
            else:
                kept.append(piece)
        if last is not None and not has_text and not self.is_before:
            del kept[last]
        return self.form.write(kept)


_BLANKS = regex.compile(r"\s++")
_ENDS = regex.compile(r"[\n\r\v\f\x85\u2028\u2029]")
_SIGNS = regex.compile(r"<rt(?:\.[^<>]*+)?>.*?(?:</rt>|(?=</ruby>|<rt[.>]))")
_EMPTY_LINE = regex.compile(r"(?:^|(?<=\n)|(?<=\r)(?!\n))(?:\r\n|\n|\r)")


def _cue(lines: Sequence[str], *, entities: bool) -> TemplateGroup:
    """Return the template of a cue: its lines form one text, unless each belongs to a different speaker.

    `entities`: `&amp;` is one letter, as in WebVTT; SubRip has tags but no entities.
    """
    template: Template = []
    pieces: list[Piece] = []
    spellings = Spellings()
    form = MarkupForm("".join(lines), spellings) if entities else PlainForm()
    begin, is_first = 0, True  # index of the text's first line; whether it has had no piece of text so far
    for number, line in enumerate(lines):
        body = line.rstrip("\r\n")
        if not body.strip():
            template.append(line)
            begin = number + 1
            continue
        for token in _with_signs(body) if entities else html_tokens(body):
            name = token.name.split(".")[0]
            if token.kind == "text":
                for piece in _cue_text(token.raw, is_first=is_first, is_web=entities):
                    if entities and isinstance(piece, str):
                        spellings.add(text := unescape(piece) or piece, piece)
                        piece = text
                    is_first = is_first and not isinstance(piece, str)
                    pieces.append(piece)
            elif token.kind in ("open", "close") and name in _CUE_TAGS:
                pieces.append(Open(token.raw, name) if token.kind == "open" else Close(token.raw, name))
            else:
                pieces.append(EmptyElement(token.raw, "\n" if name == "br" and not entities else ""))
        end = line[len(body) :]
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if not following.strip() or _SPEAKER.match(following):
            source = "".join(lines[begin : number + 1]).removesuffix(end) if end else "".join(lines[begin : number + 1])
            template += [TemplateGroup(_text_template(pieces, form, is_web=entities), source=[source]), end]
            pieces, begin, is_first = [], number + 1, True
        else:
            pieces.append(EmptyElement(end, "\n"))
    return TemplateGroup(template, finish=lambda text: _EMPTY_LINE.sub("", text))


def _text_template(pieces: Sequence[Piece], form: Form, *, is_web: bool) -> Template:
    """Return the template of one text in a cue, in which unpaired tags divide paragraphs."""
    parts = marked(pieces)
    written = [number for number, part in enumerate(parts) if isinstance(part, SpannedText) and part.text.strip()]
    first, last = (written[0], written[-1]) if written else (len(parts), -1)
    template: Template = []
    for number, part in enumerate(parts):
        if isinstance(part, SpannedText):
            template.append(MarkupSlot(part, _CueForm(form, is_web, number > first, number < last)))
        else:
            add(template, part.raw)
    return template


def _with_signs(body: str) -> Iterator[Token]:
    """Yield the tokens of a line of WebVTT; a ruby annotation (`<rt>`) is one token, including its content."""
    begin = 0
    for found in _SIGNS.finditer(body):
        yield from html_tokens(body[begin : found.start()])
        yield Token("other", found[0])
        begin = found.end()
    yield from html_tokens(body[begin:])


def _cue_text(text: str, *, is_first: bool, is_web: bool) -> list[Piece]:
    """Return text with points in it: overrides (`{\\an8}`), times (`<00:01.5>`), `\\N`, the dash at a line's start."""
    pieces: list[Piece] = []
    begin = 0
    for found in (_OVERRIDE if is_web else _ESCAPE).finditer(text):
        if found.start() > begin:
            pieces.append(text[begin : found.start()])
        pieces.append(EmptyElement(found[0], {"\\N": "\n", "\\n": " ", "\\h": " "}.get(found[0], "")))
        begin = found.end()
    rest = text[begin:]
    if is_first and not any(isinstance(piece, str) for piece in pieces) and (dash := _SPEAKER.match(rest)):
        pieces.append(EmptyElement(dash[0]))
        rest = rest[dash.end() :]
    return [*pieces, rest] if rest else pieces
