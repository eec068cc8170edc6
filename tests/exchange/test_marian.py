"""Marian models as model directories, compared with Marian's computation and with CTranslate2's converter."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
import yaml
from ctranslate2.converters import MarianConverter
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import ziggurat as ziggurat  # the command line as a fixture
from tests.confined import refusal
from tests.exchange.examples import SENTENCES
from tests.exchange.marian import (
    POST_NORM,
    PRE_NORM,
    log_probabilities,
    position_table,
    random_arrays,
    write_npz,
    write_vocabulary,
)
from tests.exchange.test_opus import TARGETS, trained
from ziggurat.config import load_experiment
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer, load_tokenizers
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian_files import read_ids
from ziggurat.model.directory import open_model
from ziggurat.system.errors import DataError
from ziggurat.translate.translator import load_translator

MODELS: dict[str, bytes] = {}


def models() -> dict[str, bytes]:
    """SentencePiece models for the two sides, trained once."""
    if not MODELS:
        MODELS.update(source=trained(SENTENCES), target=trained(TARGETS))
    return MODELS


def pieces_of(model: bytes) -> list[str]:
    tokenizer = SentencePieceTokenizer(model)
    return tokenizer.pieces(range(3, tokenizer.size - 1))  # without <unk>, <s>, </s> and our padding token


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Write a folder like an unpacked download of OPUS-MT, with one list of pieces for both sides or one for each."""

    def write(options: dict[str, Any] = POST_NORM, separate: bool = False, seed: int = 5) -> Path:
        path = tmp_path / "opus"
        path.mkdir()
        for side, model in models().items():
            (path / f"{side}.spm").write_bytes(model)
        sides = [pieces_of(model) for model in models().values()]
        lists = [sides[0], sides[1]] if separate else [[*sides[0], *sides[1]]]
        tokens = [list(dict.fromkeys(["</s>", "<unk>", *pieces])) for pieces in lists]
        names = ["opus.src.vocab.yml", "opus.trg.vocab.yml"] if separate else ["opus.vocab.yml"]
        for name, listed in zip(names, tokens, strict=True):
            write_vocabulary(path / name, listed)
        arrays = random_arrays(options, (len(tokens[0]), len(tokens[-1])), seed)
        write_npz(path / "opus.npz", arrays, options)
        decoder = {"models": ["/home/them/opus.npz"], "vocabs": [names[0], names[-1]], "relative-paths": True}
        decoder |= {"beam-size": 6, "normalize": 0.6, "word-penalty": 0}
        (path / "decoder.yml").write_text(yaml.safe_dump(decoder))
        return path

    return write


def by_name(tokenizer: Tokenizer) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as packed:
        return {name: packed[name] for name in packed.files if not name.startswith("special:")}


UNTIED = PRE_NORM | {"tied-embeddings": False, "output-omit-bias": True}


@pytest.mark.parametrize(
    ("options", "separate", "sharing"),
    [
        (POST_NORM, False, "all"),
        (PRE_NORM, True, "decoder"),
        (UNTIED, True, "none"),
        (POST_NORM | {"transformer-ffn-activation": "relu", "transformer-heads": 2}, False, "all"),
    ],
)
def test_an_imported_model_computes_the_same_as_marian(
    options: dict[str, Any], separate: bool, sharing: str, folder: Folder, tmp_path: Path
) -> None:
    path = folder(options, separate)
    import_checkpoint(path, tmp_path / "ours", languages="de-en")
    experiment = load_experiment(tmp_path / "ours" / "config.yaml")
    assert experiment.model.embedding.sharing == sharing
    decoding = experiment.decoding
    assert (decoding.beam_size, decoding.length_penalty.alpha, decoding.max_length.ratio) == (6, 0.6, 3.0)
    source, target = load_tokenizers(tmp_path / "ours")
    read = [read_ids(file) for file in sorted(path.glob("*.yml")) if file.name != "decoder.yml"]
    theirs = [{number: piece for piece, number in ids.items()} for ids in (read[0], read[-1])]
    names = [by_name(tokenizer) for tokenizer in (source, target)]
    places = [[ours[ids[n]] for n in range(len(ids))] for ours, ids in zip(names, theirs, strict=True)]
    generator = np.random.default_rng(2)
    for length in (1, 9):
        words = [*generator.integers(1, len(read[0]), length).tolist(), 0]
        written = generator.integers(1, len(read[-1]), length + 2).tolist()
        wanted = log_probabilities(options, arrays_of(path / "opus.npz"), words, written)
        ids = torch.tensor([[places[0][word] for word in words]])
        begun = torch.tensor([[target.bos, *(places[1][word] for word in written)]])
        model = open_model(tmp_path / "ours").model
        with torch.inference_mode():
            memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
            found = model.logits(model.decode(begun, memory))[0].log_softmax(-1)
        np.testing.assert_allclose(found[:, places[1]].numpy(), wanted, atol=3e-5, rtol=1e-5)
        assert found.exp()[:, places[1]].sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)  # and nothing else is likely


def test_a_folder_of_opus_mt_is_imported_by_the_documented_command(
    folder: Folder, tmp_path: Path, ziggurat: Any
) -> None:
    path = folder()
    assert ziggurat("import", path, "--languages", "de-en", "--out", tmp_path / "ours").status == 0
    ours = load_translator(tmp_path / "ours")
    # CTranslate2 reads the file itself, but gets Marian's positions, because it computes them differently.
    arrays = arrays_of(path / "opus.npz")
    write_npz(path / "other.npz", {**arrays, "Wpos": position_table(1024, 16)}, POST_NORM, block=1)
    vocabulary = path / "opus.vocab.yml"
    MarianConverter(str(path / "other.npz"), [str(vocabulary), str(vocabulary)]).convert(str(tmp_path / "theirs"))
    theirs = ctranslate2.Translator(str(tmp_path / "theirs"))
    sides = [SentencePieceTokenizer(model) for model in models().values()]
    texts = zip(sides, (SENTENCES, TARGETS), strict=True)
    cut = [[tokenizer.pieces(ids) for ids in tokenizer.encode(lines)] for tokenizer, lines in texts]
    wanted = theirs.score_batch(*cut)
    found = ours.score(SENTENCES, TARGETS)
    for mine, score, pieces in zip(found, wanted, cut[1], strict=True):
        assert mine.tokens == pieces
        assert mine.token_log_probabilities == pytest.approx(score.log_probs, abs=2e-3)
    assert ours.translate(["Where is the old bridge?"])[0].text


def test_a_vocabulary_that_is_a_sentencepiece_model(tmp_path: Path) -> None:
    """Marian and Firefox Translations train such models: one SentencePiece model for both sides, with its own ids."""
    model = trained(SENTENCES, bos_id=-1, eos_id=0, unk_id=1)  # Marian trains them with these settings
    rows = SentencePieceTokenizer(model).size - 2  # without padding and begin-of-sentence, which only we have
    (tmp_path / "joint.spm").write_bytes(model)
    write_npz(tmp_path / "model.npz", random_arrays(POST_NORM, (rows, rows), 3), POST_NORM)
    with pytest.raises(DataError, match="--dictionary"):
        import_checkpoint(tmp_path / "model.npz", tmp_path / "ours")
    import_checkpoint(tmp_path / "model.npz", tmp_path / "named", dictionaries=[tmp_path / "joint.spm"])
    (tmp_path / "joint.spm").rename(tmp_path / "vocab.deen.spm")
    report = import_checkpoint(tmp_path / "model.npz", tmp_path / "ours")
    assert report["kind"] == "marian"
    source, target = load_tokenizers(tmp_path / "ours")
    assert source is target
    experiment = load_experiment(tmp_path / "ours" / "config.yaml")
    assert experiment.model.embedding.sharing == "all"
    assert experiment.decoding.length_penalty.alpha == 0, "Marian's default of `normalize`, without a decoder.yml"
    line = SENTENCES[0]
    ids = source.encode([line])[0]
    arrays = arrays_of(tmp_path / "model.npz")
    wanted = log_probabilities(POST_NORM, arrays, [*ids, source.eos], ids)
    gold = wanted[range(len(ids) + 1), [*ids, source.eos]]
    scored = load_translator(tmp_path / "ours").score([line], [line])[0]
    assert scored.token_log_probabilities == pytest.approx(gold.tolist(), abs=1e-4)


def test_already_segmented_text(tmp_path: Path) -> None:
    tokens = ["</s>", "<unk>", "the", "ho@@", "use"]
    write_vocabulary(tmp_path / "vocab.yml", tokens)
    write_npz(tmp_path / "model.npz", random_arrays(POST_NORM, (5, 5), 3), POST_NORM)
    import_checkpoint(tmp_path / "model.npz", tmp_path / "ours", dictionaries=[tmp_path / "vocab.yml"])
    source, target = load_tokenizers(tmp_path / "ours")
    assert source is target
    assert source.pieces(source.encode(["the ho@@ use"])[0]) == ["the", "ho@@", "use"]


@pytest.mark.parametrize("ending", ["yml", "txt"])
@pytest.mark.parametrize("segmented", [True, False])
def test_rows_beyond_the_vocabulary_keep_their_probability(segmented: bool, ending: str, tmp_path: Path) -> None:
    """`--dim-vocabs` above the size of a token list creates such rows, and label smoothing gives them probability."""
    tokens = ["</s>", "<unk>", *pieces_of(models()["source"])]
    rows = len(tokens) + 20
    vocabulary = tmp_path / f"vocab.{ending}"
    if ending == "yml":
        write_vocabulary(vocabulary, tokens)
    else:
        vocabulary.write_text("".join(f"{token}\n" for token in tokens))
    arrays = random_arrays(POST_NORM, (rows, rows), 3)
    write_npz(tmp_path / "model.npz", arrays, POST_NORM)
    if not segmented:
        for side in ("source", "target"):
            (tmp_path / f"{side}.spm").write_bytes(models()["source"])
    tokenizer = SentencePieceTokenizer(models()["source"])
    pieces = tokenizer.pieces(tokenizer.encode(SENTENCES[:1])[0])
    line = " ".join(pieces) if segmented else SENTENCES[0]
    assert_rows_count(tmp_path, vocabulary, line, [tokens.index(piece) for piece in pieces], len(tokens))


def test_rows_beyond_a_sentencepiece_model_keep_their_probability(tmp_path: Path) -> None:
    """Padding a matrix to a round number creates such rows; Marian decodes with such a model."""
    model = trained(SENTENCES, bos_id=-1, eos_id=0, unk_id=1)
    (tmp_path / "joint.spm").write_bytes(model)
    tokenizer = SentencePieceTokenizer(model)
    known = tokenizer.size - 2  # without padding and begin-of-sentence, which only we have
    write_npz(tmp_path / "model.npz", random_arrays(POST_NORM, (known + 20, known + 20), 3), POST_NORM)
    assert_rows_count(tmp_path, tmp_path / "joint.spm", SENTENCES[0], tokenizer.encode(SENTENCES[:1])[0], known)
    source, target = load_tokenizers(tmp_path / "ours")
    assert source is target
    assert source.encode(SENTENCES) == tokenizer.encode(SENTENCES)


def assert_rows_count(folder: Path, vocabulary: Path, line: str, ids: list[int], known: int) -> None:
    """Import a model with 20 rows more than its vocabulary has tokens, and compare the scores of a line."""
    report = import_checkpoint(folder / "model.npz", folder / "ours", dictionaries=[vocabulary])
    assert [(one["count"], one["of"]) for one in report["unmatched"]] == [(20, known + 20)]
    wanted = log_probabilities(POST_NORM, arrays_of(folder / "model.npz"), [*ids, 0], ids)
    scored = load_translator(folder / "ours").score([line], [line])[0]
    assert scored.token_log_probabilities == pytest.approx(wanted[range(len(ids) + 1), [*ids, 0]].tolist(), abs=1e-4)


def test_bytes_of_control_characters_are_not_written(tmp_path: Path) -> None:
    """Marian writes them only with `--allow-special`."""
    model = trained(SENTENCES, bos_id=-1, eos_id=0, unk_id=1, vocab_size=320, byte_fallback=True)
    tokenizer = SentencePieceTokenizer(model)
    rows = tokenizer.size - 2
    arrays = random_arrays(POST_NORM, (rows, rows), 3)
    bell, letter = (tokenizer.pieces(range(rows)).index(piece) for piece in ("<0x07>", "<0x41>"))
    arrays["decoder_ff_logit_out_b"][0, [bell, letter]] += [900.0, 800.0]
    (tmp_path / "joint.spm").write_bytes(model)
    write_npz(tmp_path / "model.npz", arrays, POST_NORM)
    import_checkpoint(tmp_path / "model.npz", tmp_path / "ours", dictionaries=[tmp_path / "joint.spm"])
    translator = load_translator(tmp_path / "ours", max_length={"limit": 3})
    (as_marian,) = translator.translate(SENTENCES[:1])
    assert set(as_marian.text) == {"A"}
    (usual,) = translator.translate(SENTENCES[:1], endings="beam")
    assert set(usual.text) == {"\a"}


# Without the line ends of YAML, because PyYAML writes such text over several lines and Marian as `\x85`.
TOKENS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\x85\u2028\u2029"), min_size=1)


@given(st.lists(TOKENS, unique=True))
def test_vocabularies_of_any_tokens(tmp_path_factory: pytest.TempPathFactory, tokens: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yml"
    # One line per token, as PyYAML writes it: bare, in single or double quotes, or long ones after `? `.
    lines = [yaml.safe_dump({token: n}, allow_unicode=True, width=10**6) for n, token in enumerate(tokens)]
    path.write_text("".join(lines), encoding="utf-8", newline="")
    assert read_ids(path) == {token: number for number, token in enumerate(tokens)}
    path.with_suffix(".json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    assert read_ids(path.with_suffix(".json")) == read_ids(path)


@pytest.mark.slow
def test_unsupported_models_are_refused_with_all_reasons(folder: Folder, tmp_path: Path) -> None:
    path = folder()
    arrays = arrays_of(path / "opus.npz")

    def said(options: dict[str, Any], changed: dict[str, Any] | None = None) -> str:
        write_npz(path / "opus.npz", arrays | (changed or {}), POST_NORM | options)
        return refusal(lambda: import_checkpoint(path, tmp_path / "ours"))

    odd = {"type": "s2s", "transformer-decoder-autoreg": "rnn", "transformer-ffn-activation": "tanh", "ulr": True}
    many = said(odd)
    assert all(reason in many for reason in ("`type: s2s`", "`dec-cell: gru`", "`transformer-ffn-activation: tanh`"))
    assert "ULR" in many
    assert "two functions of that name" in said({"transformer-ffn-activation": "gelu", "version": None})
    assert "`transformer-preprocess: n`, `transformer-postprocess: dan`" in said({"transformer-preprocess": "n"})
    assert "LN and RMSNorm" in said({"transformer-preprocess": "r"})
    old = PRE_NORM | {"version": "v1.10.24 1 2021"}
    assert "before 1.11" in said({key: old[key] for key in old if key.startswith(("transformer-p", "version"))})
    assert "`transformer-tied-layers: [1, 3]` for 2" in said({"transformer-tied-layers": [1, 3]})
    assert "factored" in said({"lemma-dim-emb": 8})
    assert "no map of its output" in said({"transformer-rnn-projection": True})
    assert "no parameter encoder_l4_self_Wq" in said({"enc-depth": 4})
    assert "enc_depth" in said({"enc-depth": 10**9})
    assert "is unknown (26 in all)" in said({"dec-depth": 1})
    assert "heads do not divide" in said({"transformer-heads": 3})
    assert "Wpos is unknown" in said({}, {"Wpos": np.zeros((9, 16), np.float32)})
    assert "is quantised" in said({}, {"encoder_l1_ffn_W1": np.zeros((16, 24), np.int8)})
    assert "NaN" in said({}, {"encoder_l1_ffn_b1": np.full((1, 24), np.nan, np.float32)})
    assert "ffn.in_proj.bias has shape [23]" in said({}, {"encoder_l1_ffn_b1": np.zeros((1, 23), np.float32)})
    for left in (20, len(arrays["Wemb"]) - 1):
        fewer = {"Wemb": arrays["Wemb"][:left], "decoder_ff_logit_out_b": arrays["decoder_ff_logit_out_b"][:, :left]}
        assert f"tokens, the model {left} rows" in said({}, fewer)
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
def test_files_that_are_damaged_or_missing(folder: Folder, tmp_path: Path) -> None:
    path = folder()
    weights = path / "opus.npz"
    whole = weights.read_bytes()

    def said(content: bytes | None = None, where: Path = path) -> str:
        if content is not None:
            weights.write_bytes(content)
        return refusal(lambda: import_checkpoint(where, tmp_path / "ours"))

    assert "opus.npz: damaged" in said(whole[: len(whole) // 2])
    assert "opus.npz: damaged" in said(b"no zip")
    packed = zipped({"a": bytes(100)}, zipfile.ZIP_LZMA)
    assert "opus.npz: damaged" in said(packed.replace(packed[44:54], b"\xff" * 10))
    assert "unpacks to more than" in said(zipped({"a": bytes(10**7)}, zipfile.ZIP_DEFLATED))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**4)})
    assert "in 4 bytes" in said(zipped({"Wemb": header.getvalue() + b"\0\0\0\0"}))
    broken = header.getvalue().replace(b"}", b"(")
    assert "EOF in multi-line statement" in said(zipped({"Wemb": broken}))
    objects = io.BytesIO()
    np.save(objects, np.array([Path("x")], dtype=object), allow_pickle=True)
    assert "an array of object" in said(zipped({"Wemb": objects.getvalue()}))
    plain = io.BytesIO()
    np.save(plain, np.zeros(3, np.float32))
    assert "special:model.yml" in said(zipped({"Wemb": plain.getvalue()}))
    weights.write_bytes(whole)
    (path / "opus.vocab.yml").write_text("the: 0\nhouse\n")
    assert "opus.vocab.yml: line 2: 'house' is not `token: id`" in said()
    (path / "opus.vocab.yml").write_text("the: 0\nhouse: 1\n")
    assert "opus.vocab.yml: has no <unk>" in said()
    (path / "opus.vocab.yml").write_text("")
    for side in ("source", "target"):
        (path / f"{side}.spm").unlink()
    assert "opus.vocab.yml: has no <unk>" in said()
    (path / "opus.vocab.yml").unlink()
    assert "opus.vocab.yml: no such file" in said()
    (path / "decoder.yml").write_text("models: [a.npz, b.npz]\nvocabs: [v.yml, v.yml]\n")
    assert "has 2 models (" in said()
    (path / "decoder.yml").write_text("models: 5\n")
    assert "lists of files" in said()
    (path / "decoder.yml").write_text("models: []\n")
    weights.unlink()
    assert "holds no Marian model" in said()
    assert "no such file" in said(where=path / "other.npz")
    (path / "model.bin").write_bytes(b"x")
    assert "begins with another number" in said(where=path / "model.bin")
    assert not (tmp_path / "ours").exists()


def zipped(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as packed:
        for name, content in entries.items():
            packed.writestr(f"{name}.npy", content)
    return file.getvalue()
