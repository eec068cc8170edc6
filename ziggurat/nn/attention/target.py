"""What a decoder layer sees of the target and of the memory: everything at once, or one step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, nn

from ziggurat.nn.attention.cache import CrossAttentionCache
from ziggurat.nn.attention.live import Live, Moved
from ziggurat.nn.attention.mask import Mask

if TYPE_CHECKING:
    from ziggurat.nn.attention.multihead import CrossAttention

__all__ = ["OwnAttention", "OwnCache", "TargetView", "WholeTarget"]


class OwnCache(Protocol):
    """What attention to the target keeps of the live hypotheses (ziggurat.nn.attention.live) between steps."""

    def admit(self, rows: slice) -> None:
        """Begin new sentences, which have `rows` among the live ones."""

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""

    def keep(self, moved: Moved) -> None:
        """Move rows; the live ones are counted already."""


class OwnAttention(nn.Module):
    """Attention of the target to itself: all positions at once, or the newest one with a cache."""

    def start(self, live: Live) -> OwnCache:
        """Return the cache for the hypotheses of `live`."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps")  # abstract

    def forward(self, x: Tensor, mask: Mask | None) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape; `mask` hides the future."""
        raise TypeError(f"{type(self).__name__} does not say how it attends")  # abstract

    def step(self, x: Tensor, cache: OwnCache) -> Tensor:
        """Return [N, K, d_model] for one new position of every hypothesis; the cache gains that position."""
        raise TypeError(f"{type(self).__name__} does not say how it steps")  # abstract


class TargetView(Protocol):
    """What a decoder layer sees besides its input: the whole target in training, one step in decoding."""

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` to the target so far."""

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Return the memory as `module` projects it."""


class WholeTarget(NamedTuple):
    """All target positions at once.

    Attributes:
        future: hides it.
        memory: [batch, source, d_memory].
        padding: hides that of the memory, or None.
    """

    future: Mask
    memory: Tensor
    padding: Mask | None

    def attend(self, module: OwnAttention, x: Tensor) -> Tensor:
        """Let `module` attend from `x` [batch, target, d_model] to itself."""
        y: Tensor = module(x, self.future)
        return y

    def remembered(self, module: CrossAttention) -> CrossAttentionCache:
        """Project the memory."""
        return module.remember(self.memory, self.padding)
