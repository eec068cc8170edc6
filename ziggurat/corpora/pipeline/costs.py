"""What the steps of a pipeline are expected to take, before they begin.

Training is estimated as `ziggurat inspect` does: an update is simulated, and this machine's speed measured. Translating
follows from the same arithmetic. Steps on text go by rates that were measured once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ziggurat.config.experiment import Experiment
from ziggurat.config.filters import FilterConfig
from ziggurat.config.notices import warm_up_notice
from ziggurat.config.pipeline import ModelName
from ziggurat.corpora.pipeline.amounts import Amounts, Lines
from ziggurat.corpora.pipeline.step import Done, Expected
from ziggurat.corpora.pipeline.wording import errors_worded, worded
from ziggurat.system.errors import ZigguratError

if TYPE_CHECKING:
    from ziggurat.inspect.cost.estimate import Cost

PAIRS_PREPARED, PAIRS_ALIGNED = 25_000, 5_000
"""Pairs a second of each of these steps, on two cores of an AMD EPYC (short sentences)."""
_PAIRS_FILTERED, _PAIRS_IDENTIFIED, _PAIRS_SCORED, _PAIRS_LEARNT = 150_000, 15_000, 16_000, 3_200
"""Pairs a second of the usual filters with reading and writing, of `languages`, and of the pair score, which is learnt
first, on one core of an Intel Xeon with AVX-512 (short sentences)."""
_UNKNOWN = "is not known yet"
_OF_TRAINING_SPEED = 0.2
"""Arithmetic of a search a second, as a share of that of training: its products are small and wait for each other."""


class Costs:
    """Costs of the models of a pipeline, each estimated once.

    Args:
        experiments: what each is trained by.
        amounts: knows the bitext, which tells the lengths of sentences until a model's store is there.
        existing: folders of the models that are there already.
        pruned: the student has the vocabulary of the teacher, as which it begins.
    """

    def __init__(
        self,
        experiments: dict[ModelName, Experiment],
        amounts: Amounts,
        existing: Mapping[ModelName, Path] = MappingProxyType({}),
        *,
        pruned: bool = False,
    ) -> None:
        self._experiments = experiments
        self._amounts = amounts
        self._existing = existing
        self._pruned = pruned
        self._known: dict[ModelName, Cost] = {}

    def of(self, name: ModelName) -> Cost:
        """Return the cost of training a model, on this machine; of one that is there, as if it were trained here."""
        from ziggurat.inspect.cost.estimate import estimate_cost
        from ziggurat.model.inspection import vocabulary_sizes

        if name not in self._known:
            # The teacher's vocabulary may not be there yet, but what it will be is known.
            with_vocabulary, folder = self._experiment("teacher" if self._pruned and name == "student" else name)
            with errors_worded(name):
                sizes = vocabulary_sizes(with_vocabulary.data, folder)
                experiment, _ = self._experiment(name)
                self._known[name] = estimate_cost(experiment, (sizes.source, sizes.target), self._amounts.reader(0))
        return self._known[name]

    def _experiment(self, name: ModelName) -> tuple[Experiment, Path | None]:
        """Return the experiment of a model, and the folder of one that is there already."""
        from ziggurat.model.directory import locate_weights, weights_experiment

        if name not in self._existing:
            return self._experiments[name], None
        weights, folder = locate_weights(self._existing[name])
        return weights_experiment(weights.parent, folder), folder

    def training(self, name: ModelName) -> Expected:
        """Return what the training of a model takes, validations and checkpoints left out."""
        cost, training, stages = self.of(name), self._experiments[name].training, self._experiments[name].data.stages
        updates, minutes = training.stop.updates, training.stop.minutes
        limit = None if minutes is None else minutes * 60
        length = f"sentences of {cost.length[1]} target tokens ({cost.batches.origin})"
        memory = cost.memory.peak + cost.memory.checkpoint
        if updates is None:
            return Expected(limit, memory, f"{cost.time.seconds:.3g} s an update; how many there will be is not known")
        seconds = self._until(name, updates)
        stop, timed = training.stop, limit is not None and limit < seconds
        early = timed or stop.epochs is not None or stop.patience is not None or (stages and stages[-1].until.epochs)
        said = f"{'at most ' if early else ''}{updates:,} updates, {length}"
        if cold := warm_up_notice(training):
            said += f"; {worded(cold, name)}"
        return Expected(limit if timed else seconds, memory, said)

    def _until(self, name: ModelName, updates: int) -> float:
        """Return the seconds that so many updates of a model take; those of its shallow stages are faster."""
        cost, growth = self.of(name), self._experiments[name].training.growth
        ends = [] if growth is None else [stage.updates for stage in growth.stages]
        spans = [*(min(end, updates) for end in ends if end is not None), updates]
        rates = [*(seconds for *_, seconds in cost.shallower), cost.time.seconds]
        if len(spans) < len(rates):  # stages that end after epochs
            spans, rates = [updates], rates[-1:]
        return sum((end - begin) * rate for (begin, end), rate in zip(pairwise((0, *spans)), rates, strict=True))

    def trained(self, name: ModelName, updates: int, seconds: float) -> Done | None:
        """Return the share of a model's training that so many updates are, which took so long; None: not known."""
        if not updates:
            return None
        stop = self._experiments[name].training.stop
        shares = [] if stop.minutes is None else [seconds / (stop.minutes * 60)]
        if stop.updates is not None:
            shares.append(self._until(name, updates) / self._until(name, stop.updates))
        total = "" if stop.updates is None else f" of {stop.updates:,}"
        return Done(min(1.0, max(shares)), f"{updates:,}{total} updates", seconds) if shares else None

    def quantising(self, updates: int) -> Expected:
        """Return what the fine-tuning of the student for int8 takes at the speed of its training."""
        cost = self.of("student")
        return Expected(updates * cost.time.seconds, cost.memory.peak, f"{updates:,} updates as those of the student")

    def _of_user(self, name: ModelName) -> Cost | None:
        """Return the cost of a model that is used; None where one that is there does not tell enough."""
        with contextlib.suppress(*([ZigguratError] if name in self._existing else [])):
            return self.of(name)
        return None

    def translating(self, name: ModelName, lines: Lines | None, beam: int, workers: int) -> Expected:
        """Return what the translation of so many lines takes; None: their number is not known."""
        if lines is None or (cost := self._of_user(name)) is None:
            return Expected(said=f"the number of lines {_UNKNOWN}" if lines is None else f"{lines} lines")
        source, target = cost.length
        work = lines.number * (source * cost.forward.source + beam * target * cost.forward.target)
        by = "1 worker" if workers == 1 else f"{workers} workers"
        # Rates of training are those of all threads together, of which each worker has its share.
        speed = cost.time.flops / cost.time.seconds * _OF_TRAINING_SPEED
        return Expected(work / speed, said=f"{lines} lines, {by}; a rough estimate")

    def scoring(self, lines: Lines | None) -> Expected:
        """Return what forward passes of the backward model over so many pairs take; None: their number is not known."""
        if lines is None or (cost := self._of_user("backward")) is None:
            return Expected(said=f"the number of pairs {_UNKNOWN}" if lines is None else f"{lines} pairs")
        source, target = cost.length
        work = lines.number * (source * cost.forward.source + target * cost.forward.target)
        return Expected(work / (cost.time.flops / cost.time.seconds), said=f"{lines} pairs; a rough estimate")


def cleaning(lines: Lines | None, filters: FilterConfig, workers: int) -> Expected:
    """Return what so many pairs take to clean in so many processes; None: their number is not known."""
    expected = by_rate(lines, _PAIRS_FILTERED)
    if lines is None:
        return expected
    each, learning = 1 / _PAIRS_FILTERED, 0.0
    if filters.languages is not None:
        each += 1 / _PAIRS_IDENTIFIED
    if filters.pair_score is not None:  # by one process, of pairs that it cleans for that
        learning = min(lines.number, filters.pair_score.pairs) * (each + 1 / _PAIRS_LEARNT)
        each += 1 / _PAIRS_SCORED
    return replace(expected, seconds=learning + each * lines.number / workers)


def by_rate(lines: Lines | None, rate: float) -> Expected:
    """Return what so many pairs take at a rate of pairs a second; None: their number is not known."""
    if lines is None:
        return Expected(said=f"the number of pairs {_UNKNOWN}")
    return Expected(lines.number / rate, said=f"{lines} pairs")
