"""Services that a run is told to while it trains (docs/training.md)."""

from __future__ import annotations

from typing import Literal

from ziggurat.config.base import Section

__all__ = ["MlflowConfig", "WandbConfig"]


class WandbConfig(Section):
    """A run at Weights & Biases; what is not here is set by W&B's own variables, such as WANDB_TAGS."""

    project: str = "ziggurat"
    """Project there."""
    entity: str | None = None
    """User or team; null: the one that W&B has for the key."""
    mode: Literal["online", "offline"] | None = None
    """`offline`: only write files, which `wandb sync` sends later; null: what WANDB_MODE says, else online."""


class MlflowConfig(Section):
    """A run at MLflow."""

    uri: str | None = None
    """Tracking server or store, `http://host:5000` or `sqlite:///mlflow.db`; null: what MLFLOW_TRACKING_URI says, else
    MLflow's own default."""
    experiment: str = "ziggurat"
    """Experiment there; it is made when there is none of that name."""
