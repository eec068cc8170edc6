"""The history of a stack: its wiring across depth, from the outputs of earlier layers to the next layer's input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ziggurat.system.errors import ConfigError


@dataclass(frozen=True)
class HistoryOptions:
    """Numbers and factories from which histories are built.

    Attributes:
        units: number L of layers (or sub-layers) of the stack.
        norm: makes a normalisation.
        dropout: makes the dropout of a combination.
        norm_at: normalise each source, each combination, or nothing.
        start: initial weights: 1/(l+1), 1, or 1 for the last layer and 0 for others.
        normalize_embedding: also normalise y_0 (sources) or the first combination (consumers).
        softmax: weights are the softmax of each row's parameters.
        window: number of newest outputs to combine; None: all.
        groups: number of weights per source, each for d_model/groups channels.
        period: layers per block; layers between depth-weighted combinations.
        dilation: combine only every dilation-th of the layers below (depth-weighted).
    """

    units: int
    d_model: int
    norm: Callable[[], nn.Module]
    dropout: Callable[[], nn.Module]
    norm_at: Literal["sources", "consumers", "none"] = "sources"
    start: Literal["average", "one", "last"] = "average"
    learnable: bool = True
    normalize_embedding: bool = False
    softmax: bool = False
    window: int | None = None
    groups: int = 1
    period: int = 6
    dilation: int = 1


class HistoryState(NamedTuple):
    """The outputs of the layers so far: `kept`, those that later combinations read, oldest first, and `latest`, y_l.

    y_0 is the stack's input, y_l the output of layer l = `depth`, [batch, length, d_model] each.
    """

    kept: tuple[Tensor, ...]
    latest: Tensor
    depth: int


class Reading(NamedTuple):
    """The input of a layer: the stream that it adds to, and the input of its queries, keys and values.

    All are [batch, length, d_model], before any norm; `attention` is None if self-attention reads the stream.
    """

    stream: Tensor
    attention: tuple[Tensor, Tensor, Tensor] | None = None


class History(nn.Module, ABC):
    """The wiring of one stack across its depth.

    A stack calls `start` with its input, `read` before each layer to get the layer's input, `push` with the layer's
    output, and `output` at the end. Step-by-step decoding makes the same calls with one position. With `unit:
    sublayer`, a "layer" here is a sub-layer. `start` and `push` keep only the latest output; a kind that combines more
    overrides them. Other methods have no default, which would silently turn an incomplete kind into a plain stack.
    """

    def start(self, x: Tensor) -> HistoryState:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return HistoryState((), x, 0)

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        return HistoryState((), y, state.depth + 1)

    @abstractmethod
    def forward(self, state: HistoryState) -> Tensor:
        """Return the input of the next layer, [batch, length, d_model]."""

    def forward_as(self, seen: HistoryState, state: HistoryState) -> Tensor:
        """Return `forward` of `state`; weights that depend on outputs are computed from the outputs `seen`.

        This makes it linear in `state`, for analyses that decompose a stream into its terms.
        """
        return self(state)

    def read(self, state: HistoryState) -> Reading:
        """Return the next layer's input; in all kinds except MUDD it is a single stream."""
        return Reading(self(state))

    def output(self, state: HistoryState) -> Tensor:
        """Return the stack's output, before its final norm, [batch, length, d_model]."""
        return self(state)

    @abstractmethod
    def table(self) -> Tensor | None:
        """Return the weights by which each layer reads the outputs below, [L+1, L+1].

        Row l describes the input of layer l+1, and the last row the stack's output. Column k is the weight of y_k
        (normalised if sources are), NaN if y_k is never read. Weights of channel groups are averaged. None: each layer
        reads the one below, or its weights depend on the values of the outputs.
        """

    @abstractmethod
    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return the initial values, by name, of this history's parameters in a stack that has grown.

        `old` are those of the shallower stack, whose `old_units` layers (or sub-layers) are the lowest of this stack.
        Raises ConfigError if `old` comes from a history with other options.
        """


class KeepingHistory(History):
    """A history in which each reader may read every output below, with weights that depend on their values."""

    def start(self, x: Tensor) -> HistoryState:
        """Keep y_0."""
        return HistoryState((x,), x, 0)

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Keep y as well."""
        return HistoryState((*state.kept, y), y, state.depth + 1)

    def forward(self, state: HistoryState) -> Tensor:
        """Return `forward_as`, weighted by the same outputs."""
        return self.forward_as(state, state)

    def table(self) -> None:
        """Return None: the weights depend on the values that are read."""


def mixed(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Return the sum of `sources`, each [..., d_model], weighted by position, in the type of the first, y_0.

    `weights` are [..., sources]. Only the sources are saved for the backward pass, which the layers that made them hold
    anyway.
    """
    first, *others = sources
    parts = [weight[..., None].to(first.dtype) for weight in weights.unbind(-1)]
    total = first * parts[0]
    for weight, y in zip(parts[1:], others, strict=True):
        total = torch.addcmul(total, y, weight)
    return total.to(first.dtype)  # sums of blocks are fp32, even in a model that is entirely bf16


def inherited(old: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """Return a copy of parameter `name` of a shallower stack's history.

    Raises ConfigError when it is missing or not of this shape.
    """
    if name not in old or tuple(old[name].shape) != tuple(shape):
        found = f"has shape {list(old[name].shape)}" if name in old else "is missing"
        raise ConfigError(
            f"growing: `{name}` of the shallow model's history {found}, but shape {list(shape)} is needed; "
            "grow with the `history` and `combination` that it was trained with"
        )
    return old[name].detach().clone()


class _WeightedSum(torch.autograd.Function):
    """sum_k w_k y_k, accumulated in one buffer, with only the y_k saved for the backward pass.

    Both alternatives need as much memory again for all layers: a chain of torch.addcmul builds each product that w_k's
    gradient sums, and stacking the outputs copies them.
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
    # One pass, without the product in memory; dot requires both vectors to have one type.
    if gradient.dtype == term.dtype == weights.dtype:
        return torch.dot(gradient.reshape(-1), term.reshape(-1))
    return (gradient * term).sum(dtype=weights.dtype)


def weighted_sum(weights: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Return sum_k weights[k] * terms[k], [batch, length, d_model], in the dtype of the terms.

    `weights` are [terms], or [terms, d_model] where each channel has its own.
    """
    return _WeightedSum.apply(weights, *terms)  # type: ignore[no-untyped-call]
