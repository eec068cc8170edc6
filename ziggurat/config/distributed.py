"""How several processes train one model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ziggurat.config.base import Minutes, Section, Size

__all__ = ["DistributedConfig"]


class DistributedConfig(Section):
    """Has an effect where torchrun starts several processes (docs/scaling.md)."""

    kind: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: every process has the whole model (torch's DistributedDataParallel). `fsdp`: weights, gradients and
    moments are cut into one part per process (FSDP2, torch's fully_shard)."""
    bucket_mib: Size = Field(default=25, ge=1)
    """ddp: gradients are added up over processes in pieces of this size, while the backward pass goes on."""
    timeout_minutes: Minutes = Field(default=30.0, gt=0)
    """A process that others wait for longer than this is taken for dead: all end, and say which it was."""
