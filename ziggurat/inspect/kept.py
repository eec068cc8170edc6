"""Finished trainings of a sweep, kept in a file, so that a sweep that was cut off goes on from them.

A training is known by a digest of all that its loss depends on: the configuration at its size and rate, the data, the
options of the trial, the device, and the versions of this toolkit and of PyTorch. The file is JSON and is written anew,
whole, after each training.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.inspect.trial import TrialOptions, trial_experiment
from ziggurat.model.device import usable_device
from ziggurat.system.checksums import content_checksum
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import Form, json_safe, read_json

_FORMAT: Literal[1] = 1


class KeptTrials:
    """The losses of finished trainings, in memory and, if there is a path, in a JSON file.

    Attributes:
        path: the file; None: nothing is kept.
        found: number of losses that were taken from the file instead of training.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if there is one. Raises DataError where it is damaged or of another kind."""
        self.path, self.found = path, 0
        self._losses: dict[str, float | None] = {}
        if path is not None:
            remedy = "remove it to train everything anew"
            with contextlib.suppress(FileNotFoundError):
                self._losses = dict(read_json(path, _Document, remedy=remedy).losses)

    def loss(self, experiment: Experiment, store: Store, options: TrialOptions, compute: Callable[[], float]) -> float:
        """Return the loss of a training: the one that is kept, or else that of `compute`, which is kept from now on."""
        if self.path is None:
            return compute()
        key = trial_digest(experiment, store, options)
        if key in self._losses:
            self.found += 1
            kept = self._losses[key]
            return math.inf if kept is None else kept
        loss = compute()
        self._losses[key] = json_safe(loss)
        document: dict[str, Any] = {"format": _FORMAT, "losses": self._losses}
        write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())
        return loss


def trial_digest(experiment: Experiment, store: Store, options: TrialOptions) -> str:
    """Return the digest of everything that the loss of a trial depends on (ziggurat.inspect.trial.run_trial)."""
    tried = trial_experiment(experiment, store, options)
    return content_checksum(
        {
            "experiment": tried.model_dump(mode="json", include={"data", "model", "training"}),
            "store": store.fingerprint,
            "options": asdict(options),
            "device": str(usable_device(experiment.training.device, "training.device")),
            "versions": [__version__, torch.__version__],
        }
    )


class _Document(Form):
    """Form of the file: digest of a training -> its loss, null where it failed."""

    format: Literal[1]
    losses: dict[str, float | None] = Field(max_length=100_000)
