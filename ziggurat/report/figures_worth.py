"""Figures of what each layer is worth, for runs measured by `ziggurat diagnose --layers`."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.figure import Figure, Panel, Row, Series, Table, described
from ziggurat.report.panels import (
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
from ziggurat.report.runs import ReportRun

__all__ = [
    "angular_distance",
    "causal_score",
    "figures_of_worth",
    "logit_lens",
    "loss_without",
    "permutation_score",
    "pruning_curve",
]

_WORTH = "What each layer is worth"


def figures_of_worth(runs: Sequence[ReportRun]) -> list[Figure | None]:
    """Return these figures in the order of the report; None where no run was measured so."""
    return [
        pruning_curve(runs),
        loss_without(runs),
        angular_distance(runs),
        causal_score(runs),
        permutation_score(runs),
        logit_lens(runs),
    ]


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
            shown = [f"{depths[stack] or 0:.0f} of {record.layers[stack]}" for stack in STACKS]
            rows.append((run.name, when(record), *shown))
    return Table(("run", "record", *(f"effective depth, {stack}" for stack in STACKS)), tuple(rows)) if rows else None


def loss_without(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the rise of the loss without layers i to j."""
    caption = (
        "Rise of the loss, in nats per token, without layers i (row) to j (column), at the last record; the diagonal "
        "is of single layers. Blank: not measured, since only the nearest pairs of a deep stack are."
    )
    return _maps(runs, "loss_without", "loss-without", "Loss without layers", caption, "nats", "last layer left out", 1)


def angular_distance(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the angles between the states of all layers."""
    caption = (
        "Mean angle between the states of layers i and j, as a share of 180° (0: the stack's input), at the last "
        "record. Neighbours of little distance are layers that change little, and the first candidates for pruning."
    )
    key = "angular_distance"
    return _maps(runs, key, "angular-distance", "Angular distance of layers", caption, "share of 180°", "layer", 0)


def causal_score(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the effect of leaving one layer out on what each later one adds."""
    caption = (
        "Relative change of what layer l (column) adds to the stream when layer s (row) is left out, at the last "
        "record. Rows that stay dark are layers on whose work nothing later builds."
    )
    key = "causal_score"
    return _maps(runs, key, "causal-score", "Effect on later layers", caption, "relative change", "later layer", 1)


def permutation_score(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the relative change of the loss with two layers in each other's place."""
    caption = (
        "Relative change of the loss with layers i and j in each other's place, at the last record. Blocks of small "
        "values are layers whose order hardly matters. Blank: not measured."
    )
    key, title = "permutation_score", "Layers in each other's place"
    return _maps(runs, key, "permutation-score", title, caption, "relative change", "layer", 1)


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


def _maps(
    runs: Sequence[ReportRun], key: str, name: str, title: str, caption: str, unit: str, x_label: str, first: int
) -> Figure | None:
    """Return the heat maps of a measure of pairs of layers, which are counted from `first`."""
    maps = stack_maps(runs, key, square)
    columns = [[str(first + number) for number in range(len(rows[0]))] for _, rows in maps]
    panels = heat_panels(maps, x_label=x_label, y_label="layer", unit=unit, columns=columns, first_row=first)
    return described(name, _WORTH, title, caption, panels)
