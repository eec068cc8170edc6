"""Attention to the target and to the memory in one sub-layer (Zhang, Titov and Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ziggurat.model.attention.average import AverageAttention
from ziggurat.model.attention.base import OwnAttention, OwnCache
from ziggurat.model.attention.live import LiveBeams
from ziggurat.model.attention.multihead import CrossAttention, LinearMaker
from ziggurat.model.attention.target import TargetView
from ziggurat.model.linear import Linear, NormedLinear
from ziggurat.model.roles import Role, Slot, linear_slots
from ziggurat.system.errors import ConfigError


class MergedAttention(nn.Module):
    """own(x) + cross(x): both attentions read the same input, each with its own maps, and their outputs are added.

    Args:
        own: attention to the target so far.
        cross: attention to the memory.
    """

    def __init__(self, own: OwnAttention, cross: CrossAttention) -> None:
        super().__init__()
        self.own = own
        self.cross = cross

    def start(self, live: LiveBeams) -> OwnCache:
        """Return the cache of the attention to the target for the hypotheses of `live`."""
        return self.own.start(live)

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape, or [batch, beam, d_model] in a step."""
        y: Tensor = view.attend(self.own, x) + self.cross(x, view.remembered(self.cross))
        return y


class MergedAverageAttention(MergedAttention):
    """Merged attention (MAtt): W_o (context of the memory + mean of V x_1 .. V x_j) + b_o.

    Args:
        cross: attention to the memory, without an output map.
        share_value: V is the value map of `cross`, as in the authors' code; else it is another map.
        linear: makes the linear maps.

    Raises ConfigError when V cannot be shared because encoder and decoder are not equally wide.
    """

    def __init__(self, cross: CrossAttention, *, share_value: bool, linear: LinearMaker = Linear) -> None:
        d_model, d_memory = cross.q_proj.weight.shape[0], cross.kv_proj.weight.shape[1]
        if share_value and d_memory != d_model:
            raise ConfigError(
                f"`model.attention.share_value` needs equal widths of encoder ({d_memory}) and decoder ({d_model}): "
                "one matrix projects the states of both; set it to false"
            )
        super().__init__(AverageAttention(d_model, gate=False, ffn=None), cross)
        self.v_proj = None if share_value else linear(d_model, d_model)
        self.out_proj = linear(d_model, d_model)

    def forward(self, x: Tensor, view: TargetView) -> Tensor:
        """Return [batch, target, d_model] for `x` of that shape, or [batch, beam, d_model] in a step."""
        context = self.cross(x, view.remembered(self.cross))
        return self.out_proj(context + view.attend(self.own, self._values(x)))

    @torch.no_grad()
    def separate_values(self) -> None:
        """Copy the value map that V shares into a map for V alone, for inference; a map with shifts stays shared."""
        shared = self.cross.kv_proj
        if self.v_proj is None and isinstance(shared, Linear):
            d_model = shared.out_features // 2
            self.v_proj = Linear(shared.in_features, d_model, bias=shared.bias is not None).to(shared.weight)
            for ours, theirs in zip(self.v_proj.parameters(), shared.parameters(), strict=True):
                ours.copy_(theirs[d_model:])

    def _values(self, x: Tensor) -> Tensor:
        if self.v_proj is not None:
            return self.v_proj(x)
        # Where linear maps have a scalar shift (Fixup) only the matrix is shared; the shift stays with the memory. A
        # second one, before x, would add nothing new: the weights of either attention sum to 1, so both shifts would
        # add the same vector to the result.
        shared = self.cross.kv_proj
        assert not isinstance(shared, NormedLinear)
        return shared.part(x, 1, 2)

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself; a shared value map is in `cross`."""
        if self.v_proj is not None:
            yield from linear_slots(self, "v_proj", Role.ATTENTION_VALUE, 3 * self.v_proj.weight.shape[0])
        yield from linear_slots(self, "out_proj", Role.ATTENTION_OUT)
