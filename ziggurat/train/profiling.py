"""ADMIN's profiling (Liu et al. 2020, section 4): a forward pass over a sample of the data before the first update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ziggurat.config import Experiment
from ziggurat.config.modifiers import StageConfig
from ziggurat.data.batching import CorpusMix
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.model.accelerator import random_state_kept
from ziggurat.model.build import stack_residuals
from ziggurat.model.init import profile_omega
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.objective import every_branch_present


def profile_batch(
    store: Store, tokens: int, *, seed: int, temperature: float = 1.0, stages: Sequence[StageConfig] = ()
) -> Batch:
    """Return random training pairs whose longer sides have `tokens` tokens in total, including end-of-sentence.

    It is a representative sample of the data at the start of training (`temperature`: `data.sampling_temperature`,
    `stages`: `data.stages`, of which the first counts), except for the longest 5 % of the pairs, which would fill it
    with padding. A training batch would not do, because its sentences all have about the same length. The sample
    depends only on the store and the arguments. An epoch with fewer tokens is used whole.

    Raises DataError as CorpusMix does.
    """
    return profile_batches(store, tokens, 1, seed=seed, temperature=temperature, stages=stages)[0]


def profile_batches(
    store: Store, tokens: int, count: int, *, seed: int, temperature: float = 1.0, stages: Sequence[StageConfig] = ()
) -> list[Batch]:
    """Return `count` disjoint samples like that of `profile_batch`, which is the first of them.

    There are fewer, but at least one, if an epoch has too few pairs. Raises DataError as CorpusMix does.
    """
    table = store.train
    epoch = CorpusMix(table, stages, temperature, seed).chosen(0)
    # Shuffled, because an epoch lists the corpora in turn.
    pairs = np.random.Generator(np.random.PCG64(seed)).permutation(epoch)
    cost = np.maximum(table.source_lengths[pairs], table.target_lengths[pairs]) + 1
    usual = cost <= np.quantile(cost, 0.95)
    pairs, cost = pairs[usual], cost[usual]
    total, ids = np.cumsum(cost), SpecialIds.of(store.source, store.target)
    batches, begin = list[Batch](), 0
    while len(batches) < count and (begin < len(pairs) or not batches):
        before = total[begin - 1] if begin else 0
        end = int(np.searchsorted(total, before + tokens)) + 1
        chosen = pairs[begin:end]
        batches.append(collate(*table.pairs(chosen), chosen, ids))
        begin = end
    return batches


def profile_admin(
    model: Seq2Seq, experiment: Experiment, store: Store, added: Sequence[str] | None = None
) -> str | None:
    """Set the omegas of `residual: admin` in stacks whose `init` profiles them; return their ranges, for the log.

    With `added`, only the layers with those names, which growth added to a trained model, get an omega.

    The forward pass is in training mode and fp32, with every layer present, and draws random numbers from
    `training.seed`. The global random state and the model's mode are restored.

    Returns None, and does nothing, for any other configuration.
    """
    config, data, seed = experiment.model, experiment.data, experiment.training.seed
    stacks = ((config.stack_init(decoder=False), model.encoder), (config.stack_init(decoder=True), model.decoder))
    others = [stack for init, stack in stacks if init.kind != "admin" or init.omega != "profiled"]
    if len(others) == len(stacks):
        return None
    init = next(init for init, stack in stacks if stack not in others)  # both have the same batch
    batch = profile_batch(
        store, init.profile_tokens, seed=seed, temperature=data.sampling_temperature, stages=data.stages
    )
    kept = [residual for stack in others for residual in stack_residuals(stack)]
    # Old layers keep their omegas: their weights were trained with them.
    if added is not None:
        fresh = {id(module) for name in added for module in model.get_submodule(name).modules()}
        both = (*stack_residuals(model.encoder), *stack_residuals(model.decoder))
        kept += [residual for residual in both if id(residual) not in fresh]
    batch = batch.to(model.device)
    with random_state_kept(model.device), every_branch_present(model):
        torch.manual_seed(seed)
        omegas = profile_omega(
            [stack_residuals(model.encoder), stack_residuals(model.decoder)],
            lambda: model(batch.source, batch.source_mask, batch.target_in),
            [batch.source_mask, batch.target_mask],
            kept,
        )
    found = [
        f"{name} {min(values):.3f} to {max(values):.3f}"
        for name, values in zip(("encoder", "decoder"), omegas, strict=True)
        if values
    ]
    tokens = f"{batch.source_tokens:,} source and {batch.target_tokens:,} target tokens"
    return f"omega profiled on {tokens}: {', '.join(found)}"
