"""Loader of batches: for training, resumable at every update and split among processes, and for validation.

Last of the batch modules: ziggurat.data.batching plans an epoch, ziggurat.data.collate makes the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from ziggurat.config.data import DataConfig, RegularisationConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.batching import check_fits, make_batches, round_up, sorted_batches
from ziggurat.data.collate import Background, Batch, Ids, SpecialIds, collate
from ziggurat.data.modified import PairModifier
from ziggurat.data.stages import FIRST, CorpusMix, Starts, next_starts
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import PairTable
from ziggurat.data.units import LinkMapper, PieceLinks
from ziggurat.system.errors import DataError


class LoaderState(NamedTuple):
    """A position in the order of the data: after the first `batch` batches of epoch `epoch`."""

    epoch: int = 0
    batch: int = 0
    starts: Starts = FIRST
    """First epoch of each stage of `data.stages` that has begun."""


class Group(NamedTuple):
    """The batches of one update, in this process."""

    batches: list[Batch]
    """This process's part of the `accumulate` batches. At least one, an idle one where there are fewer batches than
    processes; fewer than usual at the end of an epoch, more where sampled segmentations had to be split."""
    state_after: LoaderState
    """Position in the data after this update."""
    epoch_batches: int | None = None
    """Batches of this update's epoch, in all processes together; None: not counted."""


class Loader:
    """Endless batches for training, prepared ahead in a background thread and resumable at every update.

    The order depends on the lengths, the corpora, the settings here and `seed`, but not on time, threads, devices or
    the number of processes: of the batches of an update, process r of n has numbers r, r + n, and so on.

    Args:
        table: training pairs.
        source_tokenizer: tokenizer of the source side.
        target_tokenizer: tokenizer of the target side.
        batch: section `training.batch`.
        seed: determines the order, the modified pairs and the sampled segmentations.
        data: section `data`: stages, modifiers, sampling of corpora and segmentations. None: each pair once an epoch.
        longest: most pieces of a pair on either side that the model can read, for modified pairs and sampled
            segmentations; None: as many as fit into a batch.
        links: whether batches have the table's word alignments; it must have some then.
        prefetch: groups prepared ahead, at least 1.
        rank: number of this process, from 0.
        count: number of processes that share the batches.

    Raises: DataError when there are no pairs, a pair does not fit into a batch, there is no text to sample from, or the
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
        # Padded lengths are multiples of `length_multiple`, so a budget that is none cannot be used to the end.
        room = batch.max_tokens // batch.length_multiple * batch.length_multiple
        # Less 1: end-of-sentence is still to be added.
        self._longest = min(room - 1, longest or room)
        self._modifiers = [] if data is None else self._pair_modifiers(data)
        self._mapper = LinkMapper(source_tokenizer, target_tokenizer) if links else None
        self._prefetch, self._rank, self._count = prefetch, rank, count
        self._planned: tuple[tuple[int, Starts], list[NDArray[np.int64]]] | None = None

    def _pair_modifiers(self, data: DataConfig) -> list[PairModifier | None]:
        """Return the modifiers of each stage."""
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
        """Return the most pieces of each pair of the table, [pairs], in an epoch; of pairs beside `rows`, as stored."""
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
        """Yield `prepare(group)` for the group of each update, for ever, from `state` on (default: the beginning).

        `prepare` runs in the background thread, whose errors are raised here. Close the iterator, or drop the last
        reference to it, to end the thread.

        Raises: DataError when `state` lies beyond the end of its epoch: it is from other data or settings.
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
                    f"cannot go on after batch {position} of epoch {epoch}, which has only {len(plan)}: the store, "
                    f"training.batch or training.seed changed since the checkpoint; restore them or start a new run"
                )
            while position < len(plan):
                end = min(position + self._batch.accumulate, len(plan))
                mine = range(position + self._rank, end, self._count)
                # From this plan, not from the cached one, which may be of another epoch by now.
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
        """Read and collate the batch that follows `at`; sampled segmentations may take several to stay in budget."""
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
        """Sample segmentations of one side; tags stay, and the stored one is used where a sample is too long."""
        tokenizer = self._tokenizers[side]
        tags = set(tokenizer.tags.values())
        # A function of these four numbers only, so that a resumed run draws the same as an uninterrupted one.
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

    With `links` they have the table's word alignments; it must have some then.

    The budget grows to hold the longest pair, so that a pair too long for `batch.max_tokens` does not end a run at its
    first validation.
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
