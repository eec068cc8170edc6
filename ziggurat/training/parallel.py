"""Gradients of an update, in one process; the base of those that several processes share out.

Whoever takes part, gradients are sums over all batches of the update, whose losses are already normalised by all of
them (ziggurat.training.loss); so nothing is averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.models.directory import weights
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.capacity import Shortage, within_memory
from ziggurat.training.loss import LossSums
from ziggurat.training.objective import Objective, add_gradients
from ziggurat.training.processes import Processes

__all__ = ["Parallel", "Share"]


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
    """One process alone; ziggurat.training.replicated (DDP) and ziggurat.training.sharded (FSDP2) do it together.

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

    def settle(self, batch: Batch) -> None:
        """Make what the first update would make, besides moments; `batch` is any."""

    def drop_gradients(self) -> None:
        """Forget the gradients of the update."""
        self.model.zero_grad(set_to_none=True)

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
