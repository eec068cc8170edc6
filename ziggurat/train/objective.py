"""The objective of training, the model and its loss in one module; one batch run through it forward and backward."""

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
from ziggurat.model.counts import bare_model
from ziggurat.model.dropout import Dropout
from ziggurat.model.fast.int8 import quantise
from ziggurat.model.fast.precision import maps_of, training_precision
from ziggurat.model.low_rank import adapt
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.train.diagnosis.measures import inter_similarities
from ziggurat.train.diagnosis.probe import Loss
from ziggurat.train.loss import Labels, LossSums, r_drop_loss, sequence_loss, with_guidance


def as_trained(model: Seq2Seq, training: TrainingConfig, *, seed: int | None = None) -> None:
    """Turn a newly built model into the one that is trained, in place: frozen parts, low-rank updates, int8, dropout.

    `seed` determines the updates' initial values; None: they are left uninitialised. Raises ConfigError as `adapt`
    does.
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
    """Disable gradients for the parameters of these parts and layers; layers that are not yet grown are ignored."""
    modules: list[nn.Module] = [model.get_submodule(part) for part in frozen.parts]
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        modules += [layer for number, layer in enumerate(stack.layers, start=1) if frozen.has(name, number)]
    for module in modules:
        module.requires_grad_(False)


class Objective(nn.Module):
    """Model and loss as one module, so that FSDP2 wraps the whole forward pass, output projection included."""

    def __init__(self, model: Seq2Seq, config: LossConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, batch: Batch, tokens: int, sentences: int) -> LossSums:
        """Run the model over `batch`, teacher-forced; return its part of the loss of an update.

        With R-Drop, a training batch is passed twice, as one batch with twice as many sentences in an update of twice
        the size.
        """
        model, config = self.model, self.config
        layers: list[Tensor] | None = [] if config.inter_sim else None
        kept = KeptWeights(model.decoder.aligned.head) if config.alignment is not None else None
        # Positional and without None: recorded passes take only the first three.
        wanted = (layers,) if kept is None else (layers, kept)
        passes = 2 if config.r_drop and model.training else 1
        seen = batch if passes == 1 else batch.twice()
        counts = {"tokens": tokens, "sentences": sentences}
        doubled = {name: passes * count for name, count in counts.items()}
        hidden = model(seen.source, seen.source_mask, seen.target_in, *wanted)
        output = model.output
        states, weight = output.rounded(hidden), output.rounded(output.matrix)
        labels = Labels(seen.target_out, seen.target_mask, seen.target_tokens)
        sums = sequence_loss(states, weight, labels, config, **doubled, bias=output.bias, ruled_out=output.ruled_out)
        if passes == 2:
            once = Labels(batch.target_out, batch.target_mask, batch.target_tokens)
            apart = r_drop_loss(states, weight, once, config, **counts, bias=output.bias)
            sums = sums._replace(objective=sums.objective + apart, nll=sums.nll / 2)
        sums = with_guidance(sums, kept, batch, config, **counts)  # by the first pass
        if layers is None:
            return sums
        penalty = inter_similarity_penalty(layers, seen.source_mask, seen.target_mask, config, **doubled)
        return sums._replace(objective=sums.objective + penalty)


def batch_loss(model: Seq2Seq, batch: Batch, config: LossConfig, *, tokens: int, sentences: int) -> LossSums:
    """Return the loss of `batch`, teacher-forced, as its part of the loss of an update of `tokens` and `sentences`."""
    sums: LossSums = Objective(model, config)(batch, tokens, sentences)
    return sums


def inter_similarity_penalty(
    outputs: Sequence[Tensor],
    source_mask: Tensor,
    target_mask: Tensor,
    config: LossConfig,
    *,
    tokens: int,
    sentences: int,
) -> Tensor:
    """Return the penalty that pulls the encoder's states of a sentence towards their mean, nats, shape [].

    Li et al. 2020 name such a regulariser (`Reg-6L`, +0.4 BLEU) without its formula or weight. Ziggurat's is

        lambda * sum_s w_s * (1/N) sum_i (1 - sim_in(i, s))

    for the sentences s of an update and the outputs of encoder layers i = 1, ..., N (for sim_in see
    ziggurat.train.diagnosis.measures). With `training.loss.normalisation: tokens`, w_s is the sentence's share of the
    update's target tokens, otherwise 1 / its sentences. Each term lies in [0, 2], and is 0 if all positions of a
    sentence point in the same direction. The penalties of an update's batches add up to that of the update.

    Args:
        outputs: output of every encoder layer, [batch, source, d_model].
        source_mask: [batch, source], True at real tokens.
        target_mask: [batch, target], True at real tokens.
        config: lambda (`inter_sim`) and normalisation.
        tokens: number of tokens in the whole update, as in ziggurat.train.loss.sequence_loss.
        sentences: number of sentences in the whole update.
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
        batch: the batch, on any device.
        device: device of the objective.
        precision: `training.precision`.
        tokens: number of tokens in the whole update, as in ziggurat.train.loss.sequence_loss.
        sentences: number of sentences in the whole update.
    """
    # Every batch has a seed, so dropout masks do not depend on earlier work: resuming needs no random state, and a
    # batch has the same masks in any process.
    torch.manual_seed(batch.seed)
    on_device = batch.to(device, non_blocking=True)
    with autocast(device, precision):
        sums: LossSums = objective(on_device, tokens, sentences)
    sums.objective.backward()
    return sums._replace(objective=sums.objective.detach())  # otherwise the sum over batches would keep every graph


def settle_precision(
    experiment: Experiment, device: torch.device, vocabularies: tuple[int, int], agree: Callable[[int], int] = int
) -> Experiment:
    """Return `experiment` with the precision that `training.precision: auto` stands for on `device`.

    `vocabularies` are the source and target sizes, because a CPU must compute all maps of the model correctly in bf16.
    `agree` turns the answer of this process (1 for bf16, 0 for fp32) into a common one, because measurements may
    differ.
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
    if precision == "auto":  # `auto` would silently mean fp32
        raise ValueError("settle_precision comes first")
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def probe_loss(config: LossConfig, precision: str) -> Loss:
    """Return the loss for ziggurat.train.diagnosis.probe.measure: the training loss, as if a batch were an update.

    `config` is section `training.loss`, `precision` is `training.precision`.
    """

    def loss(model: Seq2Seq, batch: Batch) -> tuple[Tensor, Tensor]:
        with autocast(model.device, precision):
            sums = batch_loss(model, batch, config, tokens=batch.target_tokens, sentences=batch.sentences)
            return sums.objective, sums.nll

    return loss


@contextmanager
def with_layer_drop(model: Seq2Seq, probability: float) -> Iterator[None]:
    """Context in which LayerDrop skips layers with `probability`, in stacks that use LayerDrop."""
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
    """Context of training mode without LayerDrop; both settings are restored at its end."""
    training = model.training
    model.train()
    try:
        with with_layer_drop(model, 0.0):
            yield
    finally:
        model.train(training)
