"""Inputs of `prepare`: the corpora, found, counted and checked before anything is trained or encoded.

NAME.fetched.json next to a corpus file records its origin; `fetch` writes it, and the store's manifest keeps it. Sides
that look swapped or equal are found by the Bhattacharyya coefficient of their character trigrams (Cavnar and Trenkle
1994): 1 for equal distributions, 0 if they share no trigram. This needs no language identification.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.data.aligner import Link
from ziggurat.data.cleaning.cleaner import Examples
from ziggurat.data.cleaning.held_out import Overlap
from ziggurat.data.line_pairing import Pairing
from ziggurat.data.readers import CorpusReader, PairBlock, ScoreColumn, ScoreStream, find_scores
from ziggurat.data.signs import CorpusSigns
from ziggurat.data.subword import Tokenizer
from ziggurat.data.word_links import AlignmentFiles, HmmLinks, Sides, WordCounter, train_aligner, words_of
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import ConfigError, DataError, Problem, ZigguratError, about
from ziggurat.system.files import content_checksum, find_files, has_checksum, write_atomically
from ziggurat.system.small_files import JsonForm, parse_json, read_bounded, shaped

_CLEARLY = 1.15
"""Ratio of likenesses from which two texts count as clearly more similar.

Measured as crossed / straight likeness, with at least five lines: corpora of de-en, fr-en, cs-en, fr-de, cs-de and
en-ja from different domains stay below 0.7 with correct sides and exceed 1.4 with swapped sides. Nearly equal languages
are in between and raise no notice.
"""

_BLOCK_LINES = 200  # lines taken from each block of a file, so that a sample covers more than its start
_MOST_LINES = 2000
_LEAST_TRIGRAMS = 200  # a handful of sentences; fewer are inconclusive
_LEAST_LIKENESS = 0.2  # below this a text counts as noise


class Trigrams:
    """Counts of character trigrams in a sample of text, ignoring case."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self.add(lines)

    def add(self, lines: Iterable[str]) -> None:
        """Count more lines."""
        for line in lines:
            text = f" {' '.join(line.lower().split())} "
            self._counts.update(text[i : i + 3] for i in range(len(text) - 2))

    @property
    def total(self) -> int:
        """Number of trigrams counted."""
        return self._counts.total()

    def likeness(self, other: Trigrams) -> float:
        """Return the Bhattacharyya coefficient, from 0 to 1."""
        few, many = sorted((self, other), key=lambda t: len(t._counts))
        if not few.total:
            return 0.0
        shared = sum(sqrt(n * many._counts[trigram]) for trigram, n in few._counts.items())
        return shared / sqrt(self.total * other.total)


class SideSample:
    """A sample of the lines of both sides of a corpus."""

    def __init__(self) -> None:
        self.trigrams = (Trigrams(), Trigrams())
        self.lines = 0
        self.equal = 0

    def see(self, source: Sequence[str], target: Sequence[str]) -> None:
        """Sample the first lines of a block."""
        count = min(_BLOCK_LINES, _MOST_LINES - self.lines, len(source))
        first, second = source[:count], target[:count]
        self.lines += count
        self.equal += sum(s == t for s, t in zip(first, second, strict=True))
        for trigrams, lines in zip(self.trigrams, (first, second), strict=True):
            trigrams.add(lines)


def _looks_swapped(first: tuple[Trigrams, Trigrams], second: tuple[Trigrams, Trigrams]) -> bool:
    straight = first[0].likeness(second[0]) + first[1].likeness(second[1])
    crossed = first[0].likeness(second[1]) + first[1].likeness(second[0])
    return _is_meaningful(crossed / 2, *first, *second) and crossed > _CLEARLY * straight


def resembles_more(text: Trigrams, one: Trigrams, other: Trigrams) -> bool:
    """Return True if `text` is clearly more similar to `one` than to `other`."""
    likeness = text.likeness(one)
    return _is_meaningful(likeness, text, one, other) and likeness > _CLEARLY * text.likeness(other)


def _is_meaningful(likeness: float, *texts: Trigrams) -> bool:
    return likeness > _LEAST_LIKENESS and min(text.total for text in texts) >= _LEAST_TRIGRAMS


def named_language(path: str) -> str:
    """Return the last part of a text file's name in lower case, by convention its language: `en` of `mono.en.gz`."""
    name = Path(path).with_suffix("") if compression_of(Path(path)) else Path(path)
    return re.split(r"[._-]", name.name)[-1].lower()


_ORIGIN_FORMAT = 1
_ENDING = ".fetched.json"


class FileOrigin(JsonForm):
    """A file that was fetched."""

    url: str
    came_from: str | None = None
    """The URL or path that it came from, if different."""
    bytes: int = Field(ge=0)
    sha256: str


class PartOrigin(JsonForm):
    """A corpus in a file, with its licence."""

    name: str
    title: str
    licence: str
    terms: str | None = None
    pairs: int = Field(ge=0)
    skipped: int = Field(ge=0)
    files: list[FileOrigin]


class _File(JsonForm):
    bytes: int = Field(ge=0)
    xxh3_128: str


class Origin(JsonForm):
    """Form of a record."""

    format: int
    name: str
    languages: list[str]
    pairs: int = Field(ge=0)
    parts: list[PartOrigin]
    files: dict[str, _File]


def set_name(path: Path) -> str:
    """Return the common name of both sides' files, without language and compression: `train` of `train.de.zst`."""
    plain = path.with_suffix("") if compression_of(path) else path
    return plain.with_suffix("").name


def record_of(path: Path) -> Path:
    """Return the path of the record of a corpus file."""
    return path.with_name(f"{set_name(path)}{_ENDING}")


def write_origin(record: Path, content: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a record; `files` maps file names to length and fingerprint, `content` is the rest."""
    document: dict[str, Any] = {"format": _ORIGIN_FORMAT, **content, "files": files}
    document["checksum"] = content_checksum(document)
    write_atomically(record, json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n")


def read_origin(record: Path) -> Origin | None:
    """Return a record; None if there is none or it is another version's. Raises DataError if it is damaged."""
    try:
        document = parse_json(
            read_bounded(record, 1 << 24), str(record), remedy="fetch the corpus again with `--force`"
        )
    except FileNotFoundError:
        return None
    if not isinstance(document, dict) or not has_checksum(document):
        raise DataError(f"{record}: damaged; fetch the corpus again with `--force`")
    return shaped(document, Origin, str(record)) if document.get("format") == _ORIGIN_FORMAT else None


def _origins_of(fingerprints: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Return the origins of the corpora in files, each once, in the form kept in a store's manifest.

    If one side no longer matches its record and the other does, the parts list it under `changed`. A record that none
    of its files match is ignored, and so is a damaged one: an unknown origin is not a fault in the text.
    """
    records: dict[Path, tuple[Origin, dict[Path, bool]]] = {}
    for path, taken in fingerprints.items():
        try:
            origin = read_origin(record_of(path))
        except (ZigguratError, OSError):
            continue
        if origin is not None and path.name in origin.files:
            same = taken == origin.files[path.name].xxh3_128
            records.setdefault(record_of(path), (origin, {}))[1][path] = same
    found: dict[str, dict[str, Any]] = {}
    for origin, same_of in records.values():
        changed = [path.name for path, same in same_of.items() if not same]
        for part in origin.parts if len(changed) < len(same_of) else []:
            dumped = part.model_dump(mode="json", exclude_none=True, exclude={"skipped", "pairs"})
            entry = found.setdefault(part.name, dumped)
            if changed:
                entry["changed"] = [*entry.get("changed", []), *changed]
    return list(found.values())


Progress = Callable[[str, int, int | None], None]
"""Function called with the phase, the amount done and the total (None: unknown)."""

_SHORT = 0.01  # share of rows with too few columns beyond which there is a warning
_COPIES = 0.5  # no parallel corpus has more than this share of equal pairs


@dataclass
class Corpus:
    """One corpus of one split, with counts of its pairs: read, kept, dropped by reason, and so on."""

    split: str
    key: str
    """Key of the corpus in the configuration, such as `data.train.0`."""
    config: CorpusConfig
    reader: CorpusReader
    languages: tuple[str, str] = ("", "")
    read: int = 0
    read_of: Counter[int] = field(default_factory=Counter)
    """Pairs in each of the reader's files (or pairs of files), by its number there."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    sides: SideSample = field(default_factory=SideSample)
    signs: CorpusSigns = field(default_factory=CorpusSigns)
    pairing: Pairing = field(default_factory=Pairing)
    alignments: AlignmentFiles | None = None
    maker: HmmLinks | None = None
    """Aligner for its word alignments, if there are no files."""
    aligned: int = 0
    """Pairs in the store that have word alignments."""
    scores: list[ScoreColumn] = field(default_factory=list)
    repaired: int = 0
    overlap: dict[str, Overlap] = field(default_factory=dict)
    """Sentences that its pairs share with development and test sets, by set."""
    examples: Examples = field(default_factory=Examples)
    origin: list[dict[str, Any]] = field(default_factory=list)
    """Public corpora that its files were fetched from, with their licences."""

    def entry(self, *, aligned: bool) -> dict[str, Any]:
        """Return its entry in the manifest; `aligned`: whether its split needs word alignments."""
        overlap = {name: found._asdict() for name, found in self.overlap.items()}
        return {
            "name": self.reader.name,
            "weight": self.config.weight,
            "tag": self.config.tag,
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "carriage_returns": self.reader.notes.carriage_returns,
            "byte_order_marks": self.reader.notes.byte_order_marks,
            **({"short_rows": self.reader.notes.short_rows} if self.reader.notes.short_rows else {}),
            **({"aligned": self.aligned} if aligned else {}),
            **({"repaired": self.repaired} if self.repaired else {}),
            **({"held_out": overlap} if overlap else {}),
            **({"origin": self.origin} if self.origin else {}),
        }

    def blocks(
        self, words: Sides | None = None
    ) -> Iterator[tuple[PairBlock, list[list[Link]] | None, NDArray[np.bool_] | None]]:
        """Yield its blocks with the links of each pair and the mask of pairs excluded by a score, each None if absent.

        Links count the words of `words`; without it there are none. Raises DataError as its reader does, and for faults
        in the other files.
        """
        stream = ScoreStream(self.scores, self.reader)
        if words is not None and self.alignments is not None:
            for block, links in self.alignments.blocks(self.reader, words):
                yield block, links, stream.unwanted(len(block[0]))
        else:
            maker = self.maker if words is not None else None
            for block in self.reader.blocks():
                made = maker.links(block, words) if maker and words else None
                yield block, made, stream.unwanted(len(block[0]))
        stream.end()


def find_corpora(config: DataConfig) -> list[Corpus]:
    """Find the files of all corpora and return the corpora: training, then development.

    Raises ConfigError or DataError as `CorpusReader.of` does, or if there is no training corpus.
    """
    if not config.train:
        raise ConfigError(
            "data.train: no corpus; give at least one with `source` and `target`, or `path`", key="data.train"
        )
    found = []
    for split, key, corpus in config.corpora():
        with about(key):
            found.append(_found(split, key, corpus, config.languages_of(corpus)))
    return found


def note_origins(corpora: Sequence[Corpus], settings: Mapping[str, Any]) -> None:
    """Record in each corpus the origin of its files; `settings` has their fingerprints (store_checks.provenance)."""
    entries = {split: iter(settings[split]) for split in ("train", "dev")}
    for corpus in corpora:
        prints = next(entries[corpus.split])["files"]
        fingerprints = zip(chain(*corpus.reader.files), chain(*prints), strict=True)
        corpus.origin = _origins_of(dict(fingerprints))


def _found(split: str, key: str, config: CorpusConfig, languages: tuple[str, str]) -> Corpus:
    reader = CorpusReader.of(config, key, languages)
    corpus = Corpus(split, key, config, reader, languages, scores=find_scores(config, key, reader))
    if config.alignment is None:
        return corpus
    paths = find_files(config.alignment, f"{key}.alignment")
    if len(paths) != len(reader.files):
        raise DataError(
            f"{key}: {config.alignment} matches {len(paths)} files, but the corpus has {len(reader.files)}; they are "
            "paired in sorted order, so the numbers must agree",
            key=key,
        )
    corpus.alignments = AlignmentFiles(paths, config.alignment_column)
    return corpus


def count_pairs(corpora: Sequence[Corpus], progress: Progress, words: Sides | None = None) -> None:
    """Read everything once, so that unusable files are refused before anything is trained or encoded.

    `words` are the words of the two sides that alignments count; None: by the usual rule. Raises DataError for a fault
    in a file (encoding, alignment, columns, compression) or a corpus without pairs.
    """
    done = 0
    for corpus in corpora:
        with about(corpus.key):
            for (source, target), _, _ in corpus.blocks(words or (WordCounter("split"), WordCounter("split"))):
                part = corpus.reader.part
                place, file = corpus.read_of[part], corpus.reader.files[part]
                corpus.sides.see(source, target)
                corpus.pairing.see(source, target, place, str(file[0]))
                corpus.signs.see((source, target), place, file, corpus.languages)
                corpus.read += len(source)
                corpus.read_of[part] += len(source)
                done += len(source)
                progress("read", done, None)
        if not corpus.read:
            raise DataError(f"{corpus.key}: no sentence pairs in {corpus.reader.described()}", key=corpus.key)


def short_row_notices(corpora: Sequence[Corpus]) -> list[Problem]:
    """Return a warning on each corpus with many rows that were skipped for having too few columns."""
    return [
        Problem(
            corpus.key,
            f"{corpus.key}: {short:,} of {short + corpus.read:,} rows of {corpus.reader.described()} have fewer than "
            f"{corpus.reader.row_columns} columns and were left out: is a column missing, such as that of the "
            "alignments?",
            severity="warning",
        )
        for corpus in corpora
        if (short := corpus.reader.notes.short_rows) > _SHORT * (short + corpus.read)
    ]


def side_notices(corpora: Sequence[Corpus], config: DataConfig) -> list[Problem]:
    """Return a warning on each corpus whose sides seem to be swapped, the same text, or not to pair up.

    File names are compared with the two language codes. Texts are compared with the largest training corpus of the same
    tag, because tags such as `<2en>` distinguish the two directions of a bidirectional model.
    """
    notices: list[Problem] = []
    training = sorted((corpus for corpus in corpora if corpus.split == "train"), key=lambda c: -c.read)
    for corpus in corpora:
        sides = corpus.sides
        notices += corpus.pairing.notices(corpus.key)
        if sides.equal > _COPIES * sides.lines:
            same = (
                f"{corpus.key}: {sides.equal:,} of {sides.lines:,} pairs checked have the same text on both sides: "
                "is the source also given as target? (`data.filters.identical` drops such pairs)"
            )
            notices.append(Problem(corpus.key, same, severity="warning", named=("data.filters.identical",)))
            continue
        if notice := exchanged_by_name(corpus.config, config.languages_of(corpus.config), corpus.key):
            notices.append(notice)
            continue
        # Only with larger ones, so that of two corpora that differ, the smaller gets the notice.
        larger = training[: training.index(corpus)] if corpus in training else training
        largest = next((c for c in larger if _same_direction(c.config, corpus.config, config)), None)
        if largest is not None and _looks_swapped(largest.sides.trigrams, corpus.sides.trigrams):
            swapped = (
                f"{corpus.key}: its source looks like the target of {largest.key}, its target like the source there:"
            )
            exchange = "exchange `source` and `target` (or the columns) of one of the two"
            notices.append(Problem(corpus.key, swapped, exchange, severity="warning", named=(largest.key,)))
    return notices


def _same_direction(first: CorpusConfig, second: CorpusConfig, config: DataConfig) -> bool:
    tags = first.tag, second.tag
    return (tags[0] == tags[1] or None in tags) and config.languages_of(first) == config.languages_of(second)


def exchanged_by_name(corpus: CorpusConfig, languages: tuple[str, str], key: str) -> Problem | None:
    """Return a warning if each side's file name ends in the code of the other side's language, otherwise None."""
    if corpus.source is None or corpus.target is None:
        return None
    endings = [named_language(path) for path in (corpus.source, corpus.target)]
    source, target = languages
    if endings != [target.lower(), source.lower()] or endings[0] == endings[1]:
        return None
    return Problem(
        key,
        f"{key}: judging by their names, {corpus.source} is in `{target}` and {corpus.target} in `{source}`:",
        "exchange `source` and `target`, or `source_language` and `target_language`",
        severity="warning",
    )


def nothing_left(pairs: int, counts: Counter[str], corpora: Sequence[Corpus]) -> DataError:
    """Return the error to raise if the filters drop every pair."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.most_common())
    names = "; ".join(corpus.reader.described() for corpus in corpora[:3])
    return DataError(
        f"{names}: {sum(counts.values()):,} of {pairs:,} pairs skipped ({reasons}), nothing left to train on; "
        "see data.filters",
        key="data.filters",
    )


def align_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    progress: Progress,
) -> None:
    """Give corpora without alignment files an aligner, if `data.alignment.compute` asks for it.

    It learns from the training corpora among them, or from all training corpora if there are none among them.
    """
    options, unaligned = config.alignment, [corpus for corpus in corpora if corpus.alignments is None]
    if options.compute == "none" or not unaligned:
        return
    words = words_of(config, tokenizers)
    progress("train aligner", 0, None)
    training = [corpus for corpus in corpora if corpus.split == "train"]
    chosen = [corpus for corpus in training if corpus.alignments is None] or training
    readers = [(corpus.reader, corpus.read) for corpus in chosen]
    maker = train_aligner(readers, words, options.pairs, options.symmetrise)
    for corpus in unaligned:
        corpus.maker = maker
