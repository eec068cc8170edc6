"""Dynamic linear combination of layers: each layer reads a weighted sum of all below (Wang et al. 2019)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ziggurat.nn.history.base import Combining, History, Past, inherited
from ziggurat.nn.history.combination import Combination, start_row

__all__ = ["Dlcl", "average", "dense"]


class Dlcl(Combination):
    """x_{l+1} = G_l(y_0, ..., y_l), and the stack's output is G_L (Wang et al. 2019, section 4).

    With norms at the sources (pre-norm) G_l = sum_k W[l, k] LN_k(y_k): one norm per output, applied when the output
    is made, whoever reads it. With norms at the consumers (post-norm) G_l = LN_l(sum_k W[l, k] y_k). As in the
    released code, y_0 (sources) or combination 0 (consumers) has a norm only with `normalize_embedding`, so there
    are L of them. Dropout comes last.

    `weight` is W, [L+1, L+1], or [L+1, L+1, groups] for several groups: group i weighs channels i d_model/groups and
    on (in the released code channel c belongs to group c mod groups). Row l serves G_l. Entries above the diagonal
    and those left of the window are never read (the released code keeps to the window in its initial weights and
    under the softmax only). Sums are formed in the stream's dtype, whatever that of W is.
    """

    def __init__(self, combining: Combining) -> None:
        normed = range(0 if combining.normalize_embedding else 1, combining.units + 1)
        super().__init__(combining, _start(combining), normed, combining.units)

    def start(self, x: Tensor) -> Past:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return Past(self._joined((), 0, x), x, 0)

    def push(self, past: Past, y: Tensor) -> Past:
        """Return the state after one more layer, whose output is `y`."""
        return Past(self._joined(past.kept, past.depth + 1, y), y, past.depth + 1)

    def forward(self, past: Past) -> Tensor:
        """Return G_l for l = `past.depth`, [batch, length, d_model]."""
        return self._combined(past.depth, past.kept)

    def _combined(self, row: int, kept: tuple[Tensor, ...]) -> Tensor:
        return self._mixed(self.weight[row, row + 1 - len(kept) : row + 1], kept, row)

    def table(self) -> Tensor:
        """See History."""
        table = self._plain_table(len(self.weight) - 1)
        for row in range(len(table)):
            first = max(0, row + 1 - (self.options.window or len(table)))
            table[row, first : row + 1] = self._weights(self.weight[row, first : row + 1])
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return what its parameters start as after growth (Li et al. 2020), given those of the shallower stack.

        Its rows of W and its norms stay, so what was its output is what the first added layer reads. New rows are
        those of a new model: uniform where `start` is `average`. New norms are copies of its last one.
        """
        rows = self._rows(old_units)
        extended = self._extended_norms(old, rows - 1)
        if isinstance(self.weight, nn.Parameter):
            grown = _start(self.options).to(self.weight)
            grown[:rows, :rows] = inherited(old, "weight", (rows, rows, *grown.shape[2:]))
            extended["weight"] = grown
        return extended

    def _rows(self, units: int) -> int:
        """Return the number of combinations in a stack of `units` layers."""
        return units + 1


def _start(combining: Combining) -> Tensor:
    """Return the initial W."""
    rows = combining.units + 1
    weights = torch.zeros(rows, rows, *([combining.groups] if combining.groups > 1 else []))
    for row in range(rows):
        weights[row, : row + 1] = start_row(combining, row + 1)
    return weights


def dense(combining: Combining) -> History:
    """Return a Dlcl whose weights are all 1 for good: dense residual connections (Wang et al. 2019, figure 2b)."""
    return Dlcl(dataclasses.replace(combining, start="one", learnable=False, softmax=False))


def average(combining: Combining) -> History:
    """Return a Dlcl whose rows are averages for good (Wang et al. 2019, table 6)."""
    return Dlcl(dataclasses.replace(combining, start="average", learnable=False, softmax=False))
