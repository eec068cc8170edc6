"""Imports of models that Marian trained, compared with Marian's own results (tests/golden/marian)."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.confined import refusal
from tests.exchange.marian import write_npz
from ziggurat.config import load_experiment
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian_files import find_files
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.translator import Translator, load_translator

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "marian"
NAMES = ("ssru", "guided", "odd", "rms")


def opened(name: str, tmp_path: Path) -> tuple[Translator, dict[str, Any]]:
    """The import of a model, and Marian's results for it."""
    import_checkpoint(GOLDEN / name, tmp_path / "ours")
    return load_translator(tmp_path / "ours"), json.loads((GOLDEN / name / "expected.json").read_text("utf-8"))


def digits(score: float) -> float:
    """Return half a unit of the last of the six digits that Marian prints, plus a tolerance for the order of sums."""
    return 10.0 ** (math.floor(math.log10(abs(score) or 1.0)) - 5) / 2 + 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_given_translations_have_marians_scores(name: str, tmp_path: Path) -> None:
    translator, expected = opened(name, tmp_path)
    found = translator.score(expected["sources"], expected["targets"])
    assert [each.log_probability for each in found] == pytest.approx(expected["scores"], abs=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rms"])  # pre-norm: docs/export.md
def test_the_search_finds_marians_results(name: str, tmp_path: Path) -> None:
    translator, expected = opened(name, tmp_path)
    assert (translator.decoding.endings, translator.decoding.unknown) == ("marian", False)
    for search in expected["searches"]:
        asked = search["options"]
        factor = asked.get("max-length-factor", 3.0)
        found = translator.translate(
            expected["sources"],
            beam_size=asked["beam-size"],
            n_best=asked["beam-size"],
            length_penalty={"alpha": asked.get("normalize", 0.0), "word_penalty": asked.get("word-penalty", 0.0)},
            max_length={"ratio": factor, "extra": math.ceil(factor)},
        )
        for translation, wanted in zip(found, search["n_best"], strict=True):
            assert [each.text for each in translation.hypotheses] == [text for text, _ in wanted]
            for each, (_, score) in zip(translation.hypotheses, wanted, strict=True):
                assert each.score == pytest.approx(score, abs=digits(score))


def test_the_head_that_marian_taught_gives_its_alignments(tmp_path: Path) -> None:
    translator, expected = opened("guided", tmp_path)
    guided = load_experiment(tmp_path / "ours" / "config.yaml").training.loss.alignment
    assert guided is not None
    assert (guided.layer, guided.head) == (1, 1)
    found = translator.translate(expected["sources"], beam_size=1, alignments=True)
    for translation, links in zip(found, expected["alignments"], strict=True):
        (best,) = translation.hypotheses
        assert best.alignment is not None
        wanted = {tuple(map(int, link.split("-"))) for link in links.split()}
        # Marian aligns end-of-sentence, too.
        assert {(s, t) for s, t in wanted if t < len(best.tokens)} == {
            (source, target) for target, source in enumerate(best.alignment.hard)
        }


def test_odd_models(tmp_path: Path) -> None:
    import_checkpoint(GOLDEN / "odd", tmp_path / "ours")
    model = load_experiment(tmp_path / "ours" / "config.yaml").model
    assert (model.residual, model.activation, model.decoder.attention) == ("peri", "gelu", "ssru")
    assert (model.encoder.ffn_depth, model.decoder.ffn_depth) == (2, 3)
    assert model.encoder.d_ff == 2 * model.d_model, "one map without an activation, as two"


def test_the_final_model_and_vocabularies_relative_to_marians_working_folder(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (tmp_path / "v.spm").write_bytes((GOLDEN / "odd" / "v.spm").read_bytes())
    weights = (GOLDEN / "odd" / "model.npz").read_bytes()
    decoder = (GOLDEN / "odd" / "model.npz.decoder.yml").read_text()
    for name in ("model.iter300.npz", "model.npz", "model.npz.best-bleu.npz", "model.npz.optimizer.npz"):
        (folder / name).write_bytes(weights)
        (folder / f"{name}.decoder.yml").write_text(decoder.replace("model.npz", name))
    with pytest.warns(UserWarning, match="is used") as said:
        files = find_files(folder)
    assert files.weights == folder / "model.npz"
    assert files.vocabularies == (tmp_path / "v.spm",)
    (only,) = said
    assert "model.iter300.npz" in str(only.message), "and nothing of the vocabulary, which is the named one"
    (folder / "v.spm").write_bytes(b"")
    with pytest.warns(UserWarning, match="best-bleu"):
        assert find_files(folder).vocabularies == (folder / "v.spm",), "first the one next to the weights"
    (folder / "model.npz").unlink()
    assert "has 2 models (" in refusal(lambda: find_files(folder))


def test_a_vocabulary_found_at_another_path_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    shutil.copytree(GOLDEN / "odd", tmp_path / "odd")
    monkeypatch.chdir(tmp_path / "odd")
    decoder = tmp_path / "odd" / "model.npz.decoder.yml"
    relative = decoder.read_text()
    decoder.write_text(relative.replace("- v.spm", f"- {tmp_path / 'odd' / 'v.spm'}"))
    assert find_files(Path("..") / "odd").vocabularies == (Path("..") / "odd" / "v.spm",)
    assert not recwarn.list, "one file, by another path"
    decoder.write_text(relative.replace("- v.spm", "- /home/them/v.spm"))
    with pytest.warns(UserWarning, match="names /home/them/v.spm"):
        find_files(tmp_path / "odd")


def test_no_engine_writes_the_unknown_token_unless_asked(tmp_path: Path) -> None:
    """A model whose output bias would always write it."""
    shutil.copytree(GOLDEN / "guided", tmp_path / "guided")
    weights = tmp_path / "guided" / "model.npz"
    with np.load(weights) as packed:
        arrays = {name: packed[name] for name in packed.files}
    options = yaml.safe_load(arrays.pop("special:model.yml").tobytes().partition(b"\0")[0])
    arrays["decoder_ff_logit_out_b"][0, 1] += 9.0
    write_npz(weights, arrays, options)
    import_checkpoint(tmp_path / "guided", tmp_path / "ours")
    sources = json.loads((GOLDEN / "guided" / "expected.json").read_text("utf-8"))["sources"]
    (tmp_path / "text").write_text("\n".join(sources))
    export_model(tmp_path / "ours", "ctranslate2", tmp_path / "theirs", verify=tmp_path / "text")
    for translator in (load_translator(tmp_path / "ours"), CTranslate2Translator(tmp_path / "theirs")):
        usual = translator.translate(sources, endings="beam", beam_size=2)
        asked = translator.translate(sources, endings="beam", beam_size=2, unknown=True)
        assert not any("\u2047" in each.text for each in usual)
        assert all("\u2047" in each.text for each in asked)


@pytest.mark.parametrize("cut", [100, 20_000, 59_000])
def test_a_file_that_is_cut_off_is_refused(cut: int, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "guided", tmp_path / "guided")
    weights = tmp_path / "guided" / "model.npz"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert "model.npz: damaged" in refusal(lambda: import_checkpoint(tmp_path / "guided", tmp_path / "ours"))


def test_options_that_are_damaged_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "guided", tmp_path / "guided")
    training = tmp_path / "guided" / "model.npz.yml"
    for text, reason in (
        ("guided-alignment: [", "model.npz.yml"),
        ("guided-alignment: a\ntransformer-guided-alignment-layer: 9", "layer: 9"),
        ("guided-alignment: a\nguided-alignment-weight: much", "valid number"),
    ):
        training.write_text(text)
        assert reason in refusal(lambda: import_checkpoint(tmp_path / "guided", tmp_path / "ours"))
    training.unlink()
    (tmp_path / "guided" / "a.spm").rename(tmp_path / "guided" / "a.fsv")
    decoder = tmp_path / "guided" / "model.npz.decoder.yml"
    decoder.write_text(decoder.read_text().replace("a.spm", "a.fsv"))
    assert "a factored vocabulary" in refusal(lambda: import_checkpoint(tmp_path / "guided", tmp_path / "ours"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "rms"])
def test_marian_gives_the_recorded_results(name: str, tmp_path: Path) -> None:
    """Where Marian is installed, this covers more lines and searches."""
    marian = marian_program()
    if marian is None:
        pytest.skip(WITHOUT_MARIAN)
    shutil.copytree(GOLDEN / name, tmp_path / name)
    text = ROOT / "tests" / "golden" / "marian" / name / "expected.json"
    lines = json.loads(text.read_text("utf-8"))
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in [*lines["sources"], *lines["targets"]]))
    words = ["--marian", marian, "--text", str(tmp_path / "text"), "--out", str(tmp_path / "result.json")]
    program = str(ROOT / "experiments" / "marian" / "compare.py")
    subprocess.run([sys.executable, program, str(tmp_path / name), *words], check=True, cwd=ROOT)
    (result,) = json.loads((tmp_path / "result.json").read_text("utf-8"))["models"].values()
    for search in result["searches"].values():
        assert not search["different"]
        assert search["score_gap"] <= 1e-4
