"""Batches on their way to a GPU: page-locked in the loader's thread, and copied one update ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ziggurat.data.collate import Batch
from ziggurat.data.loader import Group, Loader, LoaderState

__all__ = ["fed", "send_ahead"]


def fed(loader: Loader, state: LoaderState, device: torch.device) -> Iterator[Group]:
    """Yield the groups of `loader` from `state` on.

    For a CUDA device their batches are there: while the GPU is busy with one group, another stream copies the next. For
    other devices they are as they come.
    """
    if device.type != "cuda":
        return loader.groups(state)
    return send_ahead(loader.groups(state, partial(_page_locked, device=device)), device)


def send_ahead(groups: Iterator[Group], device: torch.device) -> Iterator[Group]:
    """Yield `groups` with their batches on the CUDA device `device`, each sent before the one before it is handed out.

    The copies go on beside other work only where the tensors lie in page-locked memory.
    """
    stream = torch.cuda.Stream(device)

    def sent(group: Group) -> tuple[Group, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return _with_each(group, lambda tensor: tensor.to(device, non_blocking=True)), stream.record_event()

    following = sent(next(groups))
    while True:
        group, arrived = following
        following = sent(next(groups))  # before `group` is handed out, so that its update hides the copy
        yield _received(group, arrived, torch.cuda.current_stream(device))


def _page_locked(group: Group, device: torch.device) -> Group:
    with torch.cuda.device(device):  # a thread begins with the first GPU, whichever its process uses
        return _with_each(group, Tensor.pin_memory)


def _received(group: Group, arrived: torch.cuda.Event, stream: torch.cuda.Stream) -> Group:
    """Have `stream` wait for the copies, and these keep their memory until `stream` is done with them."""
    stream.wait_event(arrived)

    def used(tensor: Tensor) -> Tensor:
        tensor.record_stream(stream)
        return tensor

    return _with_each(group, used)


def _with_each(group: Group, function: Callable[[Tensor], Tensor]) -> Group:
    return group._replace(batches=[_mapped(batch, function) for batch in group.batches])


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values |= {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **values)
