"""The page of a pipeline: what its steps took, what became of corpora, and how good, fast and robust its models are.

The page of `evaluate --perturb`: what disturbances cost, as one HTML file without scripts that fetches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.filesize import decimal

from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.evaluate.robustness import Effect, Robustness
from ziggurat.inspect.report.template import page_templates
from ziggurat.system.terminal import duration


@dataclass(frozen=True)
class StepRow:
    """A step: what it does, its seconds over all calls that worked on it, and the bytes that it hands on."""

    name: str
    title: str
    seconds: float
    calls: int
    bytes: int


@dataclass(frozen=True)
class CorpusRow:
    """A corpus: lines or pairs read and kept, those dropped by reason with examples, licences of what was fetched."""

    name: str
    read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    licences: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRow:
    """A model: layers of encoder and decoder, width, parameters, bytes of its weights."""

    name: str
    layers: tuple[int, int]
    width: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class SpeedRow:
    """Speed of a system: lines, words of the source and pieces of the output a second, on so many CPU threads."""

    system: str
    lines: float
    words: float
    pieces: float
    threads: int
    bytes: int


@dataclass(frozen=True)
class PipelineSummary:
    """All that the report of a pipeline tells; plain values that can be written as JSON.

    Attributes:
        languages: codes of source and target.
        steps: in their order.
        corpora: of the bitext, monolingual and synthetic.
        models: those that were trained, or are used as they are.
        systems: name of each evaluated system, and what it is.
        scores: test set -> system -> sacreBLEU's scores (ziggurat.evaluate.scores.Score).
        speed: of the systems; none where it was not measured.
        effects: what disturbances cost (ziggurat.evaluate.robustness.Effect).
        disturbed_lines: lines of the first test set that were disturbed, the first ones.
        cases: perturbation -> how many cases of these lines it changes.
        exports: target -> what it was verified by.
        environment: versions and machine.
        notices: suspicious findings, such as sentences of a test set in training text.
        existing: models that were there before, which no step trained.
    """

    languages: tuple[str, str]
    steps: Sequence[StepRow]
    corpora: Sequence[CorpusRow]
    models: Sequence[ModelRow]
    systems: Sequence[tuple[str, str]] = ()
    scores: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    speed: Sequence[SpeedRow] = ()
    effects: Sequence[Effect] = ()
    disturbed_lines: int = 0
    cases: Mapping[str, int] = field(default_factory=dict)
    exports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()
    existing: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Time of all steps together."""
        return sum(step.seconds for step in self.steps)

    @property
    def took(self) -> str:
        """What the time of all steps is the sum of, in words."""
        steps = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'} below, each as it was done last,"
        without = "".join(f"; the {name}, which was there before, is not counted" for name in self.existing)
        return f"The {steps} took {duration(self.seconds)} together{without}."

    def as_record(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {**asdict(self), "seconds": self.seconds}


def answer_of(summary: PipelineSummary) -> list[str]:
    """Return in sentences what came out: scores of the last system beside the first, and their speeds."""
    names = [name for name, _ in summary.systems]
    said = []
    for test, by_system in summary.scores.items():
        scores = {name: by_system[name][0] for name in names if name in by_system}
        if len(scores) < 2:
            said += [f"{name} has {one['name']} {one['value']:.1f} on {test}." for name, one in scores.items()]
            continue
        teacher, last = names[0], names[-1]
        difference = scores[last]["value"] - scores[teacher]["value"]
        said.append(
            f"{last} has {scores[last]['name']} {scores[last]['value']:.1f} on {test}, {difference:+.1f} against "
            f"{teacher} ({scores[teacher]['value']:.1f})."
        )
    rates = {row.system: row for row in summary.speed}
    if len(names) > 1 and names[0] in rates and names[-1] in rates and rates[names[0]].lines:
        times = rates[names[-1]].lines / rates[names[0]].lines
        said.append(f"{names[-1]} translates {times:.1f} times as fast as {names[0]}.")
    return said


def pipeline_page(summary: PipelineSummary, *, robustness: str | None = None) -> str:
    """Return the report as HTML, without scripts and fetching nothing.

    Args:
        summary: what it tells.
        robustness: address of the page on disturbances; None: there is none.
    """
    environment = page_templates()
    environment.filters["size"] = decimal
    metrics = list(dict.fromkeys(effect.metric for effect in summary.effects))
    shown = [effect for effect in summary.effects if effect.metric == metrics[0]]
    return environment.get_template("pipeline.html").render(
        summary=summary,
        answer=answer_of(summary),
        perturbations=list(dict.fromkeys(effect.perturbation for effect in shown)),
        effect={(effect.perturbation, effect.system): effect for effect in shown},
        metric=metrics[0] if metrics else "",
        robustness=robustness,
        fewest=FEWEST_CASES,
    )


_WIDEST = 9.0
"""Length in rem of the bar of the greatest difference under a metric."""


def robustness_page(results: Robustness) -> str:
    """Return the page."""
    return (
        page_templates()
        .get_template("robustness.html")
        .render(
            results=results,
            metrics=list(zip(results.metrics, results.signatures, results.higher_is_better, strict=True)),
            width=lambda effect: _width(results, effect),
            worse=lambda effect: _worse(results, effect),
            summary=[_sentence(results, system) for system in results.systems],
        )
    )


def _width(results: Robustness, effect: Effect) -> str:
    """Return the length of an effect's bar, in rem."""
    greatest = max(abs(other.difference) for other in results.effects if other.metric == effect.metric)
    return f"{_WIDEST * abs(effect.difference) / greatest if greatest else 0.0:.2f}"


def _worse(results: Robustness, effect: Effect) -> bool:
    up = results.higher_is_better[results.metrics.index(effect.metric)]
    return effect.difference < 0 if up else effect.difference > 0


def _sentence(results: Robustness, system: str) -> str:
    """Return which perturbations harm a system significantly, the worst first, under the first metric."""
    metric = results.metrics[0]
    own = [e for e in results.effects if e.system == system and e.metric == metric]
    if not own:
        return f"{system}: no disturbance changes a line."
    tested = [(effect, effect.p_adjusted) for effect in own if effect.p_adjusted is not None]
    harmful = sorted((e for e, p in tested if _worse(results, e) and p < 0.05), key=lambda e: -abs(e.difference))
    untested = ", ".join(effect.perturbation for effect in own if effect.p_adjusted is None)
    rest = f" Too few cases to tell: {untested}." if untested else ""
    if not tested:
        return f"{system}:{rest.lower()}"
    if not harmful:
        return f"{system}: no disturbance changes {metric} significantly for the worse.{rest}"
    listed = ", ".join(f"{effect.perturbation} ({effect.difference:+.1f})" for effect in harmful)
    return f"{system}: significantly worse {metric} with {listed}.{rest}"
