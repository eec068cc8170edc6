"""Scaling of queries, keys and values: QK-norm in two forms, a learned scale per dimension, a norm of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.roles import Role, Roles

_NORMS: dict[str, Callable[[int, float], nn.LayerNorm | nn.RMSNorm]] = {
    "layer": lambda width, epsilon: nn.LayerNorm(width, epsilon, bias=False),
    "rms": lambda width, epsilon: nn.RMSNorm(width, epsilon),
}


class QueryKeyScaling(nn.Module):
    """Normalisation of the queries, keys and values of every head, and scaling of the queries; heads share parameters.

    Args:
        norm: "layer", "rms": LN or RMSNorm with a learned gain and no bias, one for queries and one for keys; the
            division of the logits by sqrt(d_head) stays (Dehghani et al. 2023). "l2": queries and keys of length 1,
            and one learned factor g of the logits in place of that division (Henry et al. 2020). "none": neither.
        length: L in the initial value log2(L^2 - L) of g, the 97.5th percentile of sentence lengths; at least 2.
        per_dimension: also multiply queries by softplus(a) / softplus(0), a [d_head] learned from 0 (lingvo).
        value_norm: normalise values too, as "layer" or "rms" says (HybridNorm, Zhuo et al. 2025).
        epsilon: of the norms; with "l2" a shorter query or key is divided by this.
    """

    roles: ClassVar[Roles] = {"factor": Role.WIRING, "dimensions": Role.WIRING}
    factor: nn.Parameter | None
    dimensions: nn.Parameter | None

    def __init__(
        self,
        d_head: int,
        *,
        norm: Literal["none", "layer", "rms", "l2"],
        length: int,
        per_dimension: bool,
        epsilon: float,
        value_norm: Literal["none", "layer", "rms"] = "none",
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.root = math.sqrt(d_head)
        make = _NORMS.get(norm)
        self.query_norm = None if make is None else make(d_head, epsilon)
        self.key_norm = None if make is None else make(d_head, epsilon)
        self.value_norm = None if value_norm == "none" else _NORMS[value_norm](d_head, epsilon)
        factor = nn.Parameter(torch.tensor([math.log2(length**2 - length)])) if norm == "l2" else None
        self.register_parameter("factor", factor)
        self.register_parameter("dimensions", nn.Parameter(torch.zeros(d_head)) if per_dimension else None)

    def query(self, query: Tensor) -> Tensor:
        """Return `query` [batch, heads, length, d_head] scaled, in its own type."""
        scaled = self._normalised(query, self.query_norm)
        if self.factor is not None:
            scaled = scaled * (self.factor * self.root)  # `attend` divides by this root
        if self.dimensions is not None:
            scaled = scaled * (F.softplus(self.dimensions) / math.log(2.0))
        return scaled.to(query.dtype)

    def key(self, key: Tensor) -> Tensor:
        """Return `key` scaled, likewise."""
        return self._normalised(key, self.key_norm).to(key.dtype)

    def value(self, value: Tensor) -> Tensor:
        """Return `value` normalised, likewise."""
        return self._by(self.value_norm, value).to(value.dtype)

    def _normalised(self, x: Tensor, norm: nn.LayerNorm | nn.RMSNorm | None) -> Tensor:
        if self.factor is not None:
            return F.normalize(x, dim=-1, eps=self.epsilon)
        return self._by(norm, x)

    def _by(self, norm: nn.LayerNorm | nn.RMSNorm | None, x: Tensor) -> Tensor:
        # Under autocast queries and keys are of a half type, the gain is fp32: RMSNorm has no fused kernel for both.
        return x if norm is None else norm(x.to(norm.weight.dtype))
