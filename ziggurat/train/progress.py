"""Figures of a run while it trains: logged, recorded and shown in a bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.modifiers import StageConfig
from ziggurat.model.build import count_parameters
from ziggurat.system.duration import duration
from ziggurat.train.depth_records import DepthReporter
from ziggurat.train.directions import Validation
from ziggurat.train.learner import Learner
from ziggurat.train.metrics import MetricsWriter, RunLog
from ziggurat.train.run_state import Progress
from ziggurat.train.schedule import finished, share_done, time_left
from ziggurat.train.update import UpdateResult
from ziggurat.train.window import UpdateWindow


def introduction(experiment: Experiment, learner: Learner, pairs: int, run: Path) -> list[str]:
    """Return the first lines of the log: the model, the number of training `pairs`, the device and the run's folder."""
    model, config, processes = experiment.model, experiment.training, learner.processes
    kind = model.residual if model.family == "transformer" else model.family
    where = learner.device.type
    threads = torch.get_num_threads()
    where += f" with {threads} thread{'s' if threads > 1 else ''}" if where == "cpu" else ""
    where += f" in each of {processes.count} processes ({config.distributed.kind})" if processes.count > 1 else ""
    lora = config.lora
    trained = f"{sum(p.numel() for p in learner.optimiser.parameters):,} of them trained"
    adapted = [] if lora is None else [f"low-rank updates (rank {lora.rank}) of {', '.join(lora.maps)}: {trained}"]
    if config.freeze:
        fixed = sum(p.numel() for p in learner.model.parameters() if not p.requires_grad)
        adapted.append(f"frozen: {', '.join(config.freeze)}, {fixed:,} parameters; {trained}")
    return [
        f"{kind} {learner.depth[0]}-{learner.depth[1]}, width {model.d_model}, "
        f"{count_parameters(learner.model):,} parameters, {pairs:,} training pairs",
        *adapted,
        f"{where}, {config.precision}; run folder {run}",
    ]


_TOLD_SHARE = 0.1
"""From this share of the time on, the log says what validations take."""


class ProgressLine:
    """Progress bar of a run, with figures and the time left; without a terminal nothing is drawn."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[detail]}"),
            console=console,
            transient=True,
            refresh_per_second=2,  # ten, rich's own choice, take more than 1 % of a core
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("training", total=1.0, detail="")

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, p: Progress, share: float | None, window: UpdateWindow, depth: DepthReporter) -> None:
        """Show the state of the run, `share` of which is done; the newest warning about its depth comes first."""
        if self._bar.disable:
            return
        loss, norm = (x / window.updates if window.updates else math.nan for x in (window.loss, window.grad_norm))
        warning = f"WARNING {depth.standing[-1]}  " if depth.standing else ""
        detail = (
            f"{warning}update {p.update}  loss {loss:.3f}  rate {window.rate:.1e}  gradient {norm:.2f}  "
            f"{depth.shown_r}{window.tokens_per_second:,.0f} tokens/s  {time_left(p, share)} left"
        )
        self._bar.update(self._task, completed=share or 0.0, detail=detail)


class Reporter:
    """Reports of a run while it trains: to the bar, the log, `metrics.jsonl` and trackers.

    Args:
        bar: for a terminal.
        metrics: receives the records.
        log: receives the lines.
        config: section `training`.
        new_window: returns an UpdateWindow that continues the sums it is given; with {} an empty one.
        depth: knows the latest measures of depth.
        begun: progress at the start; a window that was open there is continued.
        stages: `data.stages`.
    """

    def __init__(
        self,
        bar: ProgressLine,
        metrics: MetricsWriter,
        log: RunLog,
        config: TrainingConfig,
        new_window: Callable[[Mapping[str, float]], UpdateWindow],
        depth: DepthReporter,
        begun: Progress,
        stages: Sequence[StageConfig],
    ) -> None:
        self._bar, self._metrics, self._log, self._config = bar, metrics, log, config
        self._depth, self._stages = depth, stages
        self._epoch_batches: int | None = None
        self._new_window = new_window
        self._window = new_window(begun.window)
        self._first, self._seconds_before = True, self._window.seconds
        self._begun_seconds, self._validating = begun.seconds, 0.0

    def updated(self, p: Progress, result: UpdateResult, rate: float, epoch_batches: int | None = None) -> None:
        """Report an update tried at learning rate `rate`; the sums since the last record go into `p`.

        `epoch_batches`: batches of its epoch.
        """
        self._window.add(result, rate)
        self._epoch_batches = epoch_batches
        self._bar.update(p, self._share_done(p), self._window, self._depth)
        if self._first:  # a sign of life: the first record may come minutes later
            after = " after resuming" if p.update > 1 else ""
            seconds = self._window.seconds - self._seconds_before
            self._log.say(f"first update{after}: loss {result.loss:.4f}, {seconds:.2f} s")
            self._first = False
        if p.update % self._config.log_every_updates == 0:
            self._record(p, partial=False)
            # Before the sums go into `p`, so that a checkpoint of this update holds an empty window.
            self._window = self._new_window({})
        p.window = self._window.sums()

    def ended(self, p: Progress) -> None:
        """Write a partial record of the updates since the last one; their sums stay in `p`, for a resumed run.

        Unless training is over, the resumed run removes that record. Trackers cannot do that, so they receive it only
        when training is over.
        """
        if self._window.tried:
            over = finished(p, self._config) is not None and not p.validation_due
            self._record(p, partial=True, track=over)
        self._depth.ended()

    def _record(self, p: Progress, *, partial: bool, track: bool = True) -> None:
        self._metrics.write("train", p.update, self._window.record(p), partial=partial, track=track)
        self._log.say(self._window.line(p, self._share_done(p), self._depth))

    def _share_done(self, p: Progress) -> float | None:
        return share_done(p, self._config, self._stages, self._epoch_batches)

    def validated(self, p: Progress, result: Validation | None, better: bool, seconds: float) -> None:
        """Report a validation of `seconds`, and whether it is the best so far; `result` None: it was interrupted."""
        self._window.leave_out(seconds)  # speeds of the next record are those of training
        if result is None:
            self._log.say(f"update {p.update}: validation left for the resumed run")
            return
        self._metrics.write("validation", p.update, {**result.record(), "seconds": seconds})
        self._validating += seconds
        share = self._validating / max(seconds, p.seconds + seconds - self._begun_seconds)
        # A resumed run may begin with a validation that was due: before an update there is nothing to compare with.
        told = share >= _TOLD_SHARE and not self._first
        took = duration(seconds) + (f", all validations {share:.0%} of the time" if told else "")
        best = f"  (best {self._config.validation.metric})" if better else ""
        text = f"update {p.update}: {result.line()}{best}  [{took}]"
        self._log.say(text, "bold" if better else None)
