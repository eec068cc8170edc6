"""The figure and the table of runs against depth: loss, scores, size, training time and decoding speed by method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ziggurat.data.subword import load_tokenizers
from ziggurat.duration import duration
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.models.build import count_parameters
from ziggurat.models.inspection import bare_model
from ziggurat.report.figure import Figure, Panel, Series, Table, described
from ziggurat.report.methods import Method, methods_of
from ziggurat.report.panels import finite
from ziggurat.report.runs import MAX_DRAWN, ReportRun

__all__ = ["NOT_MEASURED", "against_depth"]

NOT_MEASURED = "not measured"


class _Measure(NamedTuple):
    """A number of each run: title of its panel and column, unit of its axis, the number, how a table spells it."""

    title: str
    unit: str
    of: Callable[[ReportRun], float | None]
    spelt: Callable[[float], str]
    perplexity: bool = False


def against_depth(runs: Sequence[ReportRun]) -> Figure | None:
    """Return scores, loss, size, time and decoding speed by depth, a line for each method; None if depths are equal.

    Wang et al. 2019, figures 3 and 4 and table 5; Zhang et al. 2019, figure 3; Li et al. 2020, figure 6.
    """
    found = methods_of(runs)
    if found is None:
        return None
    x_label, methods = found
    measures = _measures(runs)
    caption = (
        "A point is the mean over the seeds of a method at one depth; a bar is their standard deviation (n - 1). Dev "
        "loss and BLEU are the best of the validations, test scores those that the runs keep. Training time is without "
        "validations. In the table, n of m says that only n of m runs were measured. As figures 3 and 4 and table 5 of "
        "Wang et al. 2019, figure 3 of Zhang et al. 2019 and figure 6 of Li et al. 2020."
    )
    panels = tuple(panel for measure in measures for panel in _panel(measure, x_label, methods))
    return described("against-depth", "Depth", "Against depth", caption, panels, _table(measures, methods))


# Measures


def _measures(runs: Sequence[ReportRun]) -> list[_Measure]:
    """Return what is drawn of the runs; each test set has a measure for every signature of its first score."""
    measures = [
        _Measure("dev loss", "nats per token", lambda run: _best(run, "nll", min), lambda v: f"{v:.3f}", True),
        _Measure("dev BLEU", "BLEU", lambda run: _best(run, "bleu", max), lambda v: f"{v:.1f}"),
    ]
    tests = dict.fromkeys(
        (name, scores[0].name, scores[0].signature) for run in runs for name, scores in run.scores.items() if scores
    )
    for name, metric, signature in tests:
        again = sum(other[:2] == (name, metric) for other in tests) > 1
        title = f"{name}, {metric}" + (f" ({signature})" if again else "")
        measures.append(_Measure(title, metric, _score_of(name, signature), lambda v: f"{v:.1f}"))
    counts = _parameters(runs)
    measures += [
        _Measure("parameters", "million", lambda run: counts[run.colour], lambda v: f"{v:.2f} M"),
        _Measure("training time", "minutes", _minutes, lambda v: duration(60 * v)),
        _Measure("time of an update", "seconds", _update_seconds, lambda v: f"{v:.3f} s"),
    ]
    hows: list[str | None] = list(dict.fromkeys(run.speed.how for run in runs if run.speed is not None))
    for how in hows or [None]:
        title = "decoding speed" + (f" ({how})" if len(hows) > 1 else "")
        measures.append(_Measure(title, "output tokens/s", _speed_of(how), lambda v: f"{v:,.0f}"))
    return measures


def _best(run: ReportRun, key: str, choose: Callable[[list[float]], float]) -> float | None:
    known = [value for value in finite(record.get(key) for record in run.validations) if value is not None]
    return choose(known) if known else None


def _score_of(name: str, signature: str) -> Callable[[ReportRun], float | None]:
    def score(run: ReportRun) -> float | None:
        first = next(iter(run.scores.get(name, ())), None)
        return first.value if first is not None and first.signature == signature else None

    return score


def _speed_of(how: str | None) -> Callable[[ReportRun], float | None]:
    return lambda run: run.speed.tokens_per_second if run.speed is not None and run.speed.how == how else None


def _seconds(run: ReportRun) -> float | None:
    """Return the seconds of training without validations; None where the run has no record."""
    (last,) = finite([run.train[-1].get("seconds")]) if run.train else (None,)
    validating = sum(v for v in finite(r.get("seconds") for r in run.validations) if v is not None)
    return None if last is None else max(0.0, last - validating)


def _minutes(run: ReportRun) -> float | None:
    seconds = _seconds(run)
    return None if seconds is None else seconds / 60


def _update_seconds(run: ReportRun) -> float | None:
    seconds = _seconds(run)
    return seconds / run.train[-1]["update"] if seconds and run.train[-1]["update"] else None


def _parameters(runs: Sequence[ReportRun]) -> dict[int, float | None]:
    """Return the parameters of each run's model in millions, by number of the run; None without its vocabularies."""
    known: dict[tuple[str, int, int], float] = {}  # seeds share a model, and building one takes a tenth of a second
    found: dict[int, float | None] = {}
    for run in runs:
        try:
            source, target = load_tokenizers(run.folder)
            made_of = (run.experiment.model.model_dump_json(), source.size, target.size)
            if made_of not in known:
                known[made_of] = count_parameters(bare_model(run.experiment.model, source.size, target.size)) / 1e6
            found[run.colour] = known[made_of]
        except (CheckpointError, ConfigError, DataError):
            found[run.colour] = None
    return found


# Panel and table


def _known(measure: _Measure, runs: Sequence[ReportRun]) -> list[float]:
    return [value for value in map(measure.of, runs) if value is not None and math.isfinite(value)]


def _panel(measure: _Measure, x_label: str, methods: Sequence[Method]) -> tuple[Panel, ...]:
    """Return the panel of a measure; empty where no run has it."""
    lines = []
    for number, method in enumerate(methods):
        by_depth = {depth: _known(measure, runs) for depth, runs in method.runs.items()}
        by_depth = {depth: values for depth, values in by_depth.items() if values}
        if by_depth:
            means = tuple(statistics.mean(values) for values in by_depth.values())
            bars = tuple(statistics.stdev(v) if len(v) > 1 else None for v in by_depth.values())
            spread = bars if any(bar is not None for bar in bars) else ()
            # Colours repeat after the last; then dashes tell lines apart.
            variant, colour = divmod(number, MAX_DRAWN)
            lines.append(Series(method.label, tuple(map(float, by_depth)), means, colour, variant, spread))
    panel = Panel(measure.title, x_label, measure.unit, tuple(lines), perplexity=measure.perplexity)
    return (panel,) if lines else ()


def _table(measures: Sequence[_Measure], methods: Sequence[Method]) -> Table:
    header = ("method", "layers", "runs", *(measure.title for measure in measures))
    rows = []
    for method in methods:
        for runs in method.runs.values():
            model = runs[0].experiment.model
            depth = f"{model.encoder.layers}-{model.decoder.layers}"
            cells = (_cell(measure, runs) for measure in measures)
            rows.append((method.label, depth, str(len(runs)), *cells))
    return Table(header, tuple(rows))


def _cell(measure: _Measure, runs: Sequence[ReportRun]) -> str:
    """Return mean and standard deviation of a measure over runs, and of how many runs it is where some lack it."""
    values = _known(measure, runs)
    if not values:
        return NOT_MEASURED
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    spread = f" ± {measure.spelt(deviation)}" if deviation else ""
    few = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
    return f"{measure.spelt(statistics.mean(values))}{spread}{few}"
