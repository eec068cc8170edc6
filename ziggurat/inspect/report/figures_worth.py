"""Figures of the worth of each layer, for runs measured by `ziggurat diagnose --layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ziggurat.inspect.report.figure import Figure, Panel, Row, Series, Table, described
from ziggurat.inspect.report.panels import (
    STACKS,
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

_WORTH = "What each layer is worth"


def figures_of_worth(runs: Sequence[ReportRun]) -> list[Figure | None]:
    """Return these figures in the order of the report; None where no run was measured so."""
    return [pruning_curve(runs), *(pair_map(runs, key) for key in _MAPS), logit_lens(runs)]


def pruning_curve(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the loss, and BLEU where it was measured, without the layers worth least, with the effective depths."""
    caption = (
        "Rise of the loss of one fixed batch, and BLEU of sentences of the dev set, without the n layers whose absence "
        "alone costs least, at the last record. The effective depth is the number of layers that are left when the "
        "loss has risen by 5 % of itself."
    )
    panels: list[Panel] = []
    for key, unit in (("pruning_curve", "added nats per token"), ("pruning_bleu", "BLEU")):
        for stack in STACKS:
            series = []
            for run in runs:
                for record in moments(run, key)[-1:]:
                    if values := part_of(record, key, stack):
                        x = tuple(float(n) for n in range(len(values)))
                        series.append(Series(f"{run.name}, {when(record)}", x, finite(values), run.colour))
            if series:
                title = f"{stack}, {'BLEU' if key == 'pruning_bleu' else 'loss'}"
                panels.append(Panel(title, "layers left out", unit, tuple(series)))
    lines = [line for run in runs for stack in STACKS for line in _depths_over_training(run, stack)]
    panels += training_panel("effective depth", "layers", lines)
    return described("pruning-curve", _WORTH, "Without the layers worth least", caption, tuple(panels), _depths(runs))


def _depths_over_training(run: ReportRun, stack: str) -> list[Series]:
    """Return the effective depth of a stack as a line over training; none of a single record, which the table has."""
    lines = lines_of_records(run, ("effective_depth", stack), what=stack, variant=int(stack == "decoder"))
    return [line for line in lines if len(line.x) > 1]


def _depths(runs: Sequence[ReportRun]) -> Table | None:
    rows = []
    for run in runs:
        for record in moments(run, "effective_depth"):
            depths = record.values["effective_depth"]
            known = ["–" if depths[stack] is None else f"{depths[stack]:.0f}" for stack in STACKS]
            shown = [f"{depth} of {record.layers[stack]}" for stack, depth in zip(STACKS, known, strict=True)]
            rows.append((run.name, when(record), *shown))
    return Table(("run", "record", *(f"effective depth, {stack}" for stack in STACKS)), tuple(rows)) if rows else None


class _Map(NamedTuple):
    """Heat maps of a measure of pairs of layers.

    Attributes:
        title, caption: of the figure.
        unit: of the values.
        columns: name of the columns.
        first: number of the first layer; 0 counts the stack's input.
    """

    title: str
    caption: str
    unit: str
    columns: str
    first: int


_MAPS: dict[str, _Map] = {
    "loss_without": _Map(
        "Loss without layers",
        "Rise of the loss, in nats per token, without layers i (row) to j (column), at the last record; the diagonal "
        "is of single layers. Blank: not measured, since only the nearest pairs of a deep stack are.",
        "nats",
        "last layer left out",
        1,
    ),
    "angular_distance": _Map(
        "Angular distance of layers",
        "Mean angle between the states of layers i and j, as a share of 180° (0: the stack's input), at the last "
        "record. Neighbours of little distance are layers that change little, and the first candidates for pruning.",
        "share of 180°",
        "layer",
        0,
    ),
    "causal_score": _Map(
        "Effect on later layers",
        "Relative change of what layer l (column) adds to the stream when layer s (row) is left out, at the last "
        "record. Rows that stay dark are layers on whose work nothing later builds.",
        "relative change",
        "later layer",
        1,
    ),
    "permutation_score": _Map(
        "Layers in each other's place",
        "Relative change of the loss with layers i and j in each other's place, at the last record. Blocks of small "
        "values are layers whose order hardly matters. Blank: not measured.",
        "relative change",
        "layer",
        1,
    ),
}
"""Measure -> its figure."""


def pair_map(runs: Sequence[ReportRun], key: str) -> Figure | None:
    """Return the heat maps of a measure of pairs of layers, a key of _MAPS."""
    made = _MAPS[key]
    maps = stack_maps(runs, key, square)
    columns = [[str(made.first + number) for number in range(len(rows[0]))] for _, rows in maps]
    panels = heat_panels(
        maps, x_label=made.columns, y_label="layer", unit=made.unit, columns=columns, first_row=made.first
    )
    return described(key.replace("_", "-"), _WORTH, made.title, made.caption, panels)


def logit_lens(runs: Sequence[ReportRun]) -> Figure | None:
    """Return what the decoder would give if it ended after each of its layers."""
    caption = (
        "The decoder ended after layer l (0: before the first): its loss, and the share of words that are those of the "
        "whole decoder, at the last record. Upper layers between which neither moves refine what is settled already."
    )
    panels: list[Panel] = []
    for part, unit in (("nll", "nats per token"), ("agreement", "share of words")):
        series = []
        for run in runs:
            for record in moments(run, "logit_lens")[-1:]:
                values: Row = finite(record.values["logit_lens"][part])
                x = tuple(float(layer) for layer in range(len(values)))
                series.append(Series(f"{run.name}, {when(record)}", x, values, run.colour))
        if series:
            panels.append(Panel("loss" if part == "nll" else "agreement", "decoder layer", unit, tuple(series)))
    return described("logit-lens", _WORTH, "The decoder ended early", caption, tuple(panels))
