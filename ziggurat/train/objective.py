"""The objective of training: the model and its loss in one module, and one batch run through it forward and backward.

The loss may contain a penalty that draws the encoder's states of a sentence towards their mean. Li et al. 2020 name
such a regulariser (`Reg-6L`, +0.4 BLEU) without giving its formula or weight, and their released code calls a model for
it that was not released. So the definition is Ziggurat's own:

    L = CE + lambda * sum_s w_s * (1/N) sum_i (1 - sim_in(i, s))

for the sentences s of an update, with sim_in(i, s) = mean_l cos(y_i(l), mean_l y_i(l)) over the real source positions l
and the raw outputs y_i of encoder layers i = 1, ..., N (their section on similarities;
ziggurat.train.diagnosis.measures). With `training.loss.normalisation: tokens`, w_s is the sentence's share of the
update's target tokens, so lambda is in nats per target token; with `sentence_mean` and `sentence_sum` it is 1 /
sentences of the update. Each term lies in [0, 2], and is 0 where all positions of a sentence point the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.freezing import Frozen
from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.dropout import Dropout
from ziggurat.model.fast.precision import maps_of, training_precision
from ziggurat.model.fast.quantised import quantise
from ziggurat.model.inspection import bare_model
from ziggurat.model.low_rank_updates import adapt
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.train.diagnosis.measures import inter_similarities
from ziggurat.train.diagnosis.probe import Loss
from ziggurat.train.loss import Labels, LossSums, sequence_loss, with_guidance


def as_trained(model: Seq2Seq, training: TrainingConfig, *, seed: int | None = None) -> None:
    """Change a model as built into the one that is trained, in place: what is frozen, low-rank updates, int8, dropout.

    `seed`: of the updates' initial values; None: they are left without values. Raises ConfigError as `adapt` does.
    """
    _freeze(model, Frozen.parse(training.freeze))
    if training.lora is not None:
        adapt(model, training.lora, seed=seed)
    if training.quantise is not None:
        quantise(model)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.exact = training.exact_dropout


def _freeze(model: Seq2Seq, frozen: Frozen) -> None:
    """Leave the parameters of these parts and layers without gradients; layers that are yet to grow are passed over."""
    modules: list[nn.Module] = [model.get_submodule(part) for part in frozen.parts]
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        modules += [layer for number, layer in enumerate(stack.layers, start=1) if frozen.has(name, number)]
    for module in modules:
        module.requires_grad_(False)


class Objective(nn.Module):
    """Model and loss as one module, so that DDP and FSDP2 wrap the whole forward pass, output projection included.

    Args:
        model: the model being trained.
        config: its loss.
    """

    def __init__(self, model: Seq2Seq, config: LossConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, batch: Batch, tokens: int, sentences: int) -> LossSums:
        """Return the batch's part of the loss of an update of `tokens` and `sentences`."""
        return batch_loss(self.model, batch, self.config, tokens=tokens, sentences=sentences)


def batch_loss(model: Seq2Seq, batch: Batch, config: LossConfig, *, tokens: int, sentences: int) -> LossSums:
    """Run the model over `batch`, teacher-forced, and return its part of an update of `tokens` and `sentences`."""
    layers: list[Tensor] | None = [] if config.inter_sim else None
    kept = KeptWeights(model.decoder.aligned.head) if config.alignment is not None else None
    # Positional and without None: recorded passes (ziggurat.train.graphs) take no more than the first three.
    wanted = (layers,) if kept is None else (layers, kept)
    hidden = model(batch.source, batch.source_mask, batch.target_in, *wanted)
    output = model.output
    sums = sequence_loss(
        output.rounded(hidden),
        output.rounded(output.weight),
        Labels(batch.target_out, batch.target_mask, batch.target_tokens),
        config,
        tokens=tokens,
        sentences=sentences,
        bias=output.bias,
        ruled_out=output.ruled_out,
    )
    sums = with_guidance(sums, kept, batch, config, tokens=tokens, sentences=sentences)
    if layers is None:
        return sums
    penalty = inter_similarity_penalty(
        layers, batch.source_mask, batch.target_mask, config, tokens=tokens, sentences=sentences
    )
    return sums._replace(objective=sums.objective + penalty)


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

    The penalties of an update's batches add up to that of the update, however it was cut into batches.

    Args:
        outputs: of every encoder layer, [batch, source, d_model].
        source_mask: [batch, source], True at real tokens.
        target_mask: [batch, target], True at real tokens.
        config: lambda (`inter_sim`) and normalisation.
        tokens: real target tokens in the whole update, all batches and processes together.
        sentences: sentence pairs in the whole update.
    """
    apart = 1.0 - inter_similarities(outputs, source_mask).mean(0)
    if config.normalisation == "tokens":
        weight = target_mask.sum(1).to(apart.dtype) / tokens
    else:
        weight = target_mask.any(1).to(apart.dtype) / sentences  # 0 for the sentences of an idle batch
    return config.inter_sim * (weight * apart).sum()


def add_gradients(
    objective: nn.Module, batch: Batch, device: torch.device, precision: str, *, tokens: int, sentences: int
) -> LossSums:
    """Run one batch forward and backward; add its part of the update's gradient to `.grad`, and return its loss.

    Args:
        objective: an Objective, or its wrapper.
        batch: on any device.
        device: where the objective is.
        precision: `training.precision`.
        tokens: real target tokens of the whole update.
        sentences: sentence pairs of the whole update.
    """
    # Every batch has a seed, so dropout masks do not depend on what was run before: resuming needs no random state,
    # and a batch has the same masks in whichever process it is run.
    torch.manual_seed(batch.seed)
    on_device = batch.to(device, non_blocking=True)
    with autocast(device, precision):
        sums: LossSums = objective(on_device, tokens, sentences)
    sums.objective.backward()
    return sums._replace(objective=sums.objective.detach())  # detached, or the sum over batches would keep every graph


def settle_precision(
    experiment: Experiment, device: torch.device, vocabularies: tuple[int, int], agree: Callable[[int], int] = int
) -> Experiment:
    """Return `experiment` with the precision that `training.precision: auto` stands for on `device`.

    `vocabularies` are the sizes of the source's and the target's: a CPU must compute all maps of the model rightly in
    bf16. `agree` turns the answer of this process (1 for bf16, 0 for fp32) into that of all of them: what they measure
    may differ.
    """
    if experiment.training.precision != "auto":
        return experiment
    widths = experiment.model.d_model, experiment.model.d_ff
    found = training_precision(device, widths, lambda: maps_of(bare_model(experiment.model, *vocabularies)))
    precision = "bf16" if agree(found == "bf16") else "fp32"
    training = experiment.training.model_copy(update={"precision": precision})
    return experiment.model_copy(update={"training": training})


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of forward passes: bf16 matrix products, or nothing for fp32."""
    if precision == "auto":  # it would silently mean fp32
        raise ValueError("settle_precision comes first")
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def probe_loss(config: LossConfig, precision: str) -> Loss:
    """Return the loss that ziggurat.train.diagnosis.probe.measure runs: that of training, as if a batch were an update.

    Args:
        config: section `training.loss`.
        precision: `training.precision`.
    """

    def loss(model: Seq2Seq, batch: Batch) -> tuple[Tensor, Tensor]:
        with autocast(model.device, precision):
            sums = batch_loss(model, batch, config, tokens=batch.target_tokens, sentences=batch.sentences)
            return sums.objective, sums.nll

    return loss


@contextmanager
def with_layer_drop(model: Seq2Seq, probability: float) -> Iterator[None]:
    """Context in which LayerDrop leaves a layer out with `probability`, in stacks that have LayerDrop at all."""
    stacks = [stack for stack in (model.encoder, model.decoder) if isinstance(stack, Encoder | Decoder)]
    drops = [(stack, stack.layer_drop) for stack in stacks if stack.layer_drop]
    for stack, _ in drops:
        stack.layer_drop = probability
    try:
        yield
    finally:
        for stack, drop in drops:
            stack.layer_drop = drop


@contextmanager
def every_branch_present(model: Seq2Seq) -> Iterator[None]:
    """Context of training mode without LayerDrop; both are as before when it ends."""
    training = model.training
    model.train()
    try:
        with with_layer_drop(model, 0.0):
            yield
    finally:
        model.train(training)
