"""Histories whose weights depend on the states, and so vary by position: attention residuals, MUDD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ziggurat.model.history.base import HistoryOptions, HistoryState, KeepingHistory, Reading, inherited, mixed
from ziggurat.model.roles import Role, Roles, Slot

_EPSILON = 1e-6
"""_EPSILON is the epsilon of RMSNorm; sources of realistic size are far above it."""


class AttentionResiduals(KeepingHistory):
    """Reader l + 1 gets sum_k a_k y_k over all outputs y_0, ..., y_l, with a = softmax_k(w . RMSNorm(y_k)).

    Kimi team 2026, section 3. w and the gain of the norm belong to the reader: a pair for each layer except the first,
    which can only read y_0, and one for the stack's output. w is 0 at first, so all weights start equal. In the paper a
    "layer" is a sub-layer (`combination.unit: sublayer`) and the y_k are outputs of sub-layers, without the stream that
    they read (`residual: none`): attention over depth, not the residual connection, carries the stream.

    `query` and `gain` are [L, d_model], row l - 1 for the reader above y_l.
    """

    roles: ClassVar[Roles] = {"query": Role.WIRING, "gain": Role.WIRING}

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(options.units, options.d_model))
        self.gain = nn.Parameter(torch.ones(options.units, options.d_model))

    def forward_as(self, seen: HistoryState, state: HistoryState) -> Tensor:
        """See History."""
        if state.depth == 0:
            return state.latest
        return mixed(self._weights(state.depth - 1, seen.kept), state.kept)

    def _weights(self, row: int, sources: Sequence[Tensor]) -> Tensor:
        """Return the weights a of the reader in this row, [batch, length, sources]."""
        # Always in fp32, because these logits weigh whole layers.
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

        The reader of the former stack output becomes that of the first added layer.
        """
        grown = {"query": torch.zeros_like(self.query), "gain": torch.ones_like(self.gain)}
        for name, values in grown.items():
            values[:old_units] = inherited(old, name, (old_units, values.shape[1]))
        return grown


class BlockAttentionResiduals(AttentionResiduals):
    """The same over blocks: a reader's sources are y_0, the sum of each block below, and the sum of its block so far.

    Equations 5 and 6, the paper's form for deep stacks: with about eight blocks it is nearly as good as the full form,
    and its memory does not grow with depth. A block is `period` layers (or sub-layers); the last may be shorter.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__(options)
        self.period = options.period

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Add y to the sum of its block."""
        if state.depth % self.period == 0:  # the first of its block
            return super().push(state, y)
        # At least in fp32: under autocast, outputs have a half type, and many are summed.
        so_far = state.kept[-1].to(torch.promote_types(y.dtype, torch.float32))
        return HistoryState((*state.kept[:-1], so_far + y), y, state.depth + 1)


_WAYS = 4  # query, key, value and residual stream
_LAST_WIDENING = 4  # the network for the stack's output, which has one mixture, is wider by this factor (authors' code)


class Mudd(KeepingHistory):
    """Layer l + 1 reads X^c = sum_k A[c, k] y_k, c = q, k, v, r, with A = W_2 GELU(W_1 RMSNorm(y_l)) + a.

    MUDD: Xiao et al. 2025, following their code. A, [4, l + 1], varies by position; RMSNorm has no gain. The layer
    computes X^r + MHA(LN X^q, LN X^k, LN X^v) and continues as usual. The first layer can only read y_0; the stack's
    output is one more mixture, A [1, L + 1].

    W_2 is 0 at first and a one-hot: each mixture is the output of the layer below, the plain stack. W_1 is N(0, 1/d).
    The LN of the sub-layer serves q, k and v: the gains and biases of three norms would be absorbed by the maps that
    follow. One of the authors' configurations (MUDDLlama2Medium) also normalises the y_k and the mixtures; this class
    does not.

    Row l - 1 of the parameters belongs to the mixtures above y_l: `inner` W_1 [width, d_model], `outer` W_2 [ways (l +
    1), width], `bias` a [ways, l + 1], with width = ways (l + 1), four times that for the last.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__()
        self.units = options.units
        self.inner, self.outer, self.bias = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for depth in range(1, options.units + 1):
            ways, widening = (1, _LAST_WIDENING) if depth == options.units else (_WAYS, 1)
            weights = ways * (depth + 1)
            self.inner.append(nn.Parameter(torch.zeros(widening * weights, options.d_model)))
            self.outer.append(nn.Parameter(torch.zeros(weights, widening * weights)))
            bias = torch.zeros(ways, depth + 1)
            bias[:, -1] = 1.0
            self.bias.append(nn.Parameter(bias))

    def forward_as(self, seen: HistoryState, state: HistoryState) -> Tensor:
        """See History."""
        return state.latest if state.depth == 0 else mixed(self._weights(seen)[..., -1, :], state.kept)

    def read(self, state: HistoryState) -> Reading:
        """Return X^r, and X^q, X^k and X^v."""
        if state.depth in (0, self.units):
            return Reading(self(state))
        query, key, value, stream = (mixed(weights, state.kept) for weights in self._weights(state).unbind(-2))
        return Reading(stream, (query, key, value))

    def _weights(self, state: HistoryState) -> Tensor:
        """Return A above the latest output, [..., ways, l + 1]."""
        row, y = state.depth - 1, state.latest
        # Always in fp32, because sums over many layers follow.
        with torch.autocast(y.device.type, enabled=False):
            wide = torch.promote_types(y.dtype, torch.float32)
            y = y.to(wide)
            normed = y * (y.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
            hidden = F.gelu(F.linear(normed, self.inner[row].to(wide)))
            return F.linear(hidden, self.outer[row].to(wide)).unflatten(-1, self.bias[row].shape) + self.bias[row]

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the mixtures inside the shallower stack; all others start as in a new model. See History.

        The single mixture of its output cannot become the four that the first added layer reads.
        """
        grown = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        for row in range(old_units - 1):
            for part in ("inner", "outer", "bias"):
                grown[f"{part}.{row}"] = inherited(old, f"{part}.{row}", grown[f"{part}.{row}"].shape)
        return grown

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        for row in range(self.units):
            yield Slot(self.inner[row], Role.ADDITIVE, f"inner.{row}")  # N(0, 1/fan_in), as for that attention
            yield Slot(self.outer[row], Role.WIRING, f"outer.{row}")
            yield Slot(self.bias[row], Role.WIRING, f"bias.{row}")
