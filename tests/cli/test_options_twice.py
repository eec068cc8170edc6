"""Options given twice: refused if only one value can count, all used if there can be several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sacrebleu
import typer.main

from tests.cli.conftest import Ziggurat
from ziggurat.cli.app import app


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A hypothesis and its reference."""
    hypothesis, reference = tmp_path / "h", tmp_path / "r"
    hypothesis.write_text("the dog sleeps\nhe comes now\n")
    reference.write_text("the dog sleeps now\nhe came\n")
    return hypothesis, reference


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("evaluate", "--hypothesis", "a", "--hypothesis", "b", "--reference", "r"), "--hypothesis"),
        (("evaluate", "--hypothesis=a", "--hypothesis=a", "--reference", "r"), "--hypothesis"),
        (("recipes", "--find", "a", "--find", "b"), "--find"),
        (("translate", "run", "-o", "a", "--output", "b"), "-o` or `--output"),
        (("report", "run", "--out", "a", "--out", "b"), "--out"),
        (("report", "run", "-o", "a", "-o", "b"), "-o"),
        (("report", "run", "-oa", "-ob"), "--output"),
        (("report", "run", "--out=a", "--out", "b"), "--out"),
        (("bulk", "--workers", "2", "--workers", "3", "prepare", "my.yaml"), "--workers"),
        (("prepare", "my.yaml", "data.store=a", "data.store=b"), "data.store="),
        (("translate", "run", "beam=4", "batch_tokens=9", "beam=5"), "beam="),
        (("translate", "run", "decoding.beam_size=4", "beam_size=5"), "beam_size="),
        (("train", "my.yaml", "--run", "a", "training.seed=1", "--run", "b"), "--run"),
        (("train", "--run", "a", "--resume", "training.clip_norm=1", "training.clip_norm=2"), "training.clip_norm="),
    ],
)
def test_a_second_value_is_refused_by_name(ziggurat: Ziggurat, given: tuple[str, ...], told: str) -> None:
    result = ziggurat(*given)
    assert result.status == 2
    assert f"`{told}` is given 2 times" in result.err
    assert not result.out


def test_repeatable_options_are_all_used(ziggurat: Ziggurat, files: tuple[Path, Path]) -> None:
    hypothesis, reference = files
    given = ("evaluate", "--hypothesis", hypothesis, "--reference", reference, "--reference", hypothesis)
    result = ziggurat(*given, "--metrics", "chrf", "--json", "--json")  # repeating a flag changes nothing
    assert json.loads(result.out)[0]["value"] == 100


def test_the_rule_holds_for_every_verb() -> None:
    group = typer.main.get_command(app)
    assert {type(verb).__name__ for verb in group.commands.values()} == {"_Verb"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["chrf++", "chrF++", "chrF2++", "CHRFPP", "chrf2++"])
def test_chrf_with_words_has_several_names(ziggurat: Ziggurat, files: tuple[Path, Path], name: str) -> None:
    result = ziggurat("evaluate", "--hypothesis", files[0], "--reference", files[1], "--metrics", name, "--json")
    (score,) = json.loads(result.out)
    lines = [path.read_text().splitlines() for path in files]
    assert score["value"] == pytest.approx(sacrebleu.CHRF(word_order=2).corpus_score(lines[0], [lines[1]]).score)
    assert "nw:2" in score["signature"]


def test_chrf_with_and_without_words(ziggurat: Ziggurat, files: tuple[Path, Path]) -> None:
    result = ziggurat("evaluate", "--hypothesis", files[0], "--reference", files[1], "--metrics", "chrf++,chrf2")
    assert [line.partition("|")[0] for line in result.out.splitlines()] == ["chrF2", "chrF2++"]
    assert "nw:0" in result.out
    assert "nw:2" in result.out
