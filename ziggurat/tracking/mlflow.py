"""MLflow: a run of an experiment on a tracking server, in a database or in a folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ziggurat.config.tracking import MlflowConfig
from ziggurat.tracking.tracker import Pixels, keep, kept

__all__ = ["Mlflow"]

_PARAMETERS = 100
"""Parameters that MLflow takes at a time."""


class Mlflow:
    """Keeps one run at MLflow for one run here, however often it is resumed.

    Args:
        run: folder of the run; its name is that of the run at MLflow.
        config: section `training.mlflow`.
        settings: the whole configuration; its keys become parameters of the run when it begins (MLflow does not let
            parameters change, as `training.stop` may when a run is resumed).

    Raises whatever mlflow raises when the store cannot be reached.
    """

    def __init__(self, run: Path, config: MlflowConfig, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it tells how it makes its tables
        self._metric = Metric
        self._client = MlflowClient(config.uri)
        found = kept(run, "mlflow")
        if found is not None:
            self._id = found
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        keep(run, "mlflow", self._id)
        parameters = [Param(key, str(value)) for key, value in _flat(settings)]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Log the figures of one record."""
        now = round(1000 * time.time())
        metrics = [self._metric(name, float(value), now, update) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Log an image."""
        self._client.log_image(self._id, pixels, key=name, step=update)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
