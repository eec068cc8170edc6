"""Figures of a training report: each function makes one from the records of all runs, None if no run has the data.

They show learning curves, scores, speed and gradient norm; learned connections and similarities between layers; and the
worth of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ziggurat.inspect.report import panels as layers
from ziggurat.inspect.report.against_depth import against_depth
from ziggurat.inspect.report.figure import Figure, Panel, Row, Series, Table, described
from ziggurat.inspect.report.panels import (
    STACKS,
    RecordMap,
    depth_panels,
    finite,
    heat_panels,
    line_of_record,
    line_over_training,
    lines_of_records,
    moments,
    part_of,
    square,
    stack_maps,
    training_panel,
    when,
)
from ziggurat.inspect.report.runs import MAX_DRAWN, ReportRun

_CONNECTIONS = "Connections across depth"
_FLOOR, _SHARE = 0.1, 0.05  # threshold of the rule that leaves cells blank
_SOURCE = 10  # the layer whose weights Wang et al. 2019 draw as a separate curve


def blanked(weights: Sequence[Sequence[float | None]]) -> tuple[Row, ...]:
    """Return DLCL weights [consumer][source] as drawn by Wang et al. 2019 (figure 5).

    A weight is blank if its magnitude is below 0.1 or below 5 % of the largest magnitude in its row, or if the consumer
    lacks the source: row l has the sources 0 to l.
    """
    rows = []
    for consumer, row in enumerate(square(weights)):
        read = finite(row[: consumer + 1])
        floor = max(_FLOOR, _SHARE * max((abs(w) for w in read if w is not None), default=0.0))
        kept = tuple(w if w is not None and abs(w) >= floor else None for w in read)
        rows.append(kept + (None,) * (len(row) - len(kept)))
    return tuple(rows)


def history_weights(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the weights of learned layer combinations as heat maps, and those of one layer as a curve."""
    caption = (
        "Learned weights of earlier outputs (column; 0 is the embedding) in the input of what follows layer l (row; "
        "with combinations of sub-layers: sub-layer l), at the last record. Blank: a magnitude below 0.1 or below 5 % "
        "of the row's largest. The curves are one column, y_k, over all consumers, all drawn (dashed: the first "
        "record). As figure 5 of Wang et al. 2019."
    )
    maps = stack_maps(runs, "history_weights", blanked)
    panels = heat_panels(maps, x_label="source", y_label="consumer", unit="weight") + source_curves(runs)
    return described("history-weights", _CONNECTIONS, "Weights over earlier layers", caption, panels)


def source_curves(runs: Sequence[ReportRun]) -> tuple[Panel, ...]:
    """Return the weight of one source in each of its consumers, with a panel for each stack.

    The source is y_10, as in the paper, or the middle one in a stack of 10 layers or fewer. If that source has a single
    consumer (inside a block of sparse connections), the nearest one with several is used.
    """
    panels = []
    for stack in STACKS:
        series = []
        for run in runs:
            for variant, record in enumerate(reversed(moments(run, "history_weights"))):
                weights = part_of(record, "history_weights", stack)
                if not weights:
                    continue
                source = _source(weights)
                read = [row[source] for row in weights[source:]]
                line = line_of_record(run, record, read, first=source, what=f"y_{source}", variant=variant)
                series.append(line)
        if series:
            panels.append(Panel(f"{stack}, one source", "consumer", "weight", tuple(series)))
    return tuple(panels)


def _source(weights: Sequence[Sequence[float | None]]) -> int:
    last = len(weights) - 1
    wanted = _SOURCE if last > _SOURCE else last // 2
    read = [sum(w is not None for w in finite(row[k] for row in weights[k:])) for k in range(last + 1)]
    shared = [k for k in range(last + 1) if read[k] > 1]
    return min(shared, key=lambda k: abs(k - wanted), default=wanted)


def transparent_weights(runs: Sequence[ReportRun]) -> Figure | None:
    """Return transparent attention's weights over training and for all decoder layers (Bapna et al. 2018, figure 4)."""
    caption = (
        "Transparent attention: share of each encoder layer (row; 0 is the embedding) in what the last decoder layer "
        "attends to, over training, as figure 4 of Bapna et al. 2018; and in what each decoder layer attends to at the "
        "last record."
    )
    maps, columns = [], []
    for run in runs:
        records = [record for record in run.depth if record.values.get("transparent_weights")]
        if not records:
            continue
        over = [[row[-1] for row in record.values["transparent_weights"]] for record in records]
        rows = tuple(zip(*square(over), strict=True))
        maps.append(RecordMap(f"{run.name}, last decoder layer", rows, run.name, None))
        columns.append([f"{record.update}" for record in records])
        last = records[-1].values["transparent_weights"]
        maps.append(RecordMap(f"{run.name}, {when(records[-1])}", square(last), run.name, records[-1].update))
        columns.append([str(layer) for layer in range(1, len(last[0]) + 1)])
    labels = ["update", "decoder layer"] * (len(maps) // 2)
    panels = heat_panels(maps, x_label=labels, y_label="encoder layer", unit="share", columns=columns)
    return described("transparent-weights", _CONNECTIONS, "Transparent attention", caption, panels)


_SIMILARITY = "Similarity of states"
_COSINE = "cosine"


def similarity_profiles(runs: Sequence[ReportRun]) -> Figure | None:
    """Return similarities to the embedding, to the layer below, and between positions, by encoder layer."""
    caption = (
        "Mean cosine between the states of an encoder layer and the embedding, between those of neighbouring layers "
        "(from layer 2), and between a layer's states and their mean over the sentence (layer 0 is the embedding). A "
        "neighbour similarity near 1 means a layer that changes little. As figures 2, 7, 8 of Li et al. 2020. Dashed: "
        "the first record; solid: the last."
    )
    panels = (
        *depth_panels(runs, "embedding_similarity", {"": "to the embedding"}, _COSINE),
        *depth_panels(runs, "adjacent_similarity", {"": "to the layer below"}, _COSINE, skip=1),
        *depth_panels(runs, "inter_similarity", {"": "between positions"}, _COSINE, bottom=0),
    )
    return described("similarity-profiles", _SIMILARITY, "Similarity by layer", caption, panels)


def similarity_map(runs: Sequence[ReportRun]) -> Figure | None:
    """Return sim(i, j) of all pairs of encoder states as heat maps, at the first and the last record."""
    caption = (
        "Mean cosine between the states of encoder layers i and j (0: the embedding). Blocks of one colour are layers "
        "that hold much the same (Li et al. 2020)."
    )
    maps = [
        RecordMap(f"{run.name}, {when(record)}", square(record.values["similarity"]), run.name, record.update)
        for run in runs
        for record in moments(run, "similarity")
    ]
    panels = heat_panels(maps, x_label="layer", y_label="layer", unit=_COSINE)
    return described("similarity-map", _SIMILARITY, "Similarity of all layers", caption, panels)


_WORTH = "What each layer is worth"


def pruning_curve(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the loss, and BLEU if measured, without the least valuable layers, with the effective depths."""
    caption = (
        "Rise of the loss of one fixed batch, and BLEU of sentences of the dev set, without the n layers that cost "
        "least when removed singly, at the last record. The effective depth is the number of layers that are left "
        "when the loss has risen by 5 % of itself."
    )
    panels: list[Panel] = []
    for key, unit in (("pruning_curve", "added nats per token"), ("pruning_bleu", "BLEU")):
        for stack in STACKS:
            series = [
                line_of_record(run, record, values)
                for run in runs
                for record in moments(run, key)[-1:]
                if (values := part_of(record, key, stack))
            ]
            if series:
                title = f"{stack}, {'BLEU' if key == 'pruning_bleu' else 'loss'}"
                panels.append(Panel(title, "layers left out", unit, tuple(series)))
    lines = [line for run in runs for stack in STACKS for line in _depths_over_training(run, stack)]
    panels += training_panel("effective depth", "layers", lines)
    return described("pruning-curve", _WORTH, "Without the least useful layers", caption, tuple(panels), _depths(runs))


def _depths_over_training(run: ReportRun, stack: str) -> list[Series]:
    """Return the effective depth of a stack as a line over training; none for a single record (see the table)."""
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
    """A figure of a measure of layer pairs, with the values' `unit`, the columns' name and the first layer.

    Layer 0 is the stack's input.
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
        "record. Neighbours at a small distance are layers that change little, and the first candidates for pruning.",
        "share of 180°",
        "layer",
        0,
    ),
    "causal_score": _Map(
        "Effect on later layers",
        "Relative change of what layer l (column) adds to the stream when layer s (row) is left out, at the last "
        "record. Rows that stay dark are layers on which nothing later builds.",
        "relative change",
        "later layer",
        1,
    ),
    "permutation_score": _Map(
        "Layers exchanged",
        "Relative change of the loss with layers i and j exchanged, at the last record. Blocks of small "
        "values are layers whose order hardly matters. Blank: not measured.",
        "relative change",
        "layer",
        1,
    ),
}
"""_MAPS maps measures to their figures."""


def pair_map(runs: Sequence[ReportRun], key: str) -> Figure | None:
    """Return the heat maps of a measure of layer pairs, a key of _MAPS."""
    made = _MAPS[key]
    maps = stack_maps(runs, key, square)
    columns = [[str(made.first + number) for number in range(len(rows[0]))] for _, rows, *_ in maps]
    panels = heat_panels(
        maps, x_label=made.columns, y_label="layer", unit=made.unit, columns=columns, first_row=made.first
    )
    return described(key.replace("_", "-"), _WORTH, made.title, made.caption, panels)


def logit_lens(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the decoder's results if it ended after each of its layers."""
    caption = (
        "The decoder ended after layer l (0: before the first): its loss, and the share of words that are those of "
        "the whole decoder, at the last record. Upper layers over which neither changes only refine what is already "
        "settled."
    )
    panels: list[Panel] = []
    for part, unit in (("nll", "nats per token"), ("agreement", "share of words")):
        series = [
            line_of_record(run, record, record.values["logit_lens"][part])
            for run in runs
            for record in moments(run, "logit_lens")[-1:]
        ]
        if series:
            panels.append(Panel("loss" if part == "nll" else "agreement", "decoder layer", unit, tuple(series)))
    return described("logit-lens", _WORTH, "The decoder ended early", caption, tuple(panels))


_LEARNING, _SPEED = "Learning", "Speed and gradients"
_NATS = "nats per token"


def figures_of(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return every figure for which at least one run has data, in the order of the report.

    Figures leave out runs without data. A run's colour (`ReportRun.colour`) is the same in all figures except the one
    against depth, whose lines are methods. With more than MAX_DRAWN runs, that is the only figure.
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
        history_weights(runs),
        transparent_weights(runs),
        similarity_profiles(runs),
        similarity_map(runs),
        pruning_curve(runs),
        *(pair_map(runs, key) for key in _MAPS),
        logit_lens(runs),
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
        "since the run began, with validation and checkpoints; a method with slower updates must win here."
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
