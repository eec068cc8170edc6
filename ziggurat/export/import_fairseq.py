"""Reads plain Transformers of fairseq. Its checkpoints are pickles (ziggurat.export.pickled).

Options are kept in an `argparse.Namespace`, which holds values and does nothing; it is the only class let in.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.errors import DataError, ExportError
from ziggurat.export.anatomy import Affine, Anatomy, Stack
from ziggurat.export.bart_names import layer_from, take
from ziggurat.export.imported import ACTIVATIONS, Control, ForeignModel, positions_from
from ziggurat.export.pickled import load_pickled

__all__ = ["read_fairseq"]

_BOS, _PAD, _EOS, _UNK = range(4)  # of every fairseq dictionary; the tokens of dict.txt follow
_REFUSED: dict[str, Any] = {
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "character_embeddings": False,
    "cross_self_attention": False,
    "layernorm_embedding": False,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
}
"""Options that make it no plain Transformer, with the value that does not."""

_UNREAD = re.compile(
    r"(en|de)coder\.version|\w+\.embed_positions\._float_tensor|decoder\.output_projection\.weight"
    # copies that fairseq's layers keep for torch's fused inference, never trained
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)


def read_fairseq(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a checkpoint of the architecture `transformer` (and those named transformer_...), with a warning.

    Args:
        path: checkpoint (.pt).
        dictionaries: dict.XX.txt of source and target, one where they are the same.
        models: SentencePiece models of source and target, likewise; none: text comes segmented.
        languages: codes of source and target; None: those of the checkpoint.

    Raises ExportError with all reasons why the model is no plain Transformer; DataError: files that cannot be read.
    """
    if not dictionaries:
        raise DataError(f"{path}: name its dictionaries, dict.XX.txt of source and target, by `--dictionary`")
    options, tensors = _load(path)
    if reasons := _reasons(options, tensors):
        raise ExportError(f"{path}: not a plain Transformer that can be taken in: {'; '.join(reasons)}")
    contents = [_read(file) for file in dictionaries]
    ids = [_ids(content) for content in (contents[0], contents[-1])]
    joint = contents[0] == contents[-1] and len(models) < 2
    source = _tokenizer(contents[0], models[0] if models else None)
    target = source if joint else _tokenizer(contents[-1], models[-1] if models else None)
    anatomy = _anatomy(options, tensors)
    for side, stack, known in (("source", anatomy.encoder, ids[0]), ("target", anatomy.decoder, ids[1])):
        if max(known.values()) >= stack.embedding.shape[0]:
            raise ExportError(
                f"{side}: the dictionary has {max(known.values()) + 1:,} tokens, the model {stack.embedding.shape[0]:,}"
            )
    named = (str(options.get("source_lang") or "source"), str(options.get("target_lang") or "target"))
    return ForeignModel(
        kind=f"fairseq {options.get('arch') or options.get('_name')}",
        anatomy=anatomy,
        scaled=not options.get("no_scale_embedding", False),
        source_ids=ids[0],
        target_ids=ids[1],
        control=Control(_PAD, _UNK, _EOS, _EOS),
        source=source,
        target=target,
        languages=languages or named,
    )


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of the model and its parameters. Raises DataError."""
    content = load_pickled(path, "weights and options", classes=[argparse.Namespace])
    try:
        configured = content.get("cfg") or {}
        options = content.get("args") or configured["model"]
        tensors = content["model"]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a checkpoint of fairseq ({type(error).__name__}: {error})") from None
    return (options if isinstance(options, dict) else vars(options)), tensors


def _reasons(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return all reasons why the checkpoint is not taken in."""
    name = str(options.get("arch") or options.get("_name"))
    reasons = [] if name.startswith("transformer") else [f"`arch: {name}` is not transformer..."]
    reasons += [
        f"`{key}: {options[key]}`" for key, plain in _REFUSED.items() if options.get(key, plain) not in (plain, 0, None)
    ]
    if options.get("activation_fn", "relu") not in ACTIVATIONS:
        reasons.append(f"`activation_fn: {options['activation_fn']}`; known are {', '.join(ACTIVATIONS)}")
    width = options["decoder_embed_dim"]
    for key in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if options.get(key, width) != width:
            reasons.append(f"`{key}: {options[key]}` is not the decoder's width {width}")
    known = re.compile(
        r"(en|de)coder\.(embed_tokens|embed_positions|layer_norm)\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.[qkv]_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.out_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.((self_attn|encoder_attn|final)_layer_norm|fc1|fc2)\.(weight|bias)"
    )
    unknown = [key for key in tensors if not known.fullmatch(key) and not _UNREAD.fullmatch(key)]
    if unknown:
        reasons.append(f"parameter {unknown[0]} is unknown ({len(unknown)} in all)")
    return reasons


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _ids(dictionary: bytes) -> dict[str, int]:
    """Return the ids by token: four control symbols, then the lines of the file, as fairseq counts."""
    ids = {"<s>": _BOS, "<pad>": _PAD, "</s>": _EOS, "<unk>": _UNK}
    for line in dictionary.decode("utf-8").splitlines():
        ids.setdefault(line.rsplit(" ", 1)[0], len(ids))
    return ids


def _tokenizer(dictionary: bytes, model: Path | None) -> Tokenizer:
    return VocabularyTokenizer(dictionary) if model is None else SentencePieceTokenizer(_read(model))


def _anatomy(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Anatomy:
    encoder, decoder = (_stack(options, tensors, name) for name in ("encoder", "decoder"))
    output = tensors.get("decoder.output_projection.weight", decoder.embedding).float()
    return Anatomy(encoder, decoder, Affine(output), ACTIVATIONS[options.get("activation_fn", "relu")], "layer")


def _stack(options: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Stack:
    pre_norm = bool(options[f"{name}_normalize_before"])
    embedding = tensors[f"{name}.embed_tokens.weight"].float()
    count = int(options.get("max_source_positions" if name == "encoder" else "max_target_positions") or 1024)
    positions: Tensor | None = None
    if not options.get("no_token_positional_embeddings", False):
        learned = tensors.get(f"{name}.embed_positions.weight")
        first = _PAD + 1  # position 0 and those below are padding's
        positions = positions_from(first, count, embedding.shape[1]) if learned is None else learned[first:].float()
    layers = range(options[f"{name}_layers"])
    return Stack(
        pre_norm=pre_norm,
        heads=options[f"{name}_attention_heads"],
        epsilon=1e-5,
        layers=tuple(layer_from(tensors, f"{name}.layers.{n}", decoder=name == "decoder") for n in layers),
        final_norm=take(tensors, f"{name}.layer_norm") if pre_norm else None,
        embedding=embedding,
        scale=1.0 if options.get("no_scale_embedding", False) else embedding.shape[1] ** 0.5,
        positions=positions,
    )
