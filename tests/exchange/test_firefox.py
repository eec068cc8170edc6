"""Model folders in Firefox's layout, compared with the output of Bergamot's engine for one (tests/golden/firefox)."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.confined import refusal
from tests.exchange.browser import browser_translator
from tests.exchange.conftest import Written
from tests.exchange.test_marian_binary import MODELS
from ziggurat.config import load_experiment
from ziggurat.data.shortlist import read_shortlist
from ziggurat.data.subword import SentencePieceTokenizer, load_tokenizers
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian import options_text
from ziggurat.exchange.marian_binary import browser_binary, read_binary
from ziggurat.exchange.marian_files import read_weights
from ziggurat.model.tensors import read_tensors
from ziggurat.system.errors import ExportError

pytestmark = pytest.mark.filterwarnings("ignore:.*not taken over")

GOLDEN = Path(__file__).parents[1] / "golden" / "firefox"
WEIGHTS = "model.qloqhi.intgemm.alphas.bin"
INT8, BROWSER_INT8 = struct.pack("<Q", 0x10001), struct.pack("<Q", 0x4101)

SMALL: dict[str, Any] = {
    "residual": "post",
    "embedding": {"zero_start": True, "sharing": "all"},
    "layer_norm_epsilon": 1e-6,
    "decoder": {"attention": "ssru"},
    **{"d_model": 64, "d_ff": 64, "heads": 2},
}
"""SMALL are choices for a model that can become such a folder."""


def bundle(tmp_path: Path, *, packed: bool = False) -> Path:
    """The folder as downloaded."""
    folder = tmp_path / "downloaded"
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("expected.json", "config.yml"))
    if packed:
        for path in [*folder.glob("*.bin"), *folder.glob("*.spm")]:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()
    return folder


def test_the_engines_translations_are_those_of_its_arithmetic(tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
    import_checkpoint(GOLDEN, tmp_path / "ours")
    translator = browser_translator(GOLDEN, tmp_path / "ours")
    found = [translation.text for translation in translator.translate(expected["sources"])]
    assert found == expected["translations"]


def test_the_writer_gives_the_bytes_that_marian_and_the_engine_know() -> None:
    """The result equals Marian's own conversion except for the type number, and the folder that the engine ran."""
    theirs = (MODELS / "ssru.intgemm8.bin").read_bytes()
    before = read_weights(MODELS / "ssru.npz")
    arrays, _ = read_binary(MODELS / "ssru.intgemm8.bin")
    options = arrays.pop("special:model.yml").tobytes()
    quantised = [name for name in arrays if name.rpartition("_")[2].startswith("W") and name != "Wemb"]
    assert browser_binary(before.arrays, options, quantised).replace(BROWSER_INT8, INT8) == theirs
    ran = (GOLDEN / WEIGHTS).read_bytes()
    arrays, counts = read_binary(GOLDEN / WEIGHTS)
    options = arrays.pop("special:model.yml").tobytes()
    quantised = [name for name in arrays if name.rpartition("_")[2].startswith("W")]
    assert counts == {"intgemm8": len(quantised)}
    assert browser_binary(arrays, options, quantised) == ran
    assert options == options_text(yaml.safe_load(options.rstrip(b"\0")))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_download_is_imported_by_its_file_names(packed: bool, tmp_path: Path) -> None:
    report = import_checkpoint(bundle(tmp_path, packed=packed), tmp_path / "ours")
    experiment = load_experiment(tmp_path / "ours" / "config.yaml")
    assert (experiment.data.source_language, experiment.data.target_language) == ("qlo", "qhi")
    decoding = experiment.decoding
    assert (decoding.beam_size, decoding.length_penalty.alpha, decoding.max_length.ratio) == (1, 1.0, 2.0)
    assert Path(report["shortlist"]).is_file()
    assert len(report["not_taken_over"]) == 1
    import_checkpoint(GOLDEN, tmp_path / "again")
    first, second = (read_tensors(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert all(first[name].equal(second[name]) for name in first)


def test_two_vocabularies_and_one_file_by_name(tmp_path: Path) -> None:
    folder = bundle(tmp_path, packed=True)
    content = (folder / "vocab.qloqhi.spm.gz").read_bytes()
    (folder / "vocab.qloqhi.spm.gz").unlink()
    for side in ("src", "trg"):
        (folder / f"{side}vocab.qloqhi.spm.gz").write_bytes(content)
    report = import_checkpoint(folder / f"{WEIGHTS}.gz", tmp_path / "ours")
    assert report["kind"] == "marian"


def test_an_export_has_all_files_that_firefox_needs(
    written: Written, tmp_path: Path, text: Path, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = export_model(exportable(written, monkeypatch), "firefox", tmp_path / "out", verify=text, shortlist=listed)
    folder = tmp_path / "out"
    assert report["quantization"] == "int8"
    assert report["verification"]["different"] == 0
    names = {path.name for path in folder.iterdir()} - {"export.json", "checksums.json"}
    weights, shortlist = "model.deen.intgemm.alphas.bin", "lex.50.50.deen.s2t.bin"
    assert names == {weights, shortlist, "vocab.deen.spm", "metadata.json", "config.yml"}
    metadata = json.loads((folder / "metadata.json").read_text())
    content = (folder / weights).read_bytes()
    assert (metadata["byteSize"], metadata["hash"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert (metadata["sourceLanguage"], metadata["targetLanguage"], metadata["architecture"]) == ("de", "en", "tiny")
    assert metadata["modelConfig"]["dim-emb"] == 64
    config = yaml.safe_load((folder / "config.yml").read_text())
    assert (config["models"], config["shortlist"]) == ([weights], [shortlist, False])
    assert (config["gemm-precision"], config["beam-size"]) == ("int8shiftAlphaAll", 1)
    arrays, _ = read_binary(folder / weights)
    matrices = {name for name in arrays if name.rpartition("_")[2].startswith("W")} | {"none"}
    scales = {name: array for name, array in arrays.items() if name.endswith("_QuantMultA")}
    assert scales.keys() == {f"{name}_QuantMultA" for name in matrices}
    assert all(array.shape == (1,) and 0 < array[0] < 1e8 for array in scales.values())
    again = import_checkpoint(folder, tmp_path / "again")
    assert allowed(tmp_path / "again", again["shortlist"]) == allowed(tmp_path / "model", listed)


def exportable(written: Written, monkeypatch: pytest.MonkeyPatch, **choices: Any) -> Path:
    """A model whose target vocabulary counts as having a size that the engine accepts."""
    monkeypatch.setattr("ziggurat.exchange.firefox._ROWS", 1)
    return written(**(SMALL | choices))


def allowed(model: Path, listed: str) -> dict[str, set[str]]:
    """Return, for each source piece, the pieces that are allowed in a sentence of this piece alone, except the piece
    itself. Marian always allows it.
    """
    source, target = load_tokenizers(model)
    table = read_shortlist(listed, source, target)
    pieces = target.pieces(range(target.size))
    always = {*table.always.tolist(), *table.candidates[source.eos].tolist()}
    rows = [always | {*row} for row in table.candidates.tolist()]
    hidden = {target.pad, target.bos, target.eos, target.unk, target.size, *target.tags.values()}
    found = {pieces[number]: {pieces[one] for one in row - hidden} for number, row in enumerate(rows)}
    return {piece: found[piece] - {piece} for number, piece in enumerate(pieces) if number not in hidden}


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"d_model": 48}, "`d_model: 48`: products in int8"),
        ({"encoder": {"d_ff": 128}}, "`encoder.d_ff: 128`"),
        ({"residual": "pre"}, "without their norm"),
        ({"norm": "rms"}, "`norm: rms`"),
        ({"activation": "gelu"}, "`activation: gelu`"),
        ({"embedding": {"zero_start": True, "positions": "none"}}, "`embedding.positions: none`"),
        ({"residual": "pre", "decoder": {"attention": "full"}}, "with pre-norm"),
        ({}, "a multiple of 8"),
    ],
)
def test_unsupported_models_are_refused(
    choices: dict[str, Any],
    reason: str,
    written: Written,
    tmp_path: Path,
    text: Path,
    tokenizer: SentencePieceTokenizer,
) -> None:
    if not choices and not tokenizer.size % 8:
        pytest.skip("the vocabulary already has such a size")
    with pytest.raises(ExportError, match=reason):
        export_model(written(**(SMALL | choices)), "firefox", tmp_path / "out", verify=text)
    assert not (tmp_path / "out").exists()


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "other weights": (lambda f: (f / "metadata.json").write_text('{"hash": "00"}'), "damaged, or belongs to another"),
    "another size": (lambda f: (f / "metadata.json").write_text('{"byteSize": 3}'), "says bytes 3"),
    "a language": (lambda f: (f / "metadata.json").write_text('{"sourceLanguage": "../x"}'), "`sourceLanguage`"),
    "nested": (lambda f: (f / "metadata.json").write_text("[" * 100_000), "nested"),
    "a list": (lambda f: (f / "metadata.json").write_text("[]"), "not an object of keys"),
    "a pipe": (lambda f: ((f / "metadata.json").unlink(), os.mkfifo(f / "metadata.json")), "not a regular file"),
    "weights are a pipe": (lambda f: ((f / f"{WEIGHTS}.gz").unlink(), os.mkfifo(f / WEIGHTS)), "holds no Marian model"),
    "weights are a bomb": (
        lambda f: (f / f"{WEIGHTS}.gz").write_bytes(gzip.compress(struct.pack("<2Q", 1, 1) + bytes(1 << 27))),
        "unpacks to more than",
    ),
    "weights end early": (
        lambda f: (f / f"{WEIGHTS}.gz").write_bytes((f / f"{WEIGHTS}.gz").read_bytes()[:-4000]),
        f"{WEIGHTS}.gz",
    ),
    "weights are a pointer": (
        lambda f: (f / f"{WEIGHTS}.gz").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "git lfs pull",
    ),
    "weights are not packed": (lambda f: (f / f"{WEIGHTS}.gz").write_bytes(bytes(99)), "not compressed data"),
    "a bomb of a vocabulary": (
        lambda f: (f / "vocab.qloqhi.spm.gz").write_bytes(gzip.compress(bytes(1 << 27))),
        "vocab.qloqhi.spm.gz",
    ),
    "no vocabulary": (lambda f: (f / "vocab.qloqhi.spm.gz").unlink(), "--dictionary"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malicious_folders_are_refused(case: str, tmp_path: Path) -> None:
    attack, reason = HOSTILE[case]
    folder = bundle(tmp_path, packed=True)
    attack(folder)
    message = refusal(lambda: import_checkpoint(folder, tmp_path / "ours"))
    assert reason in message, message
    assert not (tmp_path / "ours").exists()


ENGINE = os.environ.get("ZIGGURAT_BERGAMOT", "")
"""ENGINE is the folder with the package of Bergamot's engine (experiments/marian/bergamot.cjs)."""


@pytest.mark.slow
@pytest.mark.skipif(not ENGINE, reason="$ZIGGURAT_BERGAMOT names no folder with Bergamot's engine")
def test_bergamot_itself_gives_these_translations() -> None:
    driver = Path(__file__).parents[2] / "experiments" / "marian" / "bergamot.cjs"
    expected = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
    given = "".join(f"{line}\n" for line in expected["sources"])
    ran = subprocess.run(["node", driver, ENGINE, GOLDEN], input=given, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == expected["translations"]
