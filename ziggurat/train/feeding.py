"""Batches on their way from the store to the device that trains on them.

For a GPU they are page-locked in the loader's thread and copied one update ahead of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Group, Loader, LoaderState
from ziggurat.train.processes import Processes


def loader_of(experiment: Experiment, store: Store, processes: Processes | None = None) -> Loader:
    """Return the loader of this process's batches in a run of `experiment`. Raises DataError as Loader does."""
    processes, limit = processes or Processes(), experiment.model.embedding.limit
    return Loader(
        store.train,
        store.source,
        store.target,
        experiment.training.batch,
        seed=experiment.training.seed,
        data=experiment.data,
        longest=None if limit is None else limit - 1,
        links=experiment.training.loss.alignment is not None,
        rank=processes.rank,
        count=processes.count,
    )


def fed(loader: Loader, state: LoaderState, device: torch.device) -> Iterator[Group]:
    """Yield the groups of `loader` from `state` on.

    Batches for a CUDA device are on it already: while the GPU works on one group, another stream copies the next. For
    other devices they stay in the CPU's memory.
    """
    if device.type != "cuda":
        return loader.groups(state)
    # Only page-locked memory is copied asynchronously; the loader's thread locks it, so that training need not wait.
    return send_ahead(loader.groups(state, partial(_page_locked, device=device)), device)


def send_ahead(groups: Iterator[Group], device: torch.device) -> Iterator[Group]:
    """Yield `groups` with their batches on the CUDA device `device`; each is sent before its predecessor is yielded.

    The copies overlap with other work only if the tensors lie in page-locked memory.
    """
    stream = torch.cuda.Stream(device)

    def sent(group: Group) -> tuple[Group, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return _with_each(group, lambda tensor: tensor.to(device, non_blocking=True)), stream.record_event()

    following = sent(next(groups))
    while True:
        group, arrived = following
        following = sent(next(groups))  # before `group` is yielded, so that its update hides the copy
        yield _received(group, arrived, torch.cuda.current_stream(device))


def _page_locked(group: Group, device: torch.device) -> Group:
    with torch.cuda.device(device):  # every thread starts on the first GPU, whichever one its process uses
        return _with_each(group, Tensor.pin_memory)


def _received(group: Group, arrived: torch.cuda.Event, stream: torch.cuda.Stream) -> Group:
    """Make `stream` wait for the copies, and keep their memory from being reused until `stream` is done with them."""
    stream.wait_event(arrived)

    def used(tensor: Tensor) -> Tensor:
        # Allocated on the copying stream: without this the allocator would hand the memory to the next copy as soon as
        # Python drops the tensor, while kernels of `stream` still read it.
        tensor.record_stream(stream)
        return tensor

    return _with_each(group, used)


def _with_each(group: Group, function: Callable[[Tensor], Tensor]) -> Group:
    """Return `group` with `function` applied to every tensor of its batches."""
    return group._replace(batches=[batch.with_each(function) for batch in group.batches])
