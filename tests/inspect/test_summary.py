"""Verdicts and answers in plain words, on records whose outcome is known."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.inspect.runs import train_record, validation_record, write_run
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.data.prepare import prepare
from ziggurat.inspect.report.content import as_record, differing, gather, set_away, standing
from ziggurat.inspect.report.page import answer, compared, differences
from ziggurat.inspect.report.runs import read_run, read_runs
from ziggurat.train.records import Record, write_records


def verdict_of(folder: Path, metrics: list[dict[str, Any]], floor: float | None = 5.9, **values: Any) -> str:
    run = write_run(folder, metrics, log=["first update", "stopped after update 9: reached (1 s)"])
    if values:
        write_records(run, [Record(300, 0.0, {"encoder": 2, "decoder": 2}, values)])
    return standing(read_run(run), floor).verdict


def dev(*nlls: float, bleu: float = 0.0) -> list[dict[str, Any]]:
    """A run of 300 updates with these dev losses along the way."""
    places = [300 * (i + 1) // len(nlls) for i in range(len(nlls))]
    scored = [validation_record(place, nll=nll, bleu=bleu) for place, nll in zip(places, nlls, strict=True)]
    return [train_record(150), train_record(300), *scored]


@pytest.mark.parametrize(
    ("metrics", "options", "verdict"),
    [
        ([], {}, "no record"),
        (dev(5.2, 4.7), {}, "trains"),
        (dev(6.1, 8.1), {}, "did not train"),  # like plain post-norm, 18-18 (experiments/depth-trainability)
        (dev(5.7), {}, "did not train"),
        ([train_record(300, nll=5.67)], {}, "did not train"),
        ([train_record(300, nll=4.0)], {}, "trains"),
        ([train_record(60, nll=6.5)], {}, "too early"),
        ([train_record(50, nll=8.6), train_record(100, nll=5.65)], {}, "too early"),
        ([train_record(101, nll=5.65)], {}, "did not train"),
        ([train_record(1000, nll=7.0), train_record(2000, nll=5.7)], {}, "too early"),  # 0.1 to go, 1.3 since halfway
        ([train_record(1000, nll=5.75), train_record(2000, nll=5.7)], {}, "did not train"),
        (dev(7.0, 6.3, 5.8), {}, "too early"),
        (dev(7.0, 5.8, 5.77, 5.75), {}, "did not train"),
        (dev(5.0, math.nan), {}, "diverged"),
        ([*dev(5.0), {"kind": "validation", "update": 400}], {}, "diverged"),  # not finite, so left out
        ([train_record(300, nll=math.inf)], {}, "diverged"),
        (dev(4.0, 4.6), {}, "got worse"),
        (dev(4.0, 4.4), {}, "trains"),
        (dev(4.0), {"source_dependence": 0.001}, "ignores its source so far"),
        (dev(4.0), {"source_dependence": 0.8}, "trains"),
        (dev(4.0), {"floor": None}, "unclear"),
        (dev(4.0, bleu=12.0), {"floor": None}, "trains"),
        (dev(4.0), {"floor": None, "source_dependence": 0.8}, "trains"),
    ],
)
def test_verdicts(tmp_path: Path, metrics: list[dict[str, Any]], options: dict[str, Any], verdict: str) -> None:
    assert verdict_of(tmp_path / "a", metrics, **options) == verdict


@pytest.mark.parametrize(
    ("measured", "verdict", "unhealthy"),
    [
        (0, "trains", 0),  # before training, the only one in a run of short updates
        (50, "trains", 0),
        (149, "trains", 0),
        (150, "ignores its source so far", 1),
        (300, "ignores its source so far", 1),
    ],
)
def test_only_measures_of_the_second_half_judge_a_run(
    tmp_path: Path, measured: int, verdict: str, unhealthy: int
) -> None:
    run = write_run(
        tmp_path / "a", dev(4.0, bleu=90.0), log=["first update", "stopped after update 300: reached (1 s)"]
    )
    starved = {"source_dependence": 0.001, "gradient_norm": {"encoder": [1e-4, 1.0], "decoder": [1.0, 1.0]}}
    write_records(run, [Record(measured, 0.0, {"encoder": 2, "decoder": 2}, starved)])
    its = standing(read_run(run), 5.9)
    assert (its.verdict, len(its.complaints)) == (verdict, unhealthy)


def test_failures_are_counted(tmp_path: Path) -> None:
    metrics = [train_record(10, skipped=2, data_wait_share=0.5), train_record(20, skipped=1, roll_backs=1)]
    its = standing(read_run(write_run(tmp_path / "a", metrics)), 5.9)
    messages = " ".join(its.complaints)
    assert "3 updates were skipped" in messages
    assert "rolled back to an earlier checkpoint 1 time." in messages
    assert "26 % of its time waiting" in messages
    assert "Not finished" in messages


def test_waiting_is_measured_in_time_and_not_in_records(tmp_path: Path) -> None:
    """A short partial record at the end of a run may look like this."""
    waits = [(100.0, 0.0), (200.0, 0.0), (202.0, 0.9)]
    metrics = [train_record(n, seconds=now, data_wait_share=share) for n, (now, share) in enumerate(waits, start=1)]
    its = standing(read_run(write_run(tmp_path / "a", metrics)), 5.9)
    assert "waiting" not in " ".join(its.complaints)
    metrics[1]["data_wait_share"] = 0.3
    its = standing(read_run(write_run(tmp_path / "b", metrics)), 5.9)
    assert "16 % of its time waiting" in " ".join(its.complaints)


def test_measures_outside_their_bands_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", dev(4.0), log=["first update", "stopped after update 300: reached (1 s)"])
    healthy = {"gradient_norm": {"encoder": [1.0, 0.5], "decoder": [1.0, 1.0]}}
    starved = {"gradient_norm": {"encoder": [1e-4, 1.0], "decoder": [1.0, 1.0]}}
    layers = {"encoder": 2, "decoder": 2}
    write_records(folder, [Record(0, 0.0, layers, starved), Record(300, 0.0, layers, healthy)])
    assert standing(read_run(folder), 5.9).complaints == ()
    write_records(folder, [Record(0, 0.0, layers, healthy), Record(300, 0.0, layers, starved)])
    its = standing(read_run(folder), 5.9)
    assert len(its.complaints) == 1
    assert its.complaints[0].startswith("The gradient of the first encoder layer is 1.0e-04 of the last one's")
    assert its.complaints[0].endswith("the lower layers hardly learn.")
    assert len(its.remedies) == 1
    assert its.remedies[0].startswith("Use methods for deep models")


def test_the_best_run_is_named_with_its_lead(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    deeper = change_section(experiment, {"model": {"encoder": {"layers": 9}}}, "experiment")
    shallow = write_run(tmp_path / "shallow", dev(4.0, bleu=10.0), experiment=experiment)
    deep = write_run(tmp_path / "deep", dev(4.5, bleu=12.5), experiment=deeper)
    content = gather(read_runs([shallow, deep]), None)
    assert compared(content) == "2 runs, on the same data. They differ in `model.encoder.layers` (2 / 9)."
    assert answer(content)[0] == "deep is best, with a dev BLEU of 12.5, 2.5 more than shallow."
    assert as_record(content)["unlike"] == ["depth"]


def test_if_no_run_translates_the_loss_decides(tmp_path: Path) -> None:
    metrics = {"a": dev(4.0, bleu=0.3), "b": dev(4.5, bleu=0.9)}
    content = gather(read_runs([write_run(tmp_path / name, its) for name, its in metrics.items()]), None)
    assert answer(content)[0] == "a is best, with a dev loss of 4.00, 0.50 less than b."


@pytest.mark.parametrize(
    ("bleu", "dev_set", "vocabulary", "messages"),
    [
        (10.0, "other.qhi", b"a\n", "Dev scores are not ranked: the dev sets"),
        (0.0, "other.qhi", b"a\n", "Dev scores are not ranked: the dev sets"),
        (0.0, "dev.qhi", b"b\n", "Dev losses, which are per token, are not ranked: the vocabularies"),
        (0.0, "dev.qhi", b"a\n", "a is best, with a dev loss"),
        (10.0, "dev.qhi", b"b\n", "b is best, with a dev BLEU"),
    ],
)
def test_only_comparable_runs_are_ranked(
    tmp_path: Path, bleu: float, dev_set: str, vocabulary: bytes, messages: str
) -> None:
    mine = tiny_experiment(tmp_path)
    elsewhere = [{"source": "elsewhere/dev.qlo", "target": f"elsewhere/{dev_set}"}]
    other = change_section(mine, {"data": {"dev": elsewhere}}, "experiment")
    a = write_run(tmp_path / "a", dev(4.0, bleu=bleu), experiment=mine)
    b = write_run(tmp_path / "b", dev(4.5, bleu=bleu + 0.9), experiment=other, vocabulary=vocabulary)
    assert answer(gather(read_runs([a, b]), None))[0].startswith(messages)


def test_settings_that_differ_and_those_set(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    other = change_section(experiment, {"training": {"seed": 7}, "decoding": {"banned": ["x"]}}, "experiment")
    assert {s.key: s.values for s in differing([experiment, other, experiment])} == {
        "training.seed": (str(experiment.training.seed), "7", str(experiment.training.seed)),
        "decoding.banned": ("[]", '["x"]', "[]"),
    }
    assert differing([experiment, experiment]) == []
    away = {s.key: s.values for s in set_away(experiment)}
    assert away["model.d_model"] == ("512", "16")
    assert "training.seed" not in away


@pytest.mark.parametrize(
    ("updates", "model", "found"),
    [
        ((300, 300), {}, []),
        ((300, 310), {}, []),
        ((100, 500), {}, ["updates"]),
        ((300, 300), {"d_model": 32}, ["width"]),
        ((500, 300), {"d_model": 32, "decoder": {"layers": 5}}, ["updates", "width", "depth"]),
    ],
)
def test_runs_of_unequal_length_and_size_are_ranked_with_a_note(
    tmp_path: Path, updates: tuple[int, int], model: dict[str, Any], found: list[str]
) -> None:
    mine = tiny_experiment(tmp_path)
    other = change_section(mine, {"model": model}, "experiment") if model else mine
    runs = []
    for name, experiment, last in zip("ab", (mine, other), updates, strict=True):
        metrics = [train_record(last), validation_record(last, nll=4.0, bleu=10.0 + last / 100)]
        runs.append(write_run(tmp_path / name, metrics, experiment=experiment))
    content = gather(read_runs(runs), None)
    assert as_record(content)["unlike"] == found
    assert len(answer(content)) == 1 + bool(found)


@pytest.mark.parametrize(
    ("changes", "vocabulary", "said"),
    [
        ({"training": {"seed": 9}}, b"a\n", []),
        ({"data": {"train": [{"source": "x.de", "target": "x.en"}]}}, b"a\n", ["on different data"]),
        ({"data": {"dev": [{"source": "d.de", "target": "d.en"}]}}, b"a\n", ["dev sets"]),
        ({"model": {"d_model": 32}}, b"b\n", ["wide", "vocabularies"]),
    ],
)
def test_differences_are_reported_before_a_method_is_praised(
    tmp_path: Path, changes: dict[str, Any], vocabulary: bytes, said: list[str]
) -> None:
    mine = tiny_experiment(tmp_path)
    other = change_section(mine, changes, "experiment")
    a = write_run(tmp_path / "a", dev(4.0), experiment=mine)
    b = write_run(tmp_path / "b", dev(4.0), experiment=other, vocabulary=vocabulary)
    found = differences(gather(read_runs([a, b]), None))
    assert len(found) == len(said)
    assert all(part in one for part, one in zip(said, found, strict=True))


def test_runs_that_did_not_train_are_not_ranked(tmp_path: Path) -> None:
    experiment = tiny_experiment(tmp_path)
    prepare(experiment.data)
    metrics = {"a": dev(8.1), "b": dev(8.0), "c": dev(1.0)}
    runs = {name: write_run(tmp_path / name, its, experiment=experiment) for name, its in metrics.items()}
    content = gather(read_runs([runs["a"], runs["b"]]), None)
    assert [standing.verdict for standing in content.standings] == ["did not train"] * 2
    assert len(answer(content)) == 1
    content = gather(read_runs([runs["a"], runs["c"]]), None)
    assert [standing.verdict for standing in content.standings] == ["did not train", "trains"]
    assert not any("is best" in sentence for sentence in answer(content))


def test_a_distilled_students_dev_loss_is_judged_by_the_dev_text(tmp_path: Path) -> None:
    """A weak teacher's output is so repetitive that word frequencies predict it better than a model predicts text."""
    experiment = tiny_experiment(tmp_path)
    words = ["".join(pair) for pair in product("abcdefgh", repeat=2)]
    texts = {  # files from the experiment
        "train": ["the the the of the of"] * 60 + [" ".join(words)],
        "dev": [" ".join(words[i : i + 8]) for i in range(0, 64, 8)],
    }
    for split, lines in texts.items():
        for side in ("qlo", "qhi"):
            (tmp_path / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    experiment = change_section(experiment, {"data": {"subword": {"vocabulary_size": 290}}}, "experiment")
    prepare(experiment.data)
    store = Store.open(experiment.data.store)
    of_training, of_dev = unigram_entropy(store), unigram_entropy(store, on_dev=True)
    assert of_dev - 1.0 > of_training
    folders = [
        write_run(tmp_path / name, dev(nll, bleu=bleu), experiment=experiment)
        for name, nll, bleu in (("teacher", of_dev - 0.9, 1.8), ("student", of_dev - 1.0, 2.3))
    ]
    content = gather(read_runs(folders), None)
    assert [standing.verdict for standing in content.standings] == ["trains", "trains"]
    stalled = write_run(tmp_path / "stalled", dev(of_dev - 0.1), experiment=experiment)
    assert gather(read_runs([stalled]), None).standings[0].verdict == "did not train"
    # A run without validations is judged by its training data.
    blind = write_run(tmp_path / "blind", [train_record(300, nll=of_dev - 1.0)], experiment=experiment)
    assert gather(read_runs([blind]), None).standings[0].verdict == "did not train"


def test_advice_omits_what_the_run_already_has(tmp_path: Path) -> None:
    post = {"residual": "post", "init": {"kind": "depth_scaled"}}
    experiment = change_section(tiny_experiment(tmp_path), {"model": post}, "experiment")
    folder = write_run(tmp_path / "a", dev(4.0), experiment=experiment)
    starved = {"gradient_norm": {"encoder": [1e-4, 1.0], "decoder": [1.0, 1.0]}}
    write_records(folder, [Record(300, 0.0, {"encoder": 2, "decoder": 2}, starved)])
    content = gather(read_runs([folder]), None)
    (remedy,) = content.standings[0].remedies
    assert "dlcl" in remedy
    assert "depth_scaled" not in remedy
    assert as_record(content)["runs"][0]["method"] == ["post", "depth_scaled"]
    assert "post + depth_scaled" in compared(content)


def test_the_scores_of_a_run_are_those_of_one_checkpoint(tmp_path: Path) -> None:
    scores = [{"bleu": 9.0, "chrf": 40.0}, {"bleu": 12.0, "chrf": 38.0}, {}]
    bare = {name: value for name, value in validation_record(0).items() if name not in ("bleu", "chrf")}
    validations = [{**bare, "update": n, **found} for n, found in enumerate(scores, start=1)]
    figures = standing(read_run(write_run(tmp_path / "a", [train_record(3), *validations])), 5.9).figures
    assert (figures["bleu"], figures["chrf"]) == (12.0, 38.0)
    figures = standing(read_run(write_run(tmp_path / "b", [train_record(3), validations[2]])), 5.9).figures
    assert (figures["bleu"], figures["chrf"]) == (None, None)
