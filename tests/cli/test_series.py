"""`evaluate` on several test sets and for several checkpoints; perplexity from `score` and `evaluate`."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat, tiny_config
from ziggurat.cli import main
from ziggurat.cli.scoring import parse_test_sets
from ziggurat.system.errors import ConfigError

METRICS = ("--metrics", "bleu,chrf", "max_length.limit=9")


@pytest.fixture(scope="module")
def several(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five checkpoints, the best of which is in the middle."""
    folder = tmp_path_factory.mktemp("several")
    every = {"every_updates": 1, "decode": False}
    training = {"stop": {"updates": 5}, "validation": every, "checkpoint": {"every_updates": 1, "keep_around_best": 3}}
    schedule = {"schedule": {"kind": "constant", "peak": 0.2, "warmup_updates": 0}}  # too high: the best comes early
    with pytest.raises(SystemExit):
        main(["train", str(tiny_config(folder, tiny_folder, **training, **schedule)), "--run", str(folder / "run")])
    return folder / "run"


@pytest.fixture
def sets(tiny_folder: Path, tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Two test sets, of the first 3 development pairs and of 4 more."""
    found = {}
    lines = [(tiny_folder / f"dev.{side}").read_text().splitlines(keepends=True) for side in ("qlo", "qhi")]
    for name, part in (("one", slice(3)), ("two", slice(3, 7))):
        found[name] = tmp_path / f"{name}.qlo", tmp_path / f"{name}.qhi"
        for path, of_side in zip(found[name], lines, strict=True):
            path.write_text("".join(of_side[part]))
    return found


def test_several_test_sets_have_their_scores_and_a_mean(
    ziggurat: Ziggurat, trained: Path, sets: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    options = [
        word for name, (source, reference) in sets.items() for word in ("--test-set", f"{name}={source},{reference}")
    ]
    result = ziggurat("evaluate", trained, *METRICS, *options, "--output", tmp_path / "out", "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert [test_set["name"] for test_set in found["test_sets"]] == ["one", "two"]
    for test_set, (name, (source, reference)) in zip(found["test_sets"], sets.items(), strict=True):
        alone = ziggurat("evaluate", trained, *METRICS, "--source", source, "--reference", reference, "--json")
        assert test_set["scores"] == json.loads(alone.out)
        assert len((tmp_path / "out" / f"{name}.txt").read_text().splitlines()) == len(source.read_text().splitlines())
    for number, summary in enumerate(found["summary"]):
        values = [test_set["scores"][number]["value"] for test_set in found["test_sets"]]
        assert summary["mean"] == pytest.approx(sum(values) / 2)
        assert (summary["min"], summary["max"]) == (min(values), max(values))
    shown = ziggurat("evaluate", trained, *METRICS, *options).out.splitlines()
    assert len(shown) == 6
    assert shown[0].startswith("one: BLEU|")
    assert f"mean {found['summary'][0]['mean']:.1f}" in shown[4]


def test_checkpoints_have_their_scores_and_a_spread(
    ziggurat: Ziggurat, several: Path, sets: dict[str, tuple[Path, Path]]
) -> None:
    texts = "--source", sets["two"][0], "--reference", sets["two"][1]
    result = ziggurat("evaluate", several, *METRICS, "--checkpoints", "last:3", *texts, "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert [checkpoint["update"] for checkpoint in found["checkpoints"]] == [3, 4, 5]
    alone = ziggurat("evaluate", several, *METRICS, "--which", "4", *texts, "--json")
    assert found["checkpoints"][1]["scores"] == json.loads(alone.out)
    for number, summary in enumerate(found["summary"]):
        values = [checkpoint["scores"][number]["value"] for checkpoint in found["checkpoints"]]
        assert summary["mean"] == pytest.approx(statistics.fmean(values))
        assert summary["deviation"] == pytest.approx(statistics.stdev(values))
    around = ziggurat(
        "evaluate", several, "--metrics", "perplexity", "--checkpoints", "around-best:3", *texts, "--json"
    )
    assert around.status == 0, around.err
    best = int((several / "best").resolve().name.removeprefix("step-"))
    found = json.loads(around.out)
    assert [checkpoint["update"] for checkpoint in found["checkpoints"]] == [best - 1, best, best + 1]
    assert found["summary"][0]["max"] > found["summary"][0]["min"] > 1
    shown = ziggurat("evaluate", several, *METRICS, "--checkpoints", "last:3", *texts).out.splitlines()
    assert [line.partition(":")[0] for line in shown[:3]] == ["update 3", "update 4", "update 5"]
    assert "3 checkpoints, last:3" in shown[3]


def test_average_takes_the_named_checkpoints(ziggurat: Ziggurat, several: Path, tmp_path: Path) -> None:
    best = int((several / "best").resolve().name.removeprefix("step-"))
    around = ziggurat("average", several, "--checkpoints", "around-best:3", "--out", tmp_path / "mean", "--json")
    assert json.loads(around.out)["updates"] == [best - 1, best, best + 1]
    assert "give either" in ziggurat("average", several, "--checkpoints", "last:2", "--last", "2").err
    assert ziggurat("average", several, "--checkpoints", "last:99").status == 2


def test_score_and_evaluate_report_the_same_perplexity(
    ziggurat: Ziggurat, trained: Path, sets: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, reference = sets["one"]
    result = ziggurat("score", trained, "--source", source, "--target", reference, "--json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert len(lines) == 3  # lines only
    total, tokens = sum(x["log_probability"] for x in lines), sum(len(x["tokens"]) + 1 for x in lines)
    figures = re.search(r"3 lines, (\S+) tokens .*log-probability (\S+), perplexity (\S+) per token", result.err)
    assert figures is not None
    assert int(figures[1].replace(",", "")) == tokens
    assert float(figures[2]) == pytest.approx(total, abs=1e-3)
    texts = "--source", source, "--reference", reference
    (score,) = json.loads(ziggurat("evaluate", trained, "--metrics", "perplexity", *texts, "--json").out)
    assert score["name"] == "perplexity"
    assert score["value"] == pytest.approx(math.exp(-total / tokens), rel=1e-6)
    assert float(figures[3]) == pytest.approx(score["value"], abs=1e-4)
    both = json.loads(
        ziggurat("evaluate", trained, "max_length.limit=9", "--metrics", "perplexity,bleu", *texts, "--json").out
    )
    assert [s["name"] for s in both] == ["BLEU", "perplexity"]
    assert both[1] == score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--test-set", "a.src"], "write [NAME=]SOURCE,REFERENCE"),
        (["--test-set", "a.src,a.ref", "--source", "a.src"], "leave out `--source`"),
        (["--test-set", "a.src,a.ref", "--hypothesis", "a.txt"], "are for a model"),
        (
            ["--checkpoints", "last:2", "--which", "best", "--reference", "a.ref"],
            "leave out `--ensemble` and `--which`",
        ),
        (["--checkpoints", "some", "--reference", "a.ref"], "`--source FILE` is missing"),
        (
            ["--metrics", "perplexity", "--reference", "a.ref", "--reference", "b.ref"],
            "takes one reference translation",
        ),
        (["--metrics", "perplexity", "--reference", "a.ref", "--output", "o"], "alone makes none"),
        (["--metrics", "perplexities", "--reference", "a.ref"], "unknown metric `perplexities`"),
    ],
)
def test_options_that_exclude_each_other(ziggurat: Ziggurat, trained: Path, options: list[str], message: str) -> None:
    result = ziggurat("evaluate", trained, *options)
    assert result.status == 2
    assert message in " ".join(result.err.split())


def test_perplexity_of_a_file_is_refused(ziggurat: Ziggurat, text: Path) -> None:
    result = ziggurat("evaluate", "--hypothesis", text, "--reference", text, "--metrics", "perplexity")
    assert result.status == 2
    assert "needs a model" in result.err


def test_test_sets_are_named_by_their_files_or_by_the_user() -> None:
    found = parse_test_sets(["x/newstest2014.en.gz,y/ref.de", "wmt-15=b.en,b.de,c.de"])
    assert found == {"newstest2014": ("x/newstest2014.en.gz", ["y/ref.de"]), "wmt-15": ("b.en", ["b.de", "c.de"])}
    with pytest.raises(ConfigError, match="two test sets are called `a`"):
        parse_test_sets(["a.en,a.de", "x/a.en,b.de"])
    for wrong in ("a", "a,", ",a", "n=", "n=a,,b"):
        with pytest.raises(ConfigError, match="--test-set"):
            parse_test_sets([wrong])
