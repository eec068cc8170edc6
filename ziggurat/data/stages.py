"""The mix of corpora that each epoch draws, by stages or by weights.

The stage of an epoch follows from the epochs at which the stages began. Where stages end after so many epochs these are
known from the configuration; where one ends by early stopping, the run knows (ziggurat.train.run_state.Progress).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.modifiers import StageConfig
from ziggurat.data.batching import draw, epoch_indices
from ziggurat.data.table import PairTable
from ziggurat.system.errors import DataError, printable

Indices = NDArray[np.int64]
Starts = tuple[int, ...]
"""First epoch of each stage that has begun, ascending."""

FIRST: Starts = (0,)
"""Those of a run that begins."""


def next_starts(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> Starts:
    """Return the stages that have begun when `epoch` begins, after an epoch of the last of `starts`."""
    over = len(starts) < len(stages) and _ended(stages, starts, epoch)
    return (*starts, epoch) if over else starts


def stages_over(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> bool:
    """Return True if the last stage has had its epochs when `epoch` begins."""
    return bool(stages) and len(starts) == len(stages) and _ended(stages, starts, epoch)


def _ended(stages: Sequence[StageConfig], starts: Starts, epoch: int) -> bool:
    epochs = stages[len(starts) - 1].until.epochs
    return epochs is not None and epoch - starts[-1] >= epochs


class CorpusMix:
    """Chooses the pairs of each epoch.

    Args:
        table: the training pairs.
        stages: `data.stages`; without any, the weights of the table's corpora and `temperature` say how they are mixed.
        temperature: `data.sampling_temperature`.
        seed: `training.seed`.

    Raises DataError: a stage names a corpus that the store lacks, has twice, or has no pairs of.
    """

    def __init__(self, table: PairTable, stages: Sequence[StageConfig], temperature: float, seed: int) -> None:
        self._table, self._temperature, self._seed = table, temperature, seed
        self._sizes = np.bincount(table.corpora, minlength=len(table.corpus_names)) if stages else np.zeros(0, np.int64)
        self._quotas = [self._quota(stage, number) for number, stage in enumerate(stages)]

    def _quota(self, stage: StageConfig, number: int) -> Indices:
        """Return the pairs of each corpus in an epoch of a stage, int64 [corpora]: all of the one of its `until`."""
        names, shares = self._table.corpus_names, np.zeros(len(self._sizes))
        for name, share in stage.mix.items():
            if names.count(name) != 1:
                why = "several corpora have this name" if name in names else f"the store has: {', '.join(names)}"
                raise DataError(f"`data.stages.{number}.mix`: no corpus {printable(name, 60)}; {why} (`name` sets it)")
            shares[names.index(name)] = share
        unit = names.index(stage.until.corpus)
        if empty := [name for name, share, size in zip(names, shares, self._sizes, strict=True) if share and not size]:
            without = f"the store has no pair of {printable(empty[0], 60)}"
            raise DataError(f"`data.stages.{number}.mix`: {without}; take it out of the mix")
        exact = self._sizes[unit] * shares / shares[unit]
        return np.maximum(np.rint(exact), shares > 0).astype(np.int64)

    def stage(self, epoch: int, starts: Starts) -> int:
        """Return the stage of an epoch, from 0."""
        return bisect_right(starts, epoch) - 1

    def chosen(self, epoch: int, starts: Starts = FIRST) -> Indices:
        """Return the indices of the pairs of an epoch, corpus by corpus.

        Each corpus goes on where the stages before have left it, so that no pair comes again before all have come; what
        early stopping cuts off an epoch is passed over.
        """
        table = self._table
        if not self._quotas:
            return epoch_indices(table.corpora, table.corpus_weights, self._temperature, self._seed, epoch)
        now = self.stage(epoch, starts)
        ends = [*starts[1 : now + 1], epoch]
        spent = (self._quotas[n] * (ends[n] - starts[n]) for n in range(now + 1))
        positions = sum(spent, np.zeros(len(self._sizes), np.int64))
        return draw(table.corpora, positions, self._quotas[now], self._seed)
