"""One update: gradients of all its batches, the reasons not to take it, clipping, and one step of the optimiser.

Gradients are sums over all batches of the update, in one process or several that share them, and every loss is already
divided by the size of the whole update (ziggurat.train.loss). So nothing is averaged, and one process computes the same
as several, up to rounding.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import is_cut_up, weights, whole
from ziggurat.train.clipping import AdaptiveClipper, clip_to
from ziggurat.train.device import Shortage, within_memory
from ziggurat.train.distributed import Processes
from ziggurat.train.loss import LossSums
from ziggurat.train.objective import Objective, add_gradients, with_layer_drop
from ziggurat.train.optim import Optimiser


class UpdateSize(NamedTuple):
    """The size of one update: real tokens and sentence pairs of all processes, and the most batches in one."""

    source_tokens: int
    target_tokens: int
    sentences: int
    batches: int


class Parallel:
    """The gradients of one process; Replicated (DDP) and ziggurat.train.learner (FSDP2) handle several.

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
        self._sizes: list[int] = []  # of all buckets, in the order in which they are summed
        self._sent: list[int] = []  # of the present update's buckets
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
                self.processes.arrive()  # like the others before their first bucket
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


@dataclass(frozen=True)
class UpdateResult:
    """The figures of one update, and whether it was taken.

    Attributes:
        loss: the update's objective (normalised, smoothed, with its penalty), nats.
        nll: sum of -log p(gold) over target tokens, nats.
        grad_norm: global gradient norm before clipping.
        source_tokens, target_tokens: real tokens, end-of-sentence included.
        finite: False when loss or gradient was not finite, and the update was skipped.
        admitted: False when adaptive clipping skipped the update.
        spike: True when the update was skipped for a loss far above its running median.
        alignment: cross-entropy of guided alignment summed over target tokens with links, nats.
        aligned: number of these tokens.
        shortage: the memory shortage for which the update was skipped, or None; loss, nll and norm are then NaN.
    """

    loss: float
    nll: float
    grad_norm: float
    source_tokens: int
    target_tokens: int
    sentences: int
    finite: bool
    admitted: bool = True
    spike: bool = False
    alignment: float = 0.0
    aligned: float = 0.0
    shortage: Shortage | None = None

    @property
    def taken(self) -> bool:
        """True when the weights were changed."""
        return self.finite and self.admitted and not self.spike and self.shortage is None


def train_update(
    parallel: Parallel,
    batches: Sequence[Batch],
    optimiser: Optimiser,
    *,
    rate: float,
    clip_norm: float | None,
    clipper: AdaptiveClipper | None = None,
    highest_nll: float = math.inf,
) -> UpdateResult:
    """Accumulate the gradients of all processes' batches, clip, and take one optimiser step with learning rate `rate`.

    The loss is normalised by the token (or sentence) count of all batches in all processes, so that the division of an
    update into batches or processes affects only rounding. The step is skipped, and nothing changed, when loss or
    gradient is not finite, when memory is short, at a spike, or when the clipper rejects it.

    Args:
        parallel: model and loss.
        batches: this process's part of the update, at least one.
        optimiser: optimiser of the model's parameters.
        rate: learning rate.
        clip_norm: `training.clip_norm`.
        clipper: clipper of `training.adaptive_clip`, or None.
        highest_nll: nats per target token; a loss above it is a spike.
    """
    parallel.model.train()
    # (1) Gradients. The size comes first: every batch's loss is divided by that of the whole update, so that summed
    # gradients are correct without a second pass.
    size = parallel.size(batches)
    counts = size.source_tokens, size.target_tokens, size.sentences
    sums = parallel.accumulate(batches, size)
    if isinstance(sums, Shortage):
        parallel.drop_gradients()
        return UpdateResult(math.nan, math.nan, math.nan, *counts, finite=False, shortage=sums)
    gradients = [p.grad for p in parallel.model.parameters() if p.grad is not None]
    # None: grouped kernels if the device has them. They also work for FSDP's shards, but PyTorch uses them only on
    # request.
    norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=is_cut_up(gradients[0]) or None))
    # (2) Figures, in one transfer, which is the only time that the CPU waits for a GPU.
    guided = sums.nll.new_zeros(2) if sums.alignment is None else sums.alignment.to(sums.nll.dtype)
    *mine, norm_here = torch.cat([torch.stack([sums.objective, sums.nll]), guided, norm[None]]).tolist()
    # The first process's norm decides for all. Each has the same gradient, but different kinds of GPU round its norm
    # differently, and processes that disagree about one update would have different weights from then on.
    loss, nll, alignment, aligned, grad_norm = parallel.processes.sums(
        [*mine, norm_here if parallel.processes.first else 0.0]
    )
    # (3) Reasons to skip it. The clipper comes last, because it counts the norms that it is given and must not see a
    # spike.
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    spike = finite and nll > highest_nll * size.target_tokens
    admitted = not finite or spike or clipper is None or clipper.admits(grad_norm)
    # (4) The step.
    if finite and admitted and not spike:
        if clip_norm is not None:
            clip_to(gradients, grad_norm, clip_norm)
        optimiser.set_rate(rate)
        optimiser.step()
    parallel.drop_gradients()
    return UpdateResult(loss, nll, grad_norm, *counts, finite, admitted, spike, alignment, aligned)
