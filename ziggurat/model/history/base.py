"""The history of a stack: its wiring across depth, from the outputs of layers so far to what the next layer reads."""

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
    """Numbers and makers of parts from which histories are built.

    Attributes:
        units: number L of layers (or sub-layers) of the stack.
        norm: makes a normalisation.
        dropout: makes the dropout of a combination.
        norm_at: normalise each source, each combination, or nothing.
        start: initial weights: 1/(l+1), 1, or 1 for the last layer and 0 for others.
        normalize_embedding: also normalise y_0 (sources) or the first combination (consumers).
        softmax: weights are the softmax of each row's parameters.
        window: combine only the newest outputs, this many of them; None: all.
        groups: weights per source, each for d_model/groups channels.
        period: layers per block; layers between depth-weighted combinations.
        dilation: of the layers below, only every dilation-th is combined (depth-weighted).
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
    """The outputs of the layers so far: `kept`, what later combinations read of them, oldest first, and `latest`, y_l.

    y_0 is the stack's input, y_l the output of layer l = `depth`, [batch, length, d_model] each.
    """

    kept: tuple[Tensor, ...]
    latest: Tensor
    depth: int


class Reading(NamedTuple):
    """The input of a layer: the stream that it adds to, and what queries, keys and values of its self-attention read.

    All are [batch, length, d_model], before any norm; `attention` is None where self-attention reads the stream.
    """

    stream: Tensor
    attention: tuple[Tensor, Tensor, Tensor] | None = None


class History(nn.Module, ABC):
    """The wiring of one stack across its depth.

    A stack calls `start` with its input, `read` before each layer for what that layer reads, `push` with what it
    gives, and `output` at the end. Decoding step by step makes the same calls with one position. With `unit: sublayer`
    a "layer" here is a sub-layer. `start` and `push` keep the latest output alone; a kind that combines more replaces
    them. What has no default would make a kind that said nothing a plain stack.
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
        """Return `forward` of `state`, with the weights that the outputs `seen` give where weights depend on outputs.

        So that it is linear in `state`: for analyses that take a stream apart into its terms.
        """
        return self(state)

    def read(self, state: HistoryState) -> Reading:
        """Return what the next layer reads; in all kinds but MUDD that is a single stream."""
        return Reading(self(state))

    def output(self, state: HistoryState) -> Tensor:
        """Return the stack's output, before its final norm, [batch, length, d_model]."""
        return self(state)

    @abstractmethod
    def table(self) -> Tensor | None:
        """Return the weights by which each layer reads the outputs below, [L+1, L+1].

        Row l is of the input of layer l+1, the last one of the stack's output. Column k is the weight of y_k,
        normalised where sources are; NaN where y_k is never read. Weights by groups of channels are averaged. None:
        each layer reads the one below, or what it reads depends on what the outputs hold.
        """

    @abstractmethod
    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return the initial values, by name, of this history's parameters in a stack that has grown.

        `old` are those of the shallower stack, whose `old_units` layers (or sub-layers) are the lowest ones of this.
        Raises ConfigError where `old` is not of a history with the same options.
        """


class KeepingHistory(History):
    """A history of which each reader may read every output below, weighted by what they hold."""

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
        """Return None: the weights depend on what is read."""


def mixed(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Return the sum of `sources`, each [..., d_model], weighted by position, in the type of the first, y_0.

    `weights` are [..., sources]. For the backward pass only the sources are kept, which the layers that made them hold
    anyway.
    """
    first, *others = sources
    parts = [weight[..., None].to(first.dtype) for weight in weights.unbind(-1)]
    total = first * parts[0]
    for weight, y in zip(parts[1:], others, strict=True):
        total = torch.addcmul(total, y, weight)
    return total.to(first.dtype)  # sums of blocks are fp32, also in a model that is bf16 throughout


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
    """sum_k w_k y_k, added up in one buffer, with the y_k alone saved for the backward pass.

    The two other ways need memory for all layers once more: a chain of torch.addcmul builds each product that w_k's
    gradient sums, and a stack of the outputs copies them.
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

    `weights` are [terms], or [terms, d_model] where each channel has its own.
    """
    return _WeightedSum.apply(weights, *terms)  # type: ignore[no-untyped-call]
