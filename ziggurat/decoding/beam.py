"""The choice of a beam search: the best extensions of all beams of a sentence.

Of all one-token extensions of a sentence's K beams the 2K best by log-probability are candidates. At most K of them
end, so K that go on remain: the best of those are the next beams. A beam of 1 has one candidate: greedy search.

Equal scores rank by age, then by the parent's rank, then by token id, on every device.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ziggurat.decoding.hypotheses import best_tokens

__all__ = ["BestExtensions", "Candidates", "Choice"]


class Candidates(NamedTuple):
    """C extensions of each of N sentences; the total of one that does not exist is -inf."""

    token: Tensor  # [N, C]
    origin: Tensor  # [N, C] the beam that it extends
    log_probability: Tensor  # [N, C] of the token
    total: Tensor  # [N, C] of the whole hypothesis, float64


class Choice(Protocol):
    """How a search goes on from scores: which extensions are candidates, and which of these are beams."""

    def candidates(self, totals: Tensor, log_probabilities: Tensor) -> Candidates:
        """Return the extensions worth looking at, of beams with `totals` [N, K], by next tokens [N, K, V]."""

    def beams(self, going: Tensor) -> Tensor:
        """Return the K candidates [N, K] that go on, by their totals [N, C]: -inf for those that ended."""


class BestExtensions:
    """The ordinary beam search; see above."""

    def __init__(self, beam_size: int) -> None:
        self.beam_size = beam_size

    def candidates(self, totals: Tensor, log_probabilities: Tensor) -> Candidates:
        """Return the 2K best extensions, best first; one, if K is 1."""
        count = 2 * self.beam_size if self.beam_size > 1 else 1
        values, ids = best_tokens(log_probabilities, min(count, log_probabilities.shape[-1]))
        if count == 1:
            return Candidates(ids[:, 0], torch.zeros_like(ids[:, 0]), values[:, 0], totals + values[:, 0])
        extended, order = (totals[..., None] + values).flatten(1).sort(dim=1, descending=True, stable=True)
        order = order[:, :count]
        origin = order.div(ids.shape[-1], rounding_mode="floor")
        return Candidates(
            ids.flatten(1).gather(1, order), origin, values.flatten(1).gather(1, order), extended[:, :count]
        )

    def beams(self, going: Tensor) -> Tensor:
        """Return the K best."""
        return going.sort(dim=1, descending=True, stable=True).indices[:, : self.beam_size]
