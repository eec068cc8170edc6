"""Translation with CTranslate2, with and without PyTorch in the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES
from ziggurat.cli import main
from ziggurat.exchange.exporter import export_model
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.translate.ctranslate2 import CTranslate2Translator, SearchResult, hypothesis_of
from ziggurat.translate.engines import unsupported_settings
from ziggurat.translate.interface import tells_alignments
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import side_by_side
from ziggurat.translate.text_lines import begins_word, first_word
from ziggurat.translate.translator import load_translator

# There is no minimum length, because CTranslate2 rules out tokens before it normalises, which shifts its scores.
EXACT = {"endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}, "min_length": 0}

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from ziggurat.cli import main
from ziggurat.system.files import fingerprint
from ziggurat.translate import engines
main(sys.argv[1:])
"""


@pytest.fixture
def exported(written: Written, text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model directory and its export."""
    path = written(decoding=EXACT)
    export_model(path, "ctranslate2", tmp_path / "served", verify=text)
    return path, tmp_path / "served"


def without_torch(*arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_results_are_those_of_our_translator(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), CTranslate2Translator(exported[1], threads=1)
    lines = [*SENTENCES, "", "   ", "a\0b", "The little house. " * 12]
    for mine, other in zip(
        ours.translate_stream(lines, max_source_pieces=30),
        theirs.translate_stream(lines, max_source_pieces=30, scores=True),
        strict=True,
    ):
        assert (mine.source, mine.text, mine.parts) == (other.source, other.text, other.parts)
        a, b = mine.hypotheses[0], other.hypotheses[0]
        assert (a.tokens, a.finished) == (b.tokens, b.finished)
        if a.finished:
            assert b.log_probability == pytest.approx(a.log_probability, abs=1e-3)
            assert b.score == pytest.approx(a.score, abs=1e-3)
            assert b.token_log_probabilities == pytest.approx(a.token_log_probabilities, abs=1e-3)
    assert theirs.notices == ours.notices
    assert ours.notices["long_lines"] >= 1
    unscored = theirs.translate(lines, max_source_pieces=30)
    assert not any(found.hypotheses[0].token_log_probabilities for found in unscored)
    qualities = [
        [found.hypotheses[0].quality for found in several if found.hypotheses[0].finished]
        for several in (ours.translate(lines, max_source_pieces=30), unscored)
    ]
    assert qualities[1] == pytest.approx(qualities[0], abs=1e-3)


def test_sentence_scores_need_no_token_scores() -> None:
    part = hypothesis_of(SearchResult(["a", "b"], -3.0, True), "a b", 0.0, [], None)
    assert part.quality == -1.0
    assert side_by_side("x", [[part], [part]], 1).hypotheses[0].quality == -1.0  # each part's end-of-sentence counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "guided", [None, {"layer": 1, "head": 2}, {"head": 1}, {"layer": 2, "head": "mean"}], ids=lambda guided: str(guided)
)
def test_alignments_are_those_of_the_same_head(
    guided: dict[str, Any] | None, written: Written, text: Path, tmp_path: Path
) -> None:
    path = written(decoding=EXACT, guided=guided)
    export_model(path, "ctranslate2", tmp_path / "served", verify=text)
    ours, theirs = load_translator(path, n_best=2), CTranslate2Translator(tmp_path / "served", threads=1, n_best=2)
    lines, compared = [*SENTENCES, "", "The little house. " * 12], 0
    for tag in (None, "<bt>"):
        options = {"tag": tag, "alignments": True, "max_source_pieces": 30}
        for pair in zip(ours.translate(lines, **options), theirs.translate(lines, **options), strict=True):
            a, b = (translation.hypotheses[0] for translation in pair)
            assert a.tokens == b.tokens
            if a.alignment is None or b.alignment is None:
                assert not a.tokens
                assert a.alignment is b.alignment
                continue
            assert a.alignment.source_tokens == b.alignment.source_tokens
            assert np.allclose(a.alignment.soft, b.alignment.soft, atol=1e-4)
            assert a.alignment.hard == b.alignment.hard
            assert all(len(h.alignment.hard) == len(h.tokens) for h in pair[1].hypotheses if h.alignment is not None)
            compared += len(b.tokens)
    assert compared > 100
    assert theirs.translate(["a"])[0].hypotheses[0].alignment is None
    assert tells_alignments(theirs)  # documents need alignments to keep their tags


@pytest.mark.slow
def test_limits_and_tags_are_kept(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), CTranslate2Translator(exported[1], threads=1)
    for limit in (1, 2, 5):
        rule = {"ratio": 0.1, "extra": limit, "limit": 9}
        a = [t.text for t in ours.translate_stream(SENTENCES, tag="<bt>", max_length=rule, min_length=2)]
        b = [t.text for t in theirs.translate_stream(SENTENCES, tag="<bt>", max_length=rule, min_length=2)]
        assert a == b
    with pytest.raises(ConfigError, match="unknown tag"):
        theirs.translate(["a"], tag="<no>")


@pytest.mark.slow
def test_prefixes_and_scores_are_those_of_our_translator(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), CTranslate2Translator(exported[1], threads=1)
    lines = [*SENTENCES[:4], "The little house. " * 12, *SENTENCES]
    prefixes = ["the little", "", "  ", "a b c d e", "house", *(["the"] * len(SENTENCES))]
    expected = ours.translate(lines, prefixes=prefixes, n_best=2, max_source_pieces=30)
    found = theirs.translate(lines, prefixes=prefixes, n_best=2, max_source_pieces=30)
    compared = 0
    for mine, other, prefix in zip(expected, found, prefixes, strict=True):
        a, b = mine.hypotheses[0], other.hypotheses[0]
        assert b.text.startswith(prefix.strip())
        assert (b.finished, other.parts) == (a.finished, mine.parts)
        if a.finished and mine.parts == 1:  # truncated ones rank differently
            compared += 1
            assert (a.text, a.tokens) == (b.text, b.tokens)
            assert b.score == pytest.approx(a.score, abs=1e-3)
            assert b.log_probability == pytest.approx(a.log_probability, abs=1e-3)
            if prefix.strip():  # CTranslate2 scores only what follows the prefix, so these had to be computed
                assert b.token_log_probabilities == pytest.approx(a.token_log_probabilities, abs=1e-3)
        scores = [hypothesis.score for hypothesis in other.hypotheses]
        assert scores == sorted(scores, reverse=True) or other.parts > 1
    assert compared >= 5
    assert theirs.translate(SENTENCES[:1])[0].hypotheses[0].token_log_probabilities == []
    with pytest.raises(DataError, match="must pair up"):
        theirs.translate(["a", "b"], prefixes=["a"])
    with pytest.raises(DataError, match="shorten it"):
        theirs.translate(["a"], prefixes=["house " * 3000])


@pytest.mark.slow
def test_the_next_word_is_chosen_as_with_our_translator(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), CTranslate2Translator(exported[1], threads=1)
    for prefix in ("the little", ""):
        begun = len(ours.target_tokenizer.encode([prefix])[0])
        asked = {"prefixes": [prefix], "next_words": True, "complete": True, "n_best": 4, "beam_size": 4}
        (found,) = theirs.translate(SENTENCES[:1], **asked)
        words = [first_word(hypothesis.tokens[begun:]) for hypothesis in found.hypotheses]
        assert len(set(words)) == len(words) == 4
        assert all(hypothesis.text.startswith(prefix) for hypothesis in found.hypotheses)
        assert all(begins_word(word[0]) for word in words if prefix)
        # CTranslate2 ranks by the next piece; ours by the next word.
        (mine,) = ours.translate(SENTENCES[:1], TranslateOptions(16, prefix=prefix, complete=True, next_words=True))
        assert words[0][0] in {first_word(hypothesis.tokens[begun:])[0] for hypothesis in mine.hypotheses}
        # Scores are for whole translations, including the prefix and the chosen word, like ours.
        same = [(a, b) for a in mine.hypotheses for b in found.hypotheses if a.tokens == b.tokens]
        assert same
        for a, b in same:
            assert b.token_log_probabilities == pytest.approx(a.token_log_probabilities, abs=1e-3)
            assert [b.score, b.log_probability, b.quality] == pytest.approx(
                [a.score, a.log_probability, a.quality], abs=1e-3
            )
        (whole,) = theirs.translate(SENTENCES[:1], prefixes=[prefix], complete=True)
        assert len(whole.hypotheses) == 1
        assert not prefix or begins_word(whole.hypotheses[0].tokens[begun])


@pytest.mark.slow
def test_a_translation_of_any_length_has_the_score_of_each_token(written: Written, text: Path, tmp_path: Path) -> None:
    """CTranslate2 would score only the first 1,024."""
    path = written(decoding={**EXACT, "max_length": {"ratio": 0.0, "extra": 8, "limit": 1200}})
    export_model(path, "ctranslate2", tmp_path / "served", verify=text)
    theirs = CTranslate2Translator(tmp_path / "served", threads=1, beam_size=1)
    prefix = theirs.target_tokenizer.decode([theirs.target_tokenizer.encode(["the"])[0][0]] * 1100)
    (found,) = theirs.translate(SENTENCES[:1], prefixes=[prefix])
    best = found.hypotheses[0]
    assert len(best.tokens) >= 1100
    assert len(best.token_log_probabilities) == len(best.tokens) + best.finished


@pytest.mark.slow
def test_a_prefix_may_be_as_long_as_with_our_translator(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), CTranslate2Translator(exported[1], threads=1)
    options: dict[str, Any] = {"max_length": {"limit": 20}, "max_source_pieces": 30, "beam_size": 1}
    piece, most = ours.target_tokenizer.encode(["the"])[0][0], 30
    for translator in (ours, theirs):
        begun = [ours.target_tokenizer.decode([piece] * count) for count in (most, most + 1)]
        assert [len(ours.target_tokenizer.encode([text])[0]) for text in begun] == [most, most + 1]
        (found,) = translator.translate(SENTENCES[:1], prefixes=begun[:1], **options)
        assert found.text == begun[0]
        with pytest.raises(DataError, match=f"{most + 1} tokens, but at most {most} are allowed; shorten"):
            translator.translate(SENTENCES[:1], prefixes=begun[1:], **options)


def test_settings_that_ctranslate2_lacks_are_refused(exported: tuple[Path, Path]) -> None:
    theirs = CTranslate2Translator(exported[1])
    for beam_size in (4, 1):  # greedy search would give the same text with another score
        with pytest.raises(ConfigError, match=r"length_penalty\.kind: gnmt"):
            theirs.translate(["a"], length_penalty={"kind": "gnmt", "alpha": 1.0}, beam_size=beam_size)
    for asked in ({"search": "sample"}, {"diverse_groups": 2, "beam_size": 4}):  # but not these: `endings` prevents it
        with pytest.raises(ConfigError, match=r"^CTranslate2 has no `decoding\.(search|diverse_groups): "):
            theirs.translate(["a"], **asked)
        with pytest.raises(ConfigError, match=r"^CTranslate2 has no"):
            CTranslate2Translator(exported[1], **asked)
    for asked in ({"precision": "int8"}, {"precision": "auto"}):
        with pytest.raises(ConfigError, match=r"precision: (int8|auto)`: this export is float32.*--quantization"):
            theirs.translate(["a"], **asked)
        with pytest.raises(ConfigError, match="this export is float32"):
            CTranslate2Translator(exported[1], **asked)
    assert theirs.translate(["a"], precision="float32")
    assert unsupported_settings(theirs.decoding) == []
    assert max(len(t.hypotheses) for t in theirs.translate(SENTENCES, n_best=2)) == 2
    with pytest.raises(TypeError, match="list of texts"):
        theirs.translate("a")
    with pytest.raises(TypeError, match="list of texts"):
        theirs.translate_stream("one line")
    with pytest.raises(ConfigError, match="`window` must be at least 1"):
        theirs.translate_stream(["a"], window=0)
    with pytest.raises(CheckpointError, match="not a CTranslate2 directory"):
        CTranslate2Translator(exported[0])


def test_an_exported_model_is_served_without_torch(exported: tuple[Path, Path]) -> None:
    lines = "".join(f"{line}\n" for line in SENTENCES)
    served = without_torch("translate", exported[1], "--json", text=lines)
    assert served.returncode == 0, served.stderr
    assert "CTranslate2" in served.stderr
    found = [json.loads(line) for line in served.stdout.splitlines()]
    assert [record["text"] for record in found] == [t.text for t in load_translator(exported[0]).translate(SENTENCES)]
    assert all(record["token_log_probabilities"] for record in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["translate", "evaluate", pytest.param("export", marks=pytest.mark.slow), "inspect", "train"]
)
def test_other_verbs_report_what_is_missing(verb: str, exported: tuple[Path, Path], text: Path) -> None:
    arguments: dict[str, list[object]] = {
        "translate": [exported[0]],
        "evaluate": [exported[0], "--source", text, "--reference", text],
        "export": [exported[0], "--to", "plain", "--out", "x"],
        "inspect": ["demo"],
        "train": [exported[0] / "config.yaml", "--run", "x"],
    }
    found = without_torch(verb, *arguments[verb])
    assert found.returncode == 2
    assert "pip install 'ziggurat-mt[train]'" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_engines(exported: tuple[Path, Path], text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in ("translate", *arguments, "-i", text)])
        return int(stop.value.code or 0), capfd.readouterr().err

    model, served = exported
    assert "CTranslate2" in run(served)[1]
    assert "CTranslate2" not in run(model)[1]
    served.rename(model / "ctranslate2")
    assert "CTranslate2" not in run(model)[1]  # PyTorch is here
    assert "CTranslate2" in run(model / "ctranslate2")[1]


@pytest.mark.slow
def test_an_export_is_evaluated(exported: tuple[Path, Path], text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scores = []
    for path in exported:
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", str(path), "--source", str(text), "--reference", str(text), "--json"])
        assert not stop.value.code
        captured = capfd.readouterr()
        scores.append(captured.out)
    assert "CTranslate2" in captured.err
    assert scores[0] == scores[1]
    assert json.loads(scores[0])[0]["value"] >= 0


def test_check_reports_reasons_before_any_training(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", "--check", "dlcl-en-de-base-25-6-post-dlcl", "--json"])
    assert stop.value.code == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ziggurat"] == {"reachable": True, "reasons": []}
    assert not found["ctranslate2"]["reachable"]
    assert any("history: dlcl" in reason for reason in found["ctranslate2"]["reasons"])


@pytest.mark.parametrize("options", [TranslateOptions(2, prefix="the"), TranslateOptions(2, next_words=True)])
def test_options_apply_to_every_line_of_a_stream(exported: tuple[Path, Path], options: TranslateOptions) -> None:
    theirs = CTranslate2Translator(exported[1], threads=1)
    whole = theirs.translate(SENTENCES[:3], options)
    stream = list(theirs.translate_stream(SENTENCES[:3], options, window=3))
    said = [[[hypothesis.text for hypothesis in each.hypotheses] for each in found] for found in (whole, stream)]
    assert said[0] == said[1]
    if options.next_words:
        words = [[first_word(hypothesis.tokens) for hypothesis in each.hypotheses] for each in stream]
        assert all(len(set(each)) == len(each) for each in words)
