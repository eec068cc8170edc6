"""XML as tokens that keep their own spelling, read by expat without entities of its own, and bounded.

No entity declaration is read, no DTD is fetched, and neither depth nor size can fill memory. Names are those of known
namespaces with the usual prefix (`w:p`), whatever prefix the file uses.
"""

from __future__ import annotations

import codecs
import html
from collections.abc import Mapping
from typing import Any
from xml.parsers import expat

import regex

from ziggurat.serve.text.charsets import codec_named
from ziggurat.serve.text.tokens import Token
from ziggurat.system.errors import DataError, printable

MAX_XML_DEPTH = 200
"""Deepest nesting of elements; Word's own files have some dozens."""

_MAX_TOKENS = 2_000_000
_DECLARED = regex.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z][A-Za-z0-9._-]{0,40})["']""")
# Not those that swallow the mark: it stays in the text, and so in the file that is written.
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class Xml:
    """A document: its tokens, and how it is turned into bytes again.

    Attributes:
        tokens: their `raw` joined is the text of the document.
        encoding: Python's name of the encoding.
    """

    def __init__(self, tokens: list[Token], encoding: str) -> None:
        self.tokens, self.encoding = tokens, encoding

    def encoded(self, text: str) -> bytes:
        """Return a text in the document's encoding; characters that it lacks become references."""
        return text.encode(self.encoding, "xmlcharrefreplace")


def read_xml(content: bytes, name: str, prefixes: Mapping[str, str] | None = None) -> Xml:
    """Return a document as tokens.

    Args:
        content: the file.
        name: of the file, for messages.
        prefixes: prefix that names get, by namespace; elements and attributes of others have their local name alone.

    Raises DataError: not well-formed, entities are declared, nested too deeply, too many tokens, or an encoding that is
    not known.
    """
    text, encoding = _decoded(content, name)
    reader = _Reader(text.encode("utf-8", "strict"), prefixes or {}, name)
    return Xml(reader.tokens, encoding)


def _decoded(content: bytes, name: str) -> tuple[str, str]:
    encoding = next((known for mark, known in _BOMS.items() if content.startswith(mark)), None)
    if encoding is None:
        found = _DECLARED.match(content[:200])
        label = found[1].decode("ascii").lower() if found else "utf-8"
        encoding = codec_named(label)
        if encoding is None:
            raise DataError(f"{name}: its encoding {printable(label)!r} is not known; convert it to UTF-8")
    try:
        text = content.decode(encoding)
        text.encode("utf-8")
        return text, encoding
    except UnicodeError as error:
        raise DataError(f"{name}: cannot be read as {printable(encoding)}: {error}") from None


class _RefusedError(Exception):
    """Well-formed XML that is not read."""


class _Reader:
    """Turns expat's events into tokens; each begins where expat says and ends where the next one begins."""

    def __init__(self, content: bytes, prefixes: Mapping[str, str], name: str) -> None:
        self.content, self.prefixes = content, prefixes
        self.tokens: list[Token] = []
        self.texts: list[Token] = []  # one text, which expat tells line by line
        self.waiting: tuple[int, Token] | None = None
        self.depth = 0
        # With its encoding given, expat does not look at the declaration, which names that of the file.
        self.parser = parser = expat.ParserCreate("utf-8", namespace_separator=" ")
        parser.buffer_text = False
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.CharacterDataHandler = lambda data: self.take(Token("text", "", text=data))
        parser.SkippedEntityHandler = self.skipped
        parser.StartCdataSectionHandler = lambda: self.take(Token("text", ""))
        parser.EndCdataSectionHandler = lambda: self.take(Token("text", ""))
        parser.CommentHandler = lambda data: self.take(Token("other", ""))
        parser.ProcessingInstructionHandler = lambda target, data: self.take(Token("other", ""))
        parser.XmlDeclHandler = lambda *_: self.take(Token("other", ""))
        parser.StartDoctypeDeclHandler = self.doctype
        parser.EntityDeclHandler = self.entity
        try:
            parser.Parse(content, True)
        except _RefusedError as error:
            raise DataError(f"{name}: {error}") from None
        except expat.ExpatError as error:
            raise DataError(
                f"{name}: not well-formed XML: {expat.ErrorString(error.code)} (line {error.lineno}, column "
                f"{error.offset + 1})"
            ) from None
        self.finish(len(content))
        self.end_text()

    def take(self, token: Token) -> None:
        at = self.parser.CurrentByteIndex
        self.finish(at)
        self.waiting = (at, token)
        if len(self.tokens) > _MAX_TOKENS:
            raise _RefusedError(f"more than {_MAX_TOKENS:,} pieces of markup")

    def finish(self, end: int) -> None:
        """End the token that waits for its end."""
        begin, token = self.waiting or (0, Token("other", ""))
        raw = self.content[begin:end].decode()
        if not raw and token.kind != "close":
            return
        self.waiting = None
        if token.kind == "text":
            self.texts.append(token._replace(raw=raw))
            return
        self.end_text()
        before = self.tokens[-1] if self.tokens else None
        if token.kind == "close" and not raw and before is not None and before.kind == "open":
            self.tokens[-1] = before._replace(kind="empty")  # <a/>: expat's end has no text of its own
        else:
            self.tokens.append(token._replace(raw=raw))

    def end_text(self) -> None:
        if self.texts:
            raw, text = ("".join(getattr(part, name) for part in self.texts) for name in ("raw", "text"))
            self.tokens.append(Token("text", raw, text=text))
            self.texts.clear()

    def start(self, name: str, attributes: dict[str, Any]) -> None:
        self.depth += 1
        if self.depth > MAX_XML_DEPTH:
            raise _RefusedError(f"elements are nested more than {MAX_XML_DEPTH} deep")
        named = {self.short(key): value for key, value in attributes.items()}
        self.take(Token("open", "", self.short(name), attributes=named))

    def end(self, name: str) -> None:
        self.depth -= 1
        self.take(Token("close", "", self.short(name)))

    def short(self, name: str) -> str:
        space, _, local = name.rpartition(" ")
        prefix = "xml" if space == "http://www.w3.org/XML/1998/namespace" else self.prefixes.get(space)
        return f"{prefix}:{local}" if prefix else local

    def skipped(self, name: str, is_parameter: bool) -> None:
        """Take an entity of a DTD that is not read, such as XHTML's &nbsp;."""
        if not is_parameter:
            self.take(Token("text", "", text=html.unescape(f"&{name};")))

    def doctype(self, name: str, system: str | None, public: str | None, has_subset: bool) -> None:
        if has_subset:
            raise _RefusedError("has declarations of its own in its DOCTYPE, which are not read; remove them")
        self.take(Token("other", ""))

    def entity(self, *_: Any) -> None:
        raise _RefusedError("declares entities, which are not read; remove them")
