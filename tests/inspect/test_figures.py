from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inspect.hand_made import KINDS, M, N, record, run, trained, worth
from ziggurat.inspect.report.figure import Figure, Heat, Panel, Series, numbers
from ziggurat.inspect.report.figures import (
    blanked,
    figures_of,
    history_weights,
    learning_curves,
    pair_map,
    pruning_curve,
    similarity_map,
    similarity_profiles,
    source_curves,
    throughput,
    transparent_weights,
)
from ziggurat.inspect.report.panels import (
    first_and_last_layer,
    gradient_profile,
    gradient_ratio,
    line_over_training,
    residual_dependency,
    source_dependence,
    sub_layer_table,
    variance,
)
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.train.records import Record


def only(update: int, **values: Any) -> Record:
    return Record(update, 0.0, {"encoder": N, "decoder": M}, values)


def lines(figure: Figure | None, panel: str) -> dict[str, Series]:
    assert figure is not None
    (found,) = [p for p in figure.panels if p.title == panel]
    return {series.label: series for series in found.series}


def heat(figure: Figure | None, panel: str) -> Heat:
    assert figure is not None
    (found,) = [p.heat for p in figure.panels if p.title == panel]
    assert found is not None
    return found


def test_every_figure_appears_and_only_where_a_run_has_its_data() -> None:
    keys = [figure.key for figure in figures_of([trained()])]
    assert {"learning-curves", "scores", "throughput"} < {*keys}
    assert len(keys) == len({*keys}) == 27
    assert figures_of([]) == []
    assert figures_of([run()]) == []
    # A key without a finite value is not data.
    empty = only(0, gradient_norm={"encoder": [None] * N, "decoder": []}, r={"encoder": None}, similarity=[[None]])
    assert figures_of([run(depth=[empty])]) == []
    assert [f.key for f in figures_of([run(), run("b", 1, depth=[only(5, r={"encoder": 1.0})])])] == ["gradient-ratio"]


@pytest.mark.parametrize("key", sorted(record(0).values))
def test_each_measure_alone_is_drawn_without_the_others(key: str) -> None:
    values = {key: record(0).values[key]}
    figures = figures_of([run(depth=[only(0, **values), only(9, **values)])])
    assert figures or key == "nll"  # the probe's loss is shown next to the dependence on the source
    for figure in figures:
        assert figure.panels
        assert figure.alt
        assert len({panel.title for panel in figure.panels}) == len(figure.panels)


def test_learning_curves_by_hand() -> None:
    train = [{"update": 10, "nll": 6.5}, {"update": 20, "nll": math.nan}, {"update": 30}, {"update": 40, "nll": 5.0}]
    validations = [{"update": 40, "nll": 5.5, "bleu": 1.0}]
    figure = learning_curves([run("a", 3, train=train, validations=validations), run("b", 1)])
    assert lines(figure, "training") == {"a": Series("a", (10, 20, 40), (6.5, None, 5.0), 3)}
    assert lines(figure, "validation") == {"a": Series("a", (40,), (5.5,), 3)}
    assert figure is not None
    assert all(panel.perplexity for panel in figure.panels)
    assert all(said in figure.alt for said in ("training", "validation", "6.5 at update 10", "5.5 at update 40"))


@pytest.mark.parametrize(("seconds", "unit", "places"), [(3600, "hours", (1, 2)), (1800, "minutes", (30, 60))])
def test_loss_by_time_is_in_hours_or_minutes(seconds: int, unit: str, places: tuple[float, float]) -> None:
    train = [{"update": u, "nll": 5.0, "seconds": seconds * u, "target_tokens_per_second": 7.0} for u in (1, 2)]
    figure = throughput([run(train=train)])
    assert lines(figure, "loss by time")["plain"].x == places
    assert figure is not None
    assert figure.panels[1].x_label == unit


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=2000))
def test_long_lines_are_thinned_to_means(values: list[float]) -> None:
    line = line_over_training("a", 0, range(1, len(values) + 1), tuple(values))
    assert len(line.x) <= 400
    assert line.x[-1] == len(values)
    assert list(line.x) == sorted(set(line.x))
    starts = [0, *map(int, line.x[:-1])]
    for start, end, mean in zip(starts, map(int, line.x), line.y, strict=True):
        assert mean == pytest.approx(sum(values[start:end]) / (end - start), abs=1e-9)


def test_thinning_leaves_out_non_finite_values() -> None:
    line = line_over_training("a", 0, range(800), (None, None) + (1.0, None) * 399)
    assert line.y == (None,) + (1.0,) * 399


def test_profiles_show_the_first_and_the_last_record() -> None:
    figure = gradient_profile([trained("a", 2)])
    encoder = lines(figure, "encoder")
    assert encoder["a, update 200"] == Series("a, update 200", (1, 2, 3, 4), (0.125, 0.25, 0.5, 1.0), 2, 0)
    assert encoder["a, before training"].variant == 1
    assert list(encoder) == ["a, update 200", "a, before training"]
    assert lines(figure, "decoder")["a, update 200"].y == (0.1**2, 0.1, 1.0)
    once = gradient_profile([run(depth=[record(7)])])
    assert list(lines(once, "encoder")) == ["plain, update 7"]


def test_first_and_last_layer_of_a_growing_run() -> None:
    depth = [
        only(10, gradient_norm={"encoder": [0.5, 2.0], "decoder": [1.0]}),
        only(20, gradient_norm={"encoder": [0.25, 1.0, 4.0], "decoder": [None]}),
    ]
    figure = first_and_last_layer([run(depth=depth)])
    found = lines(figure, "encoder")
    assert found["plain, first layer"] == Series("plain, first layer", (10, 20), (0.5, 0.25), 0, 0)
    assert found["plain, last layer"] == Series("plain, last layer", (10, 20), (2.0, 4.0), 0, 1)
    assert lines(figure, "decoder")["plain, first layer"].y == (1.0, None)


def test_the_caption_gives_the_number_of_batches_behind_mean_gradients() -> None:
    def caption(*counts: int | None) -> str:
        norms = {"encoder": [0.5, 2.0], "decoder": [1.0]}
        values = [{"gradient_norm": norms} | ({} if n is None else {"gradient_batches": n}) for n in counts]
        figure = first_and_last_layer([run(f"r{i}", i, depth=[only(1, **v)]) for i, v in enumerate(values)])
        assert figure is not None
        return figure.caption

    assert "one fixed batch" in caption(None)
    assert "over 50 fixed batches" in caption(50, 50)
    assert "r0: 1; r1: 50" in caption(None, 50)


def test_ratio_and_dependence_line_over_training() -> None:
    figure = gradient_ratio([trained()])
    assert lines(figure, "encoder")["plain"].y == pytest.approx((1.5, 1.3, 1.2))
    assert lines(figure, "decoder")["plain"].x == (0, 100, 200)
    assert lines(source_dependence([trained()]), "dependence on the source")["plain"].y == pytest.approx((0, 0.1, 0.15))


def test_table_has_means_over_layers() -> None:
    first = {kind: [1.0] * layers for kind, layers in KINDS.items()}
    last = {**first, "encoder.ffn": [1.0, 2.0, None, 3.0], "decoder.ffn": [None] * M}
    depth = [only(0, variance=first, beta_rc=first), only(50, variance=last)]
    table = sub_layer_table([run("a", depth=depth)])
    assert table is not None
    names = (
        "encoder self-attention",
        "encoder FFN",
        "decoder self-attention",
        "decoder cross-attention",
        "decoder FFN",
    )
    assert table.header == ("run", "record", "mean over layers", *names)
    assert table.rows == (
        ("a", "before training", "β_RC", "1.00", "1.00", "1.00", "1.00", "1.00"),
        ("a", "before training", "Var(r)", "1.00", "1.00", "1.00", "1.00", "1.00"),
        ("a", "update 50", "Var(r)", "1.00", "2.00", "1.00", "1.00", "–"),
    )
    figure = variance([run("a", depth=depth)])
    assert figure is not None
    assert figure.table == table
    assert sub_layer_table([run()]) is None


def test_residual_dependency_is_a_staircase() -> None:
    found = heat(residual_dependency([trained("a")]), "a, encoder")
    assert found.rows == tuple(map(str, range(1, 9)))
    assert found.columns == tuple(map(str, range(9)))
    assert found.values[0] == (0.5, 0.5, *[None] * 7)
    assert found.values[-1] == (1 / 9,) * 9


def test_blanking_rule_at_its_edges() -> None:
    weights = [
        [0.1, 9.0],  # source 1 is not below consumer 0, so it is not shown and does not raise the row's maximum
        [-0.1, 0.099],
        [4.0, 0.2, 0.199],  # 5 % of 4 is 0.2
        [-4.0, -0.2, 0.15, None],
        [0.05, 0.09, 0.0, -0.01, 0.02],
    ]
    assert blanked(weights) == (
        (0.1, None, None, None, None),
        (-0.1, None, None, None, None),
        (4.0, 0.2, None, None, None),
        (-4.0, -0.2, None, None, None),
        (None,) * 5,
    )


@given(st.lists(st.lists(st.floats(-3, 3), min_size=6, max_size=6), min_size=6, max_size=6))
def test_blanking_rule_by_a_plain_loop(weights: list[list[float]]) -> None:
    found = blanked(weights)
    for row in range(6):
        largest = max(abs(weights[row][k]) for k in range(row + 1))
        for k in range(6):
            blank = k > row or abs(weights[row][k]) < 0.1 or abs(weights[row][k]) < 0.05 * largest
            assert found[row][k] == (None if blank else weights[row][k])


@pytest.mark.parametrize(("layers", "source"), [(30, 10), (11, 10), (10, 5), (6, 3), (2, 1)])
def test_one_source_over_its_consumers(layers: int, source: int) -> None:
    weights = [[100.0 * i + k for k in range(i + 1)] for i in range(layers + 1)]
    (panel,) = source_curves([run("a", depth=[only(5, history_weights={"encoder": weights})])])
    (line,) = panel.series
    assert line.label == f"a, y_{source}, update 5"
    assert line.x == tuple(range(source, layers + 1))
    assert line.y == tuple(100.0 * i + source for i in range(source, layers + 1))


def test_the_one_source_is_at_the_end_of_a_block() -> None:
    nan = math.nan
    weights = [[nan] * 13 for _ in range(13)]
    for layer in range(13):
        weights[layer][layer] = 1.0
    for end in (0, 4, 8, 12):
        weights[end] = [end + k / 100 if k % 4 == 0 and k <= end else nan for k in range(13)]
    (panel,) = source_curves([run("a", depth=[only(5, history_weights={"encoder": weights})])])
    (line,) = panel.series
    assert line.label == "a, y_8, update 5"
    assert line.x == (8, 9, 10, 11, 12)
    assert line.y == (8.08, None, None, None, 12.08)


def test_history_weights_share_one_scale() -> None:
    one = only(9, history_weights={"encoder": [[1.0], [0.5, 0.01]]})
    other = only(9, history_weights={"encoder": [[-2.0], [0.5, 0.7]]})
    figure = history_weights([run("a", depth=[one]), run("b", 1, depth=[other])])
    assert heat(figure, "a, encoder").values == ((1.0, None), (0.5, None))
    assert {(heat(figure, f"{name}, encoder").low, heat(figure, f"{name}, encoder").high) for name in "ab"} == {(-2, 1)}


def test_transparent_weights_over_training_and_over_the_decoder() -> None:
    def weights(shift: float) -> list[list[float]]:  # three sources, two decoder layers
        return [[0.1 + shift, 0.2 + shift], [0.3, 0.4], [0.6 - shift, 0.4 - shift]]

    depth = [only(10, transparent_weights=weights(0.0)), only(20, transparent_weights=weights(0.25))]
    figure = transparent_weights([run("a", depth=depth), run("b", 1)])
    over = heat(figure, "a, last decoder layer")
    assert over.columns == ("10", "20")
    assert over.rows == ("0", "1", "2")
    assert [list(row) for row in over.values] == [pytest.approx(row) for row in ([0.2, 0.45], [0.4, 0.4], [0.4, 0.15])]
    last = heat(figure, "a, update 20")
    assert last.columns == ("1", "2")
    assert last.values[0] == pytest.approx((0.35, 0.45))
    assert figure is not None
    assert [panel.x_label for panel in figure.panels] == ["update", "decoder layer"]


def test_similarities_begin_where_they_are_meaningful() -> None:
    figure = similarity_profiles([trained("a")])
    assert lines(figure, "to the embedding")["a, update 200"].x == (1, 2, 3, 4)
    below = lines(figure, "to the layer below")["a, update 200"]
    assert (below.x, below.y) == ((2, 3, 4), pytest.approx((0.6, 0.7, 0.8)))
    assert lines(figure, "between positions")["a, update 200"].x == (0, 1, 2, 3, 4)
    assert heat(similarity_map([trained("a")]), "a, before training").values[0][0] == 1.0


def test_colours_are_of_runs_in_every_figure() -> None:
    runs = [trained("a", 5), trained("b", 2)]
    for figure in figures_of(runs):
        for panel in figure.panels:
            for series in panel.series:
                assert series.run == {"a": 5, "b": 2}[series.label.partition(",")[0]]


def test_a_run_that_lacks_data_is_not_in_the_figure() -> None:
    assert list(lines(gradient_ratio([run("a"), trained("b", 1)]), "encoder")) == ["b"]


def test_exported_numbers_are_those_drawn() -> None:
    recorded = (Series('a, "b"', (1, 2.5), (0.1, None), 0, name="a", update=7),)
    panels = (
        Panel("curve", "x", "y", (*recorded, Series("c", (1,), (2.0,), 1))),
        Panel("map", "x", "y", heat=Heat(((1.0, None),), ("c0", "c1"), ("r0",), "weight", 0, 1, "d", 9)),
    )
    text = numbers(Figure("key", "", "", "", "", panels))
    assert list(csv.reader(io.StringIO(text))) == [
        ["panel", "series", "run", "update", "x", "y", "value"],
        ["curve", 'a, "b"', "a", "7", "1", "0.1", ""],
        ["curve", 'a, "b"', "a", "7", "2.5", "", ""],
        ["curve", "c", "c", "", "1", "2.0", ""],
        ["map", "", "d", "9", "c0", "r0", "1.0"],
        ["map", "", "d", "9", "c1", "r0", ""],
    ]


def test_numbers_have_every_value_of_every_figure() -> None:
    for figure in figures_of([trained("a"), trained("b", 1)]):
        points = sum(len(series.x) for panel in figure.panels for series in panel.series)
        cells = sum(len(p.heat.rows) * len(p.heat.columns) for p in figure.panels if p.heat is not None)
        rows = list(csv.DictReader(io.StringIO(numbers(figure))))
        assert len(rows) == points + cells
        assert {row["run"] for row in rows} == {"a", "b"}
        assert {row["update"] for row in rows} <= {"", "0", "200"}


def test_figures_refuse_values_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 positions for 1 values"):
        Series("a", (1, 2), (1.0,))
    with pytest.raises(ValueError, match="1 error bars"):
        Series("a", (1, 2), (1.0, 2.0), spread=(0.1,))
    with pytest.raises(ValueError, match="do not fill 1 rows of 2 cells"):
        Heat(((1.0,),), ("a", "b"), ("c",), "w", 0, 1)


def test_many_lines_are_reported_briefly() -> None:
    runs: list[ReportRun] = [replace(trained(), name=f"run {i}", colour=i) for i in range(8)]
    figure = gradient_profile(runs)
    assert figure is not None
    assert figure.alt.count("4 more lines") == 2
    assert "all blank" not in figure.alt


def test_pruning_curves_by_hand() -> None:
    depth = [only(0, **worth(0.0)), only(9, **{**worth(0.0), "effective_depth": {"encoder": 4.0, "decoder": 1.0}})]
    figure = pruning_curve([run("a", 2, depth=depth)])
    label = "a, update 9"
    assert lines(figure, "encoder, loss") == {label: Series(label, (0, 1, 2, 3), (0.0, 0.1, 0.2, 0.1 * 3), 2)}
    assert lines(figure, "decoder, BLEU") == {label: Series(label, (0, 1, 2), (20.0, 19.0, 18.0), 2)}
    assert lines(figure, "effective depth")["a, encoder"] == Series("a, encoder", (0, 9), (3.0, 4.0), 2)
    assert figure is not None
    assert figure.table is not None
    assert figure.table.rows == (("a", "before training", "3 of 4", "2 of 3"), ("a", "update 9", "4 of 4", "1 of 3"))
    diverged = {**worth(0.0), "effective_depth": {"encoder": None, "decoder": 1.0}}
    unknown = pruning_curve([run("a", 2, depth=[only(9, **diverged)])])
    assert unknown is not None
    assert unknown.table is not None
    assert unknown.table.rows == (("a", "update 9", "– of 4", "1 of 3"),)
    alone = pruning_curve([run("a", 2, depth=depth[:1])])
    assert alone is not None
    assert "effective depth" not in {panel.title for panel in alone.panels}


def test_maps_of_layers_count_from_their_first() -> None:
    runs = [run(depth=[only(9, **worth(0.0))])]
    angles, scores = (
        heat(pair_map(runs, key), f"plain, {stack}")
        for key, stack in (("angular_distance", "encoder"), ("causal_score", "decoder"))
    )
    assert (angles.rows[0], angles.columns[-1]) == ("0", str(N))
    assert (scores.rows[0], scores.columns[-1]) == ("1", str(M))
    assert scores.values[0] == (None, 0.3, 0.3)
