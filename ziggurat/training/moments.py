"""Adam, AdamW and RAdam with moments in bf16, rounded stochastically between updates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ziggurat.config.train import OptimiserConfig
from ziggurat.models.tensors import local

__all__ = ["NarrowAdam", "rounded"]

_CHUNK = 1 << 18
"""Values whose moments exist in fp32 at a time: 1 MiB each, which a core's cache holds."""
_LOW = 0xFFFF
"""The bits of an fp32 number that bf16 does not have."""


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `x` as bf16, rounded to one of its two neighbours so that the expectation is x.

    `noise` is of the shape of `x`, int32, uniform in 0, ..., 65535: the upper neighbour in magnitude is taken with the
    probability of what is above the lower one. The sum of bits carries over into the next exponent by itself; what
    bf16 holds exactly, 0 and infinity among it, stays.
    """
    return (x.view(torch.int32) + noise).bitwise_and_(~_LOW).view(torch.float32).to(torch.bfloat16)


class _Rule(NamedTuple):
    """One step of one parameter p with gradient g and moments m, v.

    Attributes:
        shrink: factor of p before the step (decoupled decay).
        decay: of p, added to the gradient (L2).
        size: p -= size * m / (root * sqrt(v) + epsilon).
        root: None: p -= size * m.
    """

    shrink: float
    decay: float
    size: float
    root: float | None


class NarrowAdam(torch.optim.Optimizer):
    """torch.optim's Adam, AdamW and RAdam (decoupled decay), but for the precision in which moments are kept.

    An update is computed in fp32, or the parameters' own dtype where that is wider, from moments that are rounded only
    when they are put back. Random bits are a function of (seed, parameter's name, its step): the same when a run is
    resumed and on every process that holds the parameter; torch's global generators are left alone. Nothing larger
    than a chunk of a parameter is allocated besides the moments.

    Args:
        groups: parameter groups with their `weight_decay`.
        names: of the parameters.
        config: kind (adam, adamw or radam), betas and epsilon.
        seed: of the rounding.
    """

    def __init__(
        self, groups: list[dict[str, Any]], names: Mapping[Tensor, str], config: OptimiserConfig, seed: int
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": config.betas, "weight_decay": 0.0})
        self.names = names
        self.kind = config.kind
        self.epsilon = config.epsilon
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(self._seed(parameter, step))
        rule = self._rule(step, group["lr"], group["weight_decay"])
        assert parameter.grad is not None
        for part in zip(
            local(parameter).view(-1).split(_CHUNK),
            local(parameter.grad).reshape(-1).split(_CHUNK),
            local(state["exp_avg"]).view(-1).split(_CHUNK),
            local(state["exp_avg_sq"]).view(-1).split(_CHUNK),
            strict=True,
        ):
            self._update_chunk(*part, rule, generator)

    def _update_chunk(
        self, p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rule: _Rule, generator: torch.Generator
    ) -> None:
        """Update the values `p` [n] and put back their moments; all are views."""
        beta1, beta2 = self.defaults["betas"]
        dtype = torch.promote_types(p.dtype, torch.float32)
        g, m, v = gradient.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype)
        if rule.decay:
            g = g.add(p, alpha=rule.decay)
        if rule.shrink != 1:
            p.mul_(rule.shrink)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if rule.root is None:
            p.add_(m, alpha=-rule.size)
        else:
            p.addcdiv_(m, v.sqrt().mul_(rule.root).add_(self.epsilon), value=-rule.size)
        # All 64 bits of a draw: 16 for either moment of two values.
        draws = torch.empty((p.numel() + 1) // 2, dtype=torch.int64, device=p.device)
        draws.random_(torch.iinfo(torch.int64).min, None, generator=generator)
        noise = draws.view(torch.int32)[: p.numel()]
        exp_avg.copy_(rounded(m.float(), noise & _LOW))
        exp_avg_sq.copy_(rounded(v.float(), (noise >> 16) & _LOW))

    def _rule(self, t: int, rate: float, decay: float) -> _Rule:
        """Return step t = 1, 2, ...: Kingma and Ba 2015, algorithm 1; for radam Liu et al. 2020a, algorithm 2."""
        beta1, beta2 = self.defaults["betas"]
        shrink, decay = (1.0, decay) if self.kind == "adam" else (1 - rate * decay, 0.0)
        mean, root = rate / (1 - beta1**t), math.sqrt(1 - beta2**t)
        if self.kind != "radam":
            return _Rule(shrink, decay, mean, 1 / root)
        longest = 2 / (1 - beta2) - 1
        rho = longest - 2 * t * beta2**t / (1 - beta2**t)
        if rho <= 5:
            return _Rule(shrink, decay, mean, None)
        rectified = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
        return _Rule(shrink, decay, mean * rectified * root, 1.0)

    def _seed(self, parameter: Tensor, step: int) -> int:
        key = f"{self.seed}/{self.names[parameter]}/{step}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
