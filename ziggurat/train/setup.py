"""The set-up of a run: the parts that training needs, its starting point, and batches that fit into memory.

A trial runs the largest batches forward and backward like an update. So a run whose batches do not fit ends in its
first seconds, and `training.batch.fit` finds by trials how large they may be.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.batching import largest, round_up
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, Loader, LoaderState
from ziggurat.data.store_checks import StoreWatch
from ziggurat.data.subword import load_tokenizers
from ziggurat.model.accelerator import make_current, random_state_kept, usable_device
from ziggurat.model.directory import refuse_other_vocabulary, refuse_two_vocabularies
from ziggurat.model.run_folder import BASE, CHECKPOINTS, checkpoint_name, read_meta
from ziggurat.model.tensors import local
from ziggurat.system.errors import CheckpointError, ConfigError, Problem, Remedy, TrainingError, printable
from ziggurat.system.processes import share_cores
from ziggurat.system.yaml_text import changed, shown
from ziggurat.train.checkpoint import Checkpoint, RunProgress, latest_checkpoint, same_for_all
from ziggurat.train.cuda_graphs import refuse_unrecordable
from ziggurat.train.device import (
    Shortage,
    give_back_freed_memory,
    keep_freed_memory,
    limited_to_available_memory,
    loader_of,
    readable,
    within_memory,
)
from ziggurat.train.distributed import Processes
from ziggurat.train.learner import Learner
from ziggurat.train.limits import refuse_endless
from ziggurat.train.loss import refuse_without_links
from ziggurat.train.objective import every_branch_present, settle_precision
from ziggurat.train.run import create_run, refuse_existing, refuse_idle, refuse_other_store, settled_before
from ziggurat.train.run_log import RunLog
from ziggurat.train.saving import StoreCheck, set_aside
from ziggurat.train.schedule import initial_progress, next_rate
from ziggurat.train.trackers import refuse_missing_trackers
from ziggurat.train.validate import Validator, settings_of_scores

BUDGET_STEP = 256
"""BUDGET_STEP is the number of tokens of which `training.batch.fit` tries multiples."""

_CPU_SHARE = 0.5
"""_CPU_SHARE is the share of a CPU's free memory that a trial of `training.batch.fit` may take, because batches of many
shapes fragment the heap. With 6-6 layers of width 128 and 4,096 tokens, 25 updates took twice the memory of a trial."""


class TooLarge(NamedTuple):
    """A batch that does not fit into memory."""

    batch: Batch
    shortage: Shortage


def largest_batches(loader: Loader, length_multiple: int, at: LoaderState) -> list[Batch]:
    """Return the one or two batches of the epoch at `at` that may need the most memory; the position is kept.

    `ziggurat.data.batching.largest` chooses them.
    """
    # Sizes are computed from the table of lengths, for all batches at once: an epoch may have very many, and collating
    # one would read its sentences.
    plan = loader.plan(at)
    sentences = np.fromiter(map(len, plan), dtype=np.int64, count=len(plan))
    pairs, starts = np.concatenate(plan), np.cumsum(sentences) - sentences
    source, target = (
        round_up(np.maximum.reduceat(lengths[pairs], starts) + 1, length_multiple).astype(np.int64)
        for lengths in loader.lengths(at, pairs)
    )
    return [batch for number in largest(sentences, source, target) for batch in loader.load(at._replace(batch=number))]


def try_batches(
    learner: Learner,
    batches: Sequence[Batch],
    config: TrainingConfig,
    *,
    cpu_share: float = 1.0,
) -> TooLarge | None:
    """Run batches forward and backward, with memory for the optimiser's moments taken; return one that is too large.

    Weights, moments, random state and mode are restored, gradients are dropped. LayerDrop is off. On a CPU the trial
    may take `cpu_share` of the free memory. All processes try the same batches and agree on the answer.
    """
    model, optimiser, device = learner.model, learner.optimiser, learner.device
    processes = learner.parallel.processes
    rounds = min(2, -(-config.batch.accumulate // processes.count))  # later batches run with gradients in memory
    tried = list(batches) * rounds
    reached: list[Batch] = []

    def run() -> None:
        reserve = optimiser.reserve()  # the first step creates the moments after the last batch, and they stay
        for batch in tried:
            reached.append(batch)
            learner.parallel.attempt(batch)
            if rounds == 1:
                learner.parallel.drop_gradients()
        del reserve  # not earlier: the tensors must live as long as the trial

    with (
        random_state_kept(device),
        every_branch_present(model),
        limited_to_available_memory(device, cpu_share / processes.here),  # processes of a machine share its memory
    ):
        # FSDP's other processes could not answer, because they wait in the middle of a layer.
        short = within_memory(run, device, processes.any if learner.parallel.recovers else bool)
        learner.parallel.drop_gradients()
    return TooLarge(reached[-1] if reached else tried[0], short) if isinstance(short, Shortage) else None


def refuse_too_large(learner: Learner, loader: Loader, experiment: Experiment, at: LoaderState) -> None:
    """Try the largest batches of an epoch. Raises TrainingError naming one that does not fit, and the ways out."""
    config = experiment.training
    batches = largest_batches(loader, config.batch.length_multiple, at)
    if failed := try_batches(learner, batches, config):
        raise TrainingError(_too_large(failed, learner, config.batch.max_tokens))


def _too_large(failed: TooLarge, learner: Learner, max_tokens: int) -> Problem:
    weights = sum(local(p).numel() * p.element_size() for p in learner.model.parameters())
    gradients = sum(local(p).numel() * p.element_size() for p in learner.optimiser.parameters)
    fixed = weights + gradients + learner.optimiser.moment_bytes
    return Problem(
        "training.batch.max_tokens",
        f"a batch of {failed.batch.shape_in_words} (padding included), the largest to come, does not fit into "
        f"memory: {failed.shortage}; weights, gradients and moments alone take {readable(fixed)}. Lower "
        f"`training.batch.max_tokens` ({max_tokens}; `training.batch.accumulate` keeps updates as large), let "
        "`training.batch.fit: true` find it, set `training.precision: bf16`, or use a smaller model",
        named=("training.batch.accumulate", "training.batch.fit", "training.precision"),
    )


def fit_batches(experiment: Experiment, store: Store, learner: Learner) -> tuple[Experiment, str]:
    """Find the largest `training.batch.max_tokens` whose largest batches fit.

    A model that grows is tried at its full depth. Returns the configuration with that number and `fit` off, and a
    sentence for the log. Raises ConfigError when `training.batch.fit_limit` leaves no room for the longest pair,
    TrainingError when even the smallest budget does not fit.
    """
    table, config = store.train, experiment.training
    if not learner.parallel.recovers:
        raise ConfigError(
            "`training.batch.fit` cannot try batches with `training.distributed.kind: fsdp` and several processes: "
            "one that runs out of memory leaves the others waiting; set `training.batch.max_tokens`",
            key="training.batch.fit",
            named=["training.distributed.kind", "training.batch.max_tokens"],
        )
    learner = learner.deepest()
    batch, multiple = config.batch, config.batch.length_multiple
    longest = max(int(lengths.max()) for lengths in (table.source_lengths, table.target_lengths)) + 1
    longest = int(round_up(np.array([longest]), multiple)[0])
    lowest = int(round_up(np.array([longest]), BUDGET_STEP)[0])
    # Once the whole corpus fits in one batch, a larger budget changes nothing.
    whole = -(-len(table) * longest // BUDGET_STEP)
    limit = min(batch.fit_limit // BUDGET_STEP, whole) * BUDGET_STEP
    if batch.fit_limit < lowest:
        raise ConfigError(
            f"`training.batch.fit_limit: {batch.fit_limit}` is too low: the longest pair has {longest} tokens; set "
            f"it to at least {lowest}, or lower `data.filters.max_pieces` and prepare again",
            key="training.batch.fit_limit",
            named=["data.filters.max_pieces", Remedy.PREPARE_AFTER],
        )
    failures: list[TooLarge] = []

    def settings(budget: int) -> Experiment:
        # Stored as if the user had written the number: a resumed run reads it from config.yaml and does not search
        # again.
        unused = {key: BatchConfig.model_fields[key].default for key in ("fit", "fit_limit", "fit_margin")}
        section = batch.model_copy(update={"max_tokens": budget, **unused})
        return experiment.model_copy(update={"training": config.model_copy(update={"batch": section})})

    def fits(budget: int) -> bool:
        loader = loader_of(settings(budget), store)
        batches = largest_batches(loader, multiple, LoaderState())
        failed = try_batches(learner, batches, config, cpu_share=_CPU_SHARE)
        failures.extend([failed] if failed else [])
        return failed is None

    found = largest_budget(fits, lowest, max(lowest, limit))
    if found is None:
        raise TrainingError(_too_large(failures[-1], learner, lowest))
    used = max(lowest, int(found * (1 - batch.fit_margin)) // BUDGET_STEP * BUDGET_STEP)
    # Tried once more, since trials of one shape can differ if memory is fragmented.
    while used > lowest and used < found and not fits(used):
        used -= BUDGET_STEP
    why = f"{found + BUDGET_STEP:,} do not" if failures else "more was not tried"
    return settings(used), (
        f"`training.batch.fit`: batches of {found:,} tokens fit into memory, {why}; `training.batch.max_tokens` is "
        f"{used:,} (`fit_margin: {batch.fit_margin:g}`)"
    )


def largest_budget(fits: Callable[[int], bool], lowest: int, limit: int) -> int | None:
    """Return the largest budget from `lowest` to `limit` that fits, by doubling, then bisection; None: none fits.

    All budgets are multiples of BUDGET_STEP. No budget larger than a failed one is tried.
    """
    if not fits(lowest):
        return None
    good, bad = lowest, limit + BUDGET_STEP
    while good < limit:
        budget = min(2 * good, limit)
        if not fits(budget):
            bad = budget
            break
        good = budget
    while bad - good > BUDGET_STEP:
        middle = (good + bad) // 2 // BUDGET_STEP * BUDGET_STEP
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@dataclass(frozen=True)
class Setup:
    """The parts of a run in one process; none of them is replaced while it trains.

    Attributes:
        run: folder of the run, an absolute path.
        experiment: its configuration, with the batch size that `training.batch.fit` found.
        watch: watches the files of the store from the time it was opened.
        store_check: the check, parallel to training, that the data are undamaged.
        validator: measures dev scores; None: there is no dev set.
        origin: description of the model whose weights training starts from; "": initialised weights.
        fitted: description of the result of `training.batch.fit`; "": it was not requested.
    """

    run: Path
    experiment: Experiment
    store: Store
    watch: StoreWatch
    processes: Processes
    store_check: StoreCheck
    learner: Learner
    loader: Loader
    validator: Validator | None
    origin: str = ""
    fitted: str = ""

    @property
    def writes_to(self) -> Path | None:
        """Folder for log and metrics: the run's in the first process, None in the others."""
        return self.run if self.processes.first else None


def set_up(run: Path, experiment: Experiment, processes: Processes, *, resume: bool) -> Setup:
    """Prepare to train; a new run's folder appears at the end, so a run that cannot be trained leaves no folder.

    `run` must be absolute, because creating the folder may replace the one that "." stands for. Raises ConfigError,
    DataError, TrainingError if the run cannot be trained.
    """
    store = Store.open(experiment.data.store)
    watch = StoreWatch(store)  # checked now, because minutes may pass until training starts
    refuse_idle(experiment.training.batch, processes, resume=resume)
    if resume:
        experiment = settled_before(run, experiment)
    else:
        refuse_existing(run)
        refuse_other_store(experiment, store)
        refuse_two_vocabularies(experiment.model, store.source, store.target)
    refuse_without_links(experiment, store)
    # As early as possible: it reads every file of the store, in parallel with everything that follows.
    store_check = StoreCheck(store, processes)
    device = _usable_device(experiment)
    experiment = settle_precision(experiment, device, (store.source.size, store.target.size), processes.of_first)
    learner = Learner(experiment, store, device, processes)
    # Before the search for a batch size, which can take minutes, although the search makes the validator again.
    validator = _validator(experiment, store, processes)
    refuse_endless(experiment.training.stop, experiment.data.stages, validates=validator is not None)
    if resume:
        loader = loader_of(experiment, store, processes)
        return Setup(run, experiment, store, watch, processes, store_check, learner, loader, validator)
    origin, fitted = _initial_weights(learner, experiment), ""
    if experiment.training.batch.fit:
        experiment, fitted = fit_batches(experiment, store, learner)
        gc.collect()  # free the full-depth model on which batches were tried; see Learner.grow
        validator = _validator(experiment, store, processes)
    loader = loader_of(experiment, store, processes)
    compiled = experiment.training.compile == "layers"
    if fitted and compiled:
        torch.compiler.reset()  # otherwise trials of other batch sizes would shape the graphs
    if compiled or not fitted:
        refuse_too_large(learner, loader, experiment, LoaderState())
    base = learner.base_weights()
    processes.first_does(lambda: create_run(run, experiment, store, base))
    return Setup(run, experiment, store, watch, processes, store_check, learner, loader, validator, origin, fitted)


def _usable_device(experiment: Experiment) -> torch.device:
    config = experiment.training
    device = usable_device(config.device, "training.device")
    refuse_missing_trackers(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    share_cores(torch.get_num_threads())
    make_current(device)
    refuse_unrecordable(experiment, device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    (give_back_freed_memory if config.recompute.compact else keep_freed_memory)()
    return device


def _validator(experiment: Experiment, store: Store, processes: Processes) -> Validator | None:
    if store.dev is None or len(store.dev) == 0:
        return None
    limit = position_limit(experiment, store)
    return Validator(store, experiment.training, experiment.decoding, limit, processes)


def position_limit(experiment: Experiment, store: Store) -> int | None:
    """Return the longest sequence that the model can read, in tokens; None: no limit.

    Raises ConfigError when a pair of the training or the dev set is longer.
    """
    limit = experiment.model.embedding.limit
    if limit is None:
        return None
    tables = [table for table in (store.train, store.dev) if table is not None and len(table)]
    longest = 1 + max(int(lengths.max()) for t in tables for lengths in (t.source_lengths, t.target_lengths))
    if longest > limit:
        raise ConfigError(
            f"the longest sentence of the training and dev sets has {longest} tokens, "
            f"`model.embedding.max_positions` is {limit}; raise it, or lower "
            "`data.filters.max_pieces` (which leaves the dev set as it is) and prepare again",
            key="model.embedding.max_positions",
            named=["data.filters.max_pieces", Remedy.PREPARE_AFTER],
        )
    return limit


def _initial_weights(learner: Learner, experiment: Experiment, run: Path | None = None) -> str:
    """Load the weights of `training.start_from`; return a description of their origin, or "" for initialised ones.

    An existing run of low-rank updates in `run` starts from its copy of the weights.
    """
    path = experiment.training.start_from
    if run is not None and experiment.training.lora is not None:
        path = str(run / BASE)
    return "" if path is None else learner.start_from(path)


def starting_point(setup: Setup, log: RunLog, *, resume: bool) -> tuple[RunProgress, str | None]:
    """Return where training starts, and the origin of its weights; `resume` restores the newest undamaged checkpoint.

    The origin is the name of another model, "" for initial weights, or None for a checkpoint.

    Called while the run is locked. Raises CheckpointError when all checkpoints are damaged or the store is a different
    one, and ConfigError for the latter before the first checkpoint.
    """
    first = initial_progress(setup.experiment.training.schedule)
    if not resume:
        return first, setup.origin
    # Compiled graphs depend on the first batch, so use the first one of a new run. With several processes, this may be
    # a smaller machine, or there may be fewer of them with more batches each.
    if setup.experiment.training.compile == "layers" or setup.processes.count > 1:
        refuse_too_large(setup.learner, setup.loader, setup.experiment, LoaderState())
    warn = partial(log.say, style="bold red")
    checkpoint = same_for_all(setup.run, lambda: latest_checkpoint(setup.run, warn), setup.processes)
    if checkpoint is None:
        _refuse_other_data(setup)
        log.say("no checkpoint yet: starting from the beginning")
        origin = _initial_weights(setup.learner, setup.experiment, setup.run)
        refuse_too_large(setup.learner, setup.loader, setup.experiment, LoaderState())
        return first, origin
    if checkpoint.store != setup.store.fingerprint:
        raise CheckpointError(
            f"{setup.run}: the store {setup.store.path} is not the one this run was trained on; "
            "restore it or start a new run"
        )
    _refuse_other_names(setup, checkpoint)
    setup.learner.restore(checkpoint, setup.run)
    progress = checkpoint.progress

    def set_damaged_aside() -> None:
        for folder in set_aside(setup.run, after=progress.update):
            log.say(f"the damaged checkpoint is now {folder}", "yellow")

    setup.processes.first_does(set_damaged_aside)
    pending = ", before its validation" if progress.validation_due else ""
    log.say(f"resumed after update {progress.update}{pending}")
    _say_changes(setup, progress, log)
    return progress, None


def _say_changes(setup: Setup, progress: RunProgress, log: RunLog) -> None:
    """Log the settings that differ from those of the resumed checkpoint, and a resulting jump in the learning rate."""
    kept = read_meta(setup.run / CHECKPOINTS / checkpoint_name(progress.update))["configuration"]
    before, now = Experiment.model_validate(kept), setup.experiment
    changes = changed(*({"training": config.training.model_dump(mode="json")} for config in (before, now)))
    if not changes:
        return
    log.say(f"changed since that checkpoint: {shown(changes)}", "yellow")
    was, rate = (next_rate(progress, config.training, config.model.d_model) for config in (before, now))
    if abs(rate - was) > _RATE_JUMP * max(rate, was):
        log.say(f"so the learning rate of the next update is {rate:.2e}; it would have been {was:.2e}", "yellow")


_RATE_JUMP = 0.05
"""_RATE_JUMP is the relative change of the learning rate above which a resumed run reports it."""


def _refuse_other_data(setup: Setup) -> None:
    """Raise ConfigError when a run without checkpoints, which would record the store, was started on another store.

    Its folder has the vocabularies with which it will translate, so at least these must match the store.
    """
    store = setup.store
    refuse_other_store(setup.experiment, store)
    again = f"restore that store, or remove {setup.run}, which has no checkpoint yet, and start again"
    its, theirs = load_tokenizers(setup.run), (store.source, store.target)
    refuse_other_vocabulary(its, theirs, str(setup.run), f"the store {store.path}", again)


def _refuse_other_names(setup: Setup, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when the names in `data.stages` refer to other corpora than in the checkpoint.

    `prepare` can rename the corpora of a store without rebuilding it, so its fingerprint stays the same.
    """
    now, before = setup.store.train.corpus_names, checkpoint.corpora
    named = {name for stage in setup.experiment.data.stages for name in stage.mix}
    moved = sorted(name for name in named if [name == own for own in before] != [name == own for own in now])
    if moved:
        were = [f"{printable(name, 60)} was number {before.index(name) + 1}" for name in moved if name in before]
        raise CheckpointError(
            f"{setup.run}: its stages draw from corpora by their names, and these have changed in "
            f"{setup.store.path}: {shown(were) or shown(moved)}. "
            "`ziggurat prepare` with the former names gives them back, and changes nothing else"
        )


def rank_anew(p: RunProgress, experiment: Experiment) -> list[str]:
    """Forget the best validation when a resumed run measures scores in another way; return a notice.

    Scores on other sentences or with another search cannot be compared. The link `best` stays until the next
    validation.
    """
    validation = experiment.training.validation
    now: dict[str, Any] = {"metric": validation.metric}
    if validation.metric != "loss":  # the loss covers the whole dev set and does not depend on decoding
        now |= validation.model_dump(mode="json", include={"beam_size", "max_sentences", "max_length"})
        by_beam = experiment.decoding.by_beam().model_dump(mode="json", exclude_defaults=True)
        now["decoding"] = settings_of_scores(by_beam, validation.beam_size)
    before, p.best_by = p.best_by, now
    if not before or before == now:  # no validation yet, or one of the same kind
        return []
    p.best, p.best_update, p.validations_since_best, p.scores, p.direction_scores = None, None, 0, {}, {}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    names = ", ".join(f"`{key}`" if key == "decoding" else f"`training.validation.{key}`" for key in keys)
    again = "earlier scores cannot be compared with later ones, so `best` and patience start again"
    return [f"{names} changed: {again}"]
