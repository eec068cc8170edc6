"""All figures of some runs, in the order of a report."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.report import (
    figures_connections,
    figures_gradients,
    figures_similarity,
    figures_sublayers,
    figures_training,
)
from ziggurat.report.figure import Figure
from ziggurat.report.runs import ReportRun

__all__ = ["figures_of"]


def figures_of(runs: Sequence[ReportRun]) -> list[Figure]:
    """Return every figure that some of the runs have data for; runs that lack it are not in it.

    A run has the same colour in all of them, that of its number (`ReportRun.colour`).
    """
    figures = [
        figures_training.learning_curves(runs),
        figures_training.scores(runs),
        figures_training.throughput(runs),
        figures_training.gradient_norm(runs),
        figures_gradients.gradient_profile(runs),
        figures_gradients.first_and_last_layer(runs),
        figures_gradients.gradient_ratio(runs),
        figures_gradients.source_dependence(runs),
        figures_gradients.scaled_gradient_profile(runs),
        figures_gradients.update_ratio(runs),
        figures_gradients.output_change(runs),
        figures_sublayers.variance(runs),
        *figures_sublayers.backward_ratios(runs),
        figures_sublayers.residual_dependency(runs),
        figures_sublayers.attention_entropy(runs),
        figures_connections.history_weights(runs),
        figures_connections.transparent_weights(runs),
        figures_similarity.similarity_profiles(runs),
        figures_similarity.similarity_map(runs),
    ]
    return [figure for figure in figures if figure is not None]
