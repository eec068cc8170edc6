"""Figures of how training went: learning curves, scores, speed, the gradient's norm."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.curves import finite, over_training
from ziggurat.report.figure import Figure, Panel, Series
from ziggurat.report.runs import ReportRun
from ziggurat.report.words import described

__all__ = ["gradient_norm", "learning_curves", "scores", "throughput"]

_LEARNING, _SPEED = "Learning", "Speed and gradients"
_NATS = "nats per token"


def learning_curves(runs: Sequence[ReportRun]) -> Figure | None:
    """Return training and validation loss by update (Liu, Duh et al. 2020, figure 2)."""
    caption = (
        "Cross-entropy per target token, without label smoothing, in nats (left) and as perplexity (right). Training: "
        "mean since the record before, with dropout. Validation: the whole validation set. As figure 2 of Liu, "
        "Duh et al. 2020."
    )
    panels = (
        *_panel("training", _NATS, _lines(runs, "train", "nll"), perplexity=True),
        *_panel("validation", _NATS, _lines(runs, "validation", "nll"), perplexity=True),
    )
    return described("learning-curves", _LEARNING, "Learning curves", caption, panels)


def scores(runs: Sequence[ReportRun]) -> Figure | None:
    """Return BLEU and chrF of the validation set by update."""
    caption = (
        "sacreBLEU's scores of the decoded validation set. They choose a checkpoint; systems are compared on test sets."
    )
    panels = (
        *_panel("BLEU", "BLEU", _lines(runs, "validation", "bleu")),
        *_panel("chrF", "chrF", _lines(runs, "validation", "chrf")),
    )
    return described("scores", _LEARNING, "Scores on the validation set", caption, panels)


def throughput(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the speed of training by update, and the loss by time."""
    caption = (
        "Speed: target tokens per second of training, validation left out. Loss by time: training loss by the time "
        "since the run began, validation and checkpoints included; a method whose updates cost more has to win here."
    )
    panels = _panel("speed", "target tokens/s", _lines(runs, "train", "target_tokens_per_second"))
    if panels:
        longest = max((record["seconds"] for run in runs for record in run.train if "seconds" in record), default=0.0)
        unit, seconds = ("hours", 3600.0) if longest >= 2 * 3600 else ("minutes", 60.0)
        by_time = _lines(runs, "train", "nll", seconds=seconds)
        panels += _panel("loss by time", _NATS, by_time, x_label=unit, perplexity=True)
    return described("throughput", _SPEED, "Speed", caption, panels)


def gradient_norm(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the norm of the whole gradient, and the learning rate, by update."""
    caption = (
        "Norm of the gradient of all parameters before clipping (mean since the record before), and the learning rate "
        "that met it. A gap is a record without a finite value."
    )
    panels = _panel("gradient norm", "norm", _lines(runs, "train", "grad_norm"), log_y=True)
    if panels:
        panels += _panel("learning rate", "rate", _lines(runs, "train", "learning_rate"))
    return described("gradient-norm", _SPEED, "Gradient norm over training", caption, panels)


def _panel(
    title: str,
    y_label: str,
    series: tuple[Series, ...],
    *,
    x_label: str = "update",
    log_y: bool = False,
    perplexity: bool = False,
) -> tuple[Panel, ...]:
    """Return a panel of these lines, or nothing where there are none."""
    return (Panel(title, x_label, y_label, series, log_y=log_y, perplexity=perplexity),) if series else ()


def _lines(runs: Sequence[ReportRun], kind: str, key: str, *, seconds: float | None = None) -> tuple[Series, ...]:
    """Return a value of the `train` or `validation` records of each run that has it, by update or by time."""
    lines = []
    for run in runs:
        known = [record for record in (run.train if kind == "train" else run.validations) if key in record]
        x = [record["update"] if seconds is None else record["seconds"] / seconds for record in known]
        lines += [over_training(run.name, run.colour, x, finite(record[key] for record in known))] if known else []
    return tuple(lines)
