"""Word and PowerPoint: XML archives whose paragraphs contain runs of text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

import regex

from ziggurat.serve.text.documents import direction
from ziggurat.serve.text.documents.fields import entry_template, silent_fields
from ziggurat.serve.text.documents.opendocument import PROPERTIES, xml_members
from ziggurat.serve.text.documents.package import PACKED, content_types, is_left, main_part
from ziggurat.serve.text.documents.text_runs import DIVIDER, Run, RunForm, joined
from ziggurat.serve.text.files import Archive, Settings
from ziggurat.serve.text.markup import (
    MarkupForm,
    MarkupSlot,
    Raw,
    Template,
    TemplateGroup,
    filled,
    markup_template,
    with_attributes,
)
from ziggurat.serve.text.projection import Close, EmptyElement, Open, Piece, SpannedText
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.serve.text.tokens import ATTRIBUTE, Spellings, Token, read_xml, xml_ends

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
# Parts are recognised by content type, whatever their names; by their usual names if a file lists no types.
_DRAWN = r"diagrams/(?:data|drawing)\d*|charts/chart\d*|drawings/drawing\d*"
_DOCX = regex.compile(rf"word/(?:document\d*|header\d*|footer\d*|footnotes|endnotes|comments|{_DRAWN})\.xml")
_PPTX = regex.compile(
    r"ppt/(?:slides/slide|notesSlides/notesSlide|slideMasters/slideMaster|slideLayouts/slideLayout)\d+\.xml"
    rf"|ppt/(?:{_DRAWN})\.xml"
)
_TYPES = regex.compile(
    r".*(?:wordprocessingml\.(?:header|footer|footnotes|endnotes|comments)"
    r"|presentationml\.(?:slide|notesSlide|slideMaster|slideLayout)"
    r"|(?:wordprocessingml\.(?:document|template)|ms-word\.(?:document|template)\.macroEnabled(?:Template)?)\.main"
    r"|drawingml\.(?:chart|chartshapes|diagramData|diagramDrawing))\+xml"
)
_STYLES = regex.compile(r"word/(?:styles|numbering)\.xml")
_STYLE_TYPES = regex.compile(r".*wordprocessingml\.(?:styles|numbering)\+xml")
# Text outside paragraphs that is neither read nor meant for readers.
_SILENT = frozenset(("w:moveFrom", "w:del", "w:rt", "a:fld"))
# Descriptions of pictures, text in WordArt, and texts for choosing or searching: local names of attributes, by element.
_SAID = {
    **dict.fromkeys(("docPr", "cNvPr", "textpath", "shape"), ("descr", "title", "string", "alt")),
    **dict.fromkeys(("w:helpText", "w:statusText", "w:listEntry", "w:tblCaption", "w:tblDescription"), ("val",)),
    "w:listItem": ("displayText",),
    **dict.fromkeys(("w:hyperlink", "a:hlinkClick", "a:hlinkMouseOver"), ("tooltip",)),
}
_BINDINGS = ("w:dataBinding", "dataBinding")
"""_BINDINGS are elements that make Word take a control's text from another part instead of this one."""
_LETTER = regex.compile(r"\p{L}")
# Before the first text of a paragraph, where a letter in a frame may be a drop cap.
_BEFORE_TEXT = frozenset(("w:pPr", "w:r", "w:rPr", "w:bookmarkStart", "w:bookmarkEnd", "w:proofErr"))
_MARKS = r"<(?:\w++:)?t(?:\s[^<>]*+)?>(?P<cap>(?:(?![&<])\p{P}|&\w++;)*+"
_CAP_WORD = regex.compile(_MARKS + r"[^\s&<]*+)")
# In scripts with joined letters, a whole word is framed.
_CAP_OF_WORD = regex.compile(_MARKS + r"(?:(?=\p{Arab}|\p{Syrc}|\p{Mong}|\p{Nkoo}|\p{Adlm})[^\s&<]++|(?![\s&<])\X)?+)")
# Elements around runs that are written again around the same words; other elements in a paragraph are points.
_AROUND = frozenset(("w:hyperlink", "w:ins", "w:moveTo", "w:smartTag", "w:sdt", "w:fldSimple", "w:bdo", "w:dir")) | {
    "w:customXml"
}
# Elements that readers see between two words; bookmarks, notes and spelling marks may occur inside a word.
_SEEN = frozenset(
    ("w:drawing", "w:pict", "w:object", "w:sym", "mc:AlternateContent", "m:oMath", "m:oMathPara", "a:fld", "w:pgNum")
) | {"w:footnoteReference", "w:endnoteReference"}
_TABS = frozenset(("w:tab", "w:ptab"))
_BREAKS = frozenset(("w:br", "w:cr", "a:br"))
_IDENTITY = regex.compile(r'\s+w:rsid\w*="[^"]*"')
_FIELD = "field"


def docx(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of a Word file to translate, including headers, notes, comments, text boxes; return the file."""
    return (yield from _office(content, name, settings, _DOCX, "word/document.xml"))


def pptx(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of a PowerPoint file to translate, including notes, diagrams and charts; return the file."""
    return (yield from _office(content, name, settings, _PPTX, "ppt/presentation.xml"))


def _office(
    content: bytes, name: str, settings: Settings, parts: regex.Pattern[str], main: str
) -> SentenceRequests[Result[bytes]]:
    archive = Archive(content, name, settings.limits)
    types = content_types(archive, name)
    main = main_part(archive, name, types, main)
    archive.read(main)
    documents = {
        part: read_xml(archive.markup(part), f"{name}: {part}", _SPACES)
        for part in archive.names
        if part == main or parts.fullmatch(part) or _TYPES.fullmatch(types.get(part, ""))
        if part == main or not archive.read(part).startswith(PACKED)
    }
    # Text of masters and layouts is shown on slides, except in placeholders, which slides replace.
    readers = {
        part: _Part(xml.tokens, models="/slideMasters/" in part or "/slideLayouts/" in part)
        for part, xml in documents.items()
    }
    templates = {part: reader.template() for part, reader in readers.items()}
    for part in archive.names:
        if part == "docProps/core.xml" or types.get(part, "").endswith("core-properties+xml"):
            documents[part] = read_xml(archive.markup(part), f"{name}: {part}", _SPACES)
            templates[part] = markup_template(documents[part].tokens, PROPERTIES)
    left = [part for part in archive.names if part not in documents and is_left(archive, part, types.get(part, ""))]
    left += [part for part, reader in readers.items() for _ in range(reader.unread())]
    for part in archive.names if direction.turned(settings) is not None else ():  # the parts that define styles
        if part not in documents and (_STYLES.fullmatch(part) or _STYLE_TYPES.fullmatch(types.get(part, ""))):
            documents[part] = read_xml(archive.markup(part), f"{name}: {part}", _SPACES)
            templates[part] = ["".join(token.raw for token in documents[part].tokens)]
    return (yield from xml_members(archive, documents, templates, settings, left, turn=direction.office))


class _Part:
    """One XML file in the archive."""

    def __init__(self, tokens: Sequence[Token], *, models: bool = False) -> None:
        self.models = models  # whether placeholders are left unchanged
        self.tokens, self.ends = tokens, xml_ends(tokens)
        # Templates of paragraphs by index: one in a text box occurs again if the source of the paragraph around it is
        # kept.
        self.made: dict[int, Template] = {}
        self.read: set[int] = set()  # indices of text elements
        self.bindings = list(self._bound())
        self.caps: dict[int, tuple[Template, int]] = {}

    def template(self, begin: int = 0, end: int | None = None, *, bound: bool | None = None) -> Template:
        """Return the template of the tokens from `begin` to `end`, with a slot for each paragraph.

        `bound`: whether controls stay bound to other parts; None: they do if none of their text changes.
        """
        template: Template = []
        place, end = begin, len(self.tokens) if end is None else end
        while place < end:
            if (group := self._group(place, bound)) is not None:
                template += group[0]
                place = group[1]
                continue
            token = self.tokens[place]
            if token.kind == "text" and place and self.tokens[place - 1].name == "w:instrText":
                template += self.made.setdefault(place, entry_template(token.raw))
            elif names := self._said(place):
                template += self.made.setdefault(place, with_attributes(token, names, xml=True))
            else:
                template.append(token.raw)
            if token.kind == "open" and token.name in ("w:p", "a:p", "c:v"):
                if place not in self.made:
                    is_value = token.name == "c:v"  # value in a chart
                    self.made[place] = self._value(place) if is_value else _Paragraph(self, place).template()
                template += self.made[place]
                place = self.ends[place]
                template.append(self.tokens[place].raw)
            place += 1
        return template

    def _group(self, place: int, bound: bool | None) -> tuple[Template, int] | None:
        """Return the template of elements that are not read tag by tag, and the next index; None: no such element."""
        token, after = self.tokens[place], self.after(place)
        if token.name in _BINDINGS and bound is False and self._are_bound(place, after):
            return [], after
        if token.kind != "open":
            return None
        if self.models and token.name == "sp" and any(t.name == "ph" for t in self.tokens[place : place + 40]):
            self.read.update(range(place, after))
            return [self.raw(place, after)], after
        if token.name == "w:sdt" and bound is None and self._are_bound(place, after):
            free, tied = (self.template(place, after, bound=is_bound) for is_bound in (False, True))
            return [TemplateGroup(free, tied)], after
        if place not in self.caps and token.name == "w:p" and (following := self._after_cap(place)):
            self.caps[place] = [self._with_cap(place, following)], self.after(following)
        return self.caps.get(place)

    def _are_bound(self, begin: int, end: int) -> bool:
        at = bisect_left(self.bindings, begin)
        return at < len(self.bindings) and self.bindings[at] < end

    def _bound(self) -> Iterator[int]:
        """Yield the indices of the bindings of controls that contain words."""
        places = [place for place, token in enumerate(self.tokens) if token.name in _BINDINGS]
        if not places:
            return
        worded = [place for place, token in enumerate(self.tokens) if _LETTER.search(token.text)]
        controls: list[int] = []
        for place, token in enumerate(self.tokens):
            while controls and self.ends[controls[-1]] < place:
                controls.pop()
            if token.name == "w:sdt" and token.kind == "open":
                controls.append(place)
            elif token.name in _BINDINGS and controls:
                first = bisect_left(worded, controls[-1])
                if first < len(worded) and worded[first] < self.ends[controls[-1]]:
                    yield place

    def _after_cap(self, place: int) -> int:
        """Return the paragraph whose first letter is the drop cap at `place`; 0 if there is none."""
        properties = next((child for child in self.children(place)[:1] if self.tokens[child].name == "w:pPr"), place)
        frames = self.children(properties) if properties != place else []
        if not any(self.tokens[child].attributes.get("w:dropCap") in ("drop", "margin") for child in frames):
            return 0
        following = self._next(self.after(place))
        first = following + 1
        while first < self.ends.get(following, 0) and self.tokens[first].name != "w:t":
            name = self.tokens[first].name
            if name not in _BEFORE_TEXT and self.tokens[first].kind in ("open", "empty"):
                return 0
            first = self.after(first) if name in ("w:pPr", "w:rPr") else first + 1
        inside = self.tokens[following + 1 : self.ends.get(following, 0)]
        is_text = first + 1 < len(self.tokens) and self.tokens[first].kind == "open" and self.tokens[first + 1].text
        is_plain = self.tokens[following].name == "w:p" and all(token.name != "w:p" for token in inside)
        is_cap = any(map(_LETTER.search, self._texts_in(place).values()))
        return following if is_text and is_plain and is_cap else 0

    def _next(self, place: int) -> int:
        """Return the index of the next tag."""
        while place < len(self.tokens) - 1 and self.tokens[place].kind == "text":
            place += 1
        return place

    def _texts_in(self, place: int) -> dict[int, str]:
        """Return the texts in an element by index."""
        places = [at for at in range(place, self.after(place)) if self.tokens[at].name == "w:t"]
        opened = [at + 1 for at in places if self.tokens[at].kind == "open" and self.tokens[at + 1].text]
        return {at: self.tokens[at].text for at in opened}

    def _with_cap(self, place: int, following: int) -> TemplateGroup:
        """Return the template of a drop cap and the paragraph that it starts, which are one text."""
        caps, end = self._texts_in(place), self.ends[following]
        self.read.update(at - 1 for at in caps)
        first = min(caps)
        before = self.raw(place, first)
        after = "".join(self.tokens[at].raw for at in range(first + 1, following) if at not in caps)
        cap = "".join(caps.values()).rstrip()
        said = [self.tokens[following].raw, *_Paragraph(self, following).template(cap), self.tokens[end].raw]
        begins = next(iter(self._texts_in(following).values()))
        pattern = _CAP_OF_WORD if begins[0].isalpha() else _CAP_WORD

        def with_cap(text: str) -> str:
            found = pattern.search(text)
            if found is None:
                return before + after + text
            start, stop = found.span("cap")
            return before + found["cap"] + after + text[:start] + text[stop:]

        source = [self.raw(place, following + 1), *self.template(following + 1, end), self.tokens[end].raw]
        return TemplateGroup([TemplateGroup(said, finish=with_cap)], source)

    def _said(self, place: int) -> frozenset[str]:
        """Return the names of a tag's attributes that are text, as spelt in the file but in lower case."""
        token = self.tokens[place]
        said = _SAID.get(token.name, ())
        if token.name == "w:default":
            before = next(t for t in reversed(self.tokens[max(0, place - 2) : place]) if t.kind != "text")
            said = ("val",) if before.name == "w:textInput" or before.attributes.get("w:val") == "regular" else ()
        names = (found[1] for found in ATTRIBUTE.finditer(token.raw)) if said else ()
        return frozenset(name.lower() for name in names if name.rpartition(":")[2] in said)

    def _value(self, place: int) -> Template:
        inside = self.tokens[place + 1 : self.ends[place]]
        raw, text = "".join(token.raw for token in inside), "".join(token.text for token in inside)
        if not _LETTER.search(text):
            return [raw]
        form = MarkupForm(raw, Spellings(), xml=True)
        form.spellings.add(text, raw)
        return [MarkupSlot(SpannedText(text), form)]

    def unread(self) -> int:
        """Return how many text elements were not read although readers see them."""
        count = place = 0
        while place < len(self.tokens):
            token = self.tokens[place]
            if token.kind == "open" and token.name in ("w:t", "a:t"):
                text = "".join(part.text for part in self.tokens[place : self.after(place)])
                count += place not in self.read and _LETTER.search(text) is not None
            place = self.after(place) if token.name in _SILENT else place + 1
        looks = (place for place, token in enumerate(self.tokens) if token.name == "a:rPr")
        links = (self.tokens[child] for place in looks for child in self.children(place))
        return (
            count
            + silent_fields(self.tokens)
            + sum(_LETTER.search(link.attributes.get("tooltip", "")) is not None for link in links)
        )

    def raw(self, begin: int, end: int) -> str:
        return "".join(token.raw for token in self.tokens[begin:end])

    def after(self, place: int) -> int:
        """Return the index after an element."""
        return self.ends.get(place, place) + 1

    def children(self, place: int) -> list[int]:
        """Return the indices of an element's direct children."""
        places, at = [], place + 1
        while at < self.ends.get(place, place):
            if self.tokens[at].kind in ("open", "empty"):
                places.append(at)
            at = self.after(at)
        return places


class _Paragraph:
    """Reader of one paragraph; `part` has its tokens, and `place` is the index of its opening tag."""

    def __init__(self, part: _Part, place: int) -> None:
        self.part, self.place = part, place
        self.pieces: list[Piece] = []
        self.runs: dict[tuple[str, str], Run] = {}
        self.letters: Counter[tuple[str, str]] = Counter()
        self.hyphens: list[str] = []

    def template(self, cap: str = "") -> Template:
        """Return the content between the paragraph's tags; `cap` is a drop cap that precedes its first text."""
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
        if cap:
            first = next(number for number, piece in enumerate(self.pieces) if isinstance(piece, str))
            self.pieces.insert(first, cap)
        tail = part.raw(last, end)
        if not self.runs:  # nothing to read
            return [*template, *part.template(begin, last), tail]
        ground = max(self.runs, key=lambda key: self.letters[key])
        pieces = joined(self.pieces, self.runs[ground])
        form = RunForm(self.runs[ground], self.hyphens)
        return [*template, TemplateGroup(filled(pieces, form), source=part.template(begin, last)), tail]

    def _inline(self, begin: int, end: int) -> None:
        place, part = begin, self.part
        while place < end:
            token, after = part.tokens[place], part.after(place)
            if token.name in ("w:r", "a:r"):
                self._run(place)
            elif token.name in _AROUND and token.kind == "open":
                self._around(place)
            elif token.name in _BREAKS:  # in slides; in Word they are inside runs
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
        self.pieces.append(Open(part.template(place, begin, bound=False), name))
        self._inline(begin, last)
        self.pieces.append(Close(part.raw(last, end + 1), name))

    def _run(self, place: int) -> None:
        """Read a run as text and points, each a separate run."""
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
                self.pieces.append(Close(raw, DIVIDER))
            else:
                self.pieces.append(EmptyElement(raw, is_seen=token.name in _SEEN))

    def _texts(self, place: int, before: str, properties: str, after: str) -> None:
        """Read a text element; on slides, tabs are characters."""
        self.part.read.add(place)
        token, last = self.part.tokens[place], self.part.ends[place]
        tag = token.raw if "xml:space" in token.attributes or token.name == "a:t" else token.raw[:-1] + _SPACE
        closing = self.part.tokens[last]
        shown = "".join(t.text for t in self.part.tokens[place:last])
        for text in regex.split(r"(\t+|_x000[9ABD]_)" if token.name == "a:t" else r"(\t+)", shown):
            if token.name == "a:t" and regex.fullmatch("_x000[DAB]_", text):  # a line end
                self.pieces.append(EmptyElement(f"{before}{properties}{tag}{text}{closing.raw}{after}", "\n"))
            elif text.startswith(("\t", "_x0009_")):
                self.pieces.append(Close(f"{before}{properties}{tag}{text}{closing.raw}{after}", DIVIDER))
            elif text:
                self._text(text, before, properties, tag, closing)

    def _hyphen(self, raw: str, before: str, properties: str) -> None:
        """Read a non-breaking hyphen, which the model sees as a plain hyphen."""
        prefix = raw[1 : raw.index("noBreakHyphen")]
        tag, closing = f"<{prefix}t{_SPACE}", f"</{prefix}t>"
        self.hyphens.append(f"{closing}{raw}{tag}")
        self._text("-", before, properties, tag, Token("close", closing))

    def _ruby(self, place: int, before: str, after: str) -> None:
        """Read text with ruby annotations: only the text is translated, and its element keeps the annotations."""
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
        """Take text with its run; runs that differ only in their editing history are the same."""
        key = (_IDENTITY.sub("", before), properties)
        if key not in self.runs:
            end = before[1:].split()[0].rstrip(">")
            self.runs[key] = Run(f"{before}{properties}{tag}", f"{closing.raw}</{end}>")
        self.letters[key] += len(text)
        run = self.runs[key]
        self.pieces += [Open(run, "run"), text, Close(run, "run")]


_SPACE = ' xml:space="preserve">'
