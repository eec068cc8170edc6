"""The visible table: initialisation of the configuration -> scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ziggurat.config.wiring import InitConfig, InitKind
from ziggurat.init.deepnorm import deepnorm
from ziggurat.init.depth import Depth
from ziggurat.init.depth_scaled import depth_scaled
from ziggurat.init.draw import Draw
from ziggurat.init.fixup import fixup
from ziggurat.init.roles import Slot
from ziggurat.init.t_fixup import t_fixup
from ziggurat.init.uniform import uniform
from ziggurat.init.xavier import xavier

__all__ = ["INIT", "Scheme", "initialise"]

Scheme = Callable[[Slot, InitConfig, Depth], Draw]
"""Says of one parameter what its values are drawn from."""

INIT: dict[InitKind, Scheme] = {
    "xavier": xavier,
    "depth_scaled": depth_scaled,
    "admin": xavier,  # what is special of ADMIN are its skip vectors: ziggurat.init.admin
    "deepnorm": deepnorm,
    "t_fixup": t_fixup,
    "fixup": fixup,
    "uniform": uniform,
}


@torch.no_grad()
def initialise(slots: Iterable[Slot], config: InitConfig, depth: Depth, generator: torch.Generator) -> None:
    """Fill every slot in place, in the order given: equal slots, depth and generator state give equal values."""
    scheme = INIT[config.kind]
    for slot in slots:
        scheme(slot, config, depth).fill(slot.values, generator)
