"""The view of a decoder layer on target and memory: everything at once in training, one step at a time in decoding.

A layer asks its view to attend and so has one `forward` for both. The view of a step is
ziggurat.model.layers.DecoderLayerCache.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

from torch import Tensor

from ziggurat.model.attention.base import OwnAttention
from ziggurat.model.attention.cache import CrossAttentionCache, KeptWeights
from ziggurat.model.attention.mask import Mask
from ziggurat.model.attention.multihead import CrossAttention
from ziggurat.model.attention.values import FirstValues


class TargetView(Protocol):
    """All that a decoder layer sees besides the stream."""

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` to the target so far."""

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory as `module` projects it."""

    @property
    def reads(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Inputs of queries, keys and values of self-attention, where these are not the stream."""

    def reading(self, reads: tuple[Tensor, Tensor, Tensor]) -> Self:
        """Return the view of a layer whose self-attention reads these."""


class WholeTarget(NamedTuple):
    """All target positions at once.

    Attributes:
        future: hides it.
        memory: [batch, source, d_memory].
        padding: hides that of the memory, or None.
        first: where the first layer leaves its values of the target, if there is a value residual.
        first_of_memory: the same for those of the memory.
        kept: where attention to the memory leaves its weights, or None.
        reads: what queries, keys and values of self-attention read; None: the stream.
    """

    future: Mask
    memory: Tensor
    padding: Mask | None
    first: FirstValues | None = None
    first_of_memory: FirstValues | None = None
    kept: KeptWeights | None = None
    reads: tuple[Tensor, Tensor, Tensor] | None = None

    def reading(self, reads: tuple[Tensor, Tensor, Tensor]) -> WholeTarget:
        """Return the view of a layer whose self-attention reads these."""
        return self._replace(reads=reads)

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` [batch, target, d_model] to itself."""
        y: Tensor = module(x, self.future, self.first)
        return y

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Project the memory."""
        return module.remember(self.memory, self.padding, self.kept, first=self.first_of_memory)
