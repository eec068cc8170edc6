"""The depth check: a trial of a configuration, the verdict on it, and remedies tried if it does not train.

How much can be learned in a few dozen updates depends on the data: a nat on captions, a tenth on news. So the bar is a
share of what the reference learns on the same pairs in the same number of updates. The reference is a plain pre-norm
model of three layers at a suitable rate; it depends only on the data (with stages and modifiers) and the width, and is
stored with the data.

Remedies are published methods, tried in the same way on the same data, so that they can be ranked.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ziggurat.config import Experiment, ModelConfig, TrainingConfig
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.inspect.trial import TrialMeasures, TrialOptions, open_data, reduced, run_trial, trial_digest
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import json_safe, parse_json, read_bounded
from ziggurat.system.terminal import duration

Label = Literal["trains", "risky", "too early to tell", "ignores its source", "will not train"]

LEARNING = 0.1
"""LEARNING is the distance of the loss below the entropy of word frequencies, in nats per token, at which a model has
learned more than frequencies; stuck runs get 0.08 below it."""

SHARE = 0.2
"""SHARE is the share of the reference's learning at which a model counts as training."""

ENOUGH = 0.3
"""ENOUGH is the number of nats per token that the reference must have learned before a trial is judged against the
bar."""

STARVED = 1e-3
"""STARVED is the evenness of a stack below which its lowest layers hardly learn."""

DEAD = 1e-5
"""DEAD is the geometric mean of the evenness of encoder and decoder below which a model that has learned only word
frequencies learns nothing more."""

CUT_OFF = 1e-6
"""CUT_OFF is the evenness of the decoder below which the same holds, whatever the encoder's. (A model with so uneven an
encoder may still learn, such as post-norm with 36-6 layers, whose decoder starts as a language model.)"""

READS = 0.01
"""READS is the rise of the loss with another sentence's source, in nats per token, at which the decoder reads the
source. In a short trial it may not do so yet, so a lower value is unhealthy only together with a starved stack."""

UNREAD = 2e-6
"""UNREAD is the change of the loss with another sentence's source, in nats per token, up to which the source has no
effect: fp32 rounds the loss to a quarter of it. No model with so little effect in its trial read its source 600 updates
later; those that did had 6e-6 or more (experiments/depth-check)."""


@dataclass(frozen=True)
class Reference:
    """Yardstick of a trial: how much a healthy, shallow model learns on the same data.

    Attributes:
        updates: number of updates of its training, and of the trials that are compared with it.
        learned: distance of its loss below the entropy of word frequencies at the end, in nats per token.
    """

    updates: int
    learned: float

    @property
    def enough(self) -> bool:
        """True if it has learned enough for a comparison."""
        return self.learned >= ENOUGH

    @property
    def bar(self) -> float:
        """Nats per token that a trial should have learned."""
        return max(LEARNING, SHARE * self.learned)


@dataclass(frozen=True)
class Finding:
    """The judgement of one part: `loss`, `encoder`, `decoder` or `source`.

    It is healthy if it is as in runs that train; `said` has its numbers, `even` is the evenness of a stack.
    """

    part: str
    healthy: bool
    said: str
    even: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgement of a configuration.

    Attributes:
        label: the verdict.
        learned: distance of the loss below the entropy of word frequencies at the end of the trial, in nats per token;
            -inf if the trial failed.
        findings: the judgements of its parts.
    """

    label: Label
    learned: float
    findings: tuple[Finding, ...]


def judge(trial: TrialMeasures, reference: Reference) -> Verdict:
    """Return the verdict on a trial, compared with a reference trained for the same number of updates.

    - `trains`: the loss is clearly below that of word frequencies, so gradients reach the layers that matter.
      Alternatively, it will be after as many updates again at its present pace, and the lowest layers of both stacks
      get gradients. This does not count if the reference has hardly learned anything, since every loss falls to word
      frequencies at first.
    - `ignores its source`: the loss is below, but the source has not even a small effect on it: this becomes a language
      model.
    - `will not train`: neither, and gradients vanish on the way down both stacks, or almost entirely at the top of the
      decoder, as in plain deep post-norm; or a number is not finite.
    - `too early to tell`: neither, but the reference has hardly learned anything either.
    - `risky`: anything else. Most such runs learn, but late and slowly.

    experiments/depth-check describes how the bands were chosen, and how often they are right.
    """
    if trial.failed is not None:
        finding = Finding("loss", False, f"loss or gradient is not finite at update {trial.failed}")
        return Verdict("will not train", -math.inf, (finding,))
    last = trial.points[trial.updates]
    nll = last["nll"]
    if not math.isfinite(nll):
        return Verdict("will not train", -math.inf, (Finding("loss", False, f"the loss is {nll} without dropout"),))
    learned = trial.unigram - nll
    encoder, decoder = (_stack(side, trial) for side in ("encoder", "decoder"))
    fed = encoder.healthy and decoder.healthy
    # The loss fell by this much in the second half of the trial; at this pace, as many updates again would bring twice
    # that.
    pace = trial.points[sorted(trial.points)[-2]]["nll"] - nll
    arriving = nll - 2 * pace <= trial.unigram - reference.bar
    evens = {side: evenness(last["gradient_norm"][side]) for side in ("encoder", "decoder")}
    dead = math.sqrt(math.prod(evens.values())) < DEAD or evens["decoder"] < CUT_OFF
    label: Label
    if learned >= reference.bar or (reference.enough and fed and arriving):
        label = "trains"
    elif dead:
        label = "will not train"
    else:
        label = "risky" if reference.enough else "too early to tell"
    if label == "trains" and abs(last["source_dependence"]) <= UNREAD:
        label = "ignores its source"
    source = _source(last, starved=not fed)
    loss = _loss(trial, nll, learned, reference, arriving=arriving and fed)
    return Verdict(label, learned, (loss, encoder, decoder, source))


def evenness(norms: Sequence[float]) -> float:
    """Return the evenness of a stack: smallest over largest of its layers' gradient norms.

    0 if one of them is not finite, or all are 0.
    """
    if not all(map(math.isfinite, norms)) or max(norms) == 0:
        return 0.0
    return min(norms) / max(norms)


def _loss(trial: TrialMeasures, nll: float, learned: float, reference: Reference, *, arriving: bool) -> Finding:
    level = f"word frequencies alone give {trial.unigram:.2f}, a shallow model {trial.unigram - reference.learned:.2f}"
    said = f"{nll:.2f} nats per token after {trial.updates} updates; {level}"
    if learned < reference.bar and arriving:
        said += f"; at its present pace it will be below {trial.unigram - reference.bar:.2f} after as many again"
    return Finding("loss", learned >= reference.bar, said)


def _stack(side: str, trial: TrialMeasures) -> Finding:
    norms = trial.points[trial.updates]["gradient_norm"][side]
    even, before = evenness(norms), evenness(trial.points[0]["gradient_norm"][side])
    said = (
        f"gradient norm {norms[0]:.1e} in layer 1, {norms[-1]:.1e} in layer {len(norms)}; "
        f"smallest over largest {even:.1e}, {before:.1e} at initialisation"
    )
    return Finding(side, even >= STARVED, said, even)


def _source(last: dict[str, Any], *, starved: bool) -> Finding:
    cost = last["source_dependence"]
    if cost > READS:
        healthy, said = True, "the decoder reads the source"
    elif abs(cost) > UNREAD:
        healthy, said = not starved, "the decoder does not read the source yet"
    else:
        healthy, said = False, "the source has no effect"
    return Finding("source", healthy, f"another sentence's source costs {cost:+.1g} nats per token: {said}")


REFERENCES_FILE = "depth-references.json"
"""REFERENCES_FILE is the file in a store with the references measured on it; it may be deleted at any time."""

_LAYERS, _WIDTH, _PEAK = 3, 128, 2e-3
"""Depth of either stack of the reference, its width, and the highest rate at that width."""
_DOUBLINGS = 2
"""_DOUBLINGS is the maximum number of doublings of the updates if the reference has not learned enough."""


def reference_of(
    experiment: Experiment,
    store: Store,
    unigram: float,
    settings: TrialOptions,
    begun: Callable[[str, int], Callable[[int], None]],
) -> Reference:
    """Return what a shallow model learns on the pairs of `store`, at the width of the trials of `experiment`.

    It is trained for the updates of `settings`, or two or four times as many if it has not learned enough by then. The
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
            with suppress(OSError):  # a read-only store is measured again each time
                write_atomically(store.path / REFERENCES_FILE, (json.dumps(kept, indent=1) + "\n").encode())
        reference = Reference(options.updates, kept[key])
        if reference.enough:
            break
    assert reference is not None
    return reference


def _shallow(experiment: Experiment, store: Store, settings: TrialOptions) -> Experiment:
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
    """Return the references that were measured on a store; none if the file cannot be read."""
    path: Path = store.path / REFERENCES_FILE
    with suppress(OSError, DataError):
        found = parse_json(read_bounded(path), str(path)) if path.is_file() else {}
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if isinstance(value, float) and math.isfinite(value)}
    return {}


@dataclass(frozen=True)
class DepthCheck:
    """The result of a depth check.

    Attributes:
        data: a description of the data of the trials.
        settings: the options of the trials.
        trial: the trial of the configuration.
        verdict: the verdict on it.
        reference: what a shallow model learns on the same data.
        remedies: the remedies tried, best first; empty if the verdict is `trains` or no remedies were requested.
        seconds: wall time.
        untried: names of applicable remedies that were not tried because they were not requested.
    """

    data: str
    settings: TrialOptions
    trial: TrialMeasures
    verdict: Verdict
    reference: Reference
    remedies: tuple[TriedRemedy, ...]
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
    """Try `experiment`, and remedies if it does not train.

    Args:
        experiment: the configuration.
        settings: the options of the trials; they have more updates if a shallow model has not learned enough.
        begun: called with name and updates of each trial when it starts; returns the function that receives update
            numbers.
        remedies: whether to try remedies if the verdict is not `trains`.
        say: receives the verdict before remedies are tried, since those take several times as long.

    Raises the ConfigError and DataError of run_trial and open_data.
    """
    started = time.perf_counter()
    with open_data(experiment) as (store, data):
        unigram = unigram_entropy(store)
        reference = reference_of(experiment, store, unigram, settings, begun)
        settings = replace(settings, updates=reference.updates)
        trial = run_trial(experiment, store, unigram, settings, begun("the configuration", settings.updates))
        verdict = judge(trial, reference)
        outcomes: list[TriedRemedy] = []
        changes = {} if verdict.label in ("trains", "too early to tell") else _changes(experiment)
        if remedies and changes:
            count, took = len(changes), duration(time.perf_counter() - started)
            say(f"depth check: {verdict.label}, in {took}; now {count} remedies, each as long (`--no-remedies`: none)")
            for name, (remedy, changed) in changes.items():
                tried = judge(run_trial(changed, store, unigram, settings, begun(name, settings.updates)), reference)
                outcomes.append(TriedRemedy(remedy, tried, changed))
    outcomes, untried = ranked(outcomes), () if remedies else tuple(changes)
    seconds = time.perf_counter() - started
    return DepthCheck(data, settings, trial, verdict, reference, tuple(outcomes), seconds, untried)


# Remedies

_LABELS = ("trains", "risky", "too early to tell", "ignores its source", "will not train")  # best first


@dataclass(frozen=True)
class DepthRemedy:
    """A change of a configuration.

    Attributes:
        name: name of the method, with its paper.
        model: changes in section `model`.
        training: changes in section `training`.
        rate_factor: factor on the schedule's highest rate.
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

REMEDIES: tuple[DepthRemedy, ...] = (
    DepthRemedy("pre-norm", _residual("pre"), {}),
    DepthRemedy("pre-norm with DLCL (Wang et al. 2019)", _residual("pre", encoder=_DLCL, decoder=_DLCL), {}),
    DepthRemedy(
        "ADMIN with RAdam (Liu et al. 2020)",
        _residual("admin", init={"kind": "admin"}),
        {"optimiser": {"kind": "radam", "rectified_only": True}},
    ),
    DepthRemedy(
        "DS-Init, exponent 1/2 (Zhang et al. 2019)",
        _residual("post", init={"kind": "depth_scaled", "exponent": 0.5}),
        {},
    ),
    DepthRemedy("DeepNorm (Wang et al. 2022)", _residual("deepnorm", init={"kind": "deepnorm"}), {}),
    DepthRemedy("a third of the learning rate", {}, {}, rate_factor=1 / 3),
)
"""REMEDIES lists changes that can make deep models train. Data, sizes and the rest of the recipe are unchanged."""


@dataclass(frozen=True)
class TriedRemedy:
    """A remedy that was tried, with the changed configuration and the verdict on it."""

    remedy: DepthRemedy
    verdict: Verdict
    experiment: Experiment


def applied(remedy: DepthRemedy, experiment: Experiment) -> Experiment | None:
    """Return `experiment` with a remedy; None if it already has it or they are incompatible."""
    if remedy.model and experiment.model.family != "transformer":
        return None  # only the Transformer has residual kinds, not RNMT+
    schedule = experiment.training.schedule
    rate: dict[str, Any] = {}
    if remedy.rate_factor != 1:
        rate = {"schedule": {schedule.rate_key: getattr(schedule, schedule.rate_key) * remedy.rate_factor}}
    try:
        changed = change_section(experiment, {"model": remedy.model, "training": {**remedy.training, **rate}}, "")
    except ConfigError:
        return None
    return None if changed == experiment else changed


def _changes(experiment: Experiment) -> dict[str, tuple[DepthRemedy, Experiment]]:
    found = {remedy.name: (remedy, applied(remedy, experiment)) for remedy in REMEDIES}
    return {name: (remedy, changed) for name, (remedy, changed) in found.items() if changed is not None}


def ranked(outcomes: list[TriedRemedy]) -> list[TriedRemedy]:
    """Return outcomes, best first, by verdict and then by the fall of the loss."""
    return sorted(outcomes, key=lambda outcome: (_LABELS.index(outcome.verdict.label), -outcome.verdict.learned))
