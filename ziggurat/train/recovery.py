"""Failed updates: skipped, counted and explained; after too many the run rolls back, or ends with the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ziggurat.config import TrainingConfig
from ziggurat.data.collate import Batch
from ziggurat.model.run_folder import CHECKPOINTS, checkpoint_folders
from ziggurat.system.errors import CheckpointError, TrainingError
from ziggurat.train.checkpoint import Checkpoint, load_checkpoint, same_for_all
from ziggurat.train.divergence import all_finite, find_fault, highest_nll, remember_loss
from ziggurat.train.learner import Learner
from ziggurat.train.metrics import RunLog
from ziggurat.train.run_state import Progress
from ziggurat.train.schedule import learning_rate
from ziggurat.train.update import AdaptiveClipper, Guard, UpdateResult


def count_skipped(p: Progress, result: UpdateResult, why: str = "") -> str | None:
    """Count the update just tried if it was skipped, and return the reason for the log; None when it was taken.

    `why`: where the fault was found, in words; for an update that ran out of memory, its shape.
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


def refuse_to_go_on(p: Progress, config: TrainingConfig, run: Path, wait_for_save: Callable[[], None]) -> None:
    """Raise TrainingError, with the diagnosis, when too many updates in a row of the run in folder `run` failed.

    `wait_for_save` waits for the checkpoint that is being written.
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
    wait_for_save()  # the message names the checkpoints that there are
    kept = [folder.name for folder in checkpoint_folders(run)]
    back = config.divergence
    rolled = f" Earlier roll backs: {p.roll_backs}." if p.roll_backs else ""
    hint = ", set `training.divergence.action: roll_back`" if back.action == "stop" else ""
    said = f"; first {p.fault}" if p.fault else ""
    raise TrainingError(
        f"{p.skipped_in_a_row} updates in a row had a non-finite loss or gradient, or a loss spike, the first of them "
        f"update {p.update - p.skipped_in_a_row + 1}{said}.{rolled} Lower `training.schedule.peak`, lengthen "
        f"`warmup_updates`, set `training.clip_norm`, use fp32{hint}. "
        + (f"Checkpoints kept: {', '.join(kept)}; the newest may hold damaged weights." if kept else "")
    )


def next_rate(p: Progress, config: TrainingConfig, d_model: int) -> float:
    """Return the learning rate of the next update: the schedule's, times the factors of all roll backs so far."""
    t, behind = p.schedule_update + 1, p.update - p.schedule_update
    rate = learning_rate(config.schedule, t, d_model=d_model, last_update=config.stop.updates, behind=behind)
    return p.rate_factor * rate


class Recovery:
    """Judges the updates of a run, and deals with those that fail.

    Args:
        run: its folder.
        learner: model and optimiser.
        config: section `training`.
        log: where every skipped update is reported.
        wait_for_save: waits for the checkpoint that is being written.
    """

    def __init__(
        self,
        run: Path,
        learner: Learner,
        config: TrainingConfig,
        log: RunLog,
        wait_for_save: Callable[[], None],
    ) -> None:
        self._run = run
        self._learner = learner
        self._config = config
        self._log = log
        self._wait_for_save = wait_for_save

    @property
    def rolls_back(self) -> bool:
        """True when the run keeps a good checkpoint to go back to."""
        return self._config.divergence.action == "roll_back"

    def guard(self, p: Progress) -> Guard:
        """Return the reasons to skip the next update, from what `p` remembers of those before."""
        clipper = AdaptiveClipper(p.gradient_norms) if self._config.adaptive_clip else None
        return Guard(clipper, highest_nll(p.losses, self._config.divergence))

    def count(self, p: Progress, batches: Sequence[Batch], result: UpdateResult) -> None:
        """Count an update on `batches` in `p` as taken or skipped; find and log the reason of a skipped one."""
        config, learner = self._config, self._learner
        why = ""
        if result.shortage is not None:
            largest = max(batches, key=lambda batch: batch.source.numel() + batch.target_in.numel())
            why = self._most_telling(largest.shape_in_words, result.shortage.here)
        elif not result.finite or result.spike:
            # Every process looks at its own batches, of which only some may show the fault.
            with learner.parallel.whole() as model:
                fault = find_fault(model, batches, config.loss, precision=config.precision)
            why = self._most_telling(*fault)
        elif result.taken:
            p.losses = remember_loss(p.losses, result.nll / result.target_tokens, config.divergence)
        if message := count_skipped(p, result, why):
            self._log.say(message, "bold red" if why else "yellow")

    def due(self, p: Progress) -> bool:
        """True when too many updates in a row failed, and the run may still roll back."""
        config = self._config
        failed = p.skipped_in_a_row >= config.patience.non_finite
        return failed and self.rolls_back and p.roll_backs < config.divergence.max_roll_backs

    def _most_telling(self, said: str, sure: bool) -> str:
        """Return the reason of the first process that is sure of its reason, or else that of the first process."""
        processes = self._learner.processes
        reasons = processes.texts([said, "sure"] if sure else [said])
        rank = next((rank for rank, reason in enumerate(reasons) if len(reason) == 2), 0)
        return f"process {rank}: {reasons[rank][0]}" if processes.count > 1 else said

    def roll_back(self, p: Progress) -> None:
        """Go back to the last good checkpoint, keep the place in the data, and lower the rate.

        The count of updates goes on, so that records and checkpoints keep their order. Skipping the data on which
        training diverged is PaLM's rule (Chowdhery et al. 2022, section 5.1).
        """
        self._wait_for_save()  # the good checkpoint may be the one that is being written
        checkpoint = same_for_all(
            self._run, lambda: next(self._good_checkpoints(p), None), self._learner.processes, read=self._read
        )
        if checkpoint is None:
            raise TrainingError(
                f"after {p.skipped_in_a_row} bad updates in a row ({p.fault}) the run should roll back, but "
                f"{self._run} holds no whole checkpoint from before them with finite weights; start a new run with a "
                "lower `training.schedule.peak`"
            )
        self._learner.restore(checkpoint, self._run)
        good, bad, fault = checkpoint.progress, p.skipped_in_a_row, p.fault
        # Only what belongs to the weights goes back. The place in the data, counters, scores and the clock stay.
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
        """Yield the checkpoint noted as good, then older ones, without those with values that are not finite.

        Nor older ones that only the clock or a stop asked for: the run must go back to the same weights however often
        and whenever it was stopped.
        """
        if p.good is None:  # it could not be written, and `training.checkpoint.on_error` let training go on
            return
        # Names have eight digits, so their order is that of updates.
        folders = [folder for folder in checkpoint_folders(self._run) if folder.name <= p.good]
        if p.good not in {folder.name for folder in folders}:
            gone = self._run / CHECKPOINTS / p.good
            self._log.say(f"{gone} is gone; rolling back to the checkpoint before it", "bold red")
        for folder in reversed(folders):
            checkpoint = self._read(folder)
            its = checkpoint.progress
            by_chance = folder.name != p.good and (its.by_clock or folder.name in its.interim)
            healthy = its.skipped_in_a_row == 0 and not by_chance
            if healthy and all_finite(checkpoint.weights) and all_finite(checkpoint.optimiser):
                yield checkpoint

    def _read(self, folder: Path) -> Checkpoint:
        """Read a checkpoint to roll back to. Raises CheckpointError, with the ways out, when it cannot be read.

        An older one in its place would lead to other final weights, needlessly so if the disk was only disturbed. No
        checkpoint of this update is written, so a resumed run comes here again.
        """
        try:
            return load_checkpoint(folder)
        except CheckpointError as error:
            older = any(other.name < folder.name for other in checkpoint_folders(self._run))
            back = "remove it, and `--resume` goes back to the checkpoint before it" if older else "start a new run"
            raise CheckpointError(
                f"{error}. The run has to roll back to {folder}. If the disk was only disturbed, `--resume` again; if "
                f"the folder is damaged, {back}"
            ) from None
