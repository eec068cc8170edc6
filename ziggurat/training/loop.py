"""The run: next batch, update, every-n actions, stop."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ziggurat.config import Experiment
from ziggurat.config.notices import notices
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.data.workspace import discard
from ziggurat.duration import duration
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.build import count_parameters
from ziggurat.models.device import usable_device
from ziggurat.terminal import safe
from ziggurat.threads import share_cores
from ziggurat.tracking.open import open_trackers, refuse_missing_trackers
from ziggurat.training.allocator import give_back_freed_memory, keep_freed_memory
from ziggurat.training.average import average_newest
from ziggurat.training.checkpoint import Progress, latest_checkpoint, same_for_all
from ziggurat.training.depth import Depth
from ziggurat.training.diagnostics import Diagnostics
from ziggurat.training.feeding import fed
from ziggurat.training.graphs import refuse_unrecordable
from ziggurat.training.growth import after_growth, keep_stage, stage_ended, stage_folder
from ziggurat.training.learner import Learner
from ziggurat.training.metrics import MetricsWriter, RunLog
from ziggurat.training.processes import Processes, joined, lost
from ziggurat.training.progress import ProgressLine, Reporter, Window, introduction
from ziggurat.training.recovery import Recovery, next_rate, refuse_to_go_on
from ziggurat.training.retention import set_aside
from ziggurat.training.run import create_run, elsewhere, held, refuse_existing, refuse_idle, refuse_other_store
from ziggurat.training.saving import Saver
from ziggurat.training.signals import GracefulStop
from ziggurat.training.stopping import TrainingResult, finished, how_to_go_on, refuse_endless
from ziggurat.training.trial import fit_batches, loader_of, refuse_too_large
from ziggurat.training.trust import Trust
from ziggurat.training.validate import Validator, position_limit, rank_anew

__all__ = ["TrainingResult", "train"]


def train(run: Path, experiment: Experiment, *, resume: bool = False, console: Console | None = None) -> TrainingResult:
    """Train as `experiment` says, into the folder `run`; with `resume`, go on from its newest whole checkpoint.

    The result is a function of configuration, data and seed: a run killed at any moment and resumed ends with the
    same weights, bit for bit on one machine and with as many processes. Under torchrun every process calls this; the
    folder must be the same for all of them. Raises ConfigError, DataError, CheckpointError, TrainingError.
    """
    with joined(experiment.training.distributed.timeout_minutes, experiment.training.device) as processes:
        console = safe(console or Console(stderr=True)) if processes.first else Console(quiet=True)
        try:
            return _train(run.absolute(), experiment, resume, console, processes)
        except RuntimeError as error:
            if processes.count > 1 and lost(error):
                raise processes.hanging(error) from error
            raise


def _train(run: Path, experiment: Experiment, resume: bool, console: Console, processes: Processes) -> TrainingResult:
    """Train; `run` is an absolute path, since creating it may replace the folder that "." stands for."""
    store = Store.open(experiment.data.store)
    refuse_idle(experiment.training.batch, processes, resume=resume)
    if not resume:
        refuse_existing(run)
        refuse_other_store(experiment, store)
    training = _Training(run, experiment, store, console, processes)  # what cannot be trained leaves no folder
    if not resume:
        training.begin()
        processes.first_does(lambda: create_run(run, training.experiment, store))
    with held(run, training.experiment, processes):
        return training.go(resume)


class _Training:
    """State of one training process."""

    log: RunLog

    def __init__(self, run: Path, experiment: Experiment, store: Store, console: Console, processes: Processes) -> None:
        self.run, self.experiment, self.store, self.console = run, experiment, store, console
        self.processes, self.trust = processes, Trust(store, processes)
        self.writes_to = run if processes.first else None  # log and metrics
        self.config = config = experiment.training
        self.device = usable_device(config.device, "training.device")
        refuse_missing_trackers(config)
        if config.threads:
            torch.set_num_threads(config.threads)
        share_cores(torch.get_num_threads())
        if self.device.index is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # what asks for the present GPU then asks for this one
        refuse_unrecordable(experiment, self.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        (give_back_freed_memory if config.recompute.compact else keep_freed_memory)()
        self.learner = Learner(experiment, store, self.device, processes)
        limit = position_limit(experiment, store)
        has_dev = store.dev is not None and len(store.dev) > 0
        self.validator = Validator(store, config, experiment.decoding, limit, processes) if has_dev else None
        refuse_endless(config.stop, validates=has_dev)
        if not config.batch.fit:
            self.loader = loader_of(experiment, store, processes)
        self.progress = Progress()
        self.origin = self.fitted = ""

    def begin(self) -> None:
        """Take the weights that training starts from, and make sure that its batches fit into memory."""
        if self.config.start_from is not None:
            self.origin = self.learner.start_from(self.config.start_from)
        if self.config.batch.fit:
            self.experiment, self.fitted = fit_batches(self.experiment, self.store, self.learner)
            self.config = self.experiment.training
            self.loader = loader_of(self.experiment, self.store, self.processes)
            if self.validator is not None:
                self.validator.config = self.config
        compiled = self.config.compile == "layers"
        if self.fitted and compiled:
            torch.compiler.reset()  # trials of other budgets are not to shape the graphs
        if compiled or not self.fitted:
            refuse_too_large(self.learner, self.loader, self.experiment, epoch=0)

    def go(self, resume: bool) -> TrainingResult:
        self.log = RunLog(self.writes_to, self.console)
        try:
            return self._go(resume)
        finally:
            self.log.close()

    def _go(self, resume: bool) -> TrainingResult:
        resumed = resume and self._resume()
        if self.origin:
            self.log.say(f"starting from the weights of {self.origin}")
        for said in introduction(self.experiment, self.learner, len(self.store.train), self.run):
            self.log.say(said)
        fresh = not resumed and not self.origin
        if fresh and (profiled := self.learner.profile()):
            self.log.say(profiled)
        if self.fitted:
            self.log.say(self.fitted)
        no_dev = "no dev set in the store: no validation, `best` will not be kept"
        about = [*notices(self.experiment), *elsewhere(self.experiment.data, self.store)]
        about += [*rank_anew(self.progress, self.experiment), *(self.validator.notices if self.validator else [no_dev])]
        for notice in about:
            self.log.say(notice, "yellow")
        begun, overdue = self.progress.update, self.progress.validation_due
        trackers = open_trackers(self.writes_to, self.experiment, begun) if self.writes_to else []
        more = overdue or finished(self.progress, self.config) is None
        cut = {"validated": not overdue, "goes_on": more and bool(self.progress.window)}
        metrics = MetricsWriter(self.writes_to, self.log, update=begun, trackers=trackers, **cut)
        try:
            bar = ProgressLine(self.console, self.config)
            writer = Saver(self.run, self.experiment, self.store, self.progress, self.log, self.processes, self.trust)
            with GracefulStop(self.processes.first, self.processes.count > 1) as stop, bar as line, writer as saver:
                reason = self._train(stop, line, metrics, saver)
        finally:
            metrics.close()
        p, how = self.progress, f"`ziggurat train --run {self.run} --resume"
        if p.update == begun and not overdue:
            said = f"nothing to do after update {p.update}: {reason}; to go on, raise that limit: {how}"
            self.log.say(f"{said} {how_to_go_on(p, self.config.stop)}`", "yellow")
        else:
            waited = f"{duration(p.seconds)} of training; waited {duration(saver.waited_seconds)} for checkpoints"
            self.log.say(f"stopped after update {p.update}: {reason} ({waited})")
        if stop.heeded is not None:
            self.log.say(f"to go on: {how}`")
        elif self.processes.first:
            self._average()
        return TrainingResult(reason, p.update, p.seconds, p.target_tokens, p.best, p.best_update, stop.heeded)

    def _train(self, stop: GracefulStop, line: ProgressLine, metrics: MetricsWriter, saver: Saver) -> str:
        p, config = self.progress, self.config
        started = time.perf_counter() - p.seconds
        depth = Depth(self.writes_to, metrics, self.log, config, update=p.update)
        report = Reporter(line, metrics, self.log, config, partial(Window, self.loader, saver), depth, p)
        if p.validation_due:  # nothing may come before it: it decides which weights are the best, and when to stop
            self._validate(report, stop)
            saver.amend()
            self._hear(p.seconds, stop, saver)
            if p.validation_due or finished(p, config) is not None:
                report.ended(p)
        groups = fed(self.loader, LoaderState(p.epoch, p.batch), self.device)
        reason = stop.reason if p.validation_due else finished(p, config)
        if reason is None:
            self.processes.first_does(self._remove_average)
        recovery = Recovery(self.run, self.learner, config, self.log, saver.wait)
        diagnostics = Diagnostics(self.run, self.experiment, self.learner, self.log, p, depth.see)
        if not recovery.rolls_back:
            p.good = None
        elif reason is None and p.good is None:
            saver.save(self.learner, interim=True, good=True)  # something to go back to from the start
        while reason is None:
            while stage_ended(p, config):
                self._grow()
            group = next(groups)
            rate = next_rate(p, config, self.experiment.model.d_model)
            result = diagnostics.around(p, rate, partial(recovery.update, p, group, rate))
            p.seconds = time.perf_counter() - started
            report.updated(p, result, rate)
            validates = self.validator is not None and p.update % config.validation.every_updates == 0
            if validates:
                self._validate(report, stop)
            self._hear(time.perf_counter() - started, stop, saver)
            reason = finished(p, config)
            if reason is not None and self.validator is not None and not validates:
                self._validate(report, stop)
                self._hear(p.seconds, stop, saver)
            if reason is None or p.validation_due:
                reason = stop.reason
            if reason is not None:
                report.ended(p)
            due, counted = saver.due, validates or p.update % config.checkpoint.every_updates == 0
            if counted or due or reason is not None:
                # A run must roll back to the same weights however often it was stopped, whatever the clock says.
                good = counted and p.skipped_in_a_row == 0 and recovery.rolls_back
                saver.save(self.learner, interim=not (counted or due), by_clock=due and not counted, good=good)
            refuse_to_go_on(p, config, self.run, saver.wait)
        return reason

    def _hear(self, seconds: float, stop: GracefulStop, saver: Saver) -> None:
        """Agree on what differs between processes: the first one's clock, a signal, checkpoints under way."""
        clock = seconds if self.processes.first else 0.0
        self.progress.seconds, received, writing = self.processes.largest([clock, stop.received or 0, saver.writing])
        stop.heeded = int(received) or None
        if not writing:
            saver.poll()

    def _grow(self) -> None:
        """Go on to the next stage; a run resumed from before this update does the same again."""
        assert self.config.growth is not None
        kept, before = "", self.learner.encoder_layers
        if self.config.growth.keep_stages:
            kept = f"; kept as {self._keep_stage()}"
        profiled = self.learner.grow()
        after_growth(self.progress, self.config)
        grown = f"{self.learner.encoder_layers} layers, {count_parameters(self.learner.model):,} parameters"
        self.log.say(f"update {self.progress.update}: the encoder grows from {before} to {grown}{kept}")
        if profiled:
            self.log.say(profiled)
        refuse_too_large(self.learner, self.loader, self.experiment, self.progress.epoch)

    def _keep_stage(self) -> Path:
        self.trust.settle()
        weights, stage = self.learner.parallel.weights(), self.progress.stage
        self.processes.first_does(lambda: keep_stage(self.run, self.experiment, stage, weights))
        return stage_folder(self.run, self.experiment, stage)

    def _validate(self, report: Reporter, stop: GracefulStop) -> None:
        """Score the dev set; a signal leaves the validation due, to be done before anything else by a resumed run."""
        assert self.validator is not None
        p, began = self.progress, time.perf_counter()
        with self.learner.parallel.whole() as model:
            result = self.validator.measure(model, lambda: stop.received is not None)
        p.validation_due = result is None
        better = result is not None and result.count(p, self.config.validation.metric)
        report.validated(p, result, better, time.perf_counter() - began)

    def _resume(self) -> bool:
        """Go back to the newest whole checkpoint; False when there is none yet."""
        # Graphs depend on the batch that is seen first: the same as in a new run. Processes may be fewer than before.
        if self.config.compile == "layers" or self.processes.count > 1:
            refuse_too_large(self.learner, self.loader, self.experiment, epoch=0)
        warn = partial(self.log.say, style="bold red")
        checkpoint = same_for_all(self.run, lambda: latest_checkpoint(self.run, warn), self.processes)
        if checkpoint is None:
            self.log.say("no checkpoint yet: starting from the beginning")
            self.begin()
            return False
        if checkpoint.store != self.store.fingerprint:
            raise CheckpointError(
                f"{self.run}: the store {self.store.path} is not the one this run was trained on; "
                "restore it or start a new run"
            )
        self.learner.restore(checkpoint, self.run)
        self.progress = checkpoint.progress
        self.processes.first_does(self._set_aside)
        first = ", before its validation" if checkpoint.progress.validation_due else ""
        self.log.say(f"resumed after update {checkpoint.progress.update}{first}")
        return True

    def _set_aside(self) -> None:
        for folder in set_aside(self.run, after=self.progress.update):
            self.log.say(f"the damaged checkpoint is {folder} now", "yellow")

    def _remove_average(self) -> None:
        if (self.run / "averaged").exists():
            self.log.say("removing averaged/: it is of older checkpoints than the ones to come")
            discard(self.run / "averaged")

    def _average(self) -> None:
        try:
            if updates := average_newest(self.run, self.config):
                self.log.say(f"averaged checkpoints {', '.join(map(str, updates))} into {self.run / 'averaged'}")
        except ConfigError as error:  # somebody put things of his own there, which training leaves alone
            self.log.say(f"NOT AVERAGED: {error}", "bold red")
