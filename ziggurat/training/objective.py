"""What is minimised: the model and its loss in one module, and one batch run through it forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.diagnosis.probe import Loss
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.loss import Gold, LossSums, sequence_loss
from ziggurat.training.regulariser import inter_similarity_penalty

__all__ = ["Objective", "add_gradients", "autocast", "batch_loss", "probe_loss"]


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
        ruled_out=output.ruled_out,
    )
    if layers is None:
        return sums
    penalty = inter_similarity_penalty(
        layers, batch.source_mask, batch.target_mask, config, tokens=tokens, sentences=sentences
    )
    return LossSums(sums.objective + penalty, sums.nll)


class Objective(nn.Module):
    """Model and loss as one module: what DDP and FSDP2 wrap sees the whole forward pass, the projection included.

    Args:
        model: what is trained.
        config: its loss.
    """

    def __init__(self, model: Seq2Seq, config: LossConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, batch: Batch, tokens: int, sentences: int) -> tuple[Tensor, Tensor]:
        """Return what `batch_loss` does, as a tuple (objective, nll), which wrappers can look into."""
        sums = batch_loss(self.model, batch, self.config, tokens=tokens, sentences=sentences)
        return sums.objective, sums.nll


def add_gradients(
    objective: nn.Module, batch: Batch, device: torch.device, precision: str, *, tokens: int, sentences: int
) -> LossSums:
    """Run one batch forward and backward; its part of the update's gradient is added to `.grad`. Returns its losses.

    torch's generators begin at the batch's own seed, so that nothing random depends on what was run before.

    Args:
        objective: an Objective, or what wraps it.
        batch: on any device.
        device: where the objective is.
        precision: `training.precision`.
        tokens: real target tokens of the whole update.
        sentences: sentence pairs of the whole update.
    """
    torch.manual_seed(batch.seed)
    on_device = batch.to(device, non_blocking=True)
    with autocast(device, precision):
        loss, nll = objective(on_device, tokens, sentences)
    loss.backward()
    return LossSums(loss.detach(), nll)


def probe_loss(config: LossConfig, precision: str) -> Loss:
    """Return what ziggurat.diagnosis.probe.measure runs: the loss of training, as if a batch were a whole update.

    Args:
        config: section `training.loss`.
        precision: `training.precision`.
    """

    def loss(model: Seq2Seq, batch: Batch) -> tuple[Tensor, Tensor]:
        with autocast(model.device, precision):
            sums = batch_loss(model, batch, config, tokens=batch.target_tokens, sentences=batch.sentences)
        return sums.objective, sums.nll

    return loss
