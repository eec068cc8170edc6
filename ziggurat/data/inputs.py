"""The corpora that `prepare` reads: found, counted and checked before anything is trained or encoded.

First of the store modules (inputs, passes, encoding, prepare; arrow_shard, table, corpus; store_checks). Counting is
the first of the three passes over the files; sampling is in ziggurat.data.passes, encoding in ziggurat.data.encoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.data.alignment.aligner import Link
from ziggurat.data.cleaning.cleaner import Examples
from ziggurat.data.cleaning.held_out import Overlap
from ziggurat.data.origins import origins_of
from ziggurat.data.readers import CorpusReader, PairBlock, ScoreColumn, ScoreStream, find_scores
from ziggurat.data.sides import SideSample, looks_swapped, named_language
from ziggurat.data.word_links import AlignmentFiles, HmmLinks, Words
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import find_files

Progress = Callable[[str, int, int | None], None]
"""Called with the phase, the amount done and the total (None: not known)."""

_SHORT = 0.01  # more rows with too few columns than this share are told loudly
_COPIES = 0.5  # no parallel corpus has more than this share of equal pairs


@dataclass
class Corpus:
    """One corpus of one split, with counts of what happened to its pairs."""

    split: str
    key: str
    """Key of the corpus in the configuration, such as `data.train.0`."""
    config: CorpusConfig
    reader: CorpusReader
    read: int = 0
    """Pairs in the files."""
    read_of: Counter[int] = field(default_factory=Counter)
    """Pairs in each of the reader's files (or pairs of files), by its number there."""
    kept: int = 0
    """Pairs in the store."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Pairs dropped, by reason."""
    sides: SideSample = field(default_factory=SideSample)
    """Sample of its two sides."""
    alignments: AlignmentFiles | None = None
    """Files with its word alignments."""
    maker: HmmLinks | None = None
    """Makes its word alignments, where there are no files."""
    aligned: int = 0
    """Pairs in the store that have word alignments."""
    scores: list[ScoreColumn] = field(default_factory=list)
    """Scores that other tools gave its pairs."""
    repaired: int = 0
    """Pairs whose text was mended."""
    overlap: dict[str, Overlap] = field(default_factory=dict)
    """What its pairs have in common with development and test sets, by set."""
    examples: Examples = field(default_factory=Examples)
    """A few of the dropped pairs."""

    origin: list[dict[str, Any]] = field(default_factory=list)
    """Public corpora that its files were fetched from (ziggurat.data.origins), with their licences."""

    def entry(self, *, aligned: bool) -> dict[str, Any]:
        """Return its entry in the manifest; `aligned`: whether its split is to have word alignments."""
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
        self, words: tuple[Words, Words]
    ) -> Iterator[tuple[PairBlock, list[list[Link]] | None, NDArray[np.bool_] | None]]:
        """Yield its blocks with the links of each pair and the mask of those that a score rules out, None for neither.

        Raises DataError as its reader does, and for faults of the other files.
        """
        stream = ScoreStream(self.scores, self.reader)
        for block, links in self._aligned_blocks(words):
            yield block, links, stream.unwanted(len(block[0]))
        stream.end()

    def _aligned_blocks(self, words: tuple[Words, Words]) -> Iterator[tuple[PairBlock, list[list[Link]] | None]]:
        if self.alignments is not None:
            yield from self.alignments.blocks(self.reader, words)
            return
        for block in self.reader.blocks():
            yield block, None if self.maker is None else self.maker.links(block, words)

    def scored_blocks(self) -> Iterator[tuple[PairBlock, NDArray[np.bool_] | None]]:
        """Yield its blocks with the mask of the pairs that a score rules out, None without scores."""
        stream = ScoreStream(self.scores, self.reader)
        for block in self.reader.blocks():
            yield block, stream.unwanted(len(block[0]))


def find_corpora(config: DataConfig) -> list[Corpus]:
    """Return all corpora with their files found: training, then development.

    Raises:
        ConfigError, DataError: see `CorpusReader.of`; no training corpus.
    """
    if not config.train:
        raise ConfigError("data.train: no corpus; give at least one with `source` and `target`, or `path`")
    return [
        _found(split, key, corpus, CorpusReader.of(corpus, key, config.languages_of(corpus)))
        for split, corpora in (("train", config.train), ("dev", config.dev))
        for key, corpus in ((f"data.{split}.{number}", corpus) for number, corpus in enumerate(corpora))
    ]


def note_origins(corpora: Sequence[Corpus], settings: Mapping[str, Any]) -> None:
    """Note in each corpus where its files come from; `settings` has their fingerprints (store_checks.provenance)."""
    entries = {split: iter(settings[split]) for split in ("train", "dev")}
    for corpus in corpora:
        prints = next(entries[corpus.split])["files"]
        known = {
            path: one
            for part, ones in zip(corpus.reader.files, prints, strict=True)
            for path, one in zip(part, ones, strict=True)
        }
        corpus.origin = origins_of(list(known), known.__getitem__)


def _found(split: str, key: str, config: CorpusConfig, reader: CorpusReader) -> Corpus:
    """Return a corpus with the files of its scores and word alignments, if it names any."""
    corpus = Corpus(split, key, config, reader, scores=find_scores(config, key, reader))
    if config.alignment is None:
        return corpus
    paths = find_files(config.alignment, f"{key}.alignment")
    if len(paths) != len(reader.files):
        raise DataError(
            f"{key}: {config.alignment} matches {len(paths)} files, but the corpus has {len(reader.files)}; they are "
            "paired in sorted order, so there must be equally many"
        )
    corpus.alignments = AlignmentFiles(paths, config.alignment_column)
    return corpus


def count_pairs(corpora: Sequence[Corpus], progress: Progress, words: tuple[Words, Words] | None = None) -> None:
    """Read everything once, so that unusable files are refused before anything is trained or encoded.

    `words` are those of the two sides that word alignments count; None: by the usual rule.

    Raises:
        DataError: a fault in a file (encoding, alignment, columns, compression), or a corpus without pairs.
    """
    done = 0
    for corpus in corpora:
        for (source, target), _, _ in corpus.blocks(words or (Words("split"), Words("split"))):
            corpus.sides.see(source, target)
            corpus.read += len(source)
            corpus.read_of[corpus.reader.part] += len(source)
            done += len(source)
            progress("read", done, None)
        if not corpus.read:
            raise DataError(f"{corpus.key}: no sentence pairs in {corpus.reader.described()}")


def short_row_notices(corpora: Sequence[Corpus]) -> list[str]:
    """Return a notice on each corpus many of whose rows were left out because they have too few columns."""
    return [
        f"{corpus.key}: {short:,} of {short + corpus.read:,} rows of {corpus.reader.described()} have fewer than "
        f"{corpus.reader.row_columns} columns and were left out: is a column missing, such as that of the alignments?"
        for corpus in corpora
        if (short := corpus.reader.notes.short_rows) > _SHORT * (short + corpus.read)
    ]


def side_notices(corpora: Sequence[Corpus], config: DataConfig) -> list[str]:
    """Return a notice on each corpus whose sides seem to be swapped, or to be the same text.

    File names are compared with the two language codes. Texts are compared with the largest training corpus of the same
    tag, because tags such as `<2en>` tell the two directions of a bidirectional model apart.
    """
    notices = []
    training = sorted((corpus for corpus in corpora if corpus.split == "train"), key=lambda c: -c.read)
    for corpus in corpora:
        if corpus.sides.equal > _COPIES * corpus.sides.lines:
            notices.append(
                f"{corpus.key}: {corpus.sides.equal:,} of {corpus.sides.lines:,} pairs looked at have the same text on "
                "both sides: is the source also given as target? (`data.filters.identical` drops such pairs)"
            )
            continue
        if notice := exchanged_by_name(corpus.config, config.languages_of(corpus.config), corpus.key):
            notices.append(notice)
            continue
        # Only with larger ones: of two corpora that differ, the smaller one gets the notice.
        larger = training[: training.index(corpus)] if corpus in training else training
        largest = next((c for c in larger if _same_direction(c.config, corpus.config, config)), None)
        if largest is not None and looks_swapped(largest.sides.trigrams, corpus.sides.trigrams):
            notices.append(
                f"{corpus.key}: its source looks like the target of {largest.key}, its target like the source there: "
                "exchange `source` and `target` (or the columns) of one of the two"
            )
    return notices


def _same_direction(first: CorpusConfig, second: CorpusConfig, config: DataConfig) -> bool:
    tags = first.tag, second.tag
    return (tags[0] == tags[1] or None in tags) and config.languages_of(first) == config.languages_of(second)


def exchanged_by_name(corpus: CorpusConfig, languages: tuple[str, str], key: str) -> str | None:
    """Return a notice if each side's file name ends in the code of the other side's language, else None."""
    if corpus.source is None or corpus.target is None:
        return None
    endings = [named_language(path) for path in (corpus.source, corpus.target)]
    source, target = languages
    if endings != [target.lower(), source.lower()] or endings[0] == endings[1]:
        return None
    return (
        f"{key}: by their names {corpus.source} is in `{target}` and {corpus.target} in `{source}`: exchange `source` "
        "and `target`, or `source_language` and `target_language`"
    )


def nothing_left(pairs: int, counts: Counter[str], corpora: Sequence[Corpus]) -> DataError:
    """Return the error to raise where the filters drop every pair."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.most_common())
    names = "; ".join(corpus.reader.described() for corpus in corpora[:3])
    return DataError(
        f"{names}: {sum(counts.values()):,} of {pairs:,} pairs skipped ({reasons}), nothing left to train on; "
        "see data.filters"
    )
