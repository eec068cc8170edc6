"""Decoding section: beam search and its limits."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Section

__all__ = ["DecodingConfig", "LengthPenaltyConfig", "MaxLengthConfig"]


class LengthPenaltyConfig(Section):
    """Score of a hypothesis = log-probability / penalty(length); length counts the end-of-sentence token."""

    kind: Literal["none", "gnmt", "power", "lingvo"] = "power"
    """`gnmt`: ((5+len)/6)^alpha (Wu et al. 2016; tensor2tensor, zero). `power`: len^alpha (fairseq).
    `lingvo`: ((5+len)/5)^alpha plus coverage. The same alpha means different things in each."""
    alpha: float = Field(default=0.6, ge=0)
    """Strength; 0 compares raw log-probabilities, larger values favour longer output."""
    coverage: float = Field(default=0.0, ge=0)
    """`lingvo` only: weight beta of the coverage term."""
    length_ratio: float = Field(default=1.0, gt=0)
    """`lingvo` only: expected target/source length ratio of the coverage term."""

    @model_validator(mode="after")
    def _coverage_needs_lingvo(self) -> Self:
        if self.coverage and self.kind != "lingvo":
            raise ValueError("`coverage` belongs to `kind: lingvo`")
        return self


class MaxLengthConfig(Section):
    """Longest output = min(ratio * source tokens + extra, limit), in tokens without end-of-sentence."""

    ratio: float = Field(default=1.0, ge=0)
    """Times the source length."""
    extra: int = Field(default=50, ge=0)
    """Plus this many tokens."""
    limit: int = Field(default=1024, ge=1)
    """And never more than this."""


class DecodingConfig(Section):
    """Search (`translate`, validation)."""

    beam_size: int = Field(default=4, ge=1)
    """Hypotheses per sentence; 1 is greedy search."""
    n_best: int = Field(default=1, ge=1)
    """Translations returned per sentence, at most `beam_size`."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    """How hypotheses of different length are compared."""
    max_length: MaxLengthConfig = MaxLengthConfig()
    """Longest output."""
    min_length: int = Field(default=1, ge=0)
    """Fewest tokens before end-of-sentence is allowed."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Source tokens per batch, padding counted."""
    endings: Literal["candidates", "beam"] = "candidates"
    """Where a hypothesis may end: among all 2 `beam_size` best extensions of a step (`candidates`), or only among the
    `beam_size` best of them (`beam`: fairseq, CTranslate2, transformers; for equal output there)."""
    max_source_pieces: int = Field(default=1024, ge=1)
    """A longer source line is translated in parts of this many pieces and joined; the log says so."""

    @model_validator(mode="after")
    def _n_best_within_beam(self) -> Self:
        if self.n_best > self.beam_size:
            raise ValueError(f"`n_best` ({self.n_best}) is larger than `beam_size` ({self.beam_size})")
        return self
