"""Measures of depth while a model trains: how often, on how much, at what price."""

from __future__ import annotations

from pydantic import Field

from ziggurat.config.base import Count, Section, Size

__all__ = ["DiagnosticsConfig"]


class DiagnosticsConfig(Section):
    """Measures of depth, written to `diagnostics/` of the run; training is the same with them and without."""

    every_updates: Count | None = Field(default=100, ge=1)
    """Updates between measurements, besides one before the first update; null: nothing is measured."""
    tokens: Size = Field(default=512, ge=1)
    """Tokens of the training pairs that are measured, on the longer side: the same pairs throughout, no more of them
    than `training.batch.max_tokens` has room for."""
    max_share: float | None = Field(default=0.03, gt=0, lt=1)
    """Most that measuring may take of the time since training was started. A measurement that would exceed it is left
    out, so that short updates have fewer than `every_updates` says; the first after a start is never left out. null:
    none is."""
