"""How a stack of layers is wired across depth: layer outputs so far -> next layer's input."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["History", "Latest"]


class History(nn.Module):
    """Wiring of one stack. `y_0` is the embedding, `y_l` the output of layer l, each [batch, length, d_model].

    The stack calls `push` after each layer and `forward` before the next one and at its end. The list is plain
    data: decoding step by step uses the same calls with length 1.
    """

    def push(self, outputs: list[Tensor], y: Tensor) -> list[Tensor]:
        """Return the outputs that later layers may read, with `y` added."""
        return [*outputs, y]

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Return the input of the next layer, or the stack's output after the last, [batch, length, d_model]."""
        raise TypeError(f"{type(self).__name__} does not say what a layer reads")  # abstract


class Latest(History):
    """The plain stack: each layer reads the one below (Vaswani et al. 2017). Earlier outputs are let go."""

    def push(self, outputs: list[Tensor], y: Tensor) -> list[Tensor]:
        """Return only `y`."""
        return [y]

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Return the latest output."""
        return outputs[-1]
