"""Figures over depth: gradients and updates by layer, then variance, ratios and attention by sub-layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ziggurat.inspect.report.figure import Figure, Panel, Table, described
from ziggurat.inspect.report.panels import (
    STACKS,
    depth_panels,
    finite,
    heat_panels,
    lines_of_records,
    moments,
    part_of,
    square,
    stack_maps,
    training_panel,
    when,
)
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.train.diagnosis.records import Record

# Layers

_GRADIENTS = "Gradients over depth"
_MOMENTS = "Dashed: the first record; solid: the last."


def gradient_profile(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the gradient's norm by layer (Zhang et al. 2019, figure 1)."""
    caption = (
        f"Norm of the gradient of all parameters of a layer, {_over_batches(runs)}; layer 1 is the lowest. A "
        "line that falls by orders of magnitude towards layer 1 is a stack whose lower layers learn nothing. As figure "
        f"1 of Zhang et al. 2019. {_MOMENTS}"
    )
    panels = depth_panels(runs, "gradient_norm", STACKS, "gradient norm", log_y=True)
    return described("gradient-profile", _GRADIENTS, "Gradient norm by layer", caption, panels)


def scaled_gradient_profile(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the norm of an update over its learning rate, by layer: the gradient as the optimiser scales it."""
    caption = (
        "Norm of a real update of a layer's parameters over the learning rate: the differences between layers that "
        f"remain after the optimiser's scaling, clipping and weight decay. {_MOMENTS}"
    )
    panels = depth_panels(runs, "scaled_gradient_norm", STACKS, "update / rate", log_y=True)
    return described("scaled-gradient-profile", _GRADIENTS, "Updates by layer", caption, panels)


def first_and_last_layer(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the gradient's norm of the first and the last layer over training (Zhang et al. 2019, figure 4)."""
    caption = (
        "Norm of the gradient of the first (solid) and the last layer (dashed) of each stack over training, "
        f"{_over_batches(runs)}. As figure 4 of Zhang et al. 2019, whose lines are means over 50 training batches."
    )
    panels: list[Panel] = []
    for stack, title in STACKS.items():
        lines = []
        for run in runs:
            for variant, (what, layer) in enumerate((("first layer", 0), ("last layer", -1))):
                lines += lines_of_records(run, ("gradient_norm", stack, layer), what=what, variant=variant)
        panels += training_panel(title, "gradient norm", lines, log_y=True)
    return described("first-and-last-layer", _GRADIENTS, "First and last layer over training", caption, tuple(panels))


def _over_batches(runs: Sequence[ReportRun]) -> str:
    """Return over how many batches the records' gradient norms are means, in words."""
    of_run = {
        run.name: sorted({int(record.values.get("gradient_batches", 1)) for record in run.depth if _has_norms(record)})
        for run in runs
    }
    counts = sorted({count for found in of_run.values() for count in found})
    if counts in ([], [1]):
        return "for one fixed batch of real data"
    if len(counts) == 1:
        return f"mean over {counts[0]:,} fixed batches of real data"
    listed = "; ".join(f"{name}: {' and '.join(f'{n:,}' for n in found)}" for name, found in of_run.items() if found)
    return f"mean over fixed batches of real data ({listed})"


def _has_norms(record: Record) -> bool:
    return bool(record.values.get("gradient_norm"))


def gradient_ratio(runs: Sequence[ReportRun]) -> Figure | None:
    """Return r_t over training (Bapna et al. 2018, figures 1 to 3)."""
    caption = (
        "r_t: norm of the loss's gradient at the output of the first layer over that at the output of the last. In a "
        "healthy stack it rises early and then falls; flat and small, the lower layers get no gradient. As figures 1 "
        "to 3 of Bapna et al. 2018, which have the encoder."
    )
    panels: list[Panel] = []
    for stack, title in STACKS.items():
        lines = [line for run in runs for line in lines_of_records(run, ("r", stack))]
        panels += training_panel(title, "r_t", lines, log_y=True)
    return described("gradient-ratio", _GRADIENTS, "Gradient ratio r_t over training", caption, tuple(panels))


def update_ratio(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the size of an update relative to the weights, by layer."""
    caption = f"Norm of an update of a layer's parameters over the norm of the parameters. {_MOMENTS}"
    panels = depth_panels(runs, "update_ratio", STACKS, "update / weights", log_y=True)
    return described("update-ratio", _GRADIENTS, "Update-to-weight ratio by layer", caption, panels)


def output_change(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the change of each layer's output after a small change of all parameters (Liu, Liu, Gao et al. 2020)."""
    caption = (
        "Relative change of each layer's output when every matrix of the layers is moved by 1 % of its length. The "
        "steeper it grows with depth, the more a stack amplifies what an update does (Liu, Liu, Gao et al. 2020). "
        f"{_MOMENTS}"
    )
    panels = depth_panels(runs, "output_change", STACKS, "relative change", log_y=True)
    return described("output-change", _GRADIENTS, "Output change by layer", caption, panels)


def source_dependence(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the loss of the probe batch over training, and its rise when the sources are exchanged."""
    caption = (
        "Loss of one fixed batch, and how much it rises when its sentences are given each other's sources. A decoder "
        "that learns as a language model has a falling loss and no dependence: its encoder is not used."
    )
    panels: list[Panel] = []
    wanted = (
        ("nll", "loss", "nats per token"),
        ("source_dependence", "dependence on the source", "added nats per token"),
    )
    for key, title, unit in wanted:
        lines = [line for run in runs for line in lines_of_records(run, (key,))]
        panels += training_panel(title, unit, lines)
    # A figure of the loss alone would not be about the source.
    shown = tuple(panels) if any(panel.title != "loss" for panel in panels) else ()
    return described("source-dependence", _GRADIENTS, "Dependence on the source", caption, shown)


# Sub-layers

SUB_LAYERS = {
    "encoder.self_attn": "encoder self-attention",
    "encoder.ffn": "encoder FFN",
    "decoder.self_attn": "decoder self-attention",
    "decoder.cross_attn": "decoder cross-attention",
    "decoder.merged_attn": "decoder merged attention",
    "decoder.ffn": "decoder FFN",
}
"""Type of sub-layer in the records -> its name in figures."""

_SUB_LAYER_SECTION = "Sub-layers"
_MEASURES = {"beta_ln": "β_LN", "beta_rc": "β_RC", "beta": "β", "variance": "Var(r)"}


def variance(runs: Sequence[ReportRun]) -> Figure | None:
    """Return Var(r) by layer, with the table of Zhang et al. 2019 (table 1) for all four measures."""
    caption = (
        "Var(r): variance over the features of r, the sum of a sub-layer's input and its branch, mean over tokens. "
        "Layer normalisation shrinks the gradient by its root, so a value well above 1 in every sub-layer is a "
        "gradient that vanishes over depth. The table has means over layers, as table 1 of Zhang et al. 2019, with "
        "β_LN = ‖δ_r‖/‖δ_o‖, β_RC = ‖δ_z‖/‖δ_r‖ and β = β_LN·β_RC per layer (δ: gradient at the sum r, output o, "
        "input z). "
        f"{_MOMENTS}"
    )
    panels = depth_panels(runs, "variance", SUB_LAYERS, "Var(r)")
    return described(
        "variance", _SUB_LAYER_SECTION, "Variance of residual sums", caption, panels, sub_layer_table(runs)
    )


def backward_ratios(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return a figure for each of beta_LN, beta_RC and beta by layer (the rows of table 1 of Zhang et al. 2019)."""
    meaning = {
        "beta_ln": "β_LN = ‖δ_r‖/‖δ_o‖: the factor by which the layer normalisation scales the gradient's norm.",
        "beta_rc": "β_RC = ‖δ_z‖/‖δ_r‖: the factor of the residual connection, skip and branch together.",
        "beta": "β = ‖δ_z‖/‖δ_o‖: the factor of the whole sub-layer; below 1 in all sub-layers, the gradient vanishes.",
    }
    figures = []
    for key, text in meaning.items():
        title = f"{_MEASURES[key]} by layer"
        panels = depth_panels(runs, key, SUB_LAYERS, _MEASURES[key])
        figures.append(described(key.replace("_", "-"), _SUB_LAYER_SECTION, title, f"{text} {_MOMENTS}", panels))
    return [figure for figure in figures if figure is not None]


def sub_layer_table(runs: Sequence[ReportRun]) -> Table | None:
    """Return the means over layers of beta_LN, beta_RC, beta and Var(r) by sub-layer type at the first and last record.

    Types that no run has are left out; a dash stands where there is no finite value.
    """
    rows: list[list[str]] = []
    for run in runs:
        for key, name in _MEASURES.items():
            for record in moments(run, key):
                means = [_mean(part_of(record, key, part)) for part in SUB_LAYERS]
                rows.append([run.name, when(record), name, *means])
    fixed = 3
    used = [i for i in range(fixed, fixed + len(SUB_LAYERS)) if any(row[i] != "–" for row in rows)]
    if not used:
        return None
    header = ["run", "record", "mean over layers", *SUB_LAYERS.values()]
    columns = [*range(fixed), *used]
    return Table(tuple(header[i] for i in columns), tuple(tuple(row[i] for i in columns) for row in rows))


def residual_dependency(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the weight of each earlier branch in the state after each sub-layer (Liu, Liu, Gao et al. 2020)."""
    caption = (
        "Share of each earlier branch (column; 0 is the stack's input) in the state after a sub-layer (row), at the "
        "last record; squares of a row sum to 1. Rows that are bright near the diagonal only lean on their latest "
        "branches, which amplifies every change. As figure 4 of Liu, Liu, Gao et al. 2020 (ADMIN)."
    )
    maps = stack_maps(runs, "residual_dependency", square)
    panels = heat_panels(maps, x_label="branch", y_label="sub-layer", unit="share", first_row=1)
    return described("residual-dependency", _SUB_LAYER_SECTION, "Residual dependency", caption, panels)


def attention_entropy(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the entropy of attention weights by layer."""
    caption = (
        "Entropy of the attention weights in nats, mean over heads and queries: 0 is attention to a single position. "
        f"{_MOMENTS}"
    )
    parts = {part: title for part, title in SUB_LAYERS.items() if part.endswith("attn")}
    panels = depth_panels(runs, "attention_entropy", parts, "nats")
    return described("attention-entropy", _SUB_LAYER_SECTION, "Entropy of attention", caption, panels)


def _mean(values: Sequence[float | None] | None) -> str:
    known = [v for v in finite(values or ()) if v is not None]
    return f"{math.fsum(known) / len(known):.2f}" if known else "–"
