"""Failed updates: skipped, counted and explained; after too many, the run rolls back or ends with the diagnosis.

While training is healthy, the only cost is a comparison of the loss, if `training.divergence.loss_spike` is set. When
an update fails, its batches are run again, with the same dropout masks, and with hooks on every module and parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.config import TrainingConfig
from ziggurat.config.lifecycle import DivergenceConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.run_folder import CHECKPOINTS, checkpoint_folders
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import CheckpointError, Remedy, TrainingError
from ziggurat.train.checkpoint import Checkpoint, RunProgress, load_checkpoint, same_for_all
from ziggurat.train.device import Shortage, within_memory
from ziggurat.train.diagnosis.gradients import eagerly
from ziggurat.train.learner import Learner
from ziggurat.train.objective import Objective, add_gradients
from ziggurat.train.run_log import RunLog
from ziggurat.train.update import UpdateResult


def highest_nll(losses: Sequence[float], config: DivergenceConfig) -> float:
    """Return the loss above which an update is a spike, nats per target token; infinity while none is defined.

    `losses` are the losses of the latest updates that were taken (`RunProgress.losses`).
    """
    if config.loss_spike is None or len(losses) < config.window:
        return math.inf
    # The median, because a spike just below the limit would raise a mean, and so the limit for the next one.
    return config.loss_spike * median(losses[-config.window :])


def remember_loss(losses: Sequence[float], nll: float, config: DivergenceConfig) -> list[float]:
    """Return `losses` with the loss of one more update, cut to the window; [] when spikes are not detected."""
    return [*losses, nll][-config.window :] if config.loss_spike is not None else []


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """True when no floating-point tensor holds NaN or an infinity."""
    return all(_kind(tensor) is None for tensor in tensors.values())


class Fault(NamedTuple):
    """A description of where an update failed; `found` is false if all was finite this time, or memory was short."""

    place: str
    found: bool


def find_fault(model: Seq2Seq, batches: Sequence[Batch], config: LossConfig, *, precision: str) -> Fault:
    """Return the layer and tensor at which an update failed first.

    A parameter that is not finite takes precedence. Otherwise the update is run again, and the result is the first
    module whose input or output is not finite, or the loss, or the first gradient in the order of the backward pass. If
    all of them are finite (a norm that overflows, a loss spike), it is the largest gradient.

    `model` has the weights of that update; its gradients are dropped, everything else is restored.
    """
    for name, parameter in model.named_parameters():
        if kind := _kind(parameter.detach()):
            return Fault(f"parameter {name} is {kind}", True)
    batches = [batch for batch in batches if batch.target_tokens]
    if not batches:
        return Fault("had no tokens in this update", False)  # one of several processes had an idle batch
    hooks = _Hooks(model)
    try:
        with hooks, eagerly(model):
            short = within_memory(lambda: _again(model, batches, config, precision, hooks), model.device)
        if isinstance(short, Shortage):
            return Fault(f"place not found: {short}", False)
        found = hooks.fault()
        return Fault(_largest(model), False) if found is None else Fault(found, True)
    finally:
        model.zero_grad(set_to_none=True)


def _again(model: Seq2Seq, batches: Sequence[Batch], config: LossConfig, precision: str, hooks: _Hooks) -> None:
    """Run the batches of an update again, up to the first that shows a fault."""
    objective = Objective(model, config).train()
    model.zero_grad(set_to_none=True)
    tokens, sentences = sum(b.target_tokens for b in batches), sum(b.sentences for b in batches)
    for batch in batches:
        sums = add_gradients(objective, batch, model.device, precision, tokens=tokens, sentences=sentences)
        hooks.see_loss(sums.objective)
        if hooks.fault() is not None:
            return


class _Hooks:
    """A context with hooks on every part of a model that remember the first number that is not finite."""

    def __init__(self, model: Seq2Seq) -> None:
        self._model = model
        self._forward: str | None = None
        self._loss: str | None = None
        self._gradient: str | None = None
        self._handles: list[RemovableHandle] = []

    def fault(self) -> str | None:
        return self._forward or self._loss or self._gradient

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enters, name)))
            self._handles.append(module.register_forward_hook(partial(self._leaves, name)))
        for name, parameter in self._model.named_parameters():
            # These fire in the order of the backward pass, so the first one that finds a fault is at its origin.
            if parameter.requires_grad:
                hook = partial(self._accumulated, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def see_loss(self, objective: Tensor) -> None:
        if kind := _kind(objective):
            self._loss = f"the loss is {kind}, though all states are finite: the projection to the vocabulary overflows"

    def _enters(self, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Only the first argument, the hidden states, because later ones may be an attention bias with -inf.
        if self._forward is None and (kind := _first_kind(inputs[:1])):
            self._forward = f"{name}: input is {kind} in the forward pass"

    def _leaves(self, name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        if self._forward is None and (kind := _first_kind(output)):
            self._forward = f"{name or 'the model'}: output is {kind} in the forward pass"

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if self._gradient is None and parameter.grad is not None and (kind := _kind(parameter.grad)):
            self._gradient = f"gradient of {name} is {kind}"


def _kind(tensor: Tensor) -> str | None:
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return None
    return "NaN" if bool(torch.isnan(tensor).any()) else "inf"


def _first_kind(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return _kind(value.detach())
    if isinstance(value, tuple | list):
        return next((kind for part in value if (kind := _first_kind(part))), None)
    return None


def _largest(model: nn.Module) -> str:
    """Return a description of the parameter with the largest gradient."""
    # In fp64, because the square of a value beyond 1.8e19 overflows fp32, which may be the very fault.
    norms = {name: float(p.grad.double().norm()) for name, p in model.named_parameters() if p.grad is not None}
    name = max(norms, key=lambda n: norms[n])
    share = norms[name] ** 2 / max(sum(norm**2 for norm in norms.values()), 1e-300)  # all may be 0
    return (
        f"run again, every state and gradient is finite; the largest gradient is that of {name} "
        f"(norm {norms[name]:.3g}, {100 * share:.0f} % of the sum of squares)"
    )


def count_skipped(p: RunProgress, result: UpdateResult, why: str = "") -> str | None:
    """Count the latest update if it was skipped, and return the reason for the log; None when it was taken.

    `why`: a description of where the fault was found; for an update that ran out of memory, its shape.
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


def refuse_to_go_on(p: RunProgress, config: TrainingConfig, run: Path, wait_for_save: Callable[[], None]) -> None:
    """Raise TrainingError, with the diagnosis, when too many consecutive updates of the run in folder `run` failed.

    `wait_for_save` waits for the checkpoint that is being written.
    """
    if p.out_of_memory_in_a_row >= config.patience.out_of_memory:
        raise TrainingError(
            f"{p.out_of_memory_in_a_row} updates in a row did not fit into memory, the last of them update "
            f"{p.update}. Resume with more memory, or start a new run with a smaller `training.batch.max_tokens` "
            f"({config.batch.max_tokens}; `training.batch.accumulate` keeps updates as large, `training.start_from` "
            "takes the weights of this run).",
            key="training.batch.max_tokens",
            named=["training.batch.accumulate", "training.start_from"],
        )
    if p.skipped_in_a_row < config.patience.non_finite:
        return
    wait_for_save()  # the message names the existing checkpoints
    kept = [folder.name for folder in checkpoint_folders(run)]
    back = config.divergence
    rolled = f" Earlier roll backs: {p.roll_backs}." if p.roll_backs else ""
    ways = [f"Lower `training.schedule.{config.schedule.rate_key}`", "lengthen `warmup_updates`"]
    ways += ["set `training.clip_norm`"] if config.clip_norm is None else []
    ways += ["use fp32"] if config.precision != "fp32" else []
    ways += ["set `training.divergence.action: roll_back`"] if back.action == "stop" else []
    said = f"; first {p.fault}" if p.fault else ""
    raise TrainingError(
        f"{p.skipped_in_a_row} updates in a row had a non-finite loss or gradient, or a loss spike, the first of them "
        f"update {p.update - p.skipped_in_a_row + 1}{said}.{rolled} {', '.join(ways)}. "
        + (f"Checkpoints kept: {', '.join(kept)}; the newest may hold damaged weights." if kept else ""),
        key=f"training.schedule.{config.schedule.rate_key}",
        named=["training.clip_norm", "training.divergence.action"],
    )


class Recovery:
    """Judges the updates of a run, logs each skipped one, and rolls back after too many.

    `wait_for_save` waits for the checkpoint that is being written.
    """

    def __init__(
        self, run: Path, learner: Learner, config: TrainingConfig, log: RunLog, wait_for_save: Callable[[], None]
    ) -> None:
        self._run, self._learner, self._config = run, learner, config
        self._log, self._wait_for_save = log, wait_for_save

    @property
    def rolls_back(self) -> bool:
        """True when the run keeps a good checkpoint to roll back to."""
        return self._config.divergence.action == "roll_back"

    def count(self, p: RunProgress, batches: Sequence[Batch], result: UpdateResult) -> None:
        """Count an update on `batches` in `p` as taken or skipped; find and log the reason of a skipped one."""
        config, learner = self._config, self._learner
        why = ""
        if result.shortage is not None:
            largest = max(batches, key=lambda batch: batch.source.numel() + batch.target_in.numel())
            why = self._most_telling(largest.shape_in_words, result.shortage.here)
        elif not result.finite or result.spike:
            # Every process checks its batches, of which only some may show the fault.
            with learner.parallel.whole() as model:
                fault = find_fault(model, batches, config.loss, precision=config.precision)
            why = self._most_telling(*fault)
        elif result.taken:
            p.losses = remember_loss(p.losses, result.nll / result.target_tokens, config.divergence)
        if message := count_skipped(p, result, why):
            self._log.say(message, "bold red" if why else "yellow")

    def due(self, p: RunProgress) -> bool:
        """True when too many consecutive updates failed and the run may still roll back."""
        config = self._config
        failed = p.skipped_in_a_row >= config.patience.non_finite
        return failed and self.rolls_back and p.roll_backs < config.divergence.max_roll_backs

    def _most_telling(self, said: str, sure: bool) -> str:
        """Return the reason from the first process that found a definite one, or else from the first process."""
        processes = self._learner.processes
        reasons = processes.texts([said, "sure"] if sure else [said])
        rank = next((rank for rank, reason in enumerate(reasons) if len(reason) == 2), 0)
        return f"process {rank}: {reasons[rank][0]}" if processes.count > 1 else said

    def roll_back(self, p: RunProgress) -> None:
        """Return to the last good checkpoint, keep the position in the data, and lower the rate.

        The count of updates continues, so that records and checkpoints keep their order. Skipping the data on which
        training diverged follows PaLM (Chowdhery et al. 2022, section 5.1).
        """
        self._wait_for_save()  # the good checkpoint may still be being written
        checkpoint = same_for_all(
            self._run, lambda: next(self._good_checkpoints(p), None), self._learner.processes, read=self._read
        )
        if checkpoint is None:
            raise TrainingError(
                f"after {p.skipped_in_a_row} bad updates in a row ({p.fault}) the run should roll back, but "
                f"{self._run} holds no whole checkpoint from before them with finite weights; start a new run with a "
                f"lower `training.schedule.{self._config.schedule.rate_key}`",
                key=f"training.schedule.{self._config.schedule.rate_key}",
            )
        self._learner.restore(checkpoint, self._run)
        good, bad, fault = checkpoint.progress, p.skipped_in_a_row, p.fault
        # Only state that belongs to the weights is restored. The position in the data, counters, scores and the clock
        # stay.
        p.stage, p.schedule_update = good.stage, good.schedule_update
        p.gradient_norms, p.losses = good.gradient_norms, good.losses
        p.skipped_in_a_row, p.fault = 0, None
        p.roll_backs += 1
        p.rate_factor *= self._config.divergence.rate_factor
        self._log.say(
            f"update {p.update}: {bad} bad updates in a row, first {fault}; rolled back to the weights after update "
            f"{good.update}, continuing with the data that comes next, at {p.rate_factor:g} times the rate "
            f"({p.roll_backs} of {self._config.divergence.max_roll_backs} roll backs)",
            "bold red",
        )

    def _good_checkpoints(self, p: RunProgress) -> Iterator[Checkpoint]:
        """Yield the checkpoint recorded as good, then older ones, excluding those with values that are not finite.

        Older ones written only because of the clock or a stop are excluded too: the run must return to the same weights
        regardless of interruptions.
        """
        if p.good is None:  # it could not be written, and `training.checkpoint.on_error` let training continue
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

        Using an older one instead would lead to other final weights, needlessly if the disk error was temporary. No
        checkpoint of this update is written, so a resumed run tries this again.
        """
        try:
            return load_checkpoint(folder)
        except CheckpointError as error:
            older = any(other.name < folder.name for other in checkpoint_folders(self._run))
            back = "remove it, and `--resume` goes back to the checkpoint before it" if older else "start a new run"
            raise CheckpointError(
                f"{error}. The run must roll back to {folder}. If the disk failed only briefly, `--resume` "
                f"again; if the folder is damaged, {back}",
                named=[Remedy.RESUME],
            ) from None
