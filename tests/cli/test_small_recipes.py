"""Small recipes on the command line: printed, refused where they are impossible, and run from data to figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from ziggurat.data.babel import write_corpus

NAME = "admin-en-de-base-60-12-admin"

OF_EVERY_PAPER = {
    "ds-init-en-de-base-12-12-ds-matt": {"gradient-profile", "first-and-last-layer", "variance"},
    "dlcl-en-de-base-25-6-post-dlcl": {"history-weights"},
    "transparent-en-de-rnmt-512-6-8-transparent": {"gradient-ratio", "transparent-weights"},
    "admin-en-de-base-60-12-admin": {"learning-curves", "output-change"},
    "sdt-en-de-base-24-6-rpr-sdt": {"similarity-profiles", "similarity-map"},
}
"""OF_EVERY_PAPER maps a recipe from every paper to the figures of the paper that its report must have."""


def test_an_option_and_a_suffix_print_the_same(ziggurat: Ziggurat) -> None:
    by_option, by_name = ziggurat("recipes", NAME, "--small"), ziggurat("recipes", f"{NAME}-small")
    assert by_option.status == 0
    assert by_option.out == by_name.out == ziggurat("recipes", f"{NAME}-small", "--small").out
    assert "data/babel/train.qlo" in by_option.out
    own = ziggurat("recipes", NAME, "--small", "--corpus", "a.en", "a.de", "--dev", "b.en", "b.de").out
    assert "source: a.en, target: a.de" in own
    assert "babel" not in own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--small"), "`demo` is not one"),
        (("--small",), "name one"),
        ((f"{NAME}s", "--small"), f"`{NAME}s` is not one"),
        ((NAME, "--corpus", "a", "b"), "add `--small`"),
        ((NAME, "--small", "--corpus", "a", "b"), "`--dev SOURCE TARGET`"),
        ((NAME, "--small", "--dev", "a", "b"), "`--corpus SOURCE TARGET`"),
    ],
)
def test_recipes_that_cannot_be_made_small_are_refused(
    ziggurat: Ziggurat, arguments: tuple[str, ...], message: str
) -> None:
    result = ziggurat("recipes", *arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_the_embedded_pair_is_fetched_without_a_network(
    ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = ziggurat("prepare", f"{NAME}-small")
    assert missing.status == 2
    assert f"`ziggurat fetch {NAME}-small`" in missing.err
    fetched = json.loads(ziggurat("fetch", f"{NAME}-small", "--offline", "--json").out)
    assert {one["name"]: one["pairs"] for one in fetched} == {
        "babel/train": 20_000,
        "babel/dev": 500,
        "babel/test": 500,
    }
    assert all(Path(file).is_file() for one in fetched for file in one["files"].values())
    assert ziggurat("fetch", "babel", "--output", "elsewhere").status == 0
    assert Path("elsewhere/babel/train.qhi").read_bytes() == Path("data/babel/train.qhi").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EVERY_PAPER)
def test_a_small_recipe_of_every_paper_from_its_data_to_its_figures(
    name: str, ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All verbs of docs/papers.md, one after another; 16 updates say nothing about the method, only that everything
    runs.
    """
    monkeypatch.chdir(tmp_path)
    write_corpus("data/babel", train=500, dev=20, test=20)
    config = Path("small.yaml")
    config.write_text(ziggurat("recipes", name, "--small").out, encoding="utf-8")
    assert ziggurat("prepare", config).status == 0
    trained = ziggurat("train", config, "--run", "run", *_short(config.read_text(encoding="utf-8")))
    assert trained.status == 0, trained.err
    scores = json.loads(
        ziggurat(
            "evaluate", "run", "--source", "data/babel/test.qlo", "--reference", "data/babel/test.qhi", "--json"
        ).out
    )
    assert scores
    reported = ziggurat("report", "run", "--translations", 0, "--figures", "figures", "--json")
    assert reported.status == 0, reported.err
    keys = {figure["key"] for figure in json.loads(reported.out)["figures"]}
    assert OF_EVERY_PAPER[name] <= keys
    assert {path.stem for path in Path("figures").iterdir()} >= OF_EVERY_PAPER[name]


def _short(text: str) -> list[str]:
    """Return overrides for 16 updates, with all stages of growth in them."""
    stages = re.findall(r"\{layers: (\d+), updates: \d+\}", text)
    grown = [f"{{layers: {layers}, updates: {3 * number}}}" for number, layers in enumerate(stages, start=1)]
    return [
        *("training.stop.updates=16", "training.batch.max_tokens=256", "training.log_every_updates=2"),
        *(f"training.{key}.every_updates=4" for key in ("validation", "checkpoint", "diagnostics")),
        "training.validation.max_sentences=4",
        "decoding.max_length.extra=2",
        *([f"training.growth.stages=[{', '.join(grown)}]"] if stages else []),
    ]
