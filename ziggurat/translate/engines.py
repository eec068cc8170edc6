"""The choice between the two engines, and the folders that CTranslate2 runs: exports of this and other toolkits."""

from __future__ import annotations

import importlib.util
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from pydantic import Field, RootModel

from ziggurat.config import DecodingConfig, ModelConfig
from ziggurat.data.subword import MAX_MODEL_BYTES, SentencePieceTokenizer
from ziggurat.data.vocabulary import leading_tag
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, printable
from ziggurat.system.small_files import JsonForm, check_regular, inside, read_bounded, read_json
from ziggurat.system.staging import recover

Engine = Literal["auto", "torch"]
"""`auto` depends on the folder; `torch` is for tasks that only PyTorch can do, such as scoring given translations."""

EXPORT_FILE = "model.bin"
"""EXPORT_FILE is the file with the weights in a CTranslate2 directory."""
EXPORT_SHORTLIST = "vmap.txt"
"""EXPORT_SHORTLIST is a lexical shortlist in that directory, which `decoding.shortlist` names without a folder."""

_SUPPORTED = {
    *("beam_size", "n_best", "length_penalty", "max_length", "min_length", "batch_tokens", "max_source_pieces"),
    *("alignments", "shortlist", "unknown"),
}
_IGNORED = {"endings", "batch_sentences", "seed", "precision"}  # CTranslate2 does not need them to translate

NO_LINE_INPUTS = (
    "CTranslate2 takes no `--prefix`, `--constraints` or `--terminology`; use the model it was exported from"
)
"""NO_LINE_INPUTS is the message when an export is asked to translate with additional inputs per line."""

_EXPORT_SHORTLIST = "export the model with it: its `decoding.shortlist` is then written into the folder"

_EXPORT_INSIDE = "ctranslate2"
"""_EXPORT_INSIDE is the subfolder of a run or model directory that may hold its export."""


def is_export(path: str | Path) -> bool:
    """Return whether `path` is a CTranslate2 directory that `ziggurat export` wrote."""
    recover(path)
    return (Path(path) / EXPORT_FILE).is_file() and (Path(path) / "config.yaml").is_file()


def is_converted(path: str | Path) -> bool:
    """Return whether `path` is a CTranslate2 translation model written by another toolkit's converter."""
    folder = Path(path)
    if not (folder / EXPORT_FILE).is_file() or (folder / "config.yaml").is_file():
        return False
    return any(next(folder.glob(f"{name}_vocabulary.*"), None) for name in ("shared", "source", "source_1"))


def unsupported_keys(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which of these keys of the `decoding` section only ziggurat's search supports, as text for messages."""
    defaults, ours = DecodingConfig(), DecodingConfig.model_fields.keys() - _SUPPORTED - _IGNORED
    return {
        key: f"`decoding.{key}: {printable(str(value))}`"
        for key, value in settings.items()
        if key in ours and value != getattr(defaults, key)
    }


def unsupported_settings(decoding: DecodingConfig) -> list[str]:
    """Return the search settings that CTranslate2 does not support."""
    found = list(unsupported_keys(dict(decoding)).values())
    if decoding.endings in ("fairseq", "marian"):
        found.append(f"`decoding.endings: {decoding.endings}` (use `beam`)")
    if decoding.shortlist not in (None, EXPORT_SHORTLIST):
        found.append(f"`decoding.shortlist: {decoding.shortlist}` ({_EXPORT_SHORTLIST})")
    penalty = decoding.length_penalty
    if penalty.kind in ("gnmt", "lingvo") and (penalty.alpha or penalty.coverage):
        found.append(f"`decoding.length_penalty.kind: {penalty.kind}` (use `power`, or `alpha=0`)")
    if penalty.word_penalty:
        found.append(f"`decoding.length_penalty.word_penalty: {penalty.word_penalty}`")
    return found


def refuse_unsupported(asked: Mapping[str, Any], made: ExportReport | None) -> None:
    """Raise ConfigError if CTranslate2, or this export, does not support a requested setting.

    `made` is the export's report; None: another toolkit's folder, which has none. Called before these settings are
    merged with the saved ones, because a conflict with a saved one that the user never set would hide this reason.
    """
    if asked.get("shortlist") not in (None, EXPORT_SHORTLIST):
        raise ConfigError(f"CTranslate2 cannot read `decoding.shortlist: {asked['shortlist']}`; {_EXPORT_SHORTLIST}")
    if missing := ", ".join(unsupported_keys(asked).values()):
        raise ConfigError(f"CTranslate2 has no {missing}; translate with the model that was exported")
    if asked.get("endings") == "candidates":  # exports are written with `beam`, which matches its search
        raise ConfigError("CTranslate2 has no `decoding.endings: candidates` (use `beam`)")
    if made is None:
        for key in ("precision", "alignments"):
            if asked.get(key):
                raise ConfigError(f"`decoding.{key}` is not for a folder that another toolkit wrote; leave it out")
    elif (wanted := asked.get("precision")) not in (None, made.precision):
        raise ConfigError(
            f"`decoding.precision: {printable(str(wanted))}`: this export is {made.quantization or 'float32'}, as it "
            "was written; `ziggurat export --to ctranslate2 --quantization` makes one in another precision"
        )


def export_folder(
    engine: Engine,
    paths: Sequence[str],
    *,
    which: str | None = None,
    without_layers: str | None = None,
    converted: bool = False,
) -> Path | None:
    """Return the folder with which CTranslate2 should translate; None if PyTorch should.

    `auto` depends on the folder: CTranslate2 for an exported model, PyTorch for a run or model directory. If PyTorch is
    not installed, the export in the subfolder `ctranslate2` is used.

    `converted`: the folder may be another toolkit's. Raises ConfigError for an ensemble, a checkpoint or left-out
    layers with CTranslate2, and for an export if `engine` requires PyTorch.
    """
    foreign = [path for path in paths if is_converted(path)]
    if foreign and not converted:
        raise ConfigError(
            f"{foreign[0]}: another toolkit's folder for CTranslate2, which only `translate`, `evaluate` and "
            "`compare` read"
        )
    exported = [*foreign, *(path for path in paths if is_export(path))]
    inside = Path(paths[0]) / _EXPORT_INSIDE
    if engine == "torch" or not exported:
        if exported:
            raise ConfigError(
                f"{exported[0]}: exported for CTranslate2; PyTorch translates with the run it was made of"
            )
        if engine == "torch" or importlib.util.find_spec("torch") is not None or not is_export(inside):
            return None
    if len(paths) > 1 or which is not None or without_layers is not None:
        raise ConfigError(
            "CTranslate2 translates with one exported model, unchanged: leave out `--ensemble`, `--which` and "
            "`--without-layers` (which `ziggurat export` takes, too)"
        )
    return Path(exported[0]) if exported else inside


def positions_for(model: ModelConfig, decoding: DecodingConfig) -> int:
    """Return the positions of either side that this search needs, including begin- or end-of-sentence and a tag."""
    return model.embedding.limit or max(decoding.max_source_pieces, decoding.max_length.limit) + 2


class ExportReport(JsonForm):
    """The fields of an export's report that are read."""

    positions: int = Field(ge=1, le=1 << 31)
    """Number of positions of the model on either side."""
    weights: str = Field(max_length=100)
    """Fingerprint of the weights file from which it was made."""
    quantization: str | None = Field(max_length=100)

    @property
    def precision(self) -> str | None:
        """Name in `decoding.precision`; None: not one of ziggurat's precisions."""
        return {None: "float32", "int8": "int8", "int8_float32": "int8", "bfloat16": "bfloat16"}.get(self.quantization)


def read_report(folder: Path) -> ExportReport:
    """Return the report of an export. Raises CheckpointError if it is missing or damaged."""
    path, again = folder / "export.json", "export the model again"
    try:
        return read_json(path, ExportReport, error=CheckpointError, remedy=again)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {again}") from None


NO_LIMIT = 1 << 31
"""NO_LIMIT is the number of positions of a model that computes as many as it needs."""

_SEGMENTERS = {
    "source": ("source.spm", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"),
    "target": ("target.spm", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"),
}
"""_SEGMENTERS maps each side to possible file names of its SentencePiece model in a folder."""

_PADDING = ("<pad>", "<blank>")
_SOURCE_TAGS = (">>", "<2")  # prefixes of tags before a source that name the target language

_TABLE = b"/position_encodings/encodings"  # of encoder or decoder; equal ones are stored once
_TABLE_SINCE = 4  # binary format version from which a variable has the header that is read here


class ConvertedConfig(JsonForm):
    """The part of config.json that a caller of CTranslate2 needs; the rest is for CTranslate2 itself."""

    unk_token: str = "<unk>"
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    decoder_start_token: str | None = "<s>"
    add_source_bos: bool = False
    add_source_eos: bool = False

    @property
    def of_transformers(self) -> bool:
        """True if the caller appends end-of-sentence to each source.

        Tokenizers of transformers do so; their models start from end-of-sentence or padding. With Marian, fairseq and
        ziggurat's exports, CTranslate2 does it. OpenNMT's models start from begin-of-sentence and need none.
        """
        return self.decoder_start_token in (self.eos_token, *_PADDING) and not self.add_source_eos


_MOST_UNLISTED = 0.2
"""_MOST_UNLISTED is the largest share of a segmenter's pieces that the vocabulary may lack (ziggurat.exchange.agreement
explains why some are missing)."""
_MANY_UNUSED, _MOST_UNUSED = 0.05, 0.2
"""Shares of the vocabulary's tokens never produced by the segmenters that lead to a warning and to an error."""
_RESERVED = re.compile(r"madeupword\d+|<.*>|\[\w+\]|\u2581?.", re.DOTALL)  # and single characters, perhaps rare in text


class ConvertedTokenizer(SentencePieceTokenizer):
    """A SentencePiece model whose pieces get their ids from a list of tokens, the order of the matrices' rows.

    Tokens that the model never produces from text, such as names of languages, are tags.

    Args:
        model: the serialised model.
        listed: the tokens in order of their ids.
        config: spellings of the control symbols.

    Raises DataError for an invalid model, ConfigError for a list without the unknown token, end-of-sentence or many of
    the pieces.
    """

    def __init__(self, model: bytes, listed: Sequence[str], config: ConvertedConfig) -> None:
        super().__init__(model)
        segmented = super().pieces(range(self._model_size))
        self._listed = list(listed)
        self._numbers = {token: number for number, token in enumerate(listed)}
        for name in (config.unk_token, config.eos_token):
            if name not in self._numbers:
                raise ConfigError(f"has no {printable(name)}, which config.json names")
        self.lacking = [
            piece
            for number, piece in enumerate(segmented)
            if piece not in self._numbers and not self._processor.is_control(number)
        ]
        """Pieces of the model that the list lacks, which are read as the unknown token."""
        if len(self.lacking) > _MOST_UNLISTED * len(segmented):
            raise ConfigError(
                f"lacks {self.lacking_pieces()}: it belongs to another model; name the right one with `--source-model` "
                "or `--target-model`"
            )
        self.unk, self.eos = self._numbers[config.unk_token], self._numbers[config.eos_token]
        self.bos = self._numbers.get(config.bos_token, self.unk)
        self.pad = next((self._numbers[name] for name in _PADDING if name in self._numbers), self.unk)
        others = self._numbers.keys() - set(segmented)
        self.tags = {
            token: number
            for token, number in self._numbers.items()
            if token in others and leading_tag(f"{token} ") == token
        }
        self._silent = frozenset((self.pad, self.bos, self.eos, *self.tags.values())) - {self.unk}
        self.size = len(self._listed)

    def lacking_pieces(self) -> str:
        """Return a description of how many pieces the list lacks, with examples, for a message."""
        return (
            f"{len(self.lacking):,} of the {self._model_size:,} pieces of its SentencePiece model, such as "
            f"{printable(' '.join(self.lacking[:5]), 80)}"
        )

    def segmented(self) -> set[str]:
        """Return the pieces of the model into which text can be segmented."""
        return set(SentencePieceTokenizer.pieces(self, range(self._model_size)))

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Segment texts that are already normalised; pieces that the list lacks become the unknown token."""
        get, unk = self._numbers.get, self.unk
        segmented = super().encode_normalised(texts, threads)
        return [[get(piece, unk) for piece in SentencePieceTokenizer.pieces(self, ids)] for ids in segmented]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text on one line, without control symbols and tags; an unknown piece is shown as ` ⁇ `."""
        shown = [self._listed[number] for number in ids if number not in self._silent]
        return str(self._processor.decode(shown)).replace("\n", " ").replace("\r", " ") if shown else ""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the token of each id."""
        return [self._listed[number] for number in ids]


class _Tokens(RootModel[list[str]]):
    """Tokens in order of their ids."""


class ConvertedFolder(NamedTuple):
    """The part of another toolkit's folder that its caller needs.

    Attributes:
        source, target: its tokenizers.
        after_source: tokens that the caller appends to each source.
        positions: maximum number of positions of a source or target.
    """

    source: ConvertedTokenizer
    target: ConvertedTokenizer
    after_source: tuple[str, ...]
    positions: int


def read_converted(folder: Path, segmenters: Sequence[Path | None] = (None, None)) -> ConvertedFolder:
    """Read a folder that another toolkit's converter wrote.

    Args:
        folder: a folder of which `ziggurat.translate.engines.is_converted` is True.
        segmenters: SentencePiece models of source and target; None: that of the folder; a single given model is used
            for both sides if the folder has none for the other.

    Raises ConfigError: a segmenter is missing, or the model needs tokens that this package does not supply. DataError,
    CheckpointError: files that are missing or damaged.
    """
    try:
        config = read_json(inside(folder, "config.json"), ConvertedConfig, error=CheckpointError)
    except FileNotFoundError:  # converted before CTranslate2 3.0: model.bin itself specifies the added tokens
        config = ConvertedConfig()
    if config.decoder_start_token is None:
        raise ConfigError(
            f"{folder}: its `decoder_start_token` is null: each translation begins with a token from the caller, "
            "for example a language code, which is not supported here; CTranslate2 itself takes it as `target_prefix`"
        )
    tokenizers = []
    for side, given, other in zip(("source", "target"), segmenters, reversed(segmenters), strict=True):
        listed = _vocabulary(folder, side)
        model = _segmenter(folder, side, given, other)
        try:
            tokenizers.append(ConvertedTokenizer(model[1], listed, config))
        except ConfigError as error:
            raise CheckpointError(f"{folder}: the vocabulary of the {side} {error}") from None
        except DataError as error:
            raise DataError(f"{model[0]}: {error}") from None
    source, target = tokenizers
    _warn_of_segmenters(folder, source, target)
    if config.of_transformers and sum(not tag.startswith(_SOURCE_TAGS) for tag in target.tags) > 1:
        raise ConfigError(
            f"{folder}: a multilingual model in the style of transformers ({printable(', '.join(target.tags), 80)}): "
            "it expects the source's code before the text and the target's as the first token of the translation, "
            "which is not supported here; CTranslate2 itself takes them (`target_prefix`)"
        )
    after = (config.eos_token,) if config.of_transformers else ()
    return ConvertedFolder(source, target, after, _positions(folder / EXPORT_FILE) - config.add_source_bos)


def _warn_of_segmenters(folder: Path, source: ConvertedTokenizer, target: ConvertedTokenizer) -> None:
    """Warn if vocabulary and segmenter of a side do not agree; sides with one vocabulary may have two segmenters.

    Raises CheckpointError if they belong to different models.
    """
    listed = [tokenizer.pieces(range(tokenizer.size)) for tokenizer in (source, target)]
    given = [tokenizer.segmented() for tokenizer in (source, target)]
    said = []
    for side, tokenizer, tokens, own in zip(("source", "target"), (source, target), listed, given, strict=True):
        if tokenizer.lacking:
            said.append(f"the vocabulary of the {side} lacks {tokenizer.lacking_pieces()}, which are read as unknown")
        known = given[0] | given[1] if listed[0] == listed[1] else own
        counted = [token for token in tokens if not _RESERVED.fullmatch(token) and token not in tokenizer.tags]
        unused = [token for token in counted if token not in known]
        if len(unused) > _MANY_UNUSED * len(counted):
            said.append(
                f"the SentencePiece model of the {side} never gives {len(unused):,} of the {len(counted):,} tokens of "
                f"the vocabulary, such as {printable(' '.join(unused[:5]), 80)}: it seems to belong to another model"
            )
        if len(unused) > _MOST_UNUSED * len(counted):
            raise CheckpointError(f"{folder}: {said[-1]}; name the right one with `--source-model` or `--target-model`")
    if said:
        warnings.warn(f"{folder}: {'; '.join(said)}", UserWarning, stacklevel=3)


def _vocabulary(folder: Path, side: str) -> list[str]:
    """Return the tokens of a side. Raises CheckpointError if there is no list of them, or several."""
    if next(folder.glob("source_1_vocabulary.*"), None) is not None:
        raise CheckpointError(f"{folder}: its sources have features besides words, which are not supported here")
    for name in (f"{side}_vocabulary", "shared_vocabulary"):
        path = inside(folder, f"{name}.json")
        if path.exists():
            return read_json(path, _Tokens, error=CheckpointError).root
        path = inside(folder, f"{name}.txt")
        if path.exists():
            try:
                text = read_bounded(path, MAX_MODEL_BYTES, error=CheckpointError).decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: not valid UTF-8 (byte {error.start}, from 0)") from None
            return text.removesuffix("\n").split("\n")
    raise CheckpointError(f"{folder}: has neither {side}_vocabulary nor shared_vocabulary, as .json or .txt")


def _segmenter(folder: Path, side: str, given: Path | None, other: Path | None) -> tuple[Path, bytes]:
    there = [folder / name for name in _SEGMENTERS[side] if (folder / name).is_file()]
    path = given or next(iter(there), None) or other
    if path is None:
        raise ConfigError(
            f"{folder}: a CTranslate2 folder without a SentencePiece model ({', '.join(_SEGMENTERS[side])}); name "
            "it with `--source-model`, and that of the target with `--target-model` if it differs. A model of text "
            "that is segmented in another way is for CTranslate2 itself"
        )
    try:
        return path, read_bounded(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None


def _positions(path: Path) -> int:
    """Return the number of rows of the position table in a model.bin; NO_LIMIT if it has none.

    CTranslate2 fails at a position beyond the table. Raises CheckpointError for a damaged file.
    """
    size = check_regular(path, error=CheckpointError)
    try:
        with path.open("rb") as file:
            (version,) = struct.unpack("<I", file.read(4))
            _text(file)
            _, count = struct.unpack("<II", file.read(8))
            for _ in range(count if version >= _TABLE_SINCE else 0):
                name = _text(file)
                shape = struct.unpack(f"<{(axes := file.read(1)[0])}I", file.read(4 * axes))
                _, length = struct.unpack("<BI", file.read(5))
                if name.endswith(_TABLE) and shape:
                    return int(shape[0])
                if file.seek(length, 1) > size:
                    break
    except (struct.error, IndexError):
        raise CheckpointError(f"{path}: damaged, or not written by a converter of CTranslate2") from None
    return NO_LIMIT


def _text(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<H", file.read(2))
    return file.read(length).removesuffix(b"\0")
