"""Attention residuals: each layer attends over the outputs below it, by what they hold (Kimi team 2026).

The weights of all other histories are numbers of the model. Here they differ from position to position: a reader has a
trained query, and the outputs below are its keys and its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ziggurat.model.history.base import HistoryOptions, HistoryState, KeepingHistory, inherited, mixed
from ziggurat.model.roles import Role, Slot

_EPSILON = 1e-6
"""Of the RMS norm of keys; sources of any size that occurs are far above it."""


class AttentionResiduals(KeepingHistory):
    """Reader l + 1 gets sum_k a_k y_k over all outputs y_0, ..., y_l, with a = softmax_k(w . RMSNorm(y_k)).

    Section 3 of the paper. w and the gain of the norm belong to the reader: a pair for each layer but the first, which
    has y_0 alone to read, and one for the stack's output. w is 0 at first, so all weights start equal. In the paper a
    "layer" is a sub-layer (`combination.unit: sublayer`) and the y_k are what sub-layers give, without the stream that
    they read (`residual: none`): attention over depth, not the residual connection, carries the stream.

    `query` and `gain` are [L, d_model], row l - 1 for the reader above y_l.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(options.units, options.d_model))
        self.gain = nn.Parameter(torch.ones(options.units, options.d_model))

    def forward_as(self, seen: HistoryState, state: HistoryState) -> Tensor:
        """Return the same for `state`, with the weights that the outputs `seen` give."""
        if state.depth == 0:
            return state.latest
        return mixed(self._weights(state.depth - 1, seen.kept), state.kept)

    def _weights(self, row: int, sources: Sequence[Tensor]) -> Tensor:
        """Return a of the reader with this row, [batch, length, sources]."""
        # In fp32 whatever the stream is in: logits decide over whole layers.
        with torch.autocast(sources[0].device.type, enabled=False):
            wide = torch.promote_types(sources[0].dtype, torch.float32)
            query = (self.query[row] * self.gain[row]).to(wide)
            logits = []
            for source in sources:
                y = source.to(wide)
                logits.append((y @ query) * (y.square().mean(-1) + _EPSILON).rsqrt())
            return torch.stack(logits, -1).softmax(-1)

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the readers of the shallower stack; new ones start as in a new model. See History.

        The reader of what was the stack's output becomes the first added layer's.
        """
        grown = {"query": torch.zeros_like(self.query), "gain": torch.ones_like(self.gain)}
        for name, values in grown.items():
            values[:old_units] = inherited(old, name, (old_units, values.shape[1]))
        return grown

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        yield Slot(self.query, Role.WIRING, "query")
        yield Slot(self.gain, Role.WIRING, "gain")


class BlockAttentionResiduals(AttentionResiduals):
    """The same over blocks: a reader's sources are y_0, the sum of each block below, and that of its own so far.

    Equations 5 and 6, the paper's form for deep stacks: with about eight blocks it loses little of the full form, and
    what is kept does not grow with the depth. A block is `period` layers (or sub-layers); the last may be shorter.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__(options)
        self.period = options.period

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        if state.depth % self.period == 0:  # the first of its block
            return super().push(state, y)
        # At least in fp32: under autocast outputs are of a half type, and many are added up.
        so_far = state.kept[-1].to(torch.promote_types(y.dtype, torch.float32))
        return HistoryState((*state.kept[:-1], so_far + y), y, state.depth + 1)
