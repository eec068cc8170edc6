"""The order of training data: batches of similar length, a pure function of (lengths, settings, seed, epoch).

An epoch is planned in two steps: `epoch_indices` (or `CorpusMix` if there are stages) chooses the pairs,
`make_batches` groups and orders them. Lengths are in subword pieces as stored, without end-of-sentence; every budget
adds one for it. A batch costs `sentences * max(padded source length, padded target length)` tokens (fairseq's rule).
Everything is vectorised over pairs; the only loop is over batches, so 40 million pairs take half a minute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.modifiers import StageConfig
from ziggurat.data.table import PairTable
from ziggurat.system.errors import DataError, Remedy, printable

Integers = NDArray[np.integer]
Indices = NDArray[np.int64]
Lengths = NDArray[np.int32]  # half the memory of int64, which matters for 40 million pairs


def epoch_indices(corpora: Integers, weights: Sequence[float], temperature: float, seed: int, epoch: int) -> Indices:
    """Return the indices of the pairs of one epoch, as many as the corpora have pairs, corpus by corpus.

    Corpus c gets a share proportional to `(n_c * w_c) ** (1 / temperature)`. Its pairs come from an endless sequence of
    shuffled copies of the corpus, which is cut into epochs. After any number of epochs, the numbers of draws of two
    pairs of a corpus therefore differ by at most one. With equal weights and temperature 1 every pair comes exactly
    once per epoch. `corpora` is the number of each pair's corpus, from 0, `[pairs]`, and `weights` has one per corpus,
    above 0.
    """
    sizes = np.bincount(corpora, minlength=len(weights))
    if len(corpora) == 0:
        return np.zeros(0, dtype=np.int64)
    quotas = _quotas(sizes, weights, temperature)
    return draw(corpora, epoch * quotas, quotas, seed)


def draw(corpora: Integers, positions: Indices, quotas: Indices, seed: int) -> Indices:
    """Return the next pairs of each corpus from its endless sequence of shuffled copies, as indices, corpus by corpus.

    `corpora` has the number of each pair's corpus, from 0, `[pairs]`. `positions` and `quotas`, `[corpora]`, are the
    numbers of pairs already taken and to take from each corpus, 0 for an empty corpus.
    """
    sizes = np.bincount(corpora, minlength=len(quotas))
    parts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for corpus, (size, position, quota) in enumerate(
        zip(sizes.tolist(), positions.tolist(), quotas.tolist(), strict=True)
    ):
        if quota == 0:
            continue
        members = np.flatnonzero(corpora == corpus) if len(sizes) > 1 else np.arange(size)
        end = position + quota
        while position < end:
            copy, offset = divmod(position, size)
            taken = min(size - offset, end - position)
            if taken < size:
                shuffled = _generator(seed, copy, _REMAINDER, corpus).permutation(members)
                parts.append(shuffled[offset : offset + taken])
            else:  # a whole copy needs no shuffling: make_batches mixes the pairs anyway
                parts.append(members)
            position += taken
    return np.concatenate(parts)


def _quotas(sizes: NDArray[np.int64], weights: Sequence[float], temperature: float) -> NDArray[np.int64]:
    """Return the number of pairs to draw from each corpus per epoch: at least 1 if it has any; the sum is all pairs."""
    total = int(sizes.sum())
    mass = np.zeros(len(sizes))
    filled = sizes > 0
    # In the log domain, so that a small temperature does not overflow.
    logs = (np.log(sizes[filled]) + np.log(np.asarray(weights, dtype=float)[filled])) / temperature
    mass[filled] = np.exp(logs - logs.max())
    exact = total * mass / mass.sum()
    quotas = np.maximum(np.floor(exact).astype(np.int64), filled)
    missing = total - int(quotas.sum())
    if missing > 0:  # largest remainders first; `stable` orders ties by corpus number on every machine
        quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):  # the minimum of one pair for each corpus brought the sum above the total
        quotas[np.argmax(quotas)] -= 1
    return quotas


def make_batches(
    indices: Indices,
    source_lengths: Integers,
    target_lengths: Integers,
    *,
    max_tokens: int,
    max_sentences: int | None = None,
    length_multiple: int = 1,
    seed: int,
    epoch: int,
) -> list[Indices]:
    """Return the pairs of an epoch in batches of similar length, in random order: one array of indices per batch.

    Which of equally long pairs share a batch, and the order of the batches, depend on `seed` and `epoch`. A batch,
    padded to its longest source and target, each rounded up to `length_multiple`, costs `sentences * max(source,
    target)`, at most `max_tokens`. A larger `length_multiple` means fewer distinct shapes and more padding.

    Args:
        indices: `[drawn]` pairs of this epoch (epoch_indices); repeated ones stay repeated.
        source_lengths: `[pairs]` pieces of every pair of the table, end-of-sentence not counted.
        target_lengths: `[pairs]`, the same for targets.
        max_tokens: budget of a batch.
        max_sentences: maximum number of pairs in a batch; None: no limit.
        length_multiple: see above.
        seed: any number from 0.
        epoch: from 0.

    Raises DataError if a pair is longer than `max_tokens` (check_fits).
    """
    # Shuffled first, since the sort is stable: pairs of equal lengths are grouped differently in every epoch.
    mixed = _generator(seed, epoch, _TIES).permutation(indices)
    batches = sorted_batches(
        source_lengths,
        target_lengths,
        max_tokens=max_tokens,
        max_sentences=max_sentences,
        length_multiple=length_multiple,
        indices=mixed,
    )
    order = _generator(seed, epoch, _BATCH_ORDER).permutation(len(batches))
    return [batches[i] for i in order]


def sorted_batches(
    source_lengths: Integers,
    target_lengths: Integers,
    *,
    max_tokens: int,
    max_sentences: int | None = None,
    length_multiple: int = 1,
    indices: Indices | None = None,
) -> list[Indices]:
    """Return pairs in batches of similar length, shortest first, without randomness (validation, scoring).

    Arguments, cost and errors are those of make_batches; `indices` are the pairs, or None for all. To batch only by the
    source, pass its lengths twice.
    """
    indices = np.arange(len(source_lengths)) if indices is None else indices
    if len(indices) == 0:
        return []
    source, target = _padded(source_lengths[indices], target_lengths[indices], length_multiple)
    cost = np.maximum(source, target)
    if cost.max() > max_tokens:
        check_fits(source_lengths, target_lengths, max_tokens=max_tokens, length_multiple=length_multiple)
    # In place, and freed as early as possible, because every process of a run plans the whole epoch.
    source //= length_multiple
    target //= length_multiple
    key = _length_key(source, target)
    del source, target
    order = np.argsort(key, kind="stable")
    del key
    borders = _cut(cost[order], max_tokens, max_sentences)
    ordered = indices[order]
    return [ordered[start:end] for start, end in pairwise(borders)]


def _length_key(source: Lengths, target: Lengths) -> Integers:
    """Return numbers by which pairs are sorted so that neighbours have similar lengths on both sides.

    Pairs are sorted by the longer side, which determines the cost of a batch, then by the difference between the sides,
    alternately up and down, so that the last pair of one length resembles the first of the next. On Multi30k (4,096
    tokens) this pads the sides by 2.6 % and 3.7 %, in 119 batches; sorting by source, then target, by 0.6 % and 12.0 %,
    in 128.
    """
    longer, difference = np.maximum(source, target), source - target
    np.negative(difference, out=difference, where=longer % 2 == 1)
    most = int(longer.max())
    width = 2 * most + 1
    fits = most * width + most <= np.iinfo(np.int32).max  # half the memory for any usual length
    key: NDArray[Any] = longer.astype(np.int32 if fits else np.int64, copy=False)
    key *= width
    key += difference
    return key


def _cut(cost: Lengths, max_tokens: int, max_sentences: int | None) -> list[int]:
    """Cut ordered pairs into batches as large as the budget allows; return the borders, both ends included."""
    borders = [0]
    start, end = 0, len(cost)
    counts = np.arange(1, min(max_tokens, end) + 1)  # a budget may be far larger than all pairs together
    while start < end:
        most = max(1, max_tokens // int(cost[start]))
        if max_sentences is not None:
            most = min(most, max_sentences)
        longest = np.maximum.accumulate(cost[start : start + most])
        # longest * count never falls, so binary search finds the first pair that does not fit.
        start += max(1, int(np.searchsorted(longest * counts[: len(longest)], max_tokens, side="right")))
        borders.append(start)
    return borders


def check_fits(
    source_lengths: Integers, target_lengths: Integers, *, max_tokens: int, length_multiple: int = 1
) -> None:
    """Raise DataError, which names the longest pair and the settings to change, unless every pair fits into a batch.

    Lengths are `[pairs]` pieces, end-of-sentence not counted; padded ones are rounded up to a multiple of
    `length_multiple`.
    """
    if len(source_lengths) == 0:
        return
    most = np.array([max(int(lengths.max()) for lengths in (source_lengths, target_lengths)) + 1])
    if round_up(most, length_multiple)[0] <= max_tokens:
        return
    cost = np.maximum(*_padded(source_lengths, target_lengths, length_multiple))
    longest = int(np.argmax(cost))
    too_long = int(np.count_nonzero(cost > max_tokens))
    raise DataError(
        f"{too_long} of {len(cost)} sentence pairs do not fit into a batch of training.batch.max_tokens = "
        f"{max_tokens}: the longest, pair {longest} (counted from 0), has {source_lengths[longest]} source and "
        f"{target_lengths[longest]} target pieces, {cost[longest]} tokens with end-of-sentence and padding; "
        f"set training.batch.max_tokens to {cost[longest]} or more, or lower data.filters.max_pieces "
        f"and run `ziggurat prepare` again",
        key="training.batch.max_tokens",
        named=["data.filters.max_pieces", Remedy.THEN_PREPARE],
    )


def round_up(lengths: Integers, multiple: int) -> Lengths:
    """Round each length up to a multiple of `multiple`."""
    return -(-lengths.astype(np.int32, copy=False) // multiple) * multiple


# Uses of random streams, which separate the streams of one (seed, epoch). The numbers must not change: they seed the
# order of the data, which a resumed run must repeat.
_REMAINDER, _TIES, _BATCH_ORDER = range(3)


def _generator(seed: int, epoch: int, purpose: int, *more: int) -> np.random.Generator:
    # PCG64 by name, since default_rng may change; SeedSequence distinguishes (1, 2) and (2, 1).
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose, *more))))


def largest(sentences: Integers, source: Integers, target: Integers) -> list[int]:
    """Return the indices of the one or two batches that may need the most memory, from padded lengths `[batches]`.

    States of layers grow with the sum of both lengths; attention weights, where they are kept, with the squares of the
    lengths (self-attention) and their product (cross-attention). Which of the two weighs more depends on the model.
    """
    count, source, target = (each.astype(np.int64) for each in (sentences, source, target))
    states, weights = count * (source + target), count * (source**2 + target**2 + source * target)
    return list(dict.fromkeys((int(states.argmax()), int(weights.argmax()))))


def _padded(source_lengths: Integers, target_lengths: Integers, length_multiple: int) -> tuple[Lengths, Lengths]:
    # Widened first: lengths may be stored in 16 bits, where 65,535 + 1 is 0.
    source, target = (side.astype(np.int32, copy=False) for side in (source_lengths, target_lengths))
    return round_up(source + 1, length_multiple), round_up(target + 1, length_multiple)


Starts = tuple[int, ...]
"""First epoch of each stage that has started, ascending."""

FIRST: Starts = (0,)
"""FIRST is the starts of a new run."""


def next_starts(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> Starts:
    """Return the starts of the stages when `epoch` starts, after an epoch of the last stage in `starts`."""
    over = len(starts) < len(stages) and _ended(stages, starts, epoch)
    return (*starts, epoch) if over else starts


def stages_over(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> bool:
    """Return True if the last stage has finished its epochs when `epoch` starts."""
    return bool(stages) and len(starts) == len(stages) and _ended(stages, starts, epoch)


def _ended(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> bool:
    epochs = stages[len(starts) - 1].until.epochs
    return epochs is not None and epoch - starts[-1] >= epochs


class CorpusMix:
    """Choice of the pairs of each epoch, by stages or by weights.

    `stages` are `data.stages`. Without any, the weights of the table's corpora and `temperature`
    (`data.sampling_temperature`) set the mix. Raises DataError if a stage names a corpus that the store lacks, has
    twice, or has without pairs.
    """

    def __init__(self, table: PairTable, stages: Sequence[StageConfig], temperature: float, seed: int) -> None:
        self._table, self._temperature, self._seed = table, temperature, seed
        self._sizes = np.bincount(table.corpora, minlength=len(table.corpus_names)) if stages else np.zeros(0, np.int64)
        self._quotas = [self._quota(stage, number) for number, stage in enumerate(stages)]

    def _quota(self, stage: StageConfig, number: int) -> Indices:
        """Return the pairs of each corpus in an epoch of a stage, int64 [corpora]; the corpus of `until` has all."""
        names, shares = self._table.corpus_names, np.zeros(len(self._sizes))
        for name, share in stage.mix.items():
            if names.count(name) != 1:
                why = "several corpora have this name" if name in names else f"the store has: {', '.join(names)}"
                raise DataError(
                    f"`data.stages.{number}.mix`: no corpus {printable(name, 60)}; {why} (`name` sets it)",
                    key=f"data.stages.{number}.mix",
                )
            shares[names.index(name)] = share
        unit = names.index(stage.until.corpus)
        if empty := [name for name, share, size in zip(names, shares, self._sizes, strict=True) if share and not size]:
            without = f"the store has no pair of {printable(empty[0], 60)}"
            raise DataError(
                f"`data.stages.{number}.mix`: {without}; take it out of the mix", key=f"data.stages.{number}.mix"
            )
        exact = self._sizes[unit] * shares / shares[unit]
        return np.maximum(np.rint(exact), shares > 0).astype(np.int64)

    def stage(self, epoch: int, starts: Starts) -> int:
        """Return the stage of an epoch, from 0."""
        return bisect_right(starts, epoch) - 1

    def chosen(self, epoch: int, starts: Starts = FIRST) -> Indices:
        """Return the indices of the pairs of an epoch, corpus by corpus.

        Each corpus continues where earlier stages left it, so that no pair is repeated before all have occurred; the
        part of an epoch cut off by early stopping is skipped.
        """
        table = self._table
        if not self._quotas:
            return epoch_indices(table.corpora, table.corpus_weights, self._temperature, self._seed, epoch)
        now = self.stage(epoch, starts)
        ends = [*starts[1 : now + 1], epoch]
        spent = (self._quotas[n] * (ends[n] - starts[n]) for n in range(now + 1))
        positions = sum(spent, np.zeros(len(self._sizes), np.int64))
        return draw(table.corpora, positions, self._quotas[now], self._seed)
