"""Guided alignment: word alignments teach one head of the decoder where to look (Chen et al. 2016; Garg et al. 2019).

For each target token j with links, the loss has

    lambda * w_j * -sum_s A_js log P_js

beside the token's cross-entropy, which has the same weight w_j (`training.loss.normalisation`). A_j is uniform over the
source tokens that j is linked to, P_j the attention to the source at the position that predicts j, before dropout.
Tokens without links have no such loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.data.corpus import Store
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.system.errors import DataError
from ziggurat.train.loss import LossSums, token_weights

_LEAST = 1e-20
"""Attention below this counts as this: what rounds to 0 has no logarithm. Its -log is 46 nats, and the gradient of that
through the softmax is finite."""


def alignment_loss(
    attention: Tensor, batch: Batch, config: LossConfig, *, tokens: int, sentences: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch that has links, and its sums.

    Args:
        attention: P [batch, target, source].
        batch: with links.
        config: normalisation; lambda is not applied.
        tokens: real target tokens in the whole update, all batches and processes together.
        sentences: sentence pairs in the whole update.

    Returns: the sum over tokens [], each with its weight, and without weights as in LossSums.alignment [2].
    """
    places, shares = batch.link_places, batch.link_shares
    assert places is not None
    assert shares is not None
    found = attention.flatten().index_select(0, places)
    found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    losses = shares * -found.clamp_min(_LEAST).log()
    rows = token_weights(
        batch.target_mask, places // attention.shape[2], config, losses.dtype, tokens=tokens, sentences=sentences
    )
    return (rows * losses).sum(), torch.stack([losses.sum(), shares.sum()]).detach()


def with_guidance(
    sums: LossSums, kept: KeptWeights | None, batch: Batch, config: LossConfig, *, tokens: int, sentences: int
) -> LossSums:
    """Return the loss of a batch with that of guided alignment, if there is any.

    Args:
        sums: the loss without it.
        kept: where the model left its attention; None: guided alignment is off. It is empty where LayerDrop has left
            out the layer.
        batch: of which `sums` is the loss.
        config: weight and normalisation.
        tokens: as in alignment_loss.
        sentences: likewise.
    """
    if kept is None or config.alignment is None:
        return sums
    if kept.weights is None or batch.link_places is None:
        return sums._replace(alignment=sums.nll.new_zeros(2))
    loss, counted = alignment_loss(kept.weights, batch, config, tokens=tokens, sentences=sentences)
    return LossSums(sums.objective + config.alignment.weight * loss, sums.nll, counted)


def refuse_without_links(experiment: Experiment, store: Store) -> None:
    """Raise DataError when the run wants guided alignment and the store has no word alignments."""
    if experiment.training.loss.alignment is not None and not store.train.has_links:
        raise DataError(
            f"{store.path}: holds no word alignments, which `training.loss.alignment` needs; set `alignment` of the "
            "corpora in data.train, or `data.alignment.compute=hmm`, and run `ziggurat prepare --force`"
        )
