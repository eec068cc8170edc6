"""Micro-batches -> one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.capacity import Shortage, within_memory
from ziggurat.training.clipping import AdaptiveClipper
from ziggurat.training.loss import Gold, LossSums, sequence_loss
from ziggurat.training.optim import Optimiser
from ziggurat.training.regulariser import inter_similarity_penalty

__all__ = ["Guard", "UpdateResult", "add_gradients", "autocast", "batch_loss", "train_update"]


@dataclass(frozen=True)
class UpdateResult:
    """What one update measured.

    Attributes:
        loss: the update's objective (normalised, smoothed, with its penalty), nats.
        nll: sum of -log p(gold) over target tokens, nats.
        grad_norm: global gradient norm before clipping.
        source_tokens: real source tokens, end-of-sentence included.
        target_tokens: real target tokens, end-of-sentence included.
        sentences: sentence pairs.
        finite: False when loss or gradient was not finite; the update was then skipped.
        admitted: False when adaptive clipping skipped the update.
        spike: True when the update was skipped for a loss far above its running median.
        shortage: what was short when there was not enough memory for the update, which was then skipped; loss, nll
            and norm are NaN then.
    """

    loss: float
    nll: float
    grad_norm: float
    source_tokens: int
    target_tokens: int
    sentences: int
    finite: bool
    admitted: bool = True
    spike: bool = False
    shortage: Shortage | None = None

    @property
    def taken(self) -> bool:
        """Whether the weights were changed."""
        return self.finite and self.admitted and not self.spike and self.shortage is None


@dataclass(frozen=True)
class Guard:
    """What may keep an update from being taken, besides numbers that are not finite.

    Attributes:
        clipper: of `training.adaptive_clip`, or None.
        highest_nll: nats per target token; a loss above is a spike.
        agree: for several processes (ziggurat.training.capacity.within_memory).
    """

    clipper: AdaptiveClipper | None = None
    highest_nll: float = math.inf
    agree: Callable[[bool], bool] = bool


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of forward passes: bf16 matrix products, or nothing for fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def batch_loss(model: Seq2Seq, batch: Batch, config: LossConfig, *, tokens: int, sentences: int) -> LossSums:
    """Run the model over `batch`, teacher-forced, and return its part of an update of `tokens` and `sentences`."""
    layers: list[Tensor] | None = [] if config.inter_sim else None
    hidden = model(batch.source, batch.source_mask, batch.target_in, layers)
    output = model.output
    sums = sequence_loss(
        hidden,
        output.weight,
        Gold(batch.target_out, batch.target_mask, batch.target_tokens),
        config,
        tokens=tokens,
        sentences=sentences,
        bias=output.bias,
    )
    if layers is None:
        return sums
    penalty = inter_similarity_penalty(
        layers, batch.source_mask, batch.target_mask, config, tokens=tokens, sentences=sentences
    )
    return LossSums(sums.objective + penalty, sums.nll)


def add_gradients(
    model: Seq2Seq, batch: Batch, config: LossConfig, precision: str, *, tokens: int, sentences: int
) -> LossSums:
    """Run one batch forward and backward; its part of the update's gradient is added to `.grad`. Returns its losses."""
    on_device = batch.to(model.device, non_blocking=True)
    with autocast(model.device, precision):
        sums = batch_loss(model, on_device, config, tokens=tokens, sentences=sentences)
    sums.objective.backward()
    return LossSums(sums.objective.detach(), sums.nll)


def train_update(
    model: Seq2Seq,
    batches: Sequence[Batch],
    optimiser: Optimiser,
    loss_config: LossConfig,
    *,
    rate: float,
    clip_norm: float | None,
    guard: Guard | None = None,
    precision: str = "fp32",
) -> UpdateResult:
    """Accumulate the gradients of `batches`, clip, and take one optimiser step with learning rate `rate`.

    The loss is normalised by the token (or sentence) count of all batches together, so that cutting an update
    into batches differently changes nothing but rounding. The step is skipped, and nothing changed, when loss or
    gradient is not finite, when memory is short, or when `guard` has a reason.
    """
    guard = guard or Guard()
    model.train()
    tokens = sum(batch.target_tokens for batch in batches)
    sentences = sum(batch.sentences for batch in batches)
    counts = sum(batch.source_tokens for batch in batches), tokens, sentences

    def accumulate() -> LossSums:
        objective: Tensor | float = 0.0
        nll: Tensor | float = 0.0
        for batch in batches:
            sums = add_gradients(model, batch, loss_config, precision, tokens=tokens, sentences=sentences)
            objective, nll = objective + sums.objective, nll + sums.nll
        return LossSums(torch.as_tensor(objective), torch.as_tensor(nll))

    sums = within_memory(accumulate, model.device, guard.agree)
    if isinstance(sums, Shortage):
        optimiser.zero_grad()
        return UpdateResult(math.nan, math.nan, math.nan, *counts, finite=False, shortage=sums)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    loss, nll, grad_norm = torch.stack([sums.objective, sums.nll, norm]).tolist()  # the only wait for a GPU
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = finite and nll > guard.highest_nll * tokens
    admitted = not finite or spike or guard.clipper is None or guard.clipper.admits(grad_norm)
    if finite and admitted and not spike:
        if clip_norm is not None and grad_norm > clip_norm:
            torch._foreach_mul_(gradients, clip_norm / (grad_norm + 1e-6))
        optimiser.set_rate(rate)
        optimiser.step()
    optimiser.zero_grad()
    return UpdateResult(loss, nll, grad_norm, *counts, finite, admitted, spike)
