"""Readers of the layouts that corpora come in: each gives blocks of lines, a list a side, equally long.

`read` takes plain text, TSV, WMT's SGML, IWSLT's tagged text, TMX and WMT's XML. Segments of SGML and XML are cleaned
as sacreBLEU does, so test sets have its text: white space collapsed, entities of SGML left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from ziggurat.config.data import CorpusConfig
from ziggurat.corpora.fetch.entries import Corpus
from ziggurat.corpora.fetch.xml_layouts import tmx_units, wmt_segments
from ziggurat.data.lines import LineStream
from ziggurat.data.readers import BLOCK_PAIRS, CorpusReader
from ziggurat.system.errors import DataError

Block = tuple[list[str], ...]
"""Lines of a block, a list for each side."""

_SEGMENT = re.compile(r"<seg.*?>(.*)</seg>.*?")
_KEPT_TAGS = re.compile(r"<(title|description)>(.*?)</\1>")


@dataclass
class Counts:
    """What happened to the lines of a corpus."""

    pairs: int = 0
    """Pairs, or lines of one language."""
    skipped: int = 0
    """Lines or units without both sides, which were left out."""
    terms: dict[str, str] = field(default_factory=dict)
    """Terms of use that lay in the archives: name, behind the archive's address where there are several -> text."""


def read(corpus: Corpus, files: Sequence[Path], counts: Counts) -> Iterator[Block]:
    """Yield the blocks of a corpus; `files` has a file a side, or one with both, as its layout wants.

    Raises DataError naming file and line: damage, text that is not UTF-8, sides of unequal length, nothing in it.
    """
    if corpus.layout == "text":
        blocks = _text(files)
    elif corpus.layout == "tsv":
        blocks = _tsv(files[0], corpus.columns[: len(corpus.languages)], corpus.separator, counts)
    elif corpus.layout in ("sgm", "ted"):
        pick = _segments if corpus.layout == "sgm" else _talks
        blocks = _together(files, [pick(path) for path in files])
    elif corpus.layout == "tmx":
        blocks = _joined(tmx_units(files[0], corpus.spellings or [(code,) for code in corpus.languages]), counts)
    else:
        blocks = _joined(wmt_segments(files[0], corpus.references), counts)
    before = counts.pairs
    for block in blocks:
        counts.pairs += len(block[0])
        yield block
    if counts.pairs == before:
        raise DataError(f"{files[0]}: nothing in it of the layout `{corpus.layout}`; did the corpus change its form?")


def clean(text: str) -> str:
    """Return `text` on one line, trimmed, with each run of white space as one blank; as sacreBLEU cleans segments."""
    return re.sub(r"\s+", " ", text.strip())


def _text(files: Sequence[Path]) -> Iterator[Block]:
    """Yield lines of one file, or line i of one with line i of the other."""
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
    """Yield columns of a file; published files have lines with too few, which are left out and counted."""
    for lines in _lines(path):
        rows = [line.split(separator) for line in lines]
        whole = [row for row in rows if len(row) > max(columns)]
        counts.skipped += len(rows) - len(whole)
        yield tuple([row[column] for row in whole] for column in columns)


def _segments(path: Path) -> Iterator[str]:
    """Yield the text of each <seg> line. Such files are no valid SGML, so nobody parses them as that."""
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


def _together(files: Sequence[Path], sides: Sequence[Iterator[str]]) -> Iterator[Block]:
    """Yield the texts of both sides in blocks. Raises DataError where one side ends first."""
    block: list[tuple[str, ...]] = []
    for number, texts in enumerate(zip_longest(*sides), 1):
        if None in texts:
            shorter = files[texts.index(None)]
            raise DataError(f"{shorter}: ends after {number - 1:,} segments, but the other side has more")
        block.append(texts)
        if len(block) == BLOCK_PAIRS:
            yield tuple(map(list, zip(*block, strict=True)))
            block = []
    if block:
        yield tuple(map(list, zip(*block, strict=True)))


def _joined(units: Iterator[tuple[str, str] | None], counts: Counts) -> Iterator[Block]:
    """Yield pairs in blocks; None is a unit that lacks a side."""
    block: tuple[list[str], list[str]] = ([], [])
    for unit in units:
        if unit is None:
            counts.skipped += 1
            continue
        for side, text in zip(block, unit, strict=True):
            side.append(clean(text))
        if len(block[0]) == BLOCK_PAIRS:
            yield block
            block = ([], [])
    if block[0]:
        yield block
