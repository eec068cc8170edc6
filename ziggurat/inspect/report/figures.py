"""All figures of a report; those of training are made here: learning curves, scores, speed, gradient norm.

Those of methods against depth are in against_depth, figures over the layers of a run in figures_layers, those of
connections and similarities between layers in figures_connections, those of what each layer is worth in figures_worth.
Each function makes one figure from the records of all runs, or None where no run has the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.inspect.report import figures_connections as connections
from ziggurat.inspect.report import figures_worth as worth
from ziggurat.inspect.report import panels as layers
from ziggurat.inspect.report.against_depth import against_depth
from ziggurat.inspect.report.figure import Figure, Series, described
from ziggurat.inspect.report.panels import finite, line_over_training, training_panel
from ziggurat.inspect.report.runs import MAX_DRAWN, ReportRun

_LEARNING, _SPEED = "Learning", "Speed and gradients"
_NATS = "nats per token"


def figures_of(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return every figure that at least one of the runs has data for, in the order of the report.

    A run without the data is left out of a figure; its colour (`ReportRun.colour`) is the same in all figures but the
    one against depth, whose lines are methods. It is the only one of more than MAX_DRAWN runs.
    """
    of_methods = against_depth(runs)
    if len(runs) > MAX_DRAWN:
        return [of_methods] if of_methods is not None else []
    figures = [
        of_methods,
        learning_curves(runs),
        scores(runs),
        throughput(runs),
        gradient_norm(runs),
        layers.gradient_profile(runs),
        layers.first_and_last_layer(runs),
        layers.gradient_ratio(runs),
        layers.source_dependence(runs),
        layers.scaled_gradient_profile(runs),
        layers.update_ratio(runs),
        layers.output_change(runs),
        layers.variance(runs),
        *layers.backward_ratios(runs),
        layers.residual_dependency(runs),
        layers.attention_entropy(runs),
        connections.history_weights(runs),
        connections.transparent_weights(runs),
        connections.similarity_profiles(runs),
        connections.similarity_map(runs),
        *worth.figures_of_worth(runs),
    ]
    return [figure for figure in figures if figure is not None]


def learning_curves(runs: Sequence[ReportRun]) -> Figure | None:
    """Return training and validation loss by update (Liu, Duh et al. 2020, figure 2)."""
    caption = (
        "Cross-entropy per target token, without label smoothing, in nats (left) and as perplexity (right). Training: "
        "mean since the record before, with dropout. Validation: the whole validation set. As figure 2 of Liu, "
        "Duh et al. 2020."
    )
    panels = (
        *training_panel("training", _NATS, _lines(runs, "train", "nll"), perplexity=True),
        *training_panel("validation", _NATS, _lines(runs, "validation", "nll"), perplexity=True),
    )
    return described("learning-curves", _LEARNING, "Learning curves", caption, panels)


def scores(runs: Sequence[ReportRun]) -> Figure | None:
    """Return BLEU and chrF of the validation set by update."""
    caption = (
        "sacreBLEU's scores of the decoded validation set. They choose a checkpoint; systems are compared on test sets."
    )
    panels = (
        *training_panel("BLEU", "BLEU", _lines(runs, "validation", "bleu")),
        *training_panel("chrF", "chrF", _lines(runs, "validation", "chrf")),
    )
    return described("scores", _LEARNING, "Scores on the validation set", caption, panels)


def throughput(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the speed of training by update, and the loss over time."""
    caption = (
        "Speed: target tokens per second of training, without validation. Loss by time: training loss over the time "
        "since the run began, with validation and checkpoints; a method with slower updates has to win here."
    )
    panels = training_panel("speed", "target tokens/s", _lines(runs, "train", "target_tokens_per_second"))
    if panels:
        longest = max((record["seconds"] for run in runs for record in run.train if "seconds" in record), default=0.0)
        unit, seconds = ("hours", 3600.0) if longest >= 2 * 3600 else ("minutes", 60.0)
        by_time = _lines(runs, "train", "nll", seconds=seconds)
        panels += training_panel("loss by time", _NATS, by_time, x_label=unit, perplexity=True)
    return described("throughput", _SPEED, "Speed", caption, panels)


def gradient_norm(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the norm of the whole gradient, and the learning rate, by update."""
    caption = (
        "Norm of the gradient of all parameters before clipping (mean since the record before), and the learning rate "
        "of the same updates. A gap is a record without a finite value."
    )
    panels = training_panel("gradient norm", "norm", _lines(runs, "train", "grad_norm"), log_y=True)
    if panels:
        panels += training_panel("learning rate", "rate", _lines(runs, "train", "learning_rate"))
    return described("gradient-norm", _SPEED, "Gradient norm over training", caption, panels)


def _lines(runs: Sequence[ReportRun], kind: str, key: str, *, seconds: float | None = None) -> tuple[Series, ...]:
    """Return a line for each run that has `key` in its `train` or `validation` records, by update or time."""
    lines = []
    for run in runs:
        known = [record for record in (run.train if kind == "train" else run.validations) if key in record]
        x = [record["update"] if seconds is None else record["seconds"] / seconds for record in known]
        lines += [line_over_training(run.name, run.colour, x, finite(record[key] for record in known))] if known else []
    return tuple(lines)
