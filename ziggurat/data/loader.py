"""Loader of batches: for training, resumable at every update and split among processes, and for validation.

ziggurat.data.batching plans an epoch. Here `collate` makes padded tensors of its pairs, a `Batch`, and `Background`
prepares them ahead in a thread. No other module of ziggurat.data imports torch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty, Queue
from threading import Event, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from ziggurat.config.data import DataConfig, RegularisationConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.batching import (
    FIRST,
    CorpusMix,
    Starts,
    check_fits,
    make_batches,
    next_starts,
    round_up,
    sorted_batches,
)
from ziggurat.data.modified import PairModifier
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import PairTable
from ziggurat.data.word_links import LinkMapper, PieceLinks
from ziggurat.system.errors import DataError

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors. Masks are True where there is a token; S and T are the padded lengths."""

    source: torch.Tensor
    """`[batch, S]` int64: ids, end-of-sentence, padding."""
    source_mask: torch.Tensor
    target_in: torch.Tensor
    """`[batch, T]` int64, the decoder's input: begin-of-sentence, ids, padding."""
    target_out: torch.Tensor
    """`[batch, T]` int64, the expected output: ids, end-of-sentence, padding."""
    target_mask: torch.Tensor
    """`[batch, T]` bool, the same for `target_in` and `target_out`."""
    indices: NDArray[np.int64]
    """`[batch]` int64, indices of the pairs in the table."""
    source_tokens: int
    """Source tokens with end-of-sentence but without padding; kept here to avoid a device synchronisation."""
    target_tokens: int
    link_places: torch.Tensor | None = None
    """`[links]` int64: word alignments on pieces, as indices into the flattened attention `[batch, T, S]`, ascending;
    None if the batch has none."""
    link_shares: torch.Tensor | None = None
    """`[links]` float32: 1 / number of source tokens that the link's target token is linked to."""
    seed: int = 0
    """Seed of the random numbers that training draws on this batch (dropout). It is a function of `training.seed` and
    the batch's position in the data, so they are the same in any process and after a resume."""

    @property
    def sentences(self) -> int:
        """Number of sentence pairs."""
        return len(self.indices)

    @property
    def shape_in_words(self) -> str:
        """Its size, padding included, for messages."""
        sentences, source = self.source.shape
        pairs = f"{sentences} sentence pair{'s' if sentences > 1 else ''}"
        return f"{pairs} of {source} source and {self.target_in.shape[1]} target tokens"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on `device`."""
        return self.with_each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def with_each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return this batch with `function` applied to each of its tensors."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)

    def twice(self) -> Batch:
        """Return this batch with all sentence pairs repeated at its end, without links."""
        counts = {name: 2 * getattr(self, name) for name in ("source_tokens", "target_tokens")}
        bare = replace(self, **counts, indices=np.tile(self.indices, 2), link_places=None, link_shares=None)
        return bare.with_each(lambda tensor: torch.cat([tensor, tensor]))

    def idle(self) -> Batch:
        """Return up to two pairs of this batch with masked target tokens and no links: loss and gradients are 0.

        A process without a batch uses it in an update for which others have one, because it must join their
        collectives.
        """
        few: dict[str, Any] = {
            name: getattr(self, name)[:2] for name in ("source", "source_mask", "target_in", "target_out")
        }
        few |= {"target_mask": torch.zeros_like(self.target_mask[:2]), "link_places": None, "link_shares": None}
        return replace(self, **few, indices=self.indices[:0], source_tokens=0, target_tokens=0)


class SpecialIds(NamedTuple):
    """Ids of padding, begin- and end-of-sentence on the two sides."""

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int

    @classmethod
    def of(cls, source: Tokenizer, target: Tokenizer) -> SpecialIds:
        """Return the ids of the two sides' tokenizers."""
        return cls(source.pad, source.eos, target.pad, target.bos, target.eos)


def collate(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    indices: NDArray[np.int64],
    special: SpecialIds,
    length_multiple: int = 1,
    links: PieceLinks | None = None,
) -> Batch:
    """Pad sentence pairs, given without begin- and end-of-sentence, into a batch.

    `indices` `[batch]` become those of the batch; padded lengths are rounded up to a multiple of `length_multiple`.
    `links` are those of the pairs.
    """
    source, source_mask = _padded(sources, special.source_pad, special.source_eos, length_multiple)
    target_out, target_mask = _padded(targets, special.target_pad, special.target_eos, length_multiple)
    # target_out shifted right by one, without its end-of-sentence: the tokens known before each predicted one.
    target_in = np.full_like(target_out, special.target_pad)
    target_in[:, 0] = special.target_bos
    target_in[:, 1:] = np.where(target_mask[:, 1:], target_out[:, :-1], special.target_pad)
    aligned: dict[str, Any] = {}
    if links is not None and len(links.row):
        places = (links.row * target_out.shape[1] + links.target) * source.shape[1] + links.source
        aligned = {"link_places": torch.from_numpy(places), "link_shares": torch.from_numpy(links.shares())}
    return Batch(
        source=torch.from_numpy(source),
        source_mask=torch.from_numpy(source_mask),
        target_in=torch.from_numpy(target_in),
        target_out=torch.from_numpy(target_out),
        target_mask=torch.from_numpy(target_mask),
        indices=indices,
        source_tokens=int(source_mask.sum()),
        target_tokens=int(target_mask.sum()),
        **aligned,
    )


def _padded(
    sentences: Sequence[Ids], pad: int, eos: int, length_multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the sentences, each followed by `eos` and padding, and the mask of their tokens, both `[batch, width]`."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int32, count=len(sentences))
    width = int(round_up(lengths.max() + 1, length_multiple))
    places = np.arange(width)
    padded = np.full((len(sentences), width), pad, dtype=np.int64)
    padded[places < lengths[:, None]] = np.concatenate(sentences)
    padded[np.arange(len(sentences)), lengths] = eos
    return padded, places <= lengths[:, None]


Item = TypeVar("Item")


class Background(Generic[Item]):
    """Iterator that runs another iterator in a thread, at most `depth` items ahead, in the same order."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue: Queue[Item | BaseException] = Queue(depth)
        stop = Event()
        # Neither the thread nor the finaliser refers to this object, so dropping the last reference ends the thread.
        # The finaliser also runs at exit: a thread that is inside torch while the interpreter shuts down can crash it.
        thread = Thread(target=_fill, args=(items, self._queue, stop), name="ziggurat-loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._queue, stop, thread)

    def __next__(self) -> Item:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item


def _fill(items: Iterator[Item], queue: Queue[Item | BaseException], stop: Event) -> None:
    try:
        while not stop.is_set():
            queue.put(next(items))
    except BaseException as error:  # every exception, since the consumer would otherwise wait for ever
        queue.put(error)


def _end(queue: Queue[Any], stop: Event, thread: Thread) -> None:
    stop.set()
    while True:  # emptying the queue unblocks a waiting `put`, after which the thread sees `stop`
        try:
            queue.get_nowait()
        except Empty:
            break
    if thread is not current_thread():  # the garbage collector may call this in any thread
        thread.join()


class LoaderState(NamedTuple):
    """A position in the order of the data: after the first `batch` batches of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0
    starts: Starts = FIRST
    """First epoch of each stage of `data.stages` that has started."""


class Group(NamedTuple):
    """The batches of one update, in this process."""

    batches: list[Batch]
    """This process's part of the `accumulate` batches. There is at least one, which is idle if there are fewer batches
    than processes. There are fewer at the end of an epoch, and more if sampled segmentations had to be split."""
    state_after: LoaderState
    epoch_batches: int | None = None
    """Number of batches in this update's epoch, over all processes; None: not counted."""


class Loader:
    """Endless batches for training, prepared ahead in a background thread and resumable at every update.

    The order depends on the lengths, the corpora, the settings here and `seed`, but not on time, threads, devices or
    the number of processes. Process `rank` of `count` has batches rank, rank + count, and so on of an update.

    Args:
        table: training pairs.
        source_tokenizer: tokenizer of the source side.
        target_tokenizer: tokenizer of the target side.
        batch: section `training.batch`.
        seed: determines the order, the modified pairs and the sampled segmentations.
        data: section `data`: stages, modifiers, sampling of corpora and segmentations. None: each pair once an epoch.
        longest: maximum number of pieces of a pair on either side that the model can read; None: as many as fit into a
            batch.
        links: whether batches have the table's word alignments; it must have some then.
        prefetch: groups prepared ahead, at least 1.
        rank: number of this process, from 0.
        count: number of processes that share the batches.

    Raises DataError if there are no pairs, a pair does not fit into a batch, there is no text to sample from, or the
    stages and modifiers do not fit the table (CorpusMix, PairModifier).
    """

    def __init__(
        self,
        table: PairTable,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        batch: BatchConfig,
        *,
        seed: int,
        data: DataConfig | None = None,
        longest: int | None = None,
        links: bool = False,
        prefetch: int = 8,
        rank: int = 0,
        count: int = 1,
    ) -> None:
        if len(table) == 0:
            raise DataError("the store holds no training pair; run `ziggurat prepare` with a corpus in data.train")
        limits = {"max_tokens": batch.max_tokens, "length_multiple": batch.length_multiple}
        check_fits(table.source_lengths, table.target_lengths, **limits)
        regularisation = None if data is None else data.subword.regularisation
        if regularisation is not None:
            table.texts(np.zeros(0, dtype=np.int64))  # raises here, not in the middle of the first epoch
        self.waited_seconds = 0.0
        """Total time that the consumer has waited for data."""
        self._table = table
        self._tokenizers = (source_tokenizer, target_tokenizer)
        self._special = SpecialIds.of(source_tokenizer, target_tokenizer)
        self._batch = batch
        self._seed, self._regularisation = seed, regularisation
        self._stages = [] if data is None else data.stages
        self._mix = CorpusMix(table, self._stages, 1.0 if data is None else data.sampling_temperature, seed)
        # Padded lengths are multiples of `length_multiple`, so only multiples of it can be used up.
        room = batch.max_tokens // batch.length_multiple * batch.length_multiple
        # Less 1: end-of-sentence is still to be added.
        self._longest = min(room - 1, longest or room)
        self._modifiers = [] if data is None else self._pair_modifiers(data)
        self._mapper = LinkMapper(source_tokenizer, target_tokenizer) if links else None
        self._prefetch, self._rank, self._count = prefetch, rank, count
        self._planned: tuple[tuple[int, Starts], list[NDArray[np.int64]]] | None = None

    def _pair_modifiers(self, data: DataConfig) -> list[PairModifier | None]:
        longest = min(self._longest, data.filters.max_pieces or self._longest)
        languages = data.source_language, data.target_language
        configs = [data.stage_modifiers(stage) for stage in range(max(1, len(data.stages)))]
        made = {
            config: PairModifier(config, self._table, self._tokenizers, languages, seed=self._seed, longest=longest)
            for config in set(configs)
            if config.chosen
        }
        return [made.get(config) for config in configs]

    def plan(self, at: LoaderState) -> list[NDArray[np.int64]]:
        """Return the batches of the epoch at a position, in order, as indices of pairs; the latest plan is cached."""
        # Read once: another thread may be planning another epoch.
        planned, epoch = self._planned, (at.epoch, at.starts)
        if planned is None or planned[0] != epoch:
            self._planned = planned = epoch, self._plan(at)
        return planned[1]

    def chosen(self, at: LoaderState) -> NDArray[np.int64]:
        """Return the pairs of the epoch at a position, corpus by corpus."""
        return self._mix.chosen(at.epoch, at.starts)

    def lengths(self, at: LoaderState, rows: NDArray[np.int64] | None = None) -> tuple[Ids, Ids]:
        """Return the maximum number of pieces of each pair in an epoch, [pairs]; as stored for pairs not in `rows`."""
        modifier, table = self._modifier(at), self._table
        return (table.source_lengths, table.target_lengths) if modifier is None else modifier.lengths(at.epoch, rows)

    def _modifier(self, at: LoaderState) -> PairModifier | None:
        return self._modifiers[self._mix.stage(at.epoch, at.starts)] if self._modifiers else None

    def _plan(self, at: LoaderState) -> list[NDArray[np.int64]]:
        batch, chosen = self._batch, self.chosen(at)
        return make_batches(
            chosen,
            *self.lengths(at, chosen),
            max_tokens=batch.max_tokens,
            max_sentences=batch.max_sentences,
            length_multiple=batch.length_multiple,
            seed=self._seed,
            epoch=at.epoch,
        )

    def groups(
        self, state: LoaderState | None = None, prepare: Callable[[Group], Group] = lambda group: group
    ) -> Iterator[Group]:
        """Yield `prepare(group)` for the group of each update, for ever, from `state` on (default: the start).

        `prepare` runs in the background thread, whose errors are raised here. Close the iterator, or drop the last
        reference to it, to end the thread. Raises DataError if `state` is beyond the end of its epoch, because it is
        from other data or settings.
        """
        ahead = Background(map(prepare, self._groups(state or LoaderState())), self._prefetch)
        try:
            while True:
                began = time.perf_counter()
                group = next(ahead)
                self.waited_seconds += time.perf_counter() - began
                yield group
        finally:
            ahead.close()

    def _groups(self, state: LoaderState) -> Iterator[Group]:
        epoch, position, starts = state
        while True:
            plan = self.plan(LoaderState(epoch, position, starts))
            if position > len(plan):
                raise DataError(
                    f"cannot continue after batch {position} of epoch {epoch}, which has only {len(plan)}: the store, "
                    f"training.batch or training.seed changed since the checkpoint; restore them or start a new run",
                    key="training.seed",
                    named=["training.batch"],
                )
            while position < len(plan):
                end = min(position + self._batch.accumulate, len(plan))
                mine = range(position + self._rank, end, self._count)
                # Taken from this plan, not the cached one, which may now belong to another epoch.
                places = [LoaderState(epoch, number, starts) for number in mine or [position]]
                batches = [batch for at in places for batch in self._loaded(plan[at.batch], at)]
                if not mine:
                    batches = [batches[0].idle()]
                position = end
                after = LoaderState(epoch, position, starts)
                if position == len(plan):
                    after = LoaderState(epoch + 1, 0, next_starts(self._stages, starts, epoch + 1))
                yield Group(batches, after, len(plan))
            epoch, position, starts = epoch + 1, 0, next_starts(self._stages, starts, epoch + 1)

    def load(self, at: LoaderState) -> list[Batch]:
        """Read and collate the batch after `at`; with sampled segmentations it may be split to stay within budget."""
        return self._loaded(self.plan(at)[at.batch], at)

    def _loaded(self, indices: NDArray[np.int64], at: LoaderState) -> list[Batch]:
        parts = self._collated(indices, at.epoch, self._modifier(at))
        seeds = [xxh32_intdigest(f"{self._seed} {at.epoch} {at.batch} {part}".encode()) for part in range(len(parts))]
        return [replace(part, seed=seed) for part, seed in zip(parts, seeds, strict=True)]

    def _collated(self, indices: NDArray[np.int64], epoch: int, modifier: PairModifier | None) -> list[Batch]:
        sources, targets = self._table.pairs(indices)
        multiple, sampling = self._batch.length_multiple, self._regularisation
        links = self._table.links(indices) if self._mapper is not None else []
        texts: dict[int, list[str]] = {}
        if modifier is not None:
            sources, targets, links, texts = modifier.modified(indices, epoch, sources, targets, links)
        if sampling is None:
            return [collate(sources, targets, indices, self._special, multiple, self._mapped(links, sources, targets))]
        stored = sources, targets
        source_texts, target_texts = self._table.texts(indices)
        for row, of_pair in texts.items():
            source_texts[row], target_texts[row] = of_pair
        if sampling.source:
            sources = self._sampled(0, sources, source_texts, indices, epoch, sampling)
        if sampling.target:
            targets = self._sampled(1, targets, target_texts, indices, epoch, sampling)
        # Samples can be longer than the stored segmentations that the batch was planned with, so it may need splitting.
        lengths = [np.array([len(ids) for ids in side]) for side in (sources, targets)]
        if self._mapper is not None:
            links = self._mapper.traceable(links, stored, (sources, targets))
        parts = sorted_batches(*lengths, max_tokens=self._batch.max_tokens, length_multiple=multiple)
        batches = []
        for p in parts:
            sides = [sources[i] for i in p], [targets[i] for i in p]
            mapped = self._mapped([links[i] for i in p] if links else [], *sides)
            batches.append(collate(*sides, indices[p], self._special, multiple, mapped))
        return batches

    def _mapped(self, links: list[Ids], sources: list[Ids], targets: list[Ids]) -> PieceLinks | None:
        return None if self._mapper is None else self._mapper.piece_links(links, sources, targets)

    def _sampled(
        self,
        side: int,
        stored: list[Ids],
        texts: list[str],
        indices: NDArray[np.int64],
        epoch: int,
        regularisation: RegularisationConfig,
    ) -> list[Ids]:
        """Sample segmentations of one side; tags stay, and overlong samples are replaced by the stored ones."""
        tokenizer = self._tokenizers[side]
        tags = set(tokenizer.tags.values())
        # Depends only on these four numbers, so that a resumed run draws the same as an uninterrupted one.
        seeds = [xxh32_intdigest(f"{self._seed} {epoch} {side} {index}".encode()) for index in indices.tolist()]
        sentences: list[Ids] = []
        for old, ids in zip(stored, tokenizer.sample(texts, seeds, regularisation), strict=True):
            tag = [first for first in old[:1].tolist() if first in tags]
            new = np.array([*tag, *ids], dtype=np.int32)
            sentences.append(new if len(new) <= self._longest else old)
        return sentences


def fixed_batches(
    table: PairTable,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    batch: BatchConfig,
    *,
    links: bool = False,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[Batch]:
    """Yield all pairs, or those of `rows`, once, shortest first, always in the same batches (validation loss).

    With `links` they have the table's word alignments; it must have some then. The budget grows to hold the longest
    pair, so that one too long for `batch.max_tokens` does not end a run at its first validation.
    """
    rows = np.arange(len(table)) if rows is None else rows
    if len(rows) == 0:
        return
    lengths = table.source_lengths[rows], table.target_lengths[rows]
    longest = np.maximum(*(of_side.max(keepdims=True) for of_side in lengths))
    budget = max(batch.max_tokens, int(round_up(longest + 1, batch.length_multiple)[0]))
    special = SpecialIds.of(source_tokenizer, target_tokenizer)
    mapper = LinkMapper(source_tokenizer, target_tokenizer) if links else None
    for places in sorted_batches(
        *lengths,
        max_tokens=budget,
        max_sentences=batch.max_sentences,
        length_multiple=batch.length_multiple,
    ):
        indices = rows[places]
        sides = table.pairs(indices)
        mapped = None if mapper is None else mapper.piece_links(table.links(indices), *sides)
        yield collate(*sides, indices, special, batch.length_multiple, mapped)
