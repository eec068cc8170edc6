"""All measures of depth of a model on one batch (docs/diagnosis.md), by as few passes as they need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ziggurat.data.collate import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.dependency import NormInputs, residual_dependency
from ziggurat.train.diagnosis.gradients import backward_measures, sublayer_variance
from ziggurat.train.diagnosis.hooks import Trace, seen_once
from ziggurat.train.diagnosis.measures import Entropies, encoder_similarities, history_weights, transparent_weights
from ziggurat.train.diagnosis.perturbation import output_change

Loss = Callable[[Seq2Seq, Batch], tuple[Tensor, Tensor]]
"""(model, batch) -> the objective of training, and the sum of -log p(gold) in nats, both of shape []
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
"""Names of the measures, in the order in which `measure` returns them."""


def measure(model: Seq2Seq, batch: Batch, loss: Loss, which: Collection[str] = MEASURES) -> dict[str, Any]:
    """Return measures of `model` on `batch`: name -> number, list over layers (bottom first), or lists by place.

    The model stays in its mode: in evaluation mode, without dropout, the same model and batch give the same figures.
    The model and its gradients do not change. A measure that has no meaning for this model is absent; a single figure
    without meaning is NaN.

    Args:
        model: the model; meanwhile its layers run uncompiled and without recomputation.
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
    # Created for every call, entered only where needed: only entering registers hooks.
    norms, entropies = NormInputs(model), Entropies(model)
    with contextlib.ExitStack() as watching:
        trace = watching.enter_context(Trace(model))
        if "residual_dependency" in which:
            watching.enter_context(norms)
        if "attention_entropy" in which:
            watching.enter_context(entropies)
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
        values["attention_entropy"] = entropies.means(masks)
    # (3) Backward, while the graph is there; then free it, since the passes below need the memory.
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
    """Return the mean of `gradient_norm` over batches: of `first`, measured already, and of each of `batches`.

    The norms are averaged, not the gradients (Zhang, Titov and Sennrich 2019, figure 4). A norm that is not finite on
    one batch is not finite in the mean.
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
    """Return the batch with every target paired with the source of the sentence before it."""
    return replace(batch, source=batch.source.roll(1, 0), source_mask=batch.source_mask.roll(1, 0))
