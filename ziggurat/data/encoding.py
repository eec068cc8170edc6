"""The third pass of `prepare`: pairs are cleaned and segmented, block by block, and written in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ziggurat.alignment.links import Link
from ziggurat.config.data import DataConfig
from ziggurat.data.clean import Cleaner, HashSet, pair_hashes
from ziggurat.data.encoded import EncodedBlock, Lists
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.lines import normalise
from ziggurat.data.readers import PairBlock
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import TableWriter
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import LinkTracer, TracedLinks, words_of
from ziggurat.errors import DataError

__all__ = ["CleanedBlock", "Encoder", "encode_corpora", "store_block", "without_duplicates"]


class Encoder:
    """Makes blocks of one split ready for the store: cleaned, segmented, each by itself.

    Args:
        config: The data section.
        tokenizers: Of both sides.
        split: `train` or `dev`.
        threads: For segmentation, without influence on the result.
    """

    def __init__(self, config: DataConfig, tokenizers: tuple[Tokenizer, Tokenizer], split: str, threads: int) -> None:
        self.words = words_of(config, tokenizers)
        """Words of both sides that alignments count."""
        self._form, self._tokenizers, self._threads = config.unicode, tokenizers, threads
        self._training, self._finds_duplicates = split == "train", split == "train" and config.filters.duplicates
        # Duplicates depend on other blocks; they are found by their keys, in the order of the blocks.
        alone = config.filters.model_copy(update={"duplicates": False})
        self._cleaner = Cleaner(alone) if self._training else Cleaner.only_empty()
        self._tracer = LinkTracer(self.words, tokenizers) if config.aligned(split) else None
        self._has_text = not self._training or config.subword.regularisation is not None

    def cleaned(self, corpus: int, lines: PairBlock, links: list[list[Link]] | None) -> CleanedBlock:
        """Return the pairs of a block that the filters leave, in the form in which they are segmented."""
        dropped: Counter[str] = Counter()
        normal = [normalise(side, self._form) for side in lines]
        source, target, kept = self._cleaner.clean(normal[0], normal[1], dropped)
        # A development target is the reference of scores, so it is stored as it stands in the file.
        reference = target if self._training else list(compress(lines[1], kept))
        traced = None if self._tracer is None else self._tracer.traced(links, lines, kept, (source, target))
        keys = pair_hashes(source, target) if self._finds_duplicates else None
        return CleanedBlock(corpus, len(lines[0]), dropped, source, target, reference, keys, traced)

    def encoded(self, block: CleanedBlock) -> EncodedBlock:
        """Return a block as ids."""
        sides = [
            tokenizer.encode_normalised(texts, self._threads)
            for tokenizer, texts in zip(self._tokenizers, (block.source, block.target), strict=True)
        ]
        texts = None
        if self._has_text:
            texts = block.source, block.reference
            # Pre-segmented references are joined, because they are compared with joined output.
            if not self._training and isinstance(self._tokenizers[0], VocabularyTokenizer):
                texts = block.source, [VocabularyTokenizer.joined(text) for text in block.reference]
        links = None
        if self._tracer is not None and block.links is not None:
            links = self._tracer.stored(block.links, sides)
        source, target = (_lists(side) for side in sides)
        return EncodedBlock(block.corpus, block.read, block.dropped, block.keys, source, target, texts, links)


@dataclass
class CleanedBlock:
    """Pairs that the filters left of a block; see EncodedBlock for what has the same name there."""

    corpus: int
    read: int
    dropped: Counter[str]
    source: list[str]
    target: list[str]
    reference: list[str]
    """Target texts as they will be stored."""
    keys: NDArray[np.uint64] | None
    links: list[TracedLinks] | None
    """Where the table has links: those of each pair."""

    def select(self, stay: NDArray[np.bool_]) -> CleanedBlock:
        """Return the pairs of the mask `stay` [pairs]."""
        if stay.all():
            return self
        return replace(
            self,
            source=list(compress(self.source, stay)),
            target=list(compress(self.target, stay)),
            reference=list(compress(self.reference, stay)),
            keys=None if self.keys is None else self.keys[stay],
            links=None if self.links is None else list(compress(self.links, stay)),
        )


Block = TypeVar("Block", CleanedBlock, EncodedBlock)


def without_duplicates(block: Block, seen: HashSet) -> Block:
    """Return the pairs of a block that no earlier one has, and count the others; blocks must come in their order."""
    if block.keys is None or not len(block.keys):
        return block
    known = seen.add(block.keys)
    if known.any():
        block.dropped["duplicate"] += int(known.sum())
    return block.select(~known)


def encode_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    threads: int,
    progress: Progress,
) -> Iterator[EncodedBlock]:
    """Yield the blocks of the corpora of one split, without duplicates.

    While one block is segmented (on `threads` threads, outside Python's lock), the next is read and cleaned, and the
    one before is with the caller.

    Raises:
        DataError: a file changed since it was counted.
    """
    encoder, seen = Encoder(config, tokenizers, corpora[0].split, threads), HashSet()
    total = sum(corpus.read for corpus in corpora)
    done = 0
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[EncodedBlock] | None = None
        for number, corpus in enumerate(corpora):
            read = 0
            for lines, links in corpus.blocks(encoder.words):
                read += len(lines[0])
                # Before they are segmented, which takes longer.
                block = without_duplicates(encoder.cleaned(number, lines, links), seen)
                before, waiting = waiting, pool.submit(encoder.encoded, block)
                if before is not None:
                    yield before.result()
                done += len(lines[0])
                progress(f"encode {corpus.split}", done, total)
            if read != corpus.read:
                raise DataError(f"{corpus.reader.described()}: changed while being read; run `ziggurat prepare` again")
        if waiting is not None:
            yield waiting.result()


def store_block(
    block: EncodedBlock, corpus: Corpus, config: DataConfig, tokenizer: Tokenizer, writer: TableWriter
) -> None:
    """Drop pairs that are too long in pieces, and pass the others to the writer; `tokenizer` is the source's."""
    training = corpus.split == "train"
    # (1) Filter by pieces, which could not be done before segmentation.
    lengths = block.source[1], block.target[1]
    vanished = np.minimum(*lengths) == 0  # a model's own normalisation may leave nothing of a text
    limit = config.filters.max_pieces if training else None
    drop = vanished if limit is None else vanished | (np.maximum(*lengths) > limit)
    corpus.dropped.update(block.dropped)
    for reason, count in (("empty", int(vanished.sum())), ("too_many_pieces", int((drop & ~vanished).sum()))):
        if count:
            corpus.dropped[reason] += count
    block = block.select(~drop)
    corpus.kept += len(block.source[1])
    # (2) Put the corpus's tag in front: it does not count for max_pieces.
    source = block.source if corpus.config.tag is None else _tagged(*block.source, tokenizer.tags[corpus.config.tag])
    if block.links is not None:
        corpus.aligned += int(np.count_nonzero(block.links[1]))
    writer.write(block.corpus, source, block.target, block.texts, block.links)


def _lists(ids: Sequence[Sequence[int]]) -> Lists:
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths


def _tagged(ids: NDArray[np.int32], lengths: NDArray[np.int32], tag: int) -> Lists:
    """Return ids and lengths with `tag` in front of each sentence."""
    starts = np.cumsum(lengths) - lengths
    return np.insert(ids, starts, tag), lengths + 1
