"""Label-smoothed cross-entropy that never builds the logits [tokens, vocabulary] of a whole batch (docs/training.md).

R-Drop pulls two passes with different dropout together (Liang et al. 2021). Guided alignment trains one head of the
decoder on word alignments (Chen et al. 2016; Garg et al. 2019).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ziggurat.config import Experiment
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.linear import product
from ziggurat.system.errors import DataError


class Smoothing(NamedTuple):
    """Smoothed target distribution over V types: mass `every` on each type, plus `gold` on the gold token.

    The total is 1: gold + V every = 1.
    """

    gold: float
    every: float

    def entropy(self, vocabulary: int) -> float:
        """Return the entropy of the smoothed target in nats: the loss of a perfect model."""
        return -sum(
            n * q * math.log(q) for n, q in ((1, self.gold + self.every), (vocabulary - 1, self.every)) if q > 0
        )


def smoothing_of(config: LossConfig, vocabulary: int) -> Smoothing:
    """Return the target distribution of `config.smoothing`.

    `uniform` spreads the mass over all types, as fairseq did until 2021 and the papers' forks of it still do; `others`
    over all but the gold one, as tensor2tensor, zero and today's fairseq do.
    """
    e = config.label_smoothing
    if config.smoothing == "uniform":
        return Smoothing(1.0 - e, e / vocabulary)
    every = e / (vocabulary - 1)
    return Smoothing(1.0 - e - every, every)


class _Gradients(NamedTuple):
    """Gradients of the loss with respect to its inputs, in their shapes; None: no bias, or a frozen one."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def subtract_targets(
        self,
        hidden: Tensor,
        weight: Tensor,
        weight_sum: Tensor,
        target: Tensor,
        row_weight: Tensor,
        smoothing: Smoothing,
    ) -> None:
        """Subtract the smoothed target's part, row_weight (gold onehot + every); `weight_sum` [d_model] sums types."""
        correction = weight[target].mul_(smoothing.gold).add_(weight_sum, alpha=smoothing.every)
        self.hidden.sub_(correction.mul_(row_weight[:, None]))
        weighted = hidden * row_weight[:, None]
        if self.weight is not None:
            self.weight.index_add_(0, target, weighted, alpha=-smoothing.gold)
            self.weight.sub_(weighted.sum(0), alpha=smoothing.every)
        if self.bias is not None:
            self.bias.index_add_(0, target, row_weight, alpha=-smoothing.gold)
            self.bias.sub_(row_weight.sum(), alpha=smoothing.every)

    def freeze(self, ruled_out: Tensor) -> None:
        """Zero the gradient of the rows of tokens `ruled_out` [n], where the smoothed target has no mass."""
        if self.weight is not None:
            self.weight.index_fill_(0, ruled_out, 0.0)
        if self.bias is not None:
            self.bias.index_fill_(0, ruled_out, 0.0)


def _sums_of_types(weight: Tensor, bias: Tensor | None, ruled_out: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Return the sums over all types but the `ruled_out` of `weight` [vocabulary, d_model] and of `bias`."""
    weight_sum, bias_sum = weight.sum(0), 0.0 if bias is None else bias.sum()
    if ruled_out is not None:
        weight_sum -= weight[ruled_out].sum(0)
        if bias is not None:  # recomputed, since subtracting values of -1e9 would cancel all the others
            bias_sum = bias.index_fill(0, ruled_out, 0.0).sum()
    return weight_sum, bias_sum


class _LinearCrossEntropy(torch.autograd.Function):
    """Projection and cross-entropy, `chunk` rows of logits at a time, gradients computed in the forward pass.

    With p = softmax(h W^T + b), the gradient of row i's loss with respect to its logits is p - gold onehot - every.
    Only p needs [chunk, vocabulary] values; the other two terms are applied to h, W and b directly:
    every * sum_v W_v and gold * W_target. So each chunk of logits is written once, exponentiated in place and
    multiplied twice. The backward pass only scales the gradients; computing them there would need the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_weight: Tensor,
        smoothing: Smoothing,
        chunk: int,
        ruled_out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        gradients = None
        if any(ctx.needs_input_grad):
            _, of_weight, of_bias, *_ = ctx.needs_input_grad
            grad_bias = torch.zeros_like(bias) if of_bias and bias is not None else None
            gradients = _Gradients(torch.empty_like(hidden), torch.zeros_like(weight) if of_weight else None, grad_bias)
        weight_sum, bias_sum = _sums_of_types(weight, bias, ruled_out)
        nll, smoothed = hidden.new_zeros(()), hidden.new_zeros(())
        compute = torch.get_autocast_dtype(hidden.device.type)
        compute = compute if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        # Autocast is off and the large products are cast by hand: on a GPU, autocast would also run mv and addmv, whose
        # sums need fp32, in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, hidden.shape[0], chunk):
                rows = slice(start, start + chunk)
                h, gold_ids, w = hidden[rows], target[rows], row_weight[rows]
                # (1) Logits, and the values that need them unchanged.
                logits = product(h.to(compute), matrix).to(hidden.dtype)
                if bias is not None:
                    logits += bias
                gold = logits.gather(1, gold_ids[:, None]).squeeze(1)
                total = torch.mv(h, weight_sum) + bias_sum  # sum of a row's logits, without another pass over them
                # Subtracted before exp, which overflows fp32 from 89.
                peak = logits.amax(1, keepdim=True)
                # (2) The unnormalised softmax, in the memory of the logits.
                odds = logits.sub_(peak).exp_()
                odds_sum = odds.sum(1)
                log_sum = peak.squeeze(1) + odds_sum.log()
                # (3) The losses: log-sum-exp minus the target's part.
                losses = log_sum - gold
                if ruled_out is not None:
                    losses.masked_fill_(torch.isin(gold_ids, ruled_out), 0.0)
                nll += losses.sum()
                smoothed += torch.dot(log_sum - smoothing.gold * gold - smoothing.every * total, w)
                # (4) The softmax's part of the gradients; its normalisation scales [chunk, d_model] values, not logits.
                if gradients is not None:
                    scale = (w / odds_sum)[:, None]
                    if gradients.bias is not None:
                        gradients.bias.addmv_(odds.t(), scale.squeeze(1))
                    odds = odds.to(compute)
                    gradients.hidden[rows] = product(odds, matrix.t()) * scale
                    if gradients.weight is not None:
                        gradients.weight.add_(product(odds.t(), (h * scale).to(compute).t()))
            if gradients is not None:
                gradients.subtract_targets(hidden, weight, weight_sum, target, row_weight, smoothing)
                if ruled_out is not None:
                    gradients.freeze(ruled_out)
                ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = (None if part is None else part * gradients[0] for part in ctx.saved_tensors)
        return *saved, None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    row_weight: Tensor,
    smoothing: Smoothing,
    chunk: int,
    bias: Tensor | None = None,
    ruled_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum_i row_weight_i * smoothed loss_i, sum_i -log p(target_i)), both in nats, shape [].

    Args:
        hidden: [tokens, d_model]; only real tokens.
        weight: output projection [vocabulary, d_model].
        target: ids of the gold tokens [tokens].
        row_weight: [tokens], the weight of each token's loss.
        smoothing: target distribution.
        chunk: number of rows of logits in memory at a time.
        bias: bias of the output projection, [vocabulary], or None.
        ruled_out: ids [n] of tokens that the bias makes impossible, or None; `smoothing` puts no mass on them, and the
            weight of a row whose target is one of them is 0.

    Only the first result can be differentiated, with respect to `hidden`, `weight` and `bias`.
    """
    smoothed, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, row_weight, smoothing, chunk, ruled_out
    )
    return smoothed, nll


class Labels(NamedTuple):
    """The gold tokens of a batch.

    Attributes:
        ids: [batch, target], end-of-sentence included.
        mask: [batch, target], True at real tokens.
        real: number of real tokens; counting them in the mask would wait for a GPU.
    """

    ids: Tensor
    mask: Tensor
    real: int

    def places(self) -> Tensor:
        """Return the indices of the real tokens in the flattened batch, [real]."""
        return torch.nonzero_static(self.mask.flatten(), size=self.real).squeeze(1)


class LossSums(NamedTuple):
    """Loss of one batch; a tuple, since FSDP2 finds output tensors in tuples.

    Attributes:
        objective: the quantity that is minimised, already normalised; shape [].
        nll: sum of -log p(gold) over the batch's tokens, nats; shape [].
        alignment: [2], the cross-entropy of guided alignment summed over target tokens with links, nats, and the number
            of these tokens; None without guided alignment.
    """

    objective: Tensor
    nll: Tensor
    alignment: Tensor | None = None


def _token_weights(
    mask: Tensor, places: Tensor, config: LossConfig, dtype: torch.dtype, *, tokens: int, sentences: int
) -> Tensor:
    """Return the weight of each token's loss in an update, in the shape of `places` [n].

    `mask` [batch, target] is True at real tokens, `places` are indices into the flattened batch; for the rest see
    sequence_loss.
    """
    match config.normalisation:
        case "tokens":
            return torch.full_like(places, 1.0 / tokens, dtype=dtype)
        case "sentence_sum":
            return torch.full_like(places, 1.0 / sentences, dtype=dtype)
        case "sentence_mean":
            per_sentence = 1.0 / (mask.sum(1).to(dtype) * sentences)
            return per_sentence.index_select(0, places // mask.shape[1])
        case _:
            assert_never(config.normalisation)


def sequence_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    config: LossConfig,
    *,
    tokens: int,
    sentences: int,
    bias: Tensor | None = None,
    ruled_out: Tensor | None = None,
) -> LossSums:
    """Return a batch's share of the loss of its update.

    The objectives of an update's batches add up to its loss, however it is divided into batches.

    Args:
        hidden: decoder output [batch, target, d_model].
        weight: output projection [vocabulary, d_model].
        labels: the gold tokens.
        config: smoothing and normalisation.
        tokens: real target tokens in the whole update, over all batches and processes.
        sentences: sentence pairs in the whole update.
        bias: bias of the output projection, [vocabulary], or None.
        ruled_out: ids [n] of tokens that the bias makes impossible, or None. The smoothed target has no mass on them,
            and target tokens among them do not count: no gradient could make the model produce them, and their -log p
            depends only on the bias.
    """
    possible = weight.shape[0] - (0 if ruled_out is None else len(ruled_out))
    smoothing = smoothing_of(config, possible)
    places = labels.places()
    rows = hidden.flatten(0, 1).index_select(0, places)
    if rows.dtype in (torch.bfloat16, torch.float16):
        rows = rows.float()  # sums over the vocabulary need fp32; only the products are in half precision
    ids = labels.ids.flatten().index_select(0, places)
    row_weight = _token_weights(labels.mask, places, config, rows.dtype, tokens=tokens, sentences=sentences)
    if ruled_out is not None:
        row_weight = row_weight.masked_fill(torch.isin(ids, ruled_out), 0.0)
    objective, nll = linear_cross_entropy(
        rows, weight, ids, row_weight, smoothing, config.chunk_tokens, bias, ruled_out
    )
    if config.subtract_entropy:
        objective = objective - smoothing.entropy(possible) * row_weight.sum()
    return LossSums(objective, nll)


def r_drop_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    config: LossConfig,
    *,
    tokens: int,
    sentences: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return alpha / 4 * sum_j w_j (KL(P_j || Q_j) + KL(Q_j || P_j)), shape []: R-Drop (Liang et al. 2021).

    P_j and Q_j are the predictions of two passes with different dropout for target token j, and w_j is the weight of
    its cross-entropy. The paper's loss is the sum of both passes' cross-entropy and alpha / 2 times both divergences;
    this is half of it, which makes it comparable to other losses and suits `training.clip_norm`.

    Args:
        hidden: decoder output of both passes [2 batch, target, d_model].
        weight: output projection [vocabulary, d_model].
        labels: the gold tokens, once.
        config: alpha (`r_drop`), normalisation, and how many rows of logits exist at a time.
        tokens: number of tokens in the whole update, as in sequence_loss.
        sentences: number of sentences in the whole update.
        bias: bias of the output projection, [vocabulary], or None.
    """
    places = labels.places()
    one, other = (half.flatten(0, 1).index_select(0, places) for half in hidden.chunk(2))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = _token_weights(labels.mask, places, config, wide, tokens=tokens, sentences=sentences)
    total = hidden.new_zeros((), dtype=wide)
    for start in range(0, labels.real, config.chunk_tokens):
        part = slice(start, start + config.chunk_tokens)
        # Recomputed in the backward pass, so that only one chunk of logits is in memory.
        pair = one[part], other[part]
        total = total + checkpoint(
            _divergence, *pair, weight, bias, weights[part], use_reentrant=False, preserve_rng_state=False
        )
    return config.r_drop / 4 * total


def _divergence(one: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
    """Return the sum over rows of weights [n] times KL(P || Q) + KL(Q || P) = sum over types of (p - q) log(p / q)."""
    p, q = (F.linear(states, weight, bias).to(weights.dtype).log_softmax(-1) for states in (one, other))
    return torch.dot(((p.exp() - q.exp()) * (p - q)).sum(-1), weights)


_LEAST = 1e-20
"""_LEAST is the floor on attention, because a value that rounds to 0 has no logarithm. Its -log is 46 nats, whose
gradient through the softmax is finite."""


def alignment_loss(
    attention: Tensor, batch: Batch, config: LossConfig, *, tokens: int, sentences: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of guided alignment of a batch, and its sums.

    Each target token j with links adds w_j * -sum_s A_js log P_js, where w_j is the weight of the token's cross-entropy
    (`training.loss.normalisation`), A_j is uniform over the source tokens that j is linked to, and P_j is the attention
    to the source at the position that predicts j, before dropout.

    Args:
        attention: P [batch, target, source].
        batch: with links.
        config: normalisation; lambda is not applied.
        tokens: number of tokens in the whole update, as in sequence_loss.
        sentences: number of sentences in the whole update.

    Returns: the sum over tokens [], each with its weight, and without weights as in LossSums.alignment [2].
    """
    places, shares = batch.link_places, batch.link_shares
    assert places is not None
    assert shares is not None
    found = attention.flatten().index_select(0, places)
    found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
    losses = shares * -found.clamp_min(_LEAST).log()
    rows = _token_weights(
        batch.target_mask, places // attention.shape[2], config, losses.dtype, tokens=tokens, sentences=sentences
    )
    return (rows * losses).sum(), torch.stack([losses.sum(), shares.sum()]).detach()


def with_guidance(
    sums: LossSums, kept: KeptWeights | None, batch: Batch, config: LossConfig, *, tokens: int, sentences: int
) -> LossSums:
    """Return the loss of a batch, `sums` so far, plus that of guided alignment, if any.

    `kept` holds the model's attention and is empty if LayerDrop skipped the layer; None: guided alignment is off.
    `tokens` and `sentences` are as in sequence_loss.
    """
    if kept is None or config.alignment is None:
        return sums
    if kept.weights is None or batch.link_places is None:
        return sums._replace(alignment=sums.nll.new_zeros(2))
    loss, counted = alignment_loss(kept.weights, batch, config, tokens=tokens, sentences=sentences)
    return LossSums(sums.objective + config.alignment.weight * loss, sums.nll, counted)


def refuse_without_links(experiment: Experiment, store: Store) -> None:
    """Raise DataError when the run uses guided alignment and the store has no word alignments."""
    if experiment.training.loss.alignment is not None and not store.train.has_links:
        raise DataError(
            f"{store.path}: holds no word alignments, which `training.loss.alignment` needs; set `alignment` of the "
            "corpora in data.train, or `data.alignment.compute=hmm`, and run `ziggurat prepare --force`",
            key="training.loss.alignment",
            named=["data.train", "data.alignment.compute"],
        )
