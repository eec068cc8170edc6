"""The state of a run except its tensors, and how it moves on through the data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ziggurat.config.modifiers import StageConfig
from ziggurat.data.batching import FIRST, stages_over
from ziggurat.data.loader import LoaderState


@dataclass
class Progress:
    """The state of a run except its tensors.

    Attributes:
        update: optimiser updates done, skipped ones included.
        epoch, batch, data_stages: position in the data (ziggurat.data.loader.LoaderState); the last is the first epoch
            of each stage of `data.stages` that has begun.
        stages_to_come: stages after the present one; -1 when all are over.
        seconds: wall time of training so far.
        target_tokens: target tokens of all these updates.
        skipped: updates skipped for a non-finite loss or gradient, or a loss spike.
        skipped_in_a_row: length of the row of such updates that ends with the latest update.
        fault: the fault of the first update in that row, in words; None when the row is empty.
        spikes: skipped updates with a loss spike (training.divergence.loss_spike).
        losses: nats per target token of the latest updates taken, where spikes are looked for.
        roll_backs: number of times that the run went back to a good checkpoint.
        rate_factor: factor of the schedule's rate, lowered by each of them.
        good: name of the checkpoint to roll back to; None where the run does not roll back.
        out_of_memory: updates skipped for want of memory.
        out_of_memory_in_a_row: length of the row of such updates that ends with the latest update.
        rejected: updates skipped for a large gradient (training.adaptive_clip).
        gradient_norms: running sums of their logarithms (ziggurat.train.update).
        best: best value of the validation metric so far.
        best_update: its update.
        best_by: settings by which it is measured (ziggurat.train.setup.rank_anew).
        validations_since_best: number of validations since the best one.
        validation_due: True when the validation of this update was interrupted; a resumed run does it first.
        scores: validation metric by name of the checkpoints kept.
        direction_scores: the same of each direction of translation, where there are several.
        stage: present stage of growth, from 0 (training.growth).
        schedule_update: the learning rate's counter t; behind `update` where growth or a roll back has set it back.
        interim: names of the checkpoints kept that only a stop asked for; the next checkpoint replaces them.
        by_clock: True when only the clock asked for this checkpoint (`every_minutes`).
        window: sums of the updates since the last record (ziggurat.train.progress.UpdateWindow).
    """

    update: int = 0
    epoch: int = 0
    batch: int = 0
    data_stages: list[int] = field(default_factory=lambda: list(FIRST))
    stages_to_come: int = 0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    fault: str | None = None
    spikes: int = 0
    losses: list[float] = field(default_factory=list)
    roll_backs: int = 0
    rate_factor: float = 1.0
    good: str | None = None
    out_of_memory: int = 0
    out_of_memory_in_a_row: int = 0
    rejected: int = 0
    gradient_norms: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best: float | None = None
    best_update: int | None = None
    best_by: dict[str, Any] = field(default_factory=dict)
    validations_since_best: int = 0
    validation_due: bool = False
    stage: int = 0
    schedule_update: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    direction_scores: dict[str, dict[str, float]] = field(default_factory=dict)
    interim: list[str] = field(default_factory=list)
    by_clock: bool = False
    window: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> LoaderState:
        """Position in the data."""
        return LoaderState(self.epoch, self.batch, tuple(self.data_stages))

    def keep(self, checkpoints: Collection[str]) -> None:
        """Forget all that is noted of checkpoints with other names than these."""
        self.scores = {name: score for name, score in self.scores.items() if name in checkpoints}
        self.interim = [name for name in self.interim if name in checkpoints]
        self.direction_scores = {
            direction: {name: score for name, score in scores.items() if name in checkpoints}
            for direction, scores in self.direction_scores.items()
        }

    def advance(self, target_tokens: int, position: LoaderState, stages: Sequence[StageConfig] = ()) -> None:
        """Count one update, taken or not, and move on to `position` in the data, which `stages` may divide."""
        self.update += 1
        self.schedule_update += 1
        self.target_tokens += target_tokens
        self._move(position, stages)

    def lose_patience(self, stages: Sequence[StageConfig]) -> bool:
        """Move on to the next stage, if a validation has just ended the present one by its patience; return whether."""
        if (self.epoch, self.batch) == (self.data_stages[-1], 0):
            self.validations_since_best = 0  # it was of the stage before
        patience = stages[len(self.data_stages) - 1].until.patience if self.stages_to_come > 0 else None
        if patience is None or self.validations_since_best < patience:
            return False
        epoch = self.epoch + (self.batch > 0)  # what is left of the present one is passed over
        self._move(LoaderState(epoch, 0, (*self.data_stages, epoch)), stages)
        return True

    def _move(self, position: LoaderState, stages: Sequence[StageConfig]) -> None:
        if len(position.starts) > len(self.data_stages):
            self.validations_since_best = 0  # a new stage has patience of its own
        self.epoch, self.batch, self.data_stages = position.epoch, position.batch, list(position.starts)
        over = stages_over(stages, position.starts, position.epoch)
        self.stages_to_come = -1 if over else max(0, len(stages) - len(position.starts))
