"""The depth check: a trial of a configuration, the verdict, and remedies where it does not say `trains`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat.config import Experiment
from ziggurat.depth.remedies import REMEDIES, Outcome, applied, tried_remedies
from ziggurat.depth.trial import Settings, Trial, run_trial
from ziggurat.depth.trial_data import open_data, unigram_entropy
from ziggurat.depth.verdict import Verdict, judge
from ziggurat.duration import duration

__all__ = ["DepthCheck", "check_depth"]


@dataclass(frozen=True)
class DepthCheck:
    """What the depth check found.

    Attributes:
        data: what the trial was trained on, in words.
        settings: how it was tried.
        trial: what was measured.
        verdict: what to expect.
        remedies: what would do better, best first; empty where the verdict is `trains`, or none were to be tried.
        untried: names of the remedies that could be tried and were not, since nobody wanted that.
        seconds: wall time.
    """

    data: str
    settings: Settings
    trial: Trial
    verdict: Verdict
    remedies: tuple[Outcome, ...]
    seconds: float
    untried: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the findings for JSON; a number that is not finite is None."""
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
            "remedies": remedies,
            "untried_remedies": list(self.untried),
            "seconds": round(self.seconds, 1),
        }
        finite: dict[str, Any] = _finite(record)
        return finite


def check_depth(
    experiment: Experiment,
    settings: Settings,
    begun: Callable[[str], Callable[[int], None]],
    *,
    remedies: bool = True,
    say: Callable[[str], object] = lambda message: None,
) -> DepthCheck:
    """Try `experiment`, and what could rescue it.

    Args:
        experiment: the configuration.
        settings: how it is tried.
        begun: is told the name of each trial, and returns what is told the number of each of its updates.
        remedies: try remedies where the verdict is not `trains`.
        say: told the verdict before remedies are tried, since those take several times as long.

    Raises ConfigError and DataError as run_trial and open_data do.
    """
    started = time.perf_counter()
    with open_data(experiment) as (store, data):
        unigram = unigram_entropy(store)
        trial = run_trial(experiment, store, unigram, settings, begun("the configuration"))
        verdict = judge(trial)
        better: list[Outcome] = []
        fitting = [remedy.name for remedy in REMEDIES if applied(remedy, experiment) is not None]
        if remedies and verdict.label != "trains":
            count = len(fitting)
            took = duration(time.perf_counter() - started)
            say(f"depth check: {verdict.label}, in {took}; now {count} remedies, as long each (`--no-remedies`: none)")
            better = tried_remedies(experiment, store, unigram, settings, begun)
    untried = () if remedies or verdict.label == "trains" else tuple(fitting)
    return DepthCheck(data, settings, trial, verdict, tuple(better), time.perf_counter() - started, untried)


def _finite(value: Any) -> Any:
    """Return a record with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
