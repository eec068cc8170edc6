"""Models of other toolkits that are damaged or malicious: refused with the reason, within limits."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.confined import refusal
from tests.exchange.conftest import Written
from tests.exchange.test_import import dictionary, fairseq_checkpoint
from tests.exchange.test_matching_parts import listed, of_marian, of_transformers
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.onnx_runtime import open_onnx
from ziggurat.system.errors import ConfigError, DataError, ExportError
from ziggurat.system.files import CHECKSUMS_FILE

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle")

HUGGINGFACE: dict[str, tuple[dict[str, Any], str]] = {
    "first token -1": ({"decoder_start_token_id": -1}, "decoder_start_token_id"),
    "first token beyond": ({"decoder_start_token_id": 10**6}, "`first` is 1000000"),
    "padding NaN": ({"pad_token_id": float("nan")}, "pad_token_id"),
    "end a list": ({"eos_token_id": [1, 2]}, "eos_token_id"),
    "layers": ({"encoder_layers": 10**9}, "encoder_layers"),
    "more layers than weights": ({"encoder_layers": 4000}, "no parameter model.encoder.layers.2."),
    "no layers": ({"decoder_layers": 0}, "decoder_layers"),
    "negative heads": ({"encoder_attention_heads": -2}, "encoder_attention_heads"),
    "heads": ({"encoder_attention_heads": 3}, "3 heads do not divide"),
    "positions": ({"max_position_embeddings": 10**9}, "max_position_embeddings"),
    "a key is gone": ({"pad_token_id": None}, "pad_token_id"),
    "scale is a text": ({"scale_embedding": "yes"}, "scale_embedding"),
    "pre-norm, said of a post-norm class": ({"normalize_before": True}, "but marian normalises after sub-layers"),
    "normalised embeddings": ({"normalize_embedding": True}, "it normalises embeddings"),
    "a norm at the end": ({"add_final_layer_norm": True}, "no norm at the end"),
    "tied to another matrix": ({"tie_word_embeddings": True}, "is another matrix than the decoder's embedding"),
    "kind is a list": ({"model_type": [[]]}, "model_type"),
}


@pytest.fixture
def exported(written: Written, tmp_path: Path) -> Path:
    """A MarianMT directory as others have it, without our list of checksums."""
    path = written(residual="post", embedding={"zero_start": True})
    export_model(path, "huggingface", tmp_path / "out")
    (tmp_path / "out" / CHECKSUMS_FILE).unlink()
    return tmp_path / "out"


@pytest.mark.slow
def test_configurations_of_transformers(exported: Path, tmp_path: Path) -> None:
    plain = json.loads((exported / "config.json").read_text())
    for name, (changes, reason) in HUGGINGFACE.items():
        (exported / "config.json").write_text(json.dumps({**plain, **changes}))
        message = refusal(lambda: import_checkpoint(exported, tmp_path / "back"))
        assert reason in message, (name, message)
    for key in ("eos_token_id", "encoder_layers", "scale_embedding"):
        (exported / "config.json").write_text(json.dumps({k: v for k, v in plain.items() if k != key}))
        assert f"no `{key}`" in refusal(lambda: import_checkpoint(exported, tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_other_files_of_transformers(exported: Path, tmp_path: Path) -> None:
    ids = json.loads((exported / "vocab.json").read_text())
    attacks: dict[str, tuple[Callable[[Path], object], str]] = {
        "vocab.json": (lambda p: p.write_text(json.dumps({**ids, "x": -1})), "greater than or equal to 0"),
        "vocab.json of texts": (lambda p: p.write_text(json.dumps({**ids, "x": "1"})), "`x`"),
        "vocab.json beyond": (lambda p: p.write_text(json.dumps({**ids, "x": 10**9})), "tokens, the model"),
        "vocab.json nested": (lambda p: p.write_text("[" * 100_000), "nested"),
        "source.spm": (lambda p: (p.unlink(), os.mkfifo(p)), "not a regular file"),
        "model.safetensors.index.json": (lambda p: p.write_text('{"weight_map": {"a": "../b"}}'), "not in it"),
    }
    for number, (name, (attack, reason)) in enumerate(attacks.items()):
        folder = tmp_path / str(number)
        shutil.copytree(exported, folder)
        attack(folder / name.split()[0])
        message = refusal(lambda folder=folder: import_checkpoint(folder, tmp_path / "back"))  # type: ignore[misc]
        assert reason in message, (name, message)


@pytest.mark.slow
def test_weights_that_do_not_match_the_configuration(exported: Path, tmp_path: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    positions = "model.encoder.embed_positions.weight"
    plain = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(plain | {"static_position_embeddings": False}))
    norm = {f"model.encoder.layernorm_embedding.{name}": torch.zeros(16) for name in ("weight", "bias")}
    deeper = {"model.encoder.layers.2.fc1.bias": torch.zeros(24)}
    without = {key: tensor for key, tensor in tensors.items() if key != positions}
    for content, reason in (
        (tensors | norm, "is unknown (2 in all)"),
        (tensors | deeper, "layers.2.fc1.bias is unknown"),
        (without, f"no parameter {positions}, and its positions are trained"),
    ):
        save_file(content, exported / "model.safetensors")
        assert reason in refusal(lambda: import_checkpoint(exported, tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_pickles_that_would_fill_the_memory(exported: Path, tmp_path: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    view = {**tensors, "final_logits_bias": torch.zeros(1).expand(1 << 20, 1 << 20)}
    for name, content, reason in (("view", view, "not a tensor that the file holds"), ("zip", tensors, "compressed")):
        folder = tmp_path / name
        shutil.copytree(exported, folder)
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        torch.save(content, path)
        if name == "zip":
            packed = folder / "packed"
            with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
                for entry in old.infolist():
                    new.writestr(entry.filename, bytes(entry.file_size))
            packed.replace(path)
        message = refusal(lambda folder=folder: import_checkpoint(folder, tmp_path / "back"))  # type: ignore[misc]
        assert reason in message, message
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_checkpoints_of_fairseq(written: Written, tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    path = written(embedding={"sharing": "none", "positions": "learned", "max_positions": 64})
    words = dictionary(tokenizer, tmp_path / "dict.txt")

    def said(changed: Callable[[dict[str, Any]], object], given: Path = words) -> str:
        checkpoint = fairseq_checkpoint(path, tmp_path / "fairseq", learned=True)
        content = torch.load(checkpoint, weights_only=False)
        changed(content)
        torch.save(content, checkpoint)
        return refusal(lambda: import_checkpoint(checkpoint, tmp_path / "back", dictionaries=[given]))

    assert "decoder_embed_dim" in said(lambda c: vars(c["cfg"]["model"]).pop("decoder_embed_dim"))
    assert "encoder_layers" in said(lambda c: vars(c["cfg"]["model"]).update(encoder_layers=10**9))
    assert "no parameter encoder.embed_tokens" in said(lambda c: c["model"].pop("encoder.embed_tokens.weight"))
    # A tensor with one number that claims to have 10^12 of them.
    view = torch.zeros(1).expand(1 << 20, 1 << 20)
    assert "not a tensor that the file holds" in said(
        lambda c: c["model"].update({"decoder.embed_tokens.weight": view})
    )
    for bad in ("nan", "inf", "-inf"):
        assert "NaN, inf" in said(lambda c, bad=bad: c["model"]["encoder.layers.0.fc1.weight"][0].fill_(float(bad)))
    lists: list[Any] = ["x"]
    for _ in range(60):
        lists = [lists, lists]
    assert "layernorm_embedding" in said(lambda c: vars(c["cfg"]["model"]).update(layernorm_embedding=lists))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("häuser 1\n".encode("latin-1"))
    assert "not valid UTF-8" in said(lambda c: None, latin)
    twice = tmp_path / "twice.txt"
    twice.write_text("a 2\nb 1\na 1\n")
    assert "line 3: 'a' is listed twice" in said(lambda c: None, twice)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in said(lambda c: None, tmp_path / "pipe")
    assert not (tmp_path / "back").exists()


def test_manifests_of_onnx(tmp_path: Path) -> None:
    path = tmp_path / "onnx.json"
    good = {"format": 1, "vocabulary_size": 5, "max_positions": None, "memory": [], "states": []}
    for changes, reason in (
        ({"vocabulary_size": -1}, "vocabulary_size"),
        ({"max_positions": 0}, "max_positions"),
        ({"states": [{"name": "a", "shape": ["sentences", 10**12]}]}, "states.0.shape"),
        ({"memory": 3}, "memory"),
        ({"format": 10**9}, "format"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        assert reason in refusal(lambda: open_onnx(path.parent))


# Folders with odd names, links, and more than one model


def of_kind(kind: str, folder: Path) -> Path:
    """Write a model of transformers, or one of Marian with its decoder.yml."""
    tokens = list(listed())
    if kind == "transformers":
        return of_transformers(folder, listed(), len(tokens))
    of_marian(folder, [token for token in tokens if token != "<pad>"], len(tokens) - 1)
    (folder / "decoder.yml").write_text("models: [model.npz]\nvocabs: [vocab.yml]\n")
    return folder


KINDS = {"transformers": ("model.safetensors", "vocab.json"), "marian": ("model.npz", "vocab.yml")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["a b", "-x", "[x]*?", "a\nb", "\u6f22\u5b57", "a.npz", "a.bin", "~", "%s", "$HOME", "a:b"]
)
def test_a_folder_may_have_any_name(name: str, kind: str, tmp_path: Path) -> None:
    import_checkpoint(of_kind(kind, tmp_path / name), tmp_path / "out")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name)
    import_checkpoint(link, tmp_path / "linked")


@pytest.mark.parametrize("kind", KINDS)
def test_names_must_be_utf_8(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        import_checkpoint(of_kind(kind, tmp_path / os.fsdecode(b"a\xff")), tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_links_may_only_lead_to_files_in_the_folder(kind: str, tmp_path: Path) -> None:
    for number, name in enumerate((*KINDS[kind], "source.spm", "target.spm")):
        folder = of_kind(kind, tmp_path / f"{number}")
        file, other = folder / name, folder / "other"
        file.rename(other)
        file.symlink_to("other")
        import_checkpoint(folder, tmp_path / "out", force=True)
        other.rename(tmp_path / "outside")
        file.unlink()
        file.symlink_to(tmp_path / "outside")
        with pytest.raises(DataError, match=f"{name}: is a link to"):
            import_checkpoint(folder, tmp_path / "out", force=True)
        for made in (lambda at: at.symlink_to(at.name), lambda at: at.symlink_to("gone"), Path.mkdir, os.mkfifo):
            if file.is_dir():
                file.rmdir()
            file.unlink(missing_ok=True)
            made(file)
            with pytest.raises((DataError, ExportError), match=name):
                import_checkpoint(folder, tmp_path / "out", force=True)


def test_with_two_models_the_other_is_named(tmp_path: Path) -> None:
    for number, other in enumerate(("pytorch_model.bin", "opus.npz", "tf_model.h5", "model.fp16.safetensors")):
        folder = of_kind("transformers", tmp_path / f"{number}")
        (folder / other).write_bytes(b"x")
        with pytest.warns(UserWarning, match=f"model.safetensors is used, not {other}"):
            import_checkpoint(folder, tmp_path / "out", force=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"it has model\.fp16\.safetensors"):
        import_checkpoint(folder, tmp_path / "out", force=True)
    folder = of_kind("transformers", tmp_path / "split")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    with pytest.raises(DataError, match="remove one of them"):
        import_checkpoint(folder, tmp_path / "out", force=True)


def test_with_two_marian_models_the_other_is_named(tmp_path: Path) -> None:
    folder = of_kind("marian", tmp_path / "in")
    (folder / "model.bin").write_bytes(struct.pack("<Q", 1) + b"x")
    (folder / "decoder.yml").unlink()
    with pytest.warns(UserWarning, match="model.npz is used.* not model.bin"):
        import_checkpoint(folder, tmp_path / "out", dictionaries=[folder / "vocab.yml"])
    shutil.copy(folder / "model.npz", folder / "second.npz")
    with pytest.raises(DataError, match=r"2 models \(model.npz, second.npz\); name"):
        import_checkpoint(folder, tmp_path / "one", dictionaries=[folder / "vocab.yml"])
    import_checkpoint(folder / "second.npz", tmp_path / "two", dictionaries=[folder / "vocab.yml"])
    (folder / "target.spm").unlink()
    with pytest.raises(DataError, match=r"target\.spm: no such file"):
        import_checkpoint(folder / "second.npz", tmp_path / "three", dictionaries=[folder / "vocab.yml"])


@pytest.mark.parametrize("names", [[], ["Model.NPZ"], ["deep"], ["config (1).json", "model.safetensors"]])
def test_a_folder_without_a_model_is_described(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_bytes(b"x")
    with pytest.raises(DataError, match=f"it has {re.escape(', '.join(sorted(names)) or 'nothing')}"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
