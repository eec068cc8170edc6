"""Every process has a part of the model: FSDP2, torch's fully_shard."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.errors import TrainingError
from ziggurat.models.directory import load_weights, weights
from ziggurat.models.recompute import Recomputing
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.models.tensors import whole
from ziggurat.training.capacity import Shortage
from ziggurat.training.loss import LossSums
from ziggurat.training.parallel import Parallel, Share
from ziggurat.training.processes import Processes

__all__ = ["Sharded"]


class Sharded(Parallel):
    """Every process has a part of each parameter, its gradient and its moments (FSDP2, torch's fully_shard).

    The weights of a layer are gathered when it is run, forward and backward. Gradients are added up after every batch,
    so that no process ever has all of them. A copy of the model on the CPU serves validation.
    """

    recovers = False

    def __init__(self, model: Seq2Seq, loss: LossConfig, precision: str, processes: Processes) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(model, loss, precision, processes)
        device = model.device
        self._copy = copy.deepcopy(model.cpu())  # on the CPU, so that a GPU never has it twice
        model.to(device)
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
        try:
            yield self._copy.to(device)
        finally:
            self._copy.cpu()
