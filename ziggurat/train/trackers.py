"""Experiment trackers that receive a run's figures, in separate threads, so that they never stop or delay the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.lifecycle import MlflowConfig, WandbConfig
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.yaml_text import settings_by_key

Pixels = NDArray[np.uint8]
"""An image, [height, width, 3], red, green and blue from 0 to 255."""

FOLDER = "tracking"
"""FOLDER is the folder inside a run for the files of trackers: the name of the run at each service, files of W&B."""


class Tracker(Protocol):
    """A receiver of figures and images from a run. It may raise errors and be slow: `Listener` handles both."""

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Receive figures by name, such as `train/loss`."""

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Receive an image, such as a heat map of layers."""

    def close(self) -> None:
        """Send the rest and end."""


def kept(run: Path, service: str) -> str | None:
    """Return the name of the run at `service`, which a resumed run continues; None if there is none yet."""
    path = run / FOLDER / f"{service}.id"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep(run: Path, service: str, name: str) -> None:
    """Store the name of the run at `service`."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_atomically(run / FOLDER / f"{service}.id", name.encode())


# Heat maps

BLANK = (128, 128, 128)
"""BLANK is the colour of a cell without a value."""

_VIRIDIS = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99))
_SCALE = np.array((*_VIRIDIS, (170, 220, 50), (253, 231, 37)), dtype=np.float64)
"""Nine colours of viridis, evenly spaced from dark blue (0) to yellow (1); colour-blind readers can see their order."""

_SIDE, _LARGEST = 480, 16
"""Pixels on the longer side of an image, and the maximum per side of a cell; a cell has at least one pixel."""


def draw(rows: Sequence[Sequence[float | None]]) -> Pixels:
    """Return an image of shares from 0 to 1, top row first; values outside take the colour of the nearer end.

    Rows may differ in length: missing cells at their ends are blank, as are cells of None.
    """
    height, width = len(rows), max(map(len, rows))
    shares: NDArray[np.float64] = np.full((height, width), np.nan)
    for share, row in zip(shares, rows, strict=True):
        share[: len(row)] = [np.nan if value is None else value for value in row]
    position = np.clip(np.nan_to_num(shares), 0, 1) * (len(_SCALE) - 1)
    below = np.minimum(position.astype(np.intp), len(_SCALE) - 2)  # at 1, the upper colour is the last one
    part = (position - below)[..., None]
    colours = _SCALE[below] * (1 - part) + _SCALE[below + 1] * part
    colours[np.isnan(shares)] = BLANK
    side = max(1, min(_LARGEST, _SIDE // max(height, width)))
    return colours.round().astype(np.uint8).repeat(side, 0).repeat(side, 1)


def refuse_missing_trackers(config: TrainingConfig) -> None:
    """Raise ConfigError when the configuration asks for a tracker whose package is not installed."""
    wanted = {
        "tensorboard": ("train", config.tensorboard, "false"),
        "wandb": ("wandb", config.wandb is not None, "null"),
        "mlflow": ("mlflow", config.mlflow is not None, "null"),
    }
    for package, (extra, asked, without) in wanted.items():
        if asked and find_spec(package) is None:
            raise ConfigError(
                f"`training.{package}` needs the package {package}: pip install 'ziggurat-mt[{extra}]', "
                f"or set `training.{package}: {without}`",
                key=f"training.{package}",
            )


def refuse_other_experiment(run: Path, before: MlflowConfig | None, after: MlflowConfig | None) -> None:
    """Raise ConfigError when a resumed run names another MLflow experiment, because its run there cannot move."""
    if before and after and after.experiment != before.experiment and kept(run, "mlflow") is not None:
        raise ConfigError(
            f"{run}: its run at MLflow stays in the experiment {printable(before.experiment, 60)}: leave "
            f"`training.mlflow.experiment` as it is, or remove {run / FOLDER / 'mlflow.id'} to start a new run in "
            f"{printable(after.experiment, 60)}",
            key="training.mlflow.experiment",
        )


def open_trackers(run: Path, experiment: Experiment, update: int) -> list[Listener]:
    """Start the trackers that `experiment` asks for, each in its thread; training continues after `update`."""
    config, settings = experiment.training, experiment.model_dump(mode="json")
    found = []
    if config.tensorboard:
        found.append(Listener("TensorBoard", partial(TensorBoard, run, update)))
    if config.wandb is not None:
        found.append(Listener("Weights & Biases", partial(Wandb, run, config.wandb, settings)))
    if config.mlflow is not None:
        found.append(Listener("MLflow", partial(Mlflow, run, config.mlflow, settings)))
    return found


_ROOM = 1000
"""Largest number of records waiting for a tracker; further ones are dropped."""

_Event = Callable[[Tracker], None]


class Listener:
    """A thread that starts a tracker and passes it the records of a run; the run never waits for it.

    An exception in the tracker ends only the tracker; `failure` has its message. The thread does not keep the process
    from ending. `start` is called in the thread, since it may import large packages or wait for a network. At most
    `room` records wait.
    """

    def __init__(self, name: str, start: Callable[[], Tracker], *, room: int = _ROOM) -> None:
        self.name = name
        self.failure: str | None = None
        """The message of the exception that ended the tracker, or None."""
        self.left_out = 0
        """Number of records dropped because the tracker was too slow."""
        self._queue: queue.Queue[_Event | None] = queue.Queue(room)
        self._thread = threading.Thread(target=self._run, args=(start,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Pass on figures."""
        self._put(lambda tracker: tracker.scalars(update, values))

    def image(self, update: int, name: str, draw: Callable[[], Pixels]) -> None:
        """Pass on an image, which the thread draws."""
        self._put(lambda tracker: tracker.image(update, name, draw()))

    def close(self, seconds: float) -> bool:
        """Wait until the tracker has taken all records, for `seconds` at most; return False when it has not ended."""
        end = time.monotonic() + seconds
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)  # repeatedly, since a full queue may never be emptied
                break
            if time.monotonic() > end:
                return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _put(self, event: _Event) -> None:
        if self.failure is None:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.left_out += 1

    def _run(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            try:
                while (event := self._queue.get()) is not None:
                    event(tracker)
            except BaseException:
                with contextlib.suppress(Exception):
                    tracker.close()
                raise
            tracker.close()
        except (Exception, SystemExit) as error:  # no tracker's error may reach the run
            message = " ".join(str(error).split())
            self.failure = f"{type(error).__name__}: {message}" if message else type(error).__name__


# Trackers


class TensorBoard:
    """TensorBoard: event files in the run, under `tensorboard/`.

    Events after `update`, at which training starts, were left by a killed run and are purged.
    """

    def __init__(self, run: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=update + 1)

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Write an image."""
        self._writer.add_image(name, pixels, update, dataformats="HWC")

    def close(self) -> None:
        """Write the remaining figures and close the file."""
        self._writer.close()


_START_SECONDS, _END_SECONDS = 20.0, 20.0


class Wandb:
    """Weights & Biases: one W&B run for one run here, however often it is resumed.

    The horizontal axis is the figure `update`, not W&B's step: a run resumed from a checkpoint goes back by some
    updates, and W&B does not accept a step twice. There are no prompts, and the terminal is not recorded. The whole
    configuration, `settings`, is stored with the run.

    Raises ConfigError when there is no key for W&B, and wandb's errors when it cannot be reached.
    """

    def __init__(self, run: Path, config: WandbConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        self._image = wandb.Image
        set_up = wandb.setup(settings=wandb.Settings(silent=True)).settings
        mode: Any = config.mode or set_up.mode  # settings allow two modes that are missing in the type of init
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "no key for Weights & Biases: run `wandb login`, set WANDB_API_KEY, or set "
                "`training.wandb.mode: offline` and send the files later with `wandb sync`",
                key="training.wandb.mode",
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
        """Send the remaining figures, for at most 20 seconds, and end the run."""
        self._run.finish()


_PARAMETERS = 100
"""Number of parameters that MLflow accepts in one call."""


class Mlflow:
    """MLflow: one MLflow run for one run here, however often it is resumed.

    Keys of the configuration, `settings`, become parameters of the run when it starts. They are not updated when a
    resumed run changes `training.stop`, because MLflow's parameters cannot change.

    Raises mlflow's errors when the store cannot be reached.
    """

    def __init__(self, run: Path, config: MlflowConfig, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # MLflow logs each step of creating its tables
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
        parameters = [Param(key, str(value)) for key, value in settings_by_key(settings).items()]
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
