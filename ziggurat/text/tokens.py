"""Markup as tokens that keep their own spelling, so that what is not translated is written as it was read.

HTML is read as browsers read it as far as tags, comments and text of scripts go, and never fails: neither html.parser
nor lxml gives back how a tag was written. XML is in ziggurat.text.xml.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Literal, NamedTuple

import regex

__all__ = ["Token", "html_tokens", "spelt"]

Kind = Literal["open", "close", "empty", "text", "other"]


class Token(NamedTuple):
    """A piece of markup.

    `kind` is `open` or `close` for a tag, `empty` for a tag that is both, `text`, or `other` for what has no text that
    is shown: comments, declarations, instructions.
    """

    kind: Kind
    raw: str
    """As it was written."""
    name: str = ""
    """Of a tag; of HTML in lower case."""
    text: str = ""
    """Text with its entities replaced."""
    attributes: dict[str, str] = {}  # noqa: RUF012  (never changed; a NamedTuple has no factories)
    """Of a tag, by name, the first of each name."""


# A tag's name runs to white space, / or >; in attributes only quotes hide a >. Possessive, for linear time.
_MARKUP = regex.compile(
    r"""<!--(?:>|->|.*?(?:-->|--!>|\Z))
      | <[!?][^>]*+>
      | </[^>]*+>
      | <(?P<name>[A-Za-z][^\s/>]*+)(?P<attributes>(?:[^"'>=]++|=\s*+"[^"]*+"|=\s*+'[^']*+'|=|["'])*+)>""",
    flags=regex.VERBOSE | regex.DOTALL,
)
_BEGINS = regex.compile("<!--|<[!?/A-Za-z]")
_ATTRIBUTE = regex.compile(
    r"""([^\s"'>/=][^\s>/=]*+)\s*+(?:=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>][^\s>]*+)))?+""", flags=regex.VERBOSE
)
_CLOSING_NAME = regex.compile(r"</([A-Za-z][^\s/>]*+)")
RAW_TEXT = frozenset(("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes", "plaintext"))
"""Elements whose content is text without tags."""
_WITH_ENTITIES = frozenset(("textarea", "title"))


def html_tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of HTML; their `raw` joined is `text`."""
    at, last_end = 0, text.rfind(">")
    ends: dict[str, list[int]] = {}  # of raw text, searched once for each name
    while at < len(text):
        begins = _BEGINS.search(text, at)
        if begins is None or (begins.start() > last_end and begins[0] != "<!--"):
            yield _text(text[at:])
            return
        if begins.start() > at:
            yield _text(text[at : begins.start()])
        found = _MARKUP.match(text, begins.start())
        if found is None:  # an attribute's quote is never closed; browsers show nothing of the rest, either
            yield Token("other", text[begins.start() :])
            return
        token = _markup(found)
        yield token
        at = found.end()
        if token.kind == "open" and token.name in RAW_TEXT:
            end = _end_of_raw_text(text, at, token.name, ends)
            if end > at:
                raw = text[at:end]
                yield Token("text", raw, text=html.unescape(raw) if token.name in _WITH_ENTITIES else raw)
            at = end


def _text(raw: str) -> Token:
    return Token("text", raw, text=html.unescape(raw))


def _markup(found: regex.Match[str]) -> Token:
    raw = found[0]
    if found["name"] is not None:
        attributes: dict[str, str] = {}
        for name, double, single, bare in _ATTRIBUTE.findall(found["attributes"]):
            attributes.setdefault(name.lower(), html.unescape(double or single or bare))
        return Token("open", raw, found["name"].lower(), attributes=attributes)
    if closing := _CLOSING_NAME.match(raw):
        return Token("close", raw, closing[1].lower())
    return Token("other", raw)


def _end_of_raw_text(text: str, at: int, name: str, ends: dict[str, list[int]]) -> int:
    """Return where the text of a raw text element ends; at the end of the text if it is never closed."""
    if name not in ends:
        closing = regex.compile(rf"</{name}(?=[\s/>])", flags=regex.IGNORECASE)
        ends[name] = [found.start() for found in closing.finditer(text)][::-1]
    while ends[name] and ends[name][-1] < at:
        ends[name].pop()
    return ends[name][-1] if ends[name] else len(text)


_ENTITY = regex.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_STANDARD = {"&": "&amp;", "<": "&lt;"}
# What XML does not allow in a document, not even as an entity; a model can write any character.
_NOT_XML = regex.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def spelt(text: str, raw: str, *, xml: bool = False) -> str:
    """Return `text` escaped for markup, with the entities that `raw`, the source of the paragraph, was written with.

    A character that the source always wrote as an entity is written so again. In HTML an `&` that the source always
    wrote bare stays bare where it begins no entity. Characters that XML does not have are left out, in HTML too.
    """
    text = _NOT_XML.sub("", text)
    entities: dict[str, str] = {}
    for entity in set(_ENTITY.findall(raw)):
        letter = html.unescape(entity)
        if len(letter) == 1 and letter != entity and letter not in raw.replace(entity, "") and letter not in "&<":
            entities[letter] = entity
    bare = not xml and "&" in _ENTITY.sub("", raw) and "&amp;" not in raw
    if bare and html.unescape(text) == text:
        entities["&"] = "&"
    table = str.maketrans(_STANDARD | entities)
    return text.translate(table)
