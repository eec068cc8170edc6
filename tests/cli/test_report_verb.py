"""`ziggurat report`: the files it writes, what it prints, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ziggurat
from tests.conftest import tiny_experiment
from tests.inspect.runs import train_record, write_run
from ziggurat.config import load_experiment
from ziggurat.config.load import change_section
from ziggurat.data.prepare import prepare


@pytest.mark.slow
def test_the_page_of_one_run_is_in_its_folder(ziggurat: Ziggurat, trained: Path) -> None:
    result = ziggurat("report", trained, "--translations", 3)
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert lines == ["run: too early", f"report: {trained / 'report.html'}"]
    assert "run: translating 3 of 20 sentences of the dev set" in result.err
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "Of 3 of 20 sentences of the dev set" in page
    environment = json.loads((trained / "environment.json").read_text(encoding="utf-8"))
    assert f"torch {environment['torch']}" in page
    assert {"ziggurat", "Python", "processor", "device", "threads"} <= environment.keys()


@pytest.mark.slow
def test_figures_for_papers_and_the_document(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "r.html", tmp_path / "new" / "figures"
    result = ziggurat(
        "report", trained, "--out", out, "--translations", 0, "--figures", folder, "--format", "svg,PNG", "--json"
    )
    assert result.status == 0, result.err
    document = json.loads(result.out)
    keys = [figure["key"] for figure in document["figures"]]
    assert "learning-curves" in keys
    assert {Path(file).name for file in document["files"]} == {
        f"{k}.{kind}" for k in keys for kind in ("svg", "png", "csv")
    }
    assert {path.name for path in folder.iterdir()} == {Path(file).name for file in document["files"]}
    table = (folder / "learning-curves.csv").read_text(encoding="utf-8")
    assert table == document["figures"][keys.index("learning-curves")]["csv"]
    updates = [float(row["x"]) for row in csv.DictReader(io.StringIO(table)) if row["panel"] == "validation"]
    assert updates == [4.0]
    assert document["comparison"] is None
    assert document["runs"][0]["figures"]["update"] == 4
    assert out.is_file()


@pytest.mark.slow
def test_a_given_test_set_is_translated(ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    options = ["--source", text, "--reference", text, "--json"]
    document = json.loads(ziggurat("report", trained, "--out", out, *options).out)
    assert document["comparison"]["sentences"] == 2
    assert f"Of 2 sentences of {text}" in out.read_text(encoding="utf-8")
    short = tmp_path / "short"
    short.write_text("one\n", encoding="utf-8")
    result = ziggurat("report", trained, "--source", text, "--reference", short)
    assert result.status == 2
    assert "must pair up line by line" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "gif"], "choose from png, svg, pdf"),
        (["--source", "x"], "belong together"),
        (["--source", "x", "--reference", "y"], "no such file"),
        (["--source", "x", "--reference", "y", "--translations", "9"], "leave out one of them"),
        (["--out", "nowhere/x.html"], "does not exist"),
    ],
)
def test_what_is_refused(ziggurat: Ziggurat, trained: Path, options: list[str], message: str) -> None:
    result = ziggurat("report", trained, *options)
    assert result.status == 2
    assert message in result.err


@pytest.mark.slow
def test_a_run_that_failed_at_once_has_a_report(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    experiment = load_experiment(trained / "config.yaml")
    failed = write_run(tmp_path / "failed", [train_record(1)], experiment=experiment)
    result = ziggurat("report", trained, failed, "--out", tmp_path / "r.html", "--translations", 2)
    assert result.status == 0, result.err
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "no checkpoint yet" in page
    assert ziggurat("report", trained, trained).status == 2


def test_another_report_is_not_replaced(
    ziggurat: Ziggurat, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = tiny_experiment(tiny_folder)
    a, b, c = (write_run(tmp_path / name, experiment=experiment) for name in "abc")
    page = tmp_path / "report.html"

    def report(*arguments: object) -> int:
        return ziggurat("report", *arguments, "--translations", 0).status

    assert report(a, b) == 0
    first = page.read_bytes()
    assert report(a, b, "--json") == 0
    assert report(a, c, "--json") == 0
    assert page.read_bytes() == first
    result = ziggurat("report", a, c, "--translations", 0)
    assert result.status == 2
    assert "`--force`" in result.err
    assert page.read_bytes() == first
    assert report(b, a) == 0, "the same runs are the same report"
    assert report(a, c, "--force") == 0
    assert page.read_bytes() != first
    # A run that was moved still has its page.
    assert report(a) == report(a) == 0
    assert report(a.rename(tmp_path / "elsewhere")) == 0
    assert report(b, "--out", tmp_path / "elsewhere" / "report.html") == 2


def test_json_has_the_path_of_the_page(ziggurat: Ziggurat, tmp_path: Path, tiny_folder: Path) -> None:
    run = write_run(tmp_path / "a", experiment=tiny_experiment(tiny_folder))
    options = ["--translations", 0, "--json"]
    assert json.loads(ziggurat("report", run, *options).out)["report"] is None
    assert not (run / "report.html").exists()
    out = tmp_path / "r.html"
    assert json.loads(ziggurat("report", run, *options, "--out", out).out)["report"] == str(out)
    assert out.is_file()


@pytest.fixture
def pipeline(tmp_path: Path, tiny_folder: Path) -> Path:
    """The files that a pipeline leaves in its folder, without its texts and models."""
    folder = tmp_path / "pipeline"
    cleaned = {"read": 10, "kept": 7, "dropped": {"empty": 3}, "examples": {}}
    scores = {"teacher": [{"name": "BLEU", "value": 1.9, "interval": 0.9}]}
    documents: dict[str, Any] = {
        "clean/report.json": {"corpora": {"bitext": cleaned}, "notices": []},
        "distil/corpus/manifest.json": {"read": 7, "kept": 6, "dropped": {"ratio": 1}},
        "evaluate/scores.json": {"systems": [["teacher", "run"]], "tests": {"held": scores}},
        "report/report.json": {},
    }
    for name in ("clean", "teacher-data", "teacher", "distil", "evaluate", "report"):
        (folder / name).mkdir(parents=True)
        for file in ("begun.json", "manifest.json"):
            (folder / name / file).write_text(json.dumps({"step": name, "outputs": {}, "files": {"x": [1]}}))
    for path, document in documents.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(document))
    for page in ("report/report.html", "evaluate/robustness.html"):
        (folder / page).write_text("page")
    experiment = tiny_experiment(tiny_folder)
    write_run(folder / "teacher" / "run", [train_record(1)], experiment=experiment)
    data = experiment.data.model_copy(update={"store": str(folder / "teacher-data" / "store")})
    prepare(data)
    return folder


@pytest.mark.parametrize(
    ("step", "corpora", "tests", "reports", "pages"),
    [
        (None, ["bitext", "distil"], ["held"], ["teacher/run", "teacher-data/store"],
         ["evaluate/robustness.html", "report/report.html"]),
        ("clean", ["bitext"], [], [], ["report/report.html"]),
        ("distil", ["distil"], [], [], ["report/report.html"]),
        ("evaluate", [], ["held"], [], ["evaluate/robustness.html", "report/report.html"]),
        ("report", [], [], [], ["report/report.html"]),
    ],
)  # fmt: skip
def test_the_folder_of_a_pipeline_and_its_steps(
    ziggurat: Ziggurat, pipeline: Path, step: str | None, corpora: list[str], tests: list[str], reports: list[str],
    pages: list[str],
) -> None:  # fmt: skip
    folder = pipeline / step if step else pipeline
    before = sorted(pipeline.rglob("*"))
    result = ziggurat("report", folder, "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert (found["step"], list(found["corpora"]), list(found["scores"])) == (step, corpora, tests)
    assert found["reports"] == [str(pipeline / path) for path in reports]
    assert found["pages"] == [str(pipeline / path) for path in pages]
    assert all(
        corpus["read"] == corpus["kept"] + sum(corpus["dropped"].values()) for corpus in found["corpora"].values()
    )
    shown = ziggurat("report", folder)
    assert shown.status == 0
    assert all(page in shown.out for page in pages)
    assert sorted(pipeline.rglob("*")) == before, "nothing is written"
    assert ziggurat("report", folder, "--out", pipeline / "x.html").status == 2


def test_steps_that_made_a_run_or_a_store_have_its_report(ziggurat: Ziggurat, pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "report" / "report.html").unlink()
    assert ziggurat("report", pipeline / "teacher", "--translations", 0).status == 0
    assert (pipeline / "teacher" / "run" / "report.html").is_file()
    out = tmp_path / "data.html"
    assert ziggurat("report", pipeline / "teacher-data", "--out", out).status == 0
    assert out.is_file()
    (pipeline / "distil" / "manifest.json").unlink()
    unfinished = ziggurat("report", pipeline)
    assert unfinished.status == 0
    assert "started but not finished: distil\n" in unfinished.out
    assert json.loads(ziggurat("report", pipeline, "--json").out)["unfinished"] == ["distil"]
    assert json.loads(ziggurat("report", pipeline / "distil", "--json").out)["unfinished"] == ["distil"]
    assert json.loads(ziggurat("report", pipeline / "clean", "--json").out)["unfinished"] == []
    assert "`ziggurat pipeline FILE`" in unfinished.err
    both = ziggurat("report", pipeline, pipeline / "teacher")
    assert both.status == 2
    assert "the folder of a pipeline" in both.err


@pytest.mark.parametrize(("width", "told"), [(16, 0), (32, 1)])
def test_figures_of_unlike_runs_are_reported(
    ziggurat: Ziggurat, tmp_path: Path, tiny_folder: Path, width: int, told: int
) -> None:
    experiment = tiny_experiment(tiny_folder)
    other = change_section(experiment, {"model": {"d_model": width}}, "")
    runs = [
        write_run(tmp_path / name, [train_record(1)], experiment=its) for name, its in (("a", experiment), ("b", other))
    ]
    call = ("report", *runs, "--translations", 0, "--out", tmp_path / "r.html", "--force", "--json")
    result = ziggurat(*call, "--figures", tmp_path / "figures", "--format", "svg")
    assert result.status == 0, result.err
    unlike = json.loads(result.out)["unlike"]
    assert len(unlike) == result.err.count("the runs in these figures differ") == told
    assert all(one in result.err for one in unlike)
    assert "the runs in these figures differ" not in ziggurat(*call).err
