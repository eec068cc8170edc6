"""What one update of training changes: its size in every layer, after clipping, the optimiser's scaling and decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ziggurat.diagnosis.gradients import by_part, lengths, parts_of
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["Snapshot"]


class Snapshot:
    """The weights before an update, on the host: a GPU holds nothing more than without.

    Args:
        weights: every parameter by name, on any device (ziggurat.models.directory.weights).
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._before = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}

    @torch.no_grad()
    def changes(self, model: Seq2Seq, weights: Mapping[str, Tensor], rate: float) -> dict[str, Any]:
        """Return `scaled_gradient_norm` and `update_ratio`, each by part (gradients.parts_of).

        Args:
            model: says which parameter belongs to which part; the names are those of `weights`.
            weights: those after the update, on any device.
            rate: learning rate of the update.

        The first is |after - before| / rate, in the place of the gradient norm what the optimiser makes of it; NaN at a
        rate of 0. The second is |after - before| / |before|.
        """
        parts, name_of = parts_of(model), {p: name for name, p in model.named_parameters()}
        names = [name_of[p] for groups in parts.values() for group in groups for p in group]
        moved = dict(zip(names, lengths([self._moved(name, weights[name]) for name in names]), strict=True))
        size = dict(zip(names, lengths([self._before[name] for name in names]), strict=True))

        def norm(of: Mapping[str, float], group: list[torch.nn.Parameter]) -> float:
            return float(sum(of[name_of[p]] ** 2 for p in group) ** 0.5)

        return {
            "scaled_gradient_norm": by_part(parts, lambda group: norm(moved, group) / rate if rate else torch.nan),
            "update_ratio": by_part(parts, lambda group: norm(moved, group) / (norm(size, group) or torch.nan)),
        }

    def _moved(self, name: str, after: Tensor) -> Tensor:
        """Return the length of the change of one parameter, shape []; only one is on the device at a time."""
        before = self._before[name].to(after.device)
        return torch.linalg.vector_norm(after.float() - before.float())
