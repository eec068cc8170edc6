"""The depth check: a trial of a configuration, the verdict on it, and the remedies tried where it does not train.

Remedies are published methods. Each is applied to the configuration and tried in the same way on the same data, so
that they can be ranked by what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import unigram_entropy
from ziggurat.inspect.reference import reference_of
from ziggurat.inspect.trial import Trial, TrialOptions, open_data, run_trial
from ziggurat.inspect.verdict import Reference, Verdict, judge
from ziggurat.system.duration import duration
from ziggurat.system.errors import ConfigError
from ziggurat.system.small_files import json_safe


@dataclass(frozen=True)
class DepthCheck:
    """The result of a depth check.

    Attributes:
        data: a description of the data of the trials.
        settings: the options of the trials.
        trial: the trial of the configuration.
        verdict: the verdict on it.
        reference: what a shallow model learns on the same data.
        remedies: the remedies tried, best first; empty where the verdict is `trains`, or none were to be tried.
        seconds: wall time.
        untried: names of applicable remedies that were not tried because nobody asked for it.
    """

    data: str
    settings: TrialOptions
    trial: Trial
    verdict: Verdict
    reference: Reference
    remedies: tuple[Outcome, ...]
    seconds: float
    untried: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the result for JSON; numbers that are not finite become None."""
        remedies = [
            {
                "name": outcome.remedy.name,
                "model": dict(outcome.remedy.model),
                "training": dict(outcome.remedy.training),
                "rate_factor": outcome.remedy.rate_factor,
                "verdict": asdict(outcome.verdict),
            }
            for outcome in self.remedies
        ]
        record = {
            "data": self.data,
            "settings": asdict(self.settings),
            "trial": asdict(self.trial),
            "verdict": asdict(self.verdict),
            "reference": asdict(self.reference),
            "remedies": remedies,
            "untried_remedies": list(self.untried),
            "seconds": round(self.seconds, 1),
        }
        finite: dict[str, Any] = json_safe(record)
        return finite


def check_depth(
    experiment: Experiment,
    settings: TrialOptions,
    begun: Callable[[str, int], Callable[[int], None]],
    *,
    remedies: bool = True,
    say: Callable[[str], object] = lambda message: None,
) -> DepthCheck:
    """Try `experiment`, and remedies where it does not train.

    Args:
        experiment: the configuration.
        settings: the options of the trials; there are more updates where a shallow model has not learnt enough.
        begun: takes name and updates of each trial when it begins, and returns the function that takes their numbers.
        remedies: whether to try remedies where the verdict is not `trains`.
        say: takes the verdict before remedies are tried, since those take several times as long.

    Raises the ConfigError and DataError of run_trial and open_data.
    """
    started = time.perf_counter()
    with open_data(experiment) as (store, data):
        unigram = unigram_entropy(store)
        reference = reference_of(experiment, store, unigram, settings, begun)
        settings = replace(settings, updates=reference.updates)
        trial = run_trial(experiment, store, unigram, settings, begun("the configuration", settings.updates))
        verdict = judge(trial, reference)
        outcomes: list[Outcome] = []
        changes = {} if verdict.label in ("trains", "too early to tell") else _changes(experiment)
        if remedies and changes:
            count, took = len(changes), duration(time.perf_counter() - started)
            say(f"depth check: {verdict.label}, in {took}; now {count} remedies, as long each (`--no-remedies`: none)")
            for name, (remedy, changed) in changes.items():
                tried = judge(run_trial(changed, store, unigram, settings, begun(name, settings.updates)), reference)
                outcomes.append(Outcome(remedy, tried, changed))
    outcomes, untried = ranked(outcomes), () if remedies else tuple(changes)
    seconds = time.perf_counter() - started
    return DepthCheck(data, settings, trial, verdict, reference, tuple(outcomes), seconds, untried)


# Remedies

_LABELS = ("trains", "risky", "too early to tell", "will not train")  # best first


@dataclass(frozen=True)
class Remedy:
    """A change of a configuration.

    Attributes:
        name: name of the method, with its paper.
        model: changes in section `model`.
        training: changes in section `training`.
        rate_factor: factor of the schedule's highest rate.
    """

    name: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    rate_factor: float = 1.0


def _residual(kind: str, **others: Any) -> dict[str, Any]:
    """Return changes that set one residual kind for all layers, and plain Xavier weights unless `others` differ."""
    plain = {"init": {"kind": "xavier"}, "wiring": {"gpas": False}}
    return {"residual": kind, "encoder": _ONE_KIND, "decoder": _ONE_KIND, **plain, **others}


_ONE_KIND: dict[str, Any] = {"residual": None, "ranges": [], "init": None}
_DLCL = {**_ONE_KIND, "history": "dlcl"}

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
"""Changes that can make deep models train. Data, sizes and the rest of the recipe stay as they are."""


@dataclass(frozen=True)
class Outcome:
    """A remedy that was tried.

    Attributes:
        remedy: the change.
        verdict: the verdict on the changed configuration.
        experiment: the changed configuration.
    """

    remedy: Remedy
    verdict: Verdict
    experiment: Experiment


def applied(remedy: Remedy, experiment: Experiment) -> Experiment | None:
    """Return `experiment` with a remedy; None where it already has it, or the two are not compatible."""
    if remedy.model and experiment.model.family != "transformer":
        return None  # residual kinds are the Transformer's; RNMT+ has none
    schedule = experiment.training.schedule
    rate: dict[str, Any] = {}
    if remedy.rate_factor != 1:
        key = {"noam": "factor", "gnmt+": "base"}.get(schedule.kind, "peak")
        rate = {"schedule": {key: getattr(schedule, key) * remedy.rate_factor}}
    try:
        changed = change_section(experiment, {"model": remedy.model, "training": {**remedy.training, **rate}}, "")
    except ConfigError:
        return None
    return None if changed == experiment else changed


def _changes(experiment: Experiment) -> dict[str, tuple[Remedy, Experiment]]:
    """Return the remedies that can be applied to `experiment`, by name, each with the changed configuration."""
    found = {remedy.name: (remedy, applied(remedy, experiment)) for remedy in REMEDIES}
    return {name: (remedy, changed) for name, (remedy, changed) in found.items() if changed is not None}


def ranked(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes, best first: by verdict, then by the fall of the loss."""
    return sorted(outcomes, key=lambda outcome: (_LABELS.index(outcome.verdict.label), -outcome.verdict.learned))
