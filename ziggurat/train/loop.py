"""The training loop: the phases of an update, in the required order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from ziggurat.config import Experiment
from ziggurat.config.lifecycle import CheckpointConfig, ValidationConfig
from ziggurat.config.notices import notices
from ziggurat.data.loader import Group, LoaderState
from ziggurat.model.build import count_parameters
from ziggurat.model.fast.precision import precision_notice
from ziggurat.system.processes import SystemLoad
from ziggurat.system.terminal import duration, safe
from ziggurat.system.yaml_text import shown
from ziggurat.train.average import average_ended, remove_average
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.clipping import AdaptiveClipper
from ziggurat.train.depth_records import DepthProbe, DepthReporter
from ziggurat.train.device import to_device
from ziggurat.train.distributed import joined, lost
from ziggurat.train.growth import after_growth, keep_stage, stage_ended, stage_folder
from ziggurat.train.limits import ends_after, finished, how_to_continue
from ziggurat.train.progress import ProgressLine, RecordWindow, Reporter, introduction
from ziggurat.train.recovery import Recovery, highest_nll, refuse_to_go_on
from ziggurat.train.run import other_files_notice, run_locked
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.saving import Saver
from ziggurat.train.schedule import next_rate
from ziggurat.train.setup import Setup, rank_anew, refuse_too_large, set_up, starting_point
from ziggurat.train.signals import GracefulStop
from ziggurat.train.trackers import open_trackers
from ziggurat.train.update import train_update


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run: why it stopped, total figures over all its resumed parts, and the signal that stopped it."""

    reason: str
    update: int
    seconds: float
    target_tokens: int
    best: float | None
    best_update: int | None
    signal: int | None


def train(
    run: Path, experiment: Experiment, *, resume: bool = False, console: Console | None = None, advice: bool = True
) -> TrainingResult:
    """Train `experiment` in the folder `run`; with `resume`, continue from its newest undamaged checkpoint.

    The result is a function of configuration, data and seed: a run killed at any moment and resumed ends with the same
    weights, bit for bit on one machine with the same number of processes (docs/training.md names the exceptions). Under
    torchrun, every process calls this with the same folder. `advice` prints the command that continues the run at the
    end; callers with another command turn it off. Raises ConfigError, DataError, CheckpointError, TrainingError.
    """
    with joined(experiment.training.distributed.timeout_minutes, experiment.training.device) as processes:
        console = safe(console or Console(stderr=True)) if processes.first else Console(quiet=True)
        try:
            setup = set_up(run.absolute(), experiment, processes, resume=resume)
            with (
                run_locked(setup.run, setup.experiment, processes) as differing,
                closing(RunLog(setup.writes_to, console)) as log,
            ):
                progress, origin = starting_point(setup, log, resume=resume)
                if differing and progress.update:
                    log.say(f"another environment: {shown(differing)}; results may differ in their last digits")
                _introduce(setup, progress, origin, log)
                return _train_from(setup, progress, log, console, advice)
        except RuntimeError as error:
            if processes.count > 1 and lost(error):
                raise processes.hanging(error) from error
            raise


def _introduce(setup: Setup, progress: RunProgress, origin: str | None, log: RunLog) -> None:
    """Log what is about to be trained; profile ADMIN's omegas if training starts from initialised weights."""
    others = [f"starting from the weights of {origin}"] if origin else []
    for line in [*others, *introduction(setup.experiment, setup.learner, len(setup.store.train), setup.run)]:
        log.say(line)
    if origin == "" and (profiled := setup.learner.profile()):
        log.say(profiled)
    if setup.fitted:
        log.say(setup.fitted)
    no_dev = "no dev set in the store: no validation, `best` will not be kept"
    begins = not progress.update  # a resumed run can change neither its data nor its precision
    about = [
        *map(str, notices(setup.experiment)),
        *(other_files_notice(setup.experiment.data, setup.store) if begins else []),
    ]
    if setup.processes.first and begins:
        model, precision = setup.experiment.model, setup.experiment.training.precision
        if told := precision_notice(precision, setup.learner.device, (model.d_model, model.d_ff)):
            log.say(told)
    about += [*rank_anew(progress, setup.experiment), *(setup.validator.notices if setup.validator else [no_dev])]
    for notice in filter(None, about):
        log.say(notice, "yellow")


def _train_from(setup: Setup, p: RunProgress, log: RunLog, console: Console, advice: bool) -> TrainingResult:
    """Open everything that a run writes to, train, close it in reverse order, and report how the run ended."""
    config = setup.experiment.training
    begun, overdue = p.update, p.validation_due
    trackers = open_trackers(setup.writes_to, setup.experiment, begun) if setup.writes_to else []
    goes_on = (overdue or finished(p, config) is None) and bool(p.window)
    metrics = MetricsWriter(
        setup.writes_to, log, update=begun, trackers=trackers, validated=not overdue, goes_on=goes_on
    )
    signals = GracefulStop(setup.processes.first, setup.processes.count > 1)
    with closing(metrics):
        with (
            signals,
            ProgressLine(console) as line,
            # Opened last and closed first, so that signals are handled until the last checkpoint is on disk.
            Saver(setup.run, setup.experiment, setup.watch, p, log, setup.processes, setup.store_check) as saver,
        ):
            reason = _Loop(setup, p, log, metrics, saver, signals, line).run()
        if p.update == begun and not overdue:
            nothing = f"nothing to do after update {p.update}: {reason}"
            log.say(
                f"{nothing}; to continue, {how_to_continue(p, config.stop, setup.run)}" if advice else nothing, "yellow"
            )
        else:
            waited = (
                f"waited {duration(saver.waited_seconds)} for checkpoints{' since the last start' if begun else ''}"
            )
            log.say(f"stopped after update {p.update}: {reason} ({duration(p.seconds)} of training; {waited})")
        if signals.heeded is not None and advice:
            log.say(f"to resume: `ziggurat train --run {setup.run} --resume`")
        if signals.heeded is None:
            average_ended(setup, p, log, metrics)
    return TrainingResult(reason, p.update, p.seconds, p.target_tokens, p.best, p.best_update, signals.heeded)


class _Loop:
    """The loop over updates, in one of the processes; all processes run the same phases together.

    Every phase reads and changes `progress`, which checkpoints store.
    """

    def __init__(
        self,
        setup: Setup,
        progress: RunProgress,
        log: RunLog,
        metrics: MetricsWriter,
        saver: Saver,
        signals: GracefulStop,
        line: ProgressLine,
    ) -> None:
        self.setup, self.progress, self.log, self.saver, self.signals = setup, progress, log, saver, signals
        self.config, self.stages, self.learner = setup.experiment.training, setup.experiment.data.stages, setup.learner
        self.validator, self.processes = setup.validator, setup.processes
        self.began = time.perf_counter() - progress.seconds  # seconds continue from those before the run was resumed
        depth_reporter = DepthReporter(setup.writes_to, metrics, log, setup.experiment, update=progress.update)
        window = partial(RecordWindow, setup.loader, saver)
        # With several processes, each would count the others as foreign load.
        alone = self.processes.count == 1 and self.learner.device.type == "cpu"
        load = SystemLoad() if alone else None
        self.report = Reporter(line, metrics, log, setup.experiment, window, depth_reporter, progress, load)
        self.recovery = Recovery(setup.run, self.learner, self.config, log, saver.wait)
        self.depth = DepthProbe(setup.run, setup.experiment, self.learner, log, depth_reporter.see)

    @property
    def seconds(self) -> float:
        """Wall time of the run's training so far, in this process."""
        return time.perf_counter() - self.began

    def run(self) -> str:
        """Train until a limit is reached or a signal arrives; return which."""
        p, config, learner, processes = self.progress, self.config, self.learner, self.processes
        reason = self._begin()
        groups: Iterator[Group] = to_device(self.setup.loader, p.position, learner.device)
        while reason is None:
            # (1) Prepare. Growth comes before the batch: it depends only on the progress, so that a run resumed here
            # grows in the same way.
            while stage_ended(p, config):
                self._grow()
            group, rate = next(groups), next_rate(p, config, self.setup.experiment.model.d_model)
            # (2) Update. Counted at once, so that everything that follows, in this process or after a crash, takes it
            # into account.
            self.depth.before(p, rate)
            learner.begin(p.update + 1)
            processes.update = p.update + 1  # used to report a process that hangs
            with learner.passes:
                result = train_update(
                    learner.parallel,
                    group.batches,
                    learner.optimiser,
                    rate=rate,
                    clip_norm=config.clip_norm,
                    clipper=AdaptiveClipper(p.gradient_norms) if config.adaptive_clip else None,
                    highest_nll=highest_nll(p.losses, config.divergence),
                )
            stage = len(p.data_stages)
            p.advance(result.target_tokens, group.state_after, self.stages)
            self.recovery.count(p, group.batches, result)
            if self.recovery.due(p):
                self.recovery.roll_back(p)
            # (3) Measure. After any roll-back, so that figures describe the weights that are kept; the clock is read
            # after the depth measures and before the report, whose records show it.
            self.depth.after(p, result, rate)
            p.seconds = self.seconds
            self.report.updated(p, result, rate, group.epoch_batches)
            validated = self.validator is not None and due(config.validation, p.update, group.state_after)
            if validated:
                self._validate()
            if len(p.data_stages) > stage:
                self.log.say(f"update {p.update}: stage {len(p.data_stages)} of {len(self.stages)} of the data begins")
            if p.position != group.state_after:  # early stopping has ended a stage
                groups = to_device(self.setup.loader, p.position, learner.device)
            # (4) Agree. Clocks and signals differ between processes, and all must stop after the same update.
            self._agree(self.seconds)
            reason = finished(p, config)
            if reason is not None and self.validator is not None and not validated:
                self._validate()  # the final weights are always scored; otherwise they could not be the best
                self._agree(p.seconds)  # a signal may have arrived, and the clock now shows the end of training
            if reason is None or p.validation_due:
                reason = self.signals.reason  # reaching a limit takes precedence over a signal
            # (5) Save. After the validation, whose score decides which checkpoints are kept, and after the last record,
            # since the sums of the open record are also saved.
            if reason is not None:
                self.report.ended(p)
                self.depth.ended()
            counted = validated or due(config.checkpoint, p.update, group.state_after)
            self._save(counted=counted, last=reason is not None)
            # (6) Stop a run whose updates fail. After its checkpoint, so that its state can be inspected.
            refuse_to_go_on(p, config, self.setup.run, self.saver.wait)
        return reason

    def _begin(self) -> str | None:
        """Complete what an interrupted run left unfinished; return the reason to stop at once, if any."""
        p, config = self.progress, self.config
        if p.validation_due:
            # Comes first, because the score decides which weights are the best and whether to stop.
            self._validate()
            self.saver.amend()
            self._agree(p.seconds)
            if p.validation_due or finished(p, config) is not None:
                self.report.ended(p)
        reason = self.signals.reason if p.validation_due else finished(p, config)
        if reason is None:
            self.processes.first_does(lambda: remove_average(self.setup.run, self.log))
        p.good = p.good if (rolls_back := self.recovery.rolls_back) else None
        # Provides a checkpoint to roll back to from the first update on; when resumed, `start_from` may lead to other
        # weights.
        if reason is None and p.good is None and (rolls_back or (config.start_from and not p.update)):
            self.saver.save(self.learner, interim=True, good=rolls_back)
        return reason

    def _grow(self) -> None:
        growth, before, kept = self.config.growth, self.learner.depth, ""
        assert growth is not None
        if growth.keep_stages:
            kept = f"; kept as {self._keep_stage()}"
        profiled = self.learner.grow()
        after_growth(self.progress, self.config)
        stacks = zip(("encoder", "decoder"), before, self.learner.depth, strict=True)
        grown = " and ".join(f"the {stack} from {old} to {new} layers" for stack, old, new in stacks if old != new)
        size = f"{count_parameters(self.learner.model):,} parameters"
        self.log.say(f"update {self.progress.update}: the model grows, {grown}: {size}{kept}")
        if profiled:
            self.log.say(profiled)
        refuse_too_large(self.learner, self.setup.loader, self.setup.experiment, self.progress.position)

    def _keep_stage(self) -> Path:
        run, experiment, stage = self.setup.run, self.setup.experiment, self.progress.stage
        self.setup.store_check.confirm()  # nothing is kept from data that may turn out to be damaged
        weights = self.learner.smoothed_weights()
        self.processes.first_does(lambda: keep_stage(run, experiment, stage, weights))
        return stage_folder(run, experiment, stage)

    def _validate(self) -> None:
        assert self.validator is not None
        p, began = self.progress, time.perf_counter()
        with self.learner.smoothed() as model:
            result = self.validator.measure(
                model,
                lambda: self.signals.received is not None,
                last=lambda nll: ends_after(p, self.config, nll, self.seconds),
            )
        p.validation_due = result is None
        better = result is not None and result.count(p, self.config.validation.metric)
        self.report.validated(p, result, better, time.perf_counter() - began)
        if result is not None:
            p.lose_patience(self.stages)

    def _agree(self, seconds: float) -> None:
        """Agree on values that differ between processes: the first one's clock, a signal, checkpoints being written."""
        clock = seconds if self.processes.first else 0.0
        received = self.signals.received or 0
        # One collective for all three, because an update pays for its latency, not its size.
        self.progress.seconds, signal, writing = self.processes.largest([clock, received, self.saver.writing])
        self.signals.heeded = int(signal) or None
        if not writing:
            self.saver.poll()

    def _save(self, *, counted: bool, last: bool) -> None:
        """Save a checkpoint if one is due: `counted` by updates or epochs, by the clock, or because training ends."""
        p, by_clock = self.progress, self.saver.due
        if counted or by_clock or last:
            # Only counted checkpoints may be rolled back to: a run must roll back to the same weights regardless of
            # interruptions and the clock.
            good = counted and p.skipped_in_a_row == 0 and self.recovery.rolls_back
            interim = not (counted or by_clock)
            self.saver.save(self.learner, interim=interim, by_clock=by_clock and not counted, good=good)


def due(when: ValidationConfig | CheckpointConfig, update: int, position: LoaderState) -> bool:
    """Return whether a validation or a checkpoint is due after this update by the count of updates or epochs.

    `position` is the position in the data after it: at an epoch's end, the start of the next one.
    """
    ends = position.batch == 0 and when.every_epochs is not None and position.epoch % when.every_epochs == 0
    return ends or (when.every_updates is not None and update % when.every_updates == 0)
