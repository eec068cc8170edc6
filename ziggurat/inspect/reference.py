"""The reference of a depth check: what a shallow healthy model learns on the same data in as many updates.

How much can be learnt in a few dozen updates depends on the data: a nat on captions, a tenth on news. So the trial
of a deep model is compared with that of a plain pre-norm one of three layers, at a rate that suits it. It depends on
the data (with stages and modifiers) and the width alone, and is kept in the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ziggurat.config import Experiment, ModelConfig, TrainingConfig
from ziggurat.data.corpus import Store
from ziggurat.inspect.kept import trial_digest
from ziggurat.inspect.trial import TrialOptions, reduced, run_trial
from ziggurat.inspect.verdict import Reference
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded

REFERENCES_FILE = "depth-references.json"
"""File of a store with the references that were measured on it; it may be deleted at any time."""

_LAYERS, _WIDTH, _PEAK = 3, 128, 2e-3
"""Depth of either stack, and the highest rate at that width."""
_DOUBLINGS = 2
"""Doublings of the updates, at most, where it has not learnt enough."""


def reference_of(
    experiment: Experiment,
    store: Store,
    unigram: float,
    settings: TrialOptions,
    begun: Callable[[str, int], Callable[[int], None]],
) -> Reference:
    """Return what a shallow model learns on the pairs of `store`, at the width of the trials of `experiment`.

    Trained for the updates of `settings`, or two or four times as many where it has not learnt enough by then. The
    arguments are those of ziggurat.inspect.check.check_depth.
    """
    shallow, reference = _shallow(experiment, store, settings), None
    for doubling in range(_DOUBLINGS + 1):
        options = replace(settings, updates=settings.updates << doubling)
        key = trial_digest(shallow, store, options)
        kept = _kept(store)
        if key not in kept:
            tick = begun("a shallow model", options.updates)
            trial = run_trial(shallow, store, unigram, options, tick, loss_only=True)
            kept[key] = 0.0 if trial.failed else round(unigram - float(trial.points[trial.updates]["nll"]), 4)
            with suppress(OSError):  # a store that may not be written to is measured again each time
                write_atomically(store.path / REFERENCES_FILE, (json.dumps(kept, indent=1) + "\n").encode())
        reference = Reference(options.updates, kept[key])
        if reference.enough:
            break
    assert reference is not None
    return reference


def _shallow(experiment: Experiment, store: Store, settings: TrialOptions) -> Experiment:
    """Return the configuration of the shallow model."""
    width = reduced(experiment.model, settings.width).d_model if experiment.model.family == "transformer" else _WIDTH
    head = 32 if width % 32 == 0 else 16 if width % 16 == 0 else width
    sharing = "all" if store.source is store.target else "decoder"
    model = ModelConfig.model_validate(
        {
            "d_model": width,
            "d_ff": 4 * width,
            "heads": width // head,
            "encoder": {"layers": _LAYERS},
            "decoder": {"layers": _LAYERS},
            "embedding": {"sharing": sharing, **({"positions": "none"} if width % 2 else {})},
        }
    )
    training = TrainingConfig.model_validate(
        {
            "device": experiment.training.device,
            "optimiser": {"kind": "adam", "betas": [0.9, 0.98], "epsilon": 1e-8},
            "schedule": {"kind": "isqrt", "peak": _PEAK * min(1.0, _WIDTH / width), "warmup_updates": 1},
            "clip_norm": None,
        }
    )
    return experiment.model_copy(update={"model": model, "training": training})


def _kept(store: Store) -> dict[str, Any]:
    """Return the references that were measured on a store; none where the file cannot be read."""
    path: Path = store.path / REFERENCES_FILE
    with suppress(OSError, DataError):
        found = parse_json(read_bounded(path), str(path)) if path.is_file() else {}
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if isinstance(value, float) and math.isfinite(value)}
    return {}
