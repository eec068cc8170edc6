"""The last step: the report on all others, as a page and as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ziggurat import __version__
from ziggurat.config.pipeline import BACK_TRANSLATION, MODELS
from ziggurat.corpora.pipeline.corpora import fetched_origins
from ziggurat.corpora.pipeline.models import said
from ziggurat.corpora.pipeline.road import DISTILLED, Road
from ziggurat.corpora.pipeline.step import Step, Times, read_document, read_manifest, write_document
from ziggurat.corpora.pipeline.synthesis import NOTICES
from ziggurat.inspect.report.page import CorpusRow, ModelRow, PipelineSummary, SpeedRow, StepRow, pipeline_page
from ziggurat.system.files import write_atomically

PAGE, RECORD = "report.html", "report.json"


def report_step(road: Road, others: Sequence[Step], times: Path) -> Step:
    """Return the step; `others` are all before it, whose times are in the file `times`."""

    def work(folder: Path) -> None:
        summary = _summary(road, others, Times(times))
        write_document(folder / RECORD, json.loads(json.dumps(summary.as_record())))
        page = road.at("evaluate", "robustness.html")
        link = os.path.relpath(page, folder) if summary.effects else None
        write_atomically(folder / PAGE, pipeline_page(summary, robustness=link).encode())

    def stale() -> str | None:
        # Speed, warnings and times are of the work on a step, and nothing that it hands on.
        told, spent = dict[str, tuple[float, int]](), Times(times)
        with contextlib.suppress(KeyError, TypeError):  # edited by hand
            steps = (read_document(road.at("report", RECORD)) or {})["steps"]
            told = {row["name"]: (row["seconds"], row["calls"]) for row in steps}
        now = {step.name: (spent.of(step.name).seconds, spent.of(step.name).calls) for step in others}
        since = [name for name in now if told.get(name) != now[name]]
        return f"since then there was work on {', '.join(since)}: it is made again" if since else None

    # It hands on nothing: times differ every time.
    after = {step.name: ["*"] for step in others}
    return Step("report", "reports on all of it", {}, work, after, outputs=(), pages=(PAGE, RECORD), stale=stale)


def _summary(road: Road, others: Sequence[Step], times: Times) -> PipelineSummary:
    """Return what the report tells, from what the other steps left."""
    from ziggurat.evaluate.robustness import Effect

    steps = []
    for step in others:
        manifest, spent = read_manifest(road.at(step.name)), times.of(step.name)
        size = 0 if manifest is None else sum(entry["bytes"] for entry in manifest.outputs.values())
        steps.append(StepRow(step.name, step.title, spent.seconds, spent.calls, size))
    names = {step.name for step in others}
    # Without the step, its folder may hold what an earlier version of the file asked for.
    evaluated = "evaluate" in names
    robustness = (evaluated and read_document(road.at("evaluate", "robustness.json"))) or {}
    scores = (evaluated and read_document(road.at("evaluate", "scores.json"))) or {"systems": [], "tests": {}}
    return PipelineSummary(
        road.languages,
        steps,
        _corpora(road, names),
        _models(road),
        [(name, origin) for name, origin in scores["systems"]],
        scores["tests"],
        _speed(road, [name for name, _ in scores["systems"]]),
        [Effect(**effect) for effect in robustness.get("effects", [])],
        robustness.get("sentences", 0),
        {one["name"]: one["cases"] for one in robustness.get("perturbations", [])},
        {to: _export(road, to) for to in _targets(road)},
        {
            "ziggurat": __version__,
            "torch": metadata.version("torch"),
            "on": f"{platform.machine()}, {os.cpu_count()} cores",
        },
        _notices(road, names),
        [said(name) for name in MODELS if (one := getattr(road.config, name)) is not None and one.existing],
    )


def _notices(road: Road, steps: set[str]) -> list[str]:
    """Return the warnings of the steps on what they read and made."""
    files = [road.at("clean", "report.json")]
    files += [road.at(step, NOTICES) for step in ("backtranslate", *DISTILLED, "evaluate") if step in steps]
    return [notice for file in files for notice in (read_document(file) or {}).get("notices", [])]


def _corpora(road: Road, steps: set[str]) -> list[CorpusRow]:
    rows = []
    cleaned = (read_document(road.at("clean", "report.json")) or {"corpora": {}})["corpora"]
    for name, corpus in zip(road.bitext_names(), road.config.bitext.train, strict=True):
        found = cleaned.get(name, {"read": 0, "kept": 0, "dropped": {}})
        licences, examples = _licences(road, corpus.fetch), found.get("examples", {})
        rows.append(CorpusRow(name, found["read"], found["kept"], found["dropped"], licences, examples))
    texts = read_document(road.at("monolingual", "report.json")) or {} if "monolingual" in steps else {}
    for side, entries in (("source", road.config.monolingual.source), ("target", road.config.monolingual.target)):
        if side in texts:
            licences = {}
            for entry in entries:
                licences |= _licences(road, entry.fetch)
            dropped = {reason: count for reason, count in texts[side].items() if reason != "kept"}
            kept = texts[side]["kept"]
            rows.append(CorpusRow(f"monolingual, {side}", kept + sum(dropped.values()), kept, dropped, licences))
    synthetic = (("backtranslate", BACK_TRANSLATION), *((step, step) for step in (*DISTILLED, "filter")))
    for step, name in synthetic:
        if step in steps and (made := read_document(road.at(step, "corpus", "manifest.json"))):
            rows.append(CorpusRow(name, made["read"], made["kept"], made["dropped"]))
    for test in road.config.test:
        if licences := _licences(road, test.fetch):
            lines = road.test_set(test.name)[0].read_bytes().count(b"\n")
            rows.append(CorpusRow(f"test set {test.name}", lines, lines, {}, licences))
    return rows


def _licences(road: Road, name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    return {part.name: part.licence for _, origin in fetched_origins(road, name) for part in origin.parts}


def _models(road: Road) -> list[ModelRow]:
    from ziggurat.model.directory import locate_weights, weights_experiment
    from ziggurat.model.inspection import inspect_experiment
    from ziggurat.model.low_rank import weights_files

    rows = []
    for name in MODELS:
        if getattr(road.config, name) is None:
            continue
        weights, folder = locate_weights(road.model(name))
        experiment = weights_experiment(weights.parent, folder)
        model = experiment.model
        found = inspect_experiment(experiment, folder)
        depth = (model.encoder.layers, model.decoder.layers)
        size = sum(path.stat().st_size for path in weights_files(weights))
        rows.append(ModelRow(name, depth, model.d_model, found.parameters, size))
    return rows


def _speed(road: Road, systems: Sequence[str]) -> list[SpeedRow]:
    rows = []
    for name in systems:
        found = read_document(road.at("evaluate", "speed", f"{name}.json"))
        if found is None:
            continue
        lines, words, pieces = (found[key] / found["seconds"] for key in ("lines", "source_words", "target_pieces"))
        rows.append(SpeedRow(name, lines, words, pieces, found["threads"], found["bytes"]))
    return rows


def _targets(road: Road) -> list[str]:
    chosen = road.config.export
    return [] if chosen is None else [to for to, target in chosen if target is not None]


def _export(road: Road, to: str) -> dict[str, Any]:
    """Return what an export was verified by."""
    folder = road.at(f"export-{to}", to)
    report = read_document(folder / "export.json") or {}
    verified, quantized = report.get("verification", {}), report.get("quantized", {})
    return {
        "folder": str(folder),
        "quantization": report.get("quantization"),
        "lines": verified.get("lines", 0),
        "identical": verified.get("identical", 0),
        "unchanged": quantized.get("identical"),
        "unchanged_of": quantized.get("lines"),  # long lines, too, which verification leaves out
    }
