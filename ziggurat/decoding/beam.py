"""Beam search: the best extensions of all beams of a sentence.

Of all one-token extensions of a sentence's K beams the 2K best by log-probability are candidates. At most K of them
end, so K that go on remain: the best of those are the next beams. A beam of 1 has one candidate: greedy search.

Equal scores rank by age, then by the parent's rank, then by token id, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.decoding.choice import Candidates, Choice
from ziggurat.decoding.hypotheses import best_tokens

__all__ = ["BeamChoice", "best_extensions"]


class BeamChoice(Choice):
    """The ordinary beam search of `beam_size` beams; see above."""

    def __init__(self, beam_size: int) -> None:
        super().__init__(beam_size, 2 * beam_size if beam_size > 1 else 1)

    def candidates(self, totals: Tensor, log_probabilities: Tensor, position: Tensor) -> Candidates:
        """Return the 2K best extensions, best first; one, if K is 1."""
        return best_extensions(totals, log_probabilities, self.width)


def best_extensions(totals: Tensor, log_probabilities: Tensor, count: int) -> Candidates:
    """Return the `count` best extensions, best first, of beams with `totals` [N, K] by next tokens [N, K, V]."""
    values, ids = best_tokens(log_probabilities, min(count, log_probabilities.shape[-1]))
    if count == 1 and totals.shape[1] == 1:
        return Candidates(ids[:, 0], torch.zeros_like(ids[:, 0]), values[:, 0], totals + values[:, 0])
    extended, order = (totals[..., None] + values).flatten(1).sort(dim=1, descending=True, stable=True)
    order = order[:, :count]
    origin = order.div(ids.shape[-1], rounding_mode="floor")
    return Candidates(ids.flatten(1).gather(1, order), origin, values.flatten(1).gather(1, order), extended[:, :count])
