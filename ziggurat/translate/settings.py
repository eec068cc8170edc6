"""Input of a search: the sentences, and the settings of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ziggurat.config import DecodingConfig
from ziggurat.translate.hypotheses import LengthPenalty


@dataclass(frozen=True)
class Sentence:
    """One sentence to be translated."""

    source: Sequence[int]
    """Ids in the form the model reads, end-of-sentence included; at least one."""
    max_length: int
    """Maximum number of tokens of a result, end-of-sentence not counted."""
    min_length: int = 0
    """Minimum number of tokens before end-of-sentence; a smaller `max_length` wins."""
    prefix: tuple[int, ...] = ()
    """Every result starts with these ids; at most `max_length` of them."""
    constraints: tuple[tuple[int, ...], ...] = ()
    """Phrases that every result must contain, each at least one id."""
    key: int = 0
    """64 bits; the sentence's random numbers depend only on it, the sample and the position."""
    complete: bool = False
    """True if the prefix ends with a whole word, so that one of `RuleOptions.boundary` must follow."""


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules for hypotheses (ziggurat.translate.rules); the defaults rule nothing out."""

    banned: tuple[tuple[int, ...], ...] = ()
    """Phrases that are never generated, each at least one id."""
    no_repeat_ngram_size: int = 0
    """Length of token sequences that may not occur twice; 0: no such rule."""
    repetition_penalty: float = 1.0
    """Factor on the log-probabilities of tokens that the hypothesis already has."""
    eos_margin: float | None = None
    """Largest distance of end-of-sentence's logit below the best token's at which it is allowed."""
    boundary: tuple[int, ...] = ()
    """Tokens that end the word before them, including end-of-sentence; needed by the next rule and whole prefixes."""
    one_word: bool = False
    """A result is the prefix and one word; end-of-sentence has the probability that the word ends."""
    prune: float | None = None
    """Hypotheses whose log-probability is lower than the sentence's best by more than this are dropped."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings that hold for all sentences; `n_best` must not be larger than `beam_size`."""

    beam_size: int
    """Hypotheses per sentence; when sampling, the number of independent samples, equal to `n_best`."""
    n_best: int
    bos: int
    """First token of the decoder's input."""
    eos: int
    """Id that ends a hypothesis."""
    forbidden: tuple[int, ...] = ()
    """Ids that are never generated: padding, begin-of-sentence, tags."""
    rules: RuleOptions = field(default_factory=RuleOptions)
    pad: int = 0
    """Id that pads shorter sources."""
    penalty: LengthPenalty = field(default_factory=LengthPenalty)
    endings: Literal["candidates", "beam", "fairseq", "marian"] = "candidates"
    """`candidates`: any candidate of a step may end a hypothesis; `beam`: only the K best may; `fairseq`: as `beam`,
    but K ended hypotheses settle a sentence, and those at the length limit must end; `marian`: as `beam`, but each
    ended hypothesis narrows the beam by one, and those at the length limit are results without an end."""
    groups: int = 1
    """Groups of diverse beams; divides `beam_size`."""
    strength: float = 0.5
    """Diverse beams: penalty on a token for each beam of an earlier group that took it at the same step."""
    sampling: DecodingConfig | None = None
    """If given, tokens are sampled: the temperature is applied, then `top_k`, `top_p` and `epsilon` in turn."""
    keep_attention: bool = False
    """True if results contain the attention of their tokens."""
    batch_tokens: int = 4096
    """Maximum number of source tokens in the search at a time, including padding."""
    batch_sentences: int = 256
    """Maximum number of sentences in the search at a time."""
    device: torch.device | str = "cpu"
    """The scorer's device."""
    before_step: Callable[[], None] = lambda: None
    """Called before every step; an error that it raises ends the search."""
