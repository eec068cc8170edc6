"""The residual connection: one equation with optional slots, by which a sub-layer joins the stream.

The few parts that slots cannot express follow it. The kinds are in ziggurat.model.residual.kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.roles import Role, Roles, Slot


@dataclass(frozen=True)
class SublayerPosition:
    """The position of a sub-layer in the model; residual kinds compute their constants from it.

    Attributes:
        layer: number of its layer in the stack, from 1.
        sublayer: its number in the layer, from 0.
        sublayers: residual sub-layers per layer of this stack.
        attention: it is an attention sub-layer, not a feed-forward network.
        encoder_layers: depth N of the encoder (of the grown one, where growth is planned); `decoder_layers`: M.
    """

    decoder: bool
    layer: int
    sublayer: int
    sublayers: int
    attention: bool
    encoder_layers: int
    decoder_layers: int

    @property
    def layers(self) -> int:
        """Depth of its stack."""
        return self.decoder_layers if self.decoder else self.encoder_layers

    @property
    def number(self) -> int:
        """Its number among all sub-layers of its stack, from 0."""
        return (self.layer - 1) * self.sublayers + self.sublayer


@dataclass(frozen=True)
class ResidualOptions:
    """Numbers and factories from which residual kinds are built.

    Attributes:
        dropout: makes the dropout of a branch.
        norm: makes a normalisation of the stream.
        omega_trainable: whether ADMIN's skip is trained.
        branch_updates: T of BranchNorm.
        layer_scale: initial factor of LayerScale; None: by depth.
        streams: n of hyper-connections; `dynamic`: whether they are dynamic.
        mixing: see ManifoldConnection, as for `stream_start`.
        branch: factor of every branch (learning-rate transfer); None: 1.
        shared: parameters that the sub-layers of one layer share, by name; there is one ResidualOptions per layer.
    """

    d_model: int
    dropout: Callable[[], nn.Module]
    norm: Callable[[], nn.Module]
    omega_trainable: bool = True
    branch_updates: int = 1
    layer_scale: float | None = None
    streams: int = 1
    dynamic: bool = False
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    stream_start: Literal["streams", "normal"] = "streams"
    branch: float | None = None
    shared: dict[str, nn.Parameter] = field(default_factory=dict)


class Residual(nn.Module):
    """y = out_norm(skip * x + branch * dropout(branch_norm(f(in_norm(x)))) + bottom), f being the sub-layer.

    A kind is a choice of slots; an empty slot is the identity. A layer calls `enter` to get the input of f, and the
    module itself to join f's output. So f stays outside, and hooks on a Residual see x, f(x) and y of every sub-layer
    of every model.

    Args:
        dropout: called as dropout(fx, residual=...) it also adds.
        skip: a number, or a parameter of shape [1] or [d_model], as is `branch`.
        bypass: add `bottom`, the input of the whole layer (b2t), which only a layer's last sub-layer is given.

    Attributes:
        gate: g [1] of GPAS, or None. Without `out_norm`, the sum s becomes s - silu(g) sg(s); with one, the same is
            applied to the skipped stream. sg is the identity without a gradient (Chen et al. 2025).
    """

    skip: nn.Parameter | float | None
    branch: nn.Parameter | float | None

    def __init__(
        self,
        dropout: nn.Module,
        *,
        in_norm: nn.Module | None = None,
        branch_norm: nn.Module | None = None,
        out_norm: nn.Module | None = None,
        skip: nn.Parameter | float | None = None,
        branch: nn.Parameter | float | None = None,
        bypass: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.gate: nn.Parameter | None = None
        self.in_norm = in_norm
        self.branch_norm = branch_norm
        self.out_norm = out_norm
        self.skip = skip
        self.branch = branch
        self.bypass = bypass

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input for the stream `x` [batch, length, d_model]."""
        return x if self.in_norm is None else self.in_norm(x)

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the stream `x` and the sub-layer's output `fx`; `bottom` is the layer's input; all [..., d_model]."""
        skipped = x if self.skip is None else x * self.skip
        if self.gate is not None and self.out_norm is not None:
            skipped = _gated(skipped, self.gate)
        if self.bypass:
            assert bottom is not None
            skipped = skipped + bottom
        if self.branch_norm is not None:
            fx = self.branch_norm(fx)
        if self.branch is None:
            # One pass over memory for dropout and sum, unless a branch factor comes between them.
            y = self.dropout(fx, residual=skipped)
        else:
            y = skipped + self.branch * self.dropout(fx)
        if self.out_norm is not None:
            return self.out_norm(y)
        return y if self.gate is None else _gated(y, self.gate)

    def join_as(self, seen: Tensor, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join `x` and `fx`; weights that depend on the stream are computed from the stream `seen`.

        This makes it linear in both, for analyses that decompose a stream into its terms.
        """
        return self(x, fx, bottom)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of every parameter that it holds itself, without those of its norms."""
        for name, values in self.named_parameters(recurse=False):
            yield Slot(values, Role.WIRING, name)


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return x - silu(g) sg(x): scaled down by the gate in the forward pass, but not in the backward pass."""
    return x - F.silu(gate).to(x.dtype) * x.detach()


class NormalisedSkip(Residual):
    """y = u + f(u) with u = LN(x)."""

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the normalised stream and the sub-layer's output `fx`, all [..., d_model]."""
        # u is computed a second time: `enter` cannot pass it here without keeping state between the two calls.
        return super().forward(self.enter(x), fx, bottom)


class NoSkip(Residual):
    """y = f(LN(x))."""

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Return the sub-layer's output `fx` [..., d_model] with dropout; the stream `x` ends here."""
        return self.dropout(fx)


class ScaleNorm(nn.Module):
    """y = g x / |x|, one number g for all channels, at first sqrt(width): Nguyen and Salazar 2019.

    |x| is sqrt(sum of x_i^2 + width epsilon), so that RMSNorm with equal gains computes the same and models can be
    exported with it; the authors' code, whose |x| is at least epsilon, differs by half of epsilon for channels of
    variance 1. `length` [1] is g itself, not its ratio to sqrt(width), so that a step of Adam changes it as in their
    code.

    Args:
        width: channels.
        eps: epsilon.
    """

    roles: ClassVar[Roles] = {"length": Role.WIRING}

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.length = nn.Parameter(torch.full((1,), math.sqrt(width)))

    @property
    def weight(self) -> Tensor:
        """The gain [1] of RMSNorm that computes the same."""
        return self.length / math.sqrt(self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x` [..., width]."""
        return F.rms_norm(x, (self.width,), eps=self.eps) * self.weight


class ScaledNorm(nn.Module):
    """A norm times a fixed factor."""

    factor: Tensor

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm = norm
        # A buffer, not a number: torch.compile would make a separate graph for each layer's number.
        self.register_buffer("factor", torch.tensor(factor, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and type of `x`."""
        return self.norm(x) * self.factor  # 0-dimensional, so fp64 does not promote the stream


class ShiftScale(nn.Module):
    """y = (x + shift) scale, two scalars, initially 0 and 1: the end of a Fixup stack (the decoder's has no scale)."""

    roles: ClassVar[Roles] = {"shift": Role.WIRING, "scale": Role.WIRING}

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        shifted = x + self.shift
        return shifted if self.scale is None else shifted * self.scale
