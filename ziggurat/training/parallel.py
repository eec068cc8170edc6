"""Gradients of an update: from one process, from replicas of the model (DDP), or from parts of it (FSDP2).

Whoever takes part, gradients are sums over all batches of the update, whose losses are already normalised by all of
them (ziggurat.training.loss); so nothing is averaged.
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
from ziggurat.data.collate import Batch
from ziggurat.errors import ConfigError, TrainingError
from ziggurat.models.directory import load_weights, weights
from ziggurat.models.recompute import Recomputing
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.tensors import whole
from ziggurat.models.transformer import Decoder, Encoder
from ziggurat.training.capacity import Shortage, within_memory
from ziggurat.training.loss import LossSums
from ziggurat.training.objective import Objective, add_gradients
from ziggurat.training.processes import Processes

__all__ = ["Parallel", "Replicated", "Sharded", "Share", "parallel"]


_BUFFERS = "forward_sync_buffers"
_BUFFERS_STAY: dict[str, Any] = {  # they are constants; torch 2.13 has another word for that
    _BUFFERS if _BUFFERS in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


class Share(NamedTuple):
    """How much an update has to do.

    Attributes:
        source_tokens: real source tokens of all processes.
        tokens: real target tokens of all processes.
        sentences: sentence pairs of all processes.
        batches: most that any process has.
    """

    source_tokens: int
    tokens: int
    sentences: int
    batches: int


class Parallel:
    """One process alone; what the others do differently is in the classes below.

    Every method is called by all processes, in the same order.

    Args:
        model: what is trained.
        loss: section `training.loss`.
        precision: `training.precision`.
        processes: all that train it.

    Attributes:
        recovers: whether all can go on when one of them has run out of memory.
    """

    recovers = True

    def __init__(
        self, model: Seq2Seq, loss: LossConfig, precision: str = "fp32", processes: Processes | None = None
    ) -> None:
        self.model = model
        self.processes = processes or Processes()
        self.precision = precision
        self.objective = Objective(model, loss)

    def share(self, batches: Sequence[Batch]) -> Share:
        """Return the size of the update of which `batches` are this process's part."""
        p = self.processes
        mine = [sum(n) for n in zip(*((b.source_tokens, b.target_tokens, b.sentences) for b in batches), strict=True)]
        numbers = [len(batches) if rank == p.rank else 0 for rank in range(p.count)]
        source_tokens, tokens, sentences, *numbers = map(int, p.sums([*mine, *numbers]))
        return Share(source_tokens, tokens, sentences, max(numbers))

    def accumulate(self, batches: Sequence[Batch], share: Share) -> LossSums | Shortage:
        """Add the gradient of the update to `.grad` of the model's parameters; return this process's part of its loss.

        Where memory is too short in any process, all of them return a Shortage; the gradients are then to be dropped.
        """

        def compute() -> LossSums:
            objective: Tensor | float = 0.0
            nll: Tensor | float = 0.0
            for number, batch in enumerate(batches, start=1):
                sums = self._add(batch, share, last=number == len(batches))
                objective, nll = objective + sums.objective, nll + sums.nll
            return LossSums(torch.as_tensor(objective), torch.as_tensor(nll))

        return within_memory(compute, self.model.device, self.agree)

    def _add(self, batch: Batch, share: Share, *, last: bool) -> LossSums:
        """Run one batch forward and backward; after the last one, gradients are those of all processes."""
        return self._run(self.objective, batch, share.tokens, share.sentences)

    def _run(self, objective: nn.Module, batch: Batch, tokens: int, sentences: int) -> LossSums:
        return add_gradients(objective, batch, self.model.device, self.precision, tokens=tokens, sentences=sentences)

    def attempt(self, batch: Batch) -> None:
        """Run one batch forward and backward as if it were an update; its gradient goes nowhere else."""
        self._run(self.objective, batch, batch.target_tokens, batch.sentences)

    def agree(self, short: bool) -> bool:
        """Take whether this process ran out of memory in an update; return whether any did."""
        return self.processes.any(short)

    def weights(self) -> Mapping[str, Tensor]:
        """Return every parameter whole, by name."""
        return weights(self.model)

    def whole(self) -> AbstractContextManager[Seq2Seq]:
        """Context with the model as one process has it: for validation, decoding and looking into it."""
        return contextlib.nullcontext(self.model)


class Replicated(Parallel):
    """Every process has the model; gradients are added up in buckets while the backward pass goes on (DDP).

    Batches but the last of an update run under `no_sync`. When a process runs out of memory, the others wait for its
    buckets: it sends zeros for those that it did not come to, so that all come to agree on skipping the update. DDP
    cannot go on after a backward pass that broke off, so it is made anew then.

    Args:
        bucket_mib: size of a bucket of gradients.
        layer_drop: whether layers may be left out; DDP then looks for parameters without a gradient.
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
        self._make()

    def _make(self) -> None:
        self._sizes: list[int] = []  # of all buckets, in the order in which they are added up
        self._sent: list[int] = []  # of those of the present update
        self._ddp = DistributedDataParallel(
            self.objective,
            bucket_cap_mb=self._bucket_mib,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._layer_drop,
            **_BUFFERS_STAY,
        )
        this = weakref.proxy(self)  # DDP keeps the hook where the garbage collector does not look
        self._ddp.register_comm_hook(None, lambda _, bucket: this._add_up(bucket.buffer()))

    def _add_up(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to add up one bucket over the processes; DDP's own hook would take the mean."""
        if not self._sent:
            self.processes.arrive()
        self._sent.append(gradients.numel())
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return cast(torch.futures.Future[Tensor], future.then(lambda done: done.value()[0]))

    def accumulate(self, batches: Sequence[Batch], share: Share) -> LossSums | Shortage:
        """See Parallel."""
        if not self._sizes:
            self._settle(batches[0].idle())
        self._sent = []
        return super().accumulate(batches, share)

    def _settle(self, idle: Batch) -> None:
        """Have DDP settle its buckets, which it does in its second pass, on batches that count for nothing.

        From then on their order is fixed: a resumed run adds up in the order of the uninterrupted one.
        """
        for _ in range(2):
            self._sent = []
            self._run(self._ddp, idle, 1, 1)
        self._sizes = self._sent
        self.model.zero_grad(set_to_none=True)

    def _add(self, batch: Batch, share: Share, *, last: bool) -> LossSums:
        together = contextlib.nullcontext() if last else self._ddp.no_sync()
        # What is idle uses no layer: one that no process uses is to have no gradient, rather than zero.
        with together, _dropping_all(self.model) if batch.target_tokens == 0 else contextlib.nullcontext():
            return self._run(self._ddp, batch, share.tokens, share.sentences)

    def agree(self, short: bool) -> bool:
        """See Parallel."""
        if short and len(self._sent) < len(self._sizes):
            for size in self._sizes[len(self._sent) :]:
                dist.all_reduce(self.model.output.weight.new_zeros(size))
            if self._layer_drop:  # after the last bucket DDP adds up who used which parameter
                used = sum(p.requires_grad for p in self.model.parameters())
                dist.all_reduce(torch.zeros(used, dtype=torch.int32, device=self.model.device))
        anywhere = super().agree(short)
        if anywhere:
            del self._ddp
            gc.collect()  # its hooks on the parameters go with it
            self._make()
        return anywhere


class Sharded(Parallel):
    """Every process has a part of each parameter, its gradient and its moments (FSDP2, torch's fully_shard).

    The weights of a layer are gathered when it is run, forward and backward. Gradients are added up after every batch,
    so that no process ever has all of them. A copy of the model on the CPU serves validation.
    """

    recovers = False

    def __init__(self, model: Seq2Seq, loss: LossConfig, precision: str, processes: Processes) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(model, loss, precision, processes)
        self._copy = copy.deepcopy(model).cpu()
        mesh = init_device_mesh(model.device.type, (processes.count,))
        for stack in (model.encoder, model.decoder):
            for unit in cast(Recomputing, stack).units():
                fully_shard(unit, mesh=mesh)
        fully_shard(self.objective, mesh=mesh)
        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def accumulate(self, batches: Sequence[Batch], share: Share) -> LossSums | Shortage:
        """See Parallel; a process with fewer batches than another runs idle ones, for layers are gathered together."""
        idle = [batches[0].idle()] * (share.batches - len(batches))
        return super().accumulate([*batches, *idle], share)

    def agree(self, short: bool) -> bool:
        """See Parallel; but the others wait in the middle of a layer and cannot go on, so this one ends the run."""
        if short:
            raise TrainingError(
                f"process {self.processes.rank} ran out of memory, and with `training.distributed.kind: fsdp` the "
                "others cannot go on without it; lower `training.batch.max_tokens`, or use more processes"
            )
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """See Parallel; on the CPU, so that a GPU holds no more than one of them whole."""
        return {name: whole(parameter).cpu() for name, parameter in weights(self.model).items()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[Seq2Seq]:
        """See Parallel; what is changed in this model stays there."""
        device = self.model.device
        load_weights(self._copy, self.weights(), "the parts of the model")
        yield self._copy.to(device)
        self._copy.cpu()


@contextlib.contextmanager
def _dropping_all(model: Seq2Seq) -> Iterator[None]:
    """Context in which layers that may be left out all are."""
    stacks = [stack for stack in (model.encoder, model.decoder) if isinstance(stack, Encoder | Decoder)]
    drops = [(stack, stack.layer_drop) for stack in stacks if stack.layer_drop]
    for stack, _ in drops:
        stack.layer_drop = 1.0
    try:
        yield
    finally:
        for stack, drop in drops:
            stack.layer_drop = drop


def parallel(model: Seq2Seq, config: TrainingConfig, processes: Processes) -> Parallel:
    """Return what trains `model` in `processes`, as `training.distributed` says.

    Raises ConfigError for `fsdp` with layers that are left out at random: each process would leave out others, and
    wait for ever for those to be gathered.
    """
    layer_drop = any(getattr(stack, "layer_drop", 0.0) > 0 for stack in (model.encoder, model.decoder))
    if processes.count == 1:
        return Parallel(model, config.loss, config.precision)
    if config.distributed.kind == "ddp":
        bucket_mib = config.distributed.bucket_mib
        return Replicated(model, config.loss, config.precision, processes, bucket_mib=bucket_mib, layer_drop=layer_drop)
    if layer_drop:
        raise ConfigError(
            "`training.distributed.kind: fsdp` gathers every layer in all processes, but with `layer_drop` each would "
            "leave out others; use `ddp`"
        )
    return Sharded(model, config.loss, config.precision, processes)
