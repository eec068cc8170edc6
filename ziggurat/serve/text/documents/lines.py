"""Plain text, pages of HTML and subtitles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import unescape

import regex

from ziggurat.serve.text.charsets import Charset, decoded
from ziggurat.serve.text.documents.archive import Settings
from ziggurat.serve.text.markup import (
    HTML,
    HTML_ATTRIBUTES,
    MarkupForm,
    PlainForm,
    Spellings,
    Template,
    filled,
    html,
    written,
)
from ziggurat.serve.text.paragraphs import plain_text
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import html_tokens

LINE = regex.compile(r"[^\r\n]*+(?:\r\n|\n|\r)|[^\r\n]++")
"""A line with its end; for str.splitlines other characters end one, too."""


def file_work(template: Template, charset: Charset, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating the paragraphs of a template; its value is the file."""
    notices: Counter[str] = Counter()
    said = yield from written(template, settings.options, notices)
    return Result(charset.encoded(said), notices)


def text_file(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating plain text, of which each line is a paragraph."""
    text, charset = decoded(content, name)
    outcome = yield from plain_text(text, settings.options)
    return Result(charset.encoded(outcome.value), outcome.notices)


# Pages

# Where browsers look for it: an XML declaration, or a `meta` that is not in a comment.
_DECLARED = regex.compile(
    r"""<!--.*?(?:-->|$)
      | (?:^\s*+<\?xml\b[^>]*?\bencoding\s*+=\s*+["'] | <meta\b[^>]*?\bcharset\s*+=\s*+["']?+\s*+)
        (?P<label>[A-Za-z0-9][A-Za-z0-9_.:+-]{0,40})(?=[\s"'/>;])""",
    flags=regex.VERBOSE | regex.DOTALL | regex.IGNORECASE,
)
_HEAD = 4096
"""Characters in which it is looked for."""


def html_file(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating a page in HTML, in the character set that it declares, or else UTF-8.

    Characters that the set lacks become references. A page that is UTF-8 though it declares another gets the right
    declaration; one that says that it is in the source language then says the target's.
    """
    labels = [found["label"] for found in _DECLARED.finditer(content[:_HEAD].decode("latin-1")) if found["label"]]
    text, charset = decoded(content, name, labels[0] if labels else "")
    if not charset.declared:
        text = _DECLARED.sub(_utf8_declared, text[:_HEAD]) + text[_HEAD:]
    rules = replace(
        HTML,
        attributes=HTML_ATTRIBUTES if settings.attributes else frozenset(),
        languages=(settings.source, settings.target),
    )
    outcome = yield from html(text, settings.options, rules)
    errors = "replace" if charset.codec.startswith("utf") else "xmlcharrefreplace"
    return Result(charset.encoded(outcome.value, errors), outcome.notices)


def _utf8_declared(found: regex.Match[str]) -> str:
    """Return a declaration that names UTF-8."""
    return found[0] if found["label"] is None else found[0].removesuffix(found["label"]) + "utf-8"


# Subtitles

_TIMES = regex.compile(r"\s*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}\s*-->\s*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}.*")
_CUE_TAGS = frozenset(("b", "i", "u", "s", "font", "c", "v", "lang", "ruby", "rt"))
_OVERRIDE = regex.compile(r"\{\\[^{}]*+\}|<\d[\d:.]*+>")
_SPEAKER = regex.compile(r"\s*[-–—]\s*")


def srt(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating SubRip subtitles, cue by cue; numbers and times stay as they are."""
    return (yield from _subtitles(content, name, settings, entities=False))


def vtt(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating WebVTT, cue by cue; settings, notes and styles stay as they are."""
    return (yield from _subtitles(content, name, settings, entities=True))


def _subtitles(content: bytes, name: str, settings: Settings, *, entities: bool) -> SentenceRequests[Result[bytes]]:
    text, charset = decoded(content, name)
    template: Template = []
    cue: list[str] = []
    in_cue = False
    for line in LINE.findall(text):
        if _TIMES.fullmatch(line.rstrip("\r\n")) and not in_cue:
            in_cue = True
            template.append(line)
        elif in_cue and line.strip():
            cue.append(line)
        else:
            template += _cue(cue, entities=entities)
            cue, in_cue = [], False
            template.append(line)
    return (yield from file_work([*template, *_cue(cue, entities=entities)], charset, settings))


def _cue(lines: Sequence[str], *, entities: bool) -> Template:
    """Return the template of a cue: its lines are one text, unless each is another speaker's.

    `entities`: `&amp;` is one letter, as in WebVTT; SubRip has tags, but no entities.
    """
    template: Template = []
    pieces: list[Piece] = []
    spellings = Spellings()
    form = MarkupForm("".join(lines), spellings) if entities else PlainForm()
    for number, line in enumerate(lines):
        body = line.rstrip("\r\n")
        for token in html_tokens(body):
            name = token.name.split(".")[0]
            if token.kind == "text":
                is_first = not any(isinstance(piece, str) for piece in pieces)
                for piece in _cue_text(token.raw, is_first=is_first):
                    if entities and isinstance(piece, str):
                        spellings.add(text := unescape(piece) or piece, piece)
                        piece = text
                    pieces.append(piece)
            elif token.kind in ("open", "close") and name in _CUE_TAGS:
                pieces.append(Open(token.raw, name) if token.kind == "open" else Close(token.raw, name))
            else:
                pieces.append(EmptyElement(token.raw))
        end = line[len(body) :]
        following = lines[number + 1] if number + 1 < len(lines) else None
        if following is None or _SPEAKER.match(following):
            template += [*filled(pieces, form), end]
            pieces = []
        else:
            pieces.append(EmptyElement(end, "\n"))
    return template


def _cue_text(text: str, *, is_first: bool) -> list[Piece]:
    """Return text with points in it: overrides (`{\\an8}`), times (`<00:01.5>`), the dash at the start of a line."""
    pieces: list[Piece] = []
    begin = 0
    for found in _OVERRIDE.finditer(text):
        if found.start() > begin:
            pieces.append(text[begin : found.start()])
        pieces.append(EmptyElement(found[0]))
        begin = found.end()
    rest = text[begin:]
    if is_first and not any(isinstance(piece, str) for piece in pieces) and (dash := _SPEAKER.match(rest)):
        pieces.append(EmptyElement(dash[0]))
        rest = rest[dash.end() :]
    return [*pieces, rest] if rest else pieces
