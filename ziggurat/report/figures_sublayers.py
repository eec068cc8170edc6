"""Figures of sub-layers: beta and variance as in the table of Zhang et al. 2019, what branches weigh, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ziggurat.report.curves import STACKS, finite, moments, part_of, profiles, when
from ziggurat.report.figure import Figure, Table
from ziggurat.report.heat import heat_panels, square
from ziggurat.report.runs import ReportRun
from ziggurat.report.words import described

__all__ = ["SUB_LAYERS", "attention_entropy", "backward_ratios", "residual_dependency", "sub_layer_table", "variance"]

SUB_LAYERS = {
    "encoder.self_attn": "encoder self-attention",
    "encoder.ffn": "encoder FFN",
    "decoder.self_attn": "decoder self-attention",
    "decoder.cross_attn": "decoder cross-attention",
    "decoder.merged_attn": "decoder merged attention",
    "decoder.ffn": "decoder FFN",
}
"""Types of sub-layers, as records have them, and what they are called."""

_SECTION = "Sub-layers"
_MEASURES = {"beta_ln": "β_LN", "beta_rc": "β_RC", "beta": "β", "variance": "Var(r)"}
_MOMENTS = "Dashed: the first record; solid: the last."


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
    panels = profiles(runs, "variance", SUB_LAYERS, "Var(r)")
    return described("variance", _SECTION, "Variance of residual sums", caption, panels, sub_layer_table(runs))


def backward_ratios(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return a figure for each of beta_LN, beta_RC and beta by layer (the rows of table 1 of Zhang et al. 2019)."""
    meaning = {
        "beta_ln": "β_LN = ‖δ_r‖/‖δ_o‖: what the layer normalisation leaves of the gradient's norm.",
        "beta_rc": "β_RC = ‖δ_z‖/‖δ_r‖: what the residual connection, skip and branch together, makes of it.",
        "beta": "β = ‖δ_z‖/‖δ_o‖: what the whole sub-layer makes of it; below 1 in every sub-layer, it vanishes.",
    }
    figures = []
    for key, text in meaning.items():
        title = f"{_MEASURES[key]} by layer"
        panels = profiles(runs, key, SUB_LAYERS, _MEASURES[key])
        figures.append(described(key.replace("_", "-"), _SECTION, title, f"{text} {_MOMENTS}", panels))
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
    """Return how much each earlier branch weighs in the state after each sub-layer (Liu, Liu, Gao et al. 2020)."""
    caption = (
        "Share of each earlier branch (column; 0 is the stack's input) in the state after a sub-layer (row), at the "
        "last record; squares of a row sum to 1. Rows that are bright near the diagonal only lean on their latest "
        "branches, which amplifies every change. As figure 4 of Liu, Liu, Gao et al. 2020 (ADMIN)."
    )
    maps = []
    for run in runs:
        for record in moments(run, "residual_dependency")[-1:]:
            for stack in STACKS:
                if values := part_of(record, "residual_dependency", stack):
                    maps.append((f"{run.name}, {stack}", square(values)))
    panels = heat_panels(maps, x_label="branch", y_label="sub-layer", unit="share", first_row=1)
    return described("residual-dependency", _SECTION, "Residual dependency", caption, panels)


def attention_entropy(runs: Sequence[ReportRun]) -> Figure | None:
    """Return the entropy of attention weights by layer."""
    caption = (
        "Entropy of the attention weights in nats, mean over heads and queries: 0 is attention to a single position. "
        f"{_MOMENTS}"
    )
    parts = {part: title for part, title in SUB_LAYERS.items() if part.endswith("attn")}
    panels = profiles(runs, "attention_entropy", parts, "nats")
    return described("attention-entropy", _SECTION, "Entropy of attention", caption, panels)


def _mean(values: Sequence[float | None] | None) -> str:
    known = [v for v in finite(values or ()) if v is not None]
    return f"{math.fsum(known) / len(known):.2f}" if known else "–"
