"""Our models as Marian files: they compute the same when read back, and Marian itself gives the same translations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES, log_probabilities
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.import_marian import imported_translator
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian_files import read_weights
from ziggurat.exchange.marian_program import (
    MARIAN_VARIABLE,
    WITHOUT_MARIAN,
    MarianTranslator,
    marian_program,
    run_marian,
)
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS
from ziggurat.model.directory import open_model
from ziggurat.system.errors import ExportError

POST = {"residual": "post", "embedding": {"zero_start": True}, "layer_norm_epsilon": 1e-6}
SSRU = {"decoder": {"attention": "ssru"}}
MODELS: dict[str, dict[str, Any]] = {
    "post": POST,
    "ssru": POST | SSRU,
    "pre, ssru": POST | SSRU | {"residual": "pre"},
    "deepnorm, gelu": POST | {"residual": "deepnorm", "activation": "gelu"},
    "unscaled, one matrix": POST | {"embedding": {"zero_start": True, "sharing": "all", "scale": False}},
    "pre, ssru, unscaled": POST
    | SSRU
    | {"residual": "ln_scaling", "embedding": {"zero_start": True, "sharing": "decoder", "scale": False}},
    "without positions": POST | {"embedding": {"zero_start": True, "positions": "none"}, "norm": "rms"},
    "swish, wider decoder": POST | {"activation": "silu", "encoder": {"d_ff": 40}},
}
"""MODELS are choices for our models that cover every way in which Marian's can differ."""


@pytest.fixture
def without_marian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MARIAN_VARIABLE, str(tmp_path / "nothing"))
    assert marian_program() is None


def exported(written: Written, tmp_path: Path, choices: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in SENTENCES))
    report = export_model(written(**choices), "marian", tmp_path / "out", verify=tmp_path / "text")
    return tmp_path / "out", report


@pytest.mark.usefixtures("without_marian")
@pytest.mark.parametrize("name", MODELS)
def test_files_read_again_compute_the_same(
    name: str, written: Written, tmp_path: Path, tokenizer: SentencePieceTokenizer
) -> None:
    folder, report = exported(written, tmp_path, MODELS[name])
    assert report["verification"]["by"].startswith("our own forward pass")
    ours, again = open_model(tmp_path / "model").model.double(), imported_translator(folder)
    names = again.target_tokenizer.pieces(range(again.target_tokenizer.size))
    places = {piece: number for number, piece in enumerate(names)}
    rows = [places[piece] for piece in tokenizer.pieces(range(tokenizer.size - len(tokenizer.tags)))]
    source, target = tokenizer.encode(SENTENCES[:2])
    mine = log_probabilities(ours, [*source, tokenizer.eos], [tokenizer.bos, *target])
    other_source, other_target = ([rows[number] for number in side] for side in (source, target))
    bos, eos = again.target_tokenizer.bos, again.source_tokenizer.eos
    theirs = log_probabilities(again.model.double(), [*other_source, eos], [bos, *other_target])
    kept = [number for number in range(len(rows)) if number not in (tokenizer.pad, tokenizer.bos)]
    mine, theirs = mine[:, kept], theirs[:, [rows[number] for number in kept]]
    torch.testing.assert_close(mine.log_softmax(-1), theirs.log_softmax(-1), atol=3e-5, rtol=0)


@pytest.mark.usefixtures("without_marian")
@pytest.mark.parametrize("sharing", ["all", "decoder", "none"])
def test_matrices_are_still_shared_when_read_back(
    sharing: str, written: Written, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder, _ = exported(written, tmp_path, POST | {"embedding": {"zero_start": True, "sharing": sharing}})
    warned = any("intgemm8" in str(one.message) for one in recwarn.list)
    assert warned == (sharing == "none"), "Marian spoils a separate output matrix in int8"
    import_checkpoint(folder, tmp_path / "again")
    assert open_model(tmp_path / "again").experiment.model.embedding.sharing == sharing


@pytest.mark.usefixtures("without_marian")
def test_marian_and_import_can_read_the_folder(written: Written, tmp_path: Path) -> None:
    decoding = {"beam_size": 3, "length_penalty": {"kind": "power", "alpha": 0.5}}
    folder, _ = exported(written, tmp_path, POST | SSRU | {"decoding": decoding})
    files = {path.name for path in folder.iterdir()}
    assert files == {"model.npz", "decoder.yml", "joint.spm", "export.json", "checksums.json"}
    search = yaml.safe_load((folder / "decoder.yml").read_text())
    assert (search["beam-size"], search["normalize"], search["relative-paths"]) == (3, 0.5, True)
    assert search["vocabs"] == ["joint.spm", "joint.spm"]
    options = read_weights(folder / "model.npz").options
    assert (options["dec-cell"], options["transformer-decoder-autoreg"]) == ("ssru", "rnn")
    with np.load(folder / "model.npz") as packed:
        assert packed["decoder_l2_rnn_Wf"].shape == (16, 16)
        rows = packed["decoder_ff_logit_out_b"][0]
    assert (rows < -1e8).sum() == 2, "padding and begin-of-sentence"
    report = import_checkpoint(folder, tmp_path / "again")
    assert json.loads((folder / "export.json").read_text())["target"] == report["kind"] == "marian"


@pytest.mark.usefixtures("without_marian")
def test_marians_own_search_is_the_same_when_read_back(written: Written, tmp_path: Path) -> None:
    decoding: dict[str, Any] = {
        "endings": "marian",
        "beam_size": 3,
        "length_penalty": {"kind": "power", "alpha": 0.5, "word_penalty": -0.25},
        "max_length": {"ratio": 1.5, "extra": 2},
        "unknown": True,
    }
    folder, report = exported(written, tmp_path, POST | {"decoding": decoding})
    assert "search_without" not in report
    import_checkpoint(folder, tmp_path / "again")
    again = open_model(tmp_path / "again").experiment.decoding
    before = DecodingConfig.model_validate(decoding)
    for key in decoding.keys() - {"max_length"}:
        assert getattr(again, key) == getattr(before, key)
    assert (again.max_length.ratio, again.max_length.extra) == (1.5, 2)


@pytest.mark.parametrize(
    ("choices", "key"),
    [
        ({"embedding": {"zero_start": False}}, "embedding.zero_start"),
        ({"embedding": {"zero_start": True, "positions": "learned"}}, "embedding.positions: learned"),
        ({"residual": "pre"}, "with pre-norm"),
        ({"activation": "swiglu"}, "activation: swiglu"),
        ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon"),
        ({"decoder": {"attention": "average"}}, "decoder.attention: average"),
        ({"encoder": {"history": "dlcl"}}, "encoder.history: dlcl"),
        ({"encoder": {"heads": 4}}, "encoder.heads"),
    ],
)
def test_unsupported_settings_are_refused_by_key(
    choices: dict[str, Any], key: str, written: Written, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=key):
        exported(written, tmp_path, POST | choices)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
@pytest.mark.parametrize("name", MODELS)
def test_marian_gives_the_same_scores(name: str, written: Written, tmp_path: Path) -> None:
    opened = open_model(written(**MODELS[name]))
    (tmp_path / "out").mkdir()
    TARGETS["marian"].write(tmp_path / "out", ExportedModel.of(opened), None)
    lines = SENTENCES[:-3]  # without extra blanks
    for side, texts in (("source", lines), ("target", lines[::-1])):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in texts))
    names = ["-m", tmp_path / "out" / "model.npz", "-v", *[tmp_path / "out" / "joint.spm"] * 2, "--cpu-threads", "1"]
    said = run_marian("score", *names, "-t", tmp_path / "source", tmp_path / "target", "--quiet")
    theirs = [float(line) for line in said.splitlines()]
    ours = [score.log_probability for score in imported_translator(tmp_path / "out").score(lines, lines[::-1])]
    assert theirs == pytest.approx(ours, abs=2e-4, rel=2e-5), "Marian writes six digits"


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
def test_a_model_is_verified_by_marians_translations(written: Written, tmp_path: Path) -> None:
    folder, report = exported(written, tmp_path, POST)
    assert report["verification"]["by"] == "pymarian"
    found = MarianTranslator(folder).translate_stream(SENTENCES, **report["verification"]["settings"])
    assert [translation.source for translation in found] == SENTENCES
    assert any(translation.hypotheses[0].finished for translation in found)
