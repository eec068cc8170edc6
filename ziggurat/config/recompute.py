"""Activation checkpointing: which layers are computed again in the backward pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ziggurat.config.base import Layers, Section

__all__ = ["Recompute", "RecomputeConfig"]

Recompute = Annotated[Layers, Field(ge=1)] | Literal["segments"] | None


class RecomputeConfig(Section):
    """Activation checkpointing: less memory for at most one more forward pass; gradients stay the same bit for bit."""

    encoder: Recompute = None
    """Of the encoder: null keeps everything; k keeps of every k-th layer its input alone and computes the rest again in
    the backward pass, 1 of all layers; `segments` does so for runs of layers, about sqrt(layers) / 4 each, so that
    memory grows with the square root of depth (Chen et al. 2016)."""
    decoder: Recompute = None
    """The same of the decoder."""
    compact: bool = False
    """Give freed memory back to the system at once (CPU, glibc): resident is then what tensors need, where recomputed
    layers otherwise leave up to three times as much; but an update takes up to half as long again."""
