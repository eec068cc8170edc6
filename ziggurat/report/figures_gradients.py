"""Figures of gradients over depth: per layer, first against last layer, r_t, and what an update does to the weights."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.curves import STACKS, profiles, series_of_records
from ziggurat.report.figure import Figure, Panel
from ziggurat.report.runs import ReportRun
from ziggurat.report.words import described

__all__ = [
    "first_and_last_layer",
    "gradient_profile",
    "gradient_ratio",
    "output_change",
    "scaled_gradient_profile",
    "source_dependence",
    "update_ratio",
]

_SECTION = "Gradients over depth"
_MOMENTS = "Dashed: the first record; solid: the last."


def gradient_profile(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the gradient's norm by layer (Zhang et al. 2019, figure 1)."""
    caption = (
        "Norm of the gradient of all parameters of a layer, for one fixed batch of real data; layer 1 is the lowest. A "
        "line that falls by orders of magnitude towards layer 1 is a stack whose lower layers learn nothing. As figure "
        f"1 of Zhang et al. 2019. {_MOMENTS}"
    )
    panels = profiles(runs, "gradient_norm", STACKS, "gradient norm", log_y=True)
    return described("gradient-profile", _SECTION, "Gradient norm by layer", caption, panels)


def scaled_gradient_profile(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the norm of an update over its learning rate, by layer: the gradient as the optimiser scales it."""
    caption = (
        "Norm of a real update of a layer's parameters over the learning rate: what is left of the differences between "
        f"layers after the optimiser's scaling, clipping and weight decay. {_MOMENTS}"
    )
    panels = profiles(runs, "scaled_gradient_norm", STACKS, "update / rate", log_y=True)
    return described("scaled-gradient-profile", _SECTION, "Updates by layer", caption, panels)


def first_and_last_layer(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the gradient's norm of the first and the last layer over training (Zhang et al. 2019, figure 4)."""
    caption = (
        "Norm of the gradient of the first (solid) and the last layer (dashed) of each stack over training, for one "
        "fixed batch. As figure 4 of Zhang et al. 2019, whose lines are means over 50 training batches."
    )
    panels = []
    for stack, title in STACKS.items():
        lines = []
        for run in runs:
            for variant, (what, layer) in enumerate((("first layer", 0), ("last layer", -1))):
                lines += series_of_records(run, ("gradient_norm", stack, layer), what=what, variant=variant)
        if lines:
            panels.append(Panel(title, "update", "gradient norm", tuple(lines), log_y=True))
    return described("first-and-last-layer", _SECTION, "First and last layer over training", caption, tuple(panels))


def gradient_ratio(runs: Sequence[ReportRun]) -> Figure | None:
    """Return r_t over training (Bapna et al. 2018, figures 1 to 3)."""
    caption = (
        "r_t: norm of the loss's gradient at the output of the first layer over that at the output of the last. In a "
        "healthy stack it rises early and then falls; flat and small, the lower layers get no gradient. As figures 1 "
        "to 3 of Bapna et al. 2018, which have the encoder."
    )
    panels = []
    for stack, title in STACKS.items():
        lines = [line for run in runs for line in series_of_records(run, ("r", stack))]
        if lines:
            panels.append(Panel(title, "update", "r_t", tuple(lines), log_y=True))
    return described("gradient-ratio", _SECTION, "Gradient ratio r_t over training", caption, tuple(panels))


def update_ratio(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the size of an update relative to the weights, by layer."""
    caption = f"Norm of an update of a layer's parameters over the norm of the parameters. {_MOMENTS}"
    panels = profiles(runs, "update_ratio", STACKS, "update / weights", log_y=True)
    return described("update-ratio", _SECTION, "Update-to-weight ratio by layer", caption, panels)


def output_change(runs: Sequence[ReportRun]) -> Figure | None:
    """Return how much each layer's output changes by a small change of all parameters (Liu, Liu, Gao et al. 2020)."""
    caption = (
        "Relative change of each layer's output when every matrix of the layers is moved by 1 % of its length. The "
        "steeper it grows with depth, the more a stack amplifies what an update does (Liu, Liu, Gao et al. 2020). "
        f"{_MOMENTS}"
    )
    panels = profiles(runs, "output_change", STACKS, "relative change", log_y=True)
    return described("output-change", _SECTION, "Output change by layer", caption, panels)


def source_dependence(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the probe batch's loss, and what exchanging its sources adds to it, over training."""
    caption = (
        "Loss of one fixed batch, and how much it rises when its sentences are given each other's sources. A decoder "
        "that learns as a language model has a falling loss and no dependence: its encoder is not used."
    )
    panels = []
    wanted = (
        ("nll", "loss", "nats per token"),
        ("source_dependence", "dependence on the source", "added nats per token"),
    )
    for key, title, unit in wanted:
        lines = [line for run in runs for line in series_of_records(run, (key,))]
        if lines:
            panels.append(Panel(title, "update", unit, tuple(lines)))
    shown = tuple(panels) if any(panel.title != "loss" for panel in panels) else ()
    return described("source-dependence", _SECTION, "Dependence on the source", caption, shown)
