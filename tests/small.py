"""Small models: their configuration, parameters moved away from initial values, and a checkpoint's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ziggurat.config import ModelConfig
from ziggurat.model.run_folder import CHECKPOINT_FORMAT
from ziggurat.model.seq2seq import Seq2Seq


def merged(defaults: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` with `choices`; sections are merged key by key, with None as an empty section."""
    sections = {k: {**(defaults.get(k) or {}), **v} if isinstance(v, dict) else v for k, v in choices.items()}
    return {**defaults, **sections}


def small_config(encoder_layers: int, decoder_layers: int, **choices: Any) -> ModelConfig:
    """Return a configuration of width 8 with two heads, with `choices` merged in."""
    layers = {"encoder": {"layers": encoder_layers}, "decoder": {"layers": decoder_layers}}
    return ModelConfig.model_validate(merged({"d_model": 8, "d_ff": 12, "heads": 2, **layers}, choices))


def checkpoint_meta(**changes: Any) -> dict[str, Any]:
    """Return the content of a checkpoint's `meta.json`, empty except for `changes`."""
    depth = {"encoder_layers": 1, "decoder_layers": 1}
    rest = {"progress": {}, "store": "", "corpora": [], "checksums": {"model.safetensors": ""}, "configuration": None}
    return {"format": CHECKPOINT_FORMAT, **depth, **rest, **changes}


@torch.no_grad()
def moved(model: Seq2Seq, scale: float, seed: int = 4) -> Seq2Seq:
    """Return `model` with noise of this deviation on every parameter, so that none has its neutral initial value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
