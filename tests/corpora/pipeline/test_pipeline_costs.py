"""The expected costs of a pipeline's steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import tiny_experiment
from tests.corpora.pipeline.conftest import MakeContext, changed, parsed, small_step, whole
from tests.small import checkpoint_meta
from ziggurat.config import dump
from ziggurat.config.data import FilterConfig
from ziggurat.config.load import change_section
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.costs import CorpusSizes, Costs, LineCount, cleaning, lines_done, lines_of, updates_done
from ziggurat.corpora.pipeline.step import Expected, Spent, StepProgress, StepStatus
from ziggurat.corpora.pipeline.steps import steps_of
from ziggurat.data.readers import CorpusReader
from ziggurat.model.run_folder import write_meta

GROWTH = {"stages": [{"layers": 1, "updates": 1000}, {"layers": 2, "updates": 6000}]}


def test_cleaning_costs_what_its_filters_cost() -> None:
    pairs = LineCount(1_000_000)

    def seconds(workers: int, **filters: Any) -> float:
        found = cleaning(pairs, FilterConfig.model_validate(filters), workers).seconds
        assert found is not None
        return found

    assert seconds(2) == pytest.approx(seconds(1) / 2)
    languages, scored = seconds(1, languages={}) - seconds(1), seconds(1, pair_score={}) - seconds(1)
    assert min(languages, scored) > seconds(1)
    # One process learns a score, from at most that many pairs.
    assert seconds(4, pair_score={}) > seconds(1, pair_score={}) / 4
    assert seconds(1, pair_score={"pairs": 2_000_000}) == pytest.approx(seconds(1, pair_score={"pairs": 1_000_000}))
    assert cleaning(None, FilterConfig(), 1).seconds is None


@pytest.mark.parametrize(
    ("changes", "seconds", "said"),
    [
        ({"stop": {"updates": 8000}}, 100 + 1000 + 1000, "8,000 updates"),
        ({"stop": {"updates": 2000}}, 100 + 200, "2,000 updates"),  # it ends before the second stage does
        ({"stop": {"updates": 500}}, 50, "500 updates"),
        ({"stop": {"updates": 2000, "epochs": 1}}, 300, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "patience": 3}}, 300, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "minutes": 4}}, 240, "at most 2,000 updates"),
        ({"stop": {"updates": 2000, "minutes": 6}}, 300, "2,000 updates"),
    ],
)
def test_training_takes_no_more_updates_than_it_has(
    changes: dict[str, Any],
    seconds: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = SimpleNamespace(
        length=(10, 10),
        batches=SimpleNamespace(origin="assumed"),
        memory=SimpleNamespace(peak=1, checkpoint=0),
        time=SimpleNamespace(seconds=0.5, others=0.6, delay=1.0),
        shallower=((1, 1, 0.1), (2, 2, 0.2)),
    )
    monkeypatch.setattr(Costs, "of", lambda self, name: cost)
    experiment = tiny_experiment(tmp_path)
    model = change_section(experiment.model, {"encoder": {"layers": 4}}, "model")
    training = change_section(experiment.training, {"growth": GROWTH, **changes}, "training")
    student = experiment.model_copy(update={"model": model, "training": training})
    costs = Costs({"student": student}, CorpusSizes(PipelineContext(parsed(whole()))))
    found = costs.training("student")
    assert found.seconds == pytest.approx(seconds)
    assert found.said == f"{said}, sentences of 10 target tokens (assumed)"
    cost.time.delay = 2.5
    busy = costs.training("student").said.removeprefix(found.said)
    assert busy.startswith("; the machine is busy: 60% of its CPU time went to other processes")
    assert "at least 2.5 times as long" in busy
    cold = change_section(training, {"schedule": {"warmup_updates": 10**6}}, "training")
    student = student.model_copy(update={"training": cold})
    told = Costs({"student": student}, CorpusSizes(PipelineContext(parsed(whole())))).training("student").said
    warned = "; `student.training.schedule.warmup_updates: 1000000` is more than `student.training.stop.updates: "
    assert (warned in told) == (cold.stop.updates is not None)
    assert costs.trained("student", 0, 0.0) is None
    begun, limit = costs.trained("student", 400, 120.0), changes["stop"].get("minutes")
    updates = 40 / (seconds if limit != 4 else 300)  # from the shallow ones
    assert begun is not None
    assert begun.share == pytest.approx(max(updates, 120 / (60 * limit) if limit else 0))
    assert begun.said == f"400 of {changes['stop']['updates']:,} updates"
    assert begun.seconds == 120.0  # since the checkpoint with these updates, not since a later change in the folder


@pytest.mark.parametrize(
    ("state", "cost", "done", "spent", "seconds", "said"),
    [
        ("begun", Expected(41.0, said="800 updates"), StepProgress(0.25, "400 of 800 updates"), Spent(60.0, 1), 180.0,
         "400 of 800 updates are done, in 1:00; the rest at that speed"),
        ("running", Expected(41.0), StepProgress(0.25, "400 of 800 updates", 40.0), Spent(60.0, 1), 120.0,
         "400 of 800 updates are done, in 40 s; the rest at that speed"),
        ("running", Expected(40.0), StepProgress(0.25, "1 of 4 lines"), Spent(), 30.0, "1 of 4 lines are done"),
        ("begun", Expected(41.0, said="9 pairs"), None, Spent(60.0, 1), 41.0,
         "9 pairs; for the whole step; 1:00 have already been spent on it"),
        ("after", Expected(), None, Spent(16.0, 1), 16.0, "what it took before"),
        ("page", Expected(said="9 lines"), None, Spent(16.0, 1), 16.0, "9 lines; at most what the whole step took"),
        ("after", Expected(5.0, said="rough"), None, Spent(16.0, 1), 5.0, "rough"),
    ],
)  # fmt: skip
def test_remaining_time_follows_progress_or_else_the_last_run(
    state: Any, cost: Expected, done: StepProgress | None, spent: Spent, seconds: float, said: str
) -> None:
    step = small_step("one", cost=lambda: cost, progress=lambda: done)
    found = StepStatus(step, state, "", spent, finished=state in ("after", "page")).expected()
    assert (found.seconds, found.said) == (pytest.approx(seconds), said)
    # The time of an unfinished result says nothing.
    assert StepStatus(changed(step, cost=Expected), "changed", "", spent).expected().seconds is None


def test_progress_and_time_are_read_at_one_moment() -> None:
    moments = [1, 2, 3]  # another call is running, and does a quarter of everything per minute

    def cost() -> Expected:
        moments.pop(0)
        return Expected(41.0)

    def done() -> StepProgress:
        return StepProgress(moments[0] / 4, f"{moments[0]} of 4 lines")

    state = StepStatus(
        small_step("one", cost=cost, progress=done),
        "running", "", Spent(30.0, 1, running=0.0), spent_by_now=lambda: 60.0 * moments[0],
    )  # fmt: skip
    assert state.expected().said == "1 of 4 lines are done, in 1:00; the rest at that speed"
    assert state.expected().said == "2 of 4 lines are done, in 2:00; the rest at that speed"


def test_shards_and_checkpoints_show_the_progress(tmp_path: Path) -> None:
    assert lines_done(tmp_path, "filtered", "lines") is None
    assert updates_done(tmp_path) == (0, 0.0)
    (tmp_path / "filtered").mkdir()
    (tmp_path / "plan.json").write_text('{"lines": 50, "settings": {"shard_lines": 20}}')
    for number, share in enumerate((0.0, 0.4, 0.8, 1.0)):
        assert lines_done(tmp_path, "filtered", "lines") == StepProgress(share, f"{round(50 * share)} of 50 lines")
        for ending in ("tsv", "json"):
            (tmp_path / "filtered" / f"{number:08d}.{ending}").touch()
    for update in (40, 80):
        (tmp_path / "checkpoints" / f"step-{update:08d}").mkdir(parents=True)
    write_meta(tmp_path / "checkpoints/step-00000040", checkpoint_meta(progress={"seconds": 7.5}))
    assert updates_done(tmp_path) == (40, 7.5)  # from the newest complete one


def test_translation_costs_with_an_existing_model_use_its_configuration(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = SimpleNamespace(
        length=(10, 10),
        forward=SimpleNamespace(source=1.0, target=1.0),
        time=SimpleNamespace(seconds=1.0, flops=1.0),
    )
    told: list[Any] = []
    monkeypatch.setattr("ziggurat.inspect.cost.estimate_cost", lambda *given: told.append(given) or cost)
    monkeypatch.setattr(
        "ziggurat.model.counts.vocabulary_sizes", lambda data, folder: SimpleNamespace(source=5, target=6)
    )
    monkeypatch.setattr("ziggurat.model.directory.locate_weights", lambda path: (path / "model.safetensors", path))
    existing = {"teacher": place / "run"}
    (place / "run").mkdir()
    sizes = CorpusSizes(context(whole()))
    costs = Costs({}, sizes, existing)
    assert costs.translating("teacher", LineCount(9), 1, 1).seconds is None  # it has no configuration
    (place / "run/config.yaml").write_text(dump(tiny_experiment(place)))
    assert costs.translating("teacher", LineCount(9), 1, 1).seconds is not None
    assert told[0][1] == (5, 6)


@pytest.fixture
def expected(context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return what is reported about the cost of each step of a configuration."""
    cost = SimpleNamespace(
        length=(10, 10),
        forward=SimpleNamespace(source=1.0, target=1.0),
        time=SimpleNamespace(seconds=1.0, flops=1.0),
    )
    monkeypatch.setattr(Costs, "of", lambda self, name: cost)
    monkeypatch.setattr(Costs, "training", lambda self, name: None)
    unwanted = ("backward", "teacher", "student", "quantise", "report")

    def told(content: dict[str, Any], *overrides: str) -> dict[str, str]:
        return {s.name: s.cost().said for s in steps_of(context(content, *overrides)) if s.name not in unwanted}

    return told


def test_future_text_is_bounded_by_its_sources(place: Path, expected: Callable[..., dict[str, str]]) -> None:
    pairs, lines = (Path(f"data/{name}.qlo").read_text("utf-8").count("\n") for name in ("train", "text"))
    few = ("monolingual.target.0.lines=7", "bitext.hold_out={dev: 2, test: 3}")
    said = expected(whole(), *few)
    left, rough = pairs - 5, "; a rough estimate"
    assert said["clean"] == f"about {pairs} pairs"
    assert said["backward-data"] == f"at most {left} pairs"
    assert said["backtranslate"] == f"at most 7 lines, 1 worker{rough}"
    assert said["teacher-data"] == f"at most {left + 7} pairs"
    assert said["distil"] == f"at most {left} lines, 1 worker{rough}"
    assert said["distil-monolingual"] == f"at most {lines} lines, 1 worker{rough}"
    assert said["filter"] == f"at most {left + lines} pairs{rough}"
    assert said["align"] == said["student-data"] == f"at most {left + lines} pairs"
    test = Path("data/test.qlo").read_text("utf-8").count("\n") + 3
    assert said["evaluate"] == f"about {test + 4 + 2 * 4} lines per system{rough}"  # 4 perturbed, 4 timed twice
    # Existing results are counted.
    for file in ("clean/train/train.qlo", "monolingual/target.txt", "distil/corpus/target.txt"):
        Path("w", file).parent.mkdir(parents=True)
        Path("w", file).write_text("a\n" * 4)
    said = expected(whole(), *few)
    assert said["backtranslate"] == f"about 4 lines, 1 worker{rough}"
    assert said["teacher-data"] == "at most 8 pairs"
    assert said["distil"] == f"about 4 lines, 1 worker{rough}"
    assert said["filter"] == f"at most {4 + lines} pairs{rough}"


def test_a_plan_reports_that_most_pairs_are_held_out(place: Path, expected: Callable[..., dict[str, str]]) -> None:
    content = whole()
    for number, few in ((60, False), (61, True)):
        content["bitext"]["hold_out"] = {"dev": number, "test": 0}
        assert expected(content)["clean"].endswith("most of which are held out and not trained on") == few


def test_data_not_yet_fetched_is_known_only_by_its_limit(place: Path, expected: Callable[..., dict[str, str]]) -> None:
    content = whole(monolingual={"source": [{"fetch": "a/b"}], "target": [{"fetch": "a/b", "lines": 9}]})
    content["bitext"]["train"] = [{"fetch": "a/c"}]
    said = expected(content)
    assert said["clean"] == said["backward-data"] == "the number of pairs is not known yet"
    assert said["distil"] == said["distil-monolingual"] == "the number of lines is not known yet"
    assert said["backtranslate"].startswith("at most 9 lines")
    content["test"] = [{"name": "new", "fetch": "a/d"}]
    assert expected(content)["evaluate"] == "the number of lines is not known yet"


def test_lines_of_other_files_are_reported_by_their_size_and_rows_of_tables_are_read(
    place: Path, expected: Callable[..., dict[str, str]]
) -> None:
    Path("a.gz").write_bytes(b"x" * 2000)
    found = lines_of([Path("a.gz"), Path("data/train.qlo")])
    assert found == LineCount(100 + Path("data/train.qlo").read_text("utf-8").count("\n"), rough=True)
    assert str(LineCount(5, most=True, rough=True)) == "at most about 5"
    pq.write_table(pa.table({"qlo": ["a"] * 70, "qhi": ["b"] * 70}), "all.parquet")
    content = whole()
    content["bitext"]["train"] = [{"path": "all.parquet"}]
    assert expected(content)["clean"] == "about 70 pairs"


def test_lengths_come_from_the_bitext_until_stores_exist(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[CorpusReader | None] = []
    monkeypatch.setattr("ziggurat.inspect.cost.estimate_cost", lambda experiment, sizes, text: told.append(text))
    there = context(whole())
    Costs({"student": tiny_experiment(place)}, CorpusSizes(there)).of("student")
    [reader] = told
    assert reader is not None
    assert [str(path) for part in reader.files for path in part] == ["data/train.qlo", "data/train.qhi"]
