"""Weights & Biases: a run of a project there, or files to be sent later."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ziggurat.config.tracking import WandbConfig
from ziggurat.errors import ConfigError
from ziggurat.tracking.tracker import FOLDER, Pixels, keep, kept

__all__ = ["Wandb"]

_START_SECONDS, _END_SECONDS = 20.0, 20.0


class Wandb:
    """Keeps one run at W&B for one run here, however often it is resumed.

    The horizontal axis is the figure `update`, not W&B's own step: a run resumed from a checkpoint goes back by some
    updates, and W&B takes no step twice. Nothing is asked on the terminal, and the terminal is not recorded.

    Args:
        run: folder of the run; its name is that of the run at W&B. Files lie in `tracking/wandb/`.
        config: section `training.wandb`.
        settings: the whole configuration, kept with the run.

    Raises ConfigError when there is no key for W&B, whatever wandb raises when it cannot be reached.
    """

    def __init__(self, run: Path, config: WandbConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        self._image = wandb.Image
        set_up = wandb.setup(settings=wandb.Settings(silent=True)).settings
        mode: Any = config.mode or set_up.mode  # init's own type leaves out two that settings may hold
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "no key for Weights & Biases: run `wandb login`, set WANDB_API_KEY, or set "
                "`training.wandb.mode: offline` and send the files later with `wandb sync`"
            )
        name = kept(run, "wandb") or uuid.uuid4().hex[:12]
        keep(run, "wandb", name)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=mode,
            name=run.name,
            id=name,
            resume="allow",
            dir=run / FOLDER,
            config=dict(settings),
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=_START_SECONDS, finish_timeout=_END_SECONDS
            ),
        )
        self._run.define_metric("update", hidden=True)
        self._run.define_metric("*", step_metric="update")

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Log the figures of one record."""
        self._run.log({"update": update, **values})

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Log an image."""
        self._run.log({"update": update, name: self._image(pixels)})

    def close(self) -> None:
        """Send what waits, for 20 seconds at most, and end the run."""
        self._run.finish()
