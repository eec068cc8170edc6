"""The speed of this machine, which turns an estimate into seconds, and the simulation of an update.

Rates of products, memory and calls are measured in a fraction of a second; a shallow copy of the model is timed to find
the factor by which real layers are slower. On a busy machine, everything is measured again by this thread's CPU time.

The simulation runs the real model, loss and optimiser on tensors without values; a ledger counts the operators that
run, so new kinds of layers are covered as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ziggurat.config import Experiment
from ziggurat.data.loader import Batch
from ziggurat.inspect.ledger import Ledger, OperatorWork, Product
from ziggurat.inspect.stand_in import accelerator_operators
from ziggurat.model.accelerator import random_state_kept, synchronize
from ziggurat.model.build import assemble, build_model, parameter_roles, set_recompute
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import linear
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.processes import SystemLoad, sleeping_at_once
from ziggurat.train.objective import as_trained, every_branch_present
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel

PURPOSES = (
    "weights", "tables", "copies", "gradients", "moments", "encoder", "decoder", "loss", "backward", "step", "batch",
)  # fmt: skip
"""PURPOSES lists the uses of memory: the weights, tables such as those of positions, the weights' copies in bf16,
gradients and the optimiser's moments, the activations that encoder and decoder keep for the backward pass, logits and
gradients of the loss, temporary memory of the backward pass (recomputed layers included) and of the optimiser's step,
and the batch itself."""

_NARROW_STEP = 184
"""_NARROW_STEP is the number of bytes that a step of NarrowAdam reads and writes per value, including random bits and
fp32 copies."""


class BatchShape(NamedTuple):
    """Number of pairs of a padded batch, and its padded lengths, end-of-sentence included."""

    sentences: int
    source: int
    target: int

    @property
    def tokens(self) -> int:
        """Padded tokens of both sides."""
        return self.sentences * (self.source + self.target)


@dataclass(frozen=True)
class SimulatedUpdate:
    """Memory and work of one update on one batch, after the first update, so that moments exist.

    Attributes:
        peak: largest number of bytes alive at any time.
        at_peak: bytes alive at that time, by purpose (PURPOSES).
        work: work by phase: `encoder`, `decoder`, `loss`, `decoder backward`, `encoder backward` and `step`. The
            gradient of the loss is computed with the loss.
        trained: bytes of the trained parameters; with low-rank updates, only of these.
    """

    peak: int
    at_peak: Mapping[str, int]
    work: Mapping[str, OperatorWork]
    trained: int


@contextmanager
def without_values(experiment: Experiment, sizes: tuple[int, int], device: torch.device) -> Iterator[Seq2Seq]:
    """Context in which tensors have no values, with the model in training mode and all its branches present.

    `sizes` are the sizes of the source and target vocabularies. Raises the ConfigError of build_model.
    """
    with FakeTensorMode(), random_state_kept(torch.device("cpu")):
        with torch.device(device):
            model = assemble(experiment.model, *sizes)
            as_trained(model, experiment.training)
        set_recompute(model, experiment.training.recompute)
        with every_branch_present(model):
            yield model


def simulate_update(
    experiment: Experiment,
    sizes: tuple[int, int],
    shape: BatchShape,
    device: torch.device,
    *,
    stands_in: bool = False,
) -> SimulatedUpdate:
    """Return memory and work of an update of one process on one batch of `shape`, on `device`.

    The modules, loss, precision, recomputation and optimiser of training run on tensors without values under a Ledger.
    With several batches per update, a batch after the first is simulated, with gradients already in memory. Compiling
    and CUDA graphs are left out. With `stands_in`, memory is that of an accelerator, simulated on the CPU; work then
    lacks attention. Other arguments and errors are those of without_values.
    """
    training = experiment.training
    with without_values(experiment, sizes, device) as model, _operators(model, stands_in):
        optimiser = Optimiser(model, parameter_roles(model), training.optimiser, seed=training.seed)
        parallel = Parallel(model, training.loss, training.precision)
        narrow = training.optimiser.moments == "bf16"
        moments = optimiser.reserve() if narrow else _first_moments(optimiser)
        if training.batch.accumulate == 1 and not training.cuda_graphs:
            parallel.drop_gradients()
        ledger = Ledger()
        ledger.hold(model.parameters(), "weights")
        ledger.hold(model.buffers(), "tables")
        ledger.hold((p.grad for p in optimiser.parameters if p.grad is not None), "gradients")
        ledger.hold(moments, "moments")
        batch = full_batch(shape, device)
        ledger.hold((batch.source, batch.source_mask, batch.target_in, batch.target_out, batch.target_mask), "batch")
        _follow(model, ledger)
        with ledger:
            parallel.attempt(batch)
            ledger.purpose = ledger.phase = "step"
            torch.nn.utils.get_total_norm([p.grad for p in optimiser.parameters if p.grad is not None], foreach=True)
            if narrow:  # processes the values in small chunks, whose memory is negligible
                ledger.work["step"].moved += _NARROW_STEP * sum(p.numel() for p in optimiser.parameters)
            else:
                optimiser.step()
    trained = sum(parameter.nbytes for parameter in optimiser.parameters)
    return SimulatedUpdate(ledger.peak, dict(+ledger.at_peak), ledger.work, trained)


def _operators(model: Seq2Seq, stands_in: bool) -> AbstractContextManager[None]:
    return accelerator_operators(model) if stands_in else contextlib.nullcontext()


def _first_moments(optimiser: Optimiser) -> list[Tensor]:
    """Take a step and return the moments that it created; afterwards every parameter has a gradient."""
    for parameter in optimiser.parameters:
        parameter.grad = torch.empty_like(parameter)
    optimiser.step()
    moments = [moment for part in optimiser.parts for own in part.state.values() for moment in own.values()]
    return [moment for moment in moments if isinstance(moment, Tensor)]


def full_batch(shape: BatchShape, device: torch.device) -> Batch:
    """Return a batch without padding."""
    source, target = (torch.zeros(shape.sentences, n, dtype=torch.int64, device=device) for n in shape[1:])
    return Batch(
        source=source,
        source_mask=torch.ones_like(source, dtype=torch.bool),
        target_in=target,
        target_out=torch.zeros_like(target),
        target_mask=torch.ones_like(target, dtype=torch.bool),
        indices=np.arange(shape.sentences),
        source_tokens=source.numel(),
        target_tokens=target.numel(),
    )


def _follow(model: Seq2Seq, ledger: Ledger) -> None:
    """Set the ledger's phase as the pass proceeds.

    The backward pass runs in reverse order: it has left the loss once the decoder's output has its gradient, and the
    decoder once the memory has.
    """

    def enter(phase: str, purpose: str) -> None:
        ledger.phase, ledger.purpose = phase, purpose

    def encoded(module: nn.Module, args: object, memory: tuple[Tensor, ...]) -> None:
        enter("decoder", "decoder")
        for states in memory:
            states.register_hook(lambda gradient: enter("encoder backward", "backward"))

    def decoded(module: nn.Module, args: object, hidden: Tensor) -> None:
        enter("loss", "loss")
        hidden.register_hook(lambda gradient: enter("decoder backward", "backward"))

    enter("encoder", "encoder")
    model.encoder.register_forward_hook(encoded)
    model.decoder.register_forward_hook(decoded)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: ledger.hold([cast(Tensor, p.grad)], "gradients"))


# Rates

_SECONDS = 0.06
"""Duration of each measurement."""
_CALLS = 64


@dataclass(frozen=True)
class Speed:
    """The rates of a device.

    Attributes:
        products: operations per second, by kind of product.
        moved: bytes per second that simple operators read and write.
        calls: operators per second that can be started and recorded for the backward pass.
        waits: True if the time to start an operator adds to that of its work (a CPU), False if they overlap (a GPU).
    """

    products: Mapping[Product, float]
    moved: float
    calls: float
    waits: bool

    def seconds(self, work: OperatorWork) -> float:
        """Return the time of `work` at these rates."""
        products = sum(count / self.products[kind] for kind, count in work.operations.items())
        computing, starting = products + work.moved / self.moved, work.calls / self.calls
        return computing + starting if self.waits else max(computing, starting)


class Timer:
    """Timing of work on a device, by the wall clock or by the CPU time of the calling thread.

    Other programs do not affect the thread's CPU time. If the thread shares work with others, it is the time of its
    share, provided that it sleeps while it waits for them (ziggurat.system.processes.sleeping_at_once).

    Attributes:
        device: a CPU or a GPU.
        own: whether to use the thread's CPU time. A single thread is always timed that way.
        passed: seconds of all timed calls by the wall clock.
        worked: the same by the thread's CPU time.
    """

    def __init__(self, device: torch.device, *, own: bool = False) -> None:
        self.device, self.own = device, own
        self.passed = self.worked = 0.0

    def fastest(self, work: Callable[[], object]) -> float:
        """Return the shortest time of `work` over the calls that fit into `_SECONDS`, at least one."""
        work()  # not timed, since the first call allocates memory and chooses kernels
        own = self.device.type == "cpu" and (self.own or torch.get_num_threads() == 1)
        clock = time.thread_time if own else time.perf_counter
        fastest, until = float("inf"), clock() + _SECONDS
        while clock() < until:
            synchronize(self.device)
            passed, worked = time.perf_counter(), time.thread_time()
            work()
            synchronize(self.device)
            passed, worked = time.perf_counter() - passed, time.thread_time() - worked
            self.passed, self.worked = self.passed + passed, self.worked + worked
            fastest = min(fastest, worked if own else passed)
        return fastest


def measure_speed(
    kinds: Iterable[Product],
    widths: tuple[int, int],
    device: torch.device,
    threads: int | None = None,
    timer: Timer | None = None,
) -> Speed:
    """Return the rates of `device`: of products of each kind, of operators between them, and of calls.

    Args:
        kinds: kinds of products.
        widths: d_model and d_ff of the model; plain products have the shape of its feed-forward network.
        device: a CPU or a GPU.
        threads: `training.threads`; the previous number is restored afterwards.
        timer: the timing method; default: by the wall clock.
    """
    timer = timer or Timer(device)
    with _with_threads(threads):
        return Speed(
            {kind: _batched(kind, timer) if kind.batched else _matrix(kind, widths, timer) for kind in kinds},
            _moved(timer),
            _calls(timer),
            waits=device.type == "cpu",
        )


@contextlib.contextmanager
def _with_threads(threads: int | None) -> Iterator[None]:
    """Context with this number of CPU threads; None: the present number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _matrix(kind: Product, widths: tuple[int, int], timer: Timer) -> float:
    """Return operations per second in the first product of a feed-forward network."""
    rows = 512 if timer.device.type == "cpu" else 4096
    x, weight = (torch.randn(n, widths[0], device=timer.device, dtype=kind.dtype) for n in (rows, widths[1]))
    return 2 * rows * widths[0] * widths[1] / timer.fastest(lambda: linear(x, weight))


def _batched(kind: Product, timer: Timer) -> float:
    """Return operations per second in the products of attention: 32 positions, heads of width 64."""
    a, b = (torch.randn(256, 32, 64, device=timer.device, dtype=kind.dtype) for _ in range(2))
    return 2 * 256 * 32 * 32 * 64 / timer.fastest(lambda: torch.bmm(a, b.transpose(1, 2)))


def _moved(timer: Timer) -> float:
    """Return bytes per second between the products: norm, activation, dropout, sum, softmax, both passes."""
    x = torch.randn(128, 32, 512, device=timer.device, requires_grad=True)
    norm, dropout = torch.nn.LayerNorm(512, device=timer.device), Dropout(0.1)

    def between() -> None:
        weights = torch.softmax(x.view(128, 16, 32, 32) + 1.0, dim=-1)
        dropout(torch.relu(norm(x)), dropout(weights).view_as(x)).sum().backward()
        x.grad = None

    with Ledger() as ledger:
        between()
    return ledger.work[""].moved / timer.fastest(between)


def _calls(timer: Timer) -> float:
    """Return operators per second in a chain of tiny ones, forward and backward."""
    start = torch.zeros(8, device=timer.device, requires_grad=True)

    def chain() -> None:
        x: Tensor = start
        for _ in range(_CALLS):
            x = x * 1.0
        x.sum().backward()

    return 2 * _CALLS / timer.fastest(chain)


# A shallow copy, timed

_VOCABULARY = 500
"""_VOCABULARY is the vocabulary size of the shallow copy; small, so that the layers dominate."""
_LAYERS = 2
_LENGTH = 32


def shallow(experiment: Experiment) -> Experiment:
    """Return `experiment` with at most two layers in each stack."""
    model = experiment.model
    stacks = {
        side: stack.model_copy(update={"layers": min(_LAYERS, stack.layers)})
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    return experiment.model_copy(update={"model": model.model_copy(update=stacks)})


def slowness(experiment: Experiment, speed: Speed, device: torch.device, timer: Timer | None = None) -> float:
    """Return measured over estimated time of a forward and backward pass through a shallow copy.

    Products of other shapes, copies inside kernels and memory outside the caches are slower than the operators used to
    measure `speed`. The layers are real, with values; the batch has few tokens and the vocabulary few types.
    """
    training, timer = experiment.training, timer or Timer(device)
    shape = BatchShape(16 if device.type == "cpu" else 128, _LENGTH, _LENGTH)
    small = shallow(experiment)
    work = OperatorWork()
    for phase, of_phase in simulate_update(small, (_VOCABULARY, _VOCABULARY), shape, device).work.items():
        if phase != "step":
            work.add(of_phase)
    with random_state_kept(device), _with_threads(training.threads):
        model = build_model(small.model, _VOCABULARY, _VOCABULARY)
        as_trained(model, training, seed=training.seed)
        model.to(device)
        set_recompute(model, training.recompute)
        parallel = Parallel(model, training.loss, training.precision)
        batch = full_batch(shape, device)
        with every_branch_present(model):
            return timer.fastest(lambda: parallel.attempt(batch)) / speed.seconds(work)


# Speed and slowness on a machine that may be busy


@dataclass(frozen=True)
class Measured:
    """Measurements of this machine.

    Attributes:
        speed: the rates of the machine.
        slowness: measured over estimated time of a shallow copy.
        others: share of CPU time that other processes took meanwhile; 0 if unknown.
        delay: factor by which work takes longer than on an idle machine; 1 unless the machine is busy.
    """

    speed: Speed
    slowness: float
    others: float = 0.0
    delay: float = 1.0


def measure_machine(experiment: Experiment, kinds: Iterable[Product], device: torch.device) -> Measured:
    """Return the rates of an idle `device` for products of `kinds` and the layers of `experiment`.

    They are measured by the wall clock. If other processes interfere on a CPU, they are measured again by this thread's
    CPU time.
    """
    threads = experiment.training.threads or torch.get_num_threads()
    widths, kinds = (experiment.model.d_model, experiment.model.d_ff), list(kinds)

    def measured(timer: Timer) -> tuple[Speed, float]:
        speed = measure_speed(kinds, widths, device, threads, timer)
        return speed, slowness(experiment, speed, device, timer)

    load, timer = SystemLoad(), Timer(device)
    speed, factor = measured(timer)
    others, crowded = load.look(threads) if device.type == "cpu" else (0.0, False)
    if not crowded:
        return Measured(speed, factor, others)
    if threads > 1:
        timer = Timer(device, own=True)
        with sleeping_at_once(threads):
            speed, factor = measured(timer)
    return Measured(speed, factor, others, max(1.0, timer.passed / max(timer.worked, 1e-9)))
