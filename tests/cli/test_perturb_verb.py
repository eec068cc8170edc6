"""`ziggurat perturb`: tables, JSON and page for one model, and for two side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from ziggurat.cli.perturb import perturbation_names
from ziggurat.evaluate.perturbations import PERTURBATIONS
from ziggurat.system.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Source and reference: five lines, one of which has two clauses."""
    sides = {
        "qlo": ["Su divusim ne gokun.", "Madona dogun.", "Su gokun, madona divusim.", "Divusim dogun.", "Su dogun."],
        "en": ["The man <b> sees it.", "The dog sleeps.", "He goes, the dog sees.", "A man sleeps.", "He sleeps."],
    }
    for name, lines in sides.items():
        (tmp_path / f"text.{name}").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "text.qlo", tmp_path / "text.en"


@pytest.mark.slow
def test_a_model_as_text_json_and_page(
    ziggurat: Ziggurat, trained: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    source, reference = files
    page = tmp_path / "page.html"
    call = ["perturb", trained, "max_length.limit=8", "--source", source, "--reference", reference]
    status, out, errors = ziggurat(*call, "--kinds", "all", "--metrics", "bleu,chrf", "--page", page)
    assert status == 0, errors
    assert "page.html" in errors
    for words in ("5 sentences; paired bootstrap", "BLEU|nrefs:1", "chrF2|nrefs:1", *PERTURBATIONS):
        assert words in out
    assert "difference" in out.splitlines()[4]
    assert "takes 30 cases" in out
    assert "*" not in out.partition("BLEU|")[2]
    status, out, errors = ziggurat(*call, "--kinds", "short,long", "--metrics", "chrf", "--json")
    assert status == 0, errors
    record = json.loads(out)
    assert [(p["name"], p["cases"]) for p in record["perturbations"]] == [("short", 1), ("long", 1)]
    assert [effect["metric"] for effect in record["effects"]] == ["chrF2", "chrF2"]
    assert [effect["p_adjusted"] for effect in record["effects"]] == [None, None]
    html = page.read_text()
    assert "<b> sees" not in html  # escaped, because it is text from the reference
    assert "script" not in html.replace("default-src", "")
    assert html.count("<details>") == len(PERTURBATIONS)
    assert all(PERTURBATIONS[name].meaning.replace("<", "&lt;").replace(">", "&gt;") in html for name in PERTURBATIONS)


@pytest.mark.slow
def test_two_models_side_by_side(ziggurat: Ziggurat, trained: Path, files: tuple[Path, Path]) -> None:
    source, reference = files
    status, out, errors = ziggurat(
        *["perturb", "max_length.limit=8", f"a={trained}", f"b={trained}"],
        *["--source", source, "--reference", reference, "--kinds", "caps,typos", "--metrics", "chrf", "--page", "-"],
    )
    assert status == 0, errors
    assert "Between systems, on perturbed lines" in out
    assert "Between systems, what is lost" in out
    assert out.count("a − b") == 4


@pytest.mark.slow
def test_wrong_calls(ziggurat: Ziggurat, trained: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    source, reference = files
    numbers = tmp_path / "numbers"
    numbers.write_text("12\n34\n")
    texts = ["--source", source, "--reference", reference]
    for words, message in (
        ([trained, *texts, "--kinds", "caps,lower"], "'lower' is not a perturbation; choose from caps, title"),
        ([trained, *texts, "--kinds", ","], "is not a perturbation; choose from"),
        ([f"x={reference}", *texts], "is a file"),
        ([f"x={trained},{trained}", *texts], "has 2 seeds"),
        ([f"x={trained}", f"y={trained}", "--ensemble", trained, *texts], "goes with one model"),
        ([trained, "--reference", reference, "--kinds", "caps"], "`--source FILE` is missing"),
        ([trained, *texts, "--kinds", "caps", "--metrics", "meteor"], "not by meteor"),
        ([trained, *texts, "--kinds", "caps", "--page", source], "is an input; write to another file"),
        ([trained, *texts, "--kinds", "caps", "--page", numbers], "name another file with `--page`"),
        ([trained, *texts, "--kinds", "caps", "--page", "-", "--json"], "both write to standard output"),
    ):
        status, _, errors = ziggurat("perturb", *words)
        assert status in (1, 2), (words, errors)
        assert message in " ".join(errors.split()), (words, errors)


def test_a_text_that_nothing_changes_is_reported_before_a_model_is_opened(ziggurat: Ziggurat, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    numbers.write_text("12\n34\n")
    texts = ["--source", numbers, "--reference", numbers]
    status, _, errors = ziggurat("perturb", tmp_path / "no-model", *texts, "--kinds", "caps,short")
    assert status == 2
    assert f"{numbers}: none of caps, short changes any line" in errors


def test_names() -> None:
    assert perturbation_names("typos, caps") == ["caps", "typos"]
    assert perturbation_names("all") == list(PERTURBATIONS)
    with pytest.raises(ConfigError, match="'x' is not a perturbation"):
        perturbation_names("all,x")
