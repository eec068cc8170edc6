"""Word and PowerPoint: archives of XML, whose paragraphs have runs of text."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import regex

from ziggurat.serve.text.documents.opendocument import xml_members
from ziggurat.serve.text.files import Archive, Settings
from ziggurat.serve.text.markup import (
    MarkupForm,
    MarkupSlot,
    Raw,
    Template,
    TemplateGroup,
    add,
    filled,
    with_attributes,
)
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import Spellings, Token, read_xml, spelt, xml_ends

_SPACES = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main": "w",
    "http://purl.oclc.org/ooxml/wordprocessingml/main": "w",
    "http://schemas.openxmlformats.org/drawingml/2006/main": "a",
    "http://purl.oclc.org/ooxml/drawingml/main": "a",
    "http://schemas.openxmlformats.org/drawingml/2006/chart": "c",
    "http://purl.oclc.org/ooxml/drawingml/chart": "c",
    "http://schemas.openxmlformats.org/officeDocument/2006/math": "m",
    "http://purl.oclc.org/ooxml/officeDocument/math": "m",
    "http://schemas.openxmlformats.org/markup-compatibility/2006": "mc",
}
# Parts are known by their content types, whatever their names; by the usual names where a file lists no types.
_DRAWN = r"diagrams/(?:data|drawing)\d*|charts/chart\d*|drawings/drawing\d*"
_DOCX = regex.compile(rf"word/(?:document\d*|header\d*|footer\d*|footnotes|endnotes|comments|{_DRAWN})\.xml")
_PPTX = regex.compile(rf"ppt/(?:slides/slide\d+|notesSlides/notesSlide\d+|{_DRAWN})\.xml")
_TYPES = regex.compile(
    r".*(?:wordprocessingml\.(?:header|footer|footnotes|endnotes|comments)|presentationml\.(?:slide|notesSlide)"
    r"|(?:wordprocessingml\.(?:document|template)|ms-word\.(?:document|template)\.macroEnabled(?:Template)?)\.main"
    r"|drawingml\.(?:chart|chartshapes|diagramData|diagramDrawing))\+xml"
)
_MAIN = regex.compile(r".*(?:wordprocessingml|presentationml|ms-word|ms-powerpoint)\.[\w.]*main\+xml")
# Documents in the document: they are not read.
_EMBEDDED = regex.compile(r"(?:word|ppt)/(?:embeddings/.+|afchunk[^/]*|media/[^/]+\.(?:docx|xlsx|pptx))")
# Other parts, of which those with text are told: comments of slides, newer kinds of charts, building blocks, numbering.
_STAYING = regex.compile(r"(?:customXml|docProps)/.*|.*/(?:(?:slide|notes|handout)Masters|slideLayouts|theme)/.*")
_HAS_TEXT = regex.compile(
    r"""<(?:\w++:)?(?:t|text|v|pt)(?:\s[^<>]*+)?>[^<]*?\p{L}
      | <(?:\w++:)?lvlText\s[^<>]*?val="[^"<>]*?\p{L}{2}""",
    flags=regex.VERBOSE,
)
# Text beside paragraphs that is not read, and is not for readers.
_SILENT = frozenset(("w:moveFrom", "w:del", "w:rt", "a:fld"))
# What is said of pictures, and text drawn as one, by the local names of elements and attributes.
_PICTURES = frozenset(("docPr", "cNvPr", "textpath", "shape"))
_SAID = frozenset(("descr", "title", "string", "alt"))
_LETTER = regex.compile(r"\p{L}")
# Elements around runs that are written around the same words again; other elements of a paragraph are points.
_AROUND = frozenset(("w:hyperlink", "w:ins", "w:moveTo", "w:smartTag", "w:sdt", "w:fldSimple", "w:bdo", "w:dir")) | {
    "w:customXml"
}
# What readers see between two words; bookmarks, notes and marks of the spell checker may be inside of a word.
_SEEN = frozenset(
    ("w:drawing", "w:pict", "w:object", "w:sym", "mc:AlternateContent", "m:oMath", "m:oMathPara", "a:fld", "w:pgNum")
) | {"w:footnoteReference", "w:endnoteReference"}
_TABS = frozenset(("w:tab", "w:ptab"))
_DIVIDER = ""
"""Name of an end without a beginning, which divides a paragraph: a tab comes back between the same two texts."""
_BREAKS = frozenset(("w:br", "w:cr", "a:br"))
_IDENTITY = regex.compile(r'\s+w:rsid\w*="[^"]*"')
_FIELD = "field"


def docx(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating a Word file: text, tables, headers, footers, notes, comments and text boxes."""
    return (yield from _office(content, name, settings, _DOCX, "word/document.xml"))


def pptx(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating a PowerPoint file: slides, tables, notes, diagrams and charts."""
    return (yield from _office(content, name, settings, _PPTX, "ppt/presentation.xml"))


def _office(
    content: bytes, name: str, settings: Settings, parts: regex.Pattern[str], main: str
) -> SentenceRequests[Result[bytes]]:
    archive = Archive(content, name, settings.limits)
    types = _content_types(archive, name)
    main = _main_part(archive, name, types, main)
    archive.read(main)
    documents = {
        part: read_xml(archive.markup(part), f"{name}: {part}", _SPACES)
        for part in archive.names
        if part == main or parts.fullmatch(part) or _TYPES.fullmatch(types.get(part, ""))
    }
    readers = {part: _Part(xml.tokens) for part, xml in documents.items()}
    templates = {part: reader.template() for part, reader in readers.items()}
    left = [part for part in archive.names if part not in documents and _is_left(archive, part)]
    left += [part for part, reader in readers.items() for _ in range(reader.unread())]
    return (yield from xml_members(archive, documents, templates, settings, left))


def _is_left(archive: Archive, part: str) -> bool:
    """Return whether a part that is not read has text for readers."""
    if not part.endswith(".xml") or _STAYING.fullmatch(part):
        return _EMBEDDED.fullmatch(part) is not None
    return _HAS_TEXT.search(archive.read(part).decode("utf-8", "replace")) is not None


def _content_types(archive: Archive, name: str) -> dict[str, str]:
    part = "[Content_Types].xml"
    if part not in archive.names:
        return {}
    named, by_ending = dict[str, str](), dict[str, str]()
    for token in read_xml(archive.markup(part), f"{name}: {part}").tokens:
        kind = token.attributes.get("ContentType", "")
        if token.name == "Override":
            named[unquote(token.attributes.get("PartName", "")).lstrip("/").lower()] = kind
        elif token.name == "Default":
            by_ending[token.attributes.get("Extension", "").lower()] = kind
    return {
        member: named.get(member.lower()) or by_ending.get(member.rpartition(".")[2].lower(), "")
        for member in archive.names
    }


def _main_part(archive: Archive, name: str, types: Mapping[str, str], usual: str) -> str:
    """Return the name of the document's main part: the one that relations name, or content types, or the usual one."""
    members = {member.lower(): member for member in archive.names}
    if "_rels/.rels" in archive.names:
        for token in read_xml(archive.markup("_rels/.rels"), f"{name}: _rels/.rels").tokens:
            target = posixpath.normpath(unquote(token.attributes.get("Target", "")).lstrip("/")).lower()
            if token.attributes.get("Type", "").endswith("/officeDocument") and target in members:
                return members[target]
    if usual in archive.names:
        return usual
    return next((member for member in archive.names if _MAIN.fullmatch(types.get(member, ""))), usual)


@dataclass(eq=False)
class _Run:
    """Spelling of a run: everything before its text, and everything after it."""

    before: str
    after: str


@dataclass
class _RunForm:
    """Spelling of a paragraph of runs.

    Attributes:
        ground: the run of text that belongs to no element.
        hyphens: hyphens at which no line ends, each as the end of a text, its tag and the beginning of the next; in the
            translation the first ones inside of words become these.
    """

    ground: _Run
    hyphens: list[str] = field(default_factory=list)

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        template: Template = []
        runs = [self.ground]
        for piece in pieces:
            if isinstance(piece, str):
                template += [runs[-1].before, self._spelt(piece), runs[-1].after]
            elif isinstance(piece.raw, _Run):
                if isinstance(piece, Open):
                    runs.append(piece.raw)
                else:
                    runs.pop()
            else:
                add(template, piece.raw)
        return template

    def _spelt(self, text: str) -> str:
        parts = _HYPHEN.split(spelt(text), maxsplit=len(self.hyphens)) if self.hyphens else [spelt(text)]
        between = [self.hyphens.pop(0) for _ in parts[1:]]
        return "".join(text + end for text, end in zip(parts, [*between, ""], strict=True))


class _Part:
    """One XML file of the archive."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.ends = tokens, xml_ends(tokens)
        # Templates of paragraphs by place: one in a text box is met again when the source of that around it is kept.
        self.made: dict[int, Template] = {}
        self.read: set[int] = set()  # places of elements of text

    def template(self, begin: int = 0, end: int | None = None) -> Template:
        """Return the template of the tokens from `begin` to `end`, with a slot for each paragraph."""
        template: Template = []
        place, end = begin, len(self.tokens) if end is None else end
        while place < end:
            token = self.tokens[place]
            if token.name in _PICTURES and not _SAID.isdisjoint(token.attributes):
                template += self.made.setdefault(place, with_attributes(token, _SAID, xml=True))
            else:
                template.append(token.raw)
            if token.kind == "open" and token.name in ("w:p", "a:p", "c:v"):
                if place not in self.made:
                    is_value = token.name == "c:v"  # of a chart
                    self.made[place] = self._value(place) if is_value else _Paragraph(self, place).template()
                template += self.made[place]
                place = self.ends[place]
                template.append(self.tokens[place].raw)
            place += 1
        return template

    def _value(self, place: int) -> Template:
        inside = self.tokens[place + 1 : self.ends[place]]
        raw, text = "".join(token.raw for token in inside), "".join(token.text for token in inside)
        if not _LETTER.search(text):
            return [raw]
        form = MarkupForm(raw, Spellings(), xml=True)
        form.spellings.add(text, raw)
        return [MarkupSlot(SpannedText(text), form)]

    def unread(self) -> int:
        """Return how many elements of text were not read, though readers see them."""
        count = place = 0
        while place < len(self.tokens):
            token = self.tokens[place]
            if token.kind == "open" and token.name in ("w:t", "a:t"):
                text = "".join(part.text for part in self.tokens[place : self.after(place)])
                count += place not in self.read and _LETTER.search(text) is not None
            place = self.after(place) if token.name in _SILENT else place + 1
        return count + sum(
            token.name in ("w:tblCaption", "w:tblDescription") and any(map(_LETTER.search, token.attributes.values()))
            for token in self.tokens
        )

    def raw(self, begin: int, end: int) -> str:
        return "".join(token.raw for token in self.tokens[begin:end])

    def after(self, place: int) -> int:
        """Return the place after an element."""
        return self.ends.get(place, place) + 1

    def children(self, place: int) -> list[int]:
        """Return the places of the elements directly in one."""
        places, at = [], place + 1
        while at < self.ends.get(place, place):
            if self.tokens[at].kind in ("open", "empty"):
                places.append(at)
            at = self.after(at)
        return places


class _Paragraph:
    """Reader of one paragraph; `part` has its tokens, and `place` is its opening tag."""

    def __init__(self, part: _Part, place: int) -> None:
        self.part, self.place = part, place
        self.pieces: list[Piece] = []
        self.runs: dict[tuple[str, str], _Run] = {}
        self.letters: Counter[tuple[str, str]] = Counter()
        self.hyphens: list[str] = []

    def template(self) -> Template:
        """Return what is between the paragraph's tags."""
        part, begin, end = self.part, self.place + 1, self.part.ends[self.place]
        template: Template = []
        while begin < end and (part.tokens[begin].name in ("w:pPr", "a:pPr") or part.tokens[begin].kind == "text"):
            template.append(part.raw(begin, part.after(begin)))
            begin = part.after(begin)
        last = end
        for place in part.children(self.place):
            if part.tokens[place].name == "a:endParaRPr":
                last = place
        self._inline(begin, last)
        tail = part.raw(last, end)
        if not self.runs:  # nothing to read
            return [*template, *part.template(begin, last), tail]
        ground = max(self.runs, key=lambda key: self.letters[key])
        pieces = self._joined(self.runs[ground])
        form = _RunForm(self.runs[ground], self.hyphens)
        return [*template, TemplateGroup(filled(pieces, form), source=part.template(begin, last)), tail]

    def _inline(self, begin: int, end: int) -> None:
        place, part = begin, self.part
        while place < end:
            token, after = part.tokens[place], part.after(place)
            if token.name in ("w:r", "a:r"):
                self._run(place)
            elif token.name in _AROUND and token.kind == "open":
                self._around(place)
            elif token.name in _BREAKS:  # of slides; those of Word are in runs
                self.pieces.append(EmptyElement(part.raw(place, after), "\n"))
            elif token.raw:
                self.pieces.append(EmptyElement(part.template(place, after), is_seen=token.name in _SEEN))
            place = after

    def _around(self, place: int) -> None:
        part, end = self.part, self.part.ends[place]
        begin, last = place + 1, end
        for child in part.children(place):
            if part.tokens[child].name == "w:sdtContent" and child in part.ends:
                begin, last = child + 1, part.ends[child]
        name = f"{part.tokens[place].name} {place}"
        while begin < last and part.tokens[begin].name in ("w:sdtPr", "w:smartTagPr", "w:customXmlPr", "w:fldData"):
            begin = part.after(begin)
        self.pieces.append(Open(part.raw(place, begin), name))
        self._inline(begin, last)
        self.pieces.append(Close(part.raw(last, end + 1), name))

    def _run(self, place: int) -> None:
        """Read a run: stretches of text and points, each as a separate run."""
        part = self.part
        children = part.children(place)
        before = part.tokens[place].raw
        if part.tokens[place].kind == "empty":
            self.pieces.append(EmptyElement(before))
            return
        after = part.tokens[part.ends[place]].raw
        properties = ""
        if children and part.tokens[children[0]].name in ("w:rPr", "a:rPr"):
            properties = part.raw(children[0], part.after(children[0]))
            children = children[1:]
        for child in children:
            token, end = part.tokens[child], part.after(child)
            if token.name in ("w:t", "a:t") and token.kind == "open":
                self._texts(child, before, properties, after)
                continue
            if token.name == "w:noBreakHyphen":
                self._hyphen(part.raw(child, end), before, properties)
                continue
            if token.name == "w:ruby" and token.kind == "open":
                self._ruby(child, before + properties, after)
                continue
            raw: Raw = [before, properties, *part.template(child, end), after]
            raw = raw if any(not isinstance(p, str) for p in raw) else "".join(p for p in raw if isinstance(p, str))
            kind = token.attributes.get("w:fldCharType") if token.name == "w:fldChar" else None
            if kind == "begin":
                self.pieces.append(Open(raw, _FIELD))
            elif kind == "end":
                self.pieces.append(Close(raw, _FIELD))
            elif token.name in _BREAKS and token.attributes.get("w:type", "textWrapping") == "textWrapping":
                self.pieces.append(EmptyElement(raw, "\n"))
            elif token.name in _TABS | _BREAKS:
                self.pieces.append(Close(raw, _DIVIDER))
            else:
                self.pieces.append(EmptyElement(raw, is_seen=token.name in _SEEN))

    def _texts(self, place: int, before: str, properties: str, after: str) -> None:
        """Read an element of text, in which tabs of slides are characters."""
        self.part.read.add(place)
        token, last = self.part.tokens[place], self.part.ends[place]
        tag = token.raw if "xml:space" in token.attributes or token.name == "a:t" else token.raw[:-1] + _SPACE
        closing = self.part.tokens[last]
        shown = "".join(t.text for t in self.part.tokens[place:last])
        for text in regex.split(r"(\t+|_x000[9ABD]_)" if token.name == "a:t" else r"(\t+)", shown):
            if token.name == "a:t" and regex.fullmatch("_x000[DAB]_", text):  # the end of a line
                self.pieces.append(EmptyElement(f"{before}{properties}{tag}{text}{closing.raw}{after}", "\n"))
            elif text.startswith(("\t", "_x0009_")):
                self.pieces.append(Close(f"{before}{properties}{tag}{text}{closing.raw}{after}", _DIVIDER))
            elif text:
                self._text(text, before, properties, tag, closing)

    def _hyphen(self, raw: str, before: str, properties: str) -> None:
        """Read a hyphen at which no line ends, which the model is shown as a hyphen."""
        prefix = raw[1 : raw.index("noBreakHyphen")]
        tag, closing = f"<{prefix}t{_SPACE}", f"</{prefix}t>"
        self.hyphens.append(f"{closing}{raw}{tag}")
        self._text("-", before, properties, tag, Token("close", closing))

    def _ruby(self, place: int, before: str, after: str) -> None:
        """Read text with signs above it: the text alone, whose element keeps the signs."""
        part, end = self.part, self.part.ends[place]
        base = next((child for child in part.children(place) if part.tokens[child].name == "w:rubyBase"), place)
        if base == place or base not in part.ends:
            self.pieces.append(EmptyElement(f"{before}{part.raw(place, end + 1)}{after}"))
            return
        name = f"w:ruby {place}"
        self.pieces.append(Open(before + part.raw(place, base + 1), name))
        self._inline(base + 1, part.ends[base])
        self.pieces.append(Close(part.raw(part.ends[base], end + 1) + after, name))

    def _text(self, text: str, before: str, properties: str, tag: str, closing: Token) -> None:
        """Take text with the run that it is in; runs that differ in their history alone are the same."""
        key = (_IDENTITY.sub("", before), properties)
        if key not in self.runs:
            end = before[1:].split()[0].rstrip(">")
            self.runs[key] = _Run(f"{before}{properties}{tag}", f"{closing.raw}</{end}>")
        self.letters[key] += len(text)
        run = self.runs[key]
        self.pieces += [Open(run, "run"), text, Close(run, "run")]

    def _joined(self, ground: _Run) -> list[Piece]:
        """Return the pieces with neighbouring runs joined, and text of the ground without a run."""
        joined: list[Piece] = []
        for piece in self.pieces:
            raw = None if isinstance(piece, str) else piece.raw
            if raw is ground:
                continue
            before = joined[-1] if joined else None
            if isinstance(piece, Open) and isinstance(before, Close) and isinstance(raw, _Run) and before.raw is raw:
                joined.pop()  # the same run goes on
            elif isinstance(piece, str) and isinstance(before, str):
                joined[-1] = before + piece
            elif piece != "":
                joined.append(piece)
        return _divided(joined)


def _divided(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with dividers for the ends of lines at which a text ends: no small letters, no comma before."""
    after, following = [""] * len(pieces), ""
    for place in range(len(pieces) - 1, -1, -1):
        after[place], piece = following, pieces[place]
        if isinstance(piece, str):
            following = piece.strip()[:1] or following
    divided: list[Piece] = []
    before = ""
    for piece, begins in zip(pieces, after, strict=True):
        if isinstance(piece, str):
            before = piece.strip()[-1:] or before
        goes_on = bool(before) and bool(begins) and (begins.islower() or before in ",;(–-")
        is_end = isinstance(piece, EmptyElement) and piece.blank == "\n" and not goes_on
        divided.append(Close(piece.raw, _DIVIDER) if isinstance(piece, EmptyElement) and is_end else piece)
    return divided


_SPACE = ' xml:space="preserve">'
_HYPHEN = regex.compile(r"(?<=\w)-(?=\w)")
