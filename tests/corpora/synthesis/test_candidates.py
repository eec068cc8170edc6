"""Distillation with references: the candidate nearest the reference is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat
from tests.corpora.synthesis.conftest import BackTranslate, MakeJob, StandIn
from ziggurat.config import DecodingConfig
from ziggurat.config.pipeline_models import Method
from ziggurat.corpora.jobs import tasks as models
from ziggurat.corpora.jobs.tasks import job_decoding
from ziggurat.corpora.synthesis.backtranslation import METHODS, BackTranslationJob
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.results import Hypothesis, Translation

TEXTS = ["eins zwei drei", "vier", "fünf sechs", "sieben acht", "neun"]
REFERENCES = ["one two three", "fore", "", "seven ate", "no such word"]
CANDIDATES = {
    "eins zwei drei": [("on to free", True), ("one two three four", True), ("one  two three!", True)],
    "vier": [("four", True), ("fore", False), ("for", True)],  # the nearest is incomplete
    "fünf sechs": [("five six", True), ("", True)],  # there is no reference
    "sieben acht": [("seven", False), ("eight", False)],
    "neun": [("xyz", True), ("jkl", True)],  # neither shares anything with it
}


class Candidates(StandIn):
    """A stand-in that answers each text with the candidates above."""

    target_language = "en"

    def translate_stream(self, lines: list[str], *, window: int, first: int, **settings: Any) -> Iterator[Translation]:
        assert (settings["n_best"], settings["beam_size"]) == (3, 3)
        for line in lines:
            found = [Hypothesis(text, 0.0, 0.0, [], [], finished=ended) for text, ended in CANDIDATES[line]]
            yield Translation(line, found, 1)


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch, reverse: Path) -> Iterator[None]:
    models.opened.cache_clear()
    monkeypatch.setattr(models, "load_translator", lambda models, **options: Candidates(reverse))
    yield
    models.opened.cache_clear()


def written(folder: Path, name: str, lines: list[str]) -> tuple[str]:
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return (str(folder / name),)


@pytest.fixture
def distil(make_job: MakeJob, tmp_path: Path) -> MakeJob:
    def make(out: str = "out", **changes: Any) -> Any:
        given = {"inputs": written(tmp_path, "text", TEXTS), "references": written(tmp_path, "beside", REFERENCES)}
        kept = {"method": "beam", "forward": True, "n_best": 3, "decoding": {}, "shard_lines": 2}
        return make_job(out, **{**given, **kept, **changes})

    return make


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize("nearest", ["chrf", "bleu"])
def test_the_candidate_nearest_the_reference_is_kept(nearest: str, distil: MakeJob, in_process: BackTranslate) -> None:
    job = distil(nearest=nearest)
    report = in_process(job).report
    assert report is not None
    metric = sacrebleu.CHRF() if nearest == "chrf" else sacrebleu.BLEU(effective_order=True)
    expected = {}
    for text, reference in zip(TEXTS, REFERENCES, strict=True):
        ended = [" ".join(words.split()) for words, finished in CANDIDATES[text] if finished]
        scores = [metric.sentence_score(words, [reference]).score if reference else 0.0 for words in ended]
        if ended:
            expected[text] = ended[scores.index(max(scores))]
    assert expected["eins zwei drei"] != "on to free"
    assert expected["neun"] == "xyz"
    found = (job.out / "target.txt").read_text(encoding="utf-8").splitlines()
    assert (job.out / "source.txt").read_text(encoding="utf-8").splitlines() == list(expected)
    assert found == list(expected.values())
    assert report.dropped == {"unfinished": 1}
    assert in_process(job).report == report
    with pytest.raises(DataError, match="nearest"):
        in_process(distil(nearest="bleu" if nearest == "chrf" else "chrf"))


def test_without_references_a_plan_is_that_of_earlier_versions(
    make_job: MakeJob, distil: MakeJob, in_process: BackTranslate
) -> None:
    """Therefore an unfinished corpus of an earlier version can be resumed."""
    settings = make_job(method="beam", forward=True).settings()
    assert settings["n_best"] == 1
    assert distil(decoding={"beam_size": 5}).settings() == {**settings, "n_best": 3, "beam_size": 5}
    assert distil(method="sample").settings()["n_best"] == 3
    assert "beam_size" not in distil(method="sample").settings()
    with pytest.raises(ConfigError, match=r"`n_best` \(3\) is larger than `beam_size` \(2\)"):
        in_process(distil(decoding={"beam_size": 2}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "saved",
    [
        {"endings": "fairseq"},
        {"endings": "beam", "prune": 3.0},
        {"diverse_groups": 2},
        {"search": "sample", "mbr": 8, "n_best": 6, "temperature": 0.8, "top_p": 0.9},
        {"search": "sample", "top_k": 10, "epsilon": 0.1},
    ],
)
def test_a_method_works_with_every_saved_search(method: Method, saved: dict[str, Any]) -> None:
    job = BackTranslationJob(models=("m",), inputs=("i",), out=Path("o"), method=method)
    decoding = job_decoding(DecodingConfig.model_validate(saved), job.settings())
    assert decoding.search == ("beam" if "beam" in method else "sample")


def test_references_must_pair_up(distil: MakeJob, in_process: BackTranslate, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--reference: 4 lines in .*, but 5 in .*; they must pair up"):
        in_process(distil(references=written(tmp_path, "few", REFERENCES[:4])))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_verb_with_its_own_model(
    ziggurat: Ziggurat, reverse: Path, mono: Path, in_process: BackTranslate, tmp_path: Path
) -> None:
    call = ("backtranslate", reverse, "-i", mono, "-o", tmp_path / "kd", "--forward", "--device", "cpu")
    status, _, errors = ziggurat(*call, "--n-best", "4")
    assert (status, "add `--reference FILE`" in errors) == (2, True)
    status, _, errors = ziggurat(*call[:-3], "--device", "cpu", "--reference", mono)
    assert (status, "`--reference` goes with `--forward`" in errors) == (2, True)
    status, printed, errors = ziggurat(*call, "--reference", mono, "--n-best", "4", "--max-ratio", "50")
    assert status == 0, errors
    assert "pairs of 42 lines" in printed
