"""Figures of what connects layers: learned weights over earlier layers, transparent attention, similarity of states."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.inspect.report.figure import Figure, Panel, Row, Series, described
from ziggurat.inspect.report.panels import (
    STACKS,
    depth_panels,
    finite,
    heat_panels,
    moments,
    part_of,
    square,
    stack_maps,
    when,
)
from ziggurat.inspect.report.runs import ReportRun

_CONNECTIONS = "Connections across depth"
_FLOOR, _SHARE = 0.1, 0.05  # of the rule that leaves cells blank
_SOURCE = 10  # the layer whose weights Wang et al. 2019 draw as a separate curve


def blanked(weights: Sequence[Sequence[float | None]]) -> tuple[Row, ...]:
    """Return DLCL weights [consumer][source] as Wang et al. 2019 draw them (figure 5).

    A weight is blank where its magnitude is below 0.1, or below 5 % of the largest magnitude in its row, and where the
    consumer does not have the source: row l has the sources 0 to l.
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
        "of the row's largest. The curves are one column, y_k, over all consumers, nothing left out (dashed: the first "
        "record). As figure 5 of Wang et al. 2019."
    )
    maps = stack_maps(runs, "history_weights", blanked)
    panels = heat_panels(maps, x_label="source", y_label="consumer", unit="weight") + source_curves(runs)
    return described("history-weights", _CONNECTIONS, "Weights over earlier layers", caption, panels)


def source_curves(runs: Sequence[ReportRun]) -> tuple[Panel, ...]:
    """Return the weight of one source over its consumers, a panel for each stack.

    The source is y_10, as in the paper; in a stack of 10 layers or fewer it is the one half way up. Where that source
    has a single consumer (inside a block of sparse connections), the nearest one with several is taken.
    """
    panels = []
    for stack in STACKS:
        series = []
        for run in runs:
            for variant, record in enumerate(reversed(moments(run, "history_weights"))):
                weights = part_of(record, "history_weights", stack)
                if not weights:
                    continue
                last, source = len(weights) - 1, _source(weights)
                x = tuple(float(consumer) for consumer in range(source, last + 1))
                y = finite(weights[consumer][source] for consumer in range(source, last + 1))
                series.append(Series(f"{run.name}, y_{source}, {when(record)}", x, y, run.colour, variant))
        if series:
            panels.append(Panel(f"{stack}, one source", "consumer", "weight", tuple(series)))
    return tuple(panels)


def _source(weights: Sequence[Sequence[float | None]]) -> int:
    """Return the source whose weights are drawn as a curve."""
    last = len(weights) - 1
    wanted = _SOURCE if last > _SOURCE else last // 2
    read = [sum(w is not None for w in finite(row[k] for row in weights[k:])) for k in range(last + 1)]
    shared = [k for k in range(last + 1) if read[k] > 1]
    return min(shared, key=lambda k: abs(k - wanted), default=wanted)


def transparent_weights(runs: Sequence[ReportRun]) -> Figure | None:
    """Return transparent attention's weights over training, and of all decoder layers (Bapna et al. 2018, figure 4)."""
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
        maps.append((f"{run.name}, last decoder layer", tuple(zip(*square(over), strict=True))))
        columns.append([f"{record.update}" for record in records])
        last = records[-1].values["transparent_weights"]
        maps.append((f"{run.name}, {when(records[-1])}", square(last)))
        columns.append([str(layer) for layer in range(1, len(last[0]) + 1)])
    labels = ["update", "decoder layer"] * (len(maps) // 2)
    panels = heat_panels(maps, x_label=labels, y_label="encoder layer", unit="share", columns=columns)
    return described("transparent-weights", _CONNECTIONS, "Transparent attention", caption, panels)


_SIMILARITY = "Similarity of states"
_COSINE = "cosine"


def similarity_profiles(runs: Sequence[ReportRun]) -> Figure | None:
    """Return similarity to the embedding, to the layer below, and between positions, by encoder layer."""
    caption = (
        "Mean cosine between the states of an encoder layer and the embedding, between those of neighbouring layers "
        "(from layer 2), and between a layer's states and their mean over the sentence (layer 0 is the embedding). A "
        "neighbour similarity near 1 is a layer that changes little. As figures 2, 7 and 8 of Li et al. 2020. Dashed: "
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
        (f"{run.name}, {when(record)}", square(record.values["similarity"]))
        for run in runs
        for record in moments(run, "similarity")
    ]
    panels = heat_panels(maps, x_label="layer", y_label="layer", unit=_COSINE)
    return described("similarity-map", _SIMILARITY, "Similarity of all layers", caption, panels)
