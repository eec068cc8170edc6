"""The gradients of an update, in one process or in several that share them.

Gradients are sums over all batches of the update, and every loss is already divided by the size of the whole update
(ziggurat.train.loss). So nothing is averaged, and one process computes the same as several, up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

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
    """The gradients of one process; Replicated (DDP) and Sharded (FSDP2) handle several.

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

    @property
    def wrapped(self) -> nn.Module:
        """The objective that an update calls; here without a wrapper."""
        return self.objective

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
                    sums = add_gradients(self.wrapped, batch, device, self.precision, **counts)
                objective, nll = objective + sums.objective, nll + sums.nll
                if sums.alignment is not None:
                    alignment = sums.alignment if alignment is None else alignment + sums.alignment
            return LossSums(torch.as_tensor(objective), torch.as_tensor(nll), alignment)

        return within_memory(work, device, self.agree)

    def adding(self, batch: Batch, *, last: bool) -> AbstractContextManager[object]:
        """Context of one batch's passes; after the last batch, gradients include those of all processes."""
        return contextlib.nullcontext()

    def fix_buckets(self, batch: Batch) -> None:
        """Fix the order in which gradient buckets are summed, by passes over any `batch`; does nothing here."""

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


# Buffers are constants (each process has the table entries it needs), so they need not be sent before every pass. torch
# 2.13 renamed the option.
_BUFFERS = "forward_sync_buffers"
_BUFFERS_STAY: dict[str, Any] = {
    _BUFFERS if _BUFFERS in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


class Replicated(Parallel):
    """The whole model in every process; gradients are summed in buckets during the backward pass (DDP).

    All batches of an update except the last run under `no_sync`. When a process runs out of memory, the others wait for
    its buckets: it sends zeros for those that it did not reach, so that all can agree to skip the update. DDP cannot
    recover from an interrupted backward pass, so a new wrapper is made then. With `layer_drop`, layers may be skipped,
    and DDP searches for parameters without a gradient.
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
        self._bucket_mib, self._layer_drop = bucket_mib, layer_drop
        self._wrap(first=True)

    def _wrap(self, *, first: bool) -> None:
        self._sizes: list[int] = []  # for all buckets, in the order in which they are summed
        self._sent: list[int] = []  # for the present update's buckets
        self._ddp = DistributedDataParallel(
            self.objective,
            bucket_cap_mb=self._bucket_mib,
            # Gradients live in the buckets, which avoids a second copy of all of them.
            gradient_as_bucket_view=True,
            # Only with LayerDrop, since the search walks the graph in every pass; without the search, DDP would wait
            # for the gradients of skipped layers.
            find_unused_parameters=self._layer_drop,
            # Later, weights are the same everywhere but position tables are not: a process that has met a longer
            # sentence has a larger table, which the others could not receive.
            init_sync=first,
            **_BUFFERS_STAY,
        )
        # DDP holds the hook in C++, where Python's garbage collector finds no cycles, so a strong reference would keep
        # the model alive for ever.
        this = weakref.proxy(self)
        self._ddp.register_comm_hook(None, lambda _, bucket: this._add_up(bucket.buffer()))

    def _add_up(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Start to sum one bucket over the processes; DDP's default hook would take the mean."""
        if not self._sent:  # once per update, because each is a message to the store that all processes share
            self.processes.arrive()
        self._sent.append(gradients.numel())
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return cast(torch.futures.Future[Tensor], future.then(lambda done: done.value()[0]))

    @property
    def wrapped(self) -> nn.Module:
        """The objective inside DDP, whose backward pass sums gradients over the processes."""
        return self._ddp

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel."""
        self.fix_buckets(batches[0])
        self._sent = []
        return super().accumulate(batches, size)

    def fix_buckets(self, batch: Batch) -> None:
        """See Parallel; both passes use an idle batch, whose gradients are zero.

        A resumed run then sums in the order of the uninterrupted one; otherwise its rounding would differ.
        """
        if self._sizes:
            return
        for _ in range(2):  # after the first pass, DDP reorders its buckets by the arrival of gradients
            self._sent = []
            add_gradients(self._ddp, batch.idle(), self.model.device, self.precision, tokens=1, sentences=1)
        self._sizes = self._sent
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See Parallel; gradients are zeroed in DDP's buckets, since `no_sync` would otherwise sum in other memory."""
        if self._layer_drop:
            super().drop_gradients()  # an unused parameter must have no gradient, since moments would decay with zero
        else:
            self.model.zero_grad(set_to_none=False)

    @contextlib.contextmanager
    def adding(self, batch: Batch, *, last: bool) -> Iterator[None]:
        """See Parallel."""
        with contextlib.ExitStack() as contexts:
            if not last:
                contexts.enter_context(self._ddp.no_sync())
            # An idle batch skips all layers with LayerDrop: one that no process uses must have no gradient instead of
            # zero.
            if batch.target_tokens == 0:
                contexts.enter_context(with_layer_drop(self.model, 1.0))
            yield

    def agree(self, short: bool) -> bool:
        """See Parallel."""
        if short and len(self._sent) < len(self._sizes):
            if not self._sent:
                self.processes.arrive()  # as the others did before their first bucket
            for size in self._sizes[len(self._sent) :]:
                dist.all_reduce(self.model.output.weight.new_zeros(size))
            if self._layer_drop:  # after the last bucket, DDP sums the uses of each parameter and also waits for that
                used = sum(p.requires_grad for p in self.model.parameters())
                dist.all_reduce(torch.zeros(used, dtype=torch.int32, device=self.model.device))
        anywhere = super().agree(short)
        if anywhere:
            # The old wrapper is removed first, because its hooks on the parameters would fire along with the new ones.
            del self._ddp
            super().drop_gradients()
            gc.collect()
            self._wrap(first=False)
        return anywhere


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
