"""Steps that make text: back-translation by the backward model, distillation by the teacher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ziggurat.config.pipeline import ModelName
from ziggurat.config.pipeline_models import TranslationConfig
from ziggurat.pipeline.costs import Costs, expected_lines
from ziggurat.pipeline.models import in_fresh_state, model_files, of_model
from ziggurat.pipeline.road import Progress, Road
from ziggurat.pipeline.step import Step

__all__ = ["backtranslate_step", "distil_step"]

_CORPUS = ("corpus/source.txt", "corpus/target.txt", "corpus/manifest.json")
_NOT_OF_RESULT = {"workers", "tag", "bitext", "monolingual"}
"""Keys of a synthetic corpus that its text does not depend on, or that its inputs tell."""


def backtranslate_step(road: Road, costs: Costs) -> Step:
    """Return the step that translates text of the target language by the backward model."""
    config = road.config.backtranslation
    assert config is not None
    text = road.at("monolingual", "target.txt")
    after = {"monolingual": ["target.txt"], **of_model(road, "backward")}
    return _translation(road, "backtranslate", "backward", config, [text], after, costs)


def distil_step(road: Road, costs: Costs) -> Step:
    """Return the step that translates text of the source language by the teacher."""
    config = road.config.distillation
    assert config is not None
    texts, after = [], of_model(road, "teacher")
    if config.bitext:
        texts += [road.sides("clean", "train", name)[0] for name in road.bitext_names()]
        after["clean"] = [f"train/*.{road.languages[0]}"]
    if config.monolingual and road.config.monolingual.source:
        texts.append(road.at("monolingual", "source.txt"))
        after["monolingual"] = ["source.txt"]
    return _translation(road, "distil", "teacher", config, texts, after, costs)


def _translation(
    road: Road,
    step: str,
    name: ModelName,
    config: TranslationConfig,
    texts: Sequence[Path],
    after: dict[str, list[str]],
    costs: Costs,
) -> Step:
    """Return a step that makes a synthetic corpus."""
    workers = config.workers or _usual_workers(config)

    def work(folder: Path) -> int | None:
        from ziggurat.backtranslation.filters import PairFilter
        from ziggurat.backtranslation.merge import dropped_text
        from ziggurat.backtranslation.plan import Job
        from ziggurat.backtranslation.run import back_translate
        from ziggurat.jobs.launchers import processes
        from ziggurat.jobs.run import Work

        job = Job(
            models=(str(road.model(name)),),
            inputs=tuple(map(str, texts)),
            out=folder / "corpus",
            method=config.method,
            forward=name == "teacher",
            device=config.device,
            threads=config.threads,
            seed=config.seed,
            shard_lines=config.shard_lines,
            filters=PairFilter(max_pieces=config.max_pieces, max_ratio=config.max_ratio),
            decoding=config.decoding,
        )
        with in_fresh_state():
            outcome = back_translate(job, Work(partial(processes, workers), progress=Progress(road.say).show))
        if (report := outcome.report) is not None:
            road.say(f"{report.kept:,} pairs of {report.read:,} lines; dropped: {dropped_text(report.dropped)}")
        return outcome.signal

    doing = "back-translates" if name == "backward" else "distils: translates"
    beam = config.decoding.get("beam_size", 4) if config.method in ("beam", "noised-beam") else 1
    return Step(
        step,
        f"{doing} text by the {name}",
        config.model_dump(mode="json", exclude=_NOT_OF_RESULT, exclude_defaults=True),
        work,
        after,
        lambda: model_files(road, name),
        _CORPUS,
        lambda: costs.translating(name, expected_lines(texts), beam, workers),
    )


def _usual_workers(config: TranslationConfig) -> int:
    """Return one worker for each core, one on a GPU."""
    if config.device != "cpu":
        from ziggurat.models.tensors import usable_device

        if usable_device(config.device, "device").type != "cpu":
            return 1
    return max(1, len(os.sched_getaffinity(0)) // config.threads)
