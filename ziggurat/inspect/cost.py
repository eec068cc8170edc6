"""The estimated cost of training: arithmetic per token, memory and time of an update.

An update of the real model is simulated on tensors without values (ziggurat.inspect.machine). A ledger counts its
operators, and arithmetic per token is counted by encoder, decoder, attention and output layer. Time follows from rates
of this machine. The batches of an update come from the store, or have sentences of the corpus's length or of an assumed
length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.config.depth import saved_passes
from ziggurat.data.batching import largest, make_batches, round_up
from ziggurat.data.corpus import Store, read_manifest
from ziggurat.data.loader import LoaderState
from ziggurat.data.readers import CorpusReader
from ziggurat.data.store_checks import unlike_store
from ziggurat.inspect.ledger import Ledger, OperatorWork
from ziggurat.inspect.machine import (
    BatchShape,
    SimulatedUpdate,
    Speed,
    measure_machine,
    shallow,
    simulate_update,
    without_values,
)
from ziggurat.model.accelerator import usable_device
from ziggurat.model.attention.multihead import CrossAttention, OwnAttention
from ziggurat.model.fast.precision import precision_notice
from ziggurat.model.rnmt import AdditiveAttention
from ziggurat.model.seq2seq import Memory, Seq2Seq
from ziggurat.system.errors import ConfigError, ZigguratError
from ziggurat.system.files import MANIFEST
from ziggurat.train.device import loader_of
from ziggurat.train.growth import stage_experiment
from ziggurat.train.objective import settle_precision

ASSUMED_LENGTH = 30
"""ASSUMED_LENGTH is the number of tokens per sentence, including end-of-sentence, if there is neither a store nor
text."""
_BYTES_PER_TOKEN = 4
"""_BYTES_PER_TOKEN is the UTF-8 bytes per token with 8,000 joint pieces: German 4.2, English 3.6 (Tatoeba) and 4.0,
Japanese 4.7 (Tanaka)."""
_SAMPLE = 1_000_000
"""_SAMPLE is the number of pairs read from a larger store."""
_LONGEST = 4096
"""_LONGEST is the number of its longest pairs that are also read; they form at least one batch."""
_MODIFIED = 10
"""_MODIFIED is the factor by which fewer pairs are read if modifiers change the lengths, for which text is read and
segmented."""


@dataclass(frozen=True)
class Batches:
    """The batches of training.

    Attributes:
        largest: candidates for the most memory: those with the most padded tokens and with the most pairs of source and
            target positions.
        source_length: mean length of a source sentence in tokens, including end-of-sentence.
        target_length: mean length of a target sentence, counted in the same way.
        source_tokens: mean number of padded source tokens of a batch.
        target_tokens: mean number of padded target tokens of a batch.
        real_target_tokens: mean number of target tokens of a batch without padding.
        origin: a description of their origin.
    """

    largest: tuple[BatchShape, ...]
    source_length: float
    target_length: float
    source_tokens: float
    target_tokens: float
    real_target_tokens: float
    origin: str


def expected_batches(experiment: Experiment, text: CorpusReader | None = None) -> Batches:
    """Return the batches of the store if it was prepared with section `data`; otherwise assumed ones.

    Args:
        experiment: the configuration.
        text: a corpus with sentences as long as those of training; None: the first of `data.train`.

    Raises DataError if the store is damaged, has a pair that does not fit into a batch, or lacks data that stages or
    modifiers need.
    """
    store = Path(experiment.data.store).expanduser()
    if not (store / MANIFEST).is_file():
        return _assumed(experiment, f"there is no store {store}", text)
    if unlike_store(experiment.data, read_manifest(store)):
        return _assumed(experiment, f"{store} was prepared with other settings", text)
    opened = Store.open(store)
    return _assumed(experiment, f"{store} is empty", text) if len(opened.train) == 0 else _planned(experiment, opened)


def _assumed(experiment: Experiment, reason: str, text: CorpusReader | None) -> Batches:
    """Return batches of sentences with an assumed length, and with the longest that `data.filters` allows."""
    assumed, by = _length_of_text(experiment, text)
    batch = experiment.training.batch
    longest = min((experiment.data.filters.max_pieces or batch.max_tokens) + 1, batch.max_tokens)

    def of_length(length: int) -> BatchShape:
        padded = int(round_up(np.array([min(length, longest)]), batch.length_multiple)[0])
        sentences = max(1, batch.max_tokens // padded)
        return BatchShape(min(sentences, batch.max_sentences or sentences), padded, padded)

    usual = of_length(assumed)
    length, tokens = min(assumed, longest), usual.sentences * usual.source
    real = usual.sentences * length
    origin = f"{by}: {reason}"
    return Batches(tuple(dict.fromkeys([usual, of_length(longest)])), length, length, tokens, tokens, real, origin)


def _length_of_text(experiment: Experiment, text: CorpusReader | None) -> tuple[int, str]:
    """Return the tokens per sentence in the first lines of a corpus, if it exists, and how they were estimated."""
    data = experiment.data
    with contextlib.suppress(ZigguratError):  # missing or invalid, which `prepare` reports
        if text is None and data.train:
            text = CorpusReader.of(data.train[0], "data.train.0", (data.source_language, data.target_language))
        block = next(text.blocks(), None) if text is not None else None
        if block is not None:
            longer = max(sum(len(line.encode()) for line in side) for side in block)
            return round(longer / _BYTES_PER_TOKEN / len(block[0])) + 1, "estimated from the size of the text"
    return ASSUMED_LENGTH, "assumed"


def _planned(experiment: Experiment, store: Store) -> Batches:
    """Return the batches of the first epoch, or of a sample of its pairs."""
    batch, seed, table = experiment.training.batch, experiment.training.seed, store.train
    loader, begin = loader_of(experiment, store), LoaderState()
    pairs = loader.chosen(begin)
    share = _MODIFIED if experiment.data.stage_modifiers(0).chosen else 1
    step = -(-len(pairs) * share // _SAMPLE)  # rounded up
    if step > 1:
        # Every n-th pair gives the mean; the longest pairs are added, because they make the largest batches.
        longest = _LONGEST // share
        cost = np.maximum(table.source_lengths[pairs], table.target_lengths[pairs])
        pairs = np.concatenate([pairs[::step], pairs[np.argpartition(cost, -longest)[-longest:]]])
    planned = loader.lengths(begin, pairs)
    plan = make_batches(
        pairs,
        *planned,
        max_tokens=batch.max_tokens,
        max_sentences=batch.max_sentences,
        length_multiple=batch.length_multiple,
        seed=seed,
        epoch=0,
    )
    sentences = np.fromiter(map(len, plan), dtype=np.int64, count=len(plan))
    ordered, starts = np.concatenate(plan), np.cumsum(sentences) - sentences
    # These lengths exclude end-of-sentence.
    lengths = [side[ordered].astype(np.int64) + 1 for side in planned]
    source, target = (
        round_up(np.maximum.reduceat(side, starts), batch.length_multiple).astype(np.int64) for side in lengths
    )
    candidates = largest(sentences, source, target)
    return Batches(
        tuple(dict.fromkeys(BatchShape(int(sentences[n]), int(source[n]), int(target[n])) for n in candidates)),
        float(lengths[0].mean()),
        float(lengths[1].mean()),
        float((sentences * source).mean()),
        float((sentences * target).mean()),
        float(lengths[1].sum() / len(plan)),
        str(Path(experiment.data.store).expanduser()) + (f", one pair in {step}" if step > 1 else ""),
    )


@dataclass(frozen=True)
class TokenFlops:
    """Additions and multiplications per token in matrix products.

    Attributes:
        encoder: per source token, without attention.
        encoder_attention: per source token, products between positions in a sentence of a given length.
        memory: per source token, the decoder's keys and values, computed once per sentence.
        decoder: per target token, without attention.
        decoder_attention: per target token, attention to the target and to the memory.
        output: per target token, the projection to the vocabulary.
    """

    encoder: float
    encoder_attention: float
    memory: float
    decoder: float
    decoder_attention: float
    output: float

    @property
    def source(self) -> float:
        """All operations per source token."""
        return self.encoder + self.encoder_attention + self.memory

    @property
    def target(self) -> float:
        """All operations per target token."""
        return self.decoder + self.decoder_attention + self.output


def forward_flops(experiment: Experiment, sizes: tuple[int, int], source: int, target: int) -> TokenFlops:
    """Return the operations of a forward pass, per token of a sentence of `source` and `target` tokens.

    The real model runs on tensors without values; `sizes` are the vocabulary sizes. The cost of the decoder's keys and
    values, which are not a separate call, is the increase when the memory is twice as long, excluding attention. Raises
    the ConfigError of build_model.
    """
    with without_values(experiment, sizes, torch.device("cpu")) as model, torch.no_grad():
        mask = torch.ones(1, source, dtype=torch.bool)
        encoder, memory = _counted(model, lambda: model.encode(torch.zeros(1, source, dtype=torch.int64), mask))
        ids = torch.zeros(1, target, dtype=torch.int64)
        decoder, hidden = _counted(model, lambda: model.decode(ids, memory))
        double = Memory(tuple(torch.cat([s, s], dim=1) for s in memory.states), torch.cat([mask, mask], dim=1))
        longer, _ = _counted(model, lambda: model.decode(ids, double))
        output, _ = _counted(model, lambda: model.logits(hidden))
    of_memory = longer.others - decoder.others
    return TokenFlops(
        encoder=encoder.others / source,
        encoder_attention=encoder.attention / source,
        memory=of_memory / source,
        decoder=(decoder.others - of_memory) / target,
        decoder_attention=decoder.attention / target,
        output=output.others / target,
    )


def training_flops(forward: TokenFlops, update: SimulatedUpdate, target_tokens: int) -> TokenFlops:
    """Return the operations of training: forward and backward pass, including recomputation.

    Each part has the same ratio of training to forward pass as in `update`, whose batch has `target_tokens`.
    """

    def times(part: str) -> float:
        forward_pass, backward_pass = (
            update.work.get(name, OperatorWork()).flops for name in (part, f"{part} backward")
        )
        return (forward_pass + backward_pass) / forward_pass if forward_pass else 1.0

    encoder, decoder = times("encoder"), times("decoder")
    return TokenFlops(
        encoder=encoder * forward.encoder,
        encoder_attention=encoder * forward.encoder_attention,
        memory=decoder * forward.memory,
        decoder=decoder * forward.decoder,
        decoder_attention=decoder * forward.decoder_attention,
        output=update.work["loss"].flops / target_tokens,
    )


@dataclass
class _Count:
    """Operations."""

    others: int
    attention: int


def _counted(model: Seq2Seq, compute: Callable[[], Any]) -> tuple[_Count, Any]:
    ledger = Ledger()
    with _attention_apart(model, ledger), ledger:
        result = compute()
    attention = ledger.work.get("attention", OperatorWork()).operations
    # Batched products are between positions; the projections inside attention modules are not batched.
    between = sum(count for kind, count in attention.items() if kind.batched)
    return _Count(sum(work.flops for work in ledger.work.values()) - between, between), result


@contextmanager
def _attention_apart(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Context in which operators inside attention modules count towards a separate phase."""

    def enter(module: nn.Module, args: object) -> None:
        ledger.phase = "attention"

    def leave(module: nn.Module, args: object, result: Tensor) -> None:
        ledger.phase = ""

    hooks = []
    for module in model.modules():
        if isinstance(module, OwnAttention | CrossAttention | AdditiveAttention):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class MemoryCost:
    """Memory of an update at its peak, in bytes of tensors in one process.

    Attributes:
        batch: the batch that needs the most memory.
        peak: memory of all tensors together.
        parts: memory by purpose (ziggurat.inspect.machine.PURPOSES).
        checkpoint: main memory that asynchronous checkpoints hold in addition, from the first one on.
    """

    batch: BatchShape
    peak: int
    parts: Mapping[str, int]
    checkpoint: int


@dataclass(frozen=True)
class TimeCost:
    """Time of an average update in one process, on an otherwise idle machine.

    Attributes:
        seconds: time of an update.
        parts: time by part: encoder and decoder, the loss with the output layer, the optimiser's step.
        slowness: measured over estimated time of a shallow copy's layers (ziggurat.inspect.machine).
        flops: operations of an update.
        target_tokens_per_second: target tokens without padding, as counted in training.
        others: share of CPU time that other processes took while rates were measured.
        delay: factor by which an update takes longer than `seconds` because of them; 1 if they do not interfere.
    """

    seconds: float
    parts: Mapping[str, float]
    slowness: float
    flops: float
    target_tokens_per_second: float
    others: float = 0.0
    delay: float = 1.0


@dataclass(frozen=True)
class Cost:
    """The costs of training a configuration.

    Attributes:
        device: the device of memory and time.
        threads: number of CPU threads.
        batches: the batches of an update.
        length: tokens of the source and the target sentence used for `forward` and `training`.
        forward: arithmetic per token of a forward pass.
        training: arithmetic per token of forward and backward pass.
        memory: memory of an update.
        time: time of an update.
        notes: sentences about everything that the estimate leaves out.
        shallower: layers of encoder and decoder, and seconds of an update, at each stage of growth before the last.
    """

    device: str
    threads: int
    batches: Batches
    length: tuple[int, int]
    forward: TokenFlops
    training: TokenFlops
    memory: MemoryCost
    time: TimeCost
    notes: tuple[str, ...]
    shallower: tuple[tuple[int, int, float], ...] = ()


def estimate_cost(experiment: Experiment, sizes: tuple[int, int], text: CorpusReader | None = None) -> Cost:
    """Return the costs of training `experiment` on this machine; `sizes` are the vocabulary sizes.

    If there is no store yet, sentence lengths come from `text`, by default the first corpus of `data.train`.

    Memory is allocated only for timing, on a copy with at most two layers in each stack. Raises the ConfigError and
    DataError of build_model and expected_batches.
    """
    device, notes = _device(experiment.training.device)
    auto, experiment = experiment.training.precision == "auto", settle_precision(experiment, device, sizes)
    training = experiment.training
    notes += [f"`training.precision: auto` is {training.precision} here"] if auto else []
    widths = experiment.model.d_model, experiment.model.d_ff
    notes += filter(None, [precision_notice(training.precision, device, widths)])
    batches = expected_batches(experiment, text)
    shape = _hungriest(experiment, sizes, batches.largest, device)
    update = simulate_update(experiment, sizes, shape, device)
    length = round(batches.source_length), round(batches.target_length)
    forward = forward_flops(experiment, sizes, *length)
    kinds = {kind for work in update.work.values() for kind in work.operations}
    machine = measure_machine(experiment, kinds, device)
    kept = update.at_peak["weights"] if training.lora is None else update.trained  # like Learner.kept_weights
    copies = kept + update.at_peak.get("moments", 0)
    speed, factor = machine.speed, machine.slowness
    time = time_cost(update, shape, batches, speed, factor, training.batch.accumulate)
    time = replace(time, others=machine.others, delay=machine.delay)
    shallower: list[tuple[int, int, float]] = []
    if training.growth is not None:
        for stage in range(len(training.growth.stages)):
            part = stage_experiment(experiment, stage)
            work = simulate_update(part, sizes, shape, device)
            cost = time_cost(work, shape, batches, speed, factor, training.batch.accumulate)
            shallower.append((part.model.encoder.layers, part.model.decoder.layers, cost.seconds))
        notes.append(_stages(experiment, shallower, time.seconds))
    return Cost(
        device=str(device),
        threads=training.threads or torch.get_num_threads(),
        batches=batches,
        length=length,
        forward=forward,
        training=training_flops(forward, update, shape.sentences * shape.target),
        memory=MemoryCost(shape, update.peak, update.at_peak, copies if training.checkpoint.asynchronous else 0),
        time=time,
        notes=(*notes, *_left_out(experiment)),
        shallower=tuple(shallower),
    )


def _device(name: str) -> tuple[torch.device, list[str]]:
    """Return the device of the estimate, `training.device` or the CPU, and a note if it is the CPU instead."""
    try:
        device = usable_device(name, "training.device")
    except ConfigError:
        return torch.device("cpu"), [f"there is no `{name}` here: memory and time are those of a CPU"]
    if device.type in ("cpu", "cuda"):
        return device, []
    return torch.device("cpu"), [f"memory and time are those of a CPU, not of `{device.type}`"]


def _hungriest(
    experiment: Experiment, sizes: tuple[int, int], shapes: tuple[BatchShape, ...], device: torch.device
) -> BatchShape:
    if len(shapes) == 1:
        return shapes[0]
    copy = shallow(experiment)
    return max(shapes, key=lambda shape: simulate_update(copy, sizes, shape, device).peak)


def time_cost(
    update: SimulatedUpdate, shape: BatchShape, batches: Batches, speed: Speed, factor: float, accumulate: int
) -> TimeCost:
    """Return the time of an average update: passes are scaled from the batch of `update`, the step is added once."""
    # The largest batch has different proportions of the sides from the average one.
    source = batches.source_tokens / (shape.sentences * shape.source)
    target = batches.target_tokens / (shape.sentences * shape.target)
    layers, loss, step = OperatorWork(), update.work["loss"].scaled(target), update.work["step"]
    for phase, work in update.work.items():
        if phase not in ("loss", "step"):
            layers.add(work.scaled(source if phase.startswith("encoder") else target))
    parts = {
        "layers": accumulate * factor * speed.seconds(layers),
        "loss": accumulate * speed.seconds(loss),
        "step": speed.seconds(step),
    }
    seconds = sum(parts.values())
    flops = accumulate * (layers.flops + loss.flops) + step.flops
    return TimeCost(seconds, parts, factor, flops, accumulate * batches.real_target_tokens / seconds)


def _stages(experiment: Experiment, shallower: Sequence[tuple[int, int, float]], seconds: float) -> str:
    """Return a sentence about the time of growth stages: (encoder layers, decoder layers, seconds per update).

    `seconds` is the time of an update at the full depth.
    """
    growth, last = experiment.training.growth, experiment.training.stop.updates
    assert growth is not None
    each = ", ".join(f"{taken:.3g} s at {encoder}-{decoder}" for encoder, decoder, taken in shallower)
    said = f"`training.growth`: the costs are those of the full depth; before that, an update takes {each}"
    saved = saved_passes(growth, experiment.model, experiment.training.stop)
    if saved is not None:
        said += f". Counted in layers alone the stages save {saved:.1%} of the training"
    ends = [stage.updates for stage in growth.stages if stage.updates is not None]
    if last is None or len(ends) < len(growth.stages) or ends[-1] > last:  # with epochs it is unknown
        return said
    updates = [end - begin for begin, end in pairwise((0, *ends, last))]
    whole = sum(n * taken for n, taken in zip(updates, [*(taken for *_, taken in shallower), seconds], strict=True))
    return (
        f"{said}; all {last:,} take {whole / (last * seconds):.0%} of the time here that they would at the full depth"
    )


def _left_out(experiment: Experiment) -> list[str]:
    training = experiment.training
    found = []
    if len(experiment.data.stages) > 1:
        found.append("`data.stages`: lengths, batches and costs are those of the first stage")
    if training.compile != "none":
        found.append("`training.compile` is left out: compiled layers keep less and take less time")
    if training.cuda_graphs:
        found.append("`training.cuda_graphs` is left out: recordings take more memory and less time")
    if training.batch.fit:
        found.append(f"`training.batch.fit` is left out: batches have {training.batch.max_tokens:,} tokens here")
    if training.distributed.kind == "fsdp":
        found.append("`training.distributed.kind: fsdp`: memory is that of one process alone (docs/scaling.md)")
    return found
