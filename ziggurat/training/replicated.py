"""Every process has the whole model: DDP, with sums instead of means, that survives a process without memory."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.transformer import Decoder, Encoder
from ziggurat.training.capacity import Shortage
from ziggurat.training.loss import LossSums
from ziggurat.training.parallel import Parallel, Share
from ziggurat.training.processes import Processes

__all__ = ["Replicated"]

_BUFFERS = "forward_sync_buffers"
_BUFFERS_STAY: dict[str, Any] = {  # they are constants; torch 2.13 has another word for that
    _BUFFERS if _BUFFERS in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


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
        self.settle(batches[0])
        self._sent = []
        return super().accumulate(batches, share)

    def settle(self, batch: Batch) -> None:
        """See Parallel. DDP settles its buckets in its second pass; both are of a batch that counts for nothing.

        From then on their order is fixed: a resumed run adds up in the order of the uninterrupted one.
        """
        if self._sizes:
            return
        for _ in range(2):
            self._sent = []
            self._run(self._ddp, batch.idle(), 1, 1)
        self._sizes = self._sent
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See Parallel; they stay in DDP's buckets, or those of `no_sync` would be kept outside of them."""
        if self._layer_drop:
            super().drop_gradients()  # what has none is not to be taken for zero
        else:
            self.model.zero_grad(set_to_none=False)

    def _add(self, batch: Batch, share: Share, *, last: bool) -> LossSums:
        together = contextlib.nullcontext() if last else self._ddp.no_sync()
        # What is idle uses no layer: one that no process uses is to have no gradient, rather than zero.
        with together, _dropping_all(self.model) if batch.target_tokens == 0 else contextlib.nullcontext():
            return self._run(self._ddp, batch, share.tokens, share.sentences)

    def agree(self, short: bool) -> bool:
        """See Parallel."""
        if short and len(self._sent) < len(self._sizes):
            if not self._sent:
                self.processes.arrive()  # as the others did before their first bucket
            for size in self._sizes[len(self._sent) :]:
                dist.all_reduce(self.model.output.weight.new_zeros(size))
            if self._layer_drop:  # after the last bucket DDP adds up who used which parameter
                used = sum(p.requires_grad for p in self.model.parameters())
                dist.all_reduce(torch.zeros(used, dtype=torch.int32, device=self.model.device))
        anywhere = super().agree(short)
        if anywhere:
            del self._ddp
            super().drop_gradients()
            gc.collect()  # its buckets, and its hooks on the parameters, go with it
            self._make()
        return anywhere


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
