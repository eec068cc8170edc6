"""The gradients of an update, added up over its batches, in one process or in several that share the batches.

Gradients are sums over all batches of the update in all processes, and every loss is already divided by the size of the
whole update (ziggurat.train.loss). So nothing is averaged, and one process computes the same as several, to
rounding.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.train.loss import LossSums
from ziggurat.train.memory import MemoryGuard, Shortage
from ziggurat.train.objective import Objective, add_gradients, with_layer_drop
from ziggurat.train.processes import Processes


class UpdateSize(NamedTuple):
    """The size of one update.

    Attributes:
        source_tokens: real source tokens of all processes.
        target_tokens: real target tokens of all processes.
        sentences: sentence pairs of all processes.
        batches: the most batches that any process has.
    """

    source_tokens: int
    target_tokens: int
    sentences: int
    batches: int


class Parallel:
    """The gradients of one process; Replicated (DDP) and ziggurat.train.learner (FSDP2) are for several.

    All processes call every method, in the same order.

    Args:
        model: the model being trained.
        loss: section `training.loss`.
        precision: `training.precision`.
        processes: all that train it.

    Attributes:
        recovers: True when all processes can go on after one of them has run out of memory.
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
        """The objective as an update calls it; here it has no wrapper."""
        return self.objective

    def size(self, batches: Sequence[Batch]) -> UpdateSize:
        """Return the size of the update of which `batches` are this process's part."""
        p = self.processes
        mine = [sum(n) for n in zip(*((b.source_tokens, b.target_tokens, b.sentences) for b in batches), strict=True)]
        # Each process's number of batches in its own place, zero elsewhere: one sum tells all of them, beside the
        # counts, where a gather would be a second message.
        numbers = [len(batches) if rank == p.rank else 0 for rank in range(p.count)]
        source_tokens, target_tokens, sentences, *numbers = map(int, p.sums([*mine, *numbers]))
        return UpdateSize(source_tokens, target_tokens, sentences, max(numbers))

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """Add the gradient of the update to `.grad` of the model's parameters; return this process's part of its loss.

        When any process runs out of memory, all of them return a Shortage; the gradients must then be dropped.
        """
        # On a GPU the sums stay there: reading a number after each batch would make the CPU wait.
        objective: Tensor | float = 0.0
        nll: Tensor | float = 0.0
        alignment: Tensor | None = None
        guard = MemoryGuard(self.model.device)
        with guard:
            for number, batch in enumerate(batches, start=1):
                with self.adding(batch, last=number == len(batches)):
                    sums = add_gradients(
                        self.wrapped,
                        batch,
                        self.model.device,
                        self.precision,
                        tokens=size.target_tokens,
                        sentences=size.sentences,
                    )
                objective, nll = objective + sums.objective, nll + sums.nll
                if sums.alignment is not None:
                    alignment = sums.alignment if alignment is None else alignment + sums.alignment
        shortage = guard.shortage(self.agree)
        return shortage or LossSums(torch.as_tensor(objective), torch.as_tensor(nll), alignment)

    def adding(self, batch: Batch, *, last: bool) -> AbstractContextManager[object]:
        """Context of one batch's passes; after the last batch, gradients are those of all processes."""
        return contextlib.nullcontext()

    def fix_buckets(self, batch: Batch) -> None:
        """Fix the order in which buckets of gradients are added up, by passes over any `batch`; here there are none."""

    def drop_gradients(self) -> None:
        """Drop the gradients of the update."""
        self.model.zero_grad(set_to_none=True)

    def attempt(self, batch: Batch) -> None:
        """Run one batch forward and backward as if it were an update; its gradient stays in this process."""
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


# Buffers are constants (of tables, each process has as much as it needs), so they need not be sent before every pass.
# torch 2.13 renamed the option.
_BUFFERS = "forward_sync_buffers"
_BUFFERS_STAY: dict[str, Any] = {
    _BUFFERS if _BUFFERS in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


class Replicated(Parallel):
    """The whole model in every process; gradients are added up in buckets during the backward pass (DDP).

    All batches of an update except the last run under `no_sync`. When a process runs out of memory, the others wait for
    its buckets: it sends zeros for those that it did not reach, so that all can agree to skip the update. DDP cannot
    recover from an interrupted backward pass, so a new wrapper is made then.

    Args:
        bucket_mib: size of a bucket of gradients.
        layer_drop: True when layers may be left out; DDP then looks for parameters without a gradient.
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
        """Wrap the objective in a new DDP."""
        self._sizes: list[int] = []  # of all buckets, in the order in which they are added up
        self._sent: list[int] = []  # of those of the present update
        self._ddp = DistributedDataParallel(
            self.objective,
            bucket_cap_mb=self._bucket_mib,
            # Gradients live in the buckets: otherwise there would be a second copy of all of them.
            gradient_as_bucket_view=True,
            # With LayerDrop alone, since the search walks the graph in every pass; without it DDP would wait for the
            # gradients of layers that were left out.
            find_unused_parameters=self._layer_drop,
            # Later, weights are the same everywhere, and tables of positions are not: a process that has met a longer
            # sentence has a larger one, which the others could not receive.
            init_sync=first,
            **_BUFFERS_STAY,
        )
        # DDP holds the hook in C++, where Python's garbage collector finds no cycle: a strong reference would keep the
        # model alive for ever.
        this = weakref.proxy(self)
        self._ddp.register_comm_hook(None, lambda _, bucket: this._add_up(bucket.buffer()))

    def _add_up(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to add up one bucket over the processes; DDP's own hook would take the mean."""
        if not self._sent:  # once per update: each is a message to the store that all processes share
            self.processes.arrive()
        self._sent.append(gradients.numel())
        future = dist.all_reduce(gradients, async_op=True).get_future()
        return cast(torch.futures.Future[Tensor], future.then(lambda done: done.value()[0]))

    @property
    def wrapped(self) -> nn.Module:
        """The objective inside DDP, whose backward pass adds gradients up over the processes."""
        return self._ddp

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel."""
        self.fix_buckets(batches[0])
        self._sent = []
        return super().accumulate(batches, size)

    def fix_buckets(self, batch: Batch) -> None:
        """See Parallel; both passes are of an idle batch, whose gradients are zero.

        A resumed run then adds up in the order of the uninterrupted one; otherwise its rounding would differ.
        """
        if self._sizes:
            return
        for _ in range(2):  # after the first pass DDP reorders its buckets as gradients came
            self._sent = []
            add_gradients(self._ddp, batch.idle(), self.model.device, self.precision, tokens=1, sentences=1)
        self._sizes = self._sent
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See Parallel; gradients are set to zero in DDP's buckets, or `no_sync` would add up in other memory."""
        if self._layer_drop:
            super().drop_gradients()  # an unused parameter must have no gradient rather than zero: moments would decay
        else:
            self.model.zero_grad(set_to_none=False)

    @contextlib.contextmanager
    def adding(self, batch: Batch, *, last: bool) -> Iterator[None]:
        """See Parallel."""
        with contextlib.ExitStack() as contexts:
            if not last:
                contexts.enter_context(self._ddp.no_sync())
            # An idle batch uses no layer that may be left out: one that no process uses must have no gradient, rather
            # than zero.
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
            if self._layer_drop:  # after the last bucket DDP adds up the uses of each parameter, and waits for that too
                used = sum(p.requires_grad for p in self.model.parameters())
                dist.all_reduce(torch.zeros(used, dtype=torch.int32, device=self.model.device))
        anywhere = super().agree(short)
        if anywhere:
            # The old wrapper goes first: its hooks on the parameters would fire beside the new ones.
            del self._ddp
            super().drop_gradients()
            gc.collect()
            self._wrap(first=False)
        return anywhere
