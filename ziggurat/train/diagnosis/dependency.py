"""Contribution of each branch below to the state after each sub-layer (Liu et al. 2020, section 3 and figure 4).

With the statistics of its norms held fixed, a stack is linear in the outputs of its attention and feed-forward
networks: its state is the sum of what became of its input and of every branch f_j(x_j) below. This is the variance log
of the authors' code, carried through any residual kind and any history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.train.diagnosis.hooks import STACKS, Sublayer, Trace, layers_of, residuals_of

TOKENS = 64
"""Real tokens of the batch that are used."""

_NORMS = (nn.LayerNorm, nn.RMSNorm)


class NormInputs:
    """Context that records the input of every norm of both stacks in a forward pass.

    Args:
        model: the model.

    Attributes:
        seen: norm -> its input when it was last called: [batch, length, ..., d], or with MUDD's queries, keys and
            values [3, batch, length, d].
    """

    def __init__(self, model: Seq2Seq) -> None:
        self.seen: dict[nn.Module, Tensor] = {}
        inside: list[nn.Module] = [getattr(model, stack).history for stack in STACKS if _residuals(model, stack)]
        inside += [r for stack in STACKS for r in _residuals(model, stack)]
        self._norms = [norm for module in inside for norm in module.modules() if isinstance(norm, _NORMS)]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> NormInputs:
        self._handles = [norm.register_forward_pre_hook(self._read) for norm in self._norms]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.seen[norm] = inputs[0]


@torch.no_grad()
def residual_dependency(
    model: Seq2Seq, trace: Trace, norms: NormInputs, masks: dict[str, Tensor]
) -> dict[str, list[list[float]]]:
    """Return the share of each source in the state after each sub-layer, by stack.

    Row i - 1 is the state after sub-layer i, column 0 the stack's input, column j the branch of sub-layer j:
    beta_ij = std(c_ij) / sqrt(sum_k std(c_ik)^2), with c_ij from `contributions` and the deviation over tokens and
    channels. Squares of a row sum to 1. NaN above the diagonal. Empty for RNMT+, and if a layer was left out.
    """
    found = {}
    for stack in STACKS:
        rows = []
        for number, parts in enumerate(contributions(model, trace, norms, stack, masks[stack]), start=1):
            deviations = parts.flatten(1).std(1, unbiased=False)
            shares: list[float] = (deviations / torch.linalg.vector_norm(deviations)).tolist()
            rows.append([*shares[: number + 1], *[torch.nan] * (len(shares) - number - 1)])
        if rows:
            found[stack] = rows
    return found


@torch.no_grad()
def contributions(model: Seq2Seq, trace: Trace, norms: NormInputs, stack: str, mask: Tensor) -> Iterator[Tensor]:
    """Yield, for every sub-layer of a stack, the terms of the state after it: [1 + sub-layers, tokens, d_model].

    Entry 0 comes from the stack's input, entry j from the branch of sub-layer j; entries above the sub-layer are 0.
    Biases of norms are in none of them. Streams of hyper-connections are added up. Dropout counts as the identity.

    Args:
        model: the model; nothing is yielded for RNMT+, whose layers are not sums, nor if a layer was left out.
        trace: record of a forward pass.
        norms: record of the same pass.
        stack: `encoder` or `decoder`.
        mask: [batch, length], True at real tokens; the first TOKENS of them count.
    """
    module = getattr(model, stack)
    passed = [
        (number, trace.sublayers[f"{stack}.{name}"][number])
        for number, layer in enumerate(layers_of(model, stack))
        for name in residuals_of(layer)
    ]
    if not passed or any(sublayer is None for _, sublayer in passed):
        return
    places = mask.flatten().nonzero().squeeze(1)[:TOKENS]

    def chosen(states: Tensor) -> Tensor:
        found = states.detach().flatten(0, 1)[places]
        # At least fp32: small shares would vanish in half precision.
        return found.to(torch.promote_types(found.dtype, torch.float32))

    handles = [
        norm.register_forward_hook(partial(_held, norms.seen[norm], chosen))
        for norm in module.modules()
        if norm in norms.seen
    ]
    training = module.training
    # Dropout counts as the identity.
    module.eval()
    try:
        yield from _replayed(module, chosen(trace.opened[stack]), cast(Sequence[tuple[int, Sublayer]], passed), chosen)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()


def _replayed(
    module: Encoder | Decoder, opened: Tensor, passed: Sequence[tuple[int, Sublayer]], chosen: Any
) -> Iterator[Tensor]:
    """Run the wiring of a stack on all contributions at once, with the branches of the recorded pass."""
    if module.streams is not None:
        opened = opened.unsqueeze(-2).expand(*opened.shape[:-1], module.streams, opened.shape[-1])
    # The contributions are one more batch axis: the wiring is linear, so their results add up to the states. Weights
    # that depend on the stream are held fixed, like the statistics of norms: `seen` and `whole` are what the pass had.
    whole, parts = opened, opened.new_zeros(1 + len(passed), *opened.shape)
    parts[0] = opened
    past, seen = module.history.start(parts), module.history.start(whole)
    x, below, layer = parts, parts, -1
    for number, (its_layer, sublayer) in zip(count(1), passed, strict=False):
        if module.split or its_layer != layer:
            if number > 1:
                past, seen = module.history.push(past, x), module.history.push(seen, whole)
            x = below = module.history.forward_as(seen, past)
            layer = its_layer
        branch = opened.new_zeros(1 + len(passed), *chosen(sublayer.fx).shape)
        branch[number] = chosen(sublayer.fx)
        x = sublayer.residual.join_as(chosen(sublayer.x), x, branch, below)
        whole = chosen(sublayer.y)
        yield x if module.streams is None else x.sum(-2)


def _residuals(model: Seq2Seq, stack: str) -> list[Residual]:
    return [residual for layer in layers_of(model, stack) for residual in residuals_of(layer).values()]


def _held(
    recorded: Tensor,
    chosen: Callable[[Tensor], Tensor],
    norm: nn.Module,
    inputs: tuple[Tensor, ...],
    _output: Tensor,
) -> Tensor | None:
    """Return the output of a norm for contributions, without its bias, with the statistics that it had in the pass.

    None, which lets its own output stand, for the states of the pass, of which weights are made.
    """
    (x,) = inputs
    # Only here: what a norm that the wiring does not call has read (MUDD's queries, keys and values) has other axes.
    states = chosen(recorded)
    if x.dim() == states.dim():
        return None
    weight = cast(Tensor, norm.weight)
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (states.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return weight * centred / deviation
    assert isinstance(norm, nn.RMSNorm)
    epsilon = torch.finfo(states.dtype).eps if norm.eps is None else norm.eps
    return weight * x / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()
