"""`--ensemble`: several models on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ziggurat
from ziggurat.translate.translator import load_translator


@pytest.mark.slow
def test_every_verb_averages_the_models_it_is_given(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    early, late = (trained / "checkpoints" / f"step-{update:08d}" for update in (2, 4))
    lines = text.read_text(encoding="utf-8").splitlines()
    ensemble = load_translator([trained, early], device="cpu")
    said = f"ensemble of 2: {trained}: best, update 4; {early}: update 2"
    assert ensemble.origin == said

    status, out, errors = ziggurat("score", trained, "--ensemble", early, "--source", text, "--target", text)
    assert (status, errors.splitlines()[0]) == (0, said)
    assert out.splitlines() == [f"{s.log_probability:.6f}" for s in ensemble.score(lines, lines)]
    alone = ziggurat("score", trained, "--source", text, "--target", text)[1]
    assert alone != out
    assert ziggurat("score", trained, "--ensemble", late, "--source", text, "--target", text)[1] == alone

    settings = ["max_length.limit=3", "min_length=2", "beam_size=2", "n_best=2"]
    status, out, errors = ziggurat("translate", trained, *settings, "--ensemble", early, "-i", text, "--json")
    assert (status, errors.splitlines()[0]) == (0, said)
    same: dict[str, Any] = {"beam_size": 2, "n_best": 2, "min_length": 2, "max_length": {"limit": 3}}
    short = load_translator([trained, early], device="cpu", **same)
    assert out.splitlines() == [t.to_json() for t in short.translate(lines)]
    single = ziggurat("translate", trained, *settings, "-i", text, "--json")[1]
    assert [list(json.loads(line)) for line in out.splitlines()] == [
        list(json.loads(line)) for line in single.splitlines()
    ]

    output = tmp_path / "output"
    pairs = ["--source", text, "--reference", text, "--metrics", "chrf", "-o", output]
    status, out, errors = ziggurat("evaluate", trained, *settings, "--ensemble", early, *pairs)
    assert (status, errors.splitlines()[0]) == (0, said)
    assert output.read_text(encoding="utf-8").splitlines() == [t.text for t in short.translate(lines)]


@pytest.mark.slow
def test_which_applies_only_to_runs(ziggurat: Ziggurat, trained: Path, text: Path) -> None:
    early = trained / "checkpoints" / "step-00000002"
    texts = ["--source", text, "--target", text]
    status, _, errors = ziggurat("score", trained, "--ensemble", trained, "--ensemble", early, "--which", "2", *texts)
    assert (status, errors.splitlines()[0]) == (
        0,
        f"ensemble of 3: {trained}: update 2; {trained}: update 2; {early}: update 2",
    )
    status, _, errors = ziggurat("score", early, "--ensemble", early, "--which", "best", *texts)
    assert status == 2
    assert "has no checkpoint `best`" in errors


def test_mistakes_are_named(ziggurat: Ziggurat, trained: Path, text: Path) -> None:
    status, out, errors = ziggurat("translate", trained, "--ensemble", "nowhere", "-i", text)
    assert (status, out) == (2, "")
    assert "nowhere: no such run or model directory" in errors
    for options in (["--ensemble", trained], ["--which", "best"], ["--device", "cpu"]):
        status, _, errors = ziggurat("evaluate", "--hypothesis", text, "--reference", text, *options)
        assert status == 2
        assert "`--hypothesis` is scored as it is, without a model: leave out" in errors
    for arguments in (
        ("score", trained, "--source", "-", "--target", "-"),
        ("evaluate", "--hypothesis", "-", "--reference", "-"),
        ("report", trained, "--source", "-", "--reference", "-"),
    ):
        status, _, errors = ziggurat(*arguments)
        assert status == 2
        assert "only one of the inputs can be standard input" in errors
