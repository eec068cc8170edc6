"""What to change: published methods applied to a configuration, tried on its own data, ranked by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.depth.trial import Settings, run_trial
from ziggurat.depth.verdict import Verdict, judge
from ziggurat.errors import ConfigError

__all__ = ["REMEDIES", "Outcome", "Remedy", "applied", "ranked", "tried_remedies"]

_LABELS = ("trains", "risky", "will not train")


@dataclass(frozen=True)
class Remedy:
    """A change of a configuration.

    Attributes:
        name: for people, with its paper.
        model: changes of section `model`.
        training: changes of section `training`.
        rate_factor: the schedule's highest rate is multiplied by it.
    """

    name: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    rate_factor: float = 1.0


def _residual(kind: str, **others: Any) -> dict[str, Any]:
    stack = {"residual": None}
    return {"residual": kind, "encoder": stack, "decoder": stack, "init": {"kind": "xavier"}, **others}


_DLCL = {"residual": None, "history": "dlcl"}

REMEDIES: tuple[Remedy, ...] = (
    Remedy("pre-norm", _residual("pre"), {}),
    Remedy("pre-norm with DLCL (Wang et al. 2019)", _residual("pre", encoder=_DLCL, decoder=_DLCL), {}),
    Remedy(
        "ADMIN with RAdam (Liu et al. 2020)",
        _residual("admin", init={"kind": "admin"}),
        {"optimiser": {"kind": "radam", "rectified_only": True}},
    ),
    Remedy(
        "DS-Init, exponent 1/2 (Zhang et al. 2019)",
        _residual("post", init={"kind": "depth_scaled", "exponent": 0.5}),
        {},
    ),
    Remedy("DeepNorm (Wang et al. 2022)", _residual("deepnorm", init={"kind": "deepnorm"}), {}),
    Remedy("a third of the learning rate", {}, {}, rate_factor=1 / 3),
)
"""Changes that can rescue depth. Each leaves data, sizes and the rest of the recipe as they are."""


@dataclass(frozen=True)
class Outcome:
    """A remedy on trial.

    Attributes:
        remedy: what was changed.
        verdict: what came of it.
        experiment: the changed configuration.
    """

    remedy: Remedy
    verdict: Verdict
    experiment: Experiment


def applied(remedy: Remedy, experiment: Experiment) -> Experiment | None:
    """Return `experiment` with a remedy; None where it has it already, or the two do not go together."""
    if remedy.model and experiment.model.family != "transformer":
        return None  # they are of residual kinds, which RNMT+ does not have
    schedule = experiment.training.schedule
    rate: dict[str, Any] = {}
    if remedy.rate_factor != 1:
        keys = {"noam": ("factor",), "gnmt+": ("base",)}.get(schedule.kind, ("peak",))
        rate = {"schedule": {key: getattr(schedule, key) * remedy.rate_factor for key in keys}}
    try:
        model = change_section(experiment.model, remedy.model, "model")
        training = change_section(experiment.training, {**remedy.training, **rate}, "training")
        changed = type(experiment).model_validate(
            {
                **{name: getattr(experiment, name) for name in type(experiment).model_fields},
                "model": model,
                "training": training,
            }
        )
    except (ConfigError, ValueError):
        return None
    return None if changed == experiment else changed


def tried_remedies(
    experiment: Experiment,
    store: Store,
    unigram: float,
    settings: Settings,
    begun: Callable[[str], Callable[[int], None]],
) -> list[Outcome]:
    """Try every remedy that `experiment` admits; return what came of each, best first.

    `begun` is told the name of each remedy, and returns what is told of its updates.
    """
    outcomes = []
    for remedy in REMEDIES:
        changed = applied(remedy, experiment)
        if changed is not None:
            trial = run_trial(changed, store, unigram, settings, begun(remedy.name))
            outcomes.append(Outcome(remedy, judge(trial), changed))
    return ranked(outcomes)


def ranked(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes, best first: by verdict, then by how far the loss has come."""
    return sorted(outcomes, key=lambda o: (_LABELS.index(o.verdict.label), -o.verdict.learned))
