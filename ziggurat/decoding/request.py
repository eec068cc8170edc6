"""What a search is asked for: the sentences, and settings that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ziggurat.decoding.length import LengthPenalty

__all__ = ["SearchSettings", "Sentence"]


@dataclass(frozen=True)
class Sentence:
    """One sentence to be translated."""

    source: Sequence[int]
    """Ids as the model reads them, end-of-sentence included; at least one."""
    max_length: int
    """Most tokens of a result, end-of-sentence not counted."""
    min_length: int = 0
    """Fewest tokens before end-of-sentence; a smaller `max_length` wins."""


@dataclass(frozen=True)
class SearchSettings:
    """What holds for all sentences; `n_best` must not be larger than `beam_size`."""

    beam_size: int
    n_best: int
    bos: int
    """First token of the decoder's input."""
    eos: int
    """Ends a hypothesis."""
    forbidden: tuple[int, ...] = ()
    """Ids that are never generated: padding, begin-of-sentence, tags."""
    pad: int = 0
    """Fills up shorter sources."""
    penalty: LengthPenalty = field(default_factory=LengthPenalty)
    batch_tokens: int = 4096
    """Most source tokens in the search at a time, padding counted."""
    batch_sentences: int = 256
    """Most sentences in the search at a time."""
    device: torch.device | str = "cpu"
    """Where the scorer is."""
    before_step: Callable[[], None] = lambda: None
    """Called before every step; what it raises ends the search."""
