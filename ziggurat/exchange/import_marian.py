"""Reader of Marian's plain Transformers, as OPUS-MT and others publish them next to transformers' files.

Names and formulas are those of Marian's src/models/transformer.h (version 1.12): matrices are stored [in, out], biases
and norms [1, D]; the decoder's first input is a zero vector; embeddings are multiplied by sqrt(D) if positions are
added; norms have an epsilon of 1e-6. Marian has no padding in its vocabularies; here it is an extra row of zeros at the
end, which also serves as the first input.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from pydantic import Field
from torch import Tensor

from ziggurat.config.kinds import ResidualKind
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer, listing
from ziggurat.exchange.agreement import language_tokens
from ziggurat.exchange.anatomy import (
    SLOTS,
    Affine,
    Anatomy,
    AttentionMatrices,
    CellMatrices,
    LayerMatrices,
    StackMatrices,
    one_of,
    width_of,
)
from ziggurat.exchange.firefox_files import published_languages
from ziggurat.exchange.imported import (
    ControlIds,
    ForeignModel,
    plain_suffix,
    positions_from,
    read_segmenter,
    with_vocabularies,
)
from ziggurat.exchange.marian_files import (
    ACTIVATIONS,
    Array,
    find_files,
    read_ids,
    read_weights,
    refuse_beyond,
    rows_beyond,
    unknown_and_end,
    with_every_row,
)
from ziggurat.model.build import build_model
from ziggurat.model.kinds import RESIDUAL
from ziggurat.model.tensors import load_weights
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.small_files import JsonForm, inside, shaped
from ziggurat.translate.translator import Translator

_EPSILON = 1e-6
POSITIONS = 1024
"""POSITIONS is the number of rows of the position table. Marian computes as many as it needs, and by default reads at
most 1,000 tokens."""

_SIGMOID_GELU = 1.702
"""_SIGMOID_GELU is the factor in `gelu` before 1.12.3: x sigmoid(1.702 x), which equals swish(1.702 x) / 1.702."""
_EXACT_GELU, _NORMED_KEYS = (1, 12, 3), (1, 11, 0)
"""First versions of Marian in which `gelu` is exact, and in which pre-norm covers keys and values of self-attention."""

_NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "type": (("transformer",), "another architecture"),
    "right-left": ((False,), "it writes from right to left"),
    "input-types": (([], ["sequence", "sequence"]), "inputs that are not two texts"),
    "input-reorder": (([],), "inputs in another order"),
    "ulr": ((False,), "embeddings by queries and keys of all languages (ULR)"),
    "lemma-dim-emb": ((0,), "factored vocabularies"),
    "transformer-decoder-autoreg": (("self-attention", "rnn"), "its maps differ from average attention here"),
    "transformer-rnn-projection": ((False,), "the SSRU here has no map of its output"),
    "layer-normalization": ((False,), "norms inside recurrent cells"),
    "transformer-train-position-embeddings": ((False,), "trained positions"),
    "transformer-attention-mask": (("default",), "attention with biases of positions"),
    "transformer-pool": ((False,), "a mean in place of attention"),
    "transformer-no-bias": ((False,), "maps without biases"),
    "transformer-no-affine": ((False,), "norms without gains"),
}
"""Options with the values that are supported and what other values mean; a missing option has the first value."""

_ORDERS: dict[tuple[str, str, str, str], ResidualKind] = {
    ("", "an", "", ""): "post",
    ("n", "a", "n", ""): "pre",
    ("", "a", "", ""): "no_norm",
    ("", "na", "n", ""): "res_post",
    ("n", "na", "n", ""): "sandwich",
    ("n", "na", "n", "n"): "peri",
}
"""Operations before and after sub-layers, at the top of stacks and on their input, without dropout; `n` is any norm."""

_KEYS = tuple(f"transformer-{key}" for key in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb"))


class _Options(JsonForm):
    """The options that are used."""

    enc_depth: int = Field(ge=1, le=4096)
    dec_depth: int = Field(ge=1, le=4096)
    transformer_heads: int = Field(ge=1, le=1 << 20)
    transformer_ffn_activation: str
    transformer_ffn_depth: int = Field(default=2, ge=1, le=64)
    transformer_decoder_ffn_depth: int = Field(default=0, ge=0, le=64)
    transformer_decoder_autoreg: str = "self-attention"
    transformer_no_projection: bool = False
    transformer_disable_position_embeddings: bool = False
    transformer_tied_layers: list[int] = Field(default_factory=list, max_length=4096)


def _marian_anatomy(arrays: Mapping[str, Array], given: Mapping[str, Any], path: Path) -> Anatomy:
    """Return the matrices of the model in the file `path`, each vocabulary with one extra row for padding.

    Raises ExportError with all reasons why the options are not those of an importable Transformer, or for arrays that
    are missing, unknown or quantised; DataError for options that are missing or wrong.
    """
    given = {key: value for key, value in given.items() if value is not None}  # Marian writes `~` for unset options
    if reasons := [*_reasons(given), *_norm_reasons(given)]:
        raise ExportError(f"{path}: not a Transformer that can be imported: {'; '.join(reasons)}")
    named = {key.replace("-", "_"): value for key, value in given.items()}
    options = shaped(named, _Options, f"{path}: its options have")
    tied = options.transformer_tied_layers
    if tied and (len(tied) != options.dec_depth or not all(1 <= number <= options.dec_depth for number in tied)):
        raise DataError(f"{path}: `transformer-tied-layers: {tied}` for {options.dec_depth} decoder layers")
    norm = "rms" if "r" in "".join(_orders(given)) else "layer"
    reader = _Reader(options, _Parameters(arrays, path, norm), _kind(given), _sigmoid_gelu(given))
    anatomy = reader.anatomy()
    if left := reader.parameters.left():
        said = f"parameter {printable(left[0])} is unknown ({len(left)} in all)"
        raise ExportError(f"{path}: {said}; is it a plain Transformer?")
    return anatomy


def _reasons(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a model with these options cannot be imported, apart from its norms."""
    for key, (known, what) in _NOT_HERE.items():
        if options.get(key, known[0]) not in known:
            yield f"`{key}: {printable(str(options[key]))}` ({what})"
    if "type" not in options:
        yield "no `type`"
    cell = options.get("dec-cell")
    if options.get("transformer-decoder-autoreg") == "rnn" and cell != "ssru":
        yield f"`dec-cell: {printable(str(cell))}` (the only known recurrent cell is `ssru`)"
    activation = options.get("transformer-ffn-activation")
    if activation not in ACTIVATIONS:
        known_names = ", ".join(ACTIVATIONS)
        yield f"`transformer-ffn-activation: {printable(str(activation))}` (known are {known_names})"
    elif activation == "gelu" and not _version(options):
        yield "`transformer-ffn-activation: gelu` without a `version` (two functions of that name, by Marian's version)"


def _norm_reasons(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why the norms of a model with these options cannot be imported."""
    said = ", ".join(f"`{key}: {printable(str(options.get(key) or ''))}`" for key in _KEYS)
    letters = "".join(_orders(options))
    if "n" in letters and "r" in letters:
        yield f"{said}: LN and RMSNorm in one model"
    elif _kind_of(options) is None:
        known = ", ".join("`{}` `{}` `{}` `{}`".format(*order) for order in _ORDERS)
        yield f"{said} is not a way in which sub-layers join the stream here (dropout aside: {known})"
    elif (options.get("transformer-preprocess") or "").strip("d") and _version(options) < _NORMED_KEYS:
        said = printable(str(options.get("version", "unknown")))
        yield f"pre-norm of Marian {said} (before 1.11 it left keys and values of self-attention without a norm)"


def _orders(options: Mapping[str, Any]) -> list[str]:
    """Return the model's operations in the order of _KEYS, without dropout."""
    return [str(options.get(key) or "").replace("d", "") for key in _KEYS]


def _kind_of(options: Mapping[str, Any]) -> ResidualKind | None:
    before, after, top, entry = (each.replace("r", "n") for each in _orders(options))
    return _ORDERS.get((before, after, top, entry))


def _kind(options: Mapping[str, Any]) -> ResidualKind:
    kind = _kind_of(options)
    assert kind is not None  # checked by _norm_reasons
    return kind


def _version(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version of Marian that wrote the model, such as (1, 12, 42); () if the options do not name it."""
    found = re.match(r"v?([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", str(options.get("version", "")))
    return () if found is None else tuple(map(int, found.groups()))


def _sigmoid_gelu(options: Mapping[str, Any]) -> bool:
    return options["transformer-ffn-activation"] == "gelu" and _version(options) < _EXACT_GELU


class _Parameters:
    """A model's arrays, which remember the names that were requested; `norm` is `layer` or `rms`."""

    def __init__(self, arrays: Mapping[str, Array], path: Path, norm: str) -> None:
        self._arrays = arrays
        self._path = path
        self._taken: set[str] = set()
        self.kind_of_norm = norm

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def take(self, name: str) -> Tensor:
        """Return an array in fp32. Raises ExportError if it is missing or quantised."""
        if name not in self._arrays:
            raise ExportError(f"{self._path}: has no parameter {name}; is it a plain Transformer?")
        self._taken.add(name)
        if self._arrays[name].dtype.kind != "f":
            raise ExportError(f"{self._path}: {name} is quantised; import the model from before quantisation")
        return torch.from_numpy(self._arrays[name].astype(np.float32))

    def affine(self, matrix: str, bias: str | None = None) -> Affine:
        """Return the linear map of a matrix [in, out] and a bias [1, out], if it has one."""
        return Affine(self.take(matrix).T.contiguous(), None if bias is None else self.take(bias).flatten())

    def norm(self, name: str, suffix: str = "") -> Affine:
        """Return gain and bias of a norm; RMSNorm has no bias."""
        if self.kind_of_norm == "rms":
            return Affine(self.take(f"{name}_rms_scale{suffix}").flatten())
        return Affine(self.take(f"{name}_ln_scale{suffix}").flatten(), self.take(f"{name}_ln_bias{suffix}").flatten())

    def left(self) -> list[str]:
        """Return the names that were never requested."""
        return [name for name in self._arrays if name not in self._taken and not name.startswith("special:")]


class _Reader:
    """Reader of the matrices of one model.

    Args:
        options: its options.
        parameters: its arrays.
        residual: how its sub-layers join the stream.
        sigmoid_gelu: its activation is the `gelu` of versions before 1.12.3.
    """

    def __init__(self, options: _Options, parameters: _Parameters, residual: ResidualKind, sigmoid_gelu: bool) -> None:
        self.options = options
        self.parameters = parameters
        self.residual = residual
        self._factor = _SIGMOID_GELU if sigmoid_gelu else 1.0
        self.activation = "silu" if sigmoid_gelu else ACTIVATIONS[options.transformer_ffn_activation]

    def anatomy(self) -> Anatomy:
        """Return all matrices."""
        parameters = self.parameters
        one = "Wemb" in parameters
        tables = [parameters.take("Wemb" if one else f"{name}_Wemb") for name in ("encoder", "decoder")]
        width_of(tables[0], "Wemb"), width_of(tables[1], "Wemb")
        prefix = "decoder_ff_logit_out"
        output = tables[1]
        if f"{prefix}_Wt" in parameters:
            output = parameters.take(f"{prefix}_Wt")
        elif f"{prefix}_W" in parameters:  # models of before 2019
            output = parameters.take(f"{prefix}_W").T.contiguous()
        bias = (
            parameters.take(f"{prefix}_b").flatten() if f"{prefix}_b" in parameters else output.new_zeros(len(output))
        )
        source, target, written = (
            torch.cat([table, table.new_zeros(1, table.shape[1])]) for table in (*tables, output)
        )
        encoder, decoder = self._stack("encoder", one_of(source, target)), self._stack("decoder", target)
        head = Affine(one_of(written, target), torch.cat([bias, bias.new_zeros(1)]))
        return Anatomy(encoder, decoder, head, self.activation, parameters.kind_of_norm)

    def _stack(self, name: str, embedding: Tensor) -> StackMatrices:
        width = embedding.shape[1]
        options = self.options
        plain = options.transformer_disable_position_embeddings
        numbers = list(range(1, options.enc_depth + 1))
        if name == "decoder":
            numbers = options.transformer_tied_layers or list(range(1, options.dec_depth + 1))
        return StackMatrices(
            residual=self.residual,
            heads=options.transformer_heads,
            epsilon=_EPSILON,
            layers=tuple(self._layer(f"{name}_l{number}", name == "decoder", width) for number in numbers),
            final_norm=self.parameters.norm(f"{name}_top") if RESIDUAL[self.residual].final_norm else None,
            embedding=embedding,
            scale=1.0 if plain else width**0.5,  # without positions Marian does not scale
            positions=None if plain else positions_from(0, POSITIONS, width),
            entry_norm=self.parameters.norm(f"{name}_emb", "_pre") if RESIDUAL[self.residual].entry_norm else None,
        )

    def _layer(self, name: str, decoder: bool, width: int) -> LayerMatrices:
        own: AttentionMatrices | CellMatrices
        if decoder and self.options.transformer_decoder_autoreg == "rnn":
            at = f"{name}_rnn"
            own = CellMatrices(
                self.parameters.affine(f"{at}_W"),
                self.parameters.affine(f"{at}_Wf", f"{at}_bf"),
                self._norms(at, f"{at}_ffn"),
            )
        else:
            own = self._attention(f"{name}_self", width)
        first, *between, last = self._feed_forward(f"{name}_ffn", decoder)
        cross = self._attention(f"{name}_context", width) if decoder else None
        norms = self._norms(f"{name}_ffn_ffn", f"{name}_ffn_ffn")
        return LayerMatrices(own, cross, first, last, norms, ffn_between=tuple(between))

    def _norms(self, before: str, after: str) -> tuple[Affine, ...]:
        """Return the norms of a sub-layer; their names start with `before` and `after`."""
        slots = SLOTS[self.residual]
        return tuple(
            self.parameters.norm(before, "_pre") if slot == "in_norm" else self.parameters.norm(after) for slot in slots
        )

    def _attention(self, at: str, width: int) -> AttentionMatrices:
        query, key, value = (self.parameters.affine(f"{at}_W{part}", f"{at}_b{part}") for part in "qkv")
        if self.options.transformer_no_projection:
            out = Affine(torch.eye(width), torch.zeros(width))
        else:
            out = self.parameters.affine(f"{at}_Wo", f"{at}_bo")
        return AttentionMatrices(query, key, value, out, self._norms(f"{at}_Wo", f"{at}_Wo"))

    def _feed_forward(self, at: str, decoder: bool) -> list[Affine]:
        """Return two or more maps, with the activation between them, that compute the same as the network."""
        depth = self.options.transformer_ffn_depth
        if decoder:
            depth = self.options.transformer_decoder_ffn_depth or depth
        maps = [self.parameters.affine(f"{at}_W{n}", f"{at}_b{n}") for n in range(1, depth + 1)]
        if depth == 1:
            # The network is a single map without an activation f. For every supported f, f(z) - f(-z) = z.
            width = len(maps[0].weight)
            both = torch.eye(width)
            return [
                Affine.joined(maps[0], maps[0].times(-1.0)),
                Affine(torch.cat([both, -both], 1), torch.zeros(width)),
            ]
        # A map before an activation is multiplied by the factor, and the map that reads it is divided by it.
        before = [each.times(self._factor) for each in maps[:-1]] + maps[-1:]
        return before[:1] + [each.times(1 / self._factor, bias=False) for each in before[1:]]


class _Search(JsonForm):
    """The search settings in decoder.yml."""

    beam_size: int | None = Field(default=None, ge=1, le=10_000)
    normalize: float | int = Field(default=0, ge=0, le=10)
    word_penalty: float | int = Field(default=0, ge=-1e6, le=1e6)
    max_length_factor: float | int = Field(default=3, ge=0, le=1e6)
    allow_unk: bool = False


def read_marian(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a Marian model.

    Args:
        path: an .npz or binary file, or a folder with one, such as an unpacked download of OPUS-MT.
        dictionaries: vocabularies of source and target, or one for both: SentencePiece models (.spm), .yml, .json or
            text; none: those named in decoder.yml, otherwise those in the folder of a Firefox model.
        models: SentencePiece models of the two sides for vocabularies that are not such models; none: `source.spm` and
            `target.spm` next to the weights if they exist, otherwise text is already segmented.
        languages: codes of source and target; None: those of metadata.json in Firefox's folders, otherwise `source` and
            `target`, since Marian's files do not name them.

    Raises ExportError with all reasons why the model is not a plain Transformer, DataError for missing or damaged
    files.
    """
    files = find_files(path)
    weights = read_weights(files.weights)
    anatomy = _marian_anatomy(weights.arrays, weights.options, files.weights)
    vocabularies = list(dictionaries) or list(files.vocabularies)
    if not vocabularies:
        raise DataError(f"{files.weights}: name the source and target vocabularies with `--dictionary`")
    beside = [files.weights.with_name(f"{side}.spm") for side in ("source", "target")]
    if not models and any(map(os.path.lexists, beside)):
        models = [inside(file.parent, file.name) for file in beside]
    pads = [stack.embedding.shape[0] - 1 for stack in (anatomy.encoder, anatomy.decoder)]
    (source, source_ids), (target, target_ids) = _sides(vocabularies, models, pads)
    controls = [
        ControlIds(pad, *unknown_and_end(ids, vocabulary), pad)
        for pad, ids, vocabulary in zip(
            pads, (source_ids, target_ids), (vocabularies[0], vocabularies[-1]), strict=True
        )
    ]
    refuse_beyond(files.weights, (vocabularies[0], vocabularies[-1]), (source_ids, target_ids), pads)
    search = {key.replace("-", "_"): value for key, value in files.options.items()}
    found = shaped(search, _Search, f"{files.weights}: its decoder.yml has")
    model = ForeignModel(
        kind="marian",
        anatomy=anatomy,
        scaled=anatomy.encoder.scale != 1.0,
        source_ids=source_ids,
        target_ids=target_ids,
        control=controls[1],
        source_control=controls[0],
        source=source,
        target=target,
        languages=languages or published_languages(files.weights) or ("source", "target"),
        decoding=_decoding(found),
        alignment=_alignment(files.training),
        never=frozenset([pads[1]]),
        notes=weights.notes,
    ).checked(str(files.weights))
    return dataclasses.replace(model, unmatched=(*model.unmatched, *rows_beyond(source_ids, target_ids)))


def _sides(
    vocabularies: Sequence[Path], models: Sequence[Path], rows: Sequence[int]
) -> tuple[tuple[Tokenizer, dict[str, int]], tuple[Tokenizer, dict[str, int]]]:
    """Return each side's tokenizer and the other toolkit's ids; a single vocabulary gives a single tokenizer.

    `rows` are those of the two matrices.
    """
    files = (vocabularies[0], vocabularies[-1])
    kinds = [plain_suffix(file) for file in files]
    if factored := [file for file, kind in zip(files, kinds, strict=True) if kind == ".fsv"]:
        raise ExportError(
            f"{factored[0]}: a factored vocabulary: its tokens are sums of embeddings, but here each has its own"
        )
    if kinds == [".spm", ".spm"]:
        read = [read_segmenter(file) for file in files]
        pieces = [{piece: number for number, piece in enumerate(_pieces(tokenizer))} for tokenizer in read]
        ids = [with_every_row(known, count) for known, count in zip(pieces, rows, strict=True)]
        if ids != pieces:
            read = list(with_vocabularies(read[0], read[1], ids[0], ids[1]))
        joint = read[0].model == read[1].model
        return (read[0], ids[0]), (read[0] if joint else read[1], ids[1])
    read_both = [read_ids(file) for file in files]
    for known, file in zip(read_both, files, strict=True):
        unknown_and_end(known, file)  # before an empty file becomes a tokenizer
    source_ids, target_ids = (with_every_row(known, count) for known, count in zip(read_both, rows, strict=True))
    if not models:
        listed = [VocabularyTokenizer(listing(_spelt(ids))) for ids in (source_ids, target_ids)]
        return (listed[0], source_ids), (listed[0] if source_ids == target_ids else listed[1], target_ids)
    alone = [read_segmenter(model) for model in (models[0], models[-1])]
    tags = language_tokens(source_ids, alone)
    source, target = (SentencePieceTokenizer(side.model, tags=tags) for side in alone)
    source, target = with_vocabularies(source, target, source_ids, target_ids)
    return (source, source_ids), (target, target_ids)


def _pieces(tokenizer: SentencePieceTokenizer) -> list[str]:
    """Return the pieces of the SentencePiece model itself, whose indices are Marian's ids."""
    count = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).get_piece_size()
    return tokenizer.pieces(range(count))


def _spelt(ids: Mapping[str, int]) -> list[str]:
    """Return the tokens in the order of their ids, without those that text split at spaces cannot contain."""
    spelt = (token for token in ids if token and token == token.strip(" ") and "\n" not in token)
    return sorted(spelt, key=ids.__getitem__)


def _alignment(training: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section `training.loss.alignment`; Marian always trains the first head of a layer."""
    if (training.get("guided-alignment") or "none") == "none":
        return None
    layer = training.get("transformer-guided-alignment-layer", "last")
    weight = training.get("guided-alignment-weight") or 0.1
    return {"layer": None if layer == "last" else layer, "head": 1, "weight": weight}


def _decoding(search: _Search) -> dict[str, Any]:
    """Return the section `decoding`; Marian counts end-of-sentence in the source's length and in the limit."""
    factor = float(search.max_length_factor)
    decoding: dict[str, Any] = {
        "endings": "marian",
        "length_penalty": {
            "kind": "power",
            "alpha": float(search.normalize),
            "word_penalty": float(search.word_penalty),
        },
        "max_length": {"ratio": factor, "extra": ceil(factor), "limit": POSITIONS - 1},
        "min_length": 0,
        "unknown": search.allow_unk,
    }
    if search.beam_size is not None:
        decoding["beam_size"] = search.beam_size
    return decoding


def imported_translator(path: Path) -> Translator:
    """Return a translator that computes what the Marian files in the folder `path` describe."""
    model = read_marian(path, (), (), None)
    experiment = model.experiment(str(path))
    network = build_model(experiment.model, model.source.size, model.target.size)
    load_weights(network, model.tensors(), str(path))
    return Translator(
        network.eval(), model.source, model.target, experiment.decoding, max_positions=experiment.model.embedding.limit
    )
