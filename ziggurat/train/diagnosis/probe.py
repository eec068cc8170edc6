"""All depth measures of a model on one batch (docs/report.md), in as few passes as possible.

They include the contribution of each branch to the states above it (Liu et al. 2020, section 3 and figure 4). With the
statistics of its norms held fixed, a stack is linear in the outputs of its attention and feed-forward networks: its
state is the sum of the transformed input and every transformed branch f_j(x_j) below. This is the variance log of the
authors' code, extended to any residual kind and any history.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from ziggurat.data.loader import Batch
from ziggurat.model.residual.base import Residual, ScaleNorm
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.train.diagnosis.gradients import (
    STACKS,
    Sublayer,
    Trace,
    backward_measures,
    layers_of,
    residuals_of,
    seen_once,
    sublayer_variance,
)
from ziggurat.train.diagnosis.measures import (
    encoder_similarities,
    entropies,
    history_weights,
    mean_entropies,
    output_change,
    transparent_weights,
)

TOKENS = 64
"""TOKENS is the number of real tokens of the batch that are used."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, ScaleNorm)


@contextlib.contextmanager
def norm_inputs(model: Seq2Seq) -> Iterator[dict[nn.Module, Tensor]]:
    """Context that records the input of every norm of both stacks in a forward pass.

    Yields norm -> its input in the latest call: [batch, length, ..., d], or [3, batch, length, d] for MUDD's queries,
    keys and values.
    """
    seen: dict[nn.Module, Tensor] = {}

    def read(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen[norm] = inputs[0]

    inside: list[nn.Module] = [getattr(model, stack).history for stack in STACKS if _residuals(model, stack)]
    inside += [r for stack in STACKS for r in _residuals(model, stack)]
    with contextlib.ExitStack() as hooks:
        for norm in (norm for module in inside for norm in module.modules() if isinstance(norm, _NORMS)):
            hooks.enter_context(norm.register_forward_pre_hook(read))
        yield seen


@torch.no_grad()
def residual_dependency(
    model: Seq2Seq, trace: Trace, norms: Mapping[nn.Module, Tensor], masks: dict[str, Tensor]
) -> dict[str, list[list[float]]]:
    """Return the share of each source in the state after each sub-layer, by stack.

    Row i - 1 is the state after sub-layer i, column 0 the stack's input, column j the branch of sub-layer j:
    beta_ij = std(c_ij) / sqrt(sum_k std(c_ik)^2), with c_ij from `contributions` and the deviation over tokens and
    channels. Squares of a row sum to 1. NaN above the diagonal. A stack without terms (see there) is left out.
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
def contributions(
    model: Seq2Seq, trace: Trace, norms: Mapping[nn.Module, Tensor], stack: str, mask: Tensor
) -> Iterator[Tensor]:
    """Yield, for every sub-layer of a stack, the terms of the state after it: [1 + sub-layers, tokens, d_model].

    Entry 0 comes from the stack's input, entry j from the branch of sub-layer j; entries above the sub-layer are 0.
    They exclude biases of norms. Streams of hyper-connections are summed. Dropout counts as the identity.

    Args:
        model: the model; nothing is yielded for RNMT+, whose layers are not sums, for a stack with a solver, whose
            layers are computed several times, or if a layer was skipped.
        trace: record of a forward pass.
        norms: inputs of norms in the same pass.
        stack: `encoder` or `decoder`.
        mask: [batch, length], True at real tokens; the first TOKENS of them count.
    """
    module = getattr(model, stack)
    passed = [
        (number, trace.sublayers[f"{stack}.{name}"][number])
        for number, layer in enumerate(layers_of(model, stack))
        for name in residuals_of(layer)
    ]
    solved = getattr(module, "solver", None) is not None
    if solved or not passed or any(sublayer is None for _, sublayer in passed):
        return
    places = mask.flatten().nonzero().squeeze(1)[:TOKENS]

    def chosen(states: Tensor) -> Tensor:
        found = states.detach().flatten(0, 1)[places]
        # At least fp32, since small shares would vanish in half precision.
        return found.to(torch.promote_types(found.dtype, torch.float32))

    handles = [
        norm.register_forward_hook(partial(_held, norms[norm], chosen)) for norm in module.modules() if norm in norms
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
    # The contributions form one more batch axis: the wiring is linear, so their results add up to the states. Weights
    # that depend on the stream are held fixed, like the statistics of norms: `seen` and `whole` are the values of the
    # pass.
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

    Return None, which keeps the norm's output, for the states of the pass, from which weights are computed.
    """
    (x,) = inputs
    # Checked only here: the input of a norm that the wiring does not call (MUDD's queries, keys and values) has other
    # axes.
    states = chosen(recorded)
    if x.dim() == states.dim():
        return None
    weight = cast(Tensor, norm.weight)
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (states.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return weight * centred / deviation
    assert isinstance(norm, nn.RMSNorm | ScaleNorm)
    epsilon = torch.finfo(states.dtype).eps if norm.eps is None else norm.eps
    return weight * x / (states.square().mean(-1, keepdim=True) + epsilon).sqrt()


Loss = Callable[[Seq2Seq, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> the training objective and the sum of -log p(gold) in nats, both of shape []
(ziggurat.train.objective.probe_loss)."""

_BACKWARD = ("gradient_norm", "beta_ln", "beta_rc", "beta", "r")
_SIMILARITIES = ("similarity", "embedding_similarity", "adjacent_similarity", "inter_similarity")
MEASURES = (
    "nll",
    "source_dependence",
    *_BACKWARD,
    "variance",
    "output_change",
    "residual_dependency",
    "history_weights",
    "transparent_weights",
    *_SIMILARITIES,
    "attention_entropy",
)
"""MEASURES lists the names of the measures, in the order in which `measure` returns them."""


def measure(model: Seq2Seq, batch: Batch, loss: Loss, which: Collection[str] = MEASURES) -> dict[str, Any]:
    """Return measures of `model` on `batch`: name -> number, list over layers (bottom first), or lists by place.

    The model keeps its mode: in evaluation mode, without dropout, the same model and batch give the same figures. The
    model and its gradients do not change. A measure that is undefined for this model is absent; a single undefined
    figure is NaN.

    Args:
        model: the model; its layers run uncompiled and without recomputation.
        batch: the batch, on any device.
        loss: see Loss.
        which: names from MEASURES.
    """
    assert set(which) <= set(MEASURES), set(which) - set(MEASURES)
    with seen_once(model):
        values = _measured(model, batch.to(model.device), loss, which)
    return {name: values[name] for name in MEASURES if name in which and values.get(name) not in (None, {}, [])}


def _measured(model: Seq2Seq, batch: Batch, loss: Loss, which: Collection[str]) -> dict[str, Any]:
    # (1) One forward pass, under all hooks that are needed.
    masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
    backward = any(name in _BACKWARD for name in which)
    with contextlib.ExitStack() as watching:
        trace = watching.enter_context(Trace(model))
        norms = watching.enter_context(norm_inputs(model)) if "residual_dependency" in which else {}
        seen = watching.enter_context(entropies(model)) if "attention_entropy" in which else {}
        with torch.set_grad_enabled(backward):
            objective, nll = loss(model, batch)
    # (2) Measures of the states.
    values: dict[str, Any] = {"nll": float(nll) / batch.target_tokens}
    if "variance" in which:
        values["variance"] = sublayer_variance(trace, masks)
    if "residual_dependency" in which:
        values["residual_dependency"] = residual_dependency(model, trace, norms, masks)
    if any(name in _SIMILARITIES for name in which):
        values |= encoder_similarities(trace, batch.source_mask)
    if "attention_entropy" in which:
        values["attention_entropy"] = mean_entropies(seen, masks)
    # (3) Backward, while the graph exists; then free it, since the passes below need the memory.
    if backward:
        values |= backward_measures(model, trace, objective, which)
    states = {stack: [None if y is None else y.detach() for y in row] for stack, row in trace.outputs.items()}
    del objective, trace, norms
    # (4) Further forward passes: with perturbed weights, and with exchanged sources.
    with torch.no_grad():
        if "output_change" in which:
            values["output_change"] = output_change(model, states, masks, lambda: loss(model, batch))
        if "source_dependence" in which:
            exchanged = float(loss(model, _exchanged(batch))[1]) / batch.target_tokens
            values["source_dependence"] = exchanged - values["nll"]
    return {**values, "history_weights": history_weights(model), "transparent_weights": transparent_weights(model)}


def mean_gradient_norm(
    model: Seq2Seq, batches: Sequence[Batch], loss: Loss, first: Mapping[str, float | list[float]]
) -> dict[str, float | list[float]]:
    """Return the mean of `gradient_norm` over batches: `first`, already measured, and each of `batches`.

    The norms are averaged, not the gradients (Zhang, Titov and Sennrich 2019, figure 4). If one norm is not finite,
    neither is the mean.
    """
    found = [first, *(measure(model, batch, loss, ("gradient_norm",))["gradient_norm"] for batch in batches)]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        part: [mean(of_layer) for of_layer in zip(*(norms[part] for norms in found), strict=True)]
        if isinstance(value, list)
        else mean([norms[part] for norms in found])
        for part, value in first.items()
    }


def _exchanged(batch: Batch) -> Batch:
    return replace(batch, source=batch.source.roll(1, 0), source_mask=batch.source_mask.roll(1, 0))
