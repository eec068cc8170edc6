"""The figure and table of runs against depth: loss, scores, size, training time and decoding speed by method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ziggurat.data.subword import load_tokenizers
from ziggurat.inspect.report.figure import Figure, Panel, Series, Table, described
from ziggurat.inspect.report.panels import finite
from ziggurat.inspect.report.runs import MAX_DRAWN, ReportRun
from ziggurat.model.build import count_parameters
from ziggurat.model.counts import bare_model
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.terminal import duration
from ziggurat.system.yaml_text import settings_by_key

NOT_MEASURED = "not measured"

_ENCODER, _DECODER = "model.encoder.layers", "model.decoder.layers"
_SCRATCH, _GROWN = "from scratch", "grown"
_KINDS = {
    "model.residual": None,
    "model.family": "transformer",
    "model.encoder.history": "latest",
    "model.decoder.history": "latest",
    "model.encoder.attention": "full",
    "model.decoder.attention": "full",
    "model.memory": "top",
    "model.init.kind": "xavier",
    "model.encoder.init.kind": None,
    "model.decoder.init.kind": None,
}
"""_KINDS maps the settings that distinguish methods at any depth to their usual value, which labels leave out."""
_SHOWN = (*_KINDS, _DECODER, "growth", "start")
"""_SHOWN lists the settings that labels include if methods differ in them; the residual kind is always included."""
_NO_METHOD = (
    "data.store",
    "training.seed",
    "training.threads",
    "training.log_every_updates",
    "training.diagnostics.",
    "training.tensorboard",
    "training.wandb",
    "training.mlflow",
)
"""_NO_METHOD lists prefixes of settings that do not change the model, except the seed, over which error bars are
computed."""


class _Measure(NamedTuple):
    """A number of each run: title of its panel and column, unit of its axis, the number, and its table format."""

    title: str
    unit: str
    of: Callable[[ReportRun], float | None]
    spelt: Callable[[float], str]
    perplexity: bool = False


def against_depth(runs: Sequence[ReportRun]) -> Figure | None:
    """Return scores, loss, size, time and decoding speed by depth, a line for each method; None if depths are equal.

    Wang et al. 2019, figures 3 and 4 and table 5; Zhang et al. 2019, figure 3; Li et al. 2020, figure 6.
    """
    found = runs_by_method(runs)
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
    """Return the measures to draw; each test set has a measure for every signature of its first score."""
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
        _Measure("training time", "minutes", lambda run: _seconds(run, 60), lambda v: duration(60 * v)),
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


def _seconds(run: ReportRun, unit: float = 1.0) -> float | None:
    """Return the training time without validations in units of the given seconds; None without a record."""
    if not run.train:
        return None
    (last,) = finite([run.train[-1].get("seconds")])
    # A validation follows the record of its update, whose seconds do not include it yet.
    before = [r for r in run.validations if r["update"] < run.train[-1]["update"]]
    validating = sum(v for v in finite(r.get("seconds") for r in before) if v is not None)
    return None if last is None else max(0.0, last - validating) / unit


def _update_seconds(run: ReportRun) -> float | None:
    seconds = _seconds(run)
    return seconds / run.train[-1]["update"] if seconds and run.train[-1]["update"] else None


def _parameters(runs: Sequence[ReportRun]) -> dict[int, float | None]:
    """Return the parameters of each run's model in millions, by run number; None without its vocabularies."""
    known: dict[tuple[str, int, int], float] = {}  # shared by seeds, since building takes 0.1 s
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


def _panel(measure: _Measure, x_label: str, methods: Sequence[MethodRuns]) -> tuple[Panel, ...]:
    lines = []
    for number, method in enumerate(methods):
        by_depth = {depth: _known(measure, runs) for depth, runs in method.runs.items()}
        by_depth = {depth: values for depth, values in by_depth.items() if values}
        if by_depth:
            means = tuple(statistics.mean(values) for values in by_depth.values())
            bars = tuple(statistics.stdev(v) if len(v) > 1 else None for v in by_depth.values())
            spread = bars if any(bar is not None for bar in bars) else ()
            # Colours repeat after the last; then dashes distinguish lines.
            variant, colour = divmod(number, MAX_DRAWN)
            lines.append(Series(method.label, tuple(map(float, by_depth)), means, colour, variant, spread))
    panel = Panel(measure.title, x_label, measure.unit, tuple(lines), perplexity=measure.perplexity)
    return (panel,) if lines else ()


def _table(measures: Sequence[_Measure], methods: Sequence[MethodRuns]) -> Table:
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
    values = _known(measure, runs)
    if not values:
        return NOT_MEASURED
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    spread = f" ± {measure.spelt(deviation)}" if deviation else ""
    few = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
    return f"{measure.spelt(statistics.mean(values))}{spread}{few}"


# Methods


@dataclass(frozen=True)
class MethodRuns:
    """Runs of one method, which differ only in depth and seed: a line against depth.

    Runs of equal depth differ only in the seed, so their spread is that of seeds.

    Attributes:
        label: the settings that distinguish it from other methods.
        runs: its runs by position on the axis, shallowest first.
    """

    label: str
    runs: Mapping[int, Sequence[ReportRun]]


def runs_by_method(runs: Sequence[ReportRun]) -> tuple[str, list[MethodRuns]] | None:
    """Return the label of the depth axis, and the methods in the order of their first runs.

    None if all depths are equal. The depth is the encoder's if it varies, otherwise the decoder's. A decoder that
    varies independently of the encoder makes separate methods.
    """
    settings = [settings_by_key(run.experiment.model_dump(mode="json")) for run in runs]
    depths = [(its[_ENCODER], its[_DECODER]) for its in settings]
    place = 0 if len({depth[0] for depth in depths}) > 1 else 1
    if len({depth[place] for depth in depths}) < 2:
        return None
    free = place == 0 and len(set(depths)) > len({encoder for encoder, _ in depths})
    label = "decoder layers" if place else "encoder layers"
    if all(encoder == decoder for encoder, decoder in depths):
        label = "layers of each stack"
    # (1) By kinds, which differ between methods whatever the depth.
    kinds = [_kinds(its, [_DECODER] if free else []) for its in settings]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, its in enumerate(kinds):
        groups.setdefault(tuple(its.values()), []).append(number)
    # (2) By whatever else differs between runs of equal depth; settings that vary only with depth are part of it.
    split: dict[tuple[Any, ...], list[int]] = {}
    marks: dict[int, dict[str, Any]] = {}
    for members in groups.values():
        keys = _other_keys([settings[n] for n in members], [depths[n] for n in members])
        for n in members:
            marks[n] = {**kinds[n], **{key: settings[n].get(key) for key in keys}}
            split.setdefault((*kinds[n].values(), *(repr(marks[n][key]) for key in keys)), []).append(n)
    labels = _labels([marks[members[0]] for members in split.values()])
    methods = []
    for name, members in zip(labels, split.values(), strict=True):
        by_depth: dict[int, list[ReportRun]] = {}
        for n in sorted(members, key=lambda n: depths[n][place]):
            by_depth.setdefault(depths[n][place], []).append(runs[n])
        methods.append(MethodRuns(name, by_depth))
    return label, methods


def _kinds(settings: Mapping[str, Any], more: Iterable[str]) -> dict[str, Any]:
    """Return what distinguishes methods at any depth, including growth and starting from a trained model."""
    kinds = {key: settings.get(key) for key in (*_KINDS, *more)}
    grows = any(key.startswith("training.growth.") for key in settings)
    started = settings.get("training.start_from") is not None
    return {**kinds, "growth": _GROWN if grows else _SCRATCH, "start": "started from a model" if started else ""}


def _other_keys(settings: Sequence[Mapping[str, Any]], depths: Sequence[tuple[int, int]]) -> list[str]:
    """Return the keys in which runs of equal depth differ, except those that do not change the model."""
    by_depth: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for its, depth in zip(settings, depths, strict=True):
        by_depth.setdefault(depth, []).append(its)
    keys = dict.fromkeys(key for its in settings for key in its if not key.startswith(_NO_METHOD))
    return [
        key
        for key in keys
        if any(any(its.get(key) != alike[0].get(key) for its in alike) for alike in by_depth.values())
    ]


def _labels(marks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each method, with as few differing settings as distinguish them all."""
    keys = list(dict.fromkeys(key for its in marks for key in its))
    differing = [key for key in keys if len({repr(its.get(key)) for its in marks}) > 1]
    chosen = ["model.residual", *(key for key in differing if key in _SHOWN and key != "model.residual")]
    for key in (key for key in differing if key not in _SHOWN):
        if len({tuple(repr(its.get(k)) for k in chosen) for its in marks}) == len(marks):
            break
        chosen.append(key)
    said = ([_said(its, key) for key in chosen] for its in marks)
    return [", ".join(dict.fromkeys(word for word in words if word)) for words in said]


def _said(marks: Mapping[str, Any], key: str) -> str:
    """Return a setting as part of a label: a kind by value, others with the end of their key; "" for a usual one."""
    value = marks.get(key)
    if key not in marks or (key in _KINDS and value == _KINDS[key]):
        return ""
    if key == _DECODER:
        return f"decoder of {value} layers"
    if key not in _SHOWN:
        return f"{key.removeprefix('model.').removeprefix('training.')} {value}"
    for stack, other in (("encoder", "decoder"), ("decoder", "encoder")):
        if key.startswith(f"model.{stack}.") and marks.get(key.replace(stack, other)) != value:
            return f"{stack} {value}"
    return str(value)
