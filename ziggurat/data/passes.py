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
from ziggurat.cleaning.pair_score import PairScorer
from ziggurat.config.data import DataConfig
from ziggurat.data.cleaner import Cleaner, Memory, drop_pairs
from ziggurat.data.cleaning import cleaners_of, even_shares, sampled_blocks
from ziggurat.data.inputs import Corpus, Progress, nothing_left
from ziggurat.data.readers import PairBlock
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import TableWriter
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import LinkTracer, TracedLinks, run_eflomal, train_aligner, words_of
from ziggurat.errors import DataError

__all__ = ["align_corpora", "encode_corpora", "refuse_missing_aligner", "sample_sentences"]


def sample_sentences(
    corpora: Sequence[Corpus],
    config: DataConfig,
    side: str,
    progress: Progress,
    scorer: PairScorer | None = None,
) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order, in constant memory.

    A random choice (a function of the counts alone) of at most `subword.sample_pairs` pairs, equally many from each
    corpus as far as it has them. Pairs that the filters drop are left out, except those that they compare with others:
    duplicates stay.

    Args:
        corpora: Training corpora with their counts.
        config: The data section.
        side: `source`, `target`, or `joint` for both.
        progress: Called with the number of pairs read.
        scorer: The pair score, where a filter goes by it.

    Raises:
        DataError: the filters leave none of the sampled pairs.
    """
    # Without what finds duplicates: it would grow with the corpus, and this pass takes constant memory.
    cleaners = cleaners_of(config, corpora, scorer)
    counts: Counter[str] = Counter()
    shares = even_shares([corpus.read for corpus in corpora], config.subword.sample_pairs)
    kept = 0
    for sources, targets in sampled_blocks(corpora, cleaners, shares, config.unicode, counts, progress):
        kept += len(sources)
        yield from {"source": sources, "target": targets}.get(side) or chain(sources, targets)
    if not kept:
        raise nothing_left(sum(shares), counts, corpora)


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
    scorer: PairScorer | None = None,
    memory: Memory | None = None,
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
    memory = memory or Memory()
    cleaners = cleaners_of(config, corpora, scorer, memory) if training else [Cleaner.only_empty()] * len(corpora)
    total = sum(corpus.read for corpus in corpora)
    done = 0
    with ThreadPoolExecutor(1) as pool:
        waiting: _Segmented | None = None
        for number, corpus in enumerate(corpora):
            read = 0
            before = memory.held_out.overlaps()
            for (source, target), links, unwanted in corpus.blocks(words):
                read += len(source)
                block = _cleaned(corpus, number, (source, target), unwanted, cleaners[number], config)
                if tracer is not None:
                    if links is not None:  # they count the words of the text as it was
                        links = [[] if mended else known for known, mended in zip(links, block.repaired, strict=True)]
                    block.links = tracer.traced(links, (source, target), block.kept, (block.source, block.target))
                block.ids = pool.submit(_segment, tokenizers, block.source, block.target, threads)
                if waiting is not None:
                    _write(waiting, tokenizers[0], config, writer, tracer)
                waiting = block
                done += len(source)
                progress(f"encode {corpus.split}", done, total)
            if read != corpus.read:
                raise DataError(f"{corpus.reader.described()}: changed while being read; run `ziggurat prepare` again")
            if training:
                found = memory.held_out.overlaps()
                corpus.overlap = {name: overlap.since(before[name]) for name, overlap in found.items()}
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
    repaired: NDArray[np.bool_]
    """Mask of the repaired pairs over those that were read."""
    max_pieces: int | None
    """Most pieces on a side; None: any."""
    links: list[TracedLinks] | None = None
    """Where the table has links: those of each pair."""


def _cleaned(
    corpus: Corpus,
    number: int,
    lines: PairBlock,
    unwanted: NDArray[np.bool_] | None,
    cleaner: Cleaner,
    config: DataConfig,
) -> _Segmented:
    """Mend and filter a block."""
    training = corpus.split == "train"
    first, second, repaired = cleaner.mended(*lines, config.unicode)
    corpus.repaired += int(repaired.sum())
    sources, targets, kept = cleaner.clean(first, second, corpus.dropped, unwanted, corpus.examples)
    # A development target is the reference of scores, so it is stored as it stands in the file.
    reference = targets if training else list(compress(lines[1], kept))
    limit = config.filters_of(corpus.config).max_pieces if training else None
    return _Segmented(corpus, number, sources, targets, reference, kept, Future(), repaired, limit)


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
    limit = block.max_pieces
    too_long = (np.maximum(*lengths) > limit) & ~vanished if limit is not None else np.zeros_like(vanished)
    if (drop := vanished | too_long).any():
        stay = ~drop
        of_block, every = (block.source, block.target), np.ones(len(drop), np.bool_)
        for reason, mask in (("empty", vanished), ("too_many_pieces", too_long)):
            drop_pairs(of_block, every, mask, reason, block.corpus.dropped, block.corpus.examples)
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
