"""What the decoder attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Memory"]


@dataclass(frozen=True)
class Memory:
    """Encoder states of a batch.

    Attributes:
        states: [batch, source, d_memory] for the whole decoder, or one such tensor per attention to it.
        mask: [batch, source], True at real tokens.
    """

    states: tuple[Tensor, ...]
    mask: Tensor

    def of(self, layer: int) -> Tensor:
        """Return what decoder layer `layer`, from 0, attends to."""
        return self.states[layer] if len(self.states) > 1 else self.states[0]
