"""Panels of figures, made from the records of runs: lines over training, lines over depth, heat maps.

Figures over depth: gradients and updates by layer, then variance, ratios and attention by sub-layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ziggurat.inspect.report.figure import Figure, Heat, Panel, Row, Series, Table, described
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.train.records import Record

STACKS = {"encoder": "encoder", "decoder": "decoder"}
"""STACKS maps stacks to the titles of their panels."""

_POINTS = 400  # maximum number of points of a line, since more would be invisible and make the page large


def finite(values: Iterable[Any]) -> Row:
    """Return the values, with None for missing or non-finite ones."""
    return tuple(float(v) if v is not None and math.isfinite(v) else None for v in values)


# Lines


def line_over_training(label: str, run: int, x: Sequence[float], y: Row, variant: int = 0, name: str = "") -> Series:
    """Return a line over training. In a long line, each point is the mean of several, drawn at the last of them."""
    each = math.ceil(len(x) / _POINTS)  # 0 without points
    if each > 1:
        bins = [slice(i, i + each) for i in range(0, len(x), each)]
        x, y = [x[b][-1] for b in bins], tuple(_mean(y[b]) for b in bins)
    return Series(label, tuple(x), y, run, variant, name=name)


def _mean(values: Row) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def lines_of_records(run: ReportRun, path: Sequence[str | int], *, what: str = "", variant: int = 0) -> list[Series]:
    """Return one number of the depth records as a line over training; empty if no record has it.

    Args:
        run: the run with the records.
        path: keys and indices that lead to the number in a record's values.
        what: text after the run's name in the label.
        variant: number of the line among those of the run in a panel.
    """
    x, y = [], []
    for record in run.depth:
        value: Any = record.values
        try:
            for step in path:
                value = value[step]
        except LookupError:
            continue
        x.append(record.update)
        y.append(value)
    label = f"{run.name}, {what}" if what else run.name
    line = line_over_training(label, run.colour, x, finite(y), variant, run.name)
    return [line] if any(v is not None for v in line.y) else []


def line_of_record(
    run: ReportRun, record: Record, values: Sequence[Any], *, first: int = 0, what: str = "", variant: int = 0
) -> Series:
    """Return values of one record as a line from position `first`; `what` follows the run's name in the label."""
    label = ", ".join(part for part in (run.name, what, when(record)) if part)
    x = tuple(float(place) for place in range(first, first + len(values)))
    return Series(label, x, finite(values), run.colour, variant, name=run.name, update=record.update)


def moments(run: ReportRun, key: str) -> list[Record]:
    """Return the first and the last record with the measure `key`: two, one if they are the same, or none."""
    records = [record for record in run.depth if record.values.get(key)]
    return records[:1] + records[-1:] if len(records) > 1 else records


def when(record: Record) -> str:
    """Return a description of the time of a record."""
    return f"update {record.update:,}" if record.update else "before training"


def part_of(record: Record, key: str, part: str) -> list[Any] | None:
    """Return a measure for one part: a stack or a sub-layer type, '' for a measure without parts; None if empty."""
    values = record.values[key]
    return (values.get(part) if part else values) or None


def training_panel(
    title: str,
    y_label: str,
    lines: Sequence[Series],
    *,
    x_label: str = "update",
    log_y: bool = False,
    perplexity: bool = False,
) -> tuple[Panel, ...]:
    """Return a panel of lines over training, by update unless `x_label` differs; empty if there are none."""
    return (Panel(title, x_label, y_label, tuple(lines), log_y=log_y, perplexity=perplexity),) if lines else ()


def depth_panels(
    runs: Sequence[ReportRun],
    key: str,
    parts: Mapping[str, str],
    y_label: str,
    *,
    log_y: bool = False,
    bottom: int = 1,
    skip: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each part of the measure `key`, with its values over depth.

    The last record is solid, the first dashed.

    Args:
        runs: the runs to draw.
        key: name of the measure in the records.
        parts: part -> title of its panel; '' stands for a measure without parts.
        y_label: name of the measure.
        log_y: whether its axis is logarithmic.
        bottom: depth of the lowest value.
        skip: number of the lowest values to leave out.
    """
    panels = []
    for part, title in parts.items():
        series = []
        for run in runs:
            for variant, record in enumerate(reversed(moments(run, key))):
                if (values := part_of(record, key, part)) and len(values) > skip:
                    series.append(line_of_record(run, record, values[skip:], first=bottom + skip, variant=variant))
        if any(y is not None for line in series for y in line.y):
            panels.append(Panel(title, "layer", y_label, tuple(series), log_y=log_y))
    return tuple(panels)


# Heat maps


class RecordMap(NamedTuple):
    """A heat map before drawing: its title, its rows (lowest first), its run and update."""

    title: str
    rows: tuple[Row, ...]
    run: str
    update: int | None


def square(rows: Sequence[Sequence[float | None]]) -> tuple[Row, ...]:
    """Return rows padded with None to the length of the longest."""
    width = max((len(row) for row in rows), default=0)
    return tuple(finite(row) + (None,) * (width - len(row)) for row in rows)


def stack_maps(runs: Sequence[ReportRun], key: str, cells: Callable[[list[Any]], tuple[Row, ...]]) -> list[RecordMap]:
    """Return the matrix `key` of each stack at the last record of each run; `cells` makes its rows."""
    return [
        RecordMap(f"{run.name}, {stack}", cells(values), run.name, record.update)
        for run in runs
        for record in moments(run, key)[-1:]
        for stack in STACKS
        if (values := part_of(record, key, stack))
    ]


def heat_panels(
    maps: Sequence[RecordMap],
    *,
    x_label: str | Sequence[str],
    y_label: str,
    unit: str,
    columns: Sequence[Sequence[str]] | None = None,
    first_row: int = 0,
) -> tuple[Panel, ...]:
    """Return a panel for each map, all on one colour scale.

    Args:
        maps: the maps.
        x_label: name of the columns; a list if the maps differ.
        y_label: name of the rows.
        unit: name of the values.
        columns: labels below the columns of each map; default: numbers from 0.
        first_row: number of the lowest row.
    """
    known = [value for one in maps for row in one.rows for value in row if value is not None]
    if not known:
        return ()
    low, high = min(known), max(known)
    high = high if high > low else low + 1.0  # a map of equal values still needs a scale
    panels = []
    for i, (title, rows, name, update) in enumerate(maps):
        below = columns[i] if columns is not None else [str(c) for c in range(len(rows[0]))]
        beside = tuple(str(r) for r in range(first_row, first_row + len(rows)))
        label = x_label if isinstance(x_label, str) else x_label[i]
        heat = Heat(rows, tuple(below), beside, unit, low, high, name, update)
        panels.append(Panel(title, label, y_label, heat=heat))
    return tuple(panels)


# Layers

_GRADIENTS = "Gradients over depth"
_MOMENTS = "Dashed: the first record; solid: the last."


def gradient_profile(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the gradient's norm by layer (Zhang et al. 2019, figure 1)."""
    caption = (
        f"Norm of the gradient of all parameters of a layer, {_over_batches(runs)}; layer 1 is the lowest. A "
        "line that falls by orders of magnitude towards layer 1 means that lower layers learn nothing. As figure "
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
    """Return a description of how many batches the records' gradient norms are averaged over."""
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
        "healthy stack it rises early and then falls; if it stays low and flat, the lower layers get no gradient. "
        "Compare figures 1 to 3 of Bapna et al. 2018, which show the encoder."
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
    # A figure of the loss alone would not show the dependence on the source.
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
"""SUB_LAYERS maps the type of a sub-layer in the records to its name in figures."""

_SUB_LAYER_SECTION = "Sub-layers"
_MEASURES = {"beta_ln": "β_LN", "beta_rc": "β_RC", "beta": "β", "variance": "Var(r)"}


def variance(runs: Sequence[ReportRun]) -> Figure | None:
    """Return Var(r) by layer, with the table of Zhang et al. 2019 (table 1) for all four measures."""
    caption = (
        "Var(r): variance over the features of r, the sum of a sub-layer's input and its branch, mean over tokens. "
        "Layer normalisation shrinks the gradient by its root, so a value well above 1 in every sub-layer means "
        "that the gradient vanishes over depth. The table has means over layers, as table 1 of Zhang et al. 2019, with "
        "β_LN = ‖δ_r‖/‖δ_o‖, β_RC = ‖δ_z‖/‖δ_r‖ and β = β_LN·β_RC per layer (δ: gradient at the sum r, output o, "
        "input z). "
        f"{_MOMENTS}"
    )
    panels = depth_panels(runs, "variance", SUB_LAYERS, "Var(r)")
    return described(
        "variance", _SUB_LAYER_SECTION, "Variance of residual sums", caption, panels, sub_layer_table(runs)
    )


def backward_ratios(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return figures for beta_LN, beta_RC and beta by layer (the rows of table 1 of Zhang et al. 2019)."""
    meaning = {
        "beta_ln": "β_LN = ‖δ_r‖/‖δ_o‖: the factor by which the layer normalisation scales the gradient's norm.",
        "beta_rc": "β_RC = ‖δ_z‖/‖δ_r‖: the factor of the residual connection, skip and branch together.",
        "beta": "β = ‖δ_z‖/‖δ_o‖: the factor of the whole sub-layer; if below 1 everywhere, the gradient vanishes.",
    }
    figures = []
    for key, text in meaning.items():
        title = f"{_MEASURES[key]} by layer"
        panels = depth_panels(runs, key, SUB_LAYERS, _MEASURES[key])
        figures.append(described(key.replace("_", "-"), _SUB_LAYER_SECTION, title, f"{text} {_MOMENTS}", panels))
    return [figure for figure in figures if figure is not None]


def sub_layer_table(runs: Sequence[ReportRun]) -> Table | None:
    """Return the means over layers of beta_LN, beta_RC, beta and Var(r) by sub-layer type at the first and last record.

    Types that no run has are left out; a dash stands for a missing or non-finite value.
    """
    rows: list[list[str]] = []
    for run in runs:
        for key, name in _MEASURES.items():
            for record in moments(run, key):
                means = [_mean_of_layers(part_of(record, key, part)) for part in SUB_LAYERS]
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


def _mean_of_layers(values: Sequence[float | None] | None) -> str:
    known = [v for v in finite(values or ()) if v is not None]
    return f"{math.fsum(known) / len(known):.2f}" if known else "–"
