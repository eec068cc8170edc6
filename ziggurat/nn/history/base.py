"""How a stack of layers is wired across depth: layer outputs so far -> next layer's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from ziggurat.errors import ConfigError

__all__ = ["Combining", "History", "Latest", "Past", "inherited"]


@dataclass(frozen=True)
class Combining:
    """What histories are made of.

    Attributes:
        units: number L of layers (or sub-layers) of the stack.
        d_model: width of the stream.
        norm: makes a normalisation.
        dropout: makes the dropout of a combination.
        norm_at: normalise each source, each combination, or nothing.
        start: initial weights: 1/(l+1), 1, or 1 for the last layer and 0 for others.
        learnable: train the weights.
        normalize_embedding: also normalise y_0 (sources) or the first combination (consumers).
        softmax: weights are the softmax of each row's parameters.
        window: combine only the newest so many outputs; None: all.
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


class Past(NamedTuple):
    """What is known of the layers below; y_0 is the stack's input, y_l the output of layer l.

    Attributes:
        kept: what later combinations read of the outputs, oldest first; each [batch, length, d_model].
        latest: y_l.
        depth: l.
    """

    kept: tuple[Tensor, ...]
    latest: Tensor
    depth: int


class History(nn.Module):
    """Wiring of one stack. The stack calls `start` with its input, `forward` before each layer for what that layer
    reads, `push` with what it gives, and `output` at its end. Decoding step by step uses the same calls with one
    position. With `unit: sublayer` a "layer" here is a sub-layer.
    """

    def start(self, x: Tensor) -> Past:
        """Return the state before the first layer; `x` is y_0 [batch, length, d_model]."""
        return Past((), x, 0)

    def push(self, past: Past, y: Tensor) -> Past:
        """Return the state after one more layer, whose output is `y`."""
        return Past((), y, past.depth + 1)

    def forward(self, past: Past) -> Tensor:
        """Return the input of the next layer, [batch, length, d_model]."""
        raise TypeError(f"{type(self).__name__} does not say what a layer reads")  # abstract

    def output(self, past: Past) -> Tensor:
        """Return the stack's output, before its final norm, [batch, length, d_model]."""
        y: Tensor = self(past)
        return y

    def table(self) -> Tensor | None:
        """Return what every layer reads of the outputs below, [L+1, L+1]: row l of what layer l+1 reads (the last: the
        stack's output), column k the weight of y_k, as normalised where sources are; NaN where it is never read.

        Weights by groups of channels are averaged. None: each layer reads the one below.
        """
        return None

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return what the parameters of this history, made for a stack that has grown, start as.

        Args:
            old: parameters of the shallower stack's history, named as within the history.
            old_units: number of layers (or sub-layers) of that stack, which are the lowest ones of this.

        Raises ConfigError where `old` is not of a history with the same options.
        """
        return {}


class Latest(History):
    """The plain stack: each layer reads the one below (Vaswani et al. 2017). Earlier outputs are let go."""

    def forward(self, past: Past) -> Tensor:
        """Return the latest output."""
        return past.latest


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
