"""Curves and heat maps from hand-written records."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ziggurat.train.records import SCALES, ColourScale, Record, heat_maps, scalars, thinned


def record(update: int = 1, **values: Any) -> Record:
    return Record(update, float(update), {"encoder": 2, "decoder": 1}, values)


def test_curves_are_figures_means_and_ends() -> None:
    found = scalars(
        record(
            nll=2.5,
            source_dependence=None,
            r={"encoder": 0.5, "decoder": None},
            gradient_norm={"embeddings": 3.0, "encoder": [1.0, 2.0, 4.0], "decoder": [0.5, None], "output": 2.0},
            beta={"encoder.ffn": [1.0, None, 2.0], "decoder.ffn": [None]},
            adjacent_similarity=[0.25, 0.75],
            similarity=[[1.0, 0.5], [0.5, 1.0]],
            residual_dependency={"encoder": [[1.0], [0.5, 0.5]]},
        )
    )
    assert found == {
        "nll": 2.5,
        "r.encoder": 0.5,
        "gradient_norm.embeddings": 3.0,
        "gradient_norm.encoder.first": 1.0,
        "gradient_norm.encoder.last": 4.0,
        "gradient_norm.decoder.first": 0.5,
        "gradient_norm.output": 2.0,
        "beta.encoder.ffn": 1.5,
        "adjacent_similarity": 0.5,
    }


def test_layer_by_update_has_the_top_layer_first_and_the_newest_update_last() -> None:
    scale = SCALES["gradient_norm"]
    shallow = record(1, gradient_norm={"embeddings": 1.0, "encoder": [1e-5]})
    deep = record(2, gradient_norm={"embeddings": 1.0, "encoder": [10.0, None]})
    found = heat_maps([shallow, deep])
    assert list(found) == ["gradient_norm.encoder by layer and update"]
    assert list(found.values()) == [[[None, None], [0.0, 1.0]]]  # the layer added by growth is blank before that
    assert scale.share(1e-2) == pytest.approx(0.5)


def test_records_without_a_measure_have_no_column() -> None:
    """Measures have their own cadences."""
    with_it = [record(u, variance={"encoder.ffn": [v]}) for u, v in ((1, 1.0), (3, 100.0))]
    without = [record(0, nll=1.0), record(2, nll=1.0, variance={"decoder.ffn": [1.0]})]
    (found,) = heat_maps([without[0], with_it[0], without[1], with_it[1]]).values()
    assert found == [[pytest.approx(1 / 3), pytest.approx(2 / 3)]]
    assert heat_maps([*with_it, without[0]]) == {}


def test_layer_by_layer_is_of_the_last_record() -> None:
    first = record(1, similarity=[[1.0]], history_weights={"encoder": [[1.0]]})
    last = record(
        2, similarity=[[1.0, 0.0], [0.0, -1.0]], history_weights={"encoder": [[1.0], [-0.5, 0.5]], "decoder": []}
    )
    assert heat_maps([first, last]) == {
        "history_weights.encoder by layer and layer": [[1.0], [0.25, 0.75]],
        "similarity by layer and layer": [[1.0, 0.5], [0.5, 0.0]],
    }
    assert heat_maps([]) == {}


def test_scales() -> None:
    assert ColourScale(0, 4).share(1.0) == 0.25
    assert ColourScale(1, 100, logarithmic=True).share(10.0) == pytest.approx(0.5)
    assert ColourScale(1, 100, logarithmic=True).share(0.0) == 0.0  # zero has no logarithm
    assert ColourScale(1, 100).share(None) is None


@pytest.mark.parametrize(("count", "step"), [(1, 1), (240, 1), (241, 2), (1000, 5)])
def test_long_runs_are_thinned_evenly_and_keep_the_newest(count: int, step: int) -> None:
    records = [record(update) for update in range(count)]
    found = thinned(records)
    assert len(found) <= 240
    assert found[-1] is records[-1]
    assert {b.update - a.update for a, b in pairwise(found)} <= {step}
