"""Figures of a run during training: summed over the updates of a record, logged, recorded and shown in a bar."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from ziggurat.config import Experiment
from ziggurat.data.loader import Loader
from ziggurat.model.build import count_parameters
from ziggurat.system.processes import SystemLoad, busy_notice
from ziggurat.system.terminal import duration
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.depth_records import DepthReporter
from ziggurat.train.learner import Learner
from ziggurat.train.limits import finished, share_done, time_left
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.saving import Saver
from ziggurat.train.update import UpdateResult
from ziggurat.train.validate import Validation

_OF_UPDATES = ("source_tokens", "target_tokens", "sentences", "loss", "nll", "alignment", "aligned", "grad_norm")
"""_OF_UPDATES are the figures of UpdateResult that a window adds up, by their names in checkpoints."""
_COUNTS = ("updates", "skipped", "spikes", "rejected", "out_of_memory")


class RecordWindow:
    """Sums over the updates since the last record; continues a window that had these `sums`."""

    def __init__(self, loader: Loader, saver: Saver, sums: Mapping[str, float] | None = None) -> None:
        self._loader, self._saver = loader, saver
        before = dict.fromkeys(("seconds", "data_wait", "checkpoint_wait"), 0.0) | dict(sums or {})
        # Times are differences from now, so the window is backdated by the time that the previous one had measured.
        self._began = time.perf_counter() - before["seconds"]
        self._waited = loader.waited_seconds - before["data_wait"]
        self._saved = saver.waited_seconds - before["checkpoint_wait"]
        self._sums = {name: before.get(name, 0) for name in (*_COUNTS, *_OF_UPDATES)}
        self.rate = before.get("rate", 0.0)
        """Learning rate of the latest update."""

    def sums(self) -> dict[str, float]:
        """Return the sums with which another window, such as that of a resumed run, continues this one."""
        waits = {"data_wait": self._data_wait, "checkpoint_wait": self._checkpoint_wait}
        return {**self._sums, "rate": self.rate, "seconds": self.seconds, **waits}

    def add(self, result: UpdateResult, rate: float) -> None:
        """Add one update, attempted at learning rate `rate`; a skipped one only adds to the count of its kind."""
        self.rate, sums = rate, self._sums
        if result.shortage is not None:
            sums["out_of_memory"] += 1
        elif not result.taken:
            sums["skipped"] += not result.finite or result.spike
            sums["spikes"] += result.spike
            sums["rejected"] += not result.admitted
        else:
            sums["updates"] += 1
            for name in _OF_UPDATES:
                sums[name] += getattr(result, name)

    def leave_out(self, seconds: float) -> None:
        """Exclude the latest `seconds`, which were not spent on training."""
        self._began += seconds

    @property
    def tried(self) -> int:
        """Attempted updates, including skipped ones."""
        return int(sum(self._sums[name] for name in ("updates", "skipped", "rejected", "out_of_memory")))

    @property
    def seconds(self) -> float:
        """Wall time since the window started, minus excluded time."""
        return max(1e-9, time.perf_counter() - self._began)

    @property
    def _data_wait(self) -> float:
        return self._loader.waited_seconds - self._waited

    @property
    def _checkpoint_wait(self) -> float:
        return self._saver.waited_seconds - self._saved

    @property
    def tokens_per_second(self) -> float:
        """Target tokens per second."""
        return self._sums["target_tokens"] / self.seconds

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the updates that were taken; NaN if none were."""
        return self._sums[name] / self._sums["updates"] if self._sums["updates"] else math.nan

    def record(self, p: RunProgress) -> dict[str, float | int | None]:
        """Return the values of one `train` record; means are over the updates of the window that were taken."""
        s, taken = self._sums, bool(self._sums["updates"])
        nll = s["nll"] / s["target_tokens"] if taken else None
        return {
            "epoch": p.epoch,
            "loss": self.mean("loss") if taken else None,
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)) if nll is not None else None,  # exp(710) overflows
            "alignment_loss": s["alignment"] / s["aligned"] if s["aligned"] else None,
            "learning_rate": self.rate,
            "grad_norm": self.mean("grad_norm") if taken else None,
            "target_tokens_per_second": round(self.tokens_per_second, 1),
            "source_tokens_per_second": round(s["source_tokens"] / self.seconds, 1),
            "sentences_per_update": self.mean("sentences") if taken else None,
            "data_wait_share": round(self._data_wait / self.seconds, 4),
            "checkpoint_wait": round(self._checkpoint_wait, 3),
            **{name: s[name] for name in ("skipped", "spikes", "rejected", "out_of_memory")},
            "roll_backs": p.roll_backs,
            "seconds": round(p.seconds, 3),
            "target_tokens": p.target_tokens,
        }

    def line(self, p: RunProgress, left: str, depth: DepthReporter) -> str:
        """Return one line for the log; `left` is the remaining training time."""
        v = self.record(p)
        # The record counts finished epochs; if an epoch has just ended, it is the epoch of the latest update.
        epoch = max(1, p.epoch + (p.batch > 0))
        if not self._sums["updates"]:
            return f"update {p.update}  epoch {epoch}  all {self.tried} updates skipped"
        aligned = f"alignment {v['alignment_loss']:.3f}  " if v["alignment_loss"] is not None else ""
        return (
            f"update {p.update}  epoch {epoch}  loss {v['loss']:.4f}  perplexity {v['perplexity']:.2f}  {aligned}"
            f"rate {self.rate:.2e}  gradient {v['grad_norm']:.2f}  {depth.shown_r(p.update)}"
            f"{self.tokens_per_second:,.0f} target tokens/s  data wait {100 * float(v['data_wait_share'] or 0):.1f} %  "
            f"{duration(p.seconds)}  {left} left"
        )


def introduction(experiment: Experiment, learner: Learner, pairs: int, run: Path) -> list[str]:
    """Return the first lines of the log: the model, the number of training `pairs`, the device and the run's folder."""
    model, config, processes = experiment.model, experiment.training, learner.processes
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
        f"{' + '.join(model.methods())} {learner.depth[0]}-{learner.depth[1]}, width {model.d_model}, "
        f"{count_parameters(learner.model):,} parameters, {pairs:,} training pairs",
        *adapted,
        f"{where}, {config.precision}; run folder {run}",
    ]


_TOLD_SHARE = 0.1
"""_TOLD_SHARE is the share of the time above which the log reports the time spent on validations."""


class ProgressLine:
    """Progress bar of a run, with figures and the time left; nothing is drawn without a terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            BarColumn(bar_width=12),
            # A narrow terminal cuts the end of the figures instead of the bar.
            TextColumn("{task.percentage:>3.0f} %  {task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True)),
            console=console,
            expand=True,
            transient=True,
            refresh_per_second=2,  # rich's default of ten takes more than 1 % of a core
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

    def update(
        self, p: RunProgress, share: float | None, left: str, window: RecordWindow, depth: DepthReporter
    ) -> None:
        """Show the state of the run, `share` of which is done, with the newest depth warning first."""
        if self._bar.disable:
            return
        warning = f"WARNING {depth.standing[-1]}  " if depth.standing else ""
        detail = (
            f"{warning}update {p.update}  loss {window.mean('loss'):.3f}  {left} left  "
            f"{window.tokens_per_second:,.0f} tokens/s  rate {window.rate:.1e}  "
            f"gradient {window.mean('grad_norm'):.2f}  {depth.shown_r(p.update)}"
        )
        self._bar.update(self._task, completed=share or 0.0, detail=detail)


_RECENT_RECORDS = 10
"""_RECENT_RECORDS is the number of records from which the time left is estimated."""
_SLOW_SHARE = 0.8
"""_SLOW_SHARE is the share of the fastest record's speed below which a record is slow."""
_LEAST_SECONDS = 1.0
"""_LEAST_SECONDS is the shortest time over which the machine's load is judged."""


class Reporter:
    """Reports on a run during training: to the bar, the log, `metrics.jsonl` and trackers.

    `new_window` returns a RecordWindow that continues the given sums, at first those of `begun`, the progress at the
    start. `load` tracks the machine's load from now on, since other processes could slow the run down; None: it is
    ignored.
    """

    def __init__(
        self,
        bar: ProgressLine,
        metrics: MetricsWriter,
        log: RunLog,
        experiment: Experiment,
        new_window: Callable[[Mapping[str, float]], RecordWindow],
        depth: DepthReporter,
        begun: RunProgress,
        load: SystemLoad | None = None,
    ) -> None:
        self._bar, self._metrics, self._log, self._config = bar, metrics, log, experiment.training
        self._depth, self._stages = depth, experiment.data.stages
        self._load, self._load_began, self._judged = load, time.perf_counter(), False
        self._fastest: dict[int, float] = {}  # tokens per second by stage of growth
        self._slow = False
        self._epoch_batches: int | None = None
        self._new_window = new_window
        self._window = new_window(begun.window)
        self._first, self._seconds_before = True, self._window.seconds
        self._begun_seconds, self._validating = begun.seconds, 0.0
        # Seconds and share done at the start and at recent records; the time left is estimated from the recent speed.
        self._moments = deque([(begun.seconds, self._share_done(begun) or 0.0)], maxlen=_RECENT_RECORDS)

    def updated(self, p: RunProgress, result: UpdateResult, rate: float, epoch_batches: int | None = None) -> None:
        """Report an update attempted at learning rate `rate`; the sums since the last record go into `p`.

        `epoch_batches`: number of batches in its epoch.
        """
        self._window.add(result, rate)
        self._epoch_batches = epoch_batches
        share = self._share_done(p)
        self._bar.update(p, share, time_left(p, share, self._moments[0]), self._window, self._depth)
        if self._first:  # a sign of life, since the first record may come minutes later
            after = " after resuming" if p.update > 1 else ""
            seconds = self._window.seconds - self._seconds_before
            self._log.say(f"first update{after}: loss {result.loss:.4f}, {seconds:.2f} s")
            self._first = False
        # At the start, but only once CPU times, which have a resolution of 10 ms, are meaningful.
        if not self._judged and time.perf_counter() - self._load_began >= _LEAST_SECONDS:
            self._judged = True
            if busy := self._others():
                self._log.say(f"{busy}: updates take longer than on an idle one", "yellow")
        if p.update % self._config.log_every_updates == 0:
            self._record(p, partial=False)
            # Before the sums go into `p`, so that a checkpoint of this update holds an empty window.
            self._window = self._new_window({})
        p.window = self._window.sums()

    def ended(self, p: RunProgress) -> None:
        """Write a partial record of the updates since the last one; their sums stay in `p`, for a resumed run.

        Unless training is over, the resumed run removes that record. Trackers cannot remove it, so they receive it only
        when training is over.
        """
        if self._window.tried:
            over = finished(p, self._config) is not None and not p.validation_due
            self._record(p, partial=True, track=over)
        self._depth.ended()

    def _record(self, p: RunProgress, *, partial: bool, track: bool = True) -> None:
        self._metrics.write("train", p.update, self._window.record(p), partial=partial, track=track)
        share = self._share_done(p)
        self._log.say(self._window.line(p, time_left(p, share, self._moments[0]), self._depth))
        if share is not None:
            self._moments.append((p.seconds, share))
        self._say_if_slowed(p, self._window.tokens_per_second)

    def _say_if_slowed(self, p: RunProgress, speed: float) -> None:
        """Log that training has become slower because other processes use the machine; only once until it recovers."""
        fastest = max(speed, self._fastest.get(p.stage, 0.0))
        busy, slow = self._others(), speed < _SLOW_SHARE * fastest
        if busy and slow and not self._slow:
            said = f"update {p.update}: slower, {speed:,.0f} target tokens/s after {fastest:,.0f}: {busy}"
            self._log.say(said, "yellow")
        self._fastest[p.stage], self._slow = fastest, slow and (self._slow or bool(busy))

    def _others(self) -> str:
        """Return how busy other processes have been since the last report, in words; "" if they did not interfere."""
        if self._load is None or time.perf_counter() - self._load_began < _LEAST_SECONDS:
            return ""
        others, crowded = self._load.look(torch.get_num_threads())
        self._load, self._load_began = SystemLoad(), time.perf_counter()
        return busy_notice(others) if crowded else ""

    def _share_done(self, p: RunProgress) -> float | None:
        return share_done(p, self._config, self._stages, self._epoch_batches)

    def validated(self, p: RunProgress, result: Validation | None, better: bool, seconds: float) -> None:
        """Report a validation that took `seconds`, and whether it is the best; `result` None: it was interrupted."""
        self._window.leave_out(seconds)  # speeds of the next record are those of training
        if result is None:
            self._log.say(f"update {p.update}: validation left for the resumed run")
            return
        self._metrics.write("validation", p.update, {**result.record(), "seconds": seconds})
        self._validating += seconds
        share = self._validating / max(seconds, p.seconds + seconds - self._begun_seconds)
        # A resumed run may start with an overdue validation; before the first update there is nothing to compare with.
        told = share >= _TOLD_SHARE and not self._first
        took = duration(seconds) + (f", all validations {share:.0%} of the time" if told else "")
        best = f"  (best {self._config.validation.metric})" if better else ""
        text = f"update {p.update}: {result.line()}{best}  [{took}]"
        self._log.say(text, "bold" if better else None)
