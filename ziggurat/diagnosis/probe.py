"""All measures of a model on one batch (docs/diagnosis.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ziggurat.data.collate import Batch
from ziggurat.diagnosis.alikeness import encoder_similarities
from ziggurat.diagnosis.dependency import NormInputs, residual_dependency
from ziggurat.diagnosis.entropy import Entropies
from ziggurat.diagnosis.gradients import backward_measures, sublayer_variance
from ziggurat.diagnosis.hooks import Trace, seen_once
from ziggurat.diagnosis.perturbation import output_change
from ziggurat.diagnosis.wiring import history_weights, transparent_weights
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["MEASURES", "Loss", "measure"]

Loss = Callable[[Seq2Seq, Batch], tuple[Tensor, Tensor]]
"""Runs a model over a batch; returns what training minimises, and the sum of -log p(gold), nats, both of shape []
(ziggurat.training.objective.probe_loss)."""

_BACKWARD = ("gradient_norm", "beta_ln", "beta_rc", "beta", "r")
_ALIKE = ("similarity", "embedding_similarity", "adjacent_similarity", "inter_similarity")
MEASURES = (
    "nll",
    "source_dependence",
    *_BACKWARD,
    "variance",
    "output_change",
    "residual_dependency",
    "history_weights",
    "transparent_weights",
    *_ALIKE,
    "attention_entropy",
)
"""Names of what `measure` knows, in the order in which it returns them."""


def measure(model: Seq2Seq, batch: Batch, loss: Loss, which: Collection[str] = MEASURES) -> dict[str, Any]:
    """Return measures of `model` on `batch`: name -> number, list over layers (bottom first), or lists by place.

    The model is measured in the mode it is in: in evaluation mode, without dropout, the same model and batch give the
    same figures. Nothing about it is changed, no gradient is left, and those that are there stay. What has no meaning
    for this model is absent; a single figure that has none is NaN.

    Args:
        model: any; its layers run uncompiled and without recomputation meanwhile.
        batch: any, on any device.
        loss: see Loss.
        which: of MEASURES.
    """
    assert set(which) <= set(MEASURES), set(which) - set(MEASURES)
    with seen_once(model):
        values = _measured(model, batch.to(model.device), loss, which)
    return {name: values[name] for name in MEASURES if name in which and values.get(name) not in (None, {}, [])}


def _measured(model: Seq2Seq, batch: Batch, loss: Loss, which: Collection[str]) -> dict[str, Any]:
    masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
    backward = any(name in _BACKWARD for name in which)
    norms, entropies = NormInputs(model), Entropies(model)
    with contextlib.ExitStack() as watching:
        trace = watching.enter_context(Trace(model))
        if "residual_dependency" in which:
            watching.enter_context(norms)
        if "attention_entropy" in which:
            watching.enter_context(entropies)
        with torch.set_grad_enabled(backward):
            objective, nll = loss(model, batch)
    values: dict[str, Any] = {"nll": float(nll) / batch.target_tokens}
    if "variance" in which:
        values["variance"] = sublayer_variance(trace, masks)
    if "residual_dependency" in which:
        values["residual_dependency"] = residual_dependency(model, trace, norms, masks)
    if any(name in _ALIKE for name in which):
        values |= encoder_similarities(trace, batch.source_mask)
    if "attention_entropy" in which:
        values["attention_entropy"] = entropies.means(masks)
    if backward:
        values |= backward_measures(model, trace, objective, which)
    states = {stack: [None if y is None else y.detach() for y in row] for stack, row in trace.outputs.items()}
    del objective, trace, norms  # and the graph with them
    with torch.no_grad():
        if "output_change" in which:
            values["output_change"] = output_change(model, states, masks, lambda: loss(model, batch))
        if "source_dependence" in which:
            exchanged = float(loss(model, _exchanged(batch))[1]) / batch.target_tokens
            values["source_dependence"] = exchanged - values["nll"]
    return {**values, "history_weights": history_weights(model), "transparent_weights": transparent_weights(model)}


def _exchanged(batch: Batch) -> Batch:
    """Return the batch with every target beside the source of the sentence before it."""
    return replace(batch, source=batch.source.roll(1, 0), source_mask=batch.source_mask.roll(1, 0))
