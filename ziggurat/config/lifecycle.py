"""Sections of `training` on the life of a run: validation, stopping, failed updates, checkpoints, measures, trackers.

Nothing here changes what a single update computes; that is in ziggurat.config.train.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.section import Beams, Count, Length, Minutes, Real, Section, Size
from ziggurat.system.errors import ConfigError


class ReferenceLengthConfig(Section):
    """Longest translation in a validation: ratio * reference tokens + extra, without end-of-sentence.

    It can only lower `decoding.max_length`. Early in training a model does not end sentences by itself, so each takes
    as many steps as its limit allows.
    """

    ratio: Real = Field(default=1.5, ge=0)
    """Factor for the reference's length."""
    extra: Length = Field(default=10, ge=0)
    """Tokens added to that."""


class ValidationConfig(Section):
    """Measurements on the dev set."""

    every_updates: Count | None = Field(default=1000, ge=1)
    """Updates between validations; null: only `every_epochs` counts."""
    every_epochs: Count | None = Field(default=None, ge=1)
    """Also validate after every N-th pass over the data; null: no."""
    decode: bool = True
    """Translate the dev set and score it with sacreBLEU."""
    beam_size: Beams = Field(default=1, ge=1)
    """Beam size of this decoding, which never samples; 1 is greedy. A model whose loss is above the entropy of the word
    frequencies in the training pairs is always decoded greedily."""
    max_length: ReferenceLengthConfig | None = ReferenceLengthConfig()
    """Longest output of this decoding, by the length of the reference; null: only `decoding.max_length` applies."""
    max_share: float | None = Field(default=0.25, gt=0, lt=1)
    """`metric: loss`: largest share of the time since the start of training that decoding may take. A decoding that
    would exceed it is skipped, and the log reports it. The first one after a start, the last one of a run and those
    under 10 s always run. null: no limit."""
    max_sentences: Size | None = Field(default=None, ge=1)
    """Decode only the first N dev pairs of each direction of translation; null: all."""
    metric: Literal["loss", "bleu", "chrf"] = "loss"
    """Metric for the best checkpoint and for early stopping."""

    @model_validator(mode="after")
    def _measured_some_time(self) -> Self:
        if self.every_updates is None and self.every_epochs is None:
            raise ValueError("set `every_updates` or `every_epochs`: without them nothing is measured during training")
        if self.metric != "loss" and not self.decode:
            raise ConfigError.of(f"metric: {self.metric}", "needs `decode: true`")
        return self


class StopConfig(Section):
    """End of training: whichever limit is reached first."""

    updates: Count | None = Field(default=100_000, ge=1)
    """Optimiser updates."""
    epochs: Count | None = Field(default=None, ge=1)
    """Passes over the data."""
    minutes: Minutes | None = Field(default=None, gt=0)
    """Wall time of training, summed over all resumed parts, validation and checkpoints included."""
    patience: Count | None = Field(default=None, ge=1)
    """Consecutive validations without a better metric (early stopping). With `data.stages` only those of the last stage
    count, and with `growth` only those at the final depth."""

    @model_validator(mode="after")
    def _some_end(self) -> Self:
        if self.updates is None and self.epochs is None and self.minutes is None and self.patience is None:
            raise ValueError("training would never end: set `updates`, `epochs`, `minutes` or `patience`")
        return self


class PatienceConfig(Section):
    """Limits on consecutive failed updates; each failed one is skipped, counted and explained in the log."""

    non_finite: Count = Field(default=20, ge=1)
    """Consecutive updates whose loss or gradient is not finite, or with a loss spike; then `divergence.action`."""
    out_of_memory: Count = Field(default=5, ge=1)
    """Consecutive updates that run out of memory; then training ends."""


class DivergenceConfig(Section):
    """Detection of divergence (besides losses and gradients that are not finite), and the reaction to it."""

    loss_spike: Real | None = Field(default=None, gt=1)
    """Skip an update whose loss (nats per target token, unsmoothed) exceeds the running median by more than this
    factor; null: never."""
    window: Count = Field(default=100, ge=1)
    """`loss_spike`: number of recent updates in the median; none is skipped before that many have been made."""
    action: Literal["stop", "roll_back"] = "stop"
    """Reaction to `patience.non_finite` consecutive skipped updates: end the run with a diagnosis, or return to the
    last good checkpoint and continue with a lower rate and new data."""
    rate_factor: float = Field(default=0.5, gt=0, le=1)
    """`roll_back`: factor by which each roll-back multiplies the learning rate for the rest of the run."""
    max_roll_backs: Count = Field(default=3, ge=1)
    """`roll_back`: maximum number of roll-backs in a run; after that it ends with a diagnosis."""


class CheckpointConfig(Section):
    """Checkpoints: when they are written and which are kept."""

    every_updates: Count | None = Field(default=1000, ge=1)
    """Updates between checkpoints; null: only `every_epochs` and `every_minutes` count."""
    every_epochs: Count | None = Field(default=None, ge=1)
    """Also write one after every N-th pass over the data; null: no. With `every_updates: null`, averages are over whole
    epochs."""
    every_minutes: Minutes | None = Field(default=None, gt=0)
    """Also write one after this many minutes of training."""
    keep_last: Count = Field(default=5, ge=1)
    """Newest checkpoints kept."""
    keep_best: Count = Field(default=1, ge=0)
    """Best checkpoints kept, by `training.validation.metric`."""
    keep_around_best: Count | None = Field(default=None, ge=3)
    """Also keep the best checkpoint and its neighbours, this many in total: an odd number, half of the rest before it
    and half after it, to score all of them (`ziggurat evaluate RUN --checkpoints around-best:21`); null: none."""
    keep_best_per_direction: Count = Field(default=0, ge=0)
    """Best checkpoints kept for each direction of translation, with links such as `best-en-de`, if the dev set has
    several directions (docs/fine-tuning.md#many-languages)."""
    keep_every: Count | None = Field(default=None, ge=1)
    """Also keep permanently every checkpoint at a multiple of this many updates, itself a multiple of `every_updates`;
    null: none."""
    asynchronous: bool = True
    """Write checkpoints in the background: training waits only while its tensors are copied. false: training waits
    until everything is on disk, but needs no memory for the copy (12 bytes per parameter with Adam: weights and
    moments)."""
    on_error: Literal["stop", "continue"] = "stop"
    """Reaction when a checkpoint cannot be written, for example on a full disk: end the run, or report it and continue
    until the next one. Failing to write the last checkpoint of a run is always an error."""
    average_last: Count = Field(default=0, ge=0)
    """When training ends, average this many of the newest checkpoints into `averaged/` and score the result on the dev
    set. If it is worse than `best` by `training.validation.metric`, translation uses `best`; 0: no average."""

    @model_validator(mode="after")
    def _kept_ones_are_written(self) -> Self:
        if self.average_last > self.keep_last:
            raise ConfigError.of("average_last", f"({self.average_last}) is larger than `keep_last` ({self.keep_last})")
        if self.every_updates is self.every_epochs is self.every_minutes is None:
            raise ValueError("set `every_updates`, `every_epochs` or `every_minutes`: without them nothing is saved")
        if self.keep_every is not None and (self.every_updates is None or self.keep_every % self.every_updates):
            raise ConfigError.of(
                "keep_every",
                f"({self.keep_every}) must be a multiple of `every_updates` ({self.every_updates}): there "
                "is no checkpoint to keep at other updates",
            )
        if self.keep_around_best is not None and self.keep_around_best % 2 == 0:
            raise ConfigError.of(
                "keep_around_best",
                f"({self.keep_around_best}) must be odd: as many checkpoints are kept before the best one as after it",
            )
        return self


class DiagnosticsConfig(Section):
    """Depth measurements, written to `diagnostics/` in the run; they do not change training."""

    every_updates: Count | None = Field(default=100, ge=1)
    """Updates between measurements; one more is taken before the first update. null: nothing is measured."""
    tokens: Size = Field(default=512, ge=1)
    """Size of the sample of training pairs to measure, in tokens of the longer side; at most
    `training.batch.max_tokens`. The pairs are the same throughout the run."""
    batches: Count = Field(default=1, ge=1, le=10_000)
    """Number of samples of this size over which each layer's gradient norm is averaged; all other measures use the
    first sample. Each further one costs a forward and a backward pass. Zhang et al. 2019 use 50 in figure 4."""
    max_share: float | None = Field(default=0.03, gt=0, lt=1)
    """Largest share of the time since the start of training that measuring may take. A measurement that would exceed it
    is skipped, so runs with short updates measure less often than `every_updates`. The first measurement after a start
    always runs. null: no limit."""


class WandbConfig(Section):
    """Reporting to Weights & Biases; everything else is set by W&B's own variables, such as WANDB_TAGS."""

    project: str = "ziggurat"
    """W&B project."""
    entity: str | None = None
    """User or team; null: the default of the API key."""
    mode: Literal["online", "offline"] | None = None
    """`offline`: only write files, which `wandb sync` uploads later; null: the value of WANDB_MODE, or online."""


class MlflowConfig(Section):
    """Reporting to MLflow."""

    uri: str | None = None
    """Tracking server or store, `http://host:5000` or `sqlite:///mlflow.db`; null: the value of MLFLOW_TRACKING_URI, or
    MLflow's own default."""
    experiment: str = "ziggurat"
    """MLflow experiment, created if it does not exist. A resumed run stays in its experiment."""
