"""Export of a plain Transformer to a directory for CTranslate2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.config.model import ModelConfig
from ziggurat.data.shortlist import ShortlistTable
from ziggurat.data.subword import Tokenizer
from ziggurat.exchange.anatomy import (
    Affine,
    Anatomy,
    AttentionMatrices,
    LayerMatrices,
    StackMatrices,
    with_epsilon,
    with_head_first,
)
from ziggurat.model.seq2seq import AlignmentHead
from ziggurat.system.files import write_atomically
from ziggurat.translate.ctranslate2 import ctranslate2_module

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
"""QUANTIZATIONS are the types other than fp32 in which CTranslate2 can store matrices."""


def ctranslate2_reasons(config: ModelConfig) -> Iterator[str]:
    """Yield the reasons why CTranslate2 cannot run a plain Transformer of this configuration."""
    relative = "relative" in (config.encoder.attention, config.decoder.attention)
    if relative and config.embedding.positions != "none":
        yield (
            f"`embedding.positions: {config.embedding.positions}` with `attention: relative`: CTranslate2 leaves out "
            "added positions if attention is relative (train with `embedding.positions: none`)"
        )


def write_ctranslate2(
    folder: Path,
    anatomy: Anatomy,
    tokenizers: Sequence[Tokenizer],
    positions: int,
    quantization: str | None = None,
    *,
    aligned: AlignmentHead | None = None,
) -> None:
    """Write `model.bin`, `config.json` and the vocabularies into `folder`.

    CTranslate2 has a single epsilon for all norms; an encoder with a different one is rescaled (`with_epsilon`).
    Sinusoids are written as tables, because CTranslate2 computes its own differently.

    Args:
        folder: an existing folder.
        anatomy: the model's matrices.
        tokenizers: tokenizers of source and target.
        positions: rows of the position tables, for tables that the model does not already have.
        quantization: one of QUANTIZATIONS; None: fp32.
        aligned: the attention head that CTranslate2's `return_attention` outputs; None: the mean over the last layer's
            heads.

    Raises ConfigError if ctranslate2 is not installed.
    """
    transformer = _specs().transformer_spec
    aligned = aligned or AlignmentHead()
    encoder = with_epsilon(anatomy.encoder, anatomy.decoder.epsilon)
    decoder = with_head_first(anatomy.decoder, aligned)
    source = _stack_spec(transformer.TransformerEncoderSpec, encoder, anatomy, positions)
    target = _stack_spec(
        transformer.TransformerDecoderSpec,
        decoder,
        anatomy,
        positions,
        alignment_layer=aligned.layer,
        # CTranslate2 takes the mean over the first heads of a single layer.
        alignment_heads=decoder.heads if aligned.head is None else 1,
    )
    _fill(target.projection, anatomy.output)
    target.start_from_zero_embedding = decoder.zero_start
    spec = transformer.TransformerSpec(source, target)
    _register(spec, tokenizers, anatomy)
    spec.config.layer_norm_epsilon = decoder.epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


def write_shortlist_map(path: Path, table: ShortlistTable, tokenizers: Sequence[Tokenizer]) -> None:
    """Write a shortlist in CTranslate2's form: source piece, tab, allowed target pieces; the first line is `always`.

    CTranslate2 handles a whole batch at a time: a piece that one sentence allows is allowed in all of them.
    """
    source, target = tokenizers
    # Pieces that no translation contains: CTranslate2 cannot forbid them when a list is given, but they can be left off
    # it.
    never = [target.pad, target.bos, *target.tags.values(), target.size]

    def allowed(row: NDArray[np.int32]) -> str:
        return " ".join(target.pieces(row[~np.isin(row, never)].tolist()))

    # It does not look up the end-of-sentence that it appends to every source itself.
    lines = [f"\t{allowed(np.union1d(table.always, table.candidates[source.eos]))}"]
    lines += [
        f"{piece}\t{allowed(row)}"
        for piece, row in zip(source.pieces(range(source.size)), table.candidates, strict=True)
    ]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())


def _specs() -> ModuleType:
    ctranslate2_module()  # raises the error if it is missing
    from ctranslate2 import specs

    module: ModuleType = specs
    return module


def _register(spec: Any, tokenizers: Sequence[Tokenizer], anatomy: Anatomy) -> None:
    """Register the vocabularies; matrix rows beyond the tokens get names, which must be distinct."""
    source, target = tokenizers
    for tokenizer, rows, register in (
        (source, anatomy.encoder.embedding.shape[0], spec.register_source_vocabulary),
        (target, anatomy.decoder.embedding.shape[0], spec.register_target_vocabulary),
    ):
        register([*tokenizer.pieces(range(tokenizer.size)), *(f"<unused{n}>" for n in range(tokenizer.size, rows))])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = target.pieces(
        [target.unk, target.bos, target.eos]
    )
    spec.config.decoder_start_token = spec.config.bos_token
    # Ziggurat's sources end with end-of-sentence, which CTranslate2 is told to append itself.
    spec.config.add_source_eos = True


def _stack_spec(kind: Any, stack: StackMatrices, anatomy: Anatomy, positions: int, **more: int) -> Any:
    """Return the specification `kind` of a stack, filled with its matrices; `more` are arguments of this kind alone."""
    activations = _specs().common_spec.Activation
    side = kind(
        len(stack.layers),
        stack.heads,
        pre_norm=stack.pre_norm,
        activation={
            "relu": activations.RELU,
            "gelu": activations.GELU,
            "silu": activations.SWISH,
            "swiglu": activations.SWISH,
        }[anatomy.activation],
        relative_position=stack.layers[0].self_attn.key_table is not None,
        ffn_glu=anatomy.activation == "swiglu",
        rms_norm=anatomy.norm == "rms",
        **more,
    )
    embedding = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
    embedding.weight = _array(stack.embedding)
    side.scale_embeddings = np.dtype("float32").type(stack.scale) if stack.scale != 1 else False
    if stack.layers[0].self_attn.key_table is None:
        # CTranslate2 always adds positions, even if they are zeros.
        side.position_encodings.encodings = _array(stack.position_table(positions))
    if stack.final_norm is not None:
        _fill_norm(side.layer_norm, stack.final_norm)
    for spec, layer in zip(side.layer, stack.layers, strict=True):
        _fill_layer(spec, layer)
    return side


def _fill_layer(spec: Any, layer: LayerMatrices) -> None:
    own = layer.self_attn
    _fill(spec.self_attention.linear[0], Affine.joined(own.query, own.key, own.value))
    _fill_out(spec.self_attention, own)
    if own.key_table is not None:
        # CTranslate2 always expects a table of values; zeros add nothing.
        zeros = torch.zeros_like(own.key_table)
        spec.self_attention.relative_position_keys = _array(own.key_table)
        spec.self_attention.relative_position_values = _array(zeros if own.value_table is None else own.value_table)
    if layer.cross_attn is not None:
        cross = layer.cross_attn
        _fill(spec.attention.linear[0], cross.query)
        _fill(spec.attention.linear[1], Affine.joined(cross.key, cross.value))
        _fill_out(spec.attention, cross)
    if layer.gate is None:
        _fill(spec.ffn.linear_0, layer.ffn_in)
    else:
        # The non-linearity follows `linear_0`; `linear_0_noact` has none.
        _fill(spec.ffn.linear_0, layer.gate)
        _fill(spec.ffn.linear_0_noact, layer.ffn_in)
    _fill(spec.ffn.linear_1, layer.ffn_out)
    _fill_norm(spec.ffn.layer_norm, layer.ffn_norm)


def _fill_out(spec: Any, attention: AttentionMatrices) -> None:
    _fill(spec.linear[-1], attention.out)
    _fill_norm(spec.layer_norm, attention.norm)


def _fill(spec: Any, affine: Affine) -> None:
    spec.weight = _array(affine.weight)
    if affine.bias is not None:
        spec.bias = _array(affine.bias)


def _fill_norm(spec: Any, norm: Affine) -> None:
    spec.gamma = _array(norm.weight)
    if norm.bias is not None:
        spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy().copy()  # CTranslate2 quantises in place
