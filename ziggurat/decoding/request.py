"""What a search is asked for: the sentences, and settings that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ziggurat.decoding.length import LengthPenalty

__all__ = ["Limits", "Sampling", "SearchSettings", "Sentence"]


@dataclass(frozen=True)
class Sentence:
    """One sentence to be translated."""

    source: Sequence[int]
    """Ids as the model reads them, end-of-sentence included; at least one."""
    max_length: int
    """Most tokens of a result, end-of-sentence not counted."""
    min_length: int = 0
    """Fewest tokens before end-of-sentence; a smaller `max_length` wins."""
    prefix: tuple[int, ...] = ()
    """Every result begins with these ids; at most `max_length` of them."""
    constraints: tuple[tuple[int, ...], ...] = ()
    """Phrases that every result must hold, each at least one id."""
    key: int = 0
    """Random numbers of this sentence are a function of it (and of the sample and the position) alone; 64 bits."""


@dataclass(frozen=True)
class Limits:
    """What hypotheses may not hold, and which are given up; the defaults rule nothing out."""

    banned: tuple[tuple[int, ...], ...] = ()
    """Phrases that are never generated, each at least one id."""
    no_repeat_ngram_size: int = 0
    """No sequence of so many tokens occurs twice; 0: any may."""
    repetition_penalty: float = 1.0
    """Log-probabilities of tokens that the hypothesis holds are multiplied by this."""
    eos_margin: float | None = None
    """End-of-sentence only where its logit is within this of the best token's."""
    prune: float | None = None
    """Hypotheses whose log-probability is more than this below the best of the sentence are given up."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature first, then each restriction on what the one before left."""

    temperature: float = 1.0
    """Log-probabilities are divided by it."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens whose probabilities add up to this (nucleus; Holtzman et al. 2020)."""
    epsilon: float = 0.0
    """Only tokens at least this likely, or the likeliest (Hewitt et al. 2022)."""


@dataclass(frozen=True)
class SearchSettings:
    """What holds for all sentences; `n_best` must not be larger than `beam_size`."""

    beam_size: int
    """Hypotheses of a sentence; when sampling, independent samples, and the same as `n_best`."""
    n_best: int
    bos: int
    """First token of the decoder's input."""
    eos: int
    """Ends a hypothesis."""
    forbidden: tuple[int, ...] = ()
    """Ids that are never generated: padding, begin-of-sentence, tags."""
    limits: Limits = field(default_factory=Limits)
    """Further rules."""
    pad: int = 0
    """Fills up shorter sources."""
    penalty: LengthPenalty = field(default_factory=LengthPenalty)
    endings: Literal["candidates", "beam", "fairseq"] = "candidates"
    """Of a step's candidates all may end a hypothesis, or only the K best of them; `fairseq`: and K ended hypotheses
    settle a sentence, and those at the length limit must end."""
    groups: int = 1
    """Groups of diverse beams; divides `beam_size`."""
    strength: float = 0.5
    """Diverse beams: what a token costs for each earlier group that took it at the same step."""
    sampling: Sampling | None = None
    """Draw tokens in place of searching."""
    keep_attention: bool = False
    """Results hold the attention of their tokens."""
    batch_tokens: int = 4096
    """Most source tokens in the search at a time, padding counted."""
    batch_sentences: int = 256
    """Most sentences in the search at a time."""
    device: torch.device | str = "cpu"
    """Where the scorer is."""
    before_step: Callable[[], None] = lambda: None
    """Called before every step; what it raises ends the search."""
