"""Depth measures during training: taken on a fixed batch, written to disk, and shown to trackers and users.

Training does not depend on them: the model is measured in evaluation mode, gradients and random numbers of training are
untouched, and no measure is part of a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.model.accelerator import random_state_kept
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.files import write_atomically
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.device import Shortage, within_memory
from ziggurat.train.diagnosis.gradients import STACKS, layers_of
from ziggurat.train.diagnosis.health import WARNINGS_FILE, RunWarning, Watch, in_use
from ziggurat.train.diagnosis.measures import Snapshot
from ziggurat.train.diagnosis.probe import Loss, mean_gradient_norm, measure
from ziggurat.train.learner import Learner
from ziggurat.train.objective import probe_loss
from ziggurat.train.profiling import profile_batches
from ziggurat.train.records import DEPTH_FILE, Record, cut_records, heat_maps, read_records, scalars
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.update import UpdateResult

_IMAGES_GROWTH = 1.1
"""Heat maps are redrawn each time the number of records has grown by this factor: about 50 times in 500 records."""


class DepthReporter:
    """Passes each record of measures to trackers, and warns in the log when a measure leaves its healthy band.

    Warnings and heat maps are functions of the records so far, so a resumed run has the same as an uninterrupted one.
    Records after `update`, left by a run that was killed, are removed. Without `run` nothing is written (all processes
    except the first).
    """

    def __init__(
        self, run: Path | None, metrics: MetricsWriter, log: RunLog, experiment: Experiment, *, update: int
    ) -> None:
        self._run, self._metrics, self._log = run, metrics, log
        training = experiment.training
        self._watch = Watch(training.schedule.warmup_updates, training.freeze, in_use(experiment))
        self._records: list[Record] = []
        self._drawn = 0
        self._gaps = False
        if run is not None:
            cut_records(run, update)
            self._records += read_records(run)
        # The watch replays all earlier records, so its state is that of the run at this update.
        warned = [w for record in self._records for w in self._watch.see(record)]
        if run is not None and (run / WARNINGS_FILE).exists():
            write_atomically(run / WARNINGS_FILE, "".join(w.line() for w in warned).encode())

    def shown_r(self, update: int) -> str:
        """Return the latest r of the encoder (Bapna et al. 2018) for a line of figures about `update`.

        It names the update of its measurement if that was an earlier one, and is "" if r was not measured.
        """
        record = next((record for record in reversed(self._records) if "r" in record.values), None)
        r: float | None = None if record is None else record.values["r"].get("encoder")
        if record is None or r is None:
            return ""
        return f"r {r:.2g}  " if record.update == update else f"r {r:.2g} (update {record.update})  "

    @property
    def standing(self) -> list[str]:
        """Measures outside their healthy bands, newest last."""
        return list(self._watch.standing)

    def see(self, record: Record) -> None:
        """Pass a record to trackers, and warn about problems it shows."""
        record = replace(record, values=record.as_dict()["values"])  # without NaN, as a resumed run reads it
        self._records.append(record)
        self._metrics.tell("depth", record.update, scalars(record))
        if len(self._records) >= _IMAGES_GROWTH * self._drawn:
            self._draw()
        for warned in self._watch.see(record):
            bad = warned.kind == "warning"
            said = f"WARNING: {warned.message}" if bad else warned.message
            self._log.say(f"update {warned.update}: {said}", "bold yellow" if bad else "green")
            self._write(warned)

    def ended(self) -> None:
        """Draw the heat maps a last time if there are new records."""
        if len(self._records) > self._drawn:
            self._draw()

    def _draw(self) -> None:
        self._drawn = len(self._records)
        for name, rows in heat_maps(self._records).items():
            self._metrics.draw(f"depth/{name}", self._records[-1].update, rows)

    def _write(self, warned: RunWarning) -> None:
        unwritten = "" if self._run is None else _append(self._run / WARNINGS_FILE, warned)
        if unwritten and not self._gaps:
            self._gaps = True
            self._log.say(unwritten, "bold red")


def _append(path: Path, entry: Record | RunWarning) -> str:
    """Append an entry to a file, creating it and its folder; return why it cannot be written, or ""."""
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(entry.line())
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


class DepthProbe:
    """Measures a model around the updates of a run, and appends the records to `diagnostics/depth.jsonl`.

    With several processes, the first one measures and the others wait. All help to gather a sharded model (FSDP) for
    it, as for a validation. `tell` is called with every record, in the first process. The log reports once that memory
    was too short for a measurement, or that a record could not be written.
    """

    def __init__(
        self, run: Path, experiment: Experiment, learner: Learner, log: RunLog, tell: Callable[[Record], object]
    ) -> None:
        self._learner, self._log, self._tell = learner, log, tell
        self._processes, self._config = learner.processes, experiment.training.diagnostics
        self._loss = probe_loss(experiment.training.loss, experiment.training.precision)
        self._path = run / DEPTH_FILE
        self._began, self._spent, self._latest, self._complained = time.perf_counter(), 0.0, 0.0, False
        self._due, self._preparing, self._left_out = False, 0.0, 0
        self._weights_before: Snapshot | None = None
        if self._config.every_updates is not None and self._processes.first:
            self._batches = probe_batches(experiment, learner.store)

    def before(self, p: RunProgress, rate: float) -> None:
        """Prepare to measure the next update, which will have learning rate `rate`, if a measurement is due.

        Before the first update of a run, the initialised model is measured.
        """
        every = self._config.every_updates
        self._due, self._weights_before = False, None
        if every is None:
            return
        began = time.perf_counter()
        if p.update == 0:
            self._measure(0, None, rate)
            self._count(time.perf_counter() - began)
        if (p.update + 1) % every:
            return
        if not self._processes.of_first(self._affordable()):  # clocks differ
            self._left_out += 1
            return
        began = time.perf_counter()
        self._due, self._weights_before = True, self._snapshot()
        self._preparing = time.perf_counter() - began

    def after(self, p: RunProgress, result: UpdateResult, rate: float) -> None:
        """Measure the model after the update that `before` prepared for, now counted in `p`."""
        if not self._due:
            return
        began = time.perf_counter() - self._preparing
        # Release the copy of the weights as soon as they are measured, because it is as large as the model.
        before, self._weights_before = self._weights_before, None
        self._measure(p.update, before if result.taken else None, rate)
        self._count(time.perf_counter() - began)

    def ended(self) -> None:
        """Report how many measurements were left out since training was started, and how to get them."""
        if self._left_out:
            share = self._config.max_share
            self._log.say(
                f"left out {self._left_out} measurements of depth, to spend at most {share:.1%} of the time on them "
                "(`training.diagnostics.max_share`; null: no limit)"
            )

    def _count(self, seconds: float) -> None:
        self._spent, self._latest = self._spent + seconds, seconds

    def _affordable(self) -> bool:
        """True when another measurement, if as long as the latest, would stay within the allowed share of the time."""
        share = self._config.max_share
        return share is None or self._spent + self._latest <= share * (time.perf_counter() - self._began)

    def _snapshot(self) -> Snapshot | None:
        """Return the weights before an update; None in all processes except the first, and when memory is short."""
        weights = self._learner.parallel.weights()
        found = within_memory(lambda: Snapshot(weights), self._learner.device) if self._processes.first else None
        return None if isinstance(found, Shortage) else found

    def _measure(self, update: int, before: Snapshot | None, rate: float) -> None:
        """Measure the model after `update`, and, if `before` is known, how far the update moved it."""
        learner = self._learner
        # Both run in all processes, and only then do those other than the first return, since FSDP gathers the weights
        # from all.
        weights = learner.parallel.weights() if update else {}
        with learner.parallel.whole() as model:
            if not self._processes.first:
                return

            def work() -> Record:
                changes = {} if before is None else before.changes(model, weights, rate)
                return record_of(model, update, {**measured(model, self._batches, self._loss), **changes})

            found = within_memory(work, learner.device)
        if isinstance(found, Shortage):
            self._complain(f"update {update}: depth not measured for lack of memory ({found}); training continues")
        else:
            self._complain(_append(self._path, found))
            self._tell(found)

    def _complain(self, said: str) -> None:
        if said and not self._complained:
            self._complained = True
            self._log.say(said, "yellow")


def probe_batches(experiment: Experiment, store: Store) -> list[Batch]:
    """Return the training pairs to measure on: a function of the store, `training`, sampling temperature and stages.

    The first batch is used for all measures, the others for the mean of `gradient_norm`
    (`training.diagnostics.batches`).
    """
    training, data = experiment.training, experiment.data
    tokens = min(training.diagnostics.tokens, training.batch.max_tokens)
    count, temperature = training.diagnostics.batches, data.sampling_temperature
    return profile_batches(store, tokens, count, seed=training.seed, temperature=temperature, stages=data.stages)


def measured(model: Seq2Seq, batches: Sequence[Batch], loss: Loss) -> dict[str, Any]:
    """Return all measures of `model` on the first batch, in evaluation mode; mode and random state are kept.

    With several batches, `gradient_norm` is the mean over them and `gradient_batches` their number.
    """
    training = model.training
    model.eval()
    try:
        with random_state_kept(model.device):
            values = measure(model, batches[0], loss)
            if len(batches) > 1:
                norms = mean_gradient_norm(model, batches[1:], loss, values["gradient_norm"])
                values |= {"gradient_norm": norms, "gradient_batches": len(batches)}
            return values
    finally:
        model.train(training)


def record_of(model: Seq2Seq, update: int, values: dict[str, Any]) -> Record:
    """Return the record, stamped with the current time, of measures of `model` after `update`."""
    layers = {stack: len(layers_of(model, stack)) for stack in STACKS}
    return Record(update, round(time.time(), 3), layers, values)
