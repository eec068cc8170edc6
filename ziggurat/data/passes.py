"""The second and third pass of `prepare` over its corpora: sampling for the subword model, and encoding.

The first pass, counting, is in ziggurat.data.inputs. Every pass streams the files again, so memory does not grow with
the corpora.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ziggurat.alignment.eflomal import refuse_without_eflomal
from ziggurat.config.data import DataConfig
from ziggurat.data.clean import Cleaner
from ziggurat.data.inputs import Corpus, Progress, nothing_left
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import TableWriter
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import LinkTracer, TracedLinks, run_eflomal, train_aligner, words_of
from ziggurat.errors import DataError

__all__ = ["align_corpora", "encode_corpora", "refuse_missing_aligner", "sample_sentences"]


_SAMPLE_SEED = 20_17  # any number: the sample must only be the same every time


def sample_sentences(corpora: Sequence[Corpus], config: DataConfig, side: str, progress: Progress) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order, in constant memory.

    A random choice (a function of the counts alone) of at most `subword.sample_pairs` pairs, equally many from each
    corpus as far as it has them. Pairs that the filters drop are left out, except that duplicates stay.

    Args:
        corpora: Training corpora with their counts.
        config: The data section.
        side: `source`, `target`, or `joint` for both.
        progress: Called with the number of pairs read.

    Raises:
        DataError: the filters leave none of the sampled pairs.
    """
    generator = np.random.default_rng(_SAMPLE_SEED)
    # The hashes that find duplicates would grow with the corpus, and this pass takes constant memory.
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
    """A random choice of `wanted` out of `total` items without replacement, revealed in order, in constant memory.

    Items are drawn in windows of fixed size, with a hypergeometric number of chosen items in each, so the choice does
    not depend on how many items are asked for at a time.
    """

    _WINDOW = 8192

    def __init__(self, generator: np.random.Generator, total: int, wanted: int) -> None:
        self._generator = generator
        self._total = total
        self._wanted = wanted
        self._mask = np.zeros(0, np.bool_)

    def take(self, count: int) -> NDArray[np.bool_]:
        """Return the mask of the chosen items among the next `count`, bool [count]."""
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
    """Split `total` evenly over corpora of `sizes` pairs; the shares that small ones cannot fill go to the others."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    # From the smallest: what it leaves is then shared by all larger ones.
    for position, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        shares[number] = min(sizes[number], left // (len(sizes) - position))
        left -= shares[number]
    return shares


def refuse_missing_aligner(config: DataConfig) -> None:
    """Raise ConfigError where the aligner that `data.alignment.compute` asks for is not installed."""
    if config.alignment.compute == "eflomal":
        refuse_without_eflomal()


def align_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    folder: Path,
    progress: Progress,
) -> None:
    """Give the corpora without files of alignments an aligner, if `data.alignment.compute` asks for it.

    Ours learns from the training corpora among them, or from all training corpora where only others are among them;
    eflomal aligns them all, with temporary files in `folder`.
    """
    options, unaligned = config.alignment, [corpus for corpus in corpora if corpus.alignments is None]
    if options.compute == "none" or not unaligned:
        return
    words = words_of(config, tokenizers)
    if options.compute == "eflomal":
        progress("run eflomal", 0, None)
        maker = run_eflomal([corpus.reader for corpus in unaligned], words, options.symmetrise, folder)
    else:
        progress("train aligner", 0, None)
        training = [corpus for corpus in corpora if corpus.split == "train"]
        chosen = [corpus for corpus in training if corpus.alignments is None] or training
        readers = [(corpus.reader, corpus.read) for corpus in chosen]
        maker = train_aligner(readers, words, options.pairs, options.symmetrise)
    for corpus in unaligned:
        corpus.maker = maker


def encode_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    writer: TableWriter,
    threads: int,
    progress: Progress,
) -> None:
    """Clean, segment and write the corpora of one split.

    A pipeline of three stages: while one block is segmented (on `threads` threads, outside Python's lock), the next is
    read and cleaned, and the one before is written.

    Raises:
        DataError: a file changed since it was counted.
    """
    training = corpora[0].split == "train"
    words = words_of(config, tokenizers)
    tracer = LinkTracer(words, tokenizers) if config.aligned("train" if training else "dev") else None
    cleaner = Cleaner(config.filters) if training else Cleaner.only_empty()
    total = sum(corpus.read for corpus in corpora)
    done = 0
    with ThreadPoolExecutor(1) as pool:
        waiting: _Segmented | None = None
        for number, corpus in enumerate(corpora):
            read = 0
            for (source, target), links in corpus.blocks(words):
                read += len(source)
                block = _cleaned(corpus, number, source, target, cleaner, config.unicode, training)
                if tracer is not None:
                    block.links = tracer.traced(links, (source, target), block.kept, (block.source, block.target))
                block.ids = pool.submit(_segment, tokenizers, block.source, block.target, threads)
                if waiting is not None:
                    _write(waiting, tokenizers[0], config, writer, tracer)
                waiting = block
                done += len(source)
                progress(f"encode {corpus.split}", done, total)
            if read != corpus.read:
                raise DataError(f"{corpus.reader.described()}: changed while being read; run `ziggurat prepare` again")
        if waiting is not None:
            _write(waiting, tokenizers[0], config, writer, tracer)


@dataclass
class _Segmented:
    """A cleaned block that is being segmented, on its way into the store."""

    corpus: Corpus
    number: int
    source: list[str]
    target: list[str]
    reference: list[str]
    """Target texts as they will be stored."""
    kept: NDArray[np.bool_]
    """Mask of its pairs over those that were read."""
    ids: Future[list[list[list[int]]]]
    links: list[TracedLinks] | None = None
    """Where the table has links: those of each pair."""


def _cleaned(
    corpus: Corpus,
    number: int,
    source: list[str],
    target: list[str],
    cleaner: Cleaner,
    form: UnicodeForm,
    training: bool,
) -> _Segmented:
    """Normalise and filter a block."""
    sources, targets, kept = cleaner.clean(normalise(source, form), normalise(target, form), corpus.dropped)
    # A development target is the reference of scores, so it is stored as it stands in the file.
    reference = targets if training else list(compress(target, kept))
    return _Segmented(corpus, number, sources, targets, reference, kept, Future())


def _segment(
    tokenizers: tuple[Tokenizer, Tokenizer], source: list[str], target: list[str], threads: int
) -> list[list[list[int]]]:
    return [
        tokenizer.encode_normalised(texts, threads)
        for tokenizer, texts in zip(tokenizers, (source, target), strict=True)
    ]


def _write(
    block: _Segmented, tokenizer: Tokenizer, config: DataConfig, writer: TableWriter, tracer: LinkTracer | None
) -> None:
    """Drop pairs that are too long in pieces, and pass the others to the writer."""
    training = block.corpus.split == "train"
    source, target = block.ids.result()
    texts = (block.source, block.reference)
    lengths = [np.fromiter(map(len, side), np.int32, len(side)) for side in (source, target)]
    # (1) Filter by pieces, which could not be done before segmentation.
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
        block.links = None if block.links is None else list(compress(block.links, stay))
    block.corpus.kept += len(source)
    # (2) Lay out the ids as the store has them, with the corpus's tag in front: it does not count for max_pieces.
    first, second = (_flat(side, n) for side, n in zip((source, target), lengths, strict=True))
    if block.corpus.config.tag is not None:
        first, lengths[0] = _tagged(first, lengths[0], tokenizer.tags[block.corpus.config.tag])
    # (3) Store text for development and where training samples segmentations. Pre-segmented references are joined,
    # because they are compared with joined output.
    if not training and isinstance(tokenizer, VocabularyTokenizer):
        texts = (texts[0], [VocabularyTokenizer.joined(text) for text in texts[1]])
    stored = texts if not training or config.subword.regularisation is not None else None
    links = None
    if tracer is not None and block.links is not None:
        links = tracer.stored(block.links, (source, target))
        block.corpus.aligned += int(np.count_nonzero(links[1]))
    writer.write(block.number, (first, lengths[0]), (second, lengths[1]), stored, links)


def _flat(ids: Sequence[Sequence[int]], lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the concatenated ids, int32 [sum of lengths]."""
    return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))


def _tagged(
    ids: NDArray[np.int32], lengths: NDArray[np.int32], tag: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return ids and lengths with `tag` in front of each sentence."""
    starts = np.cumsum(lengths) - lengths
    return np.insert(ids, starts, tag), lengths + 1
