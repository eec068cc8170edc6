"""The inter-similarity penalty: encoder states of a sentence are drawn to their mean (defined here, see below).

Li et al. 2020 name such a regulariser (`Reg-6L`, +0.4 BLEU) without giving its formula or weight, and the code they
released leaves it to a model that is not part of it. So the definition is Ziggurat's own:

    L = CE + lambda * sum_s w_s * (1/N) sum_i (1 - sim_in(i, s))

for the sentences s of an update, with sim_in(i, s) = mean_l cos(y_i(l), mean_l y_i(l)) over the real source positions l
and the raw outputs y_i of encoder layers i = 1, ..., N (their section on similarities; ziggurat.diagnosis.measures).
With `training.loss.normalisation: tokens`, w_s is the share of the sentence's target tokens in those of the update, so
that lambda is in nats per target token; with `sentence_mean` and `sentence_sum` it is 1 / sentences of the update. Each
term is in [0, 2], and 0 where all positions of a sentence point the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ziggurat.config.train import LossConfig
from ziggurat.diagnosis.measures import inter_similarities

__all__ = ["inter_similarity_penalty"]


def inter_similarity_penalty(
    outputs: Sequence[Tensor],
    source_mask: Tensor,
    target_mask: Tensor,
    config: LossConfig,
    *,
    tokens: int,
    sentences: int,
) -> Tensor:
    """Return the penalty of a batch as its part of an update's loss, nats, shape [].

    Args:
        outputs: of every encoder layer, [batch, source, d_model].
        source_mask: [batch, source], True at real tokens.
        target_mask: [batch, target], True at real tokens.
        config: lambda (`inter_sim`) and normalisation.
        tokens: real target tokens in the whole update, all batches and processes together.
        sentences: sentence pairs in the whole update.

    So the penalties of an update's batches add up to its penalty, however it was cut into batches.
    """
    apart = 1.0 - inter_similarities(outputs, source_mask).mean(0)
    if config.normalisation == "tokens":
        weight = target_mask.sum(1).to(apart.dtype) / tokens
    else:
        weight = target_mask.any(1).to(apart.dtype) / sentences  # an idle batch counts for nothing
    return config.inter_sim * (weight * apart).sum()
