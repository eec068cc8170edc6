"""Activation checkpointing: the insides of layers are computed again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ziggurat.config.train import Recompute

_T = TypeVar("_T")

_INSIDE = 16
"""About how many times the size of its input a layer keeps for its backward pass: 13 to 21 (base size, pre-norm)."""


class Run(NamedTuple):
    """Consecutive layers of a stack.

    Attributes:
        layers: their numbers, from 0.
        again: keep what goes into them, and compute their insides again in the backward pass.
    """

    layers: range
    again: bool

    def through(self, function: Callable[..., _T], *inputs: Any) -> _T:
        """Return function(`layers`, *inputs), which must do the same when it is called once more.

        Random numbers are drawn again as they were, so that gradients are the same bit for bit.
        """
        if not self.again:
            return function(self.layers, *inputs)
        # The reentrant form gives no gradient to tensors inside lists and named tuples, which runs of layers return.
        result: _T = checkpoint(function, self.layers, *inputs, use_reentrant=False)
        return result


def runs(layers: int, recompute: Recompute) -> list[Run]:
    """Return the runs of a stack of `layers` layers, bottom first; `recompute` as in ziggurat.config.train.

    Kept between the passes is the input of every run and the inside of one. With runs of r of L layers that is
    L / r + _INSIDE * r inputs, least where both terms are equal: r = sqrt(L / _INSIDE).
    """
    if recompute is None:
        return [Run(range(layers), again=False)]
    if recompute == "segments":
        count = math.ceil(layers / max(1, round(math.sqrt(layers / _INSIDE))))
        cuts = [layers * cut // count for cut in range(count + 1)]
        return [Run(range(first, end), again=True) for first, end in pairwise(cuts)]
    found = []
    for first in range(0, layers, recompute):
        last = first + recompute - 1
        found.append(Run(range(first, min(last, layers)), again=False))
        found.append(Run(range(last, min(last + 1, layers)), again=True))
    return [run for run in found if run.layers]


class Recomputing(nn.Module):
    """A stack whose layers may be recomputed.

    Attributes:
        layers: bottom first.
        recompute: which of them (ziggurat.config.train); None unless training sets it.
    """

    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = None

    def units(self) -> list[nn.Module]:
        """Return the layers that are always called as modules, and so can be gathered one by one (FSDP2)."""
        return list(self.layers)

    def runs(self) -> list[Run]:
        """Return the runs of a pass over all layers; in evaluation nothing is kept, so nothing is computed again."""
        training = self.training and torch.is_grad_enabled()
        return runs(len(self.layers), self.recompute if training else None)
