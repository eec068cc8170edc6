"""`ziggurat report`: files it writes, what it prints, what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.inspect.runs import train_record, write_run
from ziggurat.config import load_experiment


@pytest.mark.slow
def test_the_page_of_one_run_lies_in_it(ziggurat: Ziggurat, trained: Path) -> None:
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
    ("options", "said"),
    [
        (["--format", "gif"], "choose from png, svg, pdf"),
        (["--source", "x"], "belong together"),
        (["--source", "x", "--reference", "y"], "no such file"),
        (["--source", "x", "--reference", "y", "--translations", "9"], "leave out one of them"),
        (["--out", "nowhere/x.html"], "does not exist"),
    ],
)
def test_what_is_refused(ziggurat: Ziggurat, trained: Path, options: list[str], said: str) -> None:
    result = ziggurat("report", trained, *options)
    assert result.status == 2
    assert said in result.err


@pytest.mark.slow
def test_a_run_that_failed_at_once_has_a_report(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    experiment = load_experiment(trained / "config.yaml")
    failed = write_run(tmp_path / "failed", [train_record(1)], experiment=experiment)
    result = ziggurat("report", trained, failed, "--out", tmp_path / "r.html", "--translations", 2)
    assert result.status == 0, result.err
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "no checkpoint yet" in page
    assert ziggurat("report", trained, trained).status == 2
