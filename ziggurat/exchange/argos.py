"""Export to a package for Argos Translate, which LibreTranslate and other programs on top of it install.

NAME.argosmodel, a zip, holds the folder NAME:

metadata.json         version of the package, codes and names of the languages, licence
README.md             the same for people
sentencepiece.model   segments the source, and joins the target
model/                directory of CTranslate2
minisbd/, stanza/ or spacy/   optional: splits text into sentences

Argos Translate gives every sentence to SentencePiece as it stands, searches without a list of tokens that must not come
out, and reads at most 1,024 pieces. What our translator does besides is therefore written into the files: removal of
spare blanks into the SentencePiece model, forbidden tokens into the output's bias, and tables of positions are long
enough for every sentence.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import sentencepiece
import torch

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.exchange.anatomy import Affine, Anatomy, StackMatrices
from ziggurat.exchange.ctranslate2 import write_ctranslate2
from ziggurat.exchange.package import PackageChoices, package_metadata, splitter_files
from ziggurat.exchange.plain import ExportedModel
from ziggurat.system.errors import ExportError, printable

_POSITIONS = 1026
"""Positions that Argos Translate may ask for: CTranslate2's 1,024 pieces of a source, end-of-sentence, and one more."""
_NEVER = -1e4
"""Bias of tokens that are no text; fp16 can hold it."""


def argos_reasons(experiment: Experiment) -> Iterator[str]:
    """Yield the reasons why Argos Translate cannot prepare text as this configuration does; the model aside."""
    data = experiment.data
    if data.subword.kind == "vocabulary":
        yield "`data.subword.kind: vocabulary`: Argos Translate segments text by a SentencePiece model"
    if data.unicode != "none":
        yield f"`data.unicode: {data.unicode}`: Argos Translate does not normalise text (train with `unicode: none`)"
    if data.train and all(corpus.tag for corpus in data.train):
        yield (
            "every corpus of `data.train` has a `tag`: Argos Translate puts none before a sentence, and no corpus has "
            "taught the model what to do then"
        )


def write_argos(
    folder: Path, model: ExportedModel, quantization: str | None, choices: PackageChoices | None = None
) -> None:
    """Write the package into `folder`, as its only file.

    Args:
        folder: an existing folder.
        model: the model.
        quantization: type of the matrices; None: fp32.
        choices: what the user says of the package.

    Raises ExportError: its vocabularies do not fit. ConfigError: ctranslate2 is not installed, or a language's code is
    none that Argos Translate could use. DataError: the folder of the splitter cannot be read.
    """
    choices = choices or PackageChoices()
    metadata = package_metadata(model.experiment.data, choices)
    vocabulary = _sentencepiece_model(model)
    name = "translate-{from_code}_{to_code}-{package_version}".format(**metadata).replace(".", "_")
    content: dict[str, bytes | Path] = {
        # ASCII: Argos Translate opens the file in the encoding of the user's system.
        "metadata.json": json.dumps(metadata, indent=2).encode() + b"\n",
        "README.md": _readme(model, metadata, quantization).encode(),
        "sentencepiece.model": vocabulary,
    }
    if choices.splitter is not None:
        content |= splitter_files(choices.splitter)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model.") as unpacked:
        anatomy = _for_any_search(_roomy(model).anatomy(), model.target)
        write_ctranslate2(Path(unpacked), anatomy, (model.source, model.target), _POSITIONS, quantization)
        content |= {f"model/{file.name}": file for file in sorted(Path(unpacked).iterdir())}
        _pack(folder / f"{name}.argosmodel", name, content)


def _sentencepiece_model(model: ExportedModel) -> bytes:
    """Return the model that segments the source and joins pieces of the target. Raises ExportError: there is none.

    Argos Translate has one for both. It may be the source's alone: SentencePiece gives pieces that it does not know as
    they are, blank marks included, which Argos Translate turns into blanks. Only bytes must be known.
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
    """Return the pieces of a SentencePiece model that are single bytes."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {processor.id_to_piece(number) for number in range(len(processor)) if processor.is_byte(number)}


def _normalising(model: bytes) -> bytes:
    """Return a SentencePiece model that treats blanks as ziggurat.data.lines.normalise does before ours."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.remove_extra_whitespaces = True
    if not proto.normalizer_spec.precompiled_charsmap:  # models of others have theirs, which maps blanks, too
        proto.normalizer_spec.precompiled_charsmap = _blanks()
    return bytes(proto.SerializeToString())


@cache
def _blanks() -> bytes:
    """Return SentencePiece's compiled form of the rules that tab, line ends and its own sign for a blank are blanks."""
    from io import BytesIO

    from sentencepiece import sentencepiece_model_pb2

    written = BytesIO()
    # Only its trainer compiles rules in all versions, from a file; what it is trained on does not matter.
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
    """Return the model with computed tables of positions that are long enough."""
    decoding = model.experiment.decoding
    longest = {"max_source_pieces": max(decoding.max_source_pieces, _POSITIONS)}
    roomy = model.experiment.model_copy(update={"decoding": change_section(decoding, longest, "decoding")})
    return dataclasses.replace(model, experiment=roomy)


def _for_any_search(anatomy: Anatomy, target: Tokenizer) -> Anatomy:
    """Return the model with learned tables of positions that are long enough, and without tokens that are no text."""
    weight, bias = anatomy.output.weight, anatomy.output.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
    bias[sorted({target.pad, target.bos, *target.tags.values()} - {target.eos})] = _NEVER
    bias[target.size :] = _NEVER
    return dataclasses.replace(
        anatomy, encoder=_lengthened(anatomy.encoder), decoder=_lengthened(anatomy.decoder), output=Affine(weight, bias)
    )


def _lengthened(stack: StackMatrices) -> StackMatrices:
    """Return a stack whose last position repeats: CTranslate2 refuses sentences beyond the end of a table."""
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
    """Write a zip with the folder `name`; the same content gives the same bytes."""
    with zipfile.ZipFile(package, "x") as archive:
        for inside, given in content.items():
            entry = zipfile.ZipInfo(f"{name}/{inside}")  # dated 1980, where no date is given
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            if isinstance(given, bytes):
                archive.writestr(entry, given)
                continue
            entry.file_size = given.stat().st_size  # decides on the form for files beyond 2 GiB
            with given.open("rb") as source, archive.open(entry, "w") as file:
                shutil.copyfileobj(source, file, 1 << 20)
