"""Weighted sums of layer outputs, and the base of the histories that form them.

It is apart from ziggurat.model.history.kinds, which reads like the table of docs/depth.md: here is what all kinds
share, the sum with its own backward pass, and ziggurat.model.history.transparent forms its mixtures by it as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ziggurat.model.history.base import History, HistoryOptions, HistoryState, inherited
from ziggurat.model.roles import Role, Slot

SHARE_OF_ZEROS = 0.05
"""The share under a softmax of the sources that would have weight 0 without it: no finite logit gives 0, and one that
gives next to nothing hardly learns."""


class _WeightedSum(torch.autograd.Function):
    """sum_k w_k y_k, added up in one buffer.

    Only the y_k are saved for the backward pass, and the layers that made them hold these anyway. The two other ways
    need memory for all layers once more: a chain of torch.addcmul builds each product that w_k's gradient sums, and a
    stack of the outputs copies them.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *terms: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *terms)
        dtype = reduce(torch.promote_types, (term.dtype for term in terms))
        first, *others = weights.to(dtype).unbind()
        total = terms[0].to(dtype) * first
        for weight, term in zip(others, terms[1:], strict=True):
            total.addcmul_(term, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, *terms = ctx.saved_tensors
        needs_weights, *needed = ctx.needs_input_grad
        into_weights = None
        if needs_weights:
            into_weights = torch.stack([_into_weight(gradient, term, weights) for term in terms])
        into_terms = [
            (gradient * weight).to(term.dtype) if wanted else None
            for weight, term, wanted in zip(weights.to(gradient.dtype).unbind(), terms, needed, strict=True)
        ]
        return into_weights, *into_terms


def _into_weight(gradient: Tensor, term: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of one weight: a number, or [d_model] where each channel has its own."""
    if weights.dim() == 2:
        return (gradient * term).flatten(0, -2).sum(0, dtype=weights.dtype)
    # One pass, without the product in memory; dot takes vectors of one type only.
    if gradient.dtype == term.dtype == weights.dtype:
        return torch.dot(gradient.reshape(-1), term.reshape(-1))
    return (gradient * term).sum(dtype=weights.dtype)


def weighted_sum(weights: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Return sum_k weights[k] * terms[k], [batch, length, d_model], in the dtype of the terms.

    Args:
        weights: [terms], or [terms, d_model] where each channel has its own.
        terms: each [batch, length, d_model]; no stack of them is built.
    """
    total: Tensor = _WeightedSum.apply(weights, *terms)  # type: ignore[no-untyped-call]
    return total


def joined_logits(old: Tensor, added: int) -> Tensor:
    """Return the logits `old` [sources, ...] with those of `added` more sources behind them.

    The added ones together have a share of SHARE_OF_ZEROS in the softmax over the first axis; the others keep their
    proportions.
    """
    if not added:
        return old
    # n added logits of value v have the share n e^v / (e^L + n e^v) = s, L being the logsumexp of the old ones, so
    # v = L + log(s / (1 - s) / n).
    share = math.log(SHARE_OF_ZEROS / (1 - SHARE_OF_ZEROS) / added)
    return torch.cat([old, (old.logsumexp(0, keepdim=True) + share).expand(added, *old.shape[1:])])


def start_row(options: HistoryOptions, length: int) -> Tensor:
    """Return the initial parameters of a combination of `length` outputs: [length], or [length, groups] for several.

    `options.start` gives the weights of the newest `window` outputs, n of them: `average` 1/n (without a window
    1/(l+1)), `one` 1, `last` 1 for the newest and 0 for the others. With `softmax` the parameters are logits, and
    weights have sum 1: `one` starts uniform like `average`, and with `last` the others have SHARE_OF_ZEROS together.
    Parameters left of the window are 0 and never read.
    """
    newest = min(length, options.window or length)
    row = torch.zeros(length)
    match options.start:
        case "last":
            row[-1] = 1.0
            if options.softmax:
                row[length - newest :] = joined_logits(torch.zeros(1), newest - 1).flip(0)
        case "average" if not options.softmax:
            row[length - newest :] = 1.0 / newest
        case "one" if not options.softmax:
            row[length - newest :] = 1.0
        case "average" | "one":
            pass  # equal logits give uniform weights
        case _:
            assert_never(options.start)
    return row if options.groups == 1 else row[:, None].repeat(1, options.groups)


class Combination(History):
    """A history that mixes outputs by weights; its kinds say which outputs, and when.

    Every output is kept, as combinations read it, until it leaves the window; kinds that combine fewer keep fewer.

    With `learnable` false the weights are a buffer: part of the module's state, not of its parameters, so they are
    not counted and no optimiser has them. Model directories hold parameters only: fixed weights follow from the
    configuration.

    Args:
        options: see HistoryOptions.
        start: initial weights, first axes as the kind needs them, and an axis [groups] where `groups` > 1; None: no
            combination is ever formed.
        normed: the indices that have a norm, of outputs y_k (sources) or of combinations (consumers).
        last: largest index.
    """

    weight: Tensor

    def __init__(self, options: HistoryOptions, start: Tensor | None, normed: Iterable[int], last: int) -> None:
        super().__init__()
        # Numbers only: the makers belong to the builder of the model, and would be copied with every copy of this one.
        self.options = dataclasses.replace(options, norm=nn.Identity, dropout=nn.Identity)
        if options.learnable or start is None:
            self.register_parameter("weight", None if start is None else nn.Parameter(start))
        else:
            self.register_buffer("weight", start)
        having = set(normed)
        indices = range(0 if options.norm_at == "none" else last + 1)
        # Identities fill the places without a norm, so that the number in a norm's name is its index.
        self.norms = nn.ModuleList(options.norm() if k in having else nn.Identity() for k in indices)
        self.dropout = options.dropout()

    def start(self, x: Tensor) -> HistoryState:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return HistoryState(self._joined((), 0, x), x, 0)

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        return HistoryState(self._joined(state.kept, state.depth + 1, y), y, state.depth + 1)

    def _joined(self, kept: tuple[Tensor, ...], k: int, y: Tensor) -> tuple[Tensor, ...]:
        """Return `kept` with y_k as combinations read it, and without the output that leaves the window."""
        source = self.norms[k](y) if self.options.norm_at == "sources" else y
        kept = (*kept, source)
        return kept if self.options.window is None else kept[-self.options.window :]

    def _mixed(self, parameters: Tensor, terms: Sequence[Tensor], row: int) -> Tensor:
        """Return combination `row`, [batch, length, d_model]; `parameters` are [terms] or [terms, groups]."""
        weights = parameters.softmax(0) if self.options.softmax else parameters
        if weights.dim() == 2:
            weights = weights.repeat_interleave(self.options.d_model // self.options.groups, dim=1)
        mixed = weighted_sum(weights, terms)
        if self.options.norm_at == "consumers":
            mixed = self.norms[row](mixed)
        dropped: Tensor = self.dropout(mixed)
        return dropped

    def _weights(self, parameters: Tensor) -> Tensor:
        """Return the weights of one combination, [terms], for `table`; `parameters` are [terms] or [terms, groups]."""
        weights = parameters.softmax(0) if self.options.softmax else parameters
        return weights if weights.dim() == 1 else weights.mean(1)

    def _plain_table(self, units: int) -> Tensor:
        """Return the table of a stack of `units` layers in which each reads the one below."""
        table = self.weight.new_full((units + 1, units + 1), torch.nan)
        return table.fill_diagonal_(1.0)

    def _extended_norms(self, old: Mapping[str, Tensor], last: int) -> dict[str, Tensor]:
        """Return the norms' tensors, given those of a stack whose largest index is `last`: new ones copy its last.

        The released loader of Li et al. 2020 resets the old last norm by an index slip; trained norms stay here.
        """
        return {
            f"norms.{k}.{name}": inherited(old, f"norms.{min(k, last)}.{name}", values.shape)
            for k, norm in enumerate(self.norms)
            for name, values in norm.named_parameters()
        }

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        if isinstance(self.weight, nn.Parameter):
            yield Slot(self.weight, Role.WIRING, "weight")
