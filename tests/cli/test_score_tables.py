"""Tables of scores in other formats: every number is there, and text cannot break the format."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Ziggurat
from ziggurat.cli.score_tables import TABLE_FORMATS, scores_table
from ziggurat.evaluate.scores import Score
from ziggurat.system.errors import printable

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)
VALUES = st.tuples(st.floats(0, 100), st.none() | st.floats(0, 10))


def score_of(value: float, interval: float | None, metric: str = "BLEU") -> Score:
    return Score(metric, value, f"nrefs:1|of:{metric}", 9, "", interval=interval)


@given(st.dictionaries(NAMES, st.tuples(VALUES, VALUES), min_size=1, max_size=4))
def test_csv_has_every_number_in_a_cell(values: dict[str, tuple[tuple[float, float | None], ...]]) -> None:
    table = scores_table({name: [score_of(*a), score_of(*b, "chrF2")] for name, (a, b) in values.items()}, "csv")
    found = list(csv.DictReader(io.StringIO(table, newline="")))
    assert [(row["system"], row["metric"]) for row in found] == [
        (printable(n), m) for n in values for m in ("BLEU", "chrF2")
    ]
    numbers = [pair for pairs in values.values() for pair in pairs]
    assert [float(row["score"]) for row in found] == [value for value, _ in numbers]
    assert [float(row["spread"]) if row["spread"] else None for row in found] == [spread for _, spread in numbers]
    assert {row["signature"] for row in found} == {"nrefs:1|of:BLEU", "nrefs:1|of:chrF2"}


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
def test_markdown_and_latex_have_a_row_for_each_name(values: dict[str, tuple[float, float | None]]) -> None:
    scores = {name: [score_of(*value)] for name, value in values.items()}
    markdown = scores_table(scores, "markdown").split("\n\n")[0].splitlines()
    assert len(markdown) == 2 + len(values)
    for line, (value, spread) in zip(markdown[2:], values.values(), strict=True):
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3
        assert line.endswith(f" {value:.2f}{'' if spread is None else f' ± {spread:.2f}'} |")
    latex = scores_table(scores, "latex").splitlines()
    rows = latex[latex.index("\\midrule") + 1 : latex.index("\\bottomrule")]
    assert len(rows) == len(values)
    for row in rows:
        plain = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]| \$\\pm\$ ", "", row.removesuffix(" \\\\"))
        assert plain.count("&") == 1
        assert not set("%$#_{}\\") & set(plain)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    texts = {"good_1": ["a small dog runs home"], "bad": ["x y z"], "ref": ["a small dog runs home now"]}
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines * 2), encoding="utf-8")
    return {name: tmp_path / name for name in texts}


@pytest.mark.parametrize("form", TABLE_FORMATS)
def test_the_verb_prints_one_table(ziggurat: Ziggurat, files: dict[str, Path], form: str) -> None:
    call = ["--reference", files["ref"], "--metrics", "chrf,ter", "--format", form]
    alone = ziggurat("evaluate", "--hypothesis", files["good_1"], *call)
    assert alone.status == 0, alone.err
    both = ziggurat("compare", files["good_1"], f"bad={files['bad']}", *call)
    assert both.status == 0, both.err
    for out, systems in ((alone.out, 1), (both.out, 2)):
        assert out.count("nrefs:1|") == (2 * systems if form == "csv" else 2)
        assert out.isascii() or form == "markdown"
    assert "bootstrap" not in both.out
    assert ("good\\_1" in both.out) is (form != "csv")


def test_results_without_a_table_are_refused(ziggurat: Ziggurat, files: dict[str, Path]) -> None:
    call = ["evaluate", "--hypothesis", files["bad"], "--reference", files["ref"]]
    for more in (["--format", "xml"], ["--format", "csv", "--json"]):
        result = ziggurat(*call, *more)
        assert (result.status, result.out) == (2, "")
