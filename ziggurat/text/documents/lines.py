"""Plain text, Markdown and subtitles: files of lines, of which some are text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import regex

from ziggurat.text.documents.settings import Settings, decoded
from ziggurat.text.marked import Close, Copied, Open, Piece, Point
from ziggurat.text.markup import HTML, HTML_ATTRIBUTES, html
from ziggurat.text.paragraphs import plain_text
from ziggurat.text.template import MarkupForm, PlainForm, Template, filled, written
from ziggurat.text.tokens import html_tokens
from ziggurat.text.work import Outcome, Work

__all__ = ["html_file", "markdown", "srt", "text_file", "vtt"]


def text_file(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating plain text, of which each line is a paragraph."""
    text, encoding = decoded(content, name)
    outcome = yield from plain_text(text, settings.options)
    return Outcome(outcome.value.encode(encoding, "replace"), outcome.notices)


def html_file(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating a page in HTML, in UTF-8 or UTF-16."""
    text, encoding = decoded(content, name)
    rules = replace(HTML, attributes=HTML_ATTRIBUTES) if settings.attributes else HTML
    outcome = yield from html(text, settings.options, rules)
    return Outcome(outcome.value.encode(encoding, "replace"), outcome.notices)


def _file(template: Template, encoding: str, settings: Settings) -> Work[Outcome[bytes]]:
    notices: Counter[str] = Counter()
    said = yield from written(template, settings.options, notices)
    return Outcome(said.encode(encoding, "replace"), notices)


# Only these end a line here: for str.splitlines others do, too.
_LINE = regex.compile(r"[^\r\n]*+(?:\r\n|\n|\r)|[^\r\n]++")

# Subtitles

_TIMES = regex.compile(r"\s*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}\s*-->\s*(?:\d+:)?\d{1,2}:\d{2}[,.]\d{1,3}.*")
_CUE_TAGS = frozenset(("b", "i", "u", "s", "font", "c", "v", "lang", "ruby", "rt"))
_OVERRIDE = regex.compile(r"\{\\[^{}]*+\}|<\d[\d:.]*+>")
_SPEAKER = regex.compile(r"\s*[-–—]\s*")


def srt(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating SubRip subtitles, cue by cue; numbers and times stay as they are."""
    return (yield from _subtitles(content, name, settings, entities=False))


def vtt(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating WebVTT, cue by cue; settings, notes and styles stay as they are."""
    return (yield from _subtitles(content, name, settings, entities=True))


def _subtitles(content: bytes, name: str, settings: Settings, *, entities: bool) -> Work[Outcome[bytes]]:
    text, encoding = decoded(content, name)
    template: Template = []
    cue: list[str] = []
    in_cue = False
    for line in _LINE.findall(text):
        if _TIMES.fullmatch(line.rstrip("\r\n")) and not in_cue:
            in_cue = True
            template.append(line)
        elif in_cue and line.strip():
            cue.append(line)
        else:
            template += _cue(cue, entities=entities)
            cue, in_cue = [], False
            template.append(line)
    return (yield from _file([*template, *_cue(cue, entities=entities)], encoding, settings))


def _cue(lines: Sequence[str], *, entities: bool) -> Template:
    """Return the template of a cue: its lines are one text, unless each is another speaker's.

    `entities`: `&amp;` is one letter, as in WebVTT; SubRip has tags, but no entities.
    """
    template: Template = []
    pieces: list[Piece] = []
    form = MarkupForm("".join(lines)) if entities else PlainForm()
    for number, line in enumerate(lines):
        body = line.rstrip("\r\n")
        for token in html_tokens(body):
            name = token.name.split(".")[0]
            if token.kind == "text":
                is_first = not any(isinstance(piece, str) for piece in pieces)
                pieces += _cue_text(token.text if entities else token.raw, is_first=is_first)
            elif token.kind in ("open", "close") and name in _CUE_TAGS:
                pieces.append(Open(token.raw, name) if token.kind == "open" else Close(token.raw, name))
            else:
                pieces.append(Point(token.raw))
        end = line[len(body) :]
        following = lines[number + 1] if number + 1 < len(lines) else None
        if following is None or _SPEAKER.match(following):
            template += [*filled(pieces, form), end]
            pieces = []
        else:
            pieces.append(Point(end, "\n"))
    return template


def _cue_text(text: str, *, is_first: bool) -> list[Piece]:
    """Return text with points in it: overrides (`{\\an8}`), times (`<00:01.5>`), the dash at the start of a line."""
    pieces: list[Piece] = []
    begin = 0
    for found in _OVERRIDE.finditer(text):
        if found.start() > begin:
            pieces.append(text[begin : found.start()])
        pieces.append(Point(found[0]))
        begin = found.end()
    rest = text[begin:]
    if is_first and not any(isinstance(piece, str) for piece in pieces) and (dash := _SPEAKER.match(rest)):
        pieces.append(Point(dash[0]))
        rest = rest[dash.end() :]
    return [*pieces, rest] if rest else pieces


# Markdown

_FENCE = regex.compile(r" {0,3}(`{3,}|~{3,})")
_PREFIX = regex.compile(r"(?:\s{0,3}(?:>|[-*+]|\d{1,9}[.)])\s+|\s{0,3}>)*+\s*(?:\[[ xX]\]\s+)?(?:#{1,6}\s+)?")
_RULED = regex.compile(r"\s{0,3}(?:(?:[-*_=]\s*){2,}|\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?)\s*")
_NEW_BLOCK = regex.compile(r"\s{0,3}(?:>|[-*+]\s|\d{1,9}[.)]\s|#{1,6}\s|\||\[[^\]]+\]:|<)|(?: {4}|\t)|\s*$")
_DEFINITION = regex.compile(r"\s{0,3}\[[^\]\n]+\]:\s*\S.*")
_INLINE = regex.compile(
    r"""(?P<code>(?<!`)(?P<ticks>`{1,8})(?!`)[^\n]{1,500}?(?<!`)(?P=ticks)(?!`))
      | (?P<auto><(?:https?|ftp|mailto):[^<>\s]{1,500}>)
      | (?P<tag></?[A-Za-z][^<>]{0,500}>)
      | (?P<math>\$\$[^$\n]{1,200}\$\$)
      | (?P<note>\[\^[^\]\s]{1,80}\])
      | (?P<image>!\[[^\[\]]{0,300}\]\([^()\s]{0,500}(?:\s+"[^"]{0,200}")?\))
      | (?P<link>\[)
      | (?P<end>\](?:\([^()\s]{0,500}(?:\s+"[^"]{0,200}")?\)|\[[^\[\]]{0,200}\]))
      | (?P<hard>(?:\x20{2,}|\\)\r?\n)
      | (?P<escape>\\[!-/:-@\[-`{-~])
      | (?P<strong>\*\*|__|~~)
      | (?P<emphasis>(?<![*\w])\*(?=[^\s*])|(?<=[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])|(?<=[^\s_])_(?!\w))""",
    flags=regex.VERBOSE,
)


def markdown(content: bytes, name: str, settings: Settings) -> Work[Outcome[bytes]]:
    """Return the work of translating Markdown: paragraphs, headings, items and cells; code and addresses stay."""
    text, encoding = decoded(content, name)
    template: Template = []
    block: list[str] = []
    fence = ""
    front_matter = False
    for number, line in enumerate(_LINE.findall(text)):
        bare = line.strip()
        found = _FENCE.match(line)
        if front_matter or (not number and bare.lstrip("\ufeff") == "---"):
            front_matter = not number or bare not in ("---", "...")
            template.append(line)
        elif fence or found:
            template += _block(block)
            block = []
            template.append(line)
            if not fence and found:
                fence = found[1]
            elif found and bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
        elif not block and (line.startswith(("    ", "\t")) and bare):
            template.append(line)
        elif not bare or _RULED.fullmatch(line.rstrip("\r\n")) or _DEFINITION.fullmatch(line.rstrip("\r\n")):
            template += [*_block(block), line]
            block = []
        elif bare.startswith("|") or bare.count("|") > 1:
            template += [*_block(block), *_row(line)]
            block = []
        else:
            if block and (_NEW_BLOCK.match(line) or regex.match(r"\s{0,3}#{1,6}\s", block[-1])):
                template += _block(block)
                block = []
            block.append(line)
    return (yield from _file([*template, *_block(block)], encoding, settings))


def _row(line: str) -> Template:
    """Return the template of a table's row."""
    template: Template = []
    for part in regex.split(r"((?<!\\)\|)", line):
        template += [part] if part == "|" or not part.strip() else _inline(part)
    return template


def _block(lines: Sequence[str]) -> Template:
    """Return the template of a paragraph: its lines are one text, as they are for readers."""
    if not lines:
        return []
    prefix = _PREFIX.match(lines[0])
    begin = prefix.end() if prefix else 0
    return [lines[0][:begin], *_inline(lines[0][begin:] + "".join(lines[1:]))]


def _inline(text: str) -> Template:
    """Return the template of text with inline markup."""
    pieces: list[Piece] = []
    begin = 0
    opened: list[str] = []
    for found in _INLINE.finditer(text):
        kind, raw = str(found.lastgroup), found[0]
        if found.start() > begin:
            pieces.append(text[begin : found.start()])
        begin = found.end()
        if kind in ("strong", "emphasis"):
            if raw in opened:
                pieces.append(Close(raw, raw))
                opened.remove(raw)
            else:
                pieces.append(Open(raw, raw))
                opened.append(raw)
        elif kind in ("link", "end"):
            pieces.append(Open(raw, "[") if kind == "link" else Close(raw, "["))
        elif kind in ("code", "math"):
            pieces.append(Copied(raw, raw.strip("`$").strip()))
        elif kind == "tag":
            pieces += _tag(raw)
        elif kind == "hard":
            pieces.append(Point(raw, "\n"))
        elif kind == "escape":
            pieces.append(Copied(raw, raw[1:]))
        else:
            pieces.append(Copied(raw, "") if kind in ("image", "auto") else Point(raw))
    if begin < len(text):
        pieces.append(text[begin:])
    # Signs that a translation adds are text in nearly all places.
    return filled(pieces, PlainForm())


def _tag(raw: str) -> list[Piece]:
    """Return a tag of HTML in Markdown."""
    name = regex.match(r"</?([A-Za-z][^\s/>]*)", raw)
    tag = name[1].lower() if name else ""
    if tag in HTML.inline and tag not in HTML.void:
        return [Close(raw, tag) if raw.startswith("</") else Open(raw, tag)]
    return [Point(raw)]
