"""Adam, AdamW and RAdam with moments in bf16, rounded at random so that their expectation is exact.

Rounded to nearest, a second moment at beta2 0.999 would never fall: the change of an update is smaller than half the
distance between two bf16 numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ziggurat.config.train import OptimiserConfig
from ziggurat.model.tensors import local, part_begins

_CHUNK = 1 << 18
"""Number of values whose moments exist in fp32 at a time: 1 MiB for either moment, which fits into a core's cache."""
_LOW = 0xFFFF
"""The low bits of an fp32 number, which bf16 lacks."""


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `x` as bf16, rounded to one of its two neighbours so that the expectation is x.

    `noise` has the shape of `x`, int32, uniform in 0, ..., 65535. Added to the bits of x, it carries into the bits that
    bf16 keeps with a probability equal to the fraction below them, and on into the exponent where that is right.
    Numbers that bf16 holds exactly, 0 and infinity included, stay.
    """
    return (x.view(torch.int32) + noise).bitwise_and_(~_LOW).view(torch.float32).to(torch.bfloat16)


class _Rule(NamedTuple):
    """One step of a parameter p with gradient g and moments m, v: p -= size * m / (root * sqrt(v) + epsilon).

    Attributes:
        shrink: factor of p before the step (decoupled weight decay).
        decay: factor of p that is added to g (L2 regularisation).
        size: see above.
        root: see above; None: p -= size * m, the unrectified step of RAdam.
        epsilon: see above.
    """

    shrink: float
    decay: float
    size: float
    root: float | None
    epsilon: float


class NarrowAdam(torch.optim.Optimizer):
    """torch.optim's Adam, AdamW and RAdam (decoupled decay), except for the precision in which moments are kept.

    A step is computed in fp32, or in the parameter's dtype if that is wider; moments are rounded only when they are
    stored. Random bits are a function of (seed, parameter's name, its step, the place in it): the same when a run is
    resumed, in every process that holds the parameter, and in one that holds a part of it, which draws those of the
    places before as well. torch's global generators are left alone. Besides the moments, nothing larger than a chunk of
    a parameter is allocated.

    Args:
        groups: parameter groups with their `weight_decay` and, where it is another one, their `eps`.
        names: name of each parameter.
        config: kind (adam, adamw or radam), betas and epsilon.
        seed: seed of the rounding.
    """

    def __init__(
        self, groups: list[dict[str, Any]], names: Mapping[Tensor, str], config: OptimiserConfig, seed: int
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": config.betas, "weight_decay": 0.0, "eps": config.epsilon})
        self.names = names
        self.kind = config.kind
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
            # torch's names, so that checkpoints have the same ones for fp32 and bf16.
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        # Seeded anew for each parameter and step, so that resuming needs no state of a generator.
        generator = torch.Generator(parameter.device).manual_seed(self._seed(parameter, step))
        rule = self._rule(step, group["lr"], group["weight_decay"], group["eps"])
        assert parameter.grad is not None
        flat = (
            local(parameter).view(-1),
            local(parameter.grad).reshape(-1),
            local(state["exp_avg"]).view(-1),
            local(state["exp_avg_sq"]).view(-1),
        )
        # Chunk by chunk of the whole parameter, in the order of memory: the generator's numbers belong to places in it,
        # so those of chunks before this process's part are drawn too, and left.
        begin = part_begins(parameter)
        end = begin + flat[0].numel()
        for first in range(0, end if end > begin else 0, _CHUNK):
            noise = _noise(min(_CHUNK, parameter.numel() - first), generator)
            here = slice(max(first, begin) - begin, min(first + _CHUNK, end) - begin)
            if here.start < here.stop:
                at = begin + here.start - first
                p, g, m, v = (values[here] for values in flat)
                self._update_chunk(p, g, m, v, rule, noise[at : at + here.stop - here.start])

    def _update_chunk(
        self, p: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rule: _Rule, noise: Tensor
    ) -> None:
        """Update the values `p` [n] and store their moments, rounded by `noise` [n]; all tensors are views."""
        beta1, beta2 = self.defaults["betas"]
        dtype = torch.promote_types(p.dtype, torch.float32)
        g, m, v = gradient.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype)
        # Adam's decay goes through the moments; that of AdamW and RAdam shrinks the parameter directly.
        if rule.decay:
            g = g.add(p, alpha=rule.decay)
        if rule.shrink != 1:
            p.mul_(rule.shrink)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if rule.root is None:
            p.add_(m, alpha=-rule.size)
        else:
            p.addcdiv_(m, v.sqrt().mul_(rule.root).add_(rule.epsilon), value=-rule.size)
        exp_avg.copy_(rounded(m.float(), noise & _LOW))
        exp_avg_sq.copy_(rounded(v.float(), (noise >> 16) & _LOW))

    def _rule(self, t: int, rate: float, decay: float, epsilon: float) -> _Rule:
        """Return step t = 1, 2, ...: Kingma and Ba 2015, algorithm 1; for radam, Liu et al. 2020a, algorithm 2."""
        beta1, beta2 = self.defaults["betas"]
        shrink, decay = (1.0, decay) if self.kind == "adam" else (1 - rate * decay, 0.0)
        mean, root = rate / (1 - beta1**t), math.sqrt(1 - beta2**t)
        if self.kind != "radam":
            return _Rule(shrink, decay, mean, 1 / root, epsilon)
        longest = 2 / (1 - beta2) - 1
        rho = longest - 2 * t * beta2**t / (1 - beta2**t)
        if rho <= 5:  # as in torch and the authors' code; the paper has 4
            return _Rule(shrink, decay, mean, None, epsilon)
        rectified = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
        return _Rule(shrink, decay, mean * rectified * root, 1.0, epsilon)

    def _seed(self, parameter: Tensor, step: int) -> int:
        key = f"{self.seed}/{self.names[parameter]}/{step}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _noise(count: int, generator: torch.Generator) -> Tensor:
    """Return 32 random bits for each of `count` values, int32: 16 for either moment."""
    draws = torch.empty((count + 1) // 2, dtype=torch.int64, device=generator.device)
    draws.random_(torch.iinfo(torch.int64).min, None, generator=generator)  # all 64 bits of a draw serve two values
    return draws.view(torch.int32)[:count]
