"""Reader of plain Transformers of fairseq. Its checkpoints are pickles (ziggurat.exchange.imported).

Their options are an `argparse.Namespace`, the only class that is allowed: it holds values and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from ziggurat.data.subword import MAX_MODEL_BYTES, SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.exchange.anatomy import Affine, Anatomy, StackMatrices, one_of, width_of
from ziggurat.exchange.imported import (
    ACTIVATIONS,
    MAX_POSITIONS,
    NORM_EPSILON,
    ControlIds,
    ForeignModel,
    layer_from,
    load_pickled,
    positions_from,
    take,
    tensors_of,
)
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.small_files import JsonForm, read_bounded, shaped

_BOS, _PAD, _EOS, _UNK = range(4)  # ids in every fairseq dictionary; the tokens of dict.txt follow
_REFUSED: dict[str, Any] = {
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "character_embeddings": False,
    "cross_self_attention": False,
    "layernorm_embedding": False,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
}
"""Options with the value that a plain Transformer has; any other value refuses the model."""

_UNREAD = re.compile(
    r"(en|de)coder\.version|\w+\.embed_positions\._float_tensor|decoder\.output_projection\.weight"
    # copies that fairseq's layers keep for torch's fused inference; they are not trained
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)


def read_fairseq(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a checkpoint of an architecture whose name begins with `transformer`, and warn that it is a pickle.

    Args:
        path: checkpoint (.pt).
        dictionaries: dict.XX.txt of source and target, or one for both.
        models: SentencePiece models of source and target, or one for both; none: text is segmented already.
        languages: codes of source and target; None: those of the checkpoint.

    Raises ExportError with all reasons why the model is not a plain Transformer; DataError: files that cannot be read.
    """
    if not dictionaries:
        raise DataError(f"{path}: name its dictionaries, dict.XX.txt of source and target, by `--dictionary`")
    options, tensors = _load(path)
    shaped(options, _Options, f"{path}: its options have")
    if reasons := _reasons(options, tensors):
        raise ExportError(f"{path}: not a plain Transformer that can be imported: {'; '.join(reasons)}")
    contents = [_read(file) for file in dictionaries]
    named_contents = list(zip(dictionaries, contents, strict=True))
    ids = [_ids(content, file) for file, content in (named_contents[0], named_contents[-1])]
    # Equal dictionaries are one vocabulary, unless each side is segmented by a separate model.
    joint = contents[0] == contents[-1] and len(models) < 2
    source = _tokenizer(contents[0], models[0] if models else None)
    target = source if joint else _tokenizer(contents[-1], models[-1] if models else None)
    anatomy = _anatomy(options, tensors)
    named = (_shown(options.get("source_lang") or "source"), _shown(options.get("target_lang") or "target"))
    return ForeignModel(
        kind=f"fairseq {_shown(options.get('arch') or options.get('_name'))}",
        anatomy=anatomy,
        scaled=not options.get("no_scale_embedding", False),
        source_ids=ids[0],
        target_ids=ids[1],
        control=ControlIds(_PAD, _UNK, _EOS, _EOS),
        source=source,
        target=target,
        languages=languages or named,
    ).checked(str(path))


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of the model and its parameters. Raises DataError."""
    content = load_pickled(path, "weights and options", classes=[argparse.Namespace])
    try:
        # Options are in `args` of older checkpoints, in `cfg.model` of newer ones.
        configured = content.get("cfg") or {}
        options = content.get("args") or configured["model"]
        tensors = content["model"]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a checkpoint of fairseq ({type(error).__name__}: {error})") from None
    named = options if isinstance(options, dict) else vars(options)
    if not all(isinstance(key, str) for key in named):
        raise DataError(f"{path}: not a checkpoint of fairseq (options without names)")
    return named, tensors_of(path, tensors)


class _Options(JsonForm):
    """The options that are needed."""

    encoder_layers: int = Field(ge=1, le=4096)
    decoder_layers: int = Field(ge=1, le=4096)
    encoder_attention_heads: int = Field(ge=1, le=1 << 20)
    decoder_attention_heads: int = Field(ge=1, le=1 << 20)
    encoder_normalize_before: bool
    decoder_normalize_before: bool
    decoder_embed_dim: int = Field(ge=1)
    max_source_positions: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    max_target_positions: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)


def _shown(value: Any) -> str:
    """Return an option's value for messages; of a list only its type, since it may hold itself a million times."""
    return printable(str(value)) if isinstance(value, str | int | float | None) else type(value).__name__


def _reasons(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return all reasons why the checkpoint cannot be imported."""
    name = _shown(options.get("arch") or options.get("_name"))
    reasons = [] if name.startswith("transformer") else [f"`arch: {name}` is not transformer..."]
    reasons += [
        f"`{key}: {_shown(options[key])}`"
        for key, plain in _REFUSED.items()
        if options.get(key, plain) not in (plain, 0, None)
    ]
    if options.get("activation_fn", "relu") not in ACTIVATIONS:
        reasons.append(f"`activation_fn: {_shown(options['activation_fn'])}`; known are {', '.join(ACTIVATIONS)}")
    width = options["decoder_embed_dim"]
    for key in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if options.get(key, width) != width:
            reasons.append(f"`{key}: {_shown(options[key])}` is not the decoder's width {width}")
    known = re.compile(
        r"(en|de)coder\.(embed_tokens|embed_positions|layer_norm)\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.[qkv]_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.out_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.((self_attn|encoder_attn|final)_layer_norm|fc1|fc2)\.(weight|bias)"
    )
    unknown = [key for key in tensors if not known.fullmatch(key) and not _UNREAD.fullmatch(key)]
    if unknown:
        reasons.append(f"parameter {printable(unknown[0])} is unknown ({len(unknown)} in all)")
    return reasons


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None


def _ids(dictionary: bytes, path: Path) -> dict[str, int]:
    """Return the ids by token: four control symbols, then the lines of the file, as fairseq counts.

    Raises DataError for a file that is not UTF-8, or a token that is there twice, which fairseq refuses, too.
    """
    ids = {"<s>": _BOS, "<pad>": _PAD, "</s>": _EOS, "<unk>": _UNK}
    try:
        # Not by `splitlines`: U+2028 and U+0085 are tokens of vocabularies of the web.
        lines = dictionary.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 (byte {error.start}, from 0); is it a dictionary?") from None
    for number, line in enumerate(lines, start=1):
        token = line.removesuffix("\r").rsplit(" ", 1)[0]
        if token in ids:
            raise DataError(f"{path}, line {number}: {printable(token)!r} is listed twice; ids behind it are not known")
        ids[token] = len(ids)
    return ids


def _tokenizer(dictionary: bytes, model: Path | None) -> Tokenizer:
    if model is None:
        return VocabularyTokenizer(dictionary)
    try:
        return SentencePieceTokenizer(_read(model))
    except DataError as error:
        raise DataError(str(error) if str(model) in str(error) else f"{model}: {error}") from None


def _anatomy(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Anatomy:
    encoder, decoder = (_stack(options, tensors, name) for name in ("encoder", "decoder"))
    encoder = dataclasses.replace(encoder, embedding=one_of(encoder.embedding, decoder.embedding))
    output = one_of(tensors.get("decoder.output_projection.weight", decoder.embedding).float(), decoder.embedding)
    return Anatomy(encoder, decoder, Affine(output), ACTIVATIONS[options.get("activation_fn", "relu")], "layer")


def _stack(options: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> StackMatrices:
    pre_norm = bool(options[f"{name}_normalize_before"])
    if (embedding := tensors.get(f"{name}.embed_tokens.weight")) is None:
        raise ExportError(f"the checkpoint has no parameter {name}.embed_tokens.weight; is it a plain Transformer?")
    width_of(embedding, f"{name}.embed_tokens.weight")
    embedding = embedding.float()
    # fairseq's default where an old checkpoint does not say.
    count = int(options.get("max_source_positions" if name == "encoder" else "max_target_positions") or 1024)
    positions: Tensor | None = None
    if not options.get("no_token_positional_embeddings", False):
        learned = tensors.get(f"{name}.embed_positions.weight")
        first = _PAD + 1  # fairseq counts positions from behind the id of padding
        positions = positions_from(first, count, embedding.shape[1]) if learned is None else learned[first:].float()
    layers = range(options[f"{name}_layers"])
    return StackMatrices(
        pre_norm=pre_norm,
        heads=options[f"{name}_attention_heads"],
        epsilon=NORM_EPSILON,
        layers=tuple(layer_from(tensors, f"{name}.layers.{n}", decoder=name == "decoder") for n in layers),
        final_norm=take(tensors, f"{name}.layer_norm") if pre_norm else None,
        embedding=embedding,
        scale=1.0 if options.get("no_scale_embedding", False) else embedding.shape[1] ** 0.5,
        positions=positions,
    )
