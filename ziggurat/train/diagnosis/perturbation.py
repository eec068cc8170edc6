"""Changes of a model: of its weights by one update of training, and of its outputs by a small change of its weights.

The second is the amplification of Liu et al. (2020, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.gradients import STACKS, Trace, by_part, layers_of, lengths, parts_of


class Snapshot:
    """Copy of the weights before an update, in the memory of the host, so that it takes none of a GPU's.

    Args:
        weights: every parameter by name, on any device (ziggurat.model.tensors.weights).
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._before = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}

    @torch.no_grad()
    def changes(self, model: Seq2Seq, weights: Mapping[str, Tensor], rate: float) -> dict[str, Any]:
        """Return `scaled_gradient_norm` and `update_ratio`, each by part (gradients.parts_of).

        Args:
            model: the model, for the part of each parameter; its names are those of `weights`.
            weights: the weights after the update, on any device.
            rate: learning rate of the update.

        The first is |after - before| / rate: the norm of the gradient after clipping, the optimiser's scaling and
        weight decay; NaN at a rate of 0. The second is |after - before| / |before|.
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


SIZE = 0.01
"""Length of the change of a matrix, relative to that of the matrix."""


class _Pass(nn.Module):
    """A forward pass as a module: functional_call replaces parameters of modules only."""

    def __init__(self, model: Seq2Seq, run: Callable[[], object]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self) -> None:
        """Run the pass."""
        self.run()


@torch.no_grad()
def perturbed(model: Seq2Seq) -> dict[str, Tensor]:
    """Return every matrix of the layers of both stacks by name, each moved by SIZE times its length.

    The direction is random, of independent normal numbers. The model stays as it is.
    """
    # A separate generator: the random numbers of training must not change.
    generator = torch.Generator(model.device).manual_seed(1)
    inside = {p for stack in STACKS for layer in layers_of(model, stack) for p in layer.parameters() if p.dim() >= 2}
    moved = {}
    for name, parameter in model.named_parameters():
        if parameter in inside:
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            length = torch.linalg.vector_norm(parameter) / torch.linalg.vector_norm(noise)
            moved[name] = parameter + SIZE * length * noise
    return moved


@torch.no_grad()
def output_change(
    model: Seq2Seq,
    before: Mapping[str, Sequence[Tensor | None]],
    masks: Mapping[str, Tensor],
    run: Callable[[], object],
) -> dict[str, list[float]]:
    """Return |y_i* - y_i| / |y_i| of every layer's output y_i, over real tokens, by stack.

    y_i* is the layer's output when the matrices of all layers are `perturbed`; the decoder then reads the memory of the
    perturbed encoder. NaN for a layer that was left out.

    Args:
        model: the model.
        before: y_i, [batch, length, d], by stack (Trace.outputs).
        masks: [batch, length] by stack, True at real tokens.
        run: function that passes the same batch through the model.
    """
    # `functional_call` leaves the model's own parameters as they are, even after an error.
    names = {f"model.{name}": tensor for name, tensor in perturbed(model).items()}
    with Trace(model) as trace:
        functional_call(_Pass(model, run), names, ())
    return {
        stack: [_change(y, moved, masks[stack]) for y, moved in zip(before[stack], trace.outputs[stack], strict=True)]
        for stack in STACKS
    }


def _change(before: Tensor | None, after: Tensor | None, mask: Tensor) -> float:
    if before is None or after is None:
        return torch.nan
    was, now = (state[mask].float() if state.dtype.itemsize < 4 else state[mask] for state in (before, after))
    return float(torch.linalg.vector_norm(now - was) / torch.linalg.vector_norm(was))
