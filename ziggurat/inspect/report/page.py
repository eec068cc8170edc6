"""Report pages, each one HTML file: on training runs, on a pipeline, and on the cost of perturbations.

They have no script, load nothing and escape all text; each starts with its answer in plain sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ziggurat.config import dump
from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.evaluate.findings import FEWEST_CASES, SIGNIFICANT, USELESS_BLEU, Scores, SystemDifference
from ziggurat.evaluate.significance import Effect, Robustness
from ziggurat.inspect.report.content import Content, Setting, unlike
from ziggurat.inspect.report.data_page import REASONS
from ziggurat.inspect.report.drawing import name_of_run
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.inspect.report.figures import learning_curves
from ziggurat.inspect.report.runs import ReportRun, as_csv
from ziggurat.inspect.report.template import page_templates, table_link
from ziggurat.system.errors import CheckpointError, DataError
from ziggurat.system.terminal import duration

_SHOWN = 5  # settings
_SIGNIFICANT = 0.05  # p-value


def compared(content: Content) -> str:
    """Return one or two sentences about the runs and the settings in which they differ."""
    runs = content.runs
    if len(runs) == 1:
        return f"One run: {method(runs[0])}, {_size(runs[0])}."
    sizes = list(dict.fromkeys(_size(run) for run in runs))
    of = f" of {sizes[0]}" if len(sizes) == 1 else ""
    first = f"{len(runs)} runs{of}, {_data(runs)}."
    differing = [setting for setting in content.settings if setting.key != "data.store"]
    if not differing:
        return f"{first} Their configurations are the same."
    listed = "; ".join(_setting_text(setting) for setting in differing[:_SHOWN])
    more = f", and {len(differing) - _SHOWN} more settings" if len(differing) > _SHOWN else ""
    return f"{first} They differ in {listed}{more}."


def method(run: ReportRun) -> str:
    """Return the depth methods of a run, as the log of `train` names them."""
    return " + ".join(run.experiment.model.methods())


def answer(content: Content) -> list[str]:
    """Return sentences about the best run and whether its lead may be chance; none for a single run."""
    if len(content.runs) < 2:
        return []
    sentences = []
    if ahead := _ahead_in_training(content):
        sentences.append(ahead)
    if content.translations is not None and (tested := _tested(content.translations.comparison.scores)):
        sentences.append(tested)
    if sentences and (found := list(unlike(content.runs).values())):
        sentences.append(f"The runs also differ in other ways: {_listed(found)}.")
    failed = [
        run.name for run, standing in zip(content.runs, content.standings, strict=True) if standing.level == "bad"
    ]
    if len(failed) == len(content.runs):
        sentences.append("None of them trained.")
    elif failed:
        sentences.append(f"{_listed(failed)} did not train.")
    return sentences


def differences(content: Content) -> list[str]:
    """Return other differences between runs, in words, whose effects must not be attributed to a method."""
    runs = content.runs
    found = list(unlike(runs).values())
    if any(run.experiment.data.train != runs[0].experiment.data.train for run in runs):
        found.append("they are on different data")
    if any(_dev_set(run) != _dev_set(runs[0]) for run in runs):
        found.append("their dev sets differ")
    if len(runs) > 1 and not _vocabularies_agree(runs):
        found.append("their vocabularies differ or cannot be read, and losses are per token")
    return found


def _ahead_in_training(content: Content) -> str | None:
    """Return a sentence about the best dev score in training: BLEU if all runs have it, otherwise the loss.

    Runs that did not train are not ranked.
    """
    trained = [(run, its) for run, its in zip(content.runs, content.standings, strict=True) if its.level != "bad"]
    runs = [run for run, _ in trained]
    if len(runs) < 2:
        return None
    for key, name, sign, digits in (("bleu", "dev BLEU", 1, 1), ("best_nll", "dev loss", -1, 2)):
        known = [value for _, its in trained if (value := its.figures[key]) is not None]
        if len(known) < len(runs):
            continue
        if any(_dev_set(run) != _dev_set(runs[0]) for run in runs):
            return "Dev scores are not ranked: the dev sets are not the same."
        if key == "best_nll" and not _vocabularies_agree(runs):
            return "Dev losses, which are per token, are not ranked: the vocabularies differ or cannot be read."
        if key == "bleu" and max(known) < USELESS_BLEU:
            continue
        order = sorted(range(len(known)), key=lambda i: -sign * known[i])
        best, second = order[:2]
        gap = abs(known[best] - known[second])
        # A lead that rounds to 0.0 (0.00) does not count.
        if math.isclose(gap, 0.0, abs_tol=0.5 * 10**-digits):
            return f"No run is ahead: {runs[best].name} and {runs[second].name} have equal {name}."
        return (
            f"{runs[best].name} is best, with a {name} of {known[best]:.{digits}f}, {gap:.{digits}f} "
            f"{'more' if sign > 0 else 'less'} than {runs[second].name}."
        )
    return None


def _dev_set(run: ReportRun) -> list[list[str]]:
    """Return what identifies a dev set: the names of its files, since folders differ between machines."""
    dev = run.experiment.data.dev
    return [[Path(path).name for path in (corpus.source, corpus.target, corpus.path) if path] for corpus in dev]


def _vocabularies_agree(runs: Sequence[ReportRun]) -> bool:
    """Return True if all runs split a dev set into the same target tokens, so that mean losses are comparable.

    Settings do not show this: the same ones give different vocabularies on other training corpora.
    """
    try:
        first, *others = [load_tokenizers(run.folder)[1] for run in runs]
    except (DataError, CheckpointError):
        return False
    return all(one.unicode == first.unicode and same_vocabulary(one, first) for one in others)


def _tested(scores: Sequence[Scores]) -> str | None:
    """Return a sentence about both tests of the best two systems under the first metric."""
    if not scores or len(scores[0].systems) < 2:
        return None
    first = scores[0]
    pair = _best_pair(first)
    if first.both_useless(pair):
        return f"None of them translates: on the sentences for this report no BLEU reaches {USELESS_BLEU:g}."
    if not pair.difference:
        return f"On the sentences translated for this report {pair.left} and {pair.right} have equal {first.metric}."
    left_is_better = (pair.difference > 0) == first.higher_is_better
    better, worse = (pair.left, pair.right) if left_is_better else (pair.right, pair.left)
    by = f"{abs(pair.difference):.1f} {first.metric}"
    where = "On the sentences translated for this report"
    if first.too_few:
        return f"{where} {better} is ahead of {worse} by {by}; {first.sentences} are too few to rule out chance."
    p = max(pair.bootstrap_adjusted, pair.randomisation_adjusted)
    if p < _SIGNIFICANT:
        return f"{where} {better} is better than {worse} by {by}, which is not chance (p = {p:.3f})."
    return f"{where} {better} is ahead of {worse} by {by}, which may well be chance (p = {p:.2f})."


def _best_pair(scores: Scores) -> SystemDifference:
    sign = 1 if scores.higher_is_better else -1
    order = sorted(range(len(scores.systems)), key=lambda i: -sign * scores.systems[i].mean)
    names = list(dict.fromkeys(name for pair in scores.pairs for name in (pair.left, pair.right)))
    best = {names[i] for i in order[:2]}
    return next(pair for pair in scores.pairs if {pair.left, pair.right} == best)


def _size(run: ReportRun) -> str:
    model = run.experiment.model
    return f"{model.encoder.layers}-{model.decoder.layers} layers, width {model.d_model}"


def _data(runs: Sequence[ReportRun]) -> str:
    data = [run.experiment.data.model_copy(update={"store": ""}) for run in runs]
    return "on the same data" if all(one == data[0] for one in data) else "on different data"


def _setting_text(setting: Setting) -> str:
    values = [value if len(value) <= 40 else value[:39] + "…" for value in dict.fromkeys(setting.values)]
    return f"`{setting.key}` ({' / '.join(values)})"


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


_DOWNLOADS = 2_500_000  # total bytes of all links with numbers


_OPEN = 2
"""_OPEN is the number of figure sections that the page shows unfolded: learning curves, and gradients or speed."""


def page(content: Content, *, now: float | None = None, subject: str = "") -> str:
    """Return the report as HTML.

    `now`, in seconds since 1970, is the date shown in it (default: the present); `subject` identifies the report's page
    (ziggurat.inspect.report.template.subject_mark).
    """
    environment = page_templates(now)
    environment.filters |= {
        "colour": lambda run: f"var({name_of_run(run)})",
        "method": method,
        "size": _size,
        "yaml": lambda run: dump(run.experiment),
    }
    sections: dict[str, list[Figure]] = {}
    for figure in content.figures:
        sections.setdefault(figure.section, []).append(figure)
    return environment.get_template("report.html").render(
        content=content,
        subject=subject,
        title=" and ".join(run.name for run in content.runs) if len(content.runs) < 4 else f"{len(content.runs)} runs",
        compared=compared(content),
        answer=answer(content),
        sections=sections,
        open_sections=_OPEN,
        downloads=_downloads(content),
    )


def _downloads(content: Content) -> dict[str, tuple[str, str] | None]:
    """Return file name and link of each figure's table, and of `translations`; None if there is no room.

    The shortest are taken first, so only large tables are left out, such as heat maps of many deep runs.
    """
    tables = {figure.key: numbers(figure) for figure in content.figures}
    if (translations := _translations(content)) is not None:
        tables["translations"] = translations
    links = {name: table_link(name, table) for name, table in tables.items()}
    fitting: dict[str, tuple[str, str] | None] = {}
    room = _DOWNLOADS
    for name, (file, link) in sorted(links.items(), key=lambda item: len(item[1][1])):
        room -= len(link)
        fitting[name] = (file, link) if room >= 0 else None
    return fitting


def _translations(content: Content) -> str | None:
    found = content.translations
    if found is None:
        return None
    outputs = [None if of_run is None else of_run.outputs for of_run in found.by_run]
    return as_csv([run.name for run in content.runs], outputs, found.sentences.sources, found.sentences.references)


@dataclass(frozen=True)
class StepRow:
    """A step: its description, its total seconds over all calls, and the bytes of its output."""

    name: str
    title: str
    seconds: float
    calls: int
    bytes: int


@dataclass(frozen=True)
class CorpusRow:
    """A corpus: lines or pairs read and kept, dropped ones by reason with examples, licences of downloaded data."""

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
    """Speed of a system: lines, source words and output pieces per second, and the number of CPU threads.

    `others` is the share of CPU time that other programs took if they interfered, otherwise 0.
    """

    system: str
    lines: float
    words: float
    pieces: float
    threads: int
    bytes: int
    others: float = 0.0


@dataclass(frozen=True)
class PipelineSummary:
    """The content of a pipeline's report; plain values that can be written as JSON.

    Attributes:
        languages: codes of source and target.
        steps: the steps, in order.
        corpora: bitext, monolingual and synthetic corpora.
        models: models that were trained, or are used unchanged.
        systems: name and description of each evaluated system.
        scores: test set -> system -> sacreBLEU's scores (ziggurat.evaluate.scores.Score).
        speed: speed of the systems; empty if it was not measured.
        effects: effects of perturbations (ziggurat.evaluate.significance.Effect).
        disturbed_lines: number of lines of the first test set, from its start, that were perturbed.
        cases: perturbation -> number of cases among these lines that it changes.
        exports: target -> how it was verified.
        environment: versions and machine.
        notices: suspicious findings, such as sentences of a test set in training text.
        existing: models that existed before, which no step trained.
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
        """A description of the time of all steps."""
        steps = "step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        without = "".join(f"; the {name}, which was there before, is not counted" for name in self.existing)
        return f"The {steps} below took {duration(self.seconds)} in total (the last run of each){without}."

    def as_record(self) -> dict[str, Any]:
        """Return the fields and the verdicts, for JSON."""
        verdicts = [asdict(verdict) for verdict in pipeline_verdicts(self)]
        return {**asdict(self), "seconds": self.seconds, "verdicts": verdicts}


@dataclass(frozen=True)
class PipelineVerdict:
    """The comparison of a pipeline's last system with its first.

    Attributes:
        of: the test set, or `speed`.
        kind: `useless` below USELESS_BLEU, `none` for a difference within its error, `better`, `worse`, or `alone`;
            of speeds `faster`, `slower`, or `disturbed` by other programs.
        said: the verdict in a sentence, with the numbers.
    """

    of: str
    kind: str
    said: str


def pipeline_verdicts(summary: PipelineSummary) -> list[PipelineVerdict]:
    """Return the verdicts on the scores of each test set, then on the speeds."""
    names = [name for name, _ in summary.systems]
    found = []
    for test, by_system in summary.scores.items():
        scores = {name: by_system[name] for name in names if name in by_system}
        found += [_of_test(test, scores)] if scores else []
    rates = {row.system: row for row in summary.speed}
    if len(names) > 1 and names[0] in rates and names[-1] in rates and rates[names[0]].lines:
        found.append(_of_speed(rates[names[0]], rates[names[-1]]))
    return found


def _of_test(test: str, scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> PipelineVerdict:
    first, last = next(iter(scores)), list(scores)[-1]
    before, now = scores[first][0], scores[last][0]
    said = f"{last} has {now['name']} {now['value']:.1f} on {test}"
    beside = "" if first == last else f" ({first}: {before['value']:.1f})"
    bleu = next((score["value"] for score in scores[last] if score["name"] == "BLEU"), None)
    if bleu is not None and bleu < USELESS_BLEU:
        useless = f"a BLEU below {USELESS_BLEU:g} means that a system does not translate"
        return PipelineVerdict(test, "useless", f"{said}{beside}: {useless}.")
    if first == last:
        return PipelineVerdict(test, "alone", f"{said}.")
    difference = now["value"] - before["value"]
    error, p = math.hypot(*(score.get("interval") or 0.0 for score in (before, now))), now.get("p")
    how = f"± {error:.1f}" if p is None else f"p = {p:.3f}"  # too few sentences for p, or an older record
    if (abs(difference) <= error) if p is None else (p >= SIGNIFICANT):
        kind, result = "none", f"not significantly different from {first} ({how})"
    else:
        kind = "better" if (difference > 0) == (now["name"] != "TER") else "worse"
        result = f"{difference:+.1f} against {first} ({how})"
    return PipelineVerdict(test, kind, f"{said}, {result}{beside}.")


def _of_speed(first: SpeedRow, last: SpeedRow) -> PipelineVerdict:
    if others := max(first.others, last.others):
        said = f"Speeds are not compared: other programs took {others:.0%} of the processors while they were measured."
        return PipelineVerdict("speed", "disturbed", said)
    times = last.lines / first.lines
    said = f"{last.system} translates {times:.1f} times as fast as {first.system}."
    return PipelineVerdict("speed", "faster" if times >= 1 else "slower", said)


def pipeline_page(summary: PipelineSummary, *, robustness: str | None = None, runs: Sequence[ReportRun] = ()) -> str:
    """Return the report as HTML, without scripts and fetching nothing.

    Args:
        summary: content of the report.
        robustness: address of the page on perturbations; None: no such page.
        runs: the models that the pipeline trained, for their learning curves.
    """
    environment = page_templates()
    environment.filters["size"] = decimal
    metrics = list(dict.fromkeys(effect.metric for effect in summary.effects))
    shown = [effect for effect in summary.effects if effect.metric == metrics[0]]
    return environment.get_template("pipeline.html").render(
        summary=summary,
        answer=[verdict.said for verdict in pipeline_verdicts(summary)],
        perturbations=list(dict.fromkeys(effect.perturbation for effect in shown)),
        effect={(effect.perturbation, effect.system): effect for effect in shown},
        metric=metrics[0] if metrics else "",
        robustness=robustness,
        fewest=FEWEST_CASES,
        curves=learning_curves(runs),
        reasons={reason: REASONS[reason] for row in summary.corpora for reason in row.dropped if reason in REASONS},
    )


_WIDEST = 9.0
"""_WIDEST is the width (rem) of the bar of the largest difference under a metric."""


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
    greatest = max(abs(other.difference) for other in results.effects if other.metric == effect.metric)
    return f"{_WIDEST * abs(effect.difference) / greatest if greatest else 0.0:.2f}"


def _worse(results: Robustness, effect: Effect) -> bool:
    up = results.higher_is_better[results.metrics.index(effect.metric)]
    return effect.difference < 0 if up else effect.difference > 0


def _sentence(results: Robustness, system: str) -> str:
    """Return a sentence about which perturbations harm a system significantly under the first metric, worst first."""
    metric = results.metrics[0]
    own = [e for e in results.effects if e.system == system and e.metric == metric]
    if not own:
        return f"{system}: no perturbation changes a line."
    tested = [(effect, effect.p_adjusted) for effect in own if effect.p_adjusted is not None]
    harmful = sorted((e for e, p in tested if _worse(results, e) and p < 0.05), key=lambda e: -abs(e.difference))
    untested = ", ".join(effect.perturbation for effect in own if effect.p_adjusted is None)
    rest = f" Too few cases to tell: {untested}." if untested else ""
    if not tested:
        return f"{system}:{rest.lower()}"
    if not harmful:
        return f"{system}: no perturbation changes {metric} significantly for the worse.{rest}"
    listed = ", ".join(f"{effect.perturbation} ({effect.difference:+.1f})" for effect in harmful)
    return f"{system}: significantly worse {metric} with {listed}.{rest}"
