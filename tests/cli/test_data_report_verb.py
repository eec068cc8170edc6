"""`ziggurat report STORE`: the page, its warnings, figures and document, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ziggurat
from tests.inspect.test_data_report import prepared
from tests.inspect.test_report_page import sound
from ziggurat.data.prepare import CLEANING
from ziggurat.system.files import content_checksum


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_it_writes_the_page_and_warns(ziggurat: Ziggurat, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = ziggurat("report", store, "--out", out)
    assert result.status == 0, result.err
    assert result.out.splitlines() == [f"{store}: 6 of 11 training pairs kept", f"report: {out}"]
    assert "warning: CONTAMINATION: 3 of 4" in " ".join(result.err.split())
    sound(out.read_text("utf-8"))


@pytest.mark.slow
def test_figures_and_the_document(ziggurat: Ziggurat, store: Path, tmp_path: Path) -> None:
    files = {"--source": tmp_path / "s", "--reference": tmp_path / "r"}
    for path in files.values():
        path.write_text("Eins 1\n" if path.name == "s" else "Anders\n")
    options = [x for pair in files.items() for x in pair]
    result = ziggurat(
        "report", store, "--out", tmp_path / "r.html", "--json", "--figures", tmp_path / "f",
        "--format", "svg", *options,
    )  # fmt: skip
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert {Path(file).name for file in document["files"]} == {
        f"{key}.{kind}" for key in ("lengths", "length-ratios") for kind in ("svg", "csv")
    }
    assert document["overlap"][str(tmp_path / "s")] == {"sentences": 2, "found": 1, "pairs": 0, "sides": 1}
    assert document["corpora"][0]["dropped"] == {"identical": 1, "duplicate": 2}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--translations", 3], "leave out `--translations`"),
        (["other"], "a report is about runs, or about one store alone"),
        (["--source", "x"], "belong together"),
    ],
)
def test_what_is_refused(ziggurat: Ziggurat, store: Path, tmp_path: Path, more: list[Any], message: str) -> None:
    (tmp_path / "other").mkdir()
    given = [tmp_path / "other" if part == "other" else part for part in more]
    result = ziggurat("report", store, *given, "--out", tmp_path / "r.html")
    assert result.status == 2
    assert message in " ".join(result.err.split())
    assert not (tmp_path / "r.html").exists()


def test_a_file_that_the_package_did_not_write_is_not_replaced(
    ziggurat: Ziggurat, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "report.html"
    page.write_text("<html>of last year</html>")
    result = ziggurat("report", store)
    assert result.status == 2
    message = "report.html: exists and is not a page that ziggurat wrote; name another file with `--out`"
    assert message in " ".join(result.err.split())
    assert page.read_text() == "<html>of last year</html>"


@pytest.mark.slow
def test_pages_that_the_package_wrote_are_replaced(ziggurat: Ziggurat, store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("")  # like a file that `mktemp` creates
    mark = '<meta name="generator" content="Ziggurat">\n'
    for _ in range(2):
        assert ziggurat("report", store, "--out", page).status == 0
        assert mark in page.read_text("utf-8")


@pytest.mark.slow
def test_a_damaged_store_is_named(ziggurat: Ziggurat, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / CLEANING).write_text("{}")
    result = ziggurat("report", tmp_path / "store", "--out", tmp_path / "r.html")
    assert result.status == 2
    assert CLEANING in result.err
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    del manifest["files"][CLEANING]
    manifest["checksum"] = content_checksum(manifest)
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(manifest))
    assert ziggurat("report", tmp_path / "store", "--out", tmp_path / "r.html").status == 0
