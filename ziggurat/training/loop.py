"""The run: next batch, update, every-n actions, stop."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import torch
from rich.console import Console

from ziggurat.config import Experiment
from ziggurat.config.notices import notices
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.duration import duration
from ziggurat.errors import CheckpointError
from ziggurat.models.build import count_parameters
from ziggurat.models.device import usable_device
from ziggurat.training.allocator import give_back_freed_memory, keep_freed_memory
from ziggurat.training.average import average_run, regular_checkpoints
from ziggurat.training.checkpoint import (
    Progress,
    latest_checkpoint,
    restore_random_state,
)
from ziggurat.training.growth import after_growth, keep_stage, stage_ended
from ziggurat.training.learner import Learner
from ziggurat.training.metrics import MetricsWriter, RunLog
from ziggurat.training.profile import profile_admin
from ziggurat.training.progress import ProgressLine, Window
from ziggurat.training.recovery import Recovery, next_rate, refuse_to_go_on
from ziggurat.training.retention import clear_leftovers, set_aside
from ziggurat.training.run import create_run, elsewhere, owned, refuse_existing, refuse_other_store
from ziggurat.training.saving import Saver
from ziggurat.training.signals import GracefulStop
from ziggurat.training.stopping import TrainingResult, finished, refuse_endless
from ziggurat.training.trial import fit_batches, loader_of, refuse_too_large
from ziggurat.training.validate import Validator, position_limit

__all__ = ["TrainingResult", "train"]


def train(run: Path, experiment: Experiment, *, resume: bool = False, console: Console | None = None) -> TrainingResult:
    """Train as `experiment` says, into the folder `run`; with `resume`, go on from its newest whole checkpoint.

    The result is a function of configuration, data and seed: a run killed at any moment and resumed ends with the
    same weights, bit for bit on one machine. Raises ConfigError, DataError, CheckpointError, TrainingError.
    """
    console = console or Console(stderr=True)
    run = run.absolute()  # creating it may replace the folder that "." stands for
    store = Store.open(experiment.data.store)
    if not resume:
        refuse_existing(run)
        refuse_other_store(experiment, store)
    training = _Training(run, experiment, store, console)  # what cannot be trained fails before it leaves a folder
    if not resume:
        training.begin()
        create_run(run, training.experiment, store)
    with owned(run):
        return training.go(resume)


class _Training:
    """State of one training process."""

    log: RunLog

    def __init__(self, run: Path, experiment: Experiment, store: Store, console: Console) -> None:
        self.run, self.experiment, self.store, self.console = run, experiment, store, console
        self.config = config = experiment.training
        self.device = usable_device(config.device, "training.device")
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        (give_back_freed_memory if config.recompute.compact else keep_freed_memory)()
        self.learner = Learner(experiment, store, self.device)
        limit = position_limit(experiment, store)
        has_dev = store.dev is not None and len(store.dev) > 0
        self.validator = Validator(store, config, experiment.decoding, limit) if has_dev else None
        refuse_endless(config.stop, validates=has_dev)
        if not config.batch.fit:
            self.loader = loader_of(experiment, store)
        self.progress = Progress()
        self.origin = self.fitted = ""

    def begin(self) -> None:
        """Take the weights that training starts from, and make sure that its batches fit into memory."""
        if self.config.start_from is not None:
            self.origin = self.learner.start_from(self.config.start_from)
        if self.config.batch.fit:
            self.experiment, self.fitted = fit_batches(self.experiment, self.store, self.learner)
            self.config = self.experiment.training
            self.loader = loader_of(self.experiment, self.store)
            if self.validator is not None:
                self.validator.config = self.config
        compiled = self.config.compile == "layers"
        if self.fitted and compiled:
            torch.compiler.reset()  # trials of other budgets are not to shape the graphs
        if compiled or not self.fitted:
            refuse_too_large(self.learner, self.loader, self.experiment, epoch=0)

    def go(self, resume: bool) -> TrainingResult:
        self.log = RunLog(self.run, self.console)
        try:
            return self._go(resume)
        finally:
            self.log.close()

    def _go(self, resume: bool) -> TrainingResult:
        torch.manual_seed(self.config.seed)
        resumed = resume and self._resume()
        if self.origin:
            self.log.say(f"starting from the weights of {self.origin}")
        model = self.experiment.model
        kind = model.residual if model.family == "transformer" else model.family
        shape = f"{kind} {self.learner.encoder_layers}-{model.decoder.layers}, width {model.d_model}"
        parameters, pairs = count_parameters(self.learner.model), len(self.store.train)
        self.log.say(f"{shape}, {parameters:,} parameters, {pairs:,} training pairs")
        threads = f" with {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        self.log.say(f"{self.device.type}{threads}, {self.config.precision}; run folder {self.run}")
        fresh = not resumed and not self.origin
        if fresh and (profiled := profile_admin(self.learner.model, self.experiment, self.store)):
            self.log.say(profiled)
        if self.fitted:
            self.log.say(self.fitted)
        for notice in (*notices(self.experiment), *elsewhere(self.experiment.data, self.store)):
            self.log.say(notice, "yellow")
        if self.validator is None:
            self.log.say("no dev set in the store: no validation, `best` will not be kept", "yellow")
        begun, overdue = self.progress.update, self.progress.validation_due
        metrics = MetricsWriter(
            self.run, self.log, update=begun, tensorboard=self.config.tensorboard, validated=not overdue
        )
        try:
            with GracefulStop() as stop, ProgressLine(self.console, self.config) as line, self._saver() as saver:
                reason = self._train(stop, line, metrics, saver)
        finally:
            metrics.close()
        p = self.progress
        if p.update == begun and not overdue:
            how = f"`ziggurat train --run {self.run} --resume training.stop.updates=...`"
            self.log.say(
                f"nothing to do after update {p.update}: {reason}; to go on, raise that limit: {how}", "yellow"
            )
        else:
            waited = f"{duration(p.seconds)} of training; waited {duration(saver.waited_seconds)} for checkpoints"
            self.log.say(f"stopped after update {p.update}: {reason} ({waited})")
        if stop.received is not None:
            self.log.say(f"to go on: `ziggurat train --run {self.run} --resume`")
        if stop.received is None:
            self._average()
        return TrainingResult(reason, p.update, p.seconds, p.target_tokens, p.best, p.best_update, stop.received)

    def _saver(self) -> Saver:
        return Saver(self.run, self.config, self.store, self.progress, self.log)

    def _train(self, stop: GracefulStop, line: ProgressLine, metrics: MetricsWriter, saver: Saver) -> str:
        p, config = self.progress, self.config
        started = time.perf_counter() - p.seconds
        last_save_seconds = p.seconds
        if p.validation_due:  # nothing may come before it: it decides which weights are the best, and when to stop
            self._validate(metrics, line, stop)
            saver.amend()
        window = Window(self.loader, saver)
        groups = self.loader.groups(LoaderState(p.epoch, p.batch))
        reason = stop.reason if p.validation_due else finished(p, config)
        if reason is None and (self.run / "averaged").exists():
            self.log.say("removing averaged/: it is of older checkpoints than the ones to come")
            shutil.rmtree(self.run / "averaged")
        begun = p.update
        recovery = Recovery(self.run, self.learner, config, self.log, saver.wait)
        if not recovery.rolls_back:
            p.good = None
        elif reason is None and p.good is None:
            saver.save(self.learner, interim=True, good=True)  # something to go back to from the start
        while reason is None:
            while stage_ended(p, config):
                self._grow()
            group = next(groups)
            rate = next_rate(p, config, self.experiment.model.d_model)
            result = recovery.update(p, group, rate)
            p.seconds = time.perf_counter() - started
            window.add(result)
            saver.poll()
            line.update(p, window)
            if p.update == begun + 1:  # a sign of life, long before the first record
                after = " after resuming" if begun else ""
                self.log.say(f"first update{after}: loss {result.loss:.4f}, {window.seconds:.2f} s")
            if p.update % config.log_every_updates == 0:
                self._record(metrics, line, window, rate)
                window = Window(self.loader, saver)
            validates = self.validator is not None and p.update % config.validation.every_updates == 0
            if validates:
                window.leave_out(self._validate(metrics, line, stop))
            p.seconds = time.perf_counter() - started
            reason = finished(p, config)
            if window.tried and (reason is not None or stop.received):
                self._record(metrics, line, window, rate, partial=True)
            if reason is not None and self.validator is not None and not validates:
                self._validate(metrics, line, stop)
            if reason is None or p.validation_due:
                reason = stop.reason
            minutes = config.checkpoint.every_minutes
            due = minutes is not None and p.seconds - last_save_seconds >= 60 * minutes
            counted = validates or p.update % config.checkpoint.every_updates == 0
            if counted or due or reason is not None:
                # A run must roll back to the same weights however often it was stopped, whatever the clock says.
                good = counted and p.skipped_in_a_row == 0 and recovery.rolls_back
                saver.save(self.learner, interim=not (counted or due), good=good)
                last_save_seconds = p.seconds
            refuse_to_go_on(p, config, self.run, saver.wait)
        return reason

    def _grow(self) -> None:
        """Go on to the next stage; a run resumed from before this update does the same again."""
        assert self.config.growth is not None
        kept, before = "", self.learner.encoder_layers
        if self.config.growth.keep_stages:
            kept = f"; kept as {keep_stage(self.run, self.experiment, self.progress.stage, self.learner.model)}"
        profiled = self.learner.grow()
        after_growth(self.progress, self.config)
        self.log.say(
            f"update {self.progress.update}: the encoder grows from {before} to {self.learner.encoder_layers} layers, "
            f"{count_parameters(self.learner.model):,} parameters{kept}"
        )
        if profiled:
            self.log.say(profiled)
        refuse_too_large(self.learner, self.loader, self.experiment, self.progress.epoch)

    def _record(
        self, metrics: MetricsWriter, line: ProgressLine, window: Window, rate: float, *, partial: bool = False
    ) -> None:
        metrics.write("train", self.progress.update, window.record(self.progress, rate), partial=partial)
        line.say(window.line(self.progress, rate, self.config.stop), self.log)

    def _validate(self, metrics: MetricsWriter, line: ProgressLine, stop: GracefulStop) -> float:
        """Score the dev set; a signal leaves the validation due, to be done before anything else by a resumed run.

        Returns the seconds it took.
        """
        assert self.validator is not None
        p, name = self.progress, self.config.validation.metric
        began = time.perf_counter()
        result = self.validator.measure(self.learner.model, lambda: stop.received is not None)
        p.validation_due = result is None
        if result is None:
            line.say(f"update {p.update}: validation left for the resumed run", self.log)
            return time.perf_counter() - began
        value = result.metric(name)
        sign = 1.0 if name == "loss" else -1.0
        better = math.isfinite(value) and (p.best is None or sign * value < sign * p.best)
        if better:
            p.best, p.best_update, p.validations_since_best = value, p.update, 0
        else:
            p.validations_since_best += 1
        if math.isfinite(value):
            p.scores[f"step-{p.update:08d}"] = value
        seconds = time.perf_counter() - began
        metrics.write("validation", p.update, {**result.record(), "seconds": seconds})
        text = f"update {p.update}: {result.line()}{'  (best)' if better else ''}  [{duration(seconds)}]"
        line.say(text, self.log, "bold" if better else None)
        return seconds

    def _resume(self) -> bool:
        """Go back to the newest whole checkpoint; False when there is none yet."""
        clear_leftovers(self.run)
        checkpoint = latest_checkpoint(self.run, lambda message: self.log.say(message, "bold red"))
        if checkpoint is None:
            self.log.say("no checkpoint yet: starting from the beginning")
            self.begin()
            return False
        if checkpoint.store != self.store.fingerprint:
            raise CheckpointError(
                f"{self.run}: the store {self.store.path} is not the one this run was trained on; "
                "restore it or start a new run"
            )
        if self.config.compile == "layers":  # graphs depend on the batch that is seen first: the same as in a new run
            refuse_too_large(self.learner, self.loader, self.experiment, epoch=0)
        self.learner.restore(checkpoint, self.run)
        restore_random_state(checkpoint.random)
        self.progress = checkpoint.progress
        for folder in set_aside(self.run, after=checkpoint.progress.update):
            self.log.say(f"the damaged checkpoint is {folder} now", "yellow")
        first = ", before its validation" if checkpoint.progress.validation_due else ""
        self.log.say(f"resumed after update {checkpoint.progress.update}{first}")
        return True

    def _average(self) -> None:
        wanted = min(self.config.checkpoint.average_last, len(regular_checkpoints(self.run, self.config)))
        if wanted:
            out, updates = average_run(self.run, last=wanted)
            self.log.say(f"averaged checkpoints {', '.join(map(str, updates))} into {out}")
