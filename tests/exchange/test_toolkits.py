"""Checkpoints and folders of other toolkits: recognised by name, refused with a way out; pickles described in one
line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.exchange.test_fairseq import LINES, OPTIONS, parameters, words, write
from ziggurat.config import load_experiment
from ziggurat.exchange.importer import import_checkpoint, language_pair
from ziggurat.system.errors import ConfigError, DataError, ExportError, ZigguratError

pytestmark = pytest.mark.filterwarnings("ignore:.*(is a pickle|its tokens are pieces of|is used for both sides)")


def refused(path: Path, out: Path, **more: Any) -> str:
    with pytest.raises(ZigguratError) as caught:
        import_checkpoint(path, out, **more)
    assert not out.exists()
    message = str(caught.value)
    assert "\n" not in message
    assert "weights_only" not in message
    return message


MATRIX = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("content", "toolkit"),
    [
        ({"model": {"encoder.embeddings.make_embedding.emb_luts.0.weight": MATRIX}, "vocab": {}}, "OpenNMT-py"),
        ({"model": {}, "generator": {"0.weight": MATRIX}, "opt": argparse.Namespace(), "vocab": {}}, "OpenNMT-py"),
        ({"steps": 100, "best_ckpt_score": 1.0, "model_state": {"encoder.layers.0.x": MATRIX}}, "JoeyNMT"),
        ({"embedding_source.embedding.weight": MATRIX, "output_layer.weight": MATRIX}, "Sockeye"),
        ({"model": {"encoder_frontend.embed.weight": MATRIX}}, "fairseq2"),
        ({"state_dict": {"a": MATRIX}, "pytorch-lightning_version": "2"}, "PyTorch Lightning"),
        ({"model.shared.weight": MATRIX}, "transformers"),
    ],
)
@pytest.mark.parametrize("dictionary", [False, True])
def test_pickles_of_other_toolkits(content: Any, toolkit: str, dictionary: bool, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pt")
    dictionaries = [words(tmp_path / "dict.txt", LINES)] if dictionary else []
    message = refused(tmp_path / "model.pt", tmp_path / "out", dictionaries=dictionaries)
    assert f"a model of {toolkit}" in message
    assert "translate" in message


FOLDERS: dict[str, tuple[list[str], str]] = {
    "CTranslate2": (["model.bin", "shared_vocabulary.json", "config.json"], "a model of CTranslate2"),
    "older CTranslate2": (["model.bin", "source_vocabulary.txt", "target_vocabulary.txt"], "a model of CTranslate2"),
    "OpenNMT-tf": (["checkpoint", "ckpt-5000.index", "ckpt-5000.data-00000-of-00001"], "a model of OpenNMT-tf"),
    "Tensor2Tensor": (["checkpoint", "model.ckpt-5.index", "model.ckpt-5.meta", "hparams.json"], "of Tensor2Tensor"),
    "saved model": (["saved_model.pb"], "a model of TensorFlow"),
    "Sockeye": (["params.best", "config", "version", "vocab.src.0.json"], "a model of Sockeye"),
    "Eole": (["config.json", "model.00.safetensors", "vocab.json"], "a model of Eole"),
    "fairseq": (["model.pt", "dict.de.txt", "dict.en.txt"], "name the checkpoint itself"),
    "JoeyNMT": (["best.ckpt", "src_vocab.txt"], "name the checkpoint itself"),
    "ours": (["config.yaml", "vocabulary.json", "model.safetensors"], "but a model directory; `ziggurat translate"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_other_toolkits(name: str, tmp_path: Path) -> None:
    files, message = FOLDERS[name]
    (tmp_path / "theirs").mkdir()
    for file in files:
        (tmp_path / "theirs" / file).write_text("{}")
    assert message in refused(tmp_path / "theirs", tmp_path / "out")


EXPORTS: dict[str, tuple[list[str], str]] = {
    "ctranslate2": (["config.yaml", "vocabulary.json", "config.json", "model.bin"], "`ziggurat translate"),
    "onnx": (["config.yaml", "vocabulary.json", "encoder.onnx", "step.onnx", "onnx.json"], "load_onnx"),
    "argos": (["translate-de_en-1_0.argosmodel"], "Argos Translate"),
}


@pytest.mark.parametrize("target", EXPORTS)
def test_an_export_reports_its_reader_and_its_source(target: str, tmp_path: Path) -> None:
    files, said = EXPORTS[target]
    (tmp_path / "served").mkdir()
    for file in files:
        (tmp_path / "served" / file).write_text("{}")
    report = {"target": target, "model": "runs/a, step 500"}
    (tmp_path / "served" / "export.json").write_text(json.dumps(report))
    told = refused(tmp_path / "served", tmp_path / "out")
    assert "an export for" in told
    assert said in told
    assert "made from runs/a, step 500" in told


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("params.best", "a model of Sockeye"),
        ("params.00012", "a model of Sockeye"),
        ("model.ckpt-5.index", "a model of Tensor2Tensor"),
        ("ckpt-5.data-00000-of-00001", "a model of OpenNMT-tf"),
        ("model.t7", "a model of OpenNMT of Lua"),
        ("de_en.nemo", "a model of NeMo"),
        ("model.safetensors", "name its folder"),
        ("wmt16.en-de.joined-dict.transformer.tar.bz2", "unpack it"),
        ("model.onnx", "does not read"),
    ],
)
def test_files_of_other_toolkits(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"content")
    assert message in refused(tmp_path / name, tmp_path / "out")


def test_a_checkpoint_of_tensorflow_is_known_by_its_stem(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-5.index").write_bytes(b"content")
    assert "Tensor2Tensor" in refused(tmp_path / "model.ckpt-5", tmp_path / "out")


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a pickle with an object of the class `module.Name`, in the old format or as a zip file."""

    def make(name: str, place: Callable[[dict[str, Any], Any], object], zipped: bool = True) -> Path:
        module, _, short = name.rpartition(".")
        for end in (place for place, sign in enumerate(f"{module}.") if sign == "."):
            made = ModuleType(module[:end])
            made.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module[:end], made)
        kind = type(short, (), {"__module__": module, "__qualname__": short})
        setattr(made, short, kind)
        value = kind()
        value.encoder_layers = 1
        content: dict[str, Any] = {"args": argparse.Namespace(), "model": {}, "extra_state": {}}
        place(content, value)
        torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        return tmp_path / "model.pt"

    return make


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("omegaconf_like.dictconfig.DictConfig", "an object of omegaconf_like.dictconfig.DictConfig"),
        ("options.Options", "an object of options.Options"),
        ("enumeration.Choices", "an object of enumeration.Choices"),
        ("onmt.inputters.TextField", "a model of OpenNMT-py"),
        ("torchtext.vocab.Vocab", "a model of OpenNMT-py"),
        ("joeynmt.vocabulary.Vocabulary", "a model of JoeyNMT"),
        ("eole.config.Config", "a model of Eole"),
    ],
)
def test_options_of_any_class_are_reported_in_one_line(
    name: str, message: str, zipped: bool, pickled: Callable[..., Path], tmp_path: Path
) -> None:
    path = pickled(name, lambda content, value: content.update(args=value), zipped)
    assert message in refused(path, tmp_path / "out")


@pytest.mark.parametrize("zipped", [False, True])
def test_averages_of_the_training_run_are_not_read(zipped: bool, pickled: Callable[..., Path], tmp_path: Path) -> None:
    """Checkpoints of 2018 keep them in `extra_state`."""
    model = write(tmp_path / "plain.pt", parameters((8, 8)))
    plain = torch.load(model, weights_only=False)

    def place(content: dict[str, Any], value: Any) -> None:
        content |= {"args": plain["cfg"]["model"], "model": plain["model"], "extra_state": {"train_loss": value}}

    path = pickled("fairseq.meters.AverageMeter", place, zipped)
    dictionary = words(tmp_path / "dict.txt", LINES)
    import_checkpoint(path, tmp_path / "out", dictionaries=[dictionary])
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_damaged_pickles_are_reported_in_one_line_or_read(seed: int, zipped: bool, tmp_path: Path) -> None:
    draw, dictionary = random.Random(seed), words(tmp_path / "dict.txt", LINES)
    whole = torch.load(write(tmp_path / "whole.pt", parameters((8, 8))), weights_only=False)
    torch.save(whole, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "whole.pt").read_bytes()
    said = []
    for _ in range(20):
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            spoilt[draw.randrange(len(spoilt) if draw.random() < 0.3 else 6000)] = draw.randrange(256)
        (tmp_path / "spoilt.pt").write_bytes(spoilt)
        try:
            import_checkpoint(tmp_path / "spoilt.pt", tmp_path / "out", dictionaries=[dictionary], force=True)
        except ZigguratError as error:
            said.append(str(error))
    assert said
    assert not any("\n" in one for one in said)


@pytest.mark.parametrize("zipped", [False, True])
def test_options_that_are_an_object_of_fairseq_are_read_by_their_values(
    zipped: bool, pickled: Callable[..., Path], tmp_path: Path
) -> None:
    def place(content: dict[str, Any], value: Any) -> None:
        kind = type(value)
        sides = {"encoder": kind(), "decoder": kind()}
        for key, option in OPTIONS.items():
            side, _, name = key.partition("_")
            setattr(sides.get(side, value), name if side in sides else key, option)
        value.encoder, value.decoder = sides["encoder"], sides["decoder"]
        content |= {"args": None, "cfg": {"model": value, "task": None}, "model": parameters((8, 8))}

    path = pickled("fairseq.models.transformer.TransformerConfig", place, zipped)
    report = import_checkpoint(path, tmp_path / "out", dictionaries=[words(tmp_path / "dict.txt", LINES)])
    assert report["kind"] == "fairseq transformer_iwslt_de_en"


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02.", b"PK\x03\x04rubbish", b"<!DOCTYPE html><html>"])
def test_files_that_torch_did_not_write_are_reported_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    assert "model.pt" in refused(tmp_path / "model.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ("de-en", ("de", "en")),
        ("pt-BR-en", ("pt-BR", "en")),
        ("en-pt-BR", ("en", "pt-BR")),
        ("zh-Hans-en", ("zh-Hans", "en")),
        ("en-zh_TW", ("en", "zh_TW")),
        ("nb-NO-en-GB", ("nb-NO", "en-GB")),
        ("zh-Hant-HK-en", ("zh-Hant-HK", "en")),
        ("sr-Latn-sr-Cyrl", ("sr-Latn", "sr-Cyrl")),
        ("es-419-en", ("es-419", "en")),
        ("deu_Latn-eng_Latn", ("deu_Latn", "eng_Latn")),
        ("DE-EN", ("DE", "EN")),
        ("source-target", ("source", "target")),
        ("pt-br:en", ("pt-br", "en")),
        (" de-en", ("de", "en")),
        ("de - en", ("de", "en")),
        ("pt-BR -\ten\n", ("pt-BR", "en")),
        (" pt-br : en ", ("pt-br", "en")),
        ("x-mul-x:en-x-klingon", ("x-mul-x", "en-x-klingon")),
        ("de-\ten", ("de", "en")),
    ],
)
def test_a_language_pair_is_split_into_its_languages(given: str, pair: tuple[str, str]) -> None:
    assert language_pair(given) == pair


@pytest.mark.parametrize(
    "given",
    [
        "german",
        "de-",
        "-en",
        "pt-br-en",
        "pt-BR",
        "zh-Hans",
        "a:b:c",
        ":en",
        "de-en-fr",
        "",
        "d e-en",
        "de-e n",
        " - ",
        "de: ",
    ],
)
def test_an_ambiguous_or_unreadable_language_pair_is_requested(given: str) -> None:
    with pytest.raises(ConfigError, match="pt-br:en"):
        language_pair(given)


def test_no_such_file_and_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises((DataError, ExportError), match=r"config\.json"):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")


class Container:
    """The layout of omegaconf's DictConfig and ListConfig in a pickle; nodes have `_val` in place of `_content`."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state, _parent=None)


def as_omegaconf(value: Any, kinds: dict[str, type], parent: Any = None) -> Any:
    """Return `value` as omegaconf stores it: children know their parent; a container's description has the types."""
    if not isinstance(value, dict | list):
        return kinds["nodes.AnyNode"](_val=value, _metadata=kinds["base.Metadata"](ref_type=Any), _parent=parent)
    kind = kinds["dictconfig.DictConfig" if isinstance(value, dict) else "listconfig.ListConfig"]
    described = kinds["base.ContainerMetadata"](object_type=dict, element_type=list[int], resolver_cache=None)
    made = kind(_metadata=described, _parent=parent)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    children = {key: as_omegaconf(child, kinds, made) for key, child in pairs}
    made._content = children if isinstance(value, dict) else list(children.values())
    return made


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Classes with the names of omegaconf's, which need not be installed to read them."""
    monkeypatch.setitem(sys.modules, "omegaconf", ModuleType("omegaconf"))
    found: dict[str, type] = {}
    for name in (
        *("base.Metadata", "base.ContainerMetadata", "nodes.AnyNode"),
        *("dictconfig.DictConfig", "listconfig.ListConfig"),
    ):
        place, short = f"omegaconf.{name.partition('.')[0]}", name.partition(".")[2]
        made = sys.modules.get(place) or ModuleType(place)
        monkeypatch.setitem(sys.modules, place, made)
        found[name] = type(short, (Container,), {"__module__": place, "__qualname__": short})
        setattr(made, short, found[name])
    return found


FLAT = {key: value for key, value in OPTIONS.items() if key not in ("task", "arch")} | {"_name": "transformer"}
NESTED: dict[str, Any] = {"_name": "transformer", "encoder": {}, "decoder": {}}
for option in FLAT:
    if (side := option.partition("_")[0]) in ("encoder", "decoder"):
        NESTED[side][option.removeprefix(f"{side}_")] = FLAT[option]
TASK = {key: FLAT[key] for key in FLAT if key.startswith(("max_", "source_", "target_"))} | {"_name": "translation"}
REFERRING = NESTED | {key: f"${{task.{key}}}" for key in ("max_source_positions", "max_target_positions")}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("model", "task"),
    [(FLAT, None), (FLAT, TASK), (NESTED, TASK), (REFERRING, TASK), (FLAT | {"betas": [0.9, 0.98]}, TASK)],
)
def test_options_of_omegaconf_are_read_as_plain_values(
    model: dict[str, Any], task: Any, zipped: bool, kinds: dict[str, type], tmp_path: Path
) -> None:
    content = {"args": None, "cfg": as_omegaconf({"model": model, "task": task}, kinds), "model": parameters((8, 8))}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    dictionary = words(tmp_path / "dict.txt", LINES)
    report = import_checkpoint(tmp_path / "model.pt", tmp_path / "out", dictionaries=[dictionary])
    assert report["kind"] == "fairseq transformer"
    config = load_experiment(tmp_path / "out" / "config.yaml").model
    assert (config.encoder.layers, config.embedding.max_positions) == (1, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": TASK}, "not a checkpoint of fairseq"),
        ({"model": "transformer", "task": TASK}, "not a checkpoint of fairseq"),
        ({"model": FLAT, "task": TASK | {"langs": ["de", "en", "fr"]}}, "a model of several languages"),
        ({"model": FLAT | {"layernorm_embedding": True}, "task": TASK}, "`layernorm_embedding: True`"),
    ],
)
def test_other_options_of_omegaconf_are_refused(
    given: Any, message: str, kinds: dict[str, type], tmp_path: Path
) -> None:
    torch.save({"args": None, "cfg": as_omegaconf(given, kinds), "model": parameters((8, 8))}, tmp_path / "model.pt")
    assert message in refused(tmp_path / "model.pt", tmp_path / "out")
