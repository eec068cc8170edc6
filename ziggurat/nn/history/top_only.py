"""Fusion of all layers at the top of the stack only (Wang et al. 2018; an ablation in Wang et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ziggurat.nn.history.base import Combining, Past, inherited
from ziggurat.nn.history.combination import Combination, joined_logits, start_row

__all__ = ["TopOnly"]


class TopOnly(Combination):
    """Each layer reads the one below; the stack's output is G_L of ziggurat.nn.history.dlcl, before its final norm.

    `weight` is row L of W: [L+1], or [L+1, groups] for several groups. With norms at the sources each output has
    one, which only the combination reads; with norms at the consumers there is one, on the combination.
    """

    def __init__(self, combining: Combining) -> None:
        last = combining.units
        sources = range(0 if combining.normalize_embedding else 1, last + 1)
        normed = sources if combining.norm_at == "sources" else [last]
        super().__init__(combining, start_row(combining, last + 1), normed, last)

    def start(self, x: Tensor) -> Past:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return Past(self._joined((), 0, x), x, 0)

    def push(self, past: Past, y: Tensor) -> Past:
        """Return the state after one more layer, whose output is `y`."""
        return Past(self._joined(past.kept, past.depth + 1, y), y, past.depth + 1)

    def forward(self, past: Past) -> Tensor:
        """Return the latest output."""
        return past.latest

    def output(self, past: Past) -> Tensor:
        """Return the combination of all outputs, [batch, length, d_model]."""
        return self._mixed(self.weight[past.depth + 1 - len(past.kept) :], past.kept, past.depth)

    def table(self) -> Tensor:
        """See History."""
        last = len(self.weight) - 1
        first = max(0, last + 1 - (self.options.window or last + 1))
        table = self._plain_table(last)
        table[last, first:] = self._weights(self.weight[first:])
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return what its parameters start as after growth, given those of the shallower stack.

        Added layers have weight 0, so the output is what it was; with `softmax` they share 5 % of the sum. With a
        window, which moves up with the top, the weights start anew. New norms are copies of the last old one.
        """
        extended = self._extended_norms(old, old_units)
        if not isinstance(self.weight, nn.Parameter):
            return extended
        before = inherited(old, "weight", (old_units + 1, *self.weight.shape[1:]))
        added = len(self.weight) - len(before)
        if self.options.window is not None:
            grown = start_row(self.options, len(self.weight)).to(before)
        elif self.options.softmax:
            grown = joined_logits(before, added)
        else:
            grown = torch.cat([before, before.new_zeros(added, *before.shape[1:])])
        return {**extended, "weight": grown}
