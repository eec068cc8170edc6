"""Gradients of a model of which every process holds a part (FSDP2, torch's fully_shard)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, weights, whole
from ziggurat.system.errors import TrainingError
from ziggurat.train.loss import LossSums
from ziggurat.train.memory import Shortage
from ziggurat.train.parallel import Parallel, UpdateSize
from ziggurat.train.processes import Processes


class Sharded(Parallel):
    """A part of each parameter, its gradient and its moments in every process.

    The weights of a layer are gathered when it runs, forward and backward. Gradients are added up after every batch, so
    no process ever holds all of them. A copy of the model on the CPU serves validation.
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
        fully_shard(self.objective, mesh=mesh)  # after the units: it takes what none of them has taken
        # Sums, not means: losses are divided by the size of the whole update already.
        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel; a process with fewer batches runs idle ones, since all gather each layer together."""
        idle = [batches[0].idle()] * (size.batches - len(batches))
        return super().accumulate([*batches, *idle], size)

    def agree(self, short: bool) -> bool:
        """See Parallel; here the others wait in the middle of a layer and cannot go on, so the run ends."""
        if short:
            raise TrainingError(
                f"process {self.processes.rank} ran out of memory, and with `training.distributed.kind: fsdp` the "
                "others cannot go on without it; lower `training.batch.max_tokens`, or use more processes"
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
