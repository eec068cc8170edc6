"""Trained weights across depth: what each layer reads of those below, and each decoder layer of the encoder's."""

from __future__ import annotations

from typing import cast

import torch

from ziggurat.diagnosis.hooks import STACKS, layers_of
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Encoder
from ziggurat.nn.history import History, Transparent

__all__ = ["history_weights", "transparent_weights"]


@torch.no_grad()
def history_weights(model: Seq2Seq) -> dict[str, list[list[float]]]:
    """Return the weights of each stack that combines layers, [consumer l][source k] (Wang et al. 2019, figure 5).

    Row l is what layer l + 1 reads (the last one: the stack's output), column k the output y_k, 0 the stack's input;
    with `combination.unit: sublayer` both count sub-layers. NaN is what is never read. See History.table.
    """
    histories = {stack: getattr(getattr(model, stack), "history", None) for stack in STACKS}
    tables = {stack: cast(History, h).table() for stack, h in histories.items() if h is not None}
    return {stack: table.tolist() for stack, table in tables.items() if table is not None}


@torch.no_grad()
def transparent_weights(model: Seq2Seq) -> list[list[float]]:
    """Return the mixtures of transparent attention, [source i][decoder layer j] (Bapna et al. 2018, figure 4).

    Source 0 is the embedding, i the output of encoder layer i; the weights of a decoder layer sum to 1. RNMT+ does not
    mix its embedding, which is NaN, and has one mixture for all. Empty where the memory is not transparent.
    """
    transparent: Transparent | None = getattr(model.encoder, "transparent", None)
    if transparent is None:
        return []
    rows: list[list[float]] = transparent.weight.softmax(-1).T.tolist()
    missing = len(layers_of(model, "encoder")) + 1 - len(rows)
    assert missing == (not isinstance(model.encoder, Encoder))
    return [[torch.nan] * len(rows[0])] * missing + rows
