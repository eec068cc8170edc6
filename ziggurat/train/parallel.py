"""The gradients of an update, in one process or in several that share them.

Gradients are sums over all batches of the update, and every loss is already divided by the size of the whole update
(ziggurat.train.loss). So nothing is averaged, and one process computes the same as several, up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ziggurat.config import TrainingConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, weights, whole
from ziggurat.system.errors import ConfigError, TrainingError
from ziggurat.train.device import Shortage, within_memory
from ziggurat.train.distributed import Processes
from ziggurat.train.loss import LossSums
from ziggurat.train.objective import Objective, add_gradients, with_layer_drop


class UpdateSize(NamedTuple):
    """The size of one update: real tokens and sentence pairs of all processes, and the maximum of batches in one."""

    source_tokens: int
    target_tokens: int
    sentences: int
    batches: int


class Parallel:
    """The gradients of one process; Replicated and Sharded (FSDP2) handle several.

    All processes call every method, in the same order. `recovers` is true if all of them can continue after one has
    run out of memory.
    """

    recovers = True

    def __init__(
        self, model: Seq2Seq, loss: LossConfig, precision: str = "fp32", processes: Processes | None = None
    ) -> None:
        self.model = model
        self.processes = processes or Processes()
        self.precision = precision
        self.objective = Objective(model, loss)

    def size(self, batches: Sequence[Batch]) -> UpdateSize:
        """Return the size of the update; `batches` are this process's part of it."""
        p = self.processes
        mine = [sum(n) for n in zip(*((b.source_tokens, b.target_tokens, b.sentences) for b in batches), strict=True)]
        # Each process puts its number of batches in its slot, zero elsewhere, so that one sum shares all of them with
        # the counts; a gather would be a second message.
        numbers = [len(batches) if rank == p.rank else 0 for rank in range(p.count)]
        source_tokens, target_tokens, sentences, *numbers = map(int, p.sums([*mine, *numbers]))
        return UpdateSize(source_tokens, target_tokens, sentences, max(numbers))

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """Add the gradient of the update to `.grad` of the model's parameters; return this process's part of its loss.

        When any process runs out of memory, all of them return a Shortage; the gradients must then be dropped.
        """
        device = self.model.device

        def work() -> LossSums:
            # On a GPU the sums stay there, because reading a number after each batch would make the CPU wait.
            objective: Tensor | float = 0.0
            nll: Tensor | float = 0.0
            alignment: Tensor | None = None
            counts = {"tokens": size.target_tokens, "sentences": size.sentences}
            for number, batch in enumerate(batches, start=1):
                with self.adding(batch, last=number == len(batches)):
                    sums = add_gradients(self.objective, batch, device, self.precision, **counts)
                objective, nll = objective + sums.objective, nll + sums.nll
                if sums.alignment is not None:
                    alignment = sums.alignment if alignment is None else alignment + sums.alignment
            return LossSums(torch.as_tensor(objective), torch.as_tensor(nll), alignment)

        return within_memory(work, device, self.agree)

    def adding(self, batch: Batch, *, last: bool) -> AbstractContextManager[object]:
        """Context of one batch's passes; after the last batch, gradients include those of all processes."""
        return contextlib.nullcontext()

    def drop_gradients(self) -> None:
        """Drop the gradients of the update."""
        self.model.zero_grad(set_to_none=True)

    def attempt(self, batch: Batch) -> None:
        """Run one batch forward and backward like an update; its gradient stays in this process."""
        add_gradients(
            self.objective,
            batch,
            self.model.device,
            self.precision,
            tokens=batch.target_tokens,
            sentences=batch.sentences,
        )

    def agree(self, short: bool) -> bool:
        """Return whether any process ran out of memory in an update; `short`: this one did."""
        return self.processes.any(short)

    def weights(self) -> Mapping[str, Tensor]:
        """Return every parameter whole, by name."""
        return weights(self.model)

    def whole(self) -> AbstractContextManager[Seq2Seq]:
        """Context with the whole model in this process: for validation, decoding and diagnosis."""
        return contextlib.nullcontext(self.model)


class GradientBucket:
    """Gradients of some parameters in one tensor, which one message sums over the processes.

    Attributes:
        total: the gradients, one after the other.
        views: each parameter with its part of `total`, in the parameter's shape.
        missing: number of parameters whose gradient of the last batch is still to come.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.total = parameters[0].new_zeros(sum(sizes))
        parts = zip(parameters, self.total.split(sizes), strict=True)
        self.views = [(parameter, part.view_as(parameter)) for parameter, part in parts]
        self.missing = 0

    def begin(self) -> None:
        """Hold the gradients of an update, which start from zero."""
        self.total.zero_()
        for parameter, view in self.views:
            parameter.grad = view
        self.missing = len(self.views)


def gradient_buckets(parameters: Iterable[nn.Parameter], bucket_mib: float) -> list[GradientBucket]:
    """Return buckets of at most `bucket_mib`, or one parameter, in the order in which a backward pass fills them.

    That is roughly the reverse of the order of the parameters.
    """
    groups: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in reversed(list(parameters)):
        if room < parameter.nbytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            room = bucket_mib * 2**20
        groups[-1].append(parameter)
        room -= parameter.nbytes
    return list(map(GradientBucket, groups))


class Replicated(Parallel):
    """The whole model in every process; gradients are summed in buckets during the backward pass of the last batch.

    The buckets are sent in a fixed order, so a resumed run rounds as an uninterrupted one does. A process that runs out
    of memory sends its remaining buckets as they are, because the others wait for them, and all agree to skip the
    update. torch's DistributedDataParallel could do neither without knowledge of its internals: it orders its buckets
    by the first passes, and does not recover from an interrupted backward pass.

    With `layer_drop`, layers may be skipped: a parameter that no process used in an update gets no gradient.
    """

    def __init__(
        self,
        model: Seq2Seq,
        loss: LossConfig,
        precision: str,
        processes: Processes,
        *,
        bucket_mib: float = 25,
        layer_drop: bool = False,
    ) -> None:
        super().__init__(model, loss, precision, processes)
        self._layer_drop = layer_drop
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = gradient_buckets(self._trained, bucket_mib)
        # Of the present update:
        self._used: set[Tensor] = set()
        self._sent: list[dist.Work] = []
        self._is_last = self._has_ended = False
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        # Python's garbage collector does not look into hooks of parameters: strong references there would keep the
        # model alive for ever.
        this = weakref.ref(self)

        def reached(number: int, parameter: Tensor) -> None:
            if (own := this()) is not None:
                own._reached(number, parameter)

        for number, bucket in enumerate(self.buckets):
            for parameter, _ in bucket.views:
                parameter.register_post_accumulate_grad_hook(partial(reached, number))

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel."""
        for bucket in self.buckets:
            bucket.begin()
        self._used.clear()
        self._sent.clear()
        self._is_last = self._has_ended = False
        return super().accumulate(batches, size)

    @contextlib.contextmanager
    def adding(self, batch: Batch, *, last: bool) -> Iterator[None]:
        """See Parallel; an idle batch skips all layers with LayerDrop, so that it uses none of their parameters."""
        self._is_last = last
        with with_layer_drop(self.model, 1.0) if batch.target_tokens == 0 else contextlib.nullcontext():
            yield
        if last:
            self._end()

    def agree(self, short: bool) -> bool:
        """See Parallel."""
        if short and not self._has_ended:
            self._end()
        return super().agree(short)

    def _reached(self, number: int, parameter: Tensor) -> None:
        """Note a gradient that a batch has added to bucket `number`; after the last, send the buckets that are full."""
        self._used.add(parameter)
        if self._is_last:
            self.buckets[number].missing -= 1
            while len(self._sent) < len(self.buckets) and not self.buckets[len(self._sent)].missing:
                self._send()

    def _send(self) -> None:
        """Start to sum the next bucket over the processes."""
        if not self._sent:  # once per update, because each is a message to the store that all processes share
            self.processes.arrive()
        self._sent.append(dist.all_reduce(self.buckets[len(self._sent)].total, async_op=True))

    def _end(self) -> None:
        """Send the buckets that are left, and wait for the sums."""
        self._is_last, self._has_ended = False, True
        while len(self._sent) < len(self.buckets):
            self._send()
        for work in self._sent:
            work.wait()
        if self._layer_drop:
            used = torch.tensor([parameter in self._used for parameter in self._trained], dtype=torch.int32)
            used = used.to(self.model.device)
            dist.all_reduce(used)
            for parameter, count in zip(self._trained, used.tolist(), strict=True):
                if not count:
                    parameter.grad = None  # with a gradient of zero, its moments would decay


class Sharded(Parallel):
    """A part of each parameter, its gradient and its moments in every process.

    The weights of a layer are gathered when it runs, forward and backward. Gradients are summed after every batch, so
    no process ever holds all of them. Validation uses a copy of the model on the CPU.
    """

    recovers = False

    def __init__(self, model: Seq2Seq, loss: LossConfig, precision: str, processes: Processes) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard  # here, since it takes a second to import

        super().__init__(model, loss, precision, processes)
        device = model.device
        self._copy = copy.deepcopy(model.cpu())  # made on the CPU, so that a GPU never holds the model twice
        model.to(device)
        mesh = init_device_mesh(model.device.type, (processes.count,))
        for stack in (model.encoder, model.decoder):
            for unit in stack.units():
                fully_shard(unit, mesh=mesh)
        fully_shard(self.objective, mesh=mesh)  # after the units, to shard what they do not contain
        # Sums, not means: losses are already divided by the size of the whole update.
        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel; a process with fewer batches runs idle ones, since all processes gather each layer together."""
        idle = [batches[0].idle()] * (size.batches - len(batches))
        return super().accumulate([*batches, *idle], size)

    def agree(self, short: bool) -> bool:
        """See Parallel; here the others wait in the middle of a layer and cannot continue, so the run ends."""
        if short:
            raise TrainingError(
                f"process {self.processes.rank} ran out of memory, and with `training.distributed.kind: fsdp` the "
                "others cannot continue without it; lower `training.batch.max_tokens`, or use more processes",
                key="training.distributed.kind",
                named=["training.batch.max_tokens"],
            )
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """See Parallel; on the CPU, so that a GPU holds one whole parameter at a time."""
        return {name: whole(parameter).cpu() for name, parameter in weights(self.model).items()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[Seq2Seq]:
        """See Parallel; the model is a copy, and changes to it do not reach the parts."""
        device = self.model.device
        load_weights(self._copy, self.weights(), "the parts of the model")
        try:
            yield self._copy.to(device)
        finally:
            self._copy.cpu()


def parallel_of(model: Seq2Seq, config: TrainingConfig, processes: Processes) -> Parallel:
    """Return the kind of Parallel that `training.distributed` asks for in `processes`.

    Raises ConfigError for `fsdp` with LayerDrop: each process would skip different layers and wait for ever for the
    others to gather those that it runs.
    """
    layer_drop = any(getattr(stack, "layer_drop", 0.0) > 0 for stack in (model.encoder, model.decoder))
    if processes.count == 1:
        return Parallel(model, config.loss, config.precision)
    if config.distributed.kind == "ddp":
        bucket_mib = config.distributed.bucket_mib
        return Replicated(model, config.loss, config.precision, processes, bucket_mib=bucket_mib, layer_drop=layer_drop)
    if layer_drop:
        raise ConfigError(
            "`training.distributed.kind: fsdp` gathers every layer in all processes, but with `layer_drop` each "
            "would skip different layers; use `ddp`",
            key="training.distributed.kind",
        )
    return Sharded(model, config.loss, config.precision, processes)
