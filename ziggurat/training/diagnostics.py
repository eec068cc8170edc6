"""Measures of depth while a model trains: a fixed batch every so many updates, at a bounded share of the time.

Nothing about training depends on them: the model is measured in evaluation mode, no gradient and no random number of
training is touched, and what was measured is not part of a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ziggurat.config import Experiment
from ziggurat.data.collate import Batch
from ziggurat.data.corpus import Store
from ziggurat.diagnosis.change import Snapshot
from ziggurat.diagnosis.hooks import STACKS, layers_of
from ziggurat.diagnosis.probe import measure
from ziggurat.diagnosis.records import DEPTH_FILE, Record, cut_records
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.capacity import Shortage, within_memory
from ziggurat.training.checkpoint import Progress
from ziggurat.training.learner import Learner
from ziggurat.training.metrics import RunLog
from ziggurat.training.objective import probe_loss
from ziggurat.training.profile import profile_batch
from ziggurat.training.step import UpdateResult

__all__ = ["Diagnostics", "measured", "probe_batch"]


class Diagnostics:
    """Measures a model around the updates of a run, and keeps the records in `diagnostics/depth.jsonl`.

    Of several processes the first one measures. A sharded model (FSDP) is put together for it, as for a validation,
    which all processes take part in; the others wait meanwhile.

    Args:
        run: folder of the run.
        experiment: its configuration.
        learner: what is trained, and by whom.
        log: is told once when a measurement was too large for memory, or a record could not be written.
        p: where training starts; records after it, left by a run that was killed, are removed.
        tell: takes every record, in the first process.
    """

    def __init__(
        self,
        run: Path,
        experiment: Experiment,
        learner: Learner,
        log: RunLog,
        p: Progress,
        tell: Callable[[Record], object] = lambda record: None,
    ) -> None:
        self._learner, self._log, self._tell = learner, log, tell
        self._processes, self._config = learner.processes, experiment.training.diagnostics
        self._loss = probe_loss(experiment.training.loss, experiment.training.precision)
        self._path = run / DEPTH_FILE
        self._began, self._spent, self._latest, self._complained = time.perf_counter(), 0.0, 0.0, False
        if self._processes.first:
            cut_records(run, p.update)
        if self._config.every_updates is not None and self._processes.first:
            self._batch = probe_batch(experiment, learner.store)

    def around(self, p: Progress, rate: float, update: Callable[[], UpdateResult]) -> UpdateResult:
        """Return what `update`, which is done with learning rate `rate` and counted in `p`, returns; measure it if due.

        The model is measured after it; before the first update of a run, too.
        """
        every = self._config.every_updates
        if every is None:
            return update()
        began = time.perf_counter()
        if p.update == 0:
            self._measure(0, None, rate)
            self._count(time.perf_counter() - began)
        if (p.update + 1) % every or not self._processes.of_first(self._affordable()):
            return update()
        began = time.perf_counter()
        before = self._snapshot()
        updates = time.perf_counter()
        result = update()
        began += time.perf_counter() - updates
        self._measure(p.update, before if result.taken else None, rate)
        self._count(time.perf_counter() - began)
        return result

    def _count(self, seconds: float) -> None:
        self._spent, self._latest = self._spent + seconds, seconds

    def _affordable(self) -> bool:
        """Whether one more measurement, if it takes what the latest took, keeps to its share of the time so far."""
        share = self._config.max_share
        return share is None or self._spent + self._latest <= share * (time.perf_counter() - self._began)

    def _snapshot(self) -> Snapshot | None:
        """Return the weights before an update; None in other processes than the first, and where memory is short."""
        weights = self._learner.parallel.weights()
        found = within_memory(lambda: Snapshot(weights), self._learner.device) if self._processes.first else None
        return None if isinstance(found, Shortage) else found

    def _measure(self, update: int, before: Snapshot | None, rate: float) -> None:
        """Measure the model after `update`, and how far that moved it from `before`, if that is known."""
        learner = self._learner
        weights = learner.parallel.weights() if update else {}
        with learner.parallel.whole() as model:
            if not self._processes.first:
                return

            def work() -> dict[str, Any]:
                changes = {} if before is None else before.changes(model, weights, rate)
                return {**measured(model, lambda: measure(model, self._batch, self._loss)), **changes}

            values = within_memory(work, learner.device)
            layers = {stack: len(layers_of(model, stack)) for stack in STACKS}
        if isinstance(values, Shortage):
            self._complain(f"update {update}: depth not measured, memory is short ({values}); training goes on")
        else:
            self._keep(Record(update, round(time.time(), 3), layers, values))

    def _keep(self, record: Record) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(record.line())
        except OSError as error:
            self._complain(f"{self._path} cannot be written: {error.strerror}")
        self._tell(record)

    def _complain(self, said: str) -> None:
        if not self._complained:
            self._complained = True
            self._log.say(said, "yellow")


def probe_batch(experiment: Experiment, store: Store) -> Batch:
    """Return the training pairs that are measured: a function of the store, `training` and the sampling temperature."""
    training = experiment.training
    tokens = min(training.diagnostics.tokens, training.batch.max_tokens)
    return profile_batch(store, tokens, seed=training.seed, temperature=experiment.data.sampling_temperature)


def measured(model: Seq2Seq, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` measures of the model in evaluation mode; its mode and torch's random state stay."""
    training, cuda = model.training, [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices=cuda):
            return work()
    finally:
        model.train(training)
