"""Figures of how alike the states of encoder layers are (Li et al. 2020, figures 2, 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report.curves import moments, profiles, when
from ziggurat.report.figure import Figure
from ziggurat.report.heat import heat_panels, square
from ziggurat.report.runs import ReportRun
from ziggurat.report.words import described

__all__ = ["similarity_map", "similarity_profiles"]

_SECTION = "Similarity of states"
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
        *profiles(runs, "embedding_similarity", {"": "to the embedding"}, _COSINE),
        *profiles(runs, "adjacent_similarity", {"": "to the layer below"}, _COSINE, skip=1),
        *profiles(runs, "inter_similarity", {"": "between positions"}, _COSINE, bottom=0),
    )
    return described("similarity-profiles", _SECTION, "Similarity by layer", caption, panels)


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
    return described("similarity-map", _SECTION, "Similarity of all layers", caption, panels)
