"""What a person sees while a model trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.train import StopConfig
from ziggurat.data.loader import Loader
from ziggurat.duration import duration
from ziggurat.models.build import count_parameters
from ziggurat.training.checkpoint import Progress as RunProgress
from ziggurat.training.depth import Depth
from ziggurat.training.learner import Learner
from ziggurat.training.metrics import MetricsWriter, RunLog
from ziggurat.training.saving import Saver
from ziggurat.training.step import UpdateResult
from ziggurat.training.stopping import finished, share_done, time_left
from ziggurat.training.validate import Validation

__all__ = ["ProgressLine", "Reporter", "Window", "introduction"]


def introduction(experiment: Experiment, learner: Learner, pairs: int, run: Path) -> list[str]:
    """Return for people what is trained, on how many `pairs`, where, and into which folder."""
    model, config, processes = experiment.model, experiment.training, learner.processes
    kind = model.residual if model.family == "transformer" else model.family
    where = learner.device.type
    threads = torch.get_num_threads()
    where += f" with {threads} thread{'s' if threads > 1 else ''}" if where == "cpu" else ""
    where += f" in each of {processes.count} processes ({config.distributed.kind})" if processes.count > 1 else ""
    return [
        f"{kind} {learner.encoder_layers}-{model.decoder.layers}, width {model.d_model}, "
        f"{count_parameters(learner.model):,} parameters, {pairs:,} training pairs",
        f"{where}, {config.precision}; run folder {run}",
    ]


_SUMS = (
    *("updates", "source_tokens", "target_tokens", "sentences"),
    *("skipped", "spikes", "rejected", "out_of_memory"),
    *("loss", "nll", "grad_norm", "rate"),
)


class Window:
    """Sums over the updates since the last record.

    Args:
        loader, saver: who know how long training has waited for them.
        sums: of another window, which this one goes on with (`sums`); without them it is empty.
    """

    def __init__(self, loader: Loader, saver: Saver, sums: Mapping[str, float] | None = None) -> None:
        self._loader, self._saver = loader, saver
        before = dict.fromkeys(("seconds", "data_wait", "checkpoint_wait"), 0.0) | dict(sums or {})
        self._began = time.perf_counter() - before["seconds"]
        self._waited = loader.waited_seconds - before["data_wait"]
        self._saved = saver.waited_seconds - before["checkpoint_wait"]
        self.updates = self.source_tokens = self.target_tokens = self.sentences = 0
        self.skipped = self.spikes = self.rejected = self.out_of_memory = 0
        self.loss = self.nll = self.grad_norm = 0.0
        self.rate = 0.0
        """Learning rate of the latest update."""
        for name in _SUMS:
            setattr(self, name, before.get(name, getattr(self, name)))

    def sums(self) -> dict[str, float]:
        """Return what another window needs to go on with this one, such as that of a resumed run."""
        waits = {"data_wait": self._data_wait, "checkpoint_wait": self._checkpoint_wait}
        return {**{name: getattr(self, name) for name in _SUMS}, "seconds": self.seconds, **waits}

    def add(self, result: UpdateResult, rate: float) -> None:
        """Count one update, tried at learning rate `rate`; a skipped one only adds to the count of its kind."""
        self.rate = rate
        if result.shortage is not None:
            self.out_of_memory += 1
            return
        if not result.taken:
            self.skipped += not result.finite or result.spike
            self.spikes += result.spike
            self.rejected += not result.admitted
            return
        self.updates += 1
        self.source_tokens += result.source_tokens
        self.target_tokens += result.target_tokens
        self.sentences += result.sentences
        self.loss += result.loss
        self.nll += result.nll
        self.grad_norm += result.grad_norm

    def leave_out(self, seconds: float) -> None:
        """Do not count the latest `seconds`, which were not training."""
        self._began += seconds

    @property
    def tried(self) -> int:
        """Updates tried, skipped ones included."""
        return self.updates + self.skipped + self.rejected + self.out_of_memory

    @property
    def seconds(self) -> float:
        """Wall time since the window began, less what was left out."""
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
        return self.target_tokens / self.seconds

    def record(self, p: RunProgress) -> dict[str, float | int | None]:
        """Return the values of one `train` record; means are over the window's updates."""
        n = self.updates
        nll = self.nll / self.target_tokens if n else None
        return {
            "epoch": p.epoch,
            "loss": self.loss / n if n else None,
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)) if nll is not None else None,
            "learning_rate": self.rate,
            "grad_norm": self.grad_norm / n if n else None,
            "target_tokens_per_second": round(self.tokens_per_second, 1),
            "source_tokens_per_second": round(self.source_tokens / self.seconds, 1),
            "sentences_per_update": self.sentences / n if n else None,
            "data_wait_share": round(self._data_wait / self.seconds, 4),
            "checkpoint_wait": round(self._checkpoint_wait, 3),
            "skipped": self.skipped,
            "spikes": self.spikes,
            "rejected": self.rejected,
            "out_of_memory": self.out_of_memory,
            "roll_backs": p.roll_backs,
            "seconds": round(p.seconds, 3),
            "target_tokens": p.target_tokens,
        }

    def line(self, p: RunProgress, stop: StopConfig, depth: Depth | None = None) -> str:
        """Return one line for the log."""
        v = self.record(p)
        if not self.updates:
            return f"update {p.update}  epoch {p.epoch + 1}  all {self.tried} updates skipped"
        return (
            f"update {p.update}  epoch {p.epoch + 1}  loss {v['loss']:.4f}  perplexity {v['perplexity']:.2f}  "
            f"rate {self.rate:.2e}  gradient {v['grad_norm']:.2f}  {shown_r(depth)}"
            f"{self.tokens_per_second:,.0f} target tokens/s  data wait {100 * float(v['data_wait_share'] or 0):.1f} %  "
            f"{duration(p.seconds)}  {time_left(p, stop)} left"
        )


def shown_r(depth: Depth | None) -> str:
    """Return r of the encoder (Bapna et al. 2018) for a line of figures; nothing where it was not measured."""
    return "" if depth is None or depth.r is None else f"r {depth.r:.2g}  "


class ProgressLine:
    """Progress of a run with rate and time left; off a terminal only the logged lines appear."""

    def __init__(self, console: Console, config: TrainingConfig) -> None:
        self._config = config
        self._bar = Progress(
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

    def update(self, p: RunProgress, window: Window, depth: Depth | None = None) -> None:
        """Show where the run stands, the newest warning about its depth first."""
        if self._bar.disable:
            return
        left = time_left(p, self._config.stop)
        loss, norm = (x / window.updates if window.updates else math.nan for x in (window.loss, window.grad_norm))
        warning = f"WARNING {depth.standing[-1]}  " if depth is not None and depth.standing else ""
        detail = (
            f"{warning}update {p.update}  loss {loss:.3f}  rate {window.rate:.1e}  gradient {norm:.2f}  "
            f"{shown_r(depth)}{window.tokens_per_second:,.0f} tokens/s  {left} left"
        )
        self._bar.update(self._task, completed=share_done(p, self._config.stop), detail=detail)

    def say(self, message: str, log: RunLog, style: str | None = None) -> None:
        """Print a line above the bar and log it."""
        log.say(message, style)


class Reporter:
    """What a run says while it trains: to the bar, the log, `metrics.jsonl` and TensorBoard.

    Args:
        bar: for a terminal.
        metrics: takes the records.
        log: takes the lines.
        config: section `training`.
        new_window: returns a Window that goes on with the sums it is given; with {} an empty one.
        depth: takes the measures of depth; None: there are none.
        begun: where training starts; a window that was open there goes on.
    """

    def __init__(
        self,
        bar: ProgressLine,
        metrics: MetricsWriter,
        log: RunLog,
        config: TrainingConfig,
        new_window: Callable[[Mapping[str, float]], Window],
        depth: Depth | None = None,
        begun: RunProgress | None = None,
    ) -> None:
        self._bar, self._metrics, self._log, self._config = bar, metrics, log, config
        self._depth = depth
        begun = begun or RunProgress()
        self._new_window = new_window
        self._window = new_window(begun.window)
        self._first, self._seconds_before = True, self._window.seconds
        # Checkpoints of earlier versions have no sums: what came before them is missing in the first record.
        self._lacks_some = not begun.window and begun.update % config.log_every_updates != 0

    def updated(self, p: RunProgress, result: UpdateResult, rate: float) -> None:
        """Take an update that was tried at learning rate `rate`; the sums since the last record go into `p`."""
        self._window.add(result, rate)
        self._bar.update(p, self._window, self._depth)
        if self._first:  # a sign of life, long before the first record
            after = " after resuming" if p.update > 1 else ""
            seconds = self._window.seconds - self._seconds_before
            self._log.say(f"first update{after}: loss {result.loss:.4f}, {seconds:.2f} s")
            self._first = False
        if p.update % self._config.log_every_updates == 0:
            self._record(p, partial=self._lacks_some)
            self._window, self._lacks_some = self._new_window({}), False
        p.window = self._window.sums()

    def ended(self, p: RunProgress) -> None:
        """Record what is left since the last record; the sums stay in `p`, for a run that goes on.

        Unless training is over, the resumed run takes the record back. Trackers cannot, so they are not told.
        """
        if self._window.tried:
            over = finished(p, self._config) is not None and not p.validation_due
            self._record(p, partial=True, told=over)
        if self._depth is not None:
            self._depth.ended()

    def _record(self, p: RunProgress, *, partial: bool, told: bool = True) -> None:
        self._metrics.write("train", p.update, self._window.record(p), partial=partial, told=told)
        self._bar.say(self._window.line(p, self._config.stop, self._depth), self._log)

    def validated(self, p: RunProgress, result: Validation | None, better: bool, seconds: float) -> None:
        """Take a validation, or that it was left (None); whether it is the best so far, and how long it took."""
        self._window.leave_out(seconds)
        if result is None:
            self._bar.say(f"update {p.update}: validation left for the resumed run", self._log)
            return
        self._metrics.write("validation", p.update, {**result.record(), "seconds": seconds})
        text = f"update {p.update}: {result.line()}{'  (best)' if better else ''}  [{duration(seconds)}]"
        self._bar.say(text, self._log, "bold" if better else None)
