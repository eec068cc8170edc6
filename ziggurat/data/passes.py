"""The three passes of `prepare` over its corpora: count and check, sample, encode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, compress

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.data.clean import Cleaner
from ziggurat.data.corpus import TableWriter
from ziggurat.data.normalise import UnicodeForm, normalise
from ziggurat.data.readers import CorpusReader
from ziggurat.data.resemblance import Sides
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.errors import ConfigError, DataError

__all__ = [
    "Corpus",
    "Progress",
    "count_pairs",
    "encode_corpora",
    "find_corpora",
    "nothing_left",
    "sample_sentences",
]

Progress = Callable[[str, int, int | None], None]
"""Called with the phase, how much is done and of how much (None: not known)."""

_SAMPLE_SEED = 20_17  # any number: the sample must only be the same every time


@dataclass
class Corpus:
    """One corpus of one split and what happened to it."""

    split: str
    key: str
    """Where it stands in the configuration, such as `data.train.0`."""
    config: CorpusConfig
    reader: CorpusReader
    read: int = 0
    """Pairs in the files."""
    kept: int = 0
    """Pairs in the store."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Pairs dropped, by reason."""
    sides: Sides = field(default_factory=Sides)
    """What its sides look like."""


def find_corpora(config: DataConfig) -> list[Corpus]:
    """Return all corpora with their files found: training, then development.

    Raises:
        ConfigError, DataError: see `CorpusReader.of`; no training corpus.
    """
    if not config.train:
        raise ConfigError("data.train: no corpus; give at least one with `source` and `target`, or `path`")
    languages = (config.source_language, config.target_language)
    return [
        Corpus(split, key, corpus, CorpusReader.of(corpus, key, languages))
        for split, corpora in (("train", config.train), ("dev", config.dev))
        for key, corpus in ((f"data.{split}.{number}", corpus) for number, corpus in enumerate(corpora))
    ]


def count_pairs(corpora: Sequence[Corpus], progress: Progress) -> None:
    """Read everything once: files that cannot be used are refused before anything is trained or encoded.

    Raises:
        DataError: a file of a fault (encoding, alignment, columns, compression), or a corpus without pairs.
    """
    done = 0
    for corpus in corpora:
        for source, target in corpus.reader.blocks():
            corpus.sides.see(source, target)
            corpus.read += len(source)
            done += len(source)
            progress("read", done, None)
        if not corpus.read:
            raise DataError(f"{corpus.key}: no sentence pairs in {corpus.reader.described()}")


def sample_sentences(corpora: Sequence[Corpus], config: DataConfig, side: str, progress: Progress) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order; nothing is held in memory.

    At most `subword.sample_pairs` pairs, equally many of each corpus as far as it has them, at random (a function
    of the counts alone). Pairs that the filters drop are left out, duplicates apart.

    Args:
        corpora: Training corpora with their counts.
        config: The data section.
        side: `source`, `target`, or `joint` for both.
        progress: Told how many pairs were read.

    Raises:
        DataError: the filters leave none of the sampled pairs.
    """
    generator = np.random.default_rng(_SAMPLE_SEED)
    cleaner = Cleaner(config.filters.model_copy(update={"duplicates": False}))
    counts: Counter[str] = Counter()
    shares = _even_shares([corpus.read for corpus in corpora], config.subword.sample_pairs)
    kept = done = 0
    for corpus, share in zip(corpora, shares, strict=True):
        picks = _Picks(generator, corpus.read, share)
        for source, target in corpus.reader.blocks():
            picked = picks.take(len(source))
            sides = [normalise(list(compress(texts, picked)), config.unicode) for texts in (source, target)]
            sources, targets, _ = cleaner.clean(sides[0], sides[1], counts)
            kept += len(sources)
            yield from {"source": sources, "target": targets}.get(side) or chain(sources, targets)
            done += len(source)
            progress("sample", done, sum(corpus.read for corpus in corpora))
    if not kept:
        raise nothing_left(sum(shares), counts, corpora)


class _Picks:
    """A random choice of `wanted` of `total` things without replacement, told in order, in constant memory.

    Things come in windows of fixed size, the number chosen in each being hypergeometric, so that the choice does
    not depend on how many are asked for at a time.
    """

    _WINDOW = 8192

    def __init__(self, generator: np.random.Generator, total: int, wanted: int) -> None:
        self._generator = generator
        self._total = total
        self._wanted = wanted
        self._mask = np.zeros(0, np.bool_)

    def take(self, count: int) -> NDArray[np.bool_]:
        """Return for the next `count` things whether they are chosen."""
        while len(self._mask) < count and self._total:
            size = min(self._WINDOW, self._total)
            chosen = int(self._generator.hypergeometric(self._wanted, self._total - self._wanted, size))
            window = np.zeros(size, np.bool_)
            window[self._generator.choice(size, chosen, replace=False)] = True
            self._total -= size
            self._wanted -= chosen
            self._mask = np.concatenate([self._mask, window])
        mask, self._mask = self._mask[:count], self._mask[count:]
        return mask


def _even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` evenly over corpora of `sizes` pairs; what a small one cannot fill goes to the others."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    for position, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        shares[number] = min(sizes[number], left // (len(sizes) - position))
        left -= shares[number]
    return shares


def nothing_left(pairs: int, counts: Counter[str], corpora: Sequence[Corpus]) -> DataError:
    """Return the error of filters that drop everything."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.most_common())
    names = "; ".join(corpus.reader.described() for corpus in corpora[:3])
    return DataError(
        f"{names}: {sum(counts.values()):,} of {pairs:,} pairs skipped ({reasons}), nothing left to train on; "
        "see data.filters"
    )


@dataclass
class _Segmented:
    """A cleaned block on its way into the store."""

    corpus: Corpus
    number: int
    source: list[str]
    target: list[str]
    reference: list[str]
    """Target texts as they are to be stored."""
    ids: Future[list[list[list[int]]]]


def encode_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    writer: TableWriter,
    threads: int,
    progress: Progress,
) -> None:
    """Clean, segment and write the corpora of one split.

    One block is segmented (on `threads` threads, outside Python's lock) while the next is read and cleaned and
    the one before is written.

    Raises:
        DataError: a file changed since it was counted.
    """
    training = corpora[0].split == "train"
    cleaner = Cleaner(config.filters) if training else Cleaner.only_empty()
    total = sum(corpus.read for corpus in corpora)
    done = 0
    with ThreadPoolExecutor(1) as pool:
        waiting: _Segmented | None = None
        for number, corpus in enumerate(corpora):
            read = 0
            for source, target in corpus.reader.blocks():
                read += len(source)
                block = _cleaned(corpus, number, source, target, cleaner, config.unicode, training)
                block.ids = pool.submit(_segment, tokenizers, block.source, block.target, threads)
                if waiting is not None:
                    _write(waiting, tokenizers[0], config, writer)
                waiting = block
                done += len(source)
                progress(f"encode {corpus.split}", done, total)
            if read != corpus.read:
                raise DataError(f"{corpus.reader.described()}: changed while being read; run `ziggurat prepare` again")
        if waiting is not None:
            _write(waiting, tokenizers[0], config, writer)


def _cleaned(
    corpus: Corpus,
    number: int,
    source: list[str],
    target: list[str],
    cleaner: Cleaner,
    form: UnicodeForm,
    training: bool,
) -> _Segmented:
    """Normalise and filter a block; training pairs are stored as segmented, a development target untouched."""
    sources, targets, kept = cleaner.clean(normalise(source, form), normalise(target, form), corpus.dropped)
    reference = targets if training else list(compress(target, kept))
    return _Segmented(corpus, number, sources, targets, reference, Future())


def _segment(
    tokenizers: tuple[Tokenizer, Tokenizer], source: list[str], target: list[str], threads: int
) -> list[list[list[int]]]:
    return [
        tokenizer.encode_normalised(texts, threads)
        for tokenizer, texts in zip(tokenizers, (source, target), strict=True)
    ]


def _write(block: _Segmented, tokenizer: Tokenizer, config: DataConfig, writer: TableWriter) -> None:
    """Drop what is too long in pieces and hand the rest to the writer."""
    training = block.corpus.split == "train"
    source, target = block.ids.result()
    texts = (block.source, block.reference)
    lengths = [np.fromiter(map(len, side), np.int32, len(side)) for side in (source, target)]
    vanished = np.minimum(*lengths) == 0  # a model's own normalisation may leave nothing of a text
    drop = vanished
    limit = config.filters.max_pieces
    if training and limit is not None:
        drop = vanished | (np.maximum(*lengths) > limit)
    if drop.any():
        stay = ~drop
        for reason, count in (
            ("empty", int(vanished.sum())),
            ("too_many_pieces", int((drop & ~vanished).sum())),
        ):
            if count:
                block.corpus.dropped[reason] += count
        source, target = list(compress(source, stay)), list(compress(target, stay))
        texts = (list(compress(texts[0], stay)), list(compress(texts[1], stay)))
        lengths = [side[stay] for side in lengths]
    block.corpus.kept += len(source)
    first, second = (_flat(side, n) for side, n in zip((source, target), lengths, strict=True))
    if block.corpus.config.tag is not None:
        first, lengths[0] = _tagged(first, lengths[0], tokenizer.tags[block.corpus.config.tag])
    if not training and isinstance(tokenizer, VocabularyTokenizer):
        # The reference is compared with joined output, so pre-segmented text is joined too.
        texts = (texts[0], [VocabularyTokenizer.joined(text) for text in texts[1]])
    stored = texts if not training or config.subword.regularisation is not None else None
    writer.write(block.number, (first, lengths[0]), (second, lengths[1]), stored)


def _flat(ids: Sequence[Sequence[int]], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return all ids behind each other, int32 [sum of lengths]."""
    return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))


def _tagged(
    ids: NDArray[np.int32], lengths: NDArray[np.int32], tag: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Put `tag` in front of each sentence."""
    starts = np.cumsum(lengths) - lengths
    return np.insert(ids, starts, tag), lengths + 1
