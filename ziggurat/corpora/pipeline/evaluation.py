"""The step that evaluates teacher, student and export on all test sets: scores, robustness, speed.

systems/NAME.json     what a system made of all texts; an interrupted evaluation goes on with the next system
translations/TEST.NAME.LANGUAGE
scores.json, robustness.json, robustness.html
speed/NAME.json       seconds, which differ every time: no other step depends on them
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.config.pipeline import ModelName
from ziggurat.config.pipeline_models import EvaluationConfig
from ziggurat.corpora.pipeline.models import (
    SHORTLIST,
    final_model,
    in_fresh_state,
    model_files,
    of_model,
    shortlist_made_here,
    shortlists,
)
from ziggurat.corpora.pipeline.road import Road
from ziggurat.corpora.pipeline.settings import joined, settings_of
from ziggurat.corpora.pipeline.step import Step, read_document, write_document
from ziggurat.corpora.pipeline.synthesis import NOTICES
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.system.processes import usable_cpus
from ziggurat.translate.results import TranslationWarning, read_lines

if TYPE_CHECKING:
    from ziggurat.evaluate.metrics import TestSet
    from ziggurat.evaluate.perturbations import DisturbedSet
    from ziggurat.translate.served import ServedTranslator
    from ziggurat.translate.translator import Translator

_INT8 = {"precision": "int8"}
_ROUNDS = 2  # of a measurement of speed; the faster one counts


@dataclass(frozen=True)
class _System:
    """A system to be evaluated.

    Attributes:
        name: in the report.
        folder: run, model directory, or export.
        after: the dependence on it.
        served: CTranslate2 translates.
        settings: decoding settings in place of its own.
    """

    name: str
    folder: Path
    after: dict[str, list[str]]
    served: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def _systems(road: Road, how: EvaluationConfig) -> list[_System]:
    """Return the systems of a pipeline, the teacher first."""
    found = []
    if road.config.teacher is not None:
        found.append(_System("teacher", road.model("teacher"), of_model(road, "teacher")))
    name, model, after = final_model(road)
    if name == "student":
        found.append(_System("student", road.model("student"), of_model(road, "student")))
    if how.int8:
        found.append(_System(f"{name}-int8", model, after, settings=_INT8))
    if road.config.export is not None and road.config.export.ctranslate2 is not None:
        folder = road.at("export-ctranslate2", "ctranslate2")
        found.append(_System(f"{name}-ctranslate2", folder, {"export-ctranslate2": ["ctranslate2/*"]}, served=True))
    return found


def evaluate_step(road: Road, how: EvaluationConfig) -> Step:
    """Return the step."""
    systems, names = _systems(road, how), road.test_names()
    after: dict[str, list[str]] = {}
    for system in systems:
        after |= system.after
    for name in names:
        for path in road.test_set(name):
            step, *inside = path.relative_to(road.folder).parts
            after.setdefault(step, []).append("/".join(inside))
    pages = ["robustness.html"] if how.perturb else []
    if how.speed_lines:  # int8 is not timed on every processor: its file may rightly be missing
        pages += [_speed_file(system) for system in systems if system.settings != _INT8]
    if shortlist_made_here(road):
        after["shortlist"] = [SHORTLIST]
    ours: list[ModelName] = [name for name in ("teacher", "student") if getattr(road.config, name) is not None]

    def work(folder: Path) -> None:
        from ziggurat.model.fast.packed import available

        usable = [system for system in systems if system.settings != _INT8 or available("int8")]
        if len(usable) < len(systems):
            road.say("this CPU has no products of bytes (VNNI): int8 by our own engine is left out")
        with in_fresh_state():
            _Evaluation(road, how, folder).run(usable, names)

    return Step(
        "evaluate",
        f"evaluates {', '.join(system.name for system in systems)}",
        joined(settings_of(how), {"tests": names}),
        work,
        after,
        lambda: model_files(road, *ours) | shortlists(road, *ours),
        ("scores.json", "robustness.json", "translations/*"),
        check=partial(_check, road, how),
        pages=tuple(pages),
    )


def _check(road: Road, how: EvaluationConfig) -> None:
    """Raise ConfigError for a perturbation that there is not, or a tokenizer that is not installed."""
    from ziggurat.evaluate.perturbations import perturbation_names
    from ziggurat.evaluate.scores import sacrebleu_metric

    perturbation_names(how.perturb, "evaluation.perturb")
    for metric in how.metrics:
        sacrebleu_metric(metric, target_language=road.languages[1])


class _Evaluation:
    """One evaluation, in the folder of its step."""

    def __init__(self, road: Road, how: EvaluationConfig, folder: Path) -> None:
        self._road, self._how, self._folder = road, how, folder
        self._threads = how.threads or usable_cpus()

    def run(self, systems: Sequence[_System], names: Sequence[str]) -> None:
        """Translate, score, and write all results."""
        from ziggurat.evaluate.scores import evaluate

        tests = {name: tuple(_lines(path) for path in self._road.test_set(name)) for name in names}
        for name, (sources, references) in tests.items():
            if len(sources) != len(references) or not sources:
                raise ConfigError(f"test set {name}: {len(sources):,} lines of source, {len(references):,} of target")
        disturbed = self._disturbed(*tests[names[0]])
        found = [self._outputs(system, tests, disturbed) for system in systems]
        scores: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, (_, references) in tests.items():
            for system, record in zip(systems, found, strict=True):
                outputs = record["tests"][name]
                file = self._folder / "translations" / f"{name}.{system.name}.{self._road.languages[1]}"
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, "".join(f"{line}\n" for line in outputs).encode())
                of_system = evaluate(
                    outputs,
                    [references],
                    metrics=self._how.metrics,
                    confidence=True,
                    target_language=self._road.languages[1],
                )
                scores.setdefault(name, {})[system.name] = [score.as_record() for score in of_system]
        origins = [[system.name, record["origin"]] for system, record in zip(systems, found, strict=True)]
        if disturbed is not None:
            self._judge(disturbed, origins, found, self._test_set(*tests[names[0]]))
        write_document(self._folder / "scores.json", {"systems": origins, "tests": scores})

    def _disturbed(self, sources: list[str], references: list[str]) -> DisturbedSet | None:
        from ziggurat.evaluate.perturbations import DisturbedSet, perturbation_names

        if not self._how.perturb:
            return None
        names = perturbation_names(self._how.perturb, "evaluation.perturb")
        most = self._how.perturb_lines
        return DisturbedSet(names, sources[:most], [references[:most]], self._road.languages)

    def _test_set(self, sources: list[str], references: list[str]) -> TestSet:
        from ziggurat.evaluate.metrics import TestSet

        most = self._how.perturb_lines
        return TestSet([references[:most]], sources[:most], self._road.languages[1])

    def _outputs(
        self, system: _System, tests: dict[str, tuple[list[str], ...]], disturbed: DisturbedSet | None
    ) -> dict[str, Any]:
        """Return what a system makes of all texts, translated now or by an interrupted call."""
        file, speed = self._folder / "systems" / f"{system.name}.json", self._folder / _speed_file(system)
        known, timed = read_document(file), speed.is_file() or not self._how.speed_lines
        if known is not None and timed:
            return known
        with self._opened(system) as translator:
            self._road.say(f"{system.name}: {translator.origin}")
            record: dict[str, Any] = known or {"origin": translator.origin, "tests": {}}
            if known is None:
                for name, (sources, _) in tests.items():
                    record["tests"][name] = _translated(translator, sources)
                if disturbed is not None:
                    record["disturbed"] = _translated(translator, disturbed.texts)
            if not timed:
                sources = next(iter(tests.values()))[0][: self._how.speed_lines]
                speed.parent.mkdir(exist_ok=True)
                write_document(speed, {**self._speed(translator, sources), "bytes": _bytes_of(system)})
        file.parent.mkdir(exist_ok=True)
        write_document(file, record)
        return record

    @contextlib.contextmanager
    def _opened(self, system: _System) -> Iterator[Translator | ServedTranslator]:
        if system.served:
            from ziggurat.translate.served import ServedTranslator

            yield ServedTranslator(system.folder, device=self._how.device, threads=self._threads, **system.settings)
            return
        import torch

        from ziggurat.translate.translator import load_translator

        torch.set_num_threads(self._threads)
        device = "cpu" if system.settings == _INT8 else self._how.device  # GPUs have no int8 of ours
        yield load_translator(system.folder, device=device, **system.settings)

    def _speed(self, translator: Translator | ServedTranslator, sources: list[str]) -> dict[str, Any]:
        """Return the time of a translation of `sources`; what was translated before, or the first round, warms up."""
        seconds, outputs = [], list[str]()
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            outputs = _translated(translator, sources)
            seconds.append(time.perf_counter() - began)
        pieces = sum(map(len, translator.target_tokenizer.encode(outputs)))
        return {
            "lines": len(sources),
            "seconds": min(seconds),
            "target_pieces": pieces,
            "threads": self._threads,
            "source_words": sum(len(line.split()) for line in sources),
        }

    def _judge(
        self, disturbed: DisturbedSet, origins: list[list[str]], found: list[dict[str, Any]], scoring: TestSet
    ) -> None:
        """Write what the perturbations cost, as a document and as a page."""
        from ziggurat.inspect.report.page import robustness_page

        outputs = [disturbed.outputs(record["disturbed"]) for record in found]
        systems = [(name, origin) for name, origin in origins]
        results = disturbed.judged(systems, outputs, self._how.metrics, scoring)
        if results.left_out:
            few = f"none of the first {results.sentences:,} lines of the first test set"
            notice = f"evaluation.perturb: left out, since they change {few}: {', '.join(results.left_out)}"
            self._road.say(f"warning: {notice}")
            write_document(self._folder / NOTICES, {"notices": [notice]})
        write_document(self._folder / "robustness.json", results.as_record())
        write_atomically(self._folder / "robustness.html", robustness_page(results).encode())


def _speed_file(system: _System) -> str:
    return f"speed/{system.name}.json"


def _bytes_of(system: _System) -> int:
    """Return the size of a system's weights."""
    if system.served:
        return sum(path.stat().st_size for path in system.folder.iterdir() if path.suffix == ".bin")
    from ziggurat.model.directory import locate_weights
    from ziggurat.model.low_rank import weights_files

    return sum(path.stat().st_size for path in weights_files(locate_weights(system.folder)[0]))


def _lines(path: Path) -> list[str]:
    with path.open("rb") as stream:
        return list(read_lines(stream, str(path)))


def _translated(translator: Translator | ServedTranslator, texts: Sequence[str]) -> list[str]:
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # scores tell of lines that were cut
        found = translator.translate_stream(texts, window=max(1, len(texts)))
        return [translation.text for translation in found]
