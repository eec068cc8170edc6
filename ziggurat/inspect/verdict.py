"""The verdict on a trial: trains, risky or will not train; with findings on loss, encoder, decoder and source.

What a trial should have learnt depends on its data, so the bar is a share of what a shallow healthy model, the
reference, learns on the same pairs in as many updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ziggurat.inspect.trial import Trial

Label = Literal["trains", "risky", "too early to tell", "will not train"]

LEARNING = 0.1
"""Nats per token below the entropy of word frequencies, from which a model has learnt more than these: stuck runs come
to be 0.08 below it."""

SHARE = 0.2
"""Share of what the reference has learnt, from which a model trains."""

ENOUGH = 0.3
"""Nats per token that the reference must have learnt before a trial that has not reached the bar is held against it."""

STARVED = 1e-3
"""Evenness of a stack, below which its lowest layers hardly learn."""

DEAD = 1e-5
"""Geometric mean of the evenness of encoder and decoder, below which a model that has learnt only word frequencies
does not learn more."""

READS = 0.01
"""Rise of the loss with another sentence's source, in nats per token, from which the decoder reads the source. In a
short trial it may not do so yet, so a lower value is unhealthy only together with a starved stack."""


@dataclass(frozen=True)
class Reference:
    """The learning of a shallow healthy model on the same data.

    Attributes:
        updates: of its training, and of the trials that are compared with it.
        learned: distance of its loss below the entropy of word frequencies at the end, in nats per token.
    """

    updates: int
    learned: float

    @property
    def enough(self) -> bool:
        """True where it has learnt enough to compare with."""
        return self.learned >= ENOUGH

    @property
    def bar(self) -> float:
        """Nats per token that a trial should have learnt."""
        return max(LEARNING, SHARE * self.learned)


@dataclass(frozen=True)
class Finding:
    """The judgement of one part.

    Attributes:
        part: `loss`, `encoder`, `decoder` or `source`.
        healthy: True where it is as in runs that train.
        said: a description with its numbers.
        even: evenness of a stack; None for other parts.
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
            -inf where the trial failed.
        findings: the judgements of its parts.
    """

    label: Label
    learned: float
    findings: tuple[Finding, ...]


def judge(trial: Trial, reference: Reference) -> Verdict:
    """Return the verdict on a trial, beside a reference trained for as many updates.

    - `trains`: the loss is clearly below that of word frequencies, so gradients reach the layers that matter. Or it
      will be there in as many updates again at its present pace, and the lowest layers of both stacks get gradients;
      not beside a reference that has hardly learnt anything, since so early every loss falls to word frequencies.
    - `will not train`: neither, and gradients die out on their way down both stacks, as in plain deep post-norm; or a
      number is not finite.
    - `too early to tell`: neither, and the reference has hardly learnt anything either.
    - `risky`: anything else. Most such runs learn, but late and slowly.

    experiments/depth-check tells how the bands were chosen, and how often they are right.
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
    # The fall of the loss in the second half of the trial: at this pace twice as much in as many updates again
    pace = trial.points[sorted(trial.points)[-2]]["nll"] - nll
    arriving = nll - 2 * pace <= trial.unigram - reference.bar
    reached = math.sqrt(evenness(last["gradient_norm"]["encoder"]) * evenness(last["gradient_norm"]["decoder"]))
    label: Label
    if learned >= reference.bar or (reference.enough and fed and arriving):
        label = "trains"
    elif reached < DEAD:
        label = "will not train"
    else:
        label = "risky" if reference.enough else "too early to tell"
    source = _source(last, starved=not fed)
    return Verdict(label, learned, (_loss(trial, nll, learned, reference), encoder, decoder, source))


def evenness(norms: Sequence[float]) -> float:
    """Return the evenness of a stack: smallest over largest of its layers' gradient norms.

    0 where one of them is not finite, or all are 0.
    """
    if not all(map(math.isfinite, norms)) or max(norms) == 0:
        return 0.0
    return min(norms) / max(norms)


def _loss(trial: Trial, nll: float, learned: float, reference: Reference) -> Finding:
    level = f"word frequencies alone give {trial.unigram:.2f}, a shallow model {trial.unigram - reference.learned:.2f}"
    said = f"{nll:.2f} nats per token after {trial.updates} updates; {level}"
    return Finding("loss", learned >= reference.bar, said)


def _stack(side: str, trial: Trial) -> Finding:
    norms = trial.points[trial.updates]["gradient_norm"][side]
    even, before = evenness(norms), evenness(trial.points[0]["gradient_norm"][side])
    said = (
        f"gradient norm {norms[0]:.1e} in layer 1, {norms[-1]:.1e} in layer {len(norms)}; "
        f"smallest over largest {even:.1e}, {before:.1e} at initialisation"
    )
    return Finding(side, even >= STARVED, said, even)


def _source(last: dict[str, Any], *, starved: bool) -> Finding:
    cost = last["source_dependence"]
    reads = cost > READS
    said = "the decoder reads the source" if reads else "the decoder does not read the source yet"
    return Finding(
        "source", reads or not starved, f"another sentence's source costs {cost:+.3f} nats per token: {said}"
    )
