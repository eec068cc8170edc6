"""Our scores equal sacreBLEU's, to the last digit of its command line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import pytest

from ziggurat.evaluate.scores import Score, evaluate
from ziggurat.system.errors import ConfigError, DataError

WORDS = ["the", "a", "small", "dog", "river,", '"bridge"', "runs", "by", "-", "well-known", "3.5", "(old)", "where?"]


def corpus(seed: int, lines: int, noise: float) -> tuple[list[str], list[list[str]]]:
    """Hypotheses, and two references that differ from them here and there."""
    draw = random.Random(seed)
    hypotheses = [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))).capitalize() for _ in range(lines)]

    def changed(line: str) -> str:
        return " ".join(draw.choice(WORDS) if draw.random() < noise else word for word in line.split())

    return hypotheses, [[changed(line) for line in hypotheses] for _ in range(2)]


def command_line(
    folder: Path, hypotheses: list[str], references: list[list[str]], *options: str
) -> list[dict[str, str]]:
    names = []
    for name, lines in [("hyp", hypotheses), *((f"ref{i}", r) for i, r in enumerate(references))]:
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        names.append(str(folder / name))
    run = [sys.executable, "-m", "sacrebleu", *names[1:], "-i", names[0], "-m", "bleu", "chrf", "ter", "-w", "12"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    output = subprocess.run([*run, *options], capture_output=True, check=True, env=environment, text=True)
    found = json.loads(output.stdout)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("references", [1, 2])
@pytest.mark.parametrize("confidence", [False, True])
def test_scores_and_signatures_equal_the_command_line(tmp_path: Path, references: int, confidence: bool) -> None:
    hypotheses, all_references = corpus(references, 40, 0.3)
    hypotheses[3] += "  \t"  # the command strips lines on the right; that must make no difference to the library
    wanted = command_line(tmp_path, hypotheses, all_references[:references], *["--confidence"] * confidence)
    found = evaluate(hypotheses, all_references[:references], confidence=confidence)
    assert len(wanted) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.name == theirs["name"]
        assert ours.signature == theirs["signature"]
        assert round(ours.value, 12) == theirs["score"]
        assert ours.details == theirs.get("verbose_score", "")
        assert ours.sentences == 40
        assert ours.comparable
        if confidence:
            assert ours.mean is not None
            assert ours.interval is not None
            assert ours.mean == pytest.approx(theirs["confidence_mean"], abs=1e-5)
            assert ours.interval == pytest.approx(theirs["confidence_var"], abs=1e-5)
            assert "bs:1000|seed:12345" in ours.signature
        else:
            assert (ours.mean, ours.interval) == (None, None)


def test_options_reach_sacrebleu(tmp_path: Path) -> None:
    hypotheses, references = corpus(5, 20, 0.3)
    options = ["-lc", "--tokenize", "intl", "--chrf-word-order", "2"]
    wanted = command_line(tmp_path, hypotheses, references[:1], *options)
    found = evaluate(hypotheses, references[:1], lowercase=True, tokenize="intl", chrf_word_order=2)
    assert {s.name: s.value for s in found}["BLEU"] == pytest.approx(float(wanted[0]["score"]), abs=1e-9)
    assert [s.name for s in found] == ["BLEU", "chrF2++", "TER"]
    assert "case:lc" in found[0].signature
    assert "tok:intl" in found[0].signature


def test_chinese_gets_its_tokenizer() -> None:
    (score,) = evaluate(["你好吗。"], [["你好吧。"]], metrics=["bleu"], target_language="zh")
    assert "tok:zh" in score.signature


def test_perfect_and_hopeless() -> None:
    lines = ["A small dog runs over the meadow.", "Where is the old bridge?"]
    assert [round(s.value, 9) for s in evaluate(lines, [lines])] == [100, 100, 0]
    assert [round(s.value) for s in evaluate(["", ""], [lines])] == [0, 0, 100]


def test_a_score_prints_its_signature_and_interval() -> None:
    score = Score("BLEU", 33.333, "nrefs:1", 7, "60.0/40.0", 33.1, 1.26)
    assert str(score) == "BLEU|nrefs:1 = 33.3 (μ = 33.1 ± 1.3) 60.0/40.0"
    assert str(Score("TER", 5.0, "nrefs:1", 7, "")) == "TER|nrefs:1 = 5.0"
    assert score.as_record()["value"] == 33.333


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a", "b"], [["a"]], "unequal numbers of lines: 2 of hypotheses, 1 of the reference"),
        (["a"], [["a"], ["a", "b"]], "unequal numbers of lines: 1 of hypotheses, 2 of reference 2"),
        ([], [[]], "nothing to score: 0 lines"),
        (["a"], [], "list of lists"),
        (["a"], ["a"], "list of lists"),
        ("a", [["a"]], "list of lines"),
    ],
)
def test_lines_that_do_not_pair_up_are_refused(
    hypotheses: list[str], references: list[list[str]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(hypotheses, references)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown metric `meteor`; valid: bleu, chrf, ter"):
        evaluate(["a"], [["a"]], metrics=["bleu", "meteor"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"unknown tokenizer `14a`; valid: .*13a"):
        evaluate(["a"], [["a"]], tokenize="14a")


def test_intervals_of_translations_that_hardly_match_anything() -> None:
    """Resamples with and without any match must not trip over sacreBLEU's mixture of number types."""
    hypotheses, references = ["xyz"] * 19 + ["a b"], [["abc def"] * 20]
    (score,) = evaluate(hypotheses, references, metrics=["chrf"], confidence=True)
    assert score.mean is not None
    assert score.interval is not None
    assert 0 < score.mean < 10
    assert 0 < score.interval < 10
    json.dumps(score.as_record())


@pytest.mark.parametrize("tokenizer", ["flores200", "flores101", "spm", "spBLEU-1K"])
@pytest.mark.parametrize(
    "error", [URLError(OSError(-2, "Name or service not known")), SystemExit(1), TimeoutError("timed out")]
)
def test_a_tokenizer_whose_model_cannot_be_downloaded(
    tokenizer: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.download_file", fails)
    with pytest.raises(ConfigError, match=f"`{tokenizer}` needs a model that could not be downloaded") as caught:
        evaluate(["a"], [["a"]], tokenize=tokenizer)
    assert "\n" not in str(caught.value)
