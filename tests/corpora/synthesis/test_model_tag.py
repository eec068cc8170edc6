"""A model of several languages: jobs pass it the given tag, and are refused without one; exports warn."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat
from tests.exchange.examples import SENTENCES
from tests.exchange.test_argos import model_directory
from tests.vocabulary import trained_tokenizer
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.jobs.job import Work
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob
from ziggurat.corpora.synthesis.cross_entropy import FilterJob, filter_pairs
from ziggurat.corpora.synthesis.lines import PairFilter
from ziggurat.exchange.verification import compare, search_settings
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import Translator, load_translator

LINES = SENTENCES[2:]
MISSING = r"^`--model-tag TAG` is missing: the tags of .* name several languages \(<2de>, <2fr>\)"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the tags of two languages."""
    joint = trained_tokenizer(SENTENCES, 340, ["<2de>", "<2fr>", "<bt>"])
    decoding = {"max_length": {"ratio": 0.0, "extra": 40, "limit": 40}}
    return model_directory(tmp_path_factory.mktemp("many"), joint, joint, decoding=decoding)


@pytest.fixture(scope="module")
def model(many: Path) -> Translator:
    return load_translator(many, device="cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return path


def test_the_model_translates_a_corpus_with_the_tag(
    many: Path, model: Translator, text: Path, tmp_path: Path, in_process: Any
) -> None:
    def job(out: str, tag: str | None) -> BackTranslationJob:
        everything = PairFilter(max_ratio=1000.0)
        settings: dict[str, Any] = {"method": "beam", "forward": True, "device": "cpu", "filters": everything}
        settings |= {"models": (str(many),), "inputs": (str(text),)}
        return BackTranslationJob(out=tmp_path / out, model_tag=tag, **settings)

    with pytest.raises(ConfigError, match=MISSING):
        in_process(job("none", None))
    with pytest.raises(ConfigError, match=r"unknown tag '<2it>'; this model has: <2de>, <2fr>, <bt>"):
        in_process(job("none", "<2it>"))
    assert not (tmp_path / "none").exists()
    in_process(job("out", "<2fr>"))
    found = (tmp_path / "out" / "target.txt").read_text("utf-8").splitlines()
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):
        expected, other = (model.translate(LINES, tag=tag) for tag in ("<2fr>", "<2de>"))
    assert found == [" ".join(each.text.split()) for each in expected if each.hypotheses[0].finished]
    assert len(found) > 2
    assert [each.text for each in expected] != [each.text for each in other]
    with pytest.raises(DataError, match=r"was started with other settings or files .*model_tag"):
        in_process(job("out", "<2de>"))


@pytest.mark.usefixtures("in_process")
def test_pairs_are_scored_with_the_tag(many: Path, model: Translator, text: Path, tmp_path: Path) -> None:
    def scores(tag: str | None) -> list[float]:
        given = {"models": (str(many),), "sources": (str(text),), "targets": (str(text),)}
        job = FilterJob(**given, out=tmp_path / f"{tag}", device="cpu", model_tag=tag)
        filter_pairs(job, Work(partial(launchers.processes, 1)))
        rows = (job.out / "scored" / "00000000.tsv").read_text("utf-8").splitlines()
        return [float(row.split("\t")[0]) for row in rows]

    with pytest.raises(ConfigError, match=MISSING):
        scores(None)
    scored = model.score(LINES, LINES, tag="<2fr>")
    assert scores("<2fr>") == pytest.approx(
        [s.log_probability / len(s.token_log_probabilities) for s in scored], abs=1e-4
    )


def test_the_corpus_tag_is_not_the_models_tag(many: Path, text: Path, tmp_path: Path, ziggurat: Ziggurat) -> None:
    files = ("--out", tmp_path / "out", "--device", "cpu")
    for call in (
        ("backtranslate", many, "--input", text, "--forward", "--tag", "<2de>"),
        ("filter", many, "--source", text, "--target", text),
    ):
        status, _, errors = ziggurat(*call, *files)
        assert (status, "`--model-tag TAG` is missing" in errors) == (2, True)
        status, _, errors = ziggurat(*call, *files, "--model-tag", "<2it>")
        assert (status, "unknown tag '<2it>'" in errors) == (2, True)


def test_an_export_warns_that_it_is_compared_without_a_tag(model: Translator) -> None:
    message = r"tags name several languages \(<2de>, <2fr>\), and the export is compared without"
    with pytest.warns(UserWarning, match=message):
        found = compare(model, model, LINES[:1], search_settings(64, 20))
    assert found.identical == 1
