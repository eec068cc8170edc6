"""Which trackers a configuration asks for, and whether their packages are there."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.errors import ConfigError
from ziggurat.tracking.listener import Listener
from ziggurat.tracking.mlflow import Mlflow
from ziggurat.tracking.tensorboard import TensorBoard
from ziggurat.tracking.wandb import Wandb

__all__ = ["open_trackers", "refuse_missing_trackers"]


def refuse_missing_trackers(config: TrainingConfig) -> None:
    """Raise ConfigError when a tracker is asked for whose package is not installed."""
    wanted = {
        "tensorboard": ("train", config.tensorboard, "false"),
        "wandb": ("wandb", config.wandb is not None, "null"),
        "mlflow": ("mlflow", config.mlflow is not None, "null"),
    }
    for package, (extra, asked, without) in wanted.items():
        if asked and find_spec(package) is None:
            raise ConfigError(
                f"`training.{package}` needs the package {package}: pip install 'ziggurat-mt[{extra}]', "
                f"or set `training.{package}: {without}`"
            )


def open_trackers(run: Path, experiment: Experiment, update: int) -> list[Listener]:
    """Start the trackers that `experiment` asks for, each in its thread; training goes on after `update`."""
    config, settings = experiment.training, experiment.model_dump(mode="json")
    found = []
    if config.tensorboard:
        found.append(Listener("TensorBoard", partial(TensorBoard, run, update)))
    if config.wandb is not None:
        found.append(Listener("Weights & Biases", partial(Wandb, run, config.wandb, settings)))
    if config.mlflow is not None:
        found.append(Listener("MLflow", partial(Mlflow, run, config.mlflow, settings)))
    return found
