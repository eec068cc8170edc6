"""Tuning on a small model: a sweep of learning rates, and the coordinate check.

With `model.transfer` (ziggurat.model.rate_transfer), the first updates change models of every width and depth by the
same amount, so the best rate of a small model, the base, is also that of a large one (CompleteP, Dey et al. 2025). The
coordinate check measures whether this holds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.load import change_section
from ziggurat.config.model import StackConfig
from ziggurat.data.corpus import Store
from ziggurat.inspect.trial import KeptTrials, TrialOptions, run_trial, trial_experiment
from ziggurat.model.accelerator import random_state_kept, usable_device
from ziggurat.model.rate_transfer import output_factor
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.system.processes import share_cores
from ziggurat.train.device import loader_of
from ziggurat.train.diagnosis.gradients import STACKS
from ziggurat.train.learner import Learner
from ziggurat.train.profiling import profile_batch
from ziggurat.train.update import train_update

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""RATES are the peak rates that are tried first."""
_BASE_WIDTH = 64
_MOST_ADDED = 3
"""_MOST_ADDED is the maximum number of rates added on a side while the best rate is at an end of those tried."""
_PEAKED = ("isqrt", "linear", "cosine", "wsd", "constant")
"""Schedules with a peak that can be set."""


class Size(NamedTuple):
    """The size of a model."""

    width: int
    encoder_layers: int
    decoder_layers: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.encoder_layers}-{self.decoder_layers}"


@dataclass(frozen=True)
class Tried:
    """One training of a sweep.

    Attributes:
        size: size of the model.
        rate: highest learning rate.
        loss: nats per token without dropout, on pairs outside the training; infinite if it failed.
        kept: whether an earlier sweep trained it.
    """

    size: Size
    rate: float
    loss: float
    kept: bool = field(default=False, compare=False)


def base_width(model: ModelConfig) -> int:
    """Return the width of small models: about 64, in whole heads."""
    head = model.d_model // model.heads
    return min(model.d_model, -(-_BASE_WIDTH // head) * head)


def resized(model: ModelConfig, size: Size) -> ModelConfig:
    """Return `model` at another size: heads as wide as before, inner widths and ranges of layers in proportion.

    Raises ConfigError if it cannot have that size.
    """
    if model.encoder_width != model.d_model:
        raise ConfigError("`model.encoder.d_model`: sizes are changed only if encoder and decoder are equally wide")
    head, of_encoder = model.d_model // model.heads, model.d_model // model.encoder_heads
    for wide in (head, of_encoder):
        if size.width % wide:
            raise ConfigError(f"width {size.width} is not a multiple of {wide}, the fixed width of a head")

    def narrower(width: int) -> int:
        return max(1, round(width * size.width / model.d_model))

    encoder = _stack(model.encoder, size.encoder_layers)
    heads = None if model.encoder.heads is None else size.width // of_encoder
    encoder |= {"d_model": None, "heads": heads, "d_ff": model.encoder.d_ff and narrower(model.encoder.d_ff)}
    changes: dict[str, Any] = {
        "preset": None,
        "d_model": size.width,
        "d_ff": narrower(model.d_ff),
        "heads": size.width // head,
        "encoder": encoder,
        "decoder": _stack(model.decoder, size.decoder_layers),
        "wiring": {"planned_encoder_layers": None, "planned_decoder_layers": None},
    }
    return change_section(model, changes, "model")


def _stack(stack: StackConfig, layers: int) -> dict[str, Any]:
    """Return the changes that give a stack this number of layers, each of its kinds in proportion, at least one.

    If there are fewer layers than kinds, ranges are left out, highest first; the topmost kind stays.
    """
    ranges, below, end = [], 0, 0
    for part in stack.ranges:
        end += part.layers
        top = min(max(below + 1, round(end * layers / stack.layers)), layers - 1)
        if top > below:
            ranges.append(part.model_copy(update={"layers": top - below}))
        below = top
    return {"layers": layers, "ranges": ranges}


def with_base(experiment: Experiment, base: Size) -> Experiment:
    """Return the configuration with `base` as the model whose learning rate it uses.

    Raises ConfigError if transfer is not defined for the model, its schedule has no peak, or only its low-rank updates
    are trained.
    """
    if experiment.training.lora is not None:
        raise ConfigError(
            "`training.lora`: a sweep trains all weights of small models from the start, and their best rate does not "
            "suit low-rank updates of a trained model"
        )
    kind = experiment.training.schedule.kind
    if kind not in _PEAKED:
        raise ConfigError(f"`training.schedule.kind: {kind}` has no peak that could be tuned; use {', '.join(_PEAKED)}")
    model = change_section(experiment.model, {"transfer": base._asdict()}, "model")
    return experiment.model_copy(update={"model": model})


def sweep(
    experiment: Experiment,
    store: Store,
    sizes: Sequence[Size],
    *,
    rates: Sequence[float] = RATES,
    updates: int = 200,
    tokens: int = 512,
    seeds: Sequence[int] = (1,),
    kept: KeptTrials | None = None,
    told: Callable[[Tried], object] = lambda tried: None,
) -> list[Tried]:
    """Train at each size with each rate, for a few updates; return the results, with rates ascending at each size.

    While the best rate of a size is the lowest or highest, the next one is tried, half or twice as large; at most three
    are added, so the best may still be at an edge.

    Args:
        experiment: the configuration, with `model.transfer`.
        store: its data.
        sizes: sizes of the models to train.
        rates: highest learning rates to try.
        updates: number of updates of each trial.
        tokens: number of tokens in a batch, padding included.
        seeds: seeds of data and weights; the loss is the mean over them.
        kept: finished trials of earlier sweeps and this one; None: nothing is stored.
        told: called with each result.
    """
    found, finished = [], kept or KeptTrials()
    for size in sizes:
        model = resized(experiment.model, size)

        def tried(rate: float, model: ModelConfig = model, size: Size = size) -> Tried:
            training = change_section(experiment.training, {"schedule": {"peak": rate}}, "training")
            sized = experiment.model_copy(update={"model": model, "training": training})
            before, losses = finished.found, []
            for seed in seeds:
                options = TrialOptions(updates, tokens, 4096, None, seed)
                losses.append(finished.loss(sized, store, options, partial(_loss, sized, store, options)))
            all_kept = finished.found - before == len(losses)
            result = Tried(size, rate, math.fsum(losses) / len(losses), kept=all_kept)
            told(result)
            return result

        here = [tried(rate) for rate in sorted(rates)]
        for _ in range(_MOST_ADDED):
            if not math.isfinite(best(here).loss) or best(here) is here[0]:
                here.insert(0, tried(here[0].rate / 2))
            elif best(here) is here[-1]:
                here.append(tried(here[-1].rate * 2))
        found += here
    return found


def _loss(experiment: Experiment, store: Store, options: TrialOptions) -> float:
    trial = run_trial(experiment, store, 0.0, options, loss_only=True)
    loss = math.inf if trial.failed else float(trial.points[trial.updates]["nll"])
    return loss if math.isfinite(loss) else math.inf


def best(tried: Sequence[Tried]) -> Tried:
    """Return the training with the lowest loss; ties go to the lowest rate."""
    return min(tried, key=lambda one: (one.loss, one.rate))


_COORDINATES = ("memory", "decoder", "logits")
"""States whose changes show whether a learning rate transfers."""
_COORDINATE_RATE = 5e-5
"""_COORDINATE_RATE is low enough that ten updates change normalised states by a small part of their size, because large
changes all look the same."""


@dataclass(frozen=True)
class Coordinates:
    """Root mean squares of a model's states in its first updates; entry t is the value after t updates.

    Attributes:
        size: size of the model.
        states: `memory`, `decoder`, `logits` -> the states themselves; if a stack ends with a norm, the first two are
            normalised, and `encoder_stream` and `decoder_stream` are the norm's inputs.
        changes: `memory`, `decoder`, `logits` -> their change since the start.
    """

    size: Size
    states: dict[str, list[float]]
    changes: dict[str, list[float]]


def coordinates(
    experiment: Experiment, store: Store, size: Size, *, updates: int = 10, tokens: int = 512, seed: int = 1
) -> Coordinates:
    """Return the coordinates of `experiment` at another size, at the constant learning rate COORDINATE_RATE.

    `memory` is attended to by the decoder, `decoder` is the input of the output projection (without the factor of
    `model.transfer`), and `logits` its output, over real tokens of one batch, without dropout.
    """
    share_cores(torch.get_num_threads())
    sized = experiment.model_copy(update={"model": resized(experiment.model, size)})
    small = trial_experiment(sized, store, TrialOptions(updates, tokens, tokens, None, seed))
    learner = Learner(small, store, usable_device(small.training.device, "training.device"))
    learner.profile()  # sets ADMIN's omegas, as before any training
    batch = profile_batch(store, tokens, seed=seed + 1).to(learner.device)

    factor = output_factor(small.model) or 1.0

    @torch.no_grad()
    def states() -> dict[str, Tensor]:
        model = learner.model.eval()
        with _streams(model) as streams:
            memory = model.encode(batch.source, batch.source_mask)
            hidden = model.decode(batch.target_in, memory)[batch.target_mask]
        logits = model.logits(hidden)
        found = {
            "memory": memory.of(0)[batch.source_mask],
            "decoder": hidden / factor,
            "logits": logits[logits.isfinite()],  # logits of ruled-out tokens are -inf
        }
        masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}
        return found | {f"{stack}_stream": stream[masks[stack]] for stack, stream in streams.items()}

    start = states()
    sizes: dict[str, list[float]] = {name: [_rms(state)] for name, state in start.items()}
    changes: dict[str, list[float]] = {name: [0.0] for name in _COORDINATES}
    groups = loader_of(small, store).groups()
    with random_state_kept(learner.device):
        for _ in range(updates):
            group = next(groups)
            train_update(learner.parallel, group.batches, learner.optimiser, rate=_COORDINATE_RATE, clip_norm=None)
            now = states()
            for name, state in now.items():
                sizes[name].append(_rms(state))
            for name in _COORDINATES:
                changes[name].append(_rms(now[name] - start[name]))
    return Coordinates(size, sizes, changes)


@contextlib.contextmanager
def _streams(model: Seq2Seq) -> Iterator[dict[str, Tensor]]:
    """Context that fills a dictionary with the input of each stack's final norm, if there is one."""
    found: dict[str, Tensor] = {}

    def kept(stack: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _norm, read: found.update({stack: read[0]})

    with contextlib.ExitStack() as hooks:
        for stack in STACKS:
            norm = getattr(getattr(model, stack), "final_norm", None)
            if norm is not None:
                hooks.callback(norm.register_forward_pre_hook(kept(stack)).remove)
        yield found


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def spread(found: Sequence[Coordinates], name: str) -> float:
    """Return the ratio of the largest to the smallest coordinate over all sizes after the last update.

    Coordinates are the change of `memory`, `decoder` and `logits`, and the size of the streams.
    """
    values = [(one.changes if name in _COORDINATES else one.states)[name][-1] for one in found]
    return max(values) / min(values) if min(values) > 0 else math.inf
