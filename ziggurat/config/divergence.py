"""Updates that fail: how many are borne, and what follows when training diverges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ziggurat.config.base import Count, Real, Section

__all__ = ["DivergenceConfig", "PatienceConfig"]


class PatienceConfig(Section):
    """How many failed updates in a row are borne; each is skipped, counted and explained in the log."""

    non_finite: Count = Field(default=20, ge=1)
    """Updates in a row with a loss or gradient that is not finite, or with a loss spike; then `divergence.action`."""
    out_of_memory: Count = Field(default=5, ge=1)
    """Updates in a row that do not fit into memory; then training ends."""


class DivergenceConfig(Section):
    """What counts as divergence besides numbers that are not finite, and what follows."""

    loss_spike: Real | None = Field(default=None, gt=1)
    """An update whose loss (nats per target token, without smoothing) is above so many times the running median is
    skipped; null: none is."""
    window: Count = Field(default=100, ge=1)
    """`loss_spike`: the median is over so many updates taken last, and judges once there are so many."""
    action: Literal["stop", "roll_back"] = "stop"
    """After `patience.non_finite` skipped updates in a row: end the run with the diagnosis, or go back to the last good
    checkpoint and train on with a lower rate and the data that comes next."""
    rate_factor: float = Field(default=0.5, gt=0, le=1)
    """`roll_back`: the learning rate is multiplied by this from then on, once for each roll back."""
    max_roll_backs: Count = Field(default=3, ge=1)
    """`roll_back`: how many in all; then the run ends with the diagnosis."""
