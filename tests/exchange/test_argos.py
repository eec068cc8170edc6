"""Packages for Argos Translate: read with only CTranslate2 and SentencePiece, and installed where it is available."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from tests.exchange.examples import SENTENCES, SMALL, random_model
from tests.small import merged
from tests.vocabulary import trained_tokenizer
from ziggurat.cli import main
from ziggurat.config import Experiment
from ziggurat.data.babel import generate
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.exchange.argos import ArgosTranslator, PackageChoices, package_choices
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS
from ziggurat.model.directory import open_model, write_model_directory
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ExportError
from ziggurat.system.files import check_folder
from ziggurat.translate.ctranslate2 import CTranslate2Translator

THEIRS = Path(__file__).resolve().parents[2] / "experiments" / "argos" / "theirs.py"
NAME = "translate-de_en-1_0"
LEARNED = {"positions": "learned", "max_positions": 300}
AS_ARGOS: dict[str, Any] = {
    "length_penalty": {"kind": "power", "alpha": 0.2, "coverage": 0.0},
    "max_length": {"ratio": 0.0, "extra": 255, "limit": 255},
    "min_length": 1,
}


def unpacked(out: Path) -> Path:
    """Install an export's only package as Argos Translate does; return the folder it creates."""
    (package,) = out.glob("*.argosmodel")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(out.with_name("packages"))
    (installed,) = out.with_name("packages").iterdir()
    assert installed.name == package.stem
    return installed


def translated(installed: Path, lines: Sequence[str]) -> list[str]:
    """Translate with an installed package as programs do: SentencePiece, CTranslate2, and blanks in place of marks."""
    import ctranslate2

    joint = sentencepiece.SentencePieceProcessor(model_file=str(installed / "sentencepiece.model"))
    model = ctranslate2.Translator(str(installed / "model"), intra_threads=1)
    found = []
    for line in lines:
        (result,) = model.translate_batch([joint.encode(line, out_type=str)], beam_size=4, length_penalty=0.2)
        text = joint.decode_pieces(result.hypotheses[0]).replace("\u2581", " ")
        found.append(text[1:] if text.startswith(" ") else text)
    return found


def served(model: Path, text: Path, lines: Sequence[str] = SENTENCES) -> list[str]:
    """Translate with the model's CTranslate2 export, with Argos Translate's search."""
    export_model(model, "ctranslate2", model.with_name("served"), verify=text)
    translator = CTranslate2Translator(model.with_name("served"), threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ziggurat.translate.ctranslate2._PATIENCE", 1.0)  # CTranslate2's default; ours is longer
        return [translation.text for translation in translator.translate_stream(lines, **AS_ARGOS)]


def model_directory(
    work: Path,
    source: SentencePieceTokenizer,
    target: SentencePieceTokenizer,
    model: Mapping[str, Any] | None = None,
    no_text: float = -1e4,
    **sections: Mapping[str, Any],
) -> Path:
    """Write a random model with these vocabularies and choices; its translations are printable, differ and end.

    `no_text` is the bias of tokens that are not text.
    """
    data = {"source_language": "de", "target_language": "en", "store": str(work / "none"), **sections.get("data", {})}
    choices = merged(SMALL, {"embedding": {"sharing": "none", **LEARNED}, **(model or {})})
    experiment = Experiment.model_validate({"data": data, "model": choices, "decoding": sections.get("decoding", {})})
    (work / "vocabularies").mkdir()
    save_tokenizers(work / "vocabularies", source, target)
    random = random_model(experiment.model, max(source, target, key=lambda tokenizer: tokenizer.size))
    parameters = dict(random.named_parameters())
    for name, parameter in parameters.items():
        if name in ("source_embedding.tokens.weight", "target_embedding.tokens.weight", "output.weight", "output.bias"):
            parameter.data = parameter.data[: source.size if name.startswith("source") else target.size]
        if name.endswith("cross_attn.out_proj.weight"):
            parameter.data *= 4.0  # the output depends on the input ...
    bias, ending = parameters["output.bias"].data, parameters["output.weight"].data[target.eos]
    ending *= 2.0
    if (positions := parameters.get("target_embedding.positions.weight")) is not None:
        bias[target.eos] -= 8.0  # ... and the end becomes likelier with distance from the beginning
        positions.data += 0.15 * torch.arange(len(positions))[:, None] * ending / ending.norm()
    bias[[number for number, piece in enumerate(target.pieces(range(target.size))) if piece[:3] == "<0x"]] = -1e4
    bias[[target.pad, target.bos, *target.tags.values()]] = no_text
    write_model_directory(work / "model", weights(random), experiment, work / "vocabularies")
    return work / "model"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model directory with one vocabulary and a tag, also trained without the tag."""
    joint = trained_tokenizer(SENTENCES, 340, ["<bt>"])
    corpora = [{"source": "a", "target": "b"}, {"source": "c", "target": "d", "tag": "<bt>"}]
    return model_directory(tmp_path, joint, joint, data={"train": corpora})


def test_a_package_translates_as_the_export_for_ctranslate2(path: Path, text: Path, tmp_path: Path) -> None:
    report = export_model(path, "argos", tmp_path / "out", verify=text, quantization="float32")
    assert report["verification"]["different"] == 0
    assert (report["quantization"], "quantized" in report) == (None, False)
    package = f"{NAME}.argosmodel"
    assert sorted(os.listdir(tmp_path / "out")) == ["checksums.json", "export.json", package]
    check_folder(tmp_path / "out")
    installed = unpacked(tmp_path / "out")
    assert sorted(str(file.relative_to(installed)) for file in installed.rglob("*") if file.is_file()) == [
        "README.md",
        "metadata.json",
        "model/config.json",
        "model/model.bin",
        "model/shared_vocabulary.json",
        "sentencepiece.model",
    ]
    assert json.loads((installed / "metadata.json").read_text("ascii")) == {
        "package_version": "1.0",
        "argos_version": "1.10",
        "from_code": "de",
        "from_name": "German",
        "to_code": "en",
        "to_name": "English",
    }
    lines = [*SENTENCES, "Spare  blanks\tand\rothers \u2581 here. ", " A dog", "Nobody \U0001f9e9 knows: §"]
    theirs = translated(installed, lines)
    assert theirs == served(path, text, [line.replace("\u2581", " ") for line in lines])
    assert len(set(theirs)) > 5
    reader = ArgosTranslator(tmp_path / "out")
    assert [t.text for t in reader.translate_stream([*lines, "", " \t"])] == [*theirs, "", ""]


@pytest.mark.slow
def test_int8_by_default_and_the_same_bytes_each_time(path: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export_model(path, "argos", out, verify=text)
    assert report["quantization"] == "int8"
    assert report["quantized"]["lines"] == len(SENTENCES)
    package = out / f"{NAME}.argosmodel"
    first = package.read_bytes()
    with pytest.raises(ConfigError, match=r"already holds an export \(argos, int8\); `--force` replaces it"):
        export_model(path, "argos", out, verify=text)
    assert export_model(path, "argos", out, verify=text, force=True) == report
    assert package.read_bytes() == first
    with zipfile.ZipFile(package) as archive:
        int8 = archive.getinfo(f"{NAME}/model/model.bin").file_size
    fp32 = export_model(path, "argos", out, verify=text, quantization="float32", force=True)
    assert fp32["verification"] == report["verification"]
    with zipfile.ZipFile(package) as archive:
        assert int8 < 0.8 * archive.getinfo(f"{NAME}/model/model.bin").file_size


@pytest.mark.slow
def test_separate_vocabularies_are_joined_by_one_model(text: Path, tmp_path: Path) -> None:
    source = trained_tokenizer(SENTENCES, 340, ())
    target = trained_tokenizer(["Ein kleines Haus steht am Fluß.", "Hunde laufen über Wiesen!"], 300, ())
    path = model_directory(tmp_path, source, target)
    report = export_model(path, "argos", tmp_path / "out", verify=text, quantization="float32")
    assert report["verification"]["different"] == 0
    installed = unpacked(tmp_path / "out")
    assert (installed / "model" / "target_vocabulary.json").is_file()
    theirs = translated(installed, SENTENCES)
    assert theirs == served(path, text)
    used = {p for t in ArgosTranslator(tmp_path / "out").translate_stream(SENTENCES) for p in t.hypotheses[0].tokens}
    assert len(used - set(source.pieces(range(source.size)))) > 2


def test_tokens_that_are_not_text_are_never_written(tmp_path: Path) -> None:
    joint = trained_tokenizer(SENTENCES, 340, ["<bt>"])
    corpora = [{"source": "a", "target": "b"}, {"source": "c", "target": "d", "tag": "<bt>"}]
    packages = []
    for likely in (-1e4, 30.0):
        work = tmp_path / str(likely)
        (work / "out").mkdir(parents=True)
        path = model_directory(work, joint, joint, no_text=likely, data={"train": corpora})
        TARGETS["argos"].write(work / "out", ExportedModel.of(open_model(path)), None)
        packages.append((work / "out" / f"{NAME}.argosmodel").read_bytes())
    assert packages[0] == packages[1]
    theirs = translated(unpacked(work / "out"), SENTENCES)
    assert len(set(theirs)) > 5
    assert not re.search("<(pad|s|bt)>", "".join(theirs))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"embedding": {"positions": "sinusoidal"}},
        {"encoder": {"attention": "relative"}, "embedding": {"positions": "none"}},
    ],
)
def test_no_sentence_is_too_long(choices: dict[str, Any], tmp_path: Path) -> None:
    joint = trained_tokenizer(SENTENCES, 340, ())
    path = model_directory(tmp_path, joint, joint, choices, decoding={"max_source_pieces": 30})
    (tmp_path / "out").mkdir()
    TARGETS["argos"].write(tmp_path / "out", ExportedModel.of(open_model(path)), None)
    # Argos Translate keeps CTranslate2's limits: 1,024 pieces of the source, 256 of the translation.
    installed = unpacked(tmp_path / "out")
    long = "little house, " * 600
    model = sentencepiece.SentencePieceProcessor(model_file=str(installed / "sentencepiece.model"))
    assert len(model.encode(long)) > 1100
    assert translated(installed, [long])[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"unicode": "nfkc"}, r"`data\.unicode: nfkc`"),
        ({"subword": {"kind": "vocabulary", "source_vocabulary": "v"}}, r"`data\.subword\.kind: vocabulary`"),
        ({"train": [{"source": "a", "target": "b", "tag": ">>fra<<"}]}, "every corpus of `data.train` has a `tag`"),
    ],
)
def test_text_that_argos_cannot_prepare_is_refused_before_training(data: dict[str, Any], reason: str) -> None:
    both = {"source_language": "de", "target_language": "en", "store": "none"}
    model = {"encoder": {"history": "dlcl"}}
    reasons = TARGETS["argos"].reasons(Experiment.model_validate({"data": {**both, **data}, "model": model}))
    assert len(reasons) == 2  # all reasons at once, those of CTranslate2 first
    assert re.search(reason, reasons[1])
    assert TARGETS["argos"].reasons(Experiment.model_validate({"data": both})) == []


def test_vocabularies_that_do_not_fit_are_refused(text: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    tagged = trained_tokenizer(SENTENCES, 340, [">>fra<<"])  # as in an imported model, whose corpus is not known
    with pytest.raises(ExportError, match=r"begin with a tag \(>>fra<<\)"):
        export_model(model_directory(tmp_path / "a", tagged, tagged), "argos", tmp_path / "out", verify=text)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3), model_writer=model, vocab_size=60, model_type="bpe", minloglevel=2
    )
    without_bytes, with_bytes = SentencePieceTokenizer(model.getvalue()), trained_tokenizer(SENTENCES, 340, ())
    with pytest.raises(ExportError, match="the target's vocabulary spells characters in bytes"):
        export_model(model_directory(tmp_path / "b", without_bytes, with_bytes), "argos", tmp_path / "out", verify=text)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "text"]


@pytest.mark.slow
def test_a_user_names_the_package_and_adds_a_splitter(
    path: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splitter = tmp_path / "any"
    (splitter / "de").mkdir(parents=True)
    (splitter / "resources.json").write_text("{}")
    (splitter / "de" / "tokenize.pt").write_bytes(b"weights")
    options = ["--metadata", "package_version=1.2", "--metadata", "to_code=pb", "--metadata", "license=CC BY 4.0"]
    options += ["--splitter", str(splitter), "--verify", str(text)]
    with pytest.raises(SystemExit) as stop:
        main(["export", str(path), "--to", "argos", "--out", str(tmp_path / "out"), *options])
    assert not stop.value.code
    package = tmp_path / "out" / "translate-de_pb-1_2.argosmodel"
    assert f"the package to install: {package}\n" in capsys.readouterr().out
    installed = unpacked(tmp_path / "out")
    found = json.loads((installed / "metadata.json").read_text())
    assert found | {"package_version": "1.2", "to_code": "pb", "to_name": "pb", "license": "CC BY 4.0"} == found
    assert (installed / "stanza" / "de" / "tokenize.pt").read_bytes() == b"weights"
    assert "- Licence: CC BY 4.0." in (installed / "README.md").read_text()
    again = json.loads((tmp_path / "out" / "checksums.json").read_text())["again"]
    assert (
        f"--metadata package_version=1.2 --metadata to_code=pb --metadata 'license=CC BY 4.0' --splitter {splitter}"
        in again
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("from_code", "give KEY=VALUE; the keys are package_version, from_code"),
        ("argos_version=2", "give KEY=VALUE"),
        ("from_name= ", "one line of text"),
        ("license=a\nb", r"license=a\\nb`: give one line"),
        ("to_code=../x", "not a code that Argos Translate could use"),
        ("package_version=new", "a version such as 1.0"),
    ],
)
def test_invalid_metadata_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        package_choices([given], None)


def test_a_folder_that_is_not_a_splitter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--splitter .*none`: give a folder"):
        package_choices([], tmp_path / "none")
    (tmp_path / "m.onnx").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="gone: is a link to a file that does not exist"):
        package_choices([], tmp_path)
    (tmp_path / "gone").unlink()
    os.mkfifo(tmp_path / "gone")
    with pytest.raises(DataError, match="gone: is a pipe"):
        package_choices([], tmp_path)


def test_other_targets_take_no_metadata_and_a_damaged_package_is_noticed(
    path: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"for packages \(`--to argos`\), not for `--to plain`"):
        export_model(path, "plain", tmp_path / "out", package=PackageChoices({"license": "MIT"}))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"holds 0 \.argosmodel files"):
        ArgosTranslator(tmp_path / "out")
    (tmp_path / "out" / "a.argosmodel").write_bytes(b"PK\3\4" * 30)
    with pytest.raises(CheckpointError, match=r"a\.argosmodel: damaged"):
        ArgosTranslator(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("joint", [True, False])
def test_argos_translate_installs_packages_and_translates_alike(joint: bool, text: Path, tmp_path: Path) -> None:
    python = os.environ.get("ZIGGURAT_ARGOS")
    if not python:
        pytest.skip("$ZIGGURAT_ARGOS is not set to the Python of an environment of experiments/argos/README.md")
    lines = [*SENTENCES, "Spare  blanks\tand others. ", *(source for source, _ in generate(120, seed=3))]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    source = trained_tokenizer(SENTENCES, 340, ())
    target = source if joint else trained_tokenizer(["Ein kleines Haus am Fluß.", "Hunde laufen über Wiesen!"], 300, ())
    path = model_directory(tmp_path, source, target)
    export_model(path, "argos", tmp_path / "out", verify=text, quantization="float32")
    (package,) = (tmp_path / "out").glob("*.argosmodel")
    subprocess.run([python, THEIRS, package, tmp_path / "lines", tmp_path / "answer"], check=True)
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["installed"] == "German -> English"
    assert set(answer["versions"]) > {"ctranslate2"}
    assert answer["readme"].startswith("# German to English (de to en)")
    ours = served(path, text, lines)
    assert len(set(ours)) > 50
    assert answer["translations"] == [line.replace("_", " ") for line in ours]
