"""Checkpoint section: when a run is saved, and which checkpoints are kept."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Count, Minutes, Section

__all__ = ["CheckpointConfig"]


class CheckpointConfig(Section):
    """What is kept on disk."""

    every_updates: Count = Field(default=1000, ge=1)
    """Updates between checkpoints."""
    every_minutes: Minutes | None = Field(default=None, gt=0)
    """Also after so many minutes of training."""
    keep_last: Count = Field(default=5, ge=1)
    """Newest checkpoints kept."""
    keep_best: Count = Field(default=1, ge=0)
    """Best checkpoints kept, by `training.validation.metric`."""
    keep_every: Count | None = Field(default=None, ge=1)
    """Also keep for good the checkpoint of every so many updates, a multiple of `every_updates`; null: none."""
    asynchronous: bool = True
    """Write checkpoints beside training, which waits only while its tensors are copied; false: until all is on disk,
    without the copy's memory (weights and moments once more, 12 bytes per parameter with Adam)."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, as on a full disk: end the run, or say so and go on until the next one.
    The last checkpoint of a run is an error in any case."""
    average_last: Count = Field(default=0, ge=0)
    """When training ends, average so many newest checkpoints into `averaged/`; 0: do not."""

    @model_validator(mode="after")
    def _enough_kept(self) -> Self:
        if self.average_last > self.keep_last:
            raise ValueError(f"`average_last` ({self.average_last}) is larger than `keep_last` ({self.keep_last})")
        return self

    @model_validator(mode="after")
    def _kept_ones_are_written(self) -> Self:
        if self.keep_every is not None and self.keep_every % self.every_updates:
            raise ValueError(
                f"`keep_every` ({self.keep_every}) must be a multiple of `every_updates` ({self.every_updates}): there "
                "is no checkpoint to keep at other updates"
            )
        return self
