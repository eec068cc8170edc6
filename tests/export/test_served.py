"""Translation by CTranslate2, with and without PyTorch in the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export.conftest import Written
from tests.export.examples import SENTENCES
from ziggurat.cli import main
from ziggurat.decoding.served import ServedTranslator, unserved
from ziggurat.decoding.translator import load_translator
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.export.exporter import export_model

# Without a shortest length: CTranslate2 rules tokens out before it normalises, which shifts its scores.
EXACT = {"endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}, "min_length": 0}

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from ziggurat.cli import main
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


def test_results_are_those_of_our_translator(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), ServedTranslator(exported[1], token_scores=True, threads=1)
    lines = [*SENTENCES, "", "   ", "a\0b", "The little house. " * 12]
    for mine, other in zip(
        ours.translate_stream(lines, max_source_pieces=30),
        theirs.translate_stream(lines, max_source_pieces=30),
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


def test_limits_and_tags_are_kept(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_translator(exported[0]), ServedTranslator(exported[1], threads=1)
    for limit in (1, 2, 5):
        rule = {"ratio": 0.1, "extra": limit, "limit": 9}
        a = [t.text for t in ours.translate_stream(SENTENCES, tag="<bt>", max_length=rule, min_length=2)]
        b = [t.text for t in theirs.translate_stream(SENTENCES, tag="<bt>", max_length=rule, min_length=2)]
        assert a == b
    with pytest.raises(ConfigError, match="unknown tag"):
        theirs.translate(["a"], tag="<no>")


def test_settings_that_ctranslate2_lacks_are_refused(exported: tuple[Path, Path]) -> None:
    theirs = ServedTranslator(exported[1])
    with pytest.raises(ConfigError, match=r"length_penalty\.kind: gnmt"):
        theirs.translate(["a"], length_penalty={"kind": "gnmt", "alpha": 1.0})
    for asked in ({"search": "sample"}, {"diverse_groups": 2, "beam_size": 4}):  # not: `endings` is in the way
        with pytest.raises(ConfigError, match=r"^CTranslate2 has no `decoding\.(search|diverse_groups): "):
            theirs.translate(["a"], **asked)
        with pytest.raises(ConfigError, match=r"^CTranslate2 has no"):
            ServedTranslator(exported[1], **asked)
    assert unserved(theirs.decoding) == []
    assert max(len(t.hypotheses) for t in theirs.translate(SENTENCES, n_best=2)) == 2
    with pytest.raises(TypeError, match="list of texts"):
        theirs.translate("a")
    with pytest.raises(TypeError, match="list of texts"):
        theirs.translate_stream("one line")
    with pytest.raises(ConfigError, match="`window` must be at least 1"):
        theirs.translate_stream(["a"], window=0)
    with pytest.raises(CheckpointError, match="not a CTranslate2 directory"):
        ServedTranslator(exported[0])


def test_an_exported_model_is_served_without_torch(exported: tuple[Path, Path]) -> None:
    lines = "".join(f"{line}\n" for line in SENTENCES)
    served = without_torch("translate", exported[1], text=lines)
    assert served.returncode == 0, served.stderr
    assert "CTranslate2" in served.stderr
    assert served.stdout.splitlines() == [t.text for t in load_translator(exported[0]).translate(SENTENCES)]
    records = without_torch("translate", exported[1], "--json", text=lines)
    assert [json.loads(line)["text"] for line in records.stdout.splitlines()] == served.stdout.splitlines()


@pytest.mark.parametrize(
    "verb", ["translate", "evaluate", pytest.param("export", marks=pytest.mark.slow), "inspect", "train"]
)
def test_other_verbs_say_what_is_missing(verb: str, exported: tuple[Path, Path], text: Path) -> None:
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


def test_engines(exported: tuple[Path, Path], text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in ("translate", *arguments, "-i", text)])
        return int(stop.value.code or 0), capfd.readouterr().err

    model, served = exported
    assert "CTranslate2" in run(served)[1]
    assert "CTranslate2" not in run(model)[1]
    status, said = run(model, "--engine", "ctranslate2")
    assert (status, "--to ctranslate2" in said) == (2, True)
    status, said = run(served, "--engine", "torch")
    assert (status, "exported for CTranslate2" in said) == (2, True)
    assert run(model, "--engine", "fast")[0] == 2
    served.rename(model / "ctranslate2")
    status, said = run(model, "--engine", "ctranslate2")
    assert (status, "CTranslate2" in said) == (0, True)


def test_check_tells_reasons_before_any_training(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", "--check", "dlcl-en-de-base-25-6-post-dlcl", "--json"])
    assert stop.value.code == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ziggurat"] == {"reachable": True, "reasons": []}
    assert not found["ctranslate2"]["reachable"]
    assert any("history: dlcl" in reason for reason in found["ctranslate2"]["reasons"])
