"""Export to a package for Argos Translate, which LibreTranslate and other programs built on it install.

NAME.argosmodel, a zip, holds metadata.json, README.md, sentencepiece.model (which segments the source and joins the
target), model/ (a directory for CTranslate2) and optionally minisbd/, stanza/ or spacy/, which split text into
sentences.

Argos Translate passes every sentence unchanged to SentencePiece, searches without a list of forbidden tokens, and reads
at most 1,024 pieces. Whatever else ziggurat's translator does is therefore written into the files: removal of spare
spaces goes into the SentencePiece model, forbidden tokens into the output's bias, and position tables are made long
enough.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from ziggurat import __version__
from ziggurat.config import DataConfig, Experiment
from ziggurat.config.languages import language_name, main_language
from ziggurat.config.load import change_section
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.exchange.anatomy import Affine, Anatomy, StackMatrices
from ziggurat.exchange.ctranslate2 import write_ctranslate2
from ziggurat.exchange.huggingface import trimming
from ziggurat.exchange.plain import ExportedModel
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ExportError, printable
from ziggurat.system.files import check_folder
from ziggurat.system.small_files import check_name, check_regular
from ziggurat.translate.ctranslate2 import ctranslate2_module, found_of, hypothesis_of
from ziggurat.translate.results import Hypothesis, Translation, one_line

_ARGOS_VERSION = "1.10"
"""_ARGOS_VERSION is the first version that joins pieces by SentencePiece; earlier ones show bytes as `<0xC3>`."""

_KEYS = ("package_version", "from_code", "from_name", "to_code", "to_name", "license")
_CODE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}")
_LONGEST = 200

_SPLITTERS = (("minisbd", "*.onnx"), ("stanza", "resources.json"), ("spacy", "config.cfg"))
"""Folders of a package that Argos Translate looks for, in its order, and a file that identifies each."""


@dataclass(frozen=True)
class PackageChoices:
    """A user's choices for a package.

    Attributes:
        metadata: values of metadata.json that replace the defaults, by name (`_KEYS`).
        splitter: folder of a sentence splitter to include in the package; None: Argos Translate downloads one itself.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    splitter: Path | None = None

    def options(self) -> dict[str, object]:
        """Return the command-line options that express these choices, by name."""
        return {"metadata": [f"{key}={value}" for key, value in self.metadata.items()], "splitter": self.splitter}


def package_choices(metadata: Sequence[str], splitter: Path | None) -> PackageChoices:
    """Return the choices of a command line; `metadata` is KEY=VALUE. Raises ConfigError for an invalid value."""
    values: dict[str, str] = {}
    for given in metadata:
        key, equals, value = given.partition("=")
        shown = f"`--metadata {printable(given)}`"
        if not equals or key not in _KEYS:
            raise ConfigError(f"{shown}: give KEY=VALUE; the keys are {', '.join(_KEYS)}")
        if not value.strip() or len(value) > _LONGEST or not value.isprintable():
            raise ConfigError(f"{shown}: give one line of text, of at most {_LONGEST} characters")
        if key.endswith("_code"):
            _check_code(value, shown)
        if key == "package_version" and not _VERSION.fullmatch(value):
            raise ConfigError(f"{shown}: give a version such as 1.0")
        values[key] = value.strip()
    if splitter is not None:
        _splitter_files(splitter)
    return PackageChoices(values, splitter)


def _package_metadata(data: DataConfig, choices: PackageChoices) -> dict[str, str]:
    """Return the content of metadata.json. Raises ConfigError if Argos cannot use a language code."""
    found = {"package_version": "1.0", "argos_version": _ARGOS_VERSION}
    for side, language in (("from", data.source_language), ("to", data.target_language)):
        code = choices.metadata.get(f"{side}_code") or main_language(language)
        _check_code(code, f"the language {printable(language)!r} of the model")
        found |= {f"{side}_code": code, f"{side}_name": language_name(code)}
    return found | dict(choices.metadata)


def _check_code(code: str, where: str) -> None:
    if not _CODE.fullmatch(code):
        raise ConfigError(
            f"{where}: not a code that Argos Translate could use; give one such as de with `--metadata from_code=...` "
            "or `to_code=...`"
        )


def _splitter_files(folder: Path) -> dict[str, bytes | Path]:
    """Return the files of a sentence splitter by their path in the package.

    Raises ConfigError if the folder is not a splitter's or contains a name that is not UTF-8, DataError if a file
    cannot be read.
    """
    names = [name for name, known_by in _SPLITTERS if folder.is_dir() and any(folder.glob(known_by))]
    if not names:
        raise ConfigError(
            f"`--splitter {folder}`: give a folder with a model of MiniSBD (*.onnx), the resources of Stanza "
            "(resources.json next to the language's folder) or a pipeline of spaCy (config.cfg)"
        )
    found: dict[str, bytes | Path] = {}
    for place, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(place, file)
            check_name(path)
            try:
                check_regular(path)
            except FileNotFoundError:
                raise DataError(f"{path}: is a link to a file that does not exist") from None
            found[f"{names[0]}/{path.relative_to(folder).as_posix()}"] = path
    return found


_POSITIONS = 1026
"""_POSITIONS is the number needed there: CTranslate2's 1,024 pieces of a source, end-of-sentence, and one more."""
_NEVER = -1e4
"""_NEVER is the bias of tokens that are not text; fp16 can hold it."""


def argos_reasons(experiment: Experiment) -> Iterator[str]:
    """Yield the reasons why Argos Translate cannot prepare text as this configuration does, apart from the model."""
    data = experiment.data
    if data.subword.kind == "vocabulary":
        yield "`data.subword.kind: vocabulary`: Argos Translate segments text with a SentencePiece model"
    if data.unicode != "none":
        yield f"`data.unicode: {data.unicode}`: Argos Translate does not normalise text (train with `unicode: none`)"
    if data.train and all(corpus.tag for corpus in data.train):
        yield (
            "every corpus of `data.train` has a `tag`: Argos Translate puts none before a sentence, and the model "
            "was never trained without one"
        )


def write_argos(
    folder: Path, model: ExportedModel, quantization: str | None, choices: PackageChoices | None = None
) -> None:
    """Write the package into `folder`, as its only file.

    Args:
        folder: an existing folder.
        model: the model.
        quantization: type of the matrices; None: fp32.
        choices: the user's choices for the package.

    Raises ExportError if its vocabularies do not fit, ConfigError if ctranslate2 is not installed or Argos Translate
    could not use a language code, DataError if the splitter's folder cannot be read.
    """
    choices = choices or PackageChoices()
    metadata = _package_metadata(model.experiment.data, choices)
    vocabulary = _sentencepiece_model(model)
    name = "translate-{from_code}_{to_code}-{package_version}".format(**metadata).replace(".", "_")
    content: dict[str, bytes | Path] = {
        # ASCII: Argos Translate opens the file in the encoding of the user's system.
        "metadata.json": json.dumps(metadata, indent=2).encode() + b"\n",
        "README.md": _readme(model, metadata, quantization).encode(),
        "sentencepiece.model": vocabulary,
    }
    if choices.splitter is not None:
        content |= _splitter_files(choices.splitter)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model.") as unpacked:
        unknown = model.experiment.decoding.writes_unknown
        anatomy = _for_any_search(_roomy(model).anatomy(), model.target, unknown=unknown)
        write_ctranslate2(Path(unpacked), anatomy, (model.source, model.target), _POSITIONS, quantization)
        content |= {f"model/{file.name}": file for file in sorted(Path(unpacked).iterdir())}
        _pack(folder / f"{name}.argosmodel", name, content)


def _sentencepiece_model(model: ExportedModel) -> bytes:
    """Return the model that segments the source and joins pieces of the target. Raises ExportError if there is none.

    Argos Translate uses one model for both. It may be the source's alone: SentencePiece outputs unknown pieces
    unchanged, including their space symbols, which Argos Translate turns into spaces. Only byte pieces must be known.
    """
    source, target = model.source, model.target
    if not isinstance(source, SentencePieceTokenizer) or not isinstance(target, SentencePieceTokenizer):
        raise ExportError("the tokenizer is a plain vocabulary, but Argos Translate needs a SentencePiece model")
    if source.tags and all(corpus.tag for corpus in model.experiment.data.train):
        raise ExportError(
            f"sentences for this model begin with a tag ({printable(', '.join(source.tags))}), and Argos Translate "
            "puts none before them"
        )
    if _bytes_of(target.model) - _bytes_of(source.model):
        raise ExportError(
            "the target's vocabulary spells characters in bytes and the source's does not, but Argos Translate joins "
            "the target's pieces by the source's SentencePiece model (train with `data.subword.joint: true`)"
        )
    return _normalising(source.model)


def _bytes_of(model: bytes) -> set[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(number) for number in range(len(processor)) if processor.is_byte(number)}


def _normalising(model: bytes) -> bytes:
    """Return a SentencePiece model that treats spaces as ziggurat.data.lines.normalise does."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(trimming(model))  # type: ignore[attr-defined]
    if not proto.normalizer_spec.precompiled_charsmap:  # other toolkits' models have one, which also maps spaces
        proto.normalizer_spec.precompiled_charsmap = _blanks()
    return bytes(proto.SerializeToString())


@cache
def _blanks() -> bytes:
    """Return compiled SentencePiece rules that map tabs, line ends and its own space symbol to spaces."""
    from io import BytesIO

    from sentencepiece import sentencepiece_model_pb2

    written = BytesIO()
    # In all versions SentencePiece's trainer can compile rules from a file, and nothing else can; its text does not
    # matter.
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write("".join(f"{code:X}\t20\n" for code in map(ord, "\t\n\r\u2581")))
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b"]),
            model_writer=written,
            model_type="char",
            vocab_size=6,
            hard_vocab_limit=False,
            normalization_rule_tsv=rules.name,
            minloglevel=2,
        )
    proto = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())  # type: ignore[attr-defined]
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def _roomy(model: ExportedModel) -> ExportedModel:
    """Return the model with computed position tables that are long enough."""
    decoding = model.experiment.decoding
    longest = {"max_source_pieces": max(decoding.max_source_pieces, _POSITIONS)}
    roomy = model.experiment.model_copy(update={"decoding": change_section(decoding, longest, "decoding")})
    return dataclasses.replace(model, experiment=roomy)


def _for_any_search(anatomy: Anatomy, target: Tokenizer, *, unknown: bool) -> Anatomy:
    """Return the model with learned position tables that are long enough, and without tokens that are not text.

    `unknown`: the model may write unknown tokens.
    """
    weight, bias = anatomy.output.weight, anatomy.output.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
    never = {target.pad, target.bos, *target.tags.values()} | (set() if unknown else {target.unk})
    bias[sorted(never - {target.eos})] = _NEVER
    bias[target.size :] = _NEVER
    return dataclasses.replace(
        anatomy,
        encoder=_lengthened(anatomy.encoder),
        decoder=_lengthened(anatomy.decoder),
        output=Affine(weight, bias),
    )


def _lengthened(stack: StackMatrices) -> StackMatrices:
    """Return a stack whose last position is repeated: CTranslate2 refuses sentences longer than the table."""
    if stack.positions is None or len(stack.positions) >= _POSITIONS:
        return stack
    more = stack.positions[-1:].expand(_POSITIONS - len(stack.positions), -1)
    return dataclasses.replace(stack, positions=torch.cat([stack.positions, more]))


def _readme(model: ExportedModel, metadata: Mapping[str, str], quantization: str | None) -> str:
    data, config = model.experiment.data, model.experiment.model
    corpora = [printable(corpus.name, 200) for corpus in data.train if corpus.name]
    facts = [
        f"Version {metadata['package_version']}, for Argos Translate {metadata['argos_version']} and later.",
        f"A Transformer of {config.encoder.layers} + {config.decoder.layers} layers, width {config.d_model}, stored as "
        f"{quantization or 'float32'}; trained with Ziggurat, written by version {__version__}.",
        *([f"Training data: {', '.join(corpora)}."] if corpora else []),
        f"Licence: {metadata['license']}." if "license" in metadata else "Its publisher has stated no licence.",
    ]
    title = f"# {metadata['from_name']} to {metadata['to_name']} ({metadata['from_code']} to {metadata['to_code']})"
    return "\n".join([title, "", *(f"- {fact}" for fact in facts), ""])


def _pack(package: Path, name: str, content: Mapping[str, bytes | Path]) -> None:
    """Write a zip with the folder `name`; equal content gives equal bytes."""
    with zipfile.ZipFile(package, "x") as archive:
        for inside, given in content.items():
            entry = zipfile.ZipInfo(f"{name}/{inside}")  # dated 1980 unless a date is given
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            if isinstance(given, bytes):
                archive.writestr(entry, given)
                continue
            entry.file_size = given.stat().st_size  # decides whether the format for files over 2 GiB is used
            with given.open("rb") as source, archive.open(entry, "w") as file:
                shutil.copyfileobj(source, file, 1 << 20)


_SEARCH = {"beam_size": 4, "length_penalty": 0.2, "min_decoding_length": 1, "max_decoding_length": 256}
"""Argos Translate's settings, with CTranslate2's defaults where it has none."""
_BATCH_TOKENS = 4096


class ArgosTranslator:
    """Translator that uses a package alone: plain SentencePiece, then CTranslate2, as Argos Translate calls them.

    Three habits of Argos Translate are not imitated because they do not depend on the package: it splits lines into
    sentences, writes a space for every `_`, and copies a piece of the source for an unknown token.

    Args:
        path: folder with one .argosmodel, which is not unpacked to disk.

    Raises ConfigError if ctranslate2 is not installed, CheckpointError if the package is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        ctranslate2 = ctranslate2_module()
        check_folder(Path(path))
        packages = sorted(Path(path).glob("*.argosmodel"))
        if len(packages) != 1:
            raise CheckpointError(f"{path}: holds {len(packages)} .argosmodel files, not one; export the model again")
        try:
            with zipfile.ZipFile(packages[0]) as archive:
                files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
            inside = {name.removeprefix("model/"): file for name, file in files.items() if name.startswith("model/")}
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_proto=files["sentencepiece.model"])
            self._model = ctranslate2.Translator(str(packages[0]), device="cpu", files=inside)
            self._eos = json.loads(inside["config.json"])["eos_token"]
        except (OSError, KeyError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{packages[0]}: damaged ({error}); export the model again") from None

    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> list[Translation]:
        """Return one Translation per line, with Argos Translate's search or the settings in `decoding`.

        Only `beam_size`, `length_penalty.alpha`, `min_length` and `max_length.limit` of `decoding` are used.
        """
        search = dict(_SEARCH)
        if decoding:
            search = {
                "beam_size": decoding["beam_size"],
                "length_penalty": decoding["length_penalty"]["alpha"],
                "min_decoding_length": decoding["min_length"],
                "max_decoding_length": decoding["max_length"]["limit"] + 1,  # plus end-of-sentence
            }
        sources = self._tokenizer.encode(list(lines), out_type=str)
        wanted = [source for source in sources if source]
        results = iter(
            self._model.translate_batch(
                wanted,
                max_batch_size=_BATCH_TOKENS,
                batch_type="tokens",
                return_scores=True,
                return_end_token=True,
                **search,
            )
        )
        empty = Hypothesis("", 0.0, 0.0, [], [], True)
        return [
            Translation(line, [self._hypothesis(next(results), search["length_penalty"]) if source else empty])
            for line, source in zip(lines, sources, strict=True)
        ]

    def _hypothesis(self, result: Any, alpha: float) -> Hypothesis:
        ((found,),) = found_of([result], self._eos)
        # Argos Translate removes the one space that precedes a first piece outside the vocabulary.
        text = self._tokenizer.decode_pieces(found.pieces).replace("\u2581", " ").removeprefix(" ")
        return hypothesis_of(found, one_line(text), alpha, [], None)
