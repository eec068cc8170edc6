"""The last steps: the evaluation of teacher, student and export, and the report on all steps."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ziggurat import __version__
from ziggurat.config.pipeline import BACK_TRANSLATION, MODELS, ModelName
from ziggurat.config.pipeline_models import EvaluationConfig
from ziggurat.corpora.pipeline.context import DISTILLED, PipelineContext
from ziggurat.corpora.pipeline.corpora import fetched_origins
from ziggurat.corpora.pipeline.costs import UNKNOWN, CorpusSizes, Costs
from ziggurat.corpora.pipeline.models import (
    SHORTLIST,
    final_model,
    in_fresh_state,
    model_files,
    of_model,
    said,
    shortlist_made_here,
    shortlists,
)
from ziggurat.corpora.pipeline.step import (
    Expected,
    Step,
    Times,
    joined,
    read_document,
    read_manifest,
    settings_of,
    write_document,
)
from ziggurat.corpora.pipeline.synthesis import NOTICES
from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.perturbations import PerturbedSet, perturbation_names
from ziggurat.evaluate.scores import SegmentMetric, evaluate, sacrebleu_metric
from ziggurat.evaluate.significance import RESAMPLINGS, Effect, holm, p_values
from ziggurat.inspect.report.page import (
    CorpusRow,
    ModelRow,
    PipelineSummary,
    SpeedRow,
    StepRow,
    pipeline_page,
    robustness_page,
)
from ziggurat.inspect.report.runs import ReportRun, read_run
from ziggurat.model.directory import locate_weights, weights_experiment
from ziggurat.model.low_rank import weights_files
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.system.processes import SystemLoad, usable_cpus
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.text_lines import read_lines

if TYPE_CHECKING:
    from ziggurat.translate.interface import TextTranslator

PAGE, RECORD = "report.html", "report.json"
_INT8 = {"precision": "int8"}
_ROUNDS, _MOST_ROUNDS = 2, 6  # rounds of a speed measurement: undisturbed ones needed, and the maximum in all


@dataclass(frozen=True)
class _System:
    """A system to evaluate."""

    name: str
    model: ModelName
    """The model that translates, or of which it is a form."""
    folder: Path
    after: dict[str, list[str]]
    served: bool = False
    """CTranslate2 translates."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Decoding settings that replace those of the model."""


def _systems(context: PipelineContext, how: EvaluationConfig) -> list[_System]:
    found = []
    if context.config.teacher is not None:
        found.append(_System("teacher", "teacher", context.model("teacher"), of_model(context, "teacher")))
    name, model, after = final_model(context)
    if name == "student":
        found.append(_System("student", "student", context.model("student"), of_model(context, "student")))
    if how.int8:
        found.append(_System(f"{name}-int8", name, model, after, settings=_INT8))
    if context.config.export is not None and context.config.export.ctranslate2 is not None:
        folder = context.at("export-ctranslate2", "ctranslate2")
        after = {"export-ctranslate2": ["ctranslate2/*"]}
        found.append(_System(f"{name}-ctranslate2", name, folder, after, served=True))
    return found


class EvaluateStep(Step):
    """The step that evaluates teacher, student and export on all test sets: scores, robustness, speed.

    It writes `scores.json`, `robustness.json`, `robustness.html` and `translations/TEST.NAME.LANGUAGE`. For its own use
    it writes `systems/NAME.json`, a system's translations of all texts, so that an interrupted evaluation resumes with
    the next system. The seconds in `speed/NAME.json` differ every time, so no other step depends on them.
    """

    name = "evaluate"
    outputs = ("scores.json", "robustness.json", "translations/*")

    def __init__(self, context: PipelineContext, how: EvaluationConfig, costs: Costs) -> None:
        self._context, self._how, self._names = context, how, context.test_names()
        self._costs = costs
        self._threads = how.threads or usable_cpus()
        self._systems = _systems(context, how)
        self._models: list[ModelName] = [
            name for name in ("teacher", "student") if getattr(context.config, name) is not None
        ]
        self.title = f"evaluates {', '.join(system.name for system in self._systems)}"
        self.settings = joined(settings_of(how), {"tests": self._names})
        after: dict[str, list[str]] = {}
        for system in self._systems:
            after |= system.after
        for name in self._names:
            for path in context.test_set(name):
                step, *inside = path.relative_to(context.folder).parts
                after.setdefault(step, []).append("/".join(inside))
        if shortlist_made_here(context):
            after["shortlist"] = [SHORTLIST]
        self.after = after
        pages = ["robustness.html"] if how.perturb else []
        if how.speed_lines:  # int8 is not timed on every processor, so its file may be missing
            pages += [_speed_file(system) for system in self._systems if system.settings != _INT8]
        self.pages = tuple(pages)

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of existing models and of the shortlists that they translate with."""
        return model_files(self._context, *self._models) | shortlists(self._context, *self._models)

    def check(self) -> None:
        """Refuse a perturbation that does not exist, and a tokenizer that is not installed."""
        perturbation_names(self._how.perturb, "evaluation.perturb")
        for metric in self._how.metrics:
            sacrebleu_metric(metric, target_language=self._context.languages[1])

    def cost(self) -> Expected:
        """Return the expected cost of the systems' translations; scores take seconds."""
        lines = CorpusSizes(self._context).evaluated(self._how, _ROUNDS)
        each = [self._costs.translating(system.model, lines, None, 1).seconds for system in self._systems]
        known = [seconds for seconds in each if seconds is not None]
        if lines is None:
            return Expected(said=f"the number of lines {UNKNOWN}")
        if len(known) < len(each):
            return Expected(said=f"{lines} lines per system")
        return Expected(sum(known), said=f"{lines} lines per system; a rough estimate")

    def work(self, folder: Path) -> None:
        """Translate with each system in turn, then score."""
        from ziggurat.model.fast.packed import available

        usable = [system for system in self._systems if system.settings != _INT8 or available("int8")]
        if len(usable) < len(self._systems):
            self._context.say("this CPU cannot multiply bytes (VNNI): int8 with the PyTorch engine is left out")
        with in_fresh_state():
            self._evaluate(folder, usable)

    def _evaluate(self, folder: Path, systems: Sequence[_System]) -> None:
        tests = {name: tuple(_lines(path) for path in self._context.test_set(name)) for name in self._names}
        for name, (sources, references) in tests.items():
            if len(sources) != len(references) or not sources:
                raise ConfigError(f"test set {name}: {len(sources):,} lines of source, {len(references):,} of target")
        (sources, references), most = tests[self._names[0]], self._how.perturb_lines
        perturbed = None
        if self._how.perturb:
            names = perturbation_names(self._how.perturb, "evaluation.perturb")
            perturbed = PerturbedSet(names, sources[:most], [references[:most]], self._context.languages)
        found = [self._outputs(folder, system, tests, perturbed) for system in systems]
        scores: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, (sources, references) in tests.items():
            for system, record in zip(systems, found, strict=True):
                outputs = record["tests"][name]
                file = folder / "translations" / f"{name}.{system.name}.{self._context.languages[1]}"
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, "".join(f"{line}\n" for line in outputs).encode())
                of_system = evaluate(
                    outputs,
                    [references],
                    metrics=self._how.metrics,
                    confidence=True,
                    target_language=self._context.languages[1],
                )
                scores.setdefault(name, {})[system.name] = [score.as_record() for score in of_system]
            test_set = TestSet([references], sources, self._context.languages[1])
            for place, metric in enumerate(self._how.metrics):
                found_p = _against_first(test_set.metric(metric), [record["tests"][name] for record in found])
                for system, p in zip(systems, found_p, strict=True):
                    scores[name][system.name][place]["p"] = p
        origins = [[system.name, record["origin"]] for system, record in zip(systems, found, strict=True)]
        if perturbed is not None:
            (sources, references), language = tests[self._names[0]], self._context.languages[1]
            self._judge(folder, perturbed, origins, found, TestSet([references[:most]], sources[:most], language))
        write_document(folder / "scores.json", {"systems": origins, "tests": scores})

    def _outputs(
        self,
        folder: Path,
        system: _System,
        tests: dict[str, tuple[list[str], ...]],
        perturbed: PerturbedSet | None,
    ) -> dict[str, Any]:
        """Return a system's translations of all texts, made now or by an interrupted call."""
        file, speed = folder / "systems" / f"{system.name}.json", folder / _speed_file(system)
        known, timed = read_document(file), speed.is_file() or not self._how.speed_lines
        if known is not None and timed:
            return known
        with self._opened(system) as translator:
            self._context.say(f"{system.name}: {translator.origin}")
            record: dict[str, Any] = known or {"origin": translator.origin, "tests": {}}
            if known is None:
                for name, (sources, _) in tests.items():
                    record["tests"][name] = _translated(translator, sources)
                if perturbed is not None:
                    record["disturbed"] = _translated(translator, perturbed.texts)
            if not timed:
                sources = next(iter(tests.values()))[0][: self._how.speed_lines]
                speed.parent.mkdir(exist_ok=True)
                write_document(speed, {**self._speed(translator, sources), "bytes": _bytes_of(system)})
        file.parent.mkdir(exist_ok=True)
        write_document(file, record)
        return record

    @contextlib.contextmanager
    def _opened(self, system: _System) -> Iterator[TextTranslator]:
        if system.served:
            from ziggurat.translate.ctranslate2 import CTranslate2Translator

            yield CTranslate2Translator(
                system.folder, device=self._how.device, threads=self._threads, **system.settings
            )
            return
        from ziggurat.translate.translator import load_translator

        torch.set_num_threads(self._threads)
        device = "cpu" if system.settings == _INT8 else self._how.device  # our int8 is for CPUs
        yield load_translator(system.folder, device=device, **system.settings)

    def _speed(self, translator: TextTranslator, sources: list[str]) -> dict[str, Any]:
        """Return the time of translating `sources`; earlier translations, or the first round, warm up.

        It is measured again while other programs interfere; if they always do, their share is reported.
        """
        rounds, outputs = list[tuple[bool, float, float]](), list[str]()
        while sum(not crowded for crowded, _, _ in rounds) < _ROUNDS and len(rounds) < _MOST_ROUNDS:
            load, began = SystemLoad(), time.perf_counter()
            outputs = _translated(translator, sources)
            seconds = time.perf_counter() - began
            others, crowded = load.look(self._threads)
            rounds.append((crowded, seconds, others))
        crowded, seconds, others = min(rounds)
        pieces = sum(map(len, translator.target_tokenizer.encode(outputs)))
        return {
            "lines": len(sources),
            "seconds": seconds,
            "others": others if crowded else 0.0,
            "target_pieces": pieces,
            "threads": self._threads,
            "source_words": sum(len(line.split()) for line in sources),
        }

    def _judge(
        self,
        folder: Path,
        perturbed: PerturbedSet,
        origins: list[list[str]],
        found: list[dict[str, Any]],
        scoring: TestSet,
    ) -> None:
        """Write the costs of the perturbations as a document and as a page."""
        outputs = [perturbed.outputs(record["disturbed"]) for record in found]
        systems = [(name, origin) for name, origin in origins]
        results = perturbed.judged(systems, outputs, self._how.metrics, scoring)
        if results.left_out:
            few = f"none of the first {results.sentences:,} lines of the first test set"
            notice = f"evaluation.perturb: left out, since they change {few}: {', '.join(results.left_out)}"
            self._context.say(f"warning: {notice}")
            write_document(folder / NOTICES, {"notices": [notice]})
        write_document(folder / "robustness.json", results.as_record())
        write_atomically(folder / "robustness.html", robustness_page(results).encode())


def _against_first(metric: SegmentMetric, outputs: Sequence[Sequence[str]]) -> list[float | None]:
    """Return each system's p-value against the first: paired bootstrap, corrected for their number (Holm).

    None for the first, and for all if there are too few sentences to decide.
    """
    first, *others = metric.statistics(outputs)
    if len(first) < FEWEST_CASES:
        return [None] * len(outputs)
    return [None, *holm([p_values(metric, [first, other], "bs", RESAMPLINGS)[0] for other in others])]


def _speed_file(system: _System) -> str:
    return f"speed/{system.name}.json"


def _bytes_of(system: _System) -> int:
    if system.served:
        files = [path for path in system.folder.iterdir() if path.suffix == ".bin"]
    else:
        files = weights_files(locate_weights(system.folder)[0])
    return sum(path.stat().st_size for path in files)


def _lines(path: Path) -> list[str]:
    with path.open("rb") as stream:
        return list(read_lines(stream, str(path)))


def _translated(translator: TextTranslator, texts: Sequence[str]) -> list[str]:
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # scores reveal truncated lines
        found = translator.translate_stream(texts, window=max(1, len(texts)))
        return [translation.text for translation in found]


class ReportStep(Step):
    """The last step: the report on all other steps, as a page and as JSON; `times` is the file with their times."""

    name, title = "report", "reports on all of it"
    settings = MappingProxyType({})
    outputs = ()  # times differ every time
    pages = (PAGE, RECORD)

    def __init__(self, context: PipelineContext, others: Sequence[Step], times: Path) -> None:
        self._context, self._others, self._times = context, others, times
        self.after = {step.name: ["*"] for step in others}

    def outdated(self) -> str | None:
        """Return the steps worked on since the report, because speed, warnings and times are not in any output."""
        shown, spent = dict[str, tuple[float, int]](), Times(self._times)
        with contextlib.suppress(KeyError, TypeError):  # edited by hand
            steps = (read_document(self._context.at(self.name, RECORD)) or {})["steps"]
            shown = {row["name"]: (row["seconds"], row["calls"]) for row in steps}
        now = {step.name: (spent.of(step.name).seconds, spent.of(step.name).calls) for step in self._others}
        since = [name for name in now if shown.get(name) != now[name]]
        return f"since then there was work on {', '.join(since)}, so it is rewritten" if since else None

    def work(self, folder: Path) -> None:
        """Write the report."""
        summary = _summary(self._context, self._others, Times(self._times))
        write_document(folder / RECORD, json.loads(json.dumps(summary.as_record())))
        page = self._context.at("evaluate", "robustness.html")
        link = os.path.relpath(page, folder) if summary.effects else None
        runs = _runs(self._context)
        write_atomically(folder / PAGE, pipeline_page(summary, robustness=link, runs=runs).encode())


def _summary(context: PipelineContext, others: Sequence[Step], times: Times) -> PipelineSummary:
    steps = []
    for step in others:
        manifest, spent = read_manifest(context.at(step.name)), times.of(step.name)
        size = 0 if manifest is None else sum(entry["bytes"] for entry in manifest.outputs.values())
        steps.append(StepRow(step.name, step.title, spent.seconds, spent.calls, size))
    names = {step.name for step in others}
    # Without the step, its folder may contain results of an earlier version of the file.
    evaluated = "evaluate" in names
    robustness = (evaluated and read_document(context.at("evaluate", "robustness.json"))) or {}
    scores = (evaluated and read_document(context.at("evaluate", "scores.json"))) or {"systems": [], "tests": {}}
    return PipelineSummary(
        context.languages,
        steps,
        _corpora(context, names),
        _models(context),
        [(name, origin) for name, origin in scores["systems"]],
        scores["tests"],
        _speed(context, [name for name, _ in scores["systems"]]),
        [Effect(**effect) for effect in robustness.get("effects", [])],
        robustness.get("sentences", 0),
        {one["name"]: one["cases"] for one in robustness.get("perturbations", [])},
        {to: _export(context, to) for to in context.exports()},
        {
            "ziggurat": __version__,
            "torch": metadata.version("torch"),
            "on": f"{platform.machine()}, {os.cpu_count()} cores",
        },
        _notices(context, names),
        [said(name) for name in MODELS if (one := getattr(context.config, name)) is not None and one.existing],
    )


def _notices(context: PipelineContext, steps: set[str]) -> list[str]:
    files = [context.at("clean", "report.json")]
    files += [context.at(step, NOTICES) for step in ("backtranslate", *DISTILLED, "evaluate") if step in steps]
    return [notice for file in files for notice in (read_document(file) or {}).get("notices", [])]


def _corpora(context: PipelineContext, steps: set[str]) -> list[CorpusRow]:
    rows = []
    cleaned = (read_document(context.at("clean", "report.json")) or {"corpora": {}})["corpora"]
    for name, corpus in zip(context.bitext_names(), context.config.bitext.train, strict=True):
        found = cleaned.get(name, {"read": 0, "kept": 0, "dropped": {}})
        licences, examples = _licences(context, corpus.fetch), found.get("examples", {})
        rows.append(CorpusRow(name, found["read"], found["kept"], found["dropped"], licences, examples))
    texts = read_document(context.at("monolingual", "report.json")) or {} if "monolingual" in steps else {}
    for side, entries in context.config.monolingual:
        if side in texts:
            licences = {}
            for entry in entries:
                licences |= _licences(context, entry.fetch)
            dropped = {reason: count for reason, count in texts[side].items() if reason != "kept"}
            kept = texts[side]["kept"]
            rows.append(CorpusRow(f"monolingual, {side}", kept + sum(dropped.values()), kept, dropped, licences))
    synthetic = (("backtranslate", BACK_TRANSLATION), *((step, step) for step in (*DISTILLED, "filter")))
    for step, name in synthetic:
        if step in steps and (made := read_document(context.at(step, "corpus", "manifest.json"))):
            rows.append(CorpusRow(name, made["read"], made["kept"], made["dropped"]))
    for test in context.config.test:
        if licences := _licences(context, test.fetch):
            lines = context.test_set(test.name)[0].read_bytes().count(b"\n")
            rows.append(CorpusRow(f"test set {test.name}", lines, lines, {}, licences))
    return rows


def _licences(context: PipelineContext, name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    return {part.name: part.licence for _, origin in fetched_origins(context, name) for part in origin.parts}


def _models(context: PipelineContext) -> list[ModelRow]:
    from ziggurat.model.counts import inspect_experiment

    rows = []
    for name in MODELS:
        if getattr(context.config, name) is None:
            continue
        weights, folder = locate_weights(context.model(name))
        experiment = weights_experiment(weights.parent, folder)
        model = experiment.model
        found = inspect_experiment(experiment, folder)
        depth = (model.encoder.layers, model.decoder.layers)
        size = sum(path.stat().st_size for path in weights_files(weights))
        rows.append(ModelRow(name, depth, model.d_model, found.parameters, size))
    return rows


def _runs(context: PipelineContext) -> list[ReportRun]:
    """Return the runs of the models that this pipeline trained."""
    trained = [name for name in MODELS if (one := getattr(context.config, name)) is not None and not one.existing]
    return [read_run(context.model(name), colour=colour, name=name) for colour, name in enumerate(trained)]


def _speed(context: PipelineContext, systems: Sequence[str]) -> list[SpeedRow]:
    rows = []
    for name in systems:
        found = read_document(context.at("evaluate", "speed", f"{name}.json"))
        if found is None:
            continue
        lines, words, pieces = (found[key] / found["seconds"] for key in ("lines", "source_words", "target_pieces"))
        rows.append(SpeedRow(name, lines, words, pieces, found["threads"], found["bytes"], found.get("others", 0.0)))
    return rows


def _export(context: PipelineContext, to: str) -> dict[str, Any]:
    folder = context.at(f"export-{to}", to)
    report = read_document(folder / "export.json") or {}
    verified, quantized = report.get("verification", {}), report.get("quantized", {})
    return {
        "folder": str(folder),
        "quantization": report.get("quantization"),
        "lines": verified.get("lines", 0),
        "identical": verified.get("identical", 0),
        "unchanged": quantized.get("identical"),
        "unchanged_of": quantized.get("lines"),  # includes long lines, which verification leaves out
    }
