"""The largest batch that fits into the memory of an accelerator, computed without having one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from ziggurat.config import Experiment
from ziggurat.inspect.machine import BatchShape, simulate_update

GIB = 1 << 30
DEVICES = (16, 24, 40, 48, 80, 141)
"""DEVICES lists the memory sizes of GPUs in GiB."""
RESERVED = GIB
"""RESERVED is the number of bytes left for CUDA's context, its libraries' work space and allocator fragmentation."""

_CHUNKS = (3, 24, 240)
"""Numbers of loss chunks in the simulated batches: two chunks are in memory at once, and their times add up."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch for a device.

    Attributes:
        gib: memory of the device, GiB.
        sentences: number of pairs; 0: none fit.
        tokens: padded tokens of its longer side, as `training.batch.max_tokens` counts them.
    """

    gib: int
    sentences: int
    tokens: int


def on_accelerator(experiment: Experiment) -> Experiment:
    """Return `experiment` with the precision that `training.precision: auto` stands for on an accelerator, bf16."""
    if experiment.training.precision != "auto":
        return experiment
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"precision": "bf16"})})


def largest_batches(experiment: Experiment, sizes: tuple[int, int], shape: BatchShape) -> list[LargestBatch]:
    """Return the largest batch that fits each of DEVICES, with sentences as long as those of `shape`.

    Arguments and errors are those of simulate_update. Once the loss has several chunks of tokens, memory at every
    moment of an update is a linear function of the number of sentences. So the peak, their maximum, is convex: a line
    between two numbers of sentences is never below it.
    """
    rooms = {gib: gib * GIB - RESERVED for gib in DEVICES}
    peaks: dict[int, int] = {}

    def simulate(sentences: int) -> None:
        peaks[sentences] = simulate_update(
            experiment, sizes, shape._replace(sentences=sentences), torch.device("cpu"), stands_in=True
        ).peak

    few, many, most = (math.ceil(n * experiment.training.loss.chunk_tokens / shape.target) for n in _CHUNKS)
    simulate(few)
    simulate(many)
    if min(rooms.values()) < peaks[few]:
        simulate(1)
    if (room := max(rooms.values()) - peaks[many]) > 0:
        simulate(min(most, many + math.ceil(room * (many - few) / (peaks[many] - peaks[few]))))
    return [_largest(gib, room, peaks, shape) for gib, room in rooms.items()]


def _largest(gib: int, room: int, peaks: dict[int, int], shape: BatchShape) -> LargestBatch:
    """Return the largest batch for `room` bytes, from the line through the nearest two numbers with known peaks."""
    lines = list(pairwise(sorted(peaks.items())))
    (a, at_a), (b, at_b) = next((line for line in lines if room < line[1][1]), lines[-1])
    found = max(0, a + int((room - at_a) / (at_b - at_a) * (b - a))) if room >= min(peaks.values()) else 0
    return LargestBatch(gib, found, found * max(shape.source, shape.target))
