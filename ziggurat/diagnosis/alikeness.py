"""Similarities of a model's encoder states, as figures of a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ziggurat.diagnosis.hooks import Trace
from ziggurat.diagnosis.measures import inter_similarities, similarities

__all__ = ["encoder_similarities"]


@torch.no_grad()
def encoder_similarities(trace: Trace, mask: Tensor) -> dict[str, Any]:
    """Return `similarity`, `embedding_similarity`, `adjacent_similarity` and `inter_similarity`, means over sentences.

    y_0 is the encoder's input, embedding and position, y_i the output of layer i, of hyper-connections the sum of its
    streams (ziggurat.diagnosis.measures). Where the input is of another width than the layers (RNMT+), what compares
    the two is NaN. Empty where a layer was left out.

    Args:
        trace: of a forward pass.
        mask: [batch, source], True at real tokens.
    """
    if any(state is None for state in trace.outputs["encoder"]):
        return {}
    embedded, outputs = trace.embedded["encoder"], cast(list[Tensor], trace.outputs["encoder"])
    states = [state.sum(-2) if state.dim() == 4 else state for state in outputs]
    comparable = embedded.shape[-1] == states[0].shape[-1]
    inter = torch.cat([inter_similarities([embedded], mask), inter_similarities(states, mask)]).mean(1)
    table = inter.new_full((1 + len(states), 1 + len(states)), torch.nan)
    first = 0 if comparable else 1
    table[first:, first:] = similarities([embedded, *states] if comparable else states, mask).mean(2)
    return {
        "similarity": table.tolist(),
        "embedding_similarity": table[1:, 0].tolist(),
        "adjacent_similarity": table.diagonal(-1).tolist(),
        "inter_similarity": inter.tolist(),
    }
