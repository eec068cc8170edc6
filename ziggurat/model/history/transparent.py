"""Transparent attention: each reader's memory is its own mixture of all encoder layers (Bapna et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.history.base import inherited
from ziggurat.model.history.kinds import joined_logits, weighted_sum
from ziggurat.model.roles import Role, Slot


class Transparent(nn.Module):
    """z_j = sum_i s_ij h^i, what reader j attends to, with s_j = softmax(dropout(w_j + 1/sources)).

    As in the released code (lingvo), w starts at 0: uniform mixtures. The constant cancels in the softmax but not
    under dropout, which sets logits to 0: a dropped source still has about an average weight.

    `weight` is w, [readers, sources].

    Args:
        sources: number of encoder states h^i, the embedding included where it is one of them.
        readers: number of mixtures: one per attention to the memory.
        dropout: probability of dropping a logit in training; exact, not rounded to 1/256.
    """

    def __init__(self, sources: int, readers: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(readers, sources))
        self.p = dropout

    def mixtures(self) -> Tensor:
        """Return s, [readers, sources]; each row sums to 1."""
        return F.dropout(self.weight + 1 / self.weight.shape[1], self.p, self.training).softmax(-1)

    def forward(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one [batch, length, d_model] per reader for the `sources` encoder states, each of that shape."""
        return tuple(weighted_sum(weights, states) for weights in self.mixtures().unbind())

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return its parameters for an encoder that has grown from `old_units` layers, given those it had.

        Logits that were trained stay. The added sources, which are the last ones, start with 5 % of each mixture
        together, so that every memory is nearly what it was. Raises ConfigError when `old` is of other readers.
        """
        readers, sources = self.weight.shape
        known = old["weight"].shape[1] if "weight" in old else sources
        before = inherited(old, "weight", (readers, known))
        return {"weight": joined_logits(before.T, sources - known).T.contiguous()}

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield Slot(self.weight, Role.WIRING, "weight")
