"""Amounts of text that the steps work on: counted where it is there, else bounds by what it is made from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config.pipeline import BACK_TRANSLATION, BITEXT, ModelName
from ziggurat.config.pipeline_corpora import MonolingualText
from ziggurat.corpora.pipeline.corpora import fetched_files, resolved
from ziggurat.corpora.pipeline.road import DISTILLED, Corpora, Road
from ziggurat.data.readers import CorpusReader
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import ZigguratError
from ziggurat.system.files import find_files

_BYTES_PER_LINE = 60
_PACKED = 3  # bytes of text for one of a compressed file
_COUNTED = 1 << 28  # bytes of a file that is still counted


class Lines(NamedTuple):
    """A number of lines or pairs.

    Attributes:
        number: the number.
        most: whether it is a bound: text that is still to be cleaned or translated.
        rough: whether it is told by the size of a file.
    """

    number: int
    most: bool = False
    rough: bool = False

    def __str__(self) -> str:
        """Return it in words: `at most 1,000`."""
        return f"{'at most ' if self.most else ''}{'about ' if self.rough or not self.most else ''}{self.number:,}"


class Amounts:
    """Numbers of lines that steps work on; None where nothing is known, as of a corpus that is not fetched yet.

    Args:
        road: of the pipeline.
    """

    def __init__(self, road: Road) -> None:
        self._road = road
        self._config = road.config

    def given(self) -> Lines | None:
        """Return the pairs of the bitext as it comes in."""
        return _sum([self._given(number) for number in range(len(self._config.bitext.train))])

    def reader(self, number: int) -> CorpusReader | None:
        """Return what reads a corpus of the bitext as it comes in; None: it is not there."""
        key, corpus = f"bitext.train.{number}", self._config.bitext.train[number]
        with contextlib.suppress(ZigguratError):  # not fetched, or not as it should be, which the step says
            return CorpusReader.of(resolved(self._road, corpus, key), key, self._road.languages)
        return None

    def _given(self, number: int) -> Lines | None:
        if (reader := self.reader(number)) is None:
            return None
        if reader.kind == "parquet":
            return _sum([_rows_of(part[0]) for part in reader.files])
        return lines_of(part[0] for part in reader.files)

    def bitext(self) -> Lines | None:
        """Return the pairs of the bitext that are trained on."""
        held = self._config.bitext.hold_out
        less = held.dev + held.test if held is not None else 0
        files = [self._road.sides("clean", "train", name)[0] for name in self._road.bitext_names()]
        return lines_of(files) or _at_most(self.given(), less)

    def text(self, side: str) -> Lines | None:
        """Return the lines of the text of one language, `source` or `target`."""
        entries: Sequence[MonolingualText] = getattr(self._config.monolingual, side)
        bounds = (self._entry(entry, side, number) for number, entry in enumerate(entries))
        return lines_of([self._road.at("monolingual", f"{side}.txt")]) or _at_most(_sum(list(bounds)))

    def _entry(self, entry: MonolingualText, side: str, number: int) -> Lines | None:
        key, language = f"monolingual.{side}.{number}", self._road.languages[side == "target"]
        found: Lines | None = None
        with contextlib.suppress(ZigguratError):
            if entry.path is not None:
                found = lines_of(find_files(entry.path, f"{key}.path"))
            elif entry.fetch is not None:
                found = lines_of(fetched_files(self._road, entry.fetch, [language], key))
        limit = None if entry.lines is None else Lines(entry.lines)
        return min((lines for lines in (found, limit) if lines is not None), default=None)

    def made(self, step: str) -> Lines | None:
        """Return the pairs of the corpus that a step makes, by `backtranslate`, `distil`, ... or `filter`."""
        return lines_of([self._road.at(step, "corpus", "target.txt")]) or _at_most(self.read(step))

    def read(self, step: str) -> Lines | None:
        """Return the lines, or pairs, that such a step reads."""
        if step == "backtranslate":
            return self.text("target")
        if step == "filter":
            return _sum([self.made(other) for other in Corpora(self._road).translated()])
        return self.bitext() if step == DISTILLED[0] else self.text("source")

    def of(self, model: ModelName) -> Lines | None:
        """Return the pairs that a model learns from."""
        found: list[Lines | None] = []
        for kind in self._config.weights(model):
            if kind == BITEXT:
                found.append(self.bitext())
            elif kind == BACK_TRANSLATION:
                found.append(self.made("backtranslate"))
            else:
                found += [self.made(step) for step in Corpora(self._road).distilled()]
        return _sum(found)


def lines_of(files: Iterable[Path]) -> Lines | None:
    """Return the lines of files: of plain ones counted, of others by their sizes; None where one is not there."""
    total, rough = 0.0, False
    for path in files:
        try:
            size = os.path.getsize(path)
        except OSError:
            return None
        packed = compression_of(path) is not None
        if packed or size > _COUNTED:
            total, rough = total + size * (_PACKED if packed else 1) / _BYTES_PER_LINE, True
        else:
            total += path.read_bytes().count(b"\n")
    return Lines(round(total), rough=rough)


def _rows_of(path: Path) -> Lines | None:
    """Return the rows of a Parquet file; None where it cannot be read as it is."""
    try:
        return Lines(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return None


def _sum(parts: Sequence[Lines | None]) -> Lines | None:
    """Return all of them together; None where one is not known."""
    known = [lines for lines in parts if lines is not None]
    if len(known) < len(parts):
        return None
    return Lines(sum(lines.number for lines in known), any(lines.most for lines in known), any(x.rough for x in known))


def _at_most(lines: Lines | None, less: int = 0) -> Lines | None:
    """Return a number as a bound, `less` taken away."""
    return None if lines is None else Lines(max(0, lines.number - less), most=True, rough=lines.rough)
