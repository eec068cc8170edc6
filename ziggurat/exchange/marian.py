"""Export of a plain Transformer, or one with an SSRU decoder, to a folder for Marian.

Marian computes its positions and the decoder's first input (zeros) itself, and its norms have an epsilon of 1e-6; a
model must have the same. `ziggurat.exchange.import_marian` is the inverse.
"""

from __future__ import annotations

import dataclasses
import io
import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import yaml
from torch import Tensor

from ziggurat.config import DecodingConfig, Experiment
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.exchange.anatomy import (
    Affine,
    Anatomy,
    AttentionMatrices,
    CellMatrices,
    LayerMatrices,
    StackMatrices,
    with_head_first,
)
from ziggurat.exchange.marian_binary import OPTIONS_ENTRY
from ziggurat.exchange.marian_files import ACTIVATIONS
from ziggurat.exchange.plain import ExportedModel
from ziggurat.model.embedding import sinusoids
from ziggurat.model.kinds import RESIDUAL
from ziggurat.system.errors import ExportError
from ziggurat.system.files import write_atomically

MARIAN_ATTENTIONS = ("full", "ssru")
"""MARIAN_ATTENTIONS are the kinds of `decoder.attention` that Marian also has."""
_CLOSE_EPSILON = 1.1e-5
"""_CLOSE_EPSILON is the largest epsilon of norms that come out equal up to rounding; 1e-5 changes them by a few
millionths."""
_NEVER = -1e9
"""_NEVER is the output bias of tokens that are not text."""
_NAMES = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
_SEPARATE = "decoder_ff_logit_out_Wt"
"""_SEPARATE is the output matrix of a model in which it is not an embedding."""
MODEL_FILE, SEARCH_FILE = "model.npz", "decoder.yml"
"""MODEL_FILE and SEARCH_FILE are the files of the weights and of the search."""

_START = (
    "`embedding.zero_start: false`: Marian's decoder begins with zeros, not with an embedding of begin-of-sentence "
    "(train with `embedding.zero_start: true`)"
)
_POSITIONS = (
    "`embedding.positions: learned`: Marian computes sinusoids itself (train with `embedding.positions: sinusoidal`)"
)


def marian_reasons(experiment: Experiment) -> Iterator[str]:
    """Yield the reasons why Marian cannot compute what a plain model of this configuration does."""
    config, data = experiment.model, experiment.data
    attention = config.decoder.attention
    if "relative" in (config.encoder.attention, attention):
        yield "`attention: relative`: Marian has no Shaw et al. (2018) positions"
    places = places_of_norms(experiment)
    if len(places) > 1:
        yield "`residual`: Marian has pre-norm in both stacks or post-norm in both"
    elif True in places and attention != "ssru":
        yield (
            f"`decoder.attention: {attention}` with pre-norm: Marian's own search (1.11 to 1.12.42 at least) leaves "
            "out the norm of its keys and values from the second token on (train with post-norm, or with `ssru`)"
        )
    if config.activation not in _NAMES:
        yield f"`activation: {config.activation}`: Marian has {', '.join(_NAMES)}"
    if config.encoder_width != config.d_model or config.encoder_heads != config.heads:
        yield "`encoder.d_model` and `encoder.heads`: Marian's stacks have the same width and number of heads"
    if config.embedding.shared_bias:
        yield "`embedding.shared_bias`: Marian adds no vector to embeddings"
    if data.train:  # the weights of an imported model show it themselves
        if not config.embedding.zero_start:
            yield _START
        if config.embedding.positions == "learned":
            yield _POSITIONS
    own = (config.encoder.layer_norm_epsilon, config.decoder.layer_norm_epsilon)
    if max(epsilon or config.layer_norm_epsilon for epsilon in own) > _CLOSE_EPSILON:
        yield "`layer_norm_epsilon`: Marian uses 1e-6; above 1e-5 the difference exceeds rounding error"
    if data.unicode != "none":
        yield f"`data.unicode: {data.unicode}`: Marian does not normalise text (train with `unicode: none`)"
    if data.train and all(corpus.tag for corpus in data.train):
        yield "every corpus of `data.train` has a `tag`, and Marian puts none before a sentence"


def places_of_norms(experiment: Experiment) -> set[bool]:
    """Return, for the residual kinds of both stacks, whether the norm precedes the sub-layer in the plain form."""
    kinds = (experiment.model.encoder_residual, experiment.model.decoder_residual)
    return {RESIDUAL[kind].folding in ("pre", "branch_vector", "norm_constant") for kind in kinds}


def write_marian(folder: Path, model: ExportedModel, decoding: DecodingConfig) -> None:
    """Write `model.npz`, `decoder.yml` and the vocabularies into `folder`.

    Args:
        folder: an existing folder.
        model: the model.
        decoding: settings of the search.

    Raises ExportError if its first input, its positions or its vocabularies differ from Marian's.
    """
    arrays, options = marian_parameters(model)
    if _SEPARATE in arrays:
        warnings.warn(
            "`embedding.sharing: none`: `pymarian convert --gemm-type intgemm8` damages an output matrix that is not "
            "an embedding, even in models that Marian trained; for int8 train with `sharing: decoder` or `all`",
            stacklevel=2,
        )
    names = _write_vocabularies(folder, model)
    write_npz(folder / MODEL_FILE, arrays, options)
    search = {
        "relative-paths": True,
        "models": [MODEL_FILE],
        "vocabs": list(names),
        "beam-size": decoding.beam_size,
        "normalize": decoding.length_penalty.alpha if decoding.length_penalty.kind == "power" else 0.0,
        "word-penalty": decoding.length_penalty.word_penalty,
        "mini-batch": 32,
        "maxi-batch": 100,
        "maxi-batch-sort": "src",
    }
    longest = decoding.max_length
    if longest.ratio and longest.extra == math.ceil(longest.ratio):  # for end-of-sentence, which Marian counts
        search["max-length-factor"] = longest.ratio
    if decoding.unknown:
        search["allow-unk"] = True
    write_atomically(folder / SEARCH_FILE, yaml.safe_dump(search, sort_keys=False).encode())


def marian_parameters(model: ExportedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters by Marian's names, in fp32, and the options with which Marian builds the model.

    Raises ExportError if its first input or its positions differ from Marian's.
    """
    anatomy = model.anatomy(MARIAN_ATTENTIONS, scaled_input=False)
    _refuse_unlike(model, anatomy)
    aligned = model.aligned
    decoder = with_head_first(anatomy.decoder, aligned)
    anatomy = _scaled(dataclasses.replace(anatomy, decoder=decoder))
    arrays = {name: _array(tensor) for name, tensor in _parameters(anatomy, model)}
    layer = aligned.layer % len(decoder.layers) + 1
    return arrays, _options(anatomy, arrays, "last" if layer == len(decoder.layers) else str(layer))


def _refuse_unlike(model: ExportedModel, anatomy: Anatomy) -> None:
    """Raise ExportError for weights that differ from what Marian has built in."""
    reasons = []
    start = anatomy.decoder.embedding[model.target.bos]
    if not anatomy.decoder.zero_start and bool(start.any()):
        reasons.append(_START)
    for stack in (anatomy.encoder, anatomy.decoder):
        table = stack.positions
        if table is not None:
            computed = sinusoids(len(table), table.shape[1]).to(table)
            if not torch.allclose(table, computed, atol=2e-4):  # fp32 sines of angles up to a thousand
                reasons.append(_POSITIONS)
    if reasons:
        raise ExportError(f"`marian` cannot be reached: {'; '.join(dict.fromkeys(reasons))}")


def _write_vocabularies(folder: Path, model: ExportedModel) -> tuple[str, str]:
    """Write the vocabularies; return their names. Raises ExportError if Marian could not find the end of a sentence."""
    joint = model.source is model.target
    names = []
    for side, tokenizer in (("source", model.source), ("target", model.target)):
        name = "joint" if joint else side
        if isinstance(tokenizer, SentencePieceTokenizer):
            write_atomically(folder / f"{name}.spm", sentencepiece_model(tokenizer, side))
            names.append(f"{name}.spm")
            continue
        tokens = {token: number for number, token in enumerate(tokenizer.pieces(range(tokenizer.size)))}
        write_atomically(folder / f"{name}.yml", yaml.safe_dump(tokens, sort_keys=False, allow_unicode=True).encode())
        names.append(f"{name}.yml")
    return names[0], names[1]


def sentencepiece_model(tokenizer: SentencePieceTokenizer, side: str) -> bytes:
    """Return the content of a SentencePiece model. Raises ExportError, naming `side`, if it has no `</s>`."""
    if tokenizer.eos >= marian_rows(tokenizer):
        raise ExportError(
            f"the SentencePiece model of the {side} has no `</s>`, by which Marian knows the end of a sentence"
        )
    return tokenizer.model


def marian_rows(tokenizer: Tokenizer) -> int:
    """Return how many of a tokenizer's ids are also Marian's: those of its SentencePiece model, or all."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return tokenizer.size
    return int(sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).get_piece_size())


def _scaled(anatomy: Anatomy) -> Anatomy:
    """Return the model with embeddings scaled for Marian, which multiplies them by sqrt(D) if positions are added.

    If the embedding is also the output projection, the last norm divides by the factor.
    """
    stacks: list[StackMatrices] = []
    tied = anatomy.output.weight is anatomy.decoder.embedding
    output = anatomy.output
    tables: dict[int, Tensor] = {}
    for stack in (anatomy.encoder, anatomy.decoder):
        theirs = 1.0 if stack.positions is None else math.sqrt(stack.embedding.shape[1])
        factor = stack.scale / theirs
        table = stack.embedding
        if factor != 1.0:
            table = tables.setdefault(id(stack.embedding), stack.embedding * factor)
        stack = dataclasses.replace(stack, embedding=table, scale=theirs)
        if stacks and tied and factor != 1.0:
            stack = _with_last_norm(stack, 1 / factor)
        stacks.append(stack)
    if tied:
        output = Affine(stacks[1].embedding, output.bias)
    return dataclasses.replace(anatomy, encoder=stacks[0], decoder=stacks[1], output=output)


def _with_last_norm(stack: StackMatrices, factor: float) -> StackMatrices:
    """Return the stack with its output multiplied by `factor`."""
    if stack.final_norm is not None:
        return dataclasses.replace(stack, final_norm=stack.final_norm.times(factor))
    last = stack.layers[-1]
    norms = (*last.ffn_norms[:-1], last.ffn_norms[-1].times(factor))
    return dataclasses.replace(stack, layers=(*stack.layers[:-1], dataclasses.replace(last, ffn_norms=norms)))


def _parameters(anatomy: Anatomy, model: ExportedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters by Marian's names."""
    encoder, decoder, output = anatomy.encoder, anatomy.decoder, anatomy.output
    rows = (marian_rows(model.source), marian_rows(model.target))
    tied = output.weight is decoder.embedding
    if tied and encoder.embedding is decoder.embedding and model.source is model.target:
        yield "Wemb", decoder.embedding[: rows[1]]
    else:
        yield "encoder_Wemb", encoder.embedding[: rows[0]]
        yield "decoder_Wemb", decoder.embedding[: rows[1]]
    if not tied:
        yield _SEPARATE, output.weight[: rows[1]]
    bias = output.weight.new_zeros(len(output.weight)) if output.bias is None else output.bias.clone()
    bias[[model.target.pad, model.target.bos, *model.target.tags.values()]] = _NEVER
    yield "decoder_ff_logit_out_b", bias[None, : rows[1]].clamp(min=_NEVER)
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        for number, layer in enumerate(stack.layers, start=1):
            yield from _layer(f"{name}_l{number}", layer, anatomy.norm, "_pre" if stack.pre_norm else "")
        if stack.final_norm is not None:
            yield from _norm(f"{name}_top", stack.final_norm, anatomy.norm)


def _layer(at: str, layer: LayerMatrices, kind: str, suffix: str) -> Iterator[tuple[str, Tensor]]:
    own = layer.own
    if isinstance(own, CellMatrices):
        yield f"{at}_rnn_W", own.value.weight.T
        yield from _affine(f"{at}_rnn", "f", own.gate)
        # Before the sub-layer its norm has the sub-layer's name; after it, that of its network.
        yield from _norm(f"{at}_rnn" if suffix else f"{at}_rnn_ffn", own.norms[0], kind, suffix)
    else:
        yield from _attention(f"{at}_self", own, kind, suffix)
    if layer.cross_attn is not None:
        yield from _attention(f"{at}_context", layer.cross_attn, kind, suffix)
    yield from _affine(f"{at}_ffn", "1", layer.ffn_in)
    yield from _affine(f"{at}_ffn", "2", layer.ffn_out)
    yield from _norm(f"{at}_ffn_ffn", layer.ffn_norm, kind, suffix)


def _attention(at: str, attention: AttentionMatrices, kind: str, suffix: str) -> Iterator[tuple[str, Tensor]]:
    parts = {"q": attention.query, "k": attention.key, "v": attention.value, "o": attention.out}
    for part, affine in parts.items():
        yield from _affine(at, part, affine)
    yield from _norm(f"{at}_Wo", attention.norm, kind, suffix)


def _affine(at: str, part: str, affine: Affine) -> Iterator[tuple[str, Tensor]]:
    """Yield a matrix [in, out] and its bias [1, out], zeros if there is none."""
    yield f"{at}_W{part}", affine.weight.T
    yield f"{at}_b{part}", (affine.weight.new_zeros(len(affine.weight)) if affine.bias is None else affine.bias)[None]


def _norm(at: str, norm: Affine, kind: str, suffix: str = "") -> Iterator[tuple[str, Tensor]]:
    name = "rms" if kind == "rms" else "ln"
    yield f"{at}_{name}_scale{suffix}", norm.weight[None]
    if kind != "rms":
        yield f"{at}_{name}_bias{suffix}", (torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)[None]


def _array(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _options(anatomy: Anatomy, arrays: Mapping[str, Any], aligned: str) -> dict[str, Any]:
    """Return the options with which Marian builds the model."""
    encoder, decoder = anatomy.encoder, anatomy.decoder
    norm = "r" if anatomy.norm == "rms" else "n"
    pre = encoder.pre_norm
    cells = isinstance(decoder.layers[0].own, CellMatrices)
    tables = [arrays.get("Wemb", arrays.get(f"{name}_Wemb")) for name in ("encoder", "decoder")]
    return {
        **_USUAL,
        "dec-cell": "ssru" if cells else "gru",
        "dec-depth": len(decoder.layers),
        "dim-emb": encoder.embedding.shape[1],
        "dim-vocabs": [len(table) for table in tables if table is not None],
        "enc-depth": len(encoder.layers),
        "tied-embeddings": "decoder_Wemb" in arrays and _SEPARATE not in arrays,
        "tied-embeddings-all": "Wemb" in arrays,
        "transformer-decoder-autoreg": "rnn" if cells else "self-attention",
        "transformer-decoder-dim-ffn": len(decoder.layers[0].ffn_in.weight),
        "transformer-dim-ffn": len(encoder.layers[0].ffn_in.weight),
        "transformer-disable-position-embeddings": encoder.positions is None,
        "transformer-ffn-activation": _NAMES[anatomy.activation],
        "transformer-guided-alignment-layer": aligned,
        "transformer-heads": encoder.heads,
        "transformer-preprocess": norm if pre else "",
        "transformer-postprocess": "da" if pre else f"da{norm}",
        "transformer-postprocess-top": norm if pre else "",
    }


_USUAL: dict[str, Any] = {
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-type": "bidirectional",
    "factors-combine": "sum",
    "factors-dim-emb": 0,
    "input-types": [],
    "layer-normalization": False,
    "lemma-dependency": "",
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
    "right-left": False,
    "skip": False,
    "tied-embeddings-src": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-decoder-ffn-depth": 0,
    "transformer-dim-aan": 2048,
    "transformer-ffn-depth": 2,
    "transformer-no-affine": False,
    "transformer-no-bias": False,
    "transformer-no-projection": False,
    "transformer-pool": False,
    "transformer-postprocess-emb": "d",
    "transformer-rnn-projection": False,
    "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False,
    "type": "transformer",
    "ulr": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
    "version": "v1.12.42 00000000",
}
"""Options that are the same for all models written here; the version is the one whose functions are meant."""


def options_text(options: Mapping[str, Any]) -> bytes:
    """Return the options as a model stores them: YAML padded with NULs to a multiple of 256 bytes."""
    text = yaml.safe_dump(dict(options)).encode() + b"\0"
    return text + bytes(-len(text) % 256)


def write_npz(path: Path, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write an .npz file as Marian reads it: uncompressed, 32-bit lengths, its options in bytes with NULs."""
    stored = {**arrays, OPTIONS_ENTRY: np.frombuffer(options_text(options), np.int8)}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as packed:
        for name, array in stored.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            # The date of writing would make the files of equal models differ.
            packed.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), content.getvalue())
    write_atomically(path, whole.getvalue())
