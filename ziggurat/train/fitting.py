"""Batches that fit into memory: trials of the largest ones before training, and a search for their largest size.

A trial runs batches forward and backward as an update does. So a run whose batches do not fit ends in its first
seconds, and `training.batch.fit` finds by trials how large they may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.batching import round_up
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, Loader, LoaderState
from ziggurat.model.directory import random_state_kept
from ziggurat.model.tensors import local
from ziggurat.system.errors import ConfigError, TrainingError
from ziggurat.train.feeding import loader_of
from ziggurat.train.learner import Learner
from ziggurat.train.memory import Shortage, limited_to_available_memory, readable, within_memory
from ziggurat.train.objective import every_branch_present

BUDGET_STEP = 256
"""`training.batch.fit` tries multiples of this number of tokens."""

CPU_SHARE = 0.5
"""Share of a CPU's free memory that a trial of `training.batch.fit` may take: heaps fragment when batches of many
shapes follow each other. At 6-6 layers of width 128 and 4,096 tokens, 25 updates took twice the memory of a trial."""


class TooLarge(NamedTuple):
    """A batch for which memory is too short."""

    batch: Batch
    shortage: Shortage


def largest_batches(loader: Loader, length_multiple: int, at: LoaderState) -> list[Batch]:
    """Return the one or two batches of the epoch at `at` that need the most memory; the position in the data stays.

    The first has the most padded tokens, to which the layers' states are proportional; the second, if it is another
    one, the most pairs of a source and a target position, to which the attention matrices are.
    """
    # Sizes are computed from the table of lengths, all batches at once: an epoch may have very many, and collating
    # one would read its sentences.
    plan = loader.plan(at)
    sentences = np.fromiter(map(len, plan), dtype=np.int64, count=len(plan))
    pairs, starts = np.concatenate(plan), np.cumsum(sentences) - sentences
    source, target = (
        round_up(np.maximum.reduceat(lengths[pairs], starts) + 1, length_multiple).astype(np.int64)
        for lengths in loader.lengths(at, pairs)
    )
    # States grow with the sum of the lengths, cross-attention with their product: which batch needs most depends on the
    # model.
    most = (sentences * (source + target)).argmax(), (sentences * source * target).argmax()
    return [batch for number in dict.fromkeys(map(int, most)) for batch in loader.load(at._replace(batch=number))]


def try_batches(
    learner: Learner,
    batches: Sequence[Batch],
    config: TrainingConfig,
    *,
    cpu_share: float = 1.0,
) -> TooLarge | None:
    """Run batches forward and backward, with memory for the optimiser's moments taken; return one that is too large.

    Weights, moments, random state and mode are left as found, gradients are dropped. LayerDrop is off. On a CPU the
    trial may take `cpu_share` of the free memory. All processes try the same and come to the same answer.
    """
    model, optimiser, device = learner.model, learner.optimiser, learner.device
    processes = learner.parallel.processes
    rounds = min(2, -(-config.batch.accumulate // processes.count))  # later batches of an update run beside gradients
    tried = list(batches) * rounds
    reached: list[Batch] = []

    def run() -> None:
        reserve = optimiser.reserve()  # the first step makes the moments after the last batch, and keeps them
        for batch in tried:
            reached.append(batch)
            learner.parallel.attempt(batch)
            if rounds == 1:
                learner.parallel.drop_gradients()
        del reserve  # not before: the tensors have to live as long as the trial

    learner.parallel.fix_buckets(batches[0])  # together, before one process may run out of memory
    with (
        random_state_kept(device),
        every_branch_present(model),
        limited_to_available_memory(device, cpu_share / processes.here),  # processes of a machine share its memory
    ):
        # FSDP's other processes could not answer: they wait in the middle of a layer.
        short = within_memory(run, device, processes.any if learner.parallel.recovers else bool)
        learner.parallel.drop_gradients()
    return TooLarge(reached[-1] if reached else tried[0], short) if isinstance(short, Shortage) else None


def refuse_too_large(learner: Learner, loader: Loader, experiment: Experiment, at: LoaderState) -> None:
    """Try the largest batches of an epoch. Raises TrainingError naming one that does not fit, and the ways out."""
    config = experiment.training
    batches = largest_batches(loader, config.batch.length_multiple, at)
    if failed := try_batches(learner, batches, config):
        raise TrainingError(_too_large_message(failed, learner, config.batch.max_tokens))


def _too_large_message(failed: TooLarge, learner: Learner, max_tokens: int) -> str:
    """Return the message for a batch that does not fit, with the ways out."""
    weights = sum(local(p).numel() * p.element_size() for p in learner.model.parameters())
    gradients = sum(local(p).numel() * p.element_size() for p in learner.optimiser.parameters)
    fixed = weights + gradients + learner.optimiser.moment_bytes
    return (
        f"a batch of {failed.batch.shape_in_words} (padding included), the largest to come, does not fit into "
        f"memory: {failed.shortage}; weights, gradients and moments alone take {readable(fixed)}. Lower "
        f"`training.batch.max_tokens` ({max_tokens}; `training.batch.accumulate` keeps updates as large), let "
        "`training.batch.fit: true` find it, set `training.precision: bf16`, or take a smaller model"
    )


def fit_batches(experiment: Experiment, store: Store, learner: Learner) -> tuple[Experiment, str]:
    """Find the largest `training.batch.max_tokens` whose largest batches fit.

    A model that grows is tried at its full depth. Returns the configuration with that number, in which `fit` is off,
    and a sentence for the log. Raises ConfigError when `training.batch.fit_limit` leaves no room for the longest pair,
    TrainingError when not even the smallest budget fits.
    """
    table, config = store.train, experiment.training
    if not learner.parallel.recovers:
        raise ConfigError(
            "`training.batch.fit` cannot try batches with `training.distributed.kind: fsdp` and several processes: "
            "one that runs out of memory leaves the others waiting; set `training.batch.max_tokens`"
        )
    learner = learner.deepest()
    batch, multiple = config.batch, config.batch.length_multiple
    longest = max(int(lengths.max()) for lengths in (table.source_lengths, table.target_lengths)) + 1
    longest = int(round_up(np.array([longest]), multiple)[0])
    lowest = int(round_up(np.array([longest]), BUDGET_STEP)[0])
    # Beyond the whole corpus in one batch a larger budget changes nothing.
    whole = -(-len(table) * longest // BUDGET_STEP)
    limit = min(batch.fit_limit // BUDGET_STEP, whole) * BUDGET_STEP
    if batch.fit_limit < lowest:
        raise ConfigError(
            f"`training.batch.fit_limit: {batch.fit_limit}` is too low: the longest pair has {longest} tokens; set "
            f"it to {lowest} at least, or lower `data.filters.max_pieces` and prepare again"
        )
    failures: list[TooLarge] = []

    def settings(budget: int) -> Experiment:
        # As if the user had written the number: a resumed run reads it from config.yaml and does not search again.
        unused = {key: BatchConfig.model_fields[key].default for key in ("fit", "fit_limit", "fit_margin")}
        section = batch.model_copy(update={"max_tokens": budget, **unused})
        return experiment.model_copy(update={"training": config.model_copy(update={"batch": section})})

    def fits(budget: int) -> bool:
        loader = loader_of(settings(budget), store)
        batches = largest_batches(loader, multiple, LoaderState())
        failed = try_batches(learner, batches, config, cpu_share=CPU_SHARE)
        failures.extend([failed] if failed else [])
        return failed is None

    found = largest_budget(fits, lowest, max(lowest, limit))
    if found is None:
        raise TrainingError(_too_large_message(failures[-1], learner, lowest))
    used = max(lowest, int(found * (1 - batch.fit_margin)) // BUDGET_STEP * BUDGET_STEP)
    # Tried once more, since trials of one shape can differ where memory is in pieces.
    while used > lowest and used < found and not fits(used):
        used -= BUDGET_STEP
    why = f"{found + BUDGET_STEP:,} do not" if failures else "more was not tried"
    return settings(used), (
        f"`training.batch.fit`: batches of {found:,} tokens fit into memory, {why}; `training.batch.max_tokens` is "
        f"{used:,} (`fit_margin: {batch.fit_margin:g}`)"
    )


def largest_budget(fits: Callable[[int], bool], lowest: int, limit: int) -> int | None:
    """Return the largest budget from `lowest` to `limit` that fits, by doubling, then bisection; None: none does.

    All budgets are multiples of BUDGET_STEP. A budget larger than one that does not fit is never tried.
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
