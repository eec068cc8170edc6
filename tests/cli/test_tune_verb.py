"""`ziggurat tune` and `diagnose --coordinates`: what they print, write and refuse."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.conftest import tiny_experiment
from ziggurat.config import Experiment, dump, load_experiment
from ziggurat.config.load import change_section
from ziggurat.data.prepare import prepare
from ziggurat.inspect.trial import TrialOptions
from ziggurat.inspect.tuning import Size, with_base


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    experiment = tiny_experiment(folder)
    prepare(experiment.data)
    (path := folder / "my.yaml").write_text(dump(experiment), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_best_rate_of_small_models_is_written_for_the_large_one(
    config: Path, tmp_path: Path, ziggurat: Ziggurat
) -> None:
    out = tmp_path / "tuned.yaml"
    options = ["--depths", "1-1,2-1", "--rates", "1e-3,1e-2,1e-1", "--updates", "10", "--figure", tmp_path / "figures"]
    result = ziggurat("tune", config, "--out", out, *options)
    assert result.status == 0, result.err
    tuned, before = load_experiment(out), load_experiment(config)
    assert tuned.model.transfer is not None
    assert (tuned.model.transfer.encoder_layers, tuned.model.transfer.decoder_layers) == (1, 1)
    assert tuned.model.encoder.layers == before.model.encoder.layers
    assert f"training.schedule.peak={tuned.training.schedule.peak:g}" in result.out
    trials = tmp_path / "tuned.trials.json"
    assert f"finished trials are kept in {trials}" in result.err
    assert "taken over" not in result.err
    again = ziggurat("tune", config, "--out", out, *options)
    assert again.out == result.out, "every loss is kept exactly"
    count = len(json.loads(trials.read_text(encoding="utf-8"))["losses"])
    assert f"{count} trials reused from {trials}" in again.err
    assert again.err.count(", trained by an earlier call") == count
    trials.write_text("{", encoding="utf-8")
    damaged = ziggurat("tune", config, "--out", out, *options)
    assert damaged.status == 2
    assert f"{trials}: damaged" in damaged.err
    rows = result.out.splitlines()
    assert [row.count("*") for row in rows[1:3]] == [1, 1]
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".csv", ".png", ".svg", ".pdf"}


def test_the_written_configuration_has_the_printed_keys(
    config: Path, tmp_path: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda sized, *_: abs(sized.training.schedule.peak - 0.01))
    before = load_experiment(config)
    mine, out = tmp_path / "mine.yaml", tmp_path / "tuned.yaml"
    text = f"# mine\ndata: {json.dumps(before.data.model_dump(mode='json'))}\nmodel: {{preset: tiny}} # small\n"
    mine.write_text(text)
    options = ["--depths", "2-1", "--rates", "5e-3,1e-2,2e-2", "model.dropout.residual=0.2"]
    result = ziggurat("tune", mine, "--out", out, *options)
    assert result.status == 0, result.err
    tuned = load_experiment(out)
    base = {"width": 64, "encoder_layers": 2, "decoder_layers": 1}
    changes = {"transfer": base, "dropout": {"residual": 0.2}}
    expected = load_experiment(mine)
    expected = change_section(expected, {"model": changes, "training": {"schedule": {"peak": 0.01}}}, "")
    assert tuned == expected
    assert mine.read_text() == text
    printed = [line.strip() for line in result.out.splitlines() if line.startswith("    ")]
    assert load_experiment(mine, [*printed, options[-1]]) == expected


def test_the_configuration_is_written_to_the_given_path(
    config: Path, tmp_path: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda *_: 1.0)
    monkeypatch.chdir(tmp_path)
    options = ["--depths", "1-1", "--rates", "1e-3,2e-3,4e-3"]
    Path("link").symlink_to("target")
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDWR | os.O_NONBLOCK)  # so that the writer does not have to wait
    for out in ("link", "pipe", "-"):
        result = ziggurat("tune", config, "--out", out, *options)
        assert result.status == 0, result.err
    assert Path("link").is_symlink()
    assert Path("pipe").is_fifo()
    assert os.read(reader, 1 << 16) == Path("target").read_bytes() == Path("-").read_bytes()
    assert "./-: the configuration" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["-", "-.trials.json", "link", "link.trials.json", "pipe", "target"]
    )


def test_a_rate_that_diverged_is_not_a_result(
    config: Path, tmp_path: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--depths", "1-1,2-1", "--rates", "1e-3,2e-3,4e-3"]

    def loss(sized: Experiment, *_: object) -> float:
        return math.inf if sized.model.encoder.layers == 2 else 1.0

    monkeypatch.setattr("ziggurat.inspect.tuning._loss", loss)
    assert "WARNING: every trial at width 16, 2-1 diverged" in ziggurat("tune", config, *options).out
    found = json.loads(ziggurat("tune", config, *options, "--json").out, parse_constant=pytest.fail)
    assert {one["loss"] for one in found["tried"] if one["encoder_layers"] == 2} == {None}
    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda sized, *_: -sized.training.schedule.peak)
    assert "    training.schedule.peak=0.032\nWARNING: that is at the end of the rates" in (
        ziggurat("tune", config, *options).out
    )
    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda *_: math.inf)
    result = ziggurat("tune", config, *options, "--out", tmp_path / "tuned.yaml")
    assert result.status == 2
    assert "every trial at width 16, 1-1 diverged, even at a rate of" in result.err
    assert not (tmp_path / "tuned.yaml").exists()


def test_an_impossible_figure_is_reported_before_training(
    config: Path, tmp_path: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda *_: pytest.fail("trained"))
    (file := tmp_path / "file").touch()
    result = ziggurat("tune", config, "--depths", "1-1", "--figure", file)
    assert result.status == 2
    assert str(file) in result.err


def test_the_table_is_printed_even_if_the_figure_fails(
    config: Path, tmp_path: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ziggurat.inspect.tuning._loss", lambda *_: 1.0)
    monkeypatch.setattr("ziggurat.inspect.report.drawing.save", fail)
    result = ziggurat("tune", config, "--depths", "1-1", "--rates", "1e-3,2e-3,4e-3", "--figure", tmp_path)
    assert result.status != 0
    assert "best at width 16, 1-1" in result.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["training.batch.max_tokens=25000", "training.batch.accumulate=8"], "has 200,000"),
        (["training.batch.max_tokens=2000", "training.batch.accumulate=1"], None),
        (["training.batch.max_tokens=2000", "training.batch.accumulate=2", "--tokens", "2000"], None),
        (["training.batch.max_tokens=2000", "--tokens", "8000"], "has 2,000"),
        (["training.batch.fit=true"], "sizes it by memory"),
    ],
)
def test_a_batch_far_from_that_of_the_trials_gets_a_warning(
    config: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str | None
) -> None:
    tokens: list[int] = []

    def loss(_sized: object, _store: object, tried: TrialOptions) -> float:
        tokens.append(tried.tokens)
        return 1.0

    monkeypatch.setattr("ziggurat.inspect.tuning._loss", loss)
    result = ziggurat("tune", config, "--depths", "1-1", "--rates", "1e-3,2e-3,4e-3", *options)
    assert result.status == 0, result.err
    asked = int(options[-1]) if "--tokens" in options else 512
    assert {*tokens} == {asked}
    assert f"200 updates of {asked:,} tokens per rate" in result.err
    assert (f"WARNING: an update had {asked:,} tokens here" in result.out) == (said is not None)
    assert (said or "") in result.out
    assert "short trials favour high rates" in result.out


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (2e-3, "the same at width 16, 2-1"),
        (4e-3, "at width 16, 2-1 0.004, one step of the sweep away"),
        (8e-3, "WARNING: at width 16, 2-1 0.008 was best"),
    ],
)
def test_a_best_rate_that_moves_with_the_depth_gets_a_warning(
    config: Path, ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch, best: float, said: str
) -> None:
    def loss(sized: Experiment, *_: object) -> float:
        return abs(math.log(sized.training.schedule.peak / (best if sized.model.encoder.layers == 2 else 2e-3)))

    monkeypatch.setattr("ziggurat.inspect.tuning._loss", loss)
    found = ziggurat("tune", config, "--depths", "1-1,2-1", "--rates", "1e-3,2e-3,4e-3,8e-3,1.6e-2").out
    assert "    training.schedule.peak=0.002\n" in found
    assert f"\n{said}" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depths", "3"], "--depths 3"),
        (["--rates", "1e-3,fast"], "--rates 1e-3,fast"),
        (["--width", "7"], "width 7"),
        (["model.residual=post"], "residual: post"),
        (["model.encoder={layers: 18, ranges: [{layers: 4, residual: post}]}"], "`residual: post`; it needs `pre`"),
        (["training.schedule={kind: noam, warmup_updates: 4}"], "noam"),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused_at_once(
    config: Path, ziggurat: Ziggurat, arguments: list[str], message: str
) -> None:
    result = ziggurat("tune", config, *arguments)
    assert result.status == 2
    assert message in result.err


@pytest.mark.slow
def test_the_coordinate_check_distinguishes_a_base_from_none(config: Path, ziggurat: Ziggurat) -> None:
    result = ziggurat("diagnose", config, "--coordinates", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert len(found["sizes"]) == 6
    assert not found["flat"]
    assert max(found["spread"]["depth"].values()) > 2
    based = with_base(load_experiment(config), Size(16, 3, 3))
    (tuned := config.with_name("based.yaml")).write_text(dump(based), encoding="utf-8")
    assert json.loads(ziggurat("diagnose", tuned, "--coordinates", "--json").out)["flat"]
    refused = ziggurat("diagnose", config, "--coordinates", "--layers")
    assert refused.status == 2
