"""Batches for training, resumable at every update and shared out among processes, and for validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from ziggurat.config.data import RegularisationConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.background import Background
from ziggurat.data.batching import check_fits, epoch_indices, make_batches, round_up, sorted_batches
from ziggurat.data.collate import Batch, Ids, SpecialIds, collate
from ziggurat.data.subword import Tokenizer
from ziggurat.data.table import PairTable
from ziggurat.errors import DataError

__all__ = ["Group", "Loader", "LoaderState", "fixed_batches"]


class LoaderState(NamedTuple):
    """A place in the order of the data: `batch` batches of epoch `epoch` are behind it."""

    epoch: int = 0
    batch: int = 0


class Group(NamedTuple):
    """What one update is made of."""

    batches: list[Batch]
    """This process's part of `accumulate` batches, at least one: an idle one where there are fewer batches than
    processes. Fewer at the end of an epoch, more where sampled segmentations had to be split."""
    state_after: LoaderState
    """Where to go on after this update."""


class Loader:
    """Batches for training: endless, prepared ahead in a background thread, resumable at every update.

    The order depends on the lengths, the corpora, the settings here and `seed`; not on time, threads, devices or the
    number of processes: of the batches of an update, process r of n has number r, r + n, and so on.

    Args:
        table: training pairs.
        source_tokenizer: tokenizer of the source side.
        target_tokenizer: tokenizer of the target side.
        batch: section `training.batch`.
        seed: fixes order and sampled segmentations.
        temperature: `data.sampling_temperature`.
        regularisation: sample segmentations anew in every epoch; None: take the stored ones.
        prefetch: groups prepared ahead, at least 1.
        rank: number of this process, from 0.
        count: processes that share the batches.

    Raises: DataError when there is no pair, a pair does not fit into a batch, or there is no text to sample from.
    """

    def __init__(
        self,
        table: PairTable,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        batch: BatchConfig,
        *,
        seed: int,
        temperature: float = 1.0,
        regularisation: RegularisationConfig | None = None,
        prefetch: int = 8,
        rank: int = 0,
        count: int = 1,
    ) -> None:
        if len(table) == 0:
            raise DataError("the store holds no training pair; run `ziggurat prepare` with a corpus in data.train")
        limits = {"max_tokens": batch.max_tokens, "length_multiple": batch.length_multiple}
        check_fits(table.source_lengths, table.target_lengths, **limits)
        if regularisation is not None:
            table.texts(np.zeros(0, dtype=np.int64))  # Refuses here, not in the middle of the first epoch.
        self.waited_seconds = 0.0
        """Time the consumer has spent waiting for data, in all."""
        self._table = table
        self._tokenizers = (source_tokenizer, target_tokenizer)
        self._special = SpecialIds.of(source_tokenizer, target_tokenizer)
        self._batch = batch
        self._seed, self._temperature = seed, temperature
        self._regularisation = regularisation
        self._prefetch = prefetch
        self._rank, self._count = rank, count
        self._planned: tuple[int, list[NDArray[np.int64]]] | None = None

    def plan(self, epoch: int) -> list[NDArray[np.int64]]:
        """The batches of `epoch`, as indices of pairs, in order; the plan asked for last is kept."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def _plan(self, epoch: int) -> list[NDArray[np.int64]]:
        table, batch = self._table, self._batch
        chosen = epoch_indices(table.corpora, table.corpus_weights, self._temperature, self._seed, epoch)
        return make_batches(
            chosen,
            table.source_lengths,
            table.target_lengths,
            max_tokens=batch.max_tokens,
            max_sentences=batch.max_sentences,
            length_multiple=batch.length_multiple,
            seed=self._seed,
            epoch=epoch,
        )

    def groups(
        self, state: LoaderState | None = None, prepare: Callable[[Group], Group] = lambda group: group
    ) -> Iterator[Group]:
        """Yield what each update is made of, for ever, from `state` (default: the beginning) on, as `prepare` gives it.

        `prepare` runs in the thread. Close the iterator (or let it go) to end it; what goes wrong there is raised here.

        Raises: DataError when `state` is behind the end of its epoch (other data or settings than it came from).
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
        epoch, position = state
        while True:
            plan = self.plan(epoch)
            if position > len(plan):
                raise DataError(
                    f"cannot go on after batch {position} of epoch {epoch}, which has only {len(plan)}: the store, "
                    f"training.batch or training.seed changed since the checkpoint; restore them or start a new run"
                )
            while position < len(plan):
                end = min(position + self._batch.accumulate, len(plan))
                mine = range(position + self._rank, end, self._count)
                batches = [batch for number in mine for batch in self.load(epoch, number)]
                if not batches:
                    batches = [self.load(epoch, position)[0].idle()]
                position = end
                after = LoaderState(epoch, position) if position < len(plan) else LoaderState(epoch + 1)
                yield Group(batches, after)
            epoch, position = epoch + 1, 0

    def load(self, epoch: int, position: int) -> list[Batch]:
        """Read and collate batch `position` of `epoch`; sampled segmentations may need several to keep the budget."""
        parts = self._collated(self.plan(epoch)[position], epoch)
        seeds = [xxh32_intdigest(f"{self._seed} {epoch} {position} {part}".encode()) for part in range(len(parts))]
        return [replace(part, seed=seed) for part, seed in zip(parts, seeds, strict=True)]

    def _collated(self, indices: NDArray[np.int64], epoch: int) -> list[Batch]:
        sources, targets = self._table.pairs(indices)
        multiple, sampling = self._batch.length_multiple, self._regularisation
        if sampling is None:
            return [collate(sources, targets, indices, self._special, multiple)]
        source_texts, target_texts = self._table.texts(indices)
        if sampling.source:
            sources = self._sampled(0, sources, source_texts, indices, epoch, sampling)
        if sampling.target:
            targets = self._sampled(1, targets, target_texts, indices, epoch, sampling)
        lengths = [np.array([len(ids) for ids in side]) for side in (sources, targets)]
        parts = sorted_batches(*lengths, max_tokens=self._batch.max_tokens, length_multiple=multiple)
        return [
            collate([sources[i] for i in p], [targets[i] for i in p], indices[p], self._special, multiple)
            for p in parts
        ]

    def _sampled(
        self,
        side: int,
        stored: list[Ids],
        texts: list[str],
        indices: NDArray[np.int64],
        epoch: int,
        regularisation: RegularisationConfig,
    ) -> list[Ids]:
        """Sample segmentations of one side; a tag stays, and a sample too long for any batch is not taken."""
        tokenizer = self._tokenizers[side]
        tags = set(tokenizer.tags.values())
        room = self._batch.max_tokens // self._batch.length_multiple * self._batch.length_multiple
        # From nothing but these four numbers, so that a resumed run draws what the uninterrupted one drew.
        seeds = [xxh32_intdigest(f"{self._seed} {epoch} {side} {index}".encode()) for index in indices.tolist()]
        sentences: list[Ids] = []
        for old, ids in zip(stored, tokenizer.sample(texts, seeds, regularisation), strict=True):
            tag = [first for first in old[:1].tolist() if first in tags]
            new = np.array([*tag, *ids], dtype=np.int32)
            sentences.append(new if len(new) < room else old)  # `<`: end-of-sentence comes on top.
        return sentences


def fixed_batches(
    table: PairTable, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, batch: BatchConfig
) -> Iterator[Batch]:
    """Yield all pairs once, shortest first, always in the same batches (validation loss).

    A pair too long for `batch.max_tokens` does not stop a run at its first validation: the budget grows to hold it.
    """
    if len(table) == 0:
        return
    longest = np.maximum(table.source_lengths.max(keepdims=True), table.target_lengths.max(keepdims=True))
    budget = max(batch.max_tokens, int(round_up(longest + 1, batch.length_multiple)[0]))
    special = SpecialIds.of(source_tokenizer, target_tokenizer)
    for indices in sorted_batches(
        table.source_lengths,
        table.target_lengths,
        max_tokens=budget,
        max_sentences=batch.max_sentences,
        length_multiple=batch.length_multiple,
    ):
        yield collate(*table.pairs(indices), indices, special, batch.length_multiple)
