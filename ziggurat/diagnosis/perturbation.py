"""How much a small change of the weights changes what every layer gives (Liu et al. 2020, section 4: amplification)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ziggurat.diagnosis.hooks import STACKS, Trace, layers_of
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["SIZE", "output_change", "perturbed"]

SIZE = 0.01
"""Length of the change of a matrix, relative to that of the matrix."""


class _Pass(nn.Module):
    """A forward pass as a module, whose parameters can be exchanged."""

    def __init__(self, model: Seq2Seq, run: Callable[[], object]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self) -> None:
        """Run it."""
        self.run()


@torch.no_grad()
def perturbed(model: Seq2Seq, seed: int = 1) -> dict[str, Tensor]:
    """Return every matrix of the layers of both stacks by name, each moved by SIZE times its own length.

    The direction is random, of independent normal numbers. The model stays as it is.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
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

    y_i* is what the layer gives when the matrices of all layers are `perturbed`; the decoder's memory is then that of
    the perturbed encoder. NaN for a layer that was left out.

    Args:
        model: any.
        before: y_i, [batch, length, d], by stack (Trace.outputs).
        masks: [batch, length] by stack, True at real tokens.
        run: passes the same batch through the model.
    """
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
