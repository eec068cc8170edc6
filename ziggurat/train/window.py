"""The updates of one record: their sums, and the figures that the record and its line of the log give."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from ziggurat.data.loader import Loader
from ziggurat.system.duration import duration
from ziggurat.train.depth_records import DepthReporter
from ziggurat.train.run_state import Progress
from ziggurat.train.saving import Saver
from ziggurat.train.schedule import time_left
from ziggurat.train.update import UpdateResult

# Attributes of a window, and their names in checkpoints (`Progress.window`).
_SUMS = (
    *("updates", "source_tokens", "target_tokens", "sentences"),
    *("skipped", "spikes", "rejected", "out_of_memory"),
    *("loss", "nll", "alignment", "aligned", "grad_norm", "rate"),
)


class UpdateWindow:
    """Sums over the updates since the last record.

    Args:
        loader, saver: asked how long training has waited for them.
        sums: of a window that this one continues (`sums`); without them it is empty.
    """

    def __init__(self, loader: Loader, saver: Saver, sums: Mapping[str, float] | None = None) -> None:
        self._loader, self._saver = loader, saver
        before = dict.fromkeys(("seconds", "data_wait", "checkpoint_wait"), 0.0) | dict(sums or {})
        # Times are differences from now on: the window begins earlier by what the one before had measured.
        self._began = time.perf_counter() - before["seconds"]
        self._waited = loader.waited_seconds - before["data_wait"]
        self._saved = saver.waited_seconds - before["checkpoint_wait"]
        self.updates = self.source_tokens = self.target_tokens = self.sentences = 0
        self.skipped = self.spikes = self.rejected = self.out_of_memory = 0
        self.loss = self.nll = self.alignment = self.aligned = self.grad_norm = 0.0
        self.rate = 0.0
        """Learning rate of the latest update."""
        for name in _SUMS:
            setattr(self, name, before.get(name, getattr(self, name)))

    def sums(self) -> dict[str, float]:
        """Return the sums with which another window, such as that of a resumed run, continues this one."""
        waits = {"data_wait": self._data_wait, "checkpoint_wait": self._checkpoint_wait}
        return {**{name: getattr(self, name) for name in _SUMS}, "seconds": self.seconds, **waits}

    def add(self, result: UpdateResult, rate: float) -> None:
        """Add one update, tried at learning rate `rate`; a skipped one only adds to the count of its kind."""
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
        self.alignment += result.alignment
        self.aligned += result.aligned
        self.grad_norm += result.grad_norm

    def leave_out(self, seconds: float) -> None:
        """Exclude the latest `seconds`, which were not training."""
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

    def record(self, p: Progress) -> dict[str, float | int | None]:
        """Return the values of one `train` record; means are over the updates of the window that were taken."""
        n = self.updates
        nll = self.nll / self.target_tokens if n else None
        return {
            "epoch": p.epoch,
            "loss": self.loss / n if n else None,
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)) if nll is not None else None,  # exp(710) overflows
            "alignment_loss": self.alignment / self.aligned if self.aligned else None,
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

    def line(self, p: Progress, share: float | None, depth: DepthReporter) -> str:
        """Return one line for the log; `share` of the training is done."""
        v = self.record(p)
        # The record counts finished epochs; the epoch of the latest update is the last of them where it has just ended.
        epoch = max(1, p.epoch + (p.batch > 0))
        if not self.updates:
            return f"update {p.update}  epoch {epoch}  all {self.tried} updates skipped"
        aligned = f"alignment {v['alignment_loss']:.3f}  " if self.aligned else ""
        return (
            f"update {p.update}  epoch {epoch}  loss {v['loss']:.4f}  perplexity {v['perplexity']:.2f}  {aligned}"
            f"rate {self.rate:.2e}  gradient {v['grad_norm']:.2f}  {depth.shown_r}"
            f"{self.tokens_per_second:,.0f} target tokens/s  data wait {100 * float(v['data_wait_share'] or 0):.1f} %  "
            f"{duration(p.seconds)}  {time_left(p, share)} left"
        )
