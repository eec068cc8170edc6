"""Which models are plain Transformers, and those that become one exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ziggurat.config.model import ModelConfig
from ziggurat.models.build import assemble
from ziggurat.models.directory import weights
from ziggurat.models.fold import NotPlainError, fold

__all__ = ["fold_to_plain", "not_plain", "unlike_plain"]


def not_plain(config: ModelConfig, *, scaled_input: bool = False) -> list[str]:
    """Return all reasons why no model of this configuration is, or folds into, a plain Transformer.

    With `scaled_input` each stack's input may have a factor per channel: other formats hold embeddings of their own for
    every stack.
    """
    if config.family == "rnmt":
        return ["`family: rnmt` is no Transformer"]
    return [*_shape(config), *_unfoldable(config, {} if scaled_input else None)]


def unlike_plain(config: ModelConfig) -> Iterator[str]:
    """Yield which choices inside attention keep a plain Transformer from having the matrices that others know."""
    if config.attention.qk_norm != "none":
        yield f"`attention.qk_norm: {config.attention.qk_norm}`: queries and keys go unnormalised there"
    if config.attention.query_scale:
        yield "`attention.query_scale`: queries have no scale per dimension there"
    if config.embedding.positions == "rotary":
        yield "`embedding.positions: rotary`: positions are added to embeddings there"


def fold_to_plain(
    config: ModelConfig, tensors: Mapping[str, Tensor], entries: dict[str, Tensor] | None = None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of the plain model; arguments as in ziggurat.models.fold.fold.

    Raises NotPlainError with all reasons.
    """
    if config.family == "rnmt":
        raise NotPlainError(not_plain(config))
    reasons = list(_shape(config))
    try:
        folded = fold(config, tensors, entries)
    except NotPlainError as error:
        reasons += error.reasons
    if reasons:
        raise NotPlainError(reasons)
    return folded


def _shape(config: ModelConfig) -> Iterator[str]:
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.history != "latest":
            yield f"`{side}.history: {stack.history}`: in a plain Transformer a layer reads the one below"
    if config.memory != "top":
        yield f"`memory: {config.memory}`: in a plain Transformer the decoder attends to the encoder's output"
    if config.decoder.attention not in ("full", "relative"):
        yield f"`decoder.attention: {config.decoder.attention}` is no attention of the plain Transformer"


def _unfoldable(config: ModelConfig, entries: dict[str, Tensor] | None) -> list[str]:
    """Return what `fold` says to a narrow model of the same structure, its weights as training may leave them."""
    values = config.model_dump()
    values |= {"preset": None, "d_model": 4, "d_ff": 4, "heads": 1, "dropout": {}}
    values["encoder"] |= {"d_model": None, "d_ff": None, "heads": None}
    values["combination"] |= {"groups": 1}
    values["embedding"] |= {"max_positions": 1}
    narrow = ModelConfig.model_validate(values)
    tensors = weights(assemble(narrow, 4, 4))
    generator = torch.Generator().manual_seed(0)
    first = dict.fromkeys(("encoder", "decoder"), True)
    for name, tensor in tensors.items():
        noise = 1.5 + 0.1 * torch.randn(tensor.shape, generator=generator)
        stack = name.split(".")[0]
        if name.endswith("_residual.skip") and not config.wiring.omega_trainable:
            if config.init.omega != "profiled":
                noise = torch.full(tensor.shape, 1.0 if config.init.omega == "one" else 1.5)
            elif first[stack]:
                noise = torch.ones(tensor.shape)
            first[stack] = False
        tensor.copy_(noise)
    try:
        fold(narrow, tensors, entries)
    except NotPlainError as error:
        return error.reasons
    return []
