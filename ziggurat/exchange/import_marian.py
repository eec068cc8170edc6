"""Reader of plain Transformers of Marian, as OPUS-MT and others publish them beside what transformers reads.

Names and formulas are those of Marian's src/models/transformer.h (version 1.12): matrices are stored [in, out], biases
and norms [1, D]; the decoder's first input is a zero vector; embeddings are multiplied by sqrt(D) where positions are
added; norms have an epsilon of 1e-6. Marian has no padding in its vocabularies: here a row of zeros behind all others
stands for it, and for the first input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from pydantic import Field
from torch import Tensor

from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer, listing
from ziggurat.exchange.agreement import language_tokens
from ziggurat.exchange.anatomy import (
    Affine,
    Anatomy,
    AttentionMatrices,
    LayerMatrices,
    StackMatrices,
    one_of,
    width_of,
)
from ziggurat.exchange.imported import ControlIds, ForeignModel, positions_from, read_segmenter, with_vocabularies
from ziggurat.exchange.marian_files import Array, find_files, read_ids, read_weights
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.small_files import JsonForm, shaped

_EPSILON = 1e-6
POSITIONS = 1024
"""Rows of the table of positions: Marian computes as many as it needs, and reads at most 1,000 tokens by default."""

_ACTIVATIONS = {"relu": "relu", "swish": "silu"}

_PLAIN: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "right-left": (False,),
    "input-types": ([], ["sequence", "sequence"]),
    "transformer-no-projection": (False,),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-postprocess-emb": ("", "d"),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-tied-layers": ([],),
    "transformer-train-position-embeddings": (False,),
    "transformer-attention-mask": ("default",),
    "transformer-pool": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "ulr": (False,),
    "lemma-dim-emb": (0,),
}
"""Options with the values of a plain Transformer; an option that is not there has the first."""

_ORDERS = {("", "an", ""): False, ("n", "a", "n"): True}
"""Operations before, after and on top of sub-layers, dropout left out -> pre-norm."""


class _Options(JsonForm):
    """The options that are needed."""

    enc_depth: int = Field(ge=1, le=4096)
    dec_depth: int = Field(ge=1, le=4096)
    transformer_heads: int = Field(ge=1, le=1 << 20)
    transformer_ffn_activation: str
    transformer_disable_position_embeddings: bool = False


def _marian_anatomy(arrays: Mapping[str, Array], given: Mapping[str, Any], path: Path) -> Anatomy:
    """Return the matrices of the model in the file `path`, each vocabulary with one row more, for padding.

    Raises ExportError with all reasons why the options are not those of a plain Transformer, or for arrays that are
    missing, unknown or quantised; DataError for options that are missing or wrong.
    """
    given = {key: value for key, value in given.items() if value is not None}  # Marian writes `~` for what it never set
    if reasons := _reasons(given):
        raise ExportError(f"{path}: not a plain Transformer that can be imported: {'; '.join(reasons)}")
    named = {key.replace("-", "_"): value for key, value in given.items()}
    parameters = _Parameters(arrays, path)
    options = shaped(named, _Options, f"{path}: its options have")
    anatomy = _anatomy(options, parameters, pre_norm=_ORDERS[_order(given)])
    if left := parameters.left():
        said = f"parameter {printable(left[0])} is unknown ({len(left)} in all)"
        raise ExportError(f"{path}: {said}; is it a plain Transformer?")
    return anatomy


def _reasons(options: Mapping[str, Any]) -> list[str]:
    reasons = [
        f"`{key}: {printable(str(options[key]))}`"
        for key, plain in _PLAIN.items()
        if options.get(key, plain[0]) not in plain
    ]
    if "type" not in options:
        reasons.append("no `type`")
    activation = options.get("transformer-ffn-activation")
    if activation not in _ACTIVATIONS:
        why = " (two functions of that name, by Marian's version)" if activation == "gelu" else ""
        known = ", ".join(_ACTIVATIONS)
        reasons.append(f"`transformer-ffn-activation: {printable(str(activation))}`{why}; known are {known}")
    if _order(options) not in _ORDERS:
        keys = ("preprocess", "postprocess", "postprocess-top")
        said = ", ".join(
            f"`transformer-{key}: {printable(str(options.get(f'transformer-{key}', '')))}`" for key in keys
        )
        reasons.append(f"{said} is neither post-norm (``, `dan`, ``) nor pre-norm (`n`, `da`, `n`)")
    return reasons


def _order(options: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the operations before, after and on top of sub-layers, without dropout."""
    before, after, top = (
        str(options.get(f"transformer-{key}") or "").replace("d", "")
        for key in ("preprocess", "postprocess", "postprocess-top")
    )
    return before, after, top


class _Parameters:
    """The arrays of a model, which remembers the names that were asked for."""

    def __init__(self, arrays: Mapping[str, Array], path: Path) -> None:
        self._arrays = arrays
        self._path = path
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def take(self, name: str) -> Tensor:
        """Return an array in fp32. Raises ExportError when it is missing or quantised."""
        if name not in self._arrays:
            raise ExportError(f"{self._path}: has no parameter {name}; is it a plain Transformer?")
        self._taken.add(name)
        if self._arrays[name].dtype.kind != "f":
            raise ExportError(f"{self._path}: {name} is quantised; import the model from before that")
        return torch.from_numpy(self._arrays[name].astype(np.float32))

    def affine(self, matrix: str, bias: str) -> Affine:
        """Return the linear map of a matrix [in, out] and a bias [1, out]."""
        return Affine(self.take(matrix).T.contiguous(), self.take(bias).flatten())

    def norm(self, name: str, suffix: str = "") -> Affine:
        """Return gain and bias of a norm."""
        return Affine(self.take(f"{name}_ln_scale{suffix}").flatten(), self.take(f"{name}_ln_bias{suffix}").flatten())

    def left(self) -> list[str]:
        """Return the names that nothing asked for."""
        return [name for name in self._arrays if name not in self._taken and not name.startswith("special:")]


def _anatomy(options: _Options, parameters: _Parameters, *, pre_norm: bool) -> Anatomy:
    one = "Wemb" in parameters
    tables = [parameters.take("Wemb" if one else f"{name}_Wemb") for name in ("encoder", "decoder")]
    width_of(tables[0], "Wemb"), width_of(tables[1], "Wemb")
    prefix = "decoder_ff_logit_out"
    output = tables[1]
    if f"{prefix}_Wt" in parameters:
        output = parameters.take(f"{prefix}_Wt")
    elif f"{prefix}_W" in parameters:  # models of before 2019
        output = parameters.take(f"{prefix}_W").T.contiguous()
    bias = parameters.take(f"{prefix}_b").flatten() if f"{prefix}_b" in parameters else output.new_zeros(len(output))
    source, target, written = (torch.cat([table, table.new_zeros(1, table.shape[1])]) for table in (*tables, output))
    encoder, decoder = (
        _stack(options, parameters, name, table, pre_norm)
        for name, table in (("encoder", one_of(source, target)), ("decoder", target))
    )
    head = Affine(one_of(written, target), torch.cat([bias, bias.new_zeros(1)]))
    return Anatomy(encoder, decoder, head, _ACTIVATIONS[options.transformer_ffn_activation], "layer")


def _stack(options: _Options, parameters: _Parameters, name: str, embedding: Tensor, pre_norm: bool) -> StackMatrices:
    suffix = "_pre" if pre_norm else ""
    width = embedding.shape[1]
    decoder = name == "decoder"
    plain = options.transformer_disable_position_embeddings
    return StackMatrices(
        pre_norm=pre_norm,
        heads=options.transformer_heads,
        epsilon=_EPSILON,
        layers=tuple(
            _layer(parameters, f"{name}_l{number + 1}", decoder, suffix)
            for number in range(options.dec_depth if decoder else options.enc_depth)
        ),
        final_norm=parameters.norm(f"{name}_top") if pre_norm else None,
        embedding=embedding,
        scale=1.0 if plain else width**0.5,  # one function does both: without positions nothing is scaled
        positions=None if plain else positions_from(0, POSITIONS, width),
    )


def _layer(parameters: _Parameters, name: str, decoder: bool, suffix: str) -> LayerMatrices:
    attentions = []
    for kind in ("self", "context")[: 1 + decoder]:
        at = f"{name}_{kind}"
        query, key, value, out = (parameters.affine(f"{at}_W{part}", f"{at}_b{part}") for part in "qkvo")
        attentions.append(AttentionMatrices(query, key, value, out, parameters.norm(f"{at}_Wo", suffix)))
    return LayerMatrices(
        attentions[0],
        attentions[1] if decoder else None,
        parameters.affine(f"{name}_ffn_W1", f"{name}_ffn_b1"),
        parameters.affine(f"{name}_ffn_W2", f"{name}_ffn_b2"),
        parameters.norm(f"{name}_ffn_ffn", suffix),
    )


class _Search(JsonForm):
    """The settings of the search in decoder.yml."""

    beam_size: int | None = Field(default=None, ge=1, le=10_000)
    normalize: float | int = Field(default=0, ge=0, le=10)
    word_penalty: float | int = 0


def read_marian(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a model of Marian.

    Args:
        path: an .npz or binary file, or a folder with one, such as an unpacked download of OPUS-MT.
        dictionaries: vocabularies of source and target, or one for both: SentencePiece models (.spm), .yml, .json or
            text; none: those that decoder.yml names, else those that Firefox's models have beside them.
        models: SentencePiece models of the two sides for vocabularies that are none; none: `source.spm` and
            `target.spm` beside the weights if they are there, else text is segmented already.
        languages: codes of source and target; None: `source` and `target`, since Marian's files do not say.

    Raises ExportError with all reasons why the model is not a plain Transformer; DataError: files missing or damaged.
    """
    files = find_files(path)
    weights = read_weights(files.weights)
    anatomy = _marian_anatomy(weights.arrays, weights.options, files.weights)
    vocabularies = list(dictionaries) or list(files.vocabularies)
    if not vocabularies:
        raise DataError(f"{files.weights}: name its vocabularies, of source and target, by `--dictionary`")
    beside = [files.weights.with_name(f"{side}.spm") for side in ("source", "target")]
    if not models and all(file.is_file() for file in beside):
        models = beside
    (source, source_ids), (target, target_ids) = _sides(vocabularies, models)
    pads = [stack.embedding.shape[0] - 1 for stack in (anatomy.encoder, anatomy.decoder)]
    controls = [
        ControlIds(pad, *_control(ids, vocabulary), pad)
        for pad, ids, vocabulary in zip(
            pads, (source_ids, target_ids), (vocabularies[0], vocabularies[-1]), strict=True
        )
    ]
    _refuse_shifted(files.weights, (vocabularies[0], vocabularies[-1]), (source_ids, target_ids), pads)
    search = {key.replace("-", "_"): value for key, value in files.options.items()}
    found = shaped(search, _Search, f"{files.weights}: its decoder.yml has")
    return ForeignModel(
        kind="marian",
        anatomy=anatomy,
        scaled=anatomy.encoder.scale != 1.0,
        source_ids=source_ids,
        target_ids=target_ids,
        control=controls[1],
        source_control=controls[0],
        source=source,
        target=target,
        languages=languages or ("source", "target"),
        decoding=_decoding(found),
        never=frozenset([pads[1]]),
        notes=(*weights.notes, *([f"word-penalty: {found.word_penalty}"] if found.word_penalty else [])),
    ).checked(str(files.weights))


def _refuse_shifted(
    path: Path, vocabularies: Sequence[Path], ids: Sequence[Mapping[str, int]], rows: Sequence[int]
) -> None:
    """Raise ExportError where ids are places in a file of another length than the matrix: any may be shifted."""
    reasons = [
        f"{side}: {file} has {len(known):,} tokens, the model {count:,} rows"
        for side, file, known, count in zip(("source", "target"), vocabularies, ids, rows, strict=True)
        if file.suffix not in (".yml", ".yaml", ".json") and len(known) != count
    ]
    if reasons:
        raise ExportError(f"{path}: {'; '.join(dict.fromkeys(reasons))}; is it the vocabulary of this model?")


def _sides(
    vocabularies: Sequence[Path], models: Sequence[Path]
) -> tuple[tuple[Tokenizer, dict[str, int]], tuple[Tokenizer, dict[str, int]]]:
    """Return the tokenizer and the other toolkit's ids of each side; one vocabulary gives one tokenizer."""
    files = (vocabularies[0], vocabularies[-1])
    if files[0].suffix == files[1].suffix == ".spm":
        read = [read_segmenter(file) for file in files]
        ids = [{piece: number for number, piece in enumerate(_pieces(tokenizer))} for tokenizer in read]
        joint = read[0].model == read[1].model
        return (read[0], ids[0]), (read[0] if joint else read[1], ids[1])
    source_ids, target_ids = (read_ids(file) for file in files)
    if not models:
        listed = [VocabularyTokenizer(listing(_spelt(ids))) for ids in (source_ids, target_ids)]
        return (listed[0], source_ids), (listed[0] if source_ids == target_ids else listed[1], target_ids)
    alone = [read_segmenter(model) for model in (models[0], models[-1])]
    tags = language_tokens(source_ids, alone)
    source, target = (SentencePieceTokenizer(side.model, tags=tags) for side in alone)
    source, target = with_vocabularies(source, target, source_ids, target_ids)
    return (source, source_ids), (target, target_ids)


def _pieces(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return the pieces of the SentencePiece model itself, whose places are Marian's ids."""
    count = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).get_piece_size()
    return tokenizer.pieces(range(count))


def _spelt(ids: Mapping[str, int]) -> list[str]:
    """Return the tokens of a vocabulary in the order of ids, without those that text split at blanks cannot have."""
    spelt = (token for token in ids if token and token == token.strip(" ") and "\n" not in token)
    return sorted(spelt, key=ids.__getitem__)


def _control(ids: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Return the ids of the unknown token and of end-of-sentence, which Nematus called `UNK` and `eos`."""
    unk, eos = ids.get("<unk>", ids.get("UNK")), ids.get("</s>", ids.get("eos"))
    if unk is None or eos is None:
        raise DataError(f"{path}: has no {'<unk>' if unk is None else '</s>'}; is it the vocabulary of this model?")
    return unk, eos


def _decoding(search: _Search) -> dict[str, Any]:
    """Return the section `decoding`: Marian's lengths are at most three times the source, end-of-sentence counted."""
    decoding: dict[str, Any] = {
        "endings": "beam",
        "length_penalty": {"kind": "power", "alpha": float(search.normalize)},
        "max_length": {"ratio": 3.0, "extra": 2, "limit": POSITIONS - 1},
        "min_length": 0,
    }
    if search.beam_size is not None:
        decoding["beam_size"] = search.beam_size
    return decoding
