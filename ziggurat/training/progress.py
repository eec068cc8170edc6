"""What a person sees while a model trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ziggurat.config import TrainingConfig
from ziggurat.config.train import StopConfig
from ziggurat.data.loader import Loader
from ziggurat.duration import duration
from ziggurat.training.checkpoint import Progress as RunProgress
from ziggurat.training.metrics import RunLog
from ziggurat.training.saving import Saver
from ziggurat.training.step import UpdateResult
from ziggurat.training.stopping import share_done, time_left

__all__ = ["ProgressLine", "Window"]


class Window:
    """Sums over the updates since the last record."""

    def __init__(self, loader: Loader, saver: Saver) -> None:
        self._loader, self._saver = loader, saver
        self._began = time.perf_counter()
        self._waited = loader.waited_seconds
        self._saved = saver.waited_seconds
        self.updates = self.source_tokens = self.target_tokens = self.sentences = 0
        self.skipped = self.spikes = self.rejected = self.out_of_memory = 0
        self.loss = self.nll = self.grad_norm = 0.0

    def add(self, result: UpdateResult) -> None:
        """Count one update; a skipped one only adds to the count of its kind and to the time."""
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
    def tokens_per_second(self) -> float:
        """Target tokens per second."""
        return self.target_tokens / self.seconds

    def record(self, p: RunProgress, rate: float) -> dict[str, float | int | None]:
        """Return the values of one `train` record; means are over the window's updates."""
        n = self.updates
        nll = self.nll / self.target_tokens if n else None
        return {
            "epoch": p.epoch,
            "loss": self.loss / n if n else None,
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)) if nll is not None else None,
            "learning_rate": rate,
            "grad_norm": self.grad_norm / n if n else None,
            "target_tokens_per_second": round(self.tokens_per_second, 1),
            "source_tokens_per_second": round(self.source_tokens / self.seconds, 1),
            "sentences_per_update": self.sentences / n if n else None,
            "data_wait_share": round((self._loader.waited_seconds - self._waited) / self.seconds, 4),
            "checkpoint_wait": round(self._saver.waited_seconds - self._saved, 3),
            "skipped": self.skipped,
            "spikes": self.spikes,
            "rejected": self.rejected,
            "out_of_memory": self.out_of_memory,
            "roll_backs": p.roll_backs,
            "seconds": round(p.seconds, 3),
            "target_tokens": p.target_tokens,
        }

    def line(self, p: RunProgress, rate: float, stop: StopConfig) -> str:
        """Return one line for the log."""
        r = self.record(p, rate)
        if not self.updates:
            return f"update {p.update}  epoch {p.epoch + 1}  all {self.tried} updates skipped"
        return (
            f"update {p.update}  epoch {p.epoch + 1}  loss {r['loss']:.4f}  perplexity {r['perplexity']:.2f}  "
            f"rate {rate:.2e}  gradient {r['grad_norm']:.2f}  {self.tokens_per_second:,.0f} target tokens/s  "
            f"data wait {100 * float(r['data_wait_share'] or 0):.1f} %  {duration(p.seconds)}  "
            f"{time_left(p, stop)} left"
        )


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
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0, detail="")

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, p: RunProgress, window: Window) -> None:
        """Show where the run stands."""
        if self._bar.disable:
            return
        left = time_left(p, self._config.stop)
        loss = window.loss / window.updates if window.updates else float("nan")
        detail = f"update {p.update}  loss {loss:.3f}  {window.tokens_per_second:,.0f} tokens/s  {left} left"
        self._bar.update(self._task, completed=share_done(p, self._config.stop), detail=detail)

    def say(self, message: str, log: RunLog, style: str | None = None) -> None:
        """Print a line above the bar and log it."""
        log.say(message, style)
