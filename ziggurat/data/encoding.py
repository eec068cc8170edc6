"""The third pass of `prepare`: pairs are cleaned and segmented, block by block, compared, and written in order.

Until they are compared, blocks can be made in any order by any process, because they do not depend on each other:
`pack` puts several into a file for ziggurat.corpora.jobs.preparation.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig
from ziggurat.data.aligner import Link
from ziggurat.data.cleaning.cleaner import (
    Cleaner,
    Comparisons,
    Examples,
    PairHashes,
    Scorers,
    cleaner_of,
    compared_hashes,
)
from ziggurat.data.cleaning.filters import Mask
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.readers import PairBlock
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import Lists, TableWriter, list_array
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.data.word_links import LinkTracer, TracedLinks, words_of
from ziggurat.system.errors import DataError, Problem, Remedy

_NUMBERS = ("source", "target", "links")


@dataclass(frozen=True)
class _Counted:
    """Pairs of one corpus.

    Attributes:
        corpus: number of the corpus within its split.
        read: pairs that were read.
        dropped: pairs that were dropped so far, by reason.
        repaired: pairs whose text was mended, including dropped ones.
        examples: some of the dropped pairs.
        traces: hashes by which each pair is compared with others; None for development text.
    """

    corpus: int
    read: int
    dropped: Counter[str]
    repaired: int
    examples: Examples
    traces: PairHashes | None


@dataclass(frozen=True)
class EncodedBlock(_Counted):
    """Segmented pairs as ids, including pairs that are too long; sources have no tag yet.

    `texts` are both sides and `links` word alignments, as the store keeps them; None if it does not.
    """

    source: Lists
    target: Lists
    texts: tuple[Sequence[str], Sequence[str]] | None = None
    links: Lists | None = None

    def select(self, stay: NDArray[np.bool_]) -> EncodedBlock:
        """Return the pairs of the mask `stay` [pairs]."""
        if stay.all():
            return self
        return replace(
            self,
            traces=None if self.traces is None else self.traces.select(stay),
            source=_selected(self.source, stay),
            target=_selected(self.target, stay),
            texts=None
            if self.texts is None
            else (list(compress(self.texts[0], stay)), list(compress(self.texts[1], stay))),
            links=None if self.links is None else _selected(self.links, stay),
        )


def _selected(lists: Lists, stay: NDArray[np.bool_]) -> Lists:
    numbers, lengths = lists
    return numbers[np.repeat(stay, lengths)], lengths[stay]


def pack(blocks: Sequence[EncodedBlock]) -> bytes:
    """Return blocks (at least one, all with the same columns) as an Arrow file."""
    batches = [pa.record_batch(_columns(block)) for block in blocks]
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for block, batch in zip(blocks, batches, strict=True):
            facts = [block.corpus, block.read, block.dropped, block.repaired, block.examples.record()]
            writer.write_batch(batch, custom_metadata={"block": json.dumps(facts, sort_keys=True)})
    return sink.getvalue()


def _columns(block: EncodedBlock) -> dict[str, pa.Array]:
    columns = {name: list_array(*lists) for name in _NUMBERS if (lists := getattr(block, name)) is not None}
    for name, array in zip(PairHashes._fields, block.traces or (), strict=False):
        if array is not None:
            numbers = pa.array(array.ravel(), pa.uint64())
            flat = array.ndim == 1
            columns[name] = numbers if flat else pa.FixedSizeListArray.from_arrays(numbers, array.shape[1])
    for name, side in zip(("source_text", "target_text"), block.texts or (), strict=False):
        columns[name] = pa.array(side, pa.large_string())
    return columns


def unpack(content: bytes) -> Iterator[EncodedBlock]:
    """Yield the blocks of a file made by `pack`, whose checksum the caller has compared."""
    reader = pa.ipc.open_file(pa.BufferReader(content))
    for number in range(reader.num_record_batches):
        batch, facts = reader.get_batch_with_custom_metadata(number)
        corpus, read, dropped, repaired, examples = json.loads(facts[b"block"])
        names = batch.schema.names
        lists = {name: _unpacked(batch.column(name)) for name in _NUMBERS if name in names}
        texts = [batch.column(name).to_pylist() for name in ("source_text", "target_text") if name in names]
        yield EncodedBlock(
            corpus,
            read,
            Counter(dropped),
            repaired,
            Examples(examples),
            _traces(batch),
            texts=(texts[0], texts[1]) if texts else None,
            **lists,
        )


def _unpacked(column: pa.ListArray) -> Lists:
    offsets = column.offsets.to_numpy()
    return column.values.to_numpy()[offsets[0] : offsets[-1]], np.diff(offsets)


def _traces(batch: pa.RecordBatch) -> PairHashes | None:
    if "keys" not in batch.schema.names:
        return None
    arrays = {}
    for name in set(PairHashes._fields) & set(batch.schema.names):
        column = batch.column(name)
        flat = not pa.types.is_fixed_size_list(column.type)
        arrays[name] = (
            column.to_numpy() if flat else column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        )
    return PairHashes(**arrays)


class BlockCleaner:
    """Cleaner of single blocks of one split; `scorers`: the pair scores, if a filter uses them."""

    def __init__(self, config: DataConfig, split: str, scorers: Scorers | None = None) -> None:
        self._config, self._scorers, self._training = config, scorers, split == "train"
        self._cleaners: dict[int, Cleaner] = {}

    def _cleaner(self, corpus: int) -> Cleaner:
        if corpus not in self._cleaners:
            of_corpus = cleaner_of(self._config, self._config.train[corpus], self._scorers) if self._training else None
            self._cleaners[corpus] = of_corpus or Cleaner.only_empty()
        return self._cleaners[corpus]

    def cleaned(self, corpus: int, lines: PairBlock, unwanted: Mask | None) -> tuple[CleanedBlock, Mask, Mask]:
        """Return the pairs of a block that pass the filters, without links, and two masks over the block.

        The masks [pairs] are of the pairs that pass and of the repaired pairs. `unwanted`: mask of the pairs to drop
        because of another tool's score.
        """
        dropped, examples, cleaner = Counter[str](), Examples(), self._cleaner(corpus)
        first, second, repaired = cleaner.mended(*lines, self._config.unicode)
        source, target, kept = cleaner.clean(first, second, dropped, unwanted, examples)
        # A development target is the reference of scores, so it is stored unchanged.
        reference = target if self._training else list(compress(lines[1], kept))
        traces = compared_hashes(self._config, corpus, source, target) if self._training else None
        counts = len(lines[0]), dropped, int(repaired.sum()), examples
        return CleanedBlock(corpus, *counts, traces, source, target, reference), kept, repaired


class PairEncoder:
    """Encoder of single blocks of one split for the store: cleaning and segmentation.

    `threads` are for segmentation and do not affect the result; `scorers`: see BlockCleaner.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizers: tuple[Tokenizer, Tokenizer],
        split: str,
        threads: int,
        scorers: Scorers | None = None,
    ) -> None:
        self.words = words_of(config, tokenizers)
        self._tokenizers, self._threads, self._training = tokenizers, threads, split == "train"
        self._cleaner = BlockCleaner(config, split, scorers)
        self._tracer = LinkTracer(self.words, tokenizers) if config.aligned(split) else None
        self._has_text = not self._training or config.subword.regularisation is not None

    def cleaned(
        self, corpus: int, lines: PairBlock, links: list[list[Link]] | None, unwanted: Mask | None
    ) -> CleanedBlock:
        """Return the pairs of a block that pass the filters, ready for segmentation.

        `unwanted`: see BlockCleaner.cleaned.
        """
        block, kept, repaired = self._cleaner.cleaned(corpus, lines, unwanted)
        if self._tracer is not None:
            if links is not None:  # they count the words of the original text
                links = [[] if mended else known for known, mended in zip(links, repaired, strict=True)]
            block = replace(block, links=self._tracer.traced(links, lines, kept, (block.source, block.target)))
        return block

    def text(self, block: CleanedBlock, place: int) -> tuple[str, str]:
        """Return the text of a block's pair as its ids will spell it."""
        pair = block.source[place], block.target[place]
        sides = zip(self._tokenizers, pair, strict=True)
        source, target = (tokenizer.decode(tokenizer.encode_normalised([text])[0]) for tokenizer, text in sides)
        return source, target

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
            if not self._training and isinstance(self._tokenizers[1], VocabularyTokenizer):
                texts = block.source, [self._tokenizers[1].joined(text) for text in block.reference]
        links = None
        if self._tracer is not None and block.links is not None:
            links = self._tracer.stored(block.links, sides)
        source, target = (_lists(side) for side in sides)
        counts = block.corpus, block.read, block.dropped, block.repaired, block.examples, block.traces
        return EncodedBlock(*counts, source, target, texts, links)


@dataclass(frozen=True)
class CleanedBlock(_Counted):
    """Pairs of a block that passed the filters."""

    source: list[str]
    target: list[str]
    reference: list[str]
    """Target texts as they will be stored."""
    links: list[TracedLinks] | None = None

    def select(self, stay: NDArray[np.bool_]) -> CleanedBlock:
        """Return the pairs of the mask `stay` [pairs]."""
        if stay.all():
            return self
        return replace(
            self,
            source=list(compress(self.source, stay)),
            target=list(compress(self.target, stay)),
            reference=list(compress(self.reference, stay)),
            traces=None if self.traces is None else self.traces.select(stay),
            links=None if self.links is None else list(compress(self.links, stay)),
        )


Block = TypeVar("Block", CleanedBlock, EncodedBlock)


def compared(block: Block, comparisons: Comparisons, text: Callable[[Block, int], tuple[str, str]]) -> Block:
    """Return the pairs of a block that pass the comparisons with other pairs, and count the others.

    Blocks must come in order. `text` returns the pair at an index of a block, for examples.
    """
    if block.traces is None:
        return block
    for reason, check in comparisons.checks(block.corpus):
        traces = block.traces
        if traces is not None and len(traces.keys) and (drop := check(traces)).any():
            block = _dropped(block, reason, drop, text)
    return block


def _dropped(block: Block, reason: str, drop: Mask, text: Callable[[Block, int], tuple[str, str]]) -> Block:
    block.dropped[reason] += int(drop.sum())
    if block.traces is not None:
        places = drop.nonzero()[0].tolist()
        block.examples.see(reason, block.traces.keys[drop], lambda place: text(block, places[place]))
    return block.select(~drop)


def block_text(tokenizers: tuple[Tokenizer, Tokenizer], block: EncodedBlock, place: int) -> tuple[str, str]:
    """Return the text of a block's pair as its ids spell it."""
    found = []
    for tokenizer, (ids, lengths) in zip(tokenizers, (block.source, block.target), strict=True):
        end = int(lengths[: place + 1].sum())
        found.append(tokenizer.decode(ids[end - int(lengths[place]) : end].tolist()))
    return found[0], found[1]


def encode_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    threads: int,
    progress: Progress,
    comparisons: Comparisons,
    scorers: Scorers | None = None,
) -> Iterator[EncodedBlock]:
    """Yield the blocks of the corpora of one split, compared.

    While one block is segmented (on `threads` threads, outside Python's lock), the next is read and cleaned, and the
    caller handles the previous one. Raises DataError if a file changed since it was counted.
    """
    encoder = PairEncoder(config, tokenizers, corpora[0].split, threads, scorers)
    total = sum(corpus.read for corpus in corpora)
    done = 0
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[EncodedBlock] | None = None
        for number, corpus in enumerate(corpora):
            read = 0
            for lines, links, unwanted in corpus.blocks(encoder.words):
                read += len(lines[0])
                # Before segmentation, which takes longer.
                block = compared(encoder.cleaned(number, lines, links, unwanted), comparisons, encoder.text)
                before, waiting = waiting, pool.submit(encoder.encoded, block)
                if before is not None:
                    yield before.result()
                done += len(lines[0])
                progress(f"encode {corpus.split}", done, total)
            if read != corpus.read:
                raise DataError(Problem("", f"{corpus.reader.described()}: changed while being read", Remedy.PREPARE))
        if waiting is not None:
            yield waiting.result()


def store_block(
    block: EncodedBlock,
    corpus: Corpus,
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    writer: TableWriter,
) -> None:
    """Drop pairs that are too long in pieces, and pass the others to the writer."""
    # (1) Filter by pieces, which are known only after segmentation.
    lengths = block.source[1], block.target[1]
    vanished = np.minimum(*lengths) == 0  # a model's own normalisation may empty a text
    limit = config.filters_of(corpus.config).max_pieces if corpus.split == "train" else None
    too_long = (np.maximum(*lengths) > limit) & ~vanished if limit is not None else np.zeros_like(vanished)
    for reason, drop in (("empty", vanished), ("too_many_pieces", too_long[~vanished])):
        if drop.any():
            block = _dropped(block, reason, drop, partial(block_text, tokenizers))
    corpus.dropped.update(block.dropped)
    corpus.repaired += block.repaired
    corpus.examples.join(block.examples)
    corpus.kept += len(block.source[1])
    # (2) Prepend the corpus's tag, which does not count towards max_pieces.
    source, tag = block.source, corpus.config.tag
    if tag is not None:
        ids, counts = source
        source = np.insert(ids, np.cumsum(counts) - counts, tokenizers[0].tags[tag]), counts + 1
    if block.links is not None:
        corpus.aligned += int(np.count_nonzero(block.links[1]))
    writer.write(block.corpus, source, block.target, block.texts, block.links)


def _lists(ids: Sequence[Sequence[int]]) -> Lists:
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths
