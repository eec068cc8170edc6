"""The estimate of what training costs: arithmetic per token, memory and time of an update.

An update of the real model is simulated on tensors without values (simulation); a ledger counts its operators. Time
follows from rates of this machine (machine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ziggurat.config import Experiment
from ziggurat.config.growth import saved_passes
from ziggurat.data.readers import CorpusReader
from ziggurat.inspect.cost.batches import Batches, expected_batches
from ziggurat.inspect.cost.flops import TokenFlops, forward_flops, training_flops
from ziggurat.inspect.cost.ledger import Work
from ziggurat.inspect.cost.machine import Speed, measure_machine, shallow
from ziggurat.inspect.cost.simulation import BatchShape, SimulatedUpdate, simulate_update
from ziggurat.model.device import usable_device
from ziggurat.model.fast.precision import precision_notice
from ziggurat.system.errors import ConfigError
from ziggurat.train.growth import stage_experiment
from ziggurat.train.objective import settle_precision


@dataclass(frozen=True)
class MemoryCost:
    """Memory of an update at its peak, in bytes of tensors in one process.

    Attributes:
        batch: the batch that needs the most memory.
        peak: memory of all tensors together.
        parts: the same by purpose (ziggurat.inspect.cost.simulation.PURPOSES).
        checkpoint: main memory that asynchronous checkpoints hold in addition, from the first one on.
    """

    batch: BatchShape
    peak: int
    parts: Mapping[str, int]
    checkpoint: int


@dataclass(frozen=True)
class TimeCost:
    """Time of an average update in one process, on a machine that does nothing else.

    Attributes:
        seconds: time of an update.
        parts: the same by part: encoder and decoder, the loss with the output layer, the optimiser's step.
        slowness: measured over estimated time of a shallow copy's layers (ziggurat.inspect.cost.machine).
        flops: operations of an update.
        target_tokens_per_second: target tokens, padding left out, as training counts them.
        others: share of the processors' time that other processes took while rates were measured.
        delay: times as long as `seconds` that an update takes while they do; 1 where they are not in the way.
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
        length: tokens of the source and the target sentence behind `forward` and `training`.
        forward: arithmetic per token of a forward pass.
        training: arithmetic per token of forward and backward pass.
        memory: memory of an update.
        time: time of an update.
        notes: sentences on everything that the estimate leaves out.
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
    """Return the costs of training `experiment` on this machine; `sizes` are those of the vocabularies.

    Where there is no store yet, `text`, or else the first corpus of `data.train`, tells how long sentences are.

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
    kept = update.at_peak["weights"] if training.lora is None else update.trained  # as Learner.kept_weights
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
    """Return the device of the estimate, `training.device` or else the CPU, and a note where it is not the first."""
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
    """Return the batch that needs the most memory, by simulating a shallow copy."""
    if len(shapes) == 1:
        return shapes[0]
    copy = shallow(experiment)
    return max(shapes, key=lambda shape: simulate_update(copy, sizes, shape, device).peak)


def time_cost(
    update: SimulatedUpdate, shape: BatchShape, batches: Batches, speed: Speed, factor: float, accumulate: int
) -> TimeCost:
    """Return the time of an average update: passes are scaled from the batch of `update`, the step comes once."""
    # Sides have other proportions in the largest batch than on average.
    source = batches.source_tokens / (shape.sentences * shape.source)
    target = batches.target_tokens / (shape.sentences * shape.target)
    layers, loss, step = Work(), update.work["loss"].scaled(target), update.work["step"]
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
    """Return a sentence on the time of stages of growth: layers of encoder and decoder and seconds of an update each.

    `seconds` is the time of an update at the full depth.
    """
    growth, last = experiment.training.growth, experiment.training.stop.updates
    assert growth is not None
    each = ", ".join(f"{taken:.3g} s at {encoder}-{decoder}" for encoder, decoder, taken in shallower)
    said = f"`training.growth`: the costs are those of the full depth; before, an update takes {each}"
    saved = saved_passes(growth, experiment.model, experiment.training.stop)
    if saved is not None:
        said += f". Counted in layers alone the stages save {saved:.1%} of the training"
    ends = [stage.updates for stage in growth.stages if stage.updates is not None]
    if last is None or len(ends) < len(growth.stages) or ends[-1] > last:  # epochs: their updates are not known here
        return said
    updates = [end - begin for begin, end in pairwise((0, *ends, last))]
    whole = sum(n * taken for n, taken in zip(updates, [*(taken for *_, taken in shallower), seconds], strict=True))
    return (
        f"{said}; all {last:,} take {whole / (last * seconds):.0%} of the time here that they would at the full depth"
    )


def _left_out(experiment: Experiment) -> list[str]:
    """Return sentences on settings that the estimate leaves out."""
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
