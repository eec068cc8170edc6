"""Word and PowerPoint files (.docx, .pptx): paragraphs whose runs are inline markup.

All text of a paragraph is in runs, each with its properties. Neighbouring runs with the same properties are one; the
properties of most of a paragraph's text are its ground, and other runs are elements on it. So the translation has a run
for each of them, and as many of the ground as it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import regex

from ziggurat.serve.text.documents.archive import Archive, Settings
from ziggurat.serve.text.documents.opendocument import xml_members
from ziggurat.serve.text.markup import Raw, Template, add, filled
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import Token, read_xml, spelt

_SPACES = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main": "w",
    "http://purl.oclc.org/ooxml/wordprocessingml/main": "w",
    "http://schemas.openxmlformats.org/drawingml/2006/main": "a",
    "http://purl.oclc.org/ooxml/drawingml/main": "a",
    "http://schemas.openxmlformats.org/officeDocument/2006/math": "m",
}
_DOCX = regex.compile(r"word/(?:document|document2|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
_PPTX = regex.compile(r"ppt/(?:slides/slide|notesSlides/notesSlide|diagrams/data|charts/chart)\d+\.xml")
# Elements around runs that are written around the same words again; other elements of a paragraph are points.
_AROUND = frozenset(("w:hyperlink", "w:ins", "w:moveTo", "w:smartTag", "w:sdt", "w:fldSimple", "w:bdo", "w:dir"))
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
    archive.read(main)
    documents = {
        part: read_xml(archive.markup(part), f"{name}: {part}", _SPACES)
        for part in archive.names
        if parts.fullmatch(part)
    }
    templates = {part: _Part(xml.tokens).template() for part, xml in documents.items()}
    return (yield from xml_members(archive, documents, templates, settings))


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
        pieces, source: the paragraph as it was read: a paragraph that stays as it is keeps its bytes.
    """

    ground: _Run
    pieces: list[Piece] = field(default_factory=list)
    source: Template = field(default_factory=list)

    def write(self, pieces: Sequence[Piece]) -> Template:
        """Return the pieces as strings and slots."""
        if list(pieces) == self.pieces:
            return self.source
        template: Template = []
        runs = [self.ground]
        for piece in pieces:
            if isinstance(piece, str):
                template += [runs[-1].before, spelt(piece), runs[-1].after]
            elif isinstance(piece.raw, _Run):
                if isinstance(piece, Open):
                    runs.append(piece.raw)
                else:
                    runs.pop()
            else:
                add(template, piece.raw)
        return template


class _Part:
    """One XML file of the archive."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.ends: dict[int, int] = {}
        # Templates of paragraphs by place: one in a text box is met again when the source of that around it is kept.
        self.made: dict[int, Template] = {}
        stack: list[int] = []
        for place, token in enumerate(tokens):
            if token.kind == "open":
                stack.append(place)
            elif token.kind == "close":
                self.ends[stack.pop()] = place

    def template(self, begin: int = 0, end: int | None = None) -> Template:
        """Return the template of the tokens from `begin` to `end`, with a slot for each paragraph."""
        template: Template = []
        place, end = begin, len(self.tokens) if end is None else end
        while place < end:
            token = self.tokens[place]
            template.append(token.raw)
            if token.kind == "open" and token.name in ("w:p", "a:p"):
                if place not in self.made:
                    self.made[place] = _Paragraph(self, place).template()
                template += self.made[place]
                place = self.ends[place]
                template.append(self.tokens[place].raw)
            place += 1
        return template

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
        form = _RunForm(self.runs[ground])
        slots = filled(pieces, form)
        if len(slots) == 1:
            form.pieces, form.source = pieces, part.template(begin, last)
        return [*template, *slots, tail]

    def _inline(self, begin: int, end: int) -> None:
        """Read runs and what is around and between them."""
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
                self.pieces.append(EmptyElement(part.template(place, after)))
            place = after

    def _around(self, place: int) -> None:
        """Read an element around runs."""
        part, end = self.part, self.part.ends[place]
        begin, last = place + 1, end
        for child in part.children(place):
            if part.tokens[child].name == "w:sdtContent" and child in part.ends:
                begin, last = child + 1, part.ends[child]
        name = f"{part.tokens[place].name} {place}"
        while begin < last and part.tokens[begin].name in ("w:sdtPr", "w:smartTagPr", "w:fldData"):
            begin = part.after(begin)
        self.pieces.append(Open(part.raw(place, begin), name))
        self._inline(begin, last)
        self.pieces.append(Close(part.raw(last, end + 1), name))

    def _run(self, place: int) -> None:
        """Read a run: stretches of text and points, each as a run of its own."""
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
                tag = token.raw if "xml:space" in token.attributes or token.name == "a:t" else token.raw[:-1] + _SPACE
                self._text(
                    "".join(t.text for t in part.tokens[child:end]), before, properties, tag, part.tokens[end - 1]
                )
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
            else:
                self.pieces.append(EmptyElement(raw))

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
        return joined


_SPACE = ' xml:space="preserve">'
