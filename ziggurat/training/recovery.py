"""Updates that fail: skipped, counted and explained; then the run rolls back, or ends with the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ziggurat.config import TrainingConfig
from ziggurat.data.collate import Batch
from ziggurat.data.loader import Group
from ziggurat.errors import CheckpointError, TrainingError
from ziggurat.models.directory import CHECKPOINTS
from ziggurat.training.checkpoint import (
    Checkpoint,
    Progress,
    checkpoint_folders,
    load_checkpoint,
    same_for_all,
)
from ziggurat.training.clipping import AdaptiveClipper
from ziggurat.training.divergence import all_finite, find_fault, highest_nll, remember_loss
from ziggurat.training.learner import Learner
from ziggurat.training.metrics import RunLog
from ziggurat.training.schedule import learning_rate
from ziggurat.training.step import Guard, UpdateResult, train_update

__all__ = ["Recovery", "count_skipped", "largest_shape", "next_rate", "refuse_to_go_on"]


def largest_shape(batches: Sequence[Batch]) -> str:
    """Return for people the size of the largest of some batches, padding included."""
    batch = max(batches, key=lambda b: b.source.numel() + b.target_in.numel())
    sentences, source = batch.source.shape
    pairs = f"{sentences} sentence pair{'s' if sentences > 1 else ''}"
    return f"{pairs} of {source} source and {batch.target_in.shape[1]} target tokens"


def count_skipped(p: Progress, result: UpdateResult, why: str = "") -> str | None:
    """Count the update just tried if it was skipped, and return why for the log; None when it was taken.

    `why`: where the fault was found, in words; of an update that ran out of memory, its shape.
    """
    if result.shortage is not None:
        p.out_of_memory += 1
        p.out_of_memory_in_a_row += 1
        counts = f"{p.out_of_memory} in all, {p.out_of_memory_in_a_row} in a row"
        return f"update {p.update}: out of memory on {why}: {result.shortage}; update skipped ({counts})"
    p.out_of_memory_in_a_row = 0
    if not result.finite or result.spike:
        p.skipped += 1
        p.skipped_in_a_row += 1
        p.spikes += result.spike
        if p.skipped_in_a_row == 1:
            p.fault = why
        nll = result.nll / max(1, result.target_tokens)
        high = f"loss of {nll:.4g} nats per target token is far above its running median"
        bad = f"loss {result.loss} and gradient norm {result.grad_norm} are not both finite"
        counts = f"{p.skipped} in all, {p.skipped_in_a_row} in a row"
        return f"update {p.update}: {high if result.spike else bad}: {why}; update skipped ({counts})"
    p.skipped_in_a_row, p.fault = 0, None
    if result.admitted:
        return None
    p.rejected += 1
    return (
        f"update {p.update}: gradient norm {result.grad_norm:.4g} is far above its running mean; "
        f"update skipped by `training.adaptive_clip` ({p.rejected} in all)"
    )


def refuse_to_go_on(p: Progress, config: TrainingConfig, run: Path, settle: Callable[[], None]) -> None:
    """Raise TrainingError, with the diagnosis, when the updates of a run in folder `run` failed too often in a row.

    `settle` waits for the checkpoint that is being written.
    """
    if p.out_of_memory_in_a_row >= config.patience.out_of_memory:
        raise TrainingError(
            f"{p.out_of_memory_in_a_row} updates in a row did not fit into memory, the last of them update "
            f"{p.update}. Resume with more memory, or start a new run with a smaller `training.batch.max_tokens` "
            f"({config.batch.max_tokens}; `training.batch.accumulate` keeps updates as large, `training.start_from` "
            "takes the weights of this run)."
        )
    if p.skipped_in_a_row < config.patience.non_finite:
        return
    settle()
    kept = [folder.name for folder in checkpoint_folders(run)]
    back = config.divergence
    rolled = f" Roll backs of the run before: {p.roll_backs}." if p.roll_backs else ""
    hint = ", set `training.divergence.action: roll_back`" if back.action == "stop" else ""
    said = f"; first {p.fault}" if p.fault else ""
    raise TrainingError(
        f"{p.skipped_in_a_row} updates in a row had a non-finite loss or gradient, or a loss spike, the first of them "
        f"update {p.update - p.skipped_in_a_row + 1}{said}.{rolled} Lower `training.schedule.peak`, lengthen "
        f"`warmup_updates`, set `training.clip_norm`, use fp32{hint}. "
        + (f"Checkpoints kept: {', '.join(kept)}; the newest may hold damaged weights." if kept else "")
    )


def next_rate(p: Progress, config: TrainingConfig, d_model: int) -> float:
    """Return the learning rate of the next update: the schedule's, lowered by what roll backs took off."""
    last = config.stop.updates
    if last is not None:  # growth and roll backs set the counter back; the decay still ends with the run
        last -= p.update - p.schedule_update
    return p.rate_factor * learning_rate(config.schedule, p.schedule_update + 1, d_model=d_model, last_update=last)


class Recovery:
    """Tries the updates of a run, and deals with those that fail.

    Args:
        run: its folder.
        learner: model and optimiser.
        config: section `training`.
        log: is told about every update that is skipped.
        settle: waits for the checkpoint that is being written.
    """

    def __init__(
        self,
        run: Path,
        learner: Learner,
        config: TrainingConfig,
        log: RunLog,
        settle: Callable[[], None],
    ) -> None:
        self._run = run
        self._learner = learner
        self._config = config
        self._log = log
        self._settle = settle

    @property
    def rolls_back(self) -> bool:
        """Whether the run keeps a good checkpoint to go back to."""
        return self._config.divergence.action == "roll_back"

    def update(self, p: Progress, group: Group, rate: float) -> UpdateResult:
        """Try one update with learning rate `rate` and count it in `p`; roll back when too many in a row failed."""
        config, learner = self._config, self._learner
        learner.processes.update = p.update + 1
        clipper = AdaptiveClipper(p.gradient_norms) if config.adaptive_clip else None
        with learner.passes:
            result = train_update(
                learner.parallel,
                group.batches,
                learner.optimiser,
                rate=rate,
                clip_norm=config.clip_norm,
                guard=Guard(clipper, highest_nll(p.losses, config.divergence)),
            )
        p.update, p.schedule_update, (p.epoch, p.batch) = p.update + 1, p.schedule_update + 1, group.state_after
        p.target_tokens += result.target_tokens
        why = ""
        if result.shortage is not None:
            why = self._most_telling(largest_shape(group.batches), result.shortage.here)
        elif not result.finite or result.spike:
            with learner.parallel.whole() as model:
                fault = find_fault(model, group.batches, config.loss, precision=config.precision)
            why = self._most_telling(*fault)
        elif result.taken:
            p.losses = remember_loss(p.losses, result.nll / result.target_tokens, config.divergence)
        if message := count_skipped(p, result, why):
            self._log.say(message, "bold red" if why else "yellow")
        due = p.skipped_in_a_row >= config.patience.non_finite
        if due and self.rolls_back and p.roll_backs < config.divergence.max_roll_backs:
            self._roll_back(p)
        return result

    def _most_telling(self, said: str, sure: bool) -> str:
        """Return the reason of the first process that is sure of its own, or of the first of all."""
        processes = self._learner.processes
        reasons = processes.texts([said, "sure"] if sure else [said])
        rank = next((rank for rank, reason in enumerate(reasons) if len(reason) == 2), 0)
        return f"process {rank}: {reasons[rank][0]}" if processes.count > 1 else said

    def _roll_back(self, p: Progress) -> None:
        """Go back to the last good checkpoint, keep the place in the data, and lower the rate.

        Updates count on, so that records and checkpoints keep their order. Skipping the data that training diverged on
        is PaLM's rule (Chowdhery et al. 2022, section 5.1).
        """
        self._settle()
        checkpoint = same_for_all(self._run, lambda: next(self._good_checkpoints(p), None), self._learner.processes)
        if checkpoint is None:
            raise TrainingError(
                f"after {p.skipped_in_a_row} bad updates in a row ({p.fault}) the run should roll back, but "
                f"{self._run} holds no whole checkpoint from before them with finite weights; start a new run with a "
                "lower `training.schedule.peak`"
            )
        self._learner.restore(checkpoint, self._run)
        good, bad, fault = checkpoint.progress, p.skipped_in_a_row, p.fault
        p.stage, p.schedule_update = good.stage, good.schedule_update
        p.gradient_norms, p.losses = good.gradient_norms, good.losses
        p.skipped_in_a_row, p.fault = 0, None
        p.roll_backs += 1
        p.rate_factor *= self._config.divergence.rate_factor
        self._log.say(
            f"update {p.update}: {bad} bad updates in a row, first {fault}; rolled back to the weights after update "
            f"{good.update}, on to the data that comes next, at {p.rate_factor:g} times the rate "
            f"({p.roll_backs} of {self._config.divergence.max_roll_backs} roll backs)",
            "bold red",
        )

    def _good_checkpoints(self, p: Progress) -> Iterator[Checkpoint]:
        """Yield the checkpoint that was noted as good, then older ones; the damaged are named and passed over."""
        assert p.good is not None
        noted = self._run / CHECKPOINTS / p.good
        older = [folder for folder in checkpoint_folders(self._run) if folder.name < p.good]
        for folder in (noted, *reversed(older)):
            try:
                checkpoint = load_checkpoint(folder)
            except CheckpointError as error:
                self._log.say(f"CHECKPOINT DAMAGED: {error}; trying the one before", "bold red")
                continue
            healthy = checkpoint.progress.skipped_in_a_row == 0
            if healthy and all_finite(checkpoint.weights) and all_finite(checkpoint.optimiser):
                yield checkpoint
