"""The figure and the table of runs against depth: lines, means and spreads, missing measurements."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.inspect.hand_made import EXPERIMENT, run
from tests.inspect.runs import train_record, validation_record, write_run
from ziggurat.config import Experiment, dump
from ziggurat.config.load import parse_experiment
from ziggurat.inspect.report.against_depth import NOT_MEASURED, against_depth, runs_by_method
from ziggurat.inspect.report.content import gather
from ziggurat.inspect.report.drawing import save
from ziggurat.inspect.report.figure import Figure, Series, numbers
from ziggurat.inspect.report.figures import figures_of
from ziggurat.inspect.report.runs import MAX_DRAWN, ReportRun, read_run, read_runs
from ziggurat.model.build import build_model, count_parameters
from ziggurat.model.run_folder import DecodingSpeed, KeptScore, keep_speed
from ziggurat.system.errors import ConfigError, DataError

BLEU = "nrefs:1|tok:13a"


def changed(encoder: int, decoder: int, *overrides: str) -> Experiment:
    depth = (f"model.encoder.layers={encoder}", f"model.decoder.layers={decoder}")
    return parse_experiment(dump(EXPERIMENT), "hand made", [*depth, *overrides])


def several(*experiments: Experiment, losses: list[float] | None = None) -> list[ReportRun]:
    """Runs of these configurations with one validation each."""
    losses = losses or [4.0] * len(experiments)
    runs = [run(str(n), n, validations=[{"update": 9, "nll": loss}]) for n, loss in enumerate(losses)]
    return [replace(its, experiment=experiment) for its, experiment in zip(runs, experiments, strict=True)]


def grouped(*experiments: Experiment) -> tuple[str, dict[str, dict[int, list[str]]]]:
    """Return the label of the axis, and the runs' names by line and depth."""
    found = runs_by_method(several(*experiments))
    assert found is not None
    label, methods = found
    assert len({method.label for method in methods}) == len(methods)
    return label, {m.label: {depth: [r.name for r in runs] for depth, runs in m.runs.items()} for m in methods}


def panel(figure: Figure | None, title: str) -> dict[str, Series]:
    assert figure is not None
    (found,) = [p for p in figure.panels if p.title == title]
    return {series.label: series for series in found.series}


def cells(figure: Figure | None) -> list[dict[str, str]]:
    assert figure is not None
    assert figure.table is not None
    return [dict(zip(figure.table.header, row, strict=True)) for row in figure.table.rows]


def test_there_is_a_figure_only_where_depths_differ() -> None:
    assert against_depth([]) is None
    assert against_depth(several(changed(6, 6))) is None
    assert against_depth(several(changed(6, 6), changed(6, 6, "model.residual=post"))) is None
    assert "against-depth" in [f.key for f in figures_of(several(changed(6, 6), changed(6, 4)))]


def test_the_axis_is_the_depth_that_varies() -> None:
    assert grouped(changed(6, 3), changed(12, 3)) == ("encoder layers", {"pre": {6: ["0"], 12: ["1"]}})
    assert grouped(changed(6, 4), changed(6, 2)) == ("decoder layers", {"pre": {2: ["1"], 4: ["0"]}})
    assert grouped(changed(6, 6), changed(3, 3)) == ("layers of each stack", {"pre": {3: ["1"], 6: ["0"]}})
    # A decoder depth that follows from the encoder's is no method; one that varies independently is.
    assert grouped(changed(6, 6), changed(12, 2))[1] == {"pre": {6: ["0"], 12: ["1"]}}
    assert grouped(changed(6, 6), changed(12, 6), changed(6, 2), changed(12, 2))[1] == {
        "pre, decoder of 6 layers": {6: ["0"], 12: ["1"]},
        "pre, decoder of 2 layers": {6: ["2"], 12: ["3"]},
    }


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (["model.residual=post"], ["pre", "post"]),
        (["model.init.kind=depth_scaled"], ["pre", "pre, depth_scaled"]),
        (["model.encoder.history=dlcl", "model.decoder.history=dlcl"], ["pre", "pre, dlcl"]),
        (["model.encoder.history=dlcl"], ["pre", "pre, encoder dlcl"]),
        (["model.encoder.init={kind: depth_scaled}"], ["pre", "pre, encoder depth_scaled"]),
        (["model.memory=transparent"], ["pre", "pre, transparent"]),
        (
            ["training.growth={stages: [{layers: 3, updates: 5}], copy_strategy: random}"],
            ["pre, from scratch", "pre, grown"],
        ),
    ],
)
def test_a_method_is_any_difference_except_depth_and_seed(overrides: list[str], labels: list[str]) -> None:
    both = [changed(n, 6, *more) for more in ([], overrides) for n in (6, 12)]
    seeds = [changed(6, 6, "training.seed=2", "training.threads=1", "data.store=elsewhere")]
    found = grouped(*both, *seeds)[1]
    assert found == {labels[0]: {6: ["0", "4"], 12: ["1"]}, labels[1]: {6: ["2"], 12: ["3"]}}


def test_settings_that_follow_the_depth_make_no_method_but_others_do() -> None:
    deep = changed(12, 6, "training.batch.max_tokens=999", "model.dropout.residual=0.3")
    assert grouped(changed(6, 6), deep) == ("encoder layers", {"pre": {6: ["0"], 12: ["1"]}})
    # Averaging these two as if they were two seeds would be wrong.
    found = grouped(changed(6, 6), changed(12, 6), changed(6, 6, "model.d_ff=64"), changed(12, 6, "model.d_ff=64"))[1]
    assert found == {"pre, d_ff 32": {6: ["0"], 12: ["1"]}, "pre, d_ff 64": {6: ["2"], 12: ["3"]}}


def test_a_setting_of_one_method_does_not_split_another() -> None:
    mine = [changed(6, 6), changed(12, 6, "model.dropout.residual=0.3")]
    other = [changed(6, 6, "model.residual=post", "model.dropout.residual=0.2")]
    assert grouped(*mine, *other)[1] == {"pre": {6: ["0"], 12: ["1"]}, "post": {6: ["2"]}}


def test_means_and_spreads_over_seeds() -> None:
    losses = [3.0, 3.5, 4.6, 2.0]
    seeds = [changed(6, 6, f"training.seed={n}") for n in (1, 2, 3)]
    figure = against_depth(several(*seeds, changed(12, 6), losses=losses))
    line = panel(figure, "dev loss")["pre"]
    assert (line.x, line.run, line.variant) == ((6, 12), 0, 0)
    assert line.y == pytest.approx((sum(losses[:3]) / 3, 2.0))
    mean = sum(losses[:3]) / 3
    assert line.spread[0] == pytest.approx((sum((loss - mean) ** 2 for loss in losses[:3]) / 2) ** 0.5)
    assert line.spread[1] is None
    assert figure is not None
    rows = list(csv.DictReader(io.StringIO(numbers(figure))))
    assert [(row["x"], bool(row["spread"])) for row in rows if row["panel"] == "dev loss"] == [
        ("6.0", True),
        ("12.0", False),
    ]
    first, second = cells(figure)
    assert (first["layers"], first["runs"], second["layers"], second["runs"]) == ("6-6", "3", "12-6", "1")
    assert first["dev loss"] == f"{mean:.3f} ± {statistics.stdev(losses[:3]):.3f}"
    assert second["dev loss"] == "2.000"


def test_missing_measurements_are_reported_and_not_drawn() -> None:
    runs = several(changed(6, 6), changed(6, 6, "training.seed=2"), changed(12, 6), losses=[3.0, float("nan"), 2.0])
    speed = DecodingSpeed(tokens_per_second=1234.0, rounds=3, how="a text")
    runs[0] = replace(runs[0], speed=speed)
    figure = against_depth(runs)
    shallow, deep = cells(figure)
    assert shallow["dev loss"] == "3.000 (1 of 2)"
    assert shallow["decoding speed"] == "1,234 (1 of 2)"
    for key in ("dev BLEU", "training time", "parameters"):
        assert shallow[key] == deep[key] == NOT_MEASURED
    assert deep["decoding speed"] == NOT_MEASURED
    assert figure is not None
    assert [p.title for p in figure.panels] == ["dev loss", "decoding speed"]
    assert panel(figure, "decoding speed")["pre"].x == (6,)


def test_unlike_scores_and_speeds_are_not_drawn_together() -> None:
    runs = several(changed(6, 6), changed(12, 6), changed(18, 6))
    for n, (signature, how) in enumerate(((BLEU, "one core"), (BLEU, "two cores"), ("tok:none", "two cores"))):
        scores = {"news": [KeptScore(name="BLEU", value=20.0 + n, signature=signature)]}
        speed = DecodingSpeed(tokens_per_second=10.0 + n, rounds=1, how=how)
        runs[n] = replace(runs[n], scores=scores, speed=speed)
    figure = against_depth(runs)
    assert panel(figure, f"news, BLEU ({BLEU})")["pre"].y == (20.0, 21.0)
    assert panel(figure, "news, BLEU (tok:none)")["pre"].y == (22.0,)
    assert panel(figure, "decoding speed (one core)")["pre"].y == (10.0,)
    assert panel(figure, "decoding speed (two cores)")["pre"].y == (11.0, 12.0)


def on_disk(folder: Path, encoder: int, **values: float) -> Path:
    metrics = [
        train_record(10, seconds=65.0),
        validation_record(5, bleu=7.5),
        validation_record(10, bleu=6.0, **values),
    ]
    return write_run(folder, metrics, experiment=changed(encoder, 2))


def test_a_run_on_disk_has_scores_speed_size_and_time(tmp_path: Path) -> None:
    folders = [on_disk(tmp_path / str(n), n, seconds=3.0) for n in (2, 4)]
    (folders[0] / "scores").mkdir()
    printed = [{"name": "BLEU", "value": 12.5, "signature": BLEU, "sentences": 9, "details": "", "mean": None}]
    (folders[0] / "scores" / "news.json").write_text(json.dumps(printed), encoding="utf-8")
    keep_speed(folders[0], DecodingSpeed(tokens_per_second=50.0, rounds=3, how="news, beam 4"))
    runs = read_runs(folders)
    figure = against_depth(runs)
    assert panel(figure, "dev BLEU")["pre"].y == (7.5, 7.5)
    assert panel(figure, "news, BLEU")["pre"].y == (12.5,)
    assert panel(figure, "decoding speed")["pre"].y == (50.0,)
    assert panel(figure, "training time")["pre"].y == pytest.approx((1.05, 1.05))  # 65 s minus the earlier validation
    assert panel(figure, "time of an update")["pre"].y == pytest.approx((6.3, 6.3))
    sizes = [count_parameters(build_model(its.experiment.model, 1 + 4, 1 + 4)) / 1e6 for its in runs]
    found = panel(figure, "parameters")["pre"].y
    assert found[0] is not None
    assert found[1] is not None
    assert found[1] - found[0] == pytest.approx(sizes[1] - sizes[0])  # whatever special tokens the vocabulary has
    assert found[0] > 0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(
            ("scores/news.json", content)
            for content in ("{}", "[{}]", "[", '[{"name": "B", "value": NaN, "signature": ""}]')
        ),
        ("speed.json", '{"tokens_per_second": 0.0, "rounds": 1, "how": "x"}'),
    ],
)
def test_damaged_scores_and_speeds_are_refused_with_the_file(tmp_path: Path, file: str, content: str) -> None:
    folder = write_run(tmp_path / "a")
    assert read_run(folder).speed is None
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(file)):
        read_run(folder)


def test_more_runs_than_colours_are_drawn_only_against_depth() -> None:
    many = [changed(n, 2, f"training.seed={seed}") for n in (2, 4, 6) for seed in range(4)]
    assert len(many) > MAX_DRAWN
    assert [figure.key for figure in figures_of(several(*many))] == ["against-depth"]
    with pytest.raises(ConfigError, match="of one depth"):
        gather(several(*[changed(2, 2, f"training.seed={seed}") for seed in range(MAX_DRAWN + 1)]), None)


def test_dashes_distinguish_more_methods_than_colours() -> None:
    kinds = [changed(n, 2, f"model.d_ff={32 * k}") for k in range(1, MAX_DRAWN + 2) for n in (2, 4)]
    lines = panel(against_depth(several(*kinds)), "dev loss")
    assert len(lines) == MAX_DRAWN + 1
    assert len({(line.run, line.variant) for line in lines.values()}) == len(lines)


def test_error_bars_are_drawn(tmp_path: Path) -> None:
    seeds = [changed(n, 6, f"training.seed={seed}") for n in (6, 12) for seed in (1, 2)]
    figure = against_depth(several(*seeds, losses=[3.0, 3.4, 2.0, 2.1]))
    assert figure is not None
    bare = replace(
        figure, panels=tuple(replace(p, series=tuple(replace(s, spread=()) for s in p.series)) for p in figure.panels)
    )
    (drawn,), (plain,) = save(figure, tmp_path, ["svg"]), save(replace(bare, key="bare"), tmp_path, ["svg"])
    assert drawn.read_text("utf-8").count("LineCollection") > plain.read_text("utf-8").count("LineCollection")
