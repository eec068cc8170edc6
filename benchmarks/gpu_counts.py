"""Counts the work of an update or a search step on the pretend device, and on CUDA what it reports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tools.pretend_device import NAME as PRETEND
from tools.pretend_device import Counts, counted, present
from ziggurat.model.accelerator import default_device

HEAD = "launches  waits  copies   bytes"
"""HEAD is the header for the columns of `said`; `copies` counts copies to the device."""


def best_device() -> str:
    """Return the kind of this machine's accelerator, or else the pretend one."""
    return PRETEND if (kind := default_device().type) == "cpu" else kind


def being_there(kind: str) -> AbstractContextManager[None]:
    """Return a context in which a device of that kind can be used."""
    return present() if kind == PRETEND else nullcontext()


def is_real(device: torch.device) -> bool:
    """Return whether times on this device mean anything."""
    return device.type != PRETEND


def counts_of(device: torch.device, work: Callable[[], object]) -> Counts | None:
    """Do `work` and return the counts of the device; None, without doing `work`, where nothing can be counted."""
    if is_real(device):
        return None
    with counted() as counts:
        work()
    return counts


def waits_of(device: torch.device, work: Callable[[], object]) -> list[str] | None:
    """Do `work` and return where the CPU waited for the device; None where that cannot be counted."""
    if device.type != "cuda":
        counts = counts_of(device, work)
        return None if counts is None else sorted(counts.waits.elements())
    with _told_by_cuda() as found:
        work()
    return [f"{one.filename}:{one.lineno}" for one in found if "synchronizing" in str(one.message)]


@contextmanager
def _told_by_cuda() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings of PyTorch about operations that wait for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def shared_out(counts: Counts | None, times: int) -> dict[str, float] | None:
    """Return the mean counts of `times` updates or steps: launches, waits, copies to the device and their bytes."""
    if counts is None:
        return None
    asked = {
        "launches": counts.launches,
        "waits": counts.waits.total(),
        "copies": counts.to_device.total(),
        "bytes": counts.bytes_to_device,
    }
    return {name: number / times for name, number in asked.items()}


def said(counts: dict[str, float] | None) -> str:
    """Return the columns of HEAD."""
    if counts is None:
        return ""
    return f"{counts['launches']:8,.0f}  {counts['waits']:5.2f}  {counts['copies']:6.2f}  {counts['bytes']:6,.0f}"
