"""`ziggurat inspect` with its depth check: what it prints, and what `--suggest` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from tests.cli.conftest import Ziggurat, tiny_config
from ziggurat.config import load_experiment
from ziggurat.config.load import dump
from ziggurat.inspect.check import Label

SHORT = ("--updates", "10", "--no-cost")
HOPELESS = "training.schedule.peak=1e9"


@pytest.mark.slow
def test_a_configuration_is_checked_and_a_run_is_not(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path, trained: Path
) -> None:
    config = tiny_config(tmp_path, tiny_folder)
    found = json.loads(ziggurat("inspect", config, *SHORT, "--no-remedies", "--json").out)
    check = found["depth_check"]
    assert check["verdict"]["label"] in get_args(Label)
    assert check["trial"]["updates"] == check["reference"]["updates"] in (10, 20, 40)
    assert [finding["part"] for finding in check["verdict"]["findings"]] == ["loss", "encoder", "decoder", "source"]
    assert found["parameters"] > 0
    assert "depth_check" not in json.loads(ziggurat("inspect", trained, "--no-cost", "--json").out)
    forced = json.loads(ziggurat("inspect", trained, "--check", *SHORT, "--no-remedies", "--json").out)
    assert forced["depth_check"]["verdict"]


@pytest.mark.slow
def test_a_hopeless_configuration_comes_with_remedies_and_valid_json(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, tiny_folder)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    result = ziggurat("inspect", config, HOPELESS, *SHORT, "--json")
    check = json.loads(result.out, parse_constant=no_constant)["depth_check"]
    assert check["verdict"] == {
        "label": "will not train",
        "learned": None,
        "findings": [check["verdict"]["findings"][0]],
    }
    assert len(check["remedies"]) >= 4
    assert "depth check: trying the configuration" in result.err
    assert "depth check: trying a shallow model" not in result.err  # as above: the store has kept the result
    text = ziggurat("inspect", config, HOPELESS, *SHORT)
    assert "depth check: WILL NOT TRAIN" in text.out
    assert "not finite at update" in text.out
    assert f"  1. {check['remedies'][0]['name']}" in text.out


@pytest.mark.slow
def test_suggest_writes_a_configuration_that_loads(ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tiny_folder)
    out, link = tmp_path / "better.yaml", tmp_path / "link"
    link.symlink_to(out)
    result = ziggurat("inspect", config, HOPELESS, *SHORT, "--no-remedies", "--suggest", link)
    assert link.is_symlink()
    assert "what could help, not tried (`--no-remedies`): pre-norm" in result.out
    assert result.status == 0, result.err
    assert "unchanged, since it trains with none of the remedies" in result.err
    assert dump(load_experiment(out)) == dump(load_experiment(config, [HOPELESS]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-check", "--suggest", "better.yaml"], "`--suggest` needs the depth check"),
        (["--suggest", "nowhere/better.yaml"], "does not exist"),
        (["--updates", "3"], "--updates"),
    ],
)
def test_mistakes_are_reported_before_anything_is_tried(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = ziggurat("inspect", tiny_config(tmp_path, tiny_folder), *arguments)
    assert result.status == 2
    assert message in result.err
    assert "depth check" not in result.err.replace("needs the depth check", "")
