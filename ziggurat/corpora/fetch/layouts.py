"""Readers of corpus layouts, which give blocks of lines: one list per side, all equally long.

`read` takes plain text, TSV, WMT's SGML, IWSLT's tagged text, TMX and WMT's XML. Segments of SGML and XML are cleaned
as in sacreBLEU, so test sets have the same text: white space is collapsed, and SGML entities are left unchanged.

TMX and the XML of WMT test sets are read as streams by expat; files that declare their own entities are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from xml.parsers import expat

from ziggurat.config.data import CorpusConfig
from ziggurat.corpora.fetch.registry import RegisteredCorpus
from ziggurat.data.lines import LineStream
from ziggurat.data.readers import BLOCK_PAIRS, CorpusReader
from ziggurat.system.compressed import byte_stream
from ziggurat.system.errors import DamageError, DataError, printable

_BLOCK_BYTES = 1 << 16
_MOST_CHARACTERS = 1 << 20
"""Longest text of one segment."""
_MOST_SEGMENTS = 1_000_000
"""Most segments of a test set, which is held in memory."""
_CODES = {"bpt", "ept", "ph", "it", "ut", "sub"}  # TMX: elements with formatting of the original

_Start = Callable[[str, dict[str, str]], None]
_End = Callable[[str], None]


class _Text:
    """The text of the current segment."""

    def __init__(self, path: Path) -> None:
        self._path, self._parts, self._size = path, list[str](), -1  # -1: in no segment
        self.hidden = 0
        """Number of enclosing elements whose content is not part of the text."""

    def begin(self) -> None:
        self._parts, self._size = [], 0

    def add(self, text: str) -> None:
        if self._size < 0 or self.hidden:
            return
        self._size += len(text)
        if self._size > _MOST_CHARACTERS:
            raise DataError(f"{self._path}: a segment of over {_MOST_CHARACTERS:,} characters")
        self._parts.append(text)

    def end(self) -> str:
        text = "".join(self._parts)
        self._parts, self._size = [], -1
        return text


def _parsed(path: Path, start: _Start, end: _End, text: _Text) -> Iterator[None]:
    """Parse a file and yield after each block. Raises DataError for invalid XML, or XML that declares entities."""

    def refuse(name: str, *_: object) -> None:
        raise DataError(f"{path}: declares the entity {printable(name)}; remove the declaration, if you trust the file")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.EntityDeclHandler = text.add, refuse
    try:
        with byte_stream(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                parser.Parse(block, False)
                yield
        parser.Parse(b"", True)
        yield
    except expat.ExpatError as error:
        raise DamageError(
            f"{path}, line {error.lineno}: not well-formed XML: {expat.ErrorString(error.code)}; was it cut short?"
        ) from None


def tmx_units(path: Path, languages: Sequence[str]) -> Iterator[tuple[str, str] | None]:
    """Yield the two texts of each translation unit, or None for a unit that lacks one.

    Regions (`en-GB`) and case of the codes are ignored. Raises DataError.
    """
    text, ready, unit, language = _Text(path), list[tuple[str, str] | None](), dict[str, str](), ""

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal language
        if name == "tu":
            unit.clear()
        elif name == "tuv":
            language = attributes.get("xml:lang") or attributes.get("lang", "")
        elif name == "seg":
            text.begin()
        elif name in _CODES:
            text.hidden += 1

    def end(name: str) -> None:
        if name == "seg":
            unit.setdefault(language.lower().replace("_", "-"), text.end())
        elif name in _CODES:
            text.hidden -= 1
        elif name == "tu":
            sides = [_of_language(unit, code.lower().replace("_", "-")) for code in languages]
            ready.append(None if None in sides else (str(sides[0]), str(sides[1])))

    for _ in _parsed(path, start, end, text):
        yield from ready
        ready.clear()


def _of_language(unit: dict[str, str], wanted: str) -> str | None:
    if wanted in unit:
        return unit[wanted]
    return next((text for code, text in unit.items() if code.startswith(f"{wanted}-")), None)


def wmt_segments(path: Path, references: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield source and reference of each segment of a test set, without documents of test suites.

    `references` are translators in the order of preference, "" for one without a name; if empty, the first in the file
    is used. As in sacreBLEU, segments that no reference translates are left out, and the text is empty if only another
    reference translates it.

    Raises DataError, including if the file has none of the references.
    """
    text, documents = _Text(path), list[dict[tuple[str, str], dict[str, str]]]()
    part: tuple[str, str] | None = None
    skipping, number, count = False, "", 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal part, skipping, number, count
        if name == "doc":
            skipping = "testsuite" in attributes
            documents.append({})
        elif name in ("src", "ref", "hyp"):
            part = (name, attributes.get("translator", "")) if name != "hyp" and documents and not skipping else None
            if part is not None:
                documents[-1].setdefault(part, {})
        elif name == "seg" and part is not None:
            number, count = attributes.get("id", ""), count + 1
            if count > _MOST_SEGMENTS or not number.isdecimal():
                raise DataError(f"{path}: no test set: {count:,} segments, the last with the id {printable(number)!r}")
            text.begin()

    def end(name: str) -> None:
        nonlocal part
        if name == "seg" and part is not None:
            documents[-1][part][number] = text.end()
        elif name in ("src", "ref", "hyp"):
            part = None

    for _ in _parsed(path, start, end, text):
        pass
    translators = list(dict.fromkeys(who for parts in documents for kind, who in parts if kind == "ref"))
    chosen = next((who for who in references or translators if who in translators), None)
    if chosen is None:
        raise DataError(f"{path}: has references by {translators or 'nobody'}, none by {list(references)}")
    for parts in documents:
        every = [texts for (kind, _), texts in parts.items() if kind == "ref"]
        source = next((texts for (kind, _), texts in parts.items() if kind == "src"), {})
        for key in sorted(source, key=int):
            if any(texts.get(key) for texts in every):
                yield source[key], parts.get(("ref", chosen), {}).get(key, "")


Block = tuple[list[str], ...]
"""Lines of a block, a list for each side."""

_SEGMENT = re.compile(r"<seg.*?>(.*)</seg>.*?")
_KEPT_TAGS = re.compile(r"<(title|description)>(.*?)</\1>")


@dataclass
class Counts:
    """Counts of the lines of a corpus."""

    pairs: int = 0
    """Pairs, or lines of one language."""
    skipped: int = 0
    """Lines or units without both sides, which were skipped."""
    terms: dict[str, str] = field(default_factory=dict)
    """Terms of use in the archives: name, after the archive's URL if there are several -> text."""


def read(corpus: RegisteredCorpus, files: Sequence[Path], counts: Counts) -> Iterator[Block]:
    """Yield the blocks of a corpus; `files` has one file per side, or one with both, depending on the layout.

    Raises DataError, with file and line, for damage, text that is not UTF-8, sides of unequal length, or no content.
    """
    if corpus.layout == "text":
        blocks = _text(files)
    elif corpus.layout == "tsv":
        columns = (corpus.columns or [0, 1])[: len(corpus.languages)]
        blocks = _tsv(files[0], columns, corpus.separator, counts)
    elif corpus.layout in ("sgm", "ted"):
        pick = _segments if corpus.layout == "sgm" else _talks
        blocks = _in_blocks(_together(files, [pick(path) for path in files]))
    elif corpus.layout == "tmx":
        blocks = _in_blocks(_whole(tmx_units(files[0], corpus.languages), counts))
    else:
        blocks = _in_blocks(_whole(wmt_segments(files[0], corpus.references), counts))
    before = counts.pairs
    for block in blocks:
        counts.pairs += len(block[0])
        yield block
    if counts.pairs == before:
        raise DataError(
            f"{files[0]}: contains nothing in the layout `{corpus.layout}`; has the corpus changed its form?"
        )


def clean(text: str) -> str:
    """Return `text` on one line, trimmed, with each run of white space as one space; as sacreBLEU cleans segments."""
    return re.sub(r"\s+", " ", text.strip())


def _text(files: Sequence[Path]) -> Iterator[Block]:
    if len(files) == 1:
        for lines in _lines(files[0]):
            yield (lines,)
        return
    config = CorpusConfig(source=str(files[0]), target=str(files[1]))
    yield from CorpusReader.of(config, "", ("", "")).blocks()


def _lines(path: Path) -> Iterator[list[str]]:
    stream = LineStream(path)
    while count := min(stream.available(), BLOCK_PAIRS):
        yield stream.take(count)


def _tsv(path: Path, columns: Sequence[int], separator: str, counts: Counts) -> Iterator[Block]:
    """Yield columns of a file; published files have lines with too few, which are skipped and counted."""
    for lines in _lines(path):
        rows = [line.split(separator) for line in lines]
        whole = [row for row in rows if len(row) > max(columns)]
        counts.skipped += len(rows) - len(whole)
        yield tuple([row[column] for row in whole] for column in columns)


def _segments(path: Path) -> Iterator[str]:
    """Yield the text of each <seg> line. Such files are not valid SGML, so they are not parsed as SGML."""
    for lines in _lines(path):
        for line in lines:
            if line.startswith("<seg "):
                yield clean(_SEGMENT.sub(r"\1", line))


def _talks(path: Path) -> Iterator[str]:
    """Yield the sentences, titles and descriptions of a training file of IWSLT; other tags are about the talk."""
    for lines in _lines(path):
        for line in lines:
            if not line.startswith("<"):
                yield clean(line)
            elif found := _KEPT_TAGS.match(line):
                yield clean(found[2])


def _together(files: Sequence[Path], sides: Sequence[Iterator[str]]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of both sides. Raises DataError if one side ends first."""
    for number, texts in enumerate(zip_longest(*sides)):
        if None in texts:
            shorter = files[texts.index(None)]
            raise DataError(f"{shorter}: ends after {number:,} segments, but the other side has more")
        yield texts


def _whole(units: Iterator[tuple[str, str] | None], counts: Counts) -> Iterator[tuple[str, ...]]:
    """Yield pairs, and count the units that lack a side, which are None."""
    for unit in units:
        if unit is None:
            counts.skipped += 1
        else:
            yield tuple(map(clean, unit))


def _in_blocks(rows: Iterator[tuple[str, ...]]) -> Iterator[Block]:
    while block := list(islice(rows, BLOCK_PAIRS)):
        yield tuple(map(list, zip(*block, strict=True)))
