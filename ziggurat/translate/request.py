"""Requests to a search: its sentences and the settings that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ziggurat.translate.length import LengthPenalty


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
    """64 bits; the sentence's random numbers depend on it, the sample and the position alone."""
    complete: bool = False
    """Whether the prefix ends with a whole word: then one of `RuleOptions.boundary` follows it."""


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules for hypotheses (ziggurat.translate.rules); the defaults rule nothing out."""

    banned: tuple[tuple[int, ...], ...] = ()
    """Phrases that are never generated, each at least one id."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice; 0: no such rule."""
    repetition_penalty: float = 1.0
    """Log-probabilities of tokens that the hypothesis already has are multiplied by this."""
    eos_margin: float | None = None
    """End-of-sentence only where its logit is within this of the best token's."""
    boundary: tuple[int, ...] = ()
    """Tokens that end the word before them, end-of-sentence among them; needed by the next rule and whole prefixes."""
    one_word: bool = False
    """A result is the prefix and one word: end-of-sentence has the probability that the word ends."""
    prune: float | None = None
    """Hypotheses whose log-probability is more than this below the best of the sentence are given up."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options for drawing tokens: first the temperature, then each restriction on the tokens that the last one left."""

    temperature: float = 1.0
    """Log-probabilities are divided by this."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of likeliest tokens whose probabilities add up to this (nucleus; Holtzman et al. 2020)."""
    epsilon: float = 0.0
    """Only tokens at least this likely, or the likeliest (Hewitt et al. 2022)."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings that hold for all sentences; `n_best` must not be larger than `beam_size`."""

    beam_size: int
    """Hypotheses of a sentence; when sampling, its independent samples, as many as `n_best`."""
    n_best: int
    bos: int
    """First token of the decoder's input."""
    eos: int
    """Ends a hypothesis."""
    forbidden: tuple[int, ...] = ()
    """Ids that are never generated: padding, begin-of-sentence, tags."""
    rules: RuleOptions = field(default_factory=RuleOptions)
    pad: int = 0
    """Fills up shorter sources."""
    penalty: LengthPenalty = field(default_factory=LengthPenalty)
    endings: Literal["candidates", "beam", "fairseq"] = "candidates"
    """`candidates`: any candidate of a step may end a hypothesis; `beam`: only the K best may; `fairseq`: as `beam`,
    and K ended hypotheses settle a sentence, and those at the length limit must end."""
    groups: int = 1
    """Groups of diverse beams; divides `beam_size`."""
    strength: float = 0.5
    """Diverse beams: cost of a token for each beam of an earlier group that took it at the same step."""
    sampling: SamplingOptions | None = None
    """If given, tokens are drawn instead of searched for."""
    keep_attention: bool = False
    """Results hold the attention of their tokens."""
    batch_tokens: int = 4096
    """Most source tokens in the search at a time, padding counted."""
    batch_sentences: int = 256
    """Most sentences in the search at a time."""
    device: torch.device | str = "cpu"
    """Where the scorer is."""
    before_step: Callable[[], None] = lambda: None
    """Called before every step; an error that it raises ends the search."""
