"""The objective of training: the model and its loss in one module, and one batch run through it forward and backward.

The module also has CUDA graphs of the passes through the model, and ADMIN's profiling (Liu et al. 2020, section 4): one
forward pass of one batch before the first update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.freezing import Frozen
from ziggurat.config.modifiers import StageConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.batching import CorpusMix
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.model.accelerator import random_state_kept
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.build import stack_residuals
from ziggurat.model.counts import bare_model
from ziggurat.model.dropout import Dropout
from ziggurat.model.fast.int8 import quantise
from ziggurat.model.fast.precision import maps_of, training_precision
from ziggurat.model.init import profile_omega
from ziggurat.model.low_rank import adapt
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.system.errors import ConfigError
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
    """Model and loss as one module, so that DDP and FSDP2 wrap the whole forward pass, output projection included."""

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
    """Return the loss of `batch`, teacher-forced, as its part of an update of `tokens` and `sentences`."""
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
    return sums._replace(objective=sums.objective.detach())  # or the sum over batches would keep every graph


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


_Shape = tuple[int, ...]


def refuse_unrecordable(experiment: Experiment, device: torch.device) -> None:
    """Raise ConfigError, listing every obstacle, when `training.cuda_graphs` is set and cannot work."""
    model, training = experiment.model, experiment.training
    if not training.cuda_graphs:
        return
    obstacles = {
        f"`training.device` is {device.type}: only NVIDIA GPUs have them": device.type != "cuda",
        "`training.recompute`: a recorded pass cannot restore random numbers": training.recompute.encoder is not None
        or training.recompute.decoder is not None,
        "`layer_drop`: every replay would leave out the layers of the recorded pass": model.encoder.layer_drop > 0
        or model.decoder.layer_drop > 0,
        "`training.loss.inter_sim`: a recording does not return the output of every layer": training.loss.inter_sim > 0,
        "`training.loss.alignment`: a recording does not return attention": training.loss.alignment is not None,
        "several processes train together": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }
    if found := [reason for reason, holds in obstacles.items() if holds]:
        raise ConfigError(
            f"`training.cuda_graphs` cannot be used ({'; '.join(found)}); set it to 0",
            key="training.cuda_graphs",
            named=["training.device", "training.recompute", "training.loss.inter_sim", "training.loss.alignment"],
        )


class GraphedPasses:
    """A context of updates in which a model's passes are recorded once for every shape of batch, and replayed.

    In a deep, narrow model a kernel takes less time than its launch, so the GPU waits for Python. A replayed CUDA graph
    launches all kernels of a pass at once. It is valid for one shape, reads and writes fixed addresses, and repeats
    Python's decisions. So shapes must be few (`training.batch.length_multiple`), inputs are copied to the addresses of
    a recording, gradients are added to tensors that stay allocated, and settings that decide in Python at every pass
    are refused. The loss, whose number of rows differs from batch to batch, and the optimiser's step are not recorded.
    All recordings share one pool of memory, since only one is in use at a time. Random numbers are the same as without
    graphs (torch's philox offsets).

    A shape runs without a recording the first time, which loads and compiles its kernels; neither can be recorded. The
    second time, it is recorded, up to a maximum number of shapes.

    Args:
        model: takes (source, source_mask, target_in) and returns hidden states; its parameters keep their addresses.
        most: largest number of recorded shapes.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        self._model = model
        self._most = most
        self._seen: Counter[_Shape] = Counter()
        self._recordings: dict[_Shape, _Recording | None] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._pool: Any = None
        self._plain: Callable[..., Tensor] = model.forward

    @property
    def shapes(self) -> int:
        """Number of shapes recorded."""
        return sum(recording is not None for recording in self._recordings.values())

    def __enter__(self) -> None:
        """Give every trained parameter the gradient, zero, that recordings add to, and intercept the model's calls."""
        if not self._gradients:
            self._gradients = [(p, torch.zeros_like(p)) for p in self._model.parameters() if p.requires_grad]
        else:
            torch._foreach_zero_([gradient for _, gradient in self._gradients])
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._model.forward = self._forward  # as torch.cuda.make_graphed_callables does

    def __exit__(self, *error: object) -> None:
        del self._model.forward

    def _forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor, outputs: None = None) -> Tensor:
        assert outputs is None
        inputs = source, source_mask, target_in
        shape = (*source.shape, target_in.shape[1])
        self._seen[shape] += 1
        if self._seen[shape] > 1 and shape not in self._recordings and self.shapes < self._most:
            self._recordings[shape] = None  # before the attempt, so that one that ran out of memory is not repeated
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recordings[shape] = _Recording(self._plain, inputs, list(self._model.buffers()), self._pool)
        recording = self._recordings.get(shape)
        if recording is None:
            return self._plain(*inputs)
        # Any trained tensor will do as the first argument: autograd then calls the backward pass of _Replay.
        hidden: Tensor = _Replay.apply(self._gradients[0][0], recording, inputs)  # type: ignore[no-untyped-call]
        return hidden


class _Recording:
    """The recorded forward and backward pass for the shape of `inputs`.

    The graphs read the model's buffers, so these are kept alive here: the model replaces its positional tables for
    longer inputs.
    """

    hidden: Tensor

    def __init__(
        self, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], buffers: list[Tensor], pool: Any
    ) -> None:
        # Separate memory: a graph reads the addresses at which it was recorded, so each replay copies its inputs there.
        self.inputs = [tensor.clone() for tensor in inputs]
        self._forward, self._buffers = forward, buffers
        # Casts must be part of the recording, and autocast's cache would keep them beyond it.
        kind = inputs[0].device.type
        with torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        ):
            self.ahead = _captured(self._pass, pool)
        self.gradient = torch.zeros_like(self.hidden)
        self.back = _captured(lambda: self.hidden.backward(self.gradient), pool)
        # Otherwise its autograd graph would keep the parameters' nodes, and with them the stream of the recording, for
        # later passes.
        self.hidden = self.hidden.detach()

    def _pass(self) -> None:
        self.hidden = self._forward(*self.inputs)


def _captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of the kernels of `work`; they do not run now."""
    graph = torch.cuda.CUDAGraph()
    # By default, an unsafe call in any thread breaks a capture. Meanwhile the loader's thread locks pages and the
    # saver's thread copies, neither on this thread's stream.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


class _Replay(torch.autograd.Function):
    """Hidden states from a recording; its backward pass adds directly to the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording, inputs: tuple[Tensor, ...]) -> Tensor:
        """Replay on `inputs`; `anchor` is a trained tensor, so that autograd runs the backward pass."""
        for buffer, tensor in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        recording.ahead.replay()
        ctx.recording = recording
        return recording.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.recording.gradient.copy_(gradients[0])
        ctx.recording.back.replay()
        return None, None, None


def profile_batch(
    store: Store, tokens: int, *, seed: int, temperature: float = 1.0, stages: Sequence[StageConfig] = ()
) -> Batch:
    """Return random training pairs with `tokens` tokens on their longer sides, end-of-sentence counted.

    It is a representative sample of the data at the start of training (`temperature`: `data.sampling_temperature`,
    `stages`: `data.stages`, of which the first counts), except for the longest 5 % of the pairs, which would fill it
    with padding. A training batch would not do, because its sentences all have about the same length. The sample
    depends only on the store and the arguments. An epoch with fewer tokens is used whole.

    Raises DataError as CorpusMix does.
    """
    return profile_batches(store, tokens, 1, seed=seed, temperature=temperature, stages=stages)[0]


def profile_batches(
    store: Store, tokens: int, count: int, *, seed: int, temperature: float = 1.0, stages: Sequence[StageConfig] = ()
) -> list[Batch]:
    """Return `count` disjoint samples like that of `profile_batch`, which is the first of them.

    There are fewer, but at least one, if an epoch has too few pairs. Raises DataError as CorpusMix does.
    """
    table = store.train
    epoch = CorpusMix(table, stages, temperature, seed).chosen(0)
    # Shuffled, because an epoch lists the corpora in turn.
    pairs = np.random.Generator(np.random.PCG64(seed)).permutation(epoch)
    cost = np.maximum(table.source_lengths[pairs], table.target_lengths[pairs]) + 1
    usual = cost <= np.quantile(cost, 0.95)
    pairs, cost = pairs[usual], cost[usual]
    total, ids = np.cumsum(cost), SpecialIds.of(store.source, store.target)
    batches, begin = list[Batch](), 0
    while len(batches) < count and (begin < len(pairs) or not batches):
        before = total[begin - 1] if begin else 0
        end = int(np.searchsorted(total, before + tokens)) + 1
        chosen = pairs[begin:end]
        batches.append(collate(*table.pairs(chosen), chosen, ids))
        begin = end
    return batches


def profile_admin(
    model: Seq2Seq, experiment: Experiment, store: Store, added: Sequence[str] | None = None
) -> str | None:
    """Set the omegas of `residual: admin` in stacks whose `init` profiles them; return their ranges, for the log.

    With `added`, only the layers with those names, which growth added to a trained model, get an omega.

    The forward pass is in training mode and fp32, with every layer present, and draws random numbers from
    `training.seed`. The global random state and the model's mode are restored.

    Returns None, and does nothing, for any other configuration.
    """
    config, data, seed = experiment.model, experiment.data, experiment.training.seed
    stacks = ((config.stack_init(decoder=False), model.encoder), (config.stack_init(decoder=True), model.decoder))
    others = [stack for init, stack in stacks if init.kind != "admin" or init.omega != "profiled"]
    if len(others) == len(stacks):
        return None
    init = next(init for init, stack in stacks if stack not in others)  # both have the same batch
    batch = profile_batch(
        store, init.profile_tokens, seed=seed, temperature=data.sampling_temperature, stages=data.stages
    )
    kept = [residual for stack in others for residual in stack_residuals(stack)]
    # Old layers keep their omegas: their weights were trained with them.
    if added is not None:
        fresh = {id(module) for name in added for module in model.get_submodule(name).modules()}
        both = (*stack_residuals(model.encoder), *stack_residuals(model.decoder))
        kept += [residual for residual in both if id(residual) not in fresh]
    batch = batch.to(model.device)
    with random_state_kept(model.device), every_branch_present(model):
        torch.manual_seed(seed)
        omegas = profile_omega(
            [stack_residuals(model.encoder), stack_residuals(model.decoder)],
            lambda: model(batch.source, batch.source_mask, batch.target_in),
            [batch.source_mask, batch.target_mask],
            kept,
        )
    found = [
        f"{name} {min(values):.3f} to {max(values):.3f}"
        for name, values in zip(("encoder", "decoder"), omegas, strict=True)
        if values
    ]
    tokens = f"{batch.source_tokens:,} source and {batch.target_tokens:,} target tokens"
    return f"omega profiled on {tokens}: {', '.join(found)}"
