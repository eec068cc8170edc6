"""Markup as tokens that keep their spelling, so that untranslated parts are written exactly as they were read.

HTML is read as browsers read its tags, comments and scripts, and reading never fails; neither html.parser nor lxml
preserves the spelling of a tag.

XML is read by expat, without declared entities and within bounds: entity declarations are not read, no DTD is fetched,
and neither depth nor size can fill memory. Names in known namespaces get the usual prefix (`w:p`), whatever prefix the
file uses.
"""

from __future__ import annotations

import codecs
import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple
from xml.parsers import expat

import regex

from ziggurat.serve.text.files import codec_named
from ziggurat.system.errors import DataError, printable

Kind = Literal["open", "close", "empty", "text", "other"]


class Token(NamedTuple):
    """A piece of markup.

    `kind` is `open` or `close` for a tag, `empty` for a self-closing tag, `text`, or `other` for markup without visible
    text: comments, declarations, instructions.
    """

    kind: Kind
    raw: str
    """The original spelling."""
    name: str = ""
    """Name of a tag; for HTML in lower case."""
    text: str = ""
    """Text with its entities replaced."""
    attributes: dict[str, str] = {}  # noqa: RUF012  (never changed; a NamedTuple has no factories)
    """Attributes of a tag by name; the first of each name counts."""


# A tag's name extends to white space, / or >; in attributes only quotes hide a >. Possessive, for linear time.
_MARKUP = regex.compile(
    r"""<!--(?:>|->|.*?(?:-->|--!>|\Z))
      | <[!?][^>]*+>
      | </[^>]*+>
      | <(?P<name>[A-Za-z][^\s/>]*+)(?P<attributes>(?:[^"'>=]++|=\s*+"[^"]*+"|=\s*+'[^']*+'|=|["'])*+)>""",
    flags=regex.VERBOSE | regex.DOTALL,
)
_BEGINS = regex.compile("<!--|<[!?/A-Za-z]")
ATTRIBUTE = regex.compile(
    r"""([^\s"'>/=][^\s>/=]*+)\s*+(?:=\s*+(?:"([^"]*+)"|'([^']*+)'|([^\s"'>][^\s>]*+)))?+""", flags=regex.VERBOSE
)
"""ATTRIBUTE matches an attribute after a tag's name: its name, and its value in double, single or no quotes."""
_CLOSING_NAME = regex.compile(r"</([A-Za-z][^\s/>]*+)")
RAW_TEXT = frozenset(("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes", "plaintext"))
"""RAW_TEXT are elements whose content is text without tags."""
_WITH_ENTITIES = frozenset(("textarea", "title"))


def html_tokens(text: str) -> Iterator[Token]:
    """Yield HTML tokens; their `raw` joined is `text`."""
    at, last_end = 0, text.rfind(">")
    ends: dict[str, list[int]] = {}  # ends of raw text, searched once for each name
    while at < len(text):
        begins = _BEGINS.search(text, at)
        if begins is None or (begins.start() > last_end and begins[0] != "<!--"):
            yield _text(text[at:])
            return
        if begins.start() > at:
            yield _text(text[at : begins.start()])
        found = _MARKUP.match(text, begins.start())
        if found is None:  # an attribute's quote is never closed; browsers show none of the rest either
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
    return Token("text", raw, text=html.unescape(raw) or raw)  # `&#1;` would become empty


def _markup(found: regex.Match[str]) -> Token:
    raw = found[0]
    if found["name"] is not None:
        attributes: dict[str, str] = {}
        for name, double, single, bare in ATTRIBUTE.findall(found["attributes"]):
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


# Where an element without an end tag ends: certain start tags end the elements open in between, up to the limits
# (html.spec.whatwg.org, 13.2.6.4.7 to .16, the parts that broken pages need).
_CELLS, _ROWS = ("td", "th", "caption", "colgroup"), ("tbody", "thead", "tfoot")
_CELLED = ("table", "td", "th", "caption")
_FLOW = (*_CELLED, "template", "object", "button", "html")
_ENDS_PARAGRAPH = (
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure footer form h1 h2 h3 "
    "h4 h5 h6 header hgroup hr li dd dt main menu nav ol p pre search section table ul xmp plaintext listing summary"
)
_BEGINNING_ENDS: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {
    **{name: [(("p",), _FLOW)] for name in _ENDS_PARAGRAPH.split()},
    "body": [(("head",), ())],
    "td": [(("td", "th"), ("table", "tr"))],
    "th": [(("td", "th"), ("table", "tr"))],
    "tr": [(("tr", *_CELLS), ("table",))],
    **{name: [((*_ROWS, "tr", *_CELLS), ("table",))] for name in _ROWS},
    "button": [(("button",), _CELLED)],
    "option": [(("option",), ("select", "datalist"))],
    "optgroup": [(("option", "optgroup"), ("select",))],
    **{name: [(("rb", "rt", "rp"), ("ruby",))] for name in ("rb", "rt", "rp")},
}
for _name, _ended in (("li", ("li",)), ("dt", ("dt", "dd")), ("dd", ("dt", "dd"))):
    _between = set(_ENDS_PARAGRAPH.split()) - {"address", "div", "p", *_ended}
    _BEGINNING_ENDS[_name].append((_ended, (*sorted(_between), *_FLOW)))
BLOCKS = frozenset(_BEGINNING_ENDS)
"""BLOCKS are HTML elements that mostly stand between sentences."""
_END_TAGS_IN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tr", *_CELLS, *_ROWS), ("table",)),
    "table": (),
    "li": ("ul", "ol", *_CELLED),
}


def element_ends(tokens: Sequence[Token], void: Set[str], crossing: Set[str], *, xml: bool) -> dict[int, int]:
    """Return, by the index of each element's opening tag, the index of the element's last token.

    Args:
        tokens: tokens of a page, or of a fragment.
        void: names of elements without content.
        crossing: names of elements whose end tags end no other element: `<b><i></b></i>` is read as intended.
        xml: whether only end tags end elements.
    """
    ends: dict[int, int] = {}
    stack: list[tuple[int, str]] = []  # open elements, and crossed ones that have ended
    depths: defaultdict[str, list[int]] = defaultdict(list)  # depths of open elements in the stack, by name

    def deepest(names: Sequence[str]) -> int:
        return max((depths[name][-1] for name in names if depths[name]), default=-1)

    def close(depth: int, last: int) -> None:
        """End all open elements that are at least `depth` deep."""
        while len(stack) > depth:
            opened, name = stack.pop()
            if opened not in ends:
                depths[name].pop()
                ends[opened] = last

    for place, token in enumerate(tokens):
        if token.kind == "open" and token.name not in void:
            for ended, limits in () if xml else _BEGINNING_ENDS.get(token.name, ()):
                limit = deepest(limits)
                while (depth := deepest(ended)) > limit:
                    close(depth, place - 1)
            depths[token.name].append(len(stack))
            stack.append((place, token.name))
        elif token.kind == "close" and depths[token.name]:
            depth = depths[token.name][-1]
            if not xml and depth < deepest(_END_TAGS_IN.get(token.name, _CELLED)):
                continue  # an end tag in a cell does not end elements around the table
            if token.name in crossing:
                ends[stack[depth][0]] = place
                depths[token.name].pop()
                if depth == len(stack) - 1:
                    stack.pop()
            else:
                close(depth + 1, place - 1)
                close(depth, place)
    close(0, len(tokens) - 1)
    return ends


def xml_ends(tokens: Sequence[Token]) -> dict[int, int]:
    """Return, by the index of each element's opening tag in well-formed XML, the index of its end tag."""
    return element_ends(tokens, frozenset(), frozenset(), xml=True)


_ENTITY = regex.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_STANDARD = {"&": "&amp;", "<": "&lt;"}
# Characters that XML does not allow, not even as entities; a model can output any character.
_NOT_XML = regex.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# A `>` that would end a CDATA section (XML text may not contain `]]>`) or a comment, or form an arrow that WebVTT reads
# as times. At the start of a text, the text before it may supply the rest.
_ENDS_MORE = regex.compile(r"(?:^|(?<=\]\]|--))>")

_TEMPLATE = regex.compile(r"(<%[^<>\n]{1,200}+(?<=%)>)")


class Spelling:
    """Spelling of characters in a paragraph of markup.

    Args:
        raw: the source of the paragraph.
        xml: whether every `&` must be an entity.
    """

    def __init__(self, raw: str, *, xml: bool = False) -> None:
        without = _ENTITY.sub("", raw)
        entities = dict(_STANDARD)
        letters = set(without)
        for entity in dict.fromkeys(_ENTITY.findall(raw)):
            letter = html.unescape(entity)
            if len(letter) == 1 and letter != entity and letter not in letters and letter not in _STANDARD:
                entities[letter] = entity
        self._table = str.maketrans(entities)
        is_bare = not xml and "&" in without and "&amp;" not in raw
        self._bare = str.maketrans(entities | {"&": "&"}) if is_bare else None
        self._templates = not xml and "<%" in raw

    def of(self, text: str) -> str:
        """Return `text` escaped, with the source's entities.

        A character that the source always wrote as an entity becomes one again. In HTML an `&` that the source always
        wrote bare stays bare if it starts no entity, and `<%= name %>` is preserved. Characters that XML does not allow
        are left out, in HTML as well.
        """
        text = _NOT_XML.sub("", text)
        if self._templates and (parts := _TEMPLATE.split(text))[1:]:
            return "".join(part if number % 2 else self._escaped(part) for number, part in enumerate(parts))
        return self._escaped(text)

    def _escaped(self, text: str) -> str:
        table = self._bare if self._bare is not None and html.unescape(text) == text else self._table
        return _ENDS_MORE.sub("&gt;", text.translate(table))


def without_controls(text: str) -> str:
    """Return `text` without the characters that XML does not allow."""
    return _NOT_XML.sub("", text)


def spelt(text: str) -> str:
    """Return `text` escaped for XML, without characters that XML does not allow."""
    return Spelling("", xml=True).of(text)


# XML

MAX_XML_DEPTH = 200
"""MAX_XML_DEPTH is the deepest nesting of elements; Word's own files have a few dozen levels."""

_MAX_TOKENS = 2_000_000
_DECLARED = regex.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z][A-Za-z0-9._-]{0,40})["']""")
# Not encodings that swallow the byte order mark: it stays in the text, and so in the file that is written.
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class Xml:
    """A document: its tokens, and its encoding for writing it.

    Attributes:
        tokens: the tokens; their `raw` joined is the text of the document.
        encoding: Python's name of the encoding.
        prefixes: prefixes of names in known namespaces, as used in `tokens`.
    """

    def __init__(self, tokens: list[Token], encoding: str, prefixes: Mapping[str, str]) -> None:
        self.tokens, self.encoding, self.prefixes = tokens, encoding, prefixes

    def encoded(self, text: str) -> bytes:
        """Return a text in the document's encoding; characters that it lacks become references."""
        return text.encode(self.encoding, "xmlcharrefreplace")


def read_xml(content: bytes | str, name: str, prefixes: Mapping[str, str] | None = None) -> Xml:
    """Return a document as tokens.

    Args: content: the file, or its text, whose declared encoding is ignored. name: its name, for messages. prefixes:
        prefixes for names, by namespace; names in other namespaces lose their prefix.

    Raises DataError if it is not well-formed, declares entities, is nested too deeply, has too many tokens or an
    unknown encoding.
    """
    text, encoding = (content, "utf-8") if isinstance(content, str) else _decoded(content, name)
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: has half a character (character {error.start}, from 0); remove it") from None
    reader = _Reader(encoded, prefixes or {}, name)
    return Xml(reader.tokens, encoding, reader.prefixes)


def _decoded(content: bytes, name: str) -> tuple[str, str]:
    encoding = next((known for mark, known in _BOMS.items() if content.startswith(mark)), None)
    if encoding is None:
        found = _DECLARED.match(content[:200])
        label = found[1].decode("ascii").lower() if found else "utf-8"
        encoding = codec_named(label)
        if encoding is None:
            raise DataError(f"{name}: its encoding {printable(label)!r} is unknown; convert it to UTF-8")
    try:
        return content.decode(encoding), encoding
    except UnicodeError as error:
        raise DataError(f"{name}: cannot be read as {printable(encoding)}: {error}") from None


class _RefusedError(Exception):
    """Well-formed XML that is not supported."""


class _Reader:
    """Turns expat's events into tokens; each starts where expat reports it and ends where the next one starts."""

    def __init__(self, content: bytes, prefixes: Mapping[str, str], name: str) -> None:
        self.content, self.prefixes = content, prefixes
        self.tokens: list[Token] = []
        self.texts: list[Token] = []  # one text, which expat reports line by line
        self.waiting: tuple[int, Token] | None = None
        self.depth = 0
        # With an explicit encoding, expat ignores the declaration, which names the file's encoding.
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
        """Complete the token whose end is still unknown."""
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
            self.tokens[-1] = before._replace(kind="empty")  # <a/>: expat reports no text for its end
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
        """Take an entity from a DTD that is not read, such as XHTML's &nbsp;."""
        if not is_parameter:
            self.take(Token("text", "", text=html.unescape(f"&{name};")))

    def doctype(self, name: str, system: str | None, public: str | None, has_subset: bool) -> None:
        if has_subset:
            raise _RefusedError("has declarations of its own in its DOCTYPE, which are not supported; remove them")
        self.take(Token("other", ""))

    def entity(self, *_: Any) -> None:
        raise _RefusedError("declares entities, which are not supported; remove them")


class Spellings:
    """A source's spelling of the texts between marks, in order: the same text may have two spellings."""

    __slots__ = ("_known", "_taken")

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}
        self._taken: dict[str, int] = {}

    def add(self, text: str, raw: str) -> None:
        """Add the next text and its spelling."""
        self._known.setdefault(text, []).append(raw)

    def __contains__(self, text: str) -> bool:
        return text in self._known

    def next(self, text: str) -> str | None:
        """Return the source's spelling of its next text that equals this one; None for a new text."""
        known = self._known.get(text)
        if known is None:
            return None
        place = self._taken.get(text, 0)
        self._taken[text] = min(place + 1, len(known) - 1)
        return known[place]
