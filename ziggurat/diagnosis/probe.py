"""All measures of a model on one batch (docs/diagnosis.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ziggurat.data.collate import Batch
from ziggurat.diagnosis.gradients import backward_measures, sublayer_variance
from ziggurat.diagnosis.hooks import Trace, seen_once
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["MEASURES", "Loss", "measure"]

Loss = Callable[[Seq2Seq, Batch], tuple[Tensor, Tensor]]
"""Runs a model over a batch; returns what training minimises, and the sum of -log p(gold), nats, both of shape []
(ziggurat.training.objective.probe_loss)."""

_BACKWARD = ("gradient_norm", "beta_ln", "beta_rc", "beta", "r")
MEASURES = ("nll", "source_dependence", *_BACKWARD, "variance")
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
    batch = batch.to(model.device)
    values: dict[str, Any] = {}
    with torch.enable_grad(), seen_once(model), Trace(model) as trace:
        objective, nll = loss(model, batch)
    if "variance" in which:
        masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
        values["variance"] = sublayer_variance(trace, masks)
    if any(name in _BACKWARD for name in which):
        values |= backward_measures(model, trace, objective, which)
    del objective, trace
    values["nll"] = float(nll) / batch.target_tokens
    if "source_dependence" in which:
        with torch.no_grad(), seen_once(model):
            values["source_dependence"] = float(loss(model, _exchanged(batch))[1]) / batch.target_tokens - values["nll"]
    return {name: values[name] for name in MEASURES if name in which and values.get(name) not in (None, {})}


def _exchanged(batch: Batch) -> Batch:
    """Return the batch with every target beside the source of the sentence before it."""
    return replace(batch, source=batch.source.roll(1, 0), source_mask=batch.source_mask.roll(1, 0))
