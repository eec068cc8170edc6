"""Steps that make text: back-translation by the backward model, distillation by the teacher.

The warning where many lines gave no pair: because of the model, or of limits that do not suit these languages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.config.pipeline import ModelName
from ziggurat.config.pipeline_models import (
    BackTranslationConfig,
    DistillationConfig,
    FilterStepConfig,
    TranslationConfig,
)
from ziggurat.corpora.pipeline.costs import Amounts, Costs
from ziggurat.corpora.pipeline.engine import AUTO
from ziggurat.corpora.pipeline.models import (
    decoding_of,
    in_fresh_state,
    model_files,
    of_model,
    refuse_empty_stages,
    said,
    shortlists,
)
from ziggurat.corpora.pipeline.road import DISTILLED, Corpora, Progress, Road
from ziggurat.corpora.pipeline.settings import Settings, joined, settings_of
from ziggurat.corpora.pipeline.step import Step, lines_done, write_document
from ziggurat.corpora.synthesis.plan import PairFilter, readable_lines
from ziggurat.corpora.synthesis.run import Report, dropped_text
from ziggurat.data.subword import load_tokenizers
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.corpora.synthesis.plan import BackTranslationJob


NOTICES = "notices.json"
"""Warnings of a step, for the report; none where the file is missing."""
_SHARDS, _LEAST_SHARD_LINES, _MOST_SHARD_LINES = 100, 200, 2000
_CORPUS = ("corpus/source.txt", "corpus/target.txt", "corpus/manifest.json")
_OF_MACHINE = {"threads", "device"}
_OF_RESULT = set(TranslationConfig.model_fields) - {"workers", *_OF_MACHINE}
"""Keys of a synthetic corpus that its text depends on."""


def backtranslate_step(road: Road, config: BackTranslationConfig, costs: Costs) -> Step:
    """Return the step that translates text of the target language by the backward model."""
    text = road.at("monolingual", "target.txt")
    after = {"monolingual": ["target.txt"], **of_model(road, "backward")}
    return _translation(road, "backtranslate", "backward", config, [text], after, costs)


def distil_steps(road: Road, config: DistillationConfig, costs: Costs) -> list[Step]:
    """Return the steps that translate by the teacher: the bitext's source side, and text of the source language."""
    steps = []
    if config.bitext:
        sources, references = zip(*(road.sides("clean", "train", name) for name in road.bitext_names()), strict=True)
        after = {"clean": ["train/*"], **of_model(road, "teacher")}
        nearest = references if config.n_best > 1 else ()
        found = _translation(road, DISTILLED[0], "teacher", config, sources, after, costs, nearest)
        # Their order is that of the result.
        order = Settings({"corpora": road.bitext_names()}, {})
        steps.append(replace(found, settings=joined(found.settings, order)))
    if config.monolingual and road.config.monolingual.source:
        text = road.at("monolingual", "source.txt")
        after = {"monolingual": ["source.txt"], **of_model(road, "teacher")}
        steps.append(_translation(road, DISTILLED[1], "teacher", config, [text], after, costs))
    return steps


def _translation(
    road: Road,
    step: str,
    name: ModelName,
    config: TranslationConfig,
    texts: Sequence[Path],
    after: dict[str, list[str]],
    costs: Costs,
    references: Sequence[Path] = (),
) -> Step:
    """Return a step that makes a synthetic corpus; with `references` it takes the nearest of several candidates."""
    candidates: dict[str, Any] = {}
    if references and isinstance(config, DistillationConfig):
        candidates = {"n_best": config.n_best, "nearest": config.nearest}
    here = config.workers, config.threads, config.device
    section = "backtranslation" if name == "backward" else "distillation"

    def job(folder: Path) -> BackTranslationJob:
        from ziggurat.corpora.synthesis.plan import BackTranslationJob, PairFilter

        return BackTranslationJob(
            models=(str(road.model(name)),),
            inputs=tuple(map(str, texts)),
            out=folder / "corpus",
            method=config.method,
            forward=name == "teacher",
            device=config.device,
            threads=config.threads,
            seed=config.seed,
            shard_lines=config.shard_lines or _shard_lines(texts),
            filters=PairFilter(config.max_pieces, config.max_ratio, config.ratio_slack),
            decoding=config.decoding,
            references=tuple(map(str, references)),
            **candidates,
        )

    def check() -> None:
        road.bulk.check(step, config.device)
        _check_decoding(step, road, name, job(road.at(step)).settings())

    def work(folder: Path) -> int | None:
        from ziggurat.corpora.synthesis.run import back_translate, dropped_text

        refuse_empty_stages(road)
        asked = job(folder)
        with in_fresh_state():
            outcome = back_translate(asked, road.bulk.work(*here, Progress(road.say).show))
        if (report := outcome.report) is not None:
            road.say(f"{report.kept:,} pairs of {report.read:,} lines; dropped: {dropped_text(report.dropped)}")
            if notice := dropped_notice(report, asked.filters, section, _bitext(road, name), _vocabularies(road, name)):
                road.say(f"warning: {notice}")
                write_document(folder / NOTICES, {"notices": [f"{step}: {notice}"]})
        return outcome.signal

    doing = "back-translates" if name == "backward" else "translates"
    beam = config.decoding.get("beam_size", 4) if config.method in ("beam", "noised-beam") else 1
    beam = max(beam, candidates.get("n_best", 1))
    return Step(
        step,
        f"{doing} text by the {said(name)}",
        joined(settings_of(config, include=_OF_RESULT), candidates),
        work,
        after,
        lambda: model_files(road, name) | shortlists(road, name, changes=config.decoding),
        _CORPUS,
        lambda: costs.translating(name, Amounts(road).read(step), beam, road.bulk.processes(*here)),
        check,
        machine=partial(_machine, config),
        done=lambda: lines_done(road.at(step, "corpus"), "filtered", "lines"),
        is_job=True,
    )


def _machine(config: TranslationConfig | FilterStepConfig) -> dict[str, Any]:
    """Return the settings of what computes, with the device that `auto` is here: a job is done by one kind."""
    found = dict(settings_of(config, include=_OF_MACHINE))
    if config.device != "auto":
        return found
    from ziggurat.model.directory import usable_device

    return {**found, "device": f"{AUTO}{usable_device('auto', 'device').type}"}


def _shard_lines(texts: Sequence[Path]) -> int:
    """Return the lines of a shard, told by the text alone, since the result depends on them.

    What an interruption loses is then small beside the whole, and progress is soon seen.
    """
    from ziggurat.corpora.synthesis.plan import count_lines

    there = [path for path in texts if path.is_file()]  # before anything is done, settings are checked without text
    return min(_MOST_SHARD_LINES, max(_LEAST_SHARD_LINES, count_lines(there) // _SHARDS))


def _bitext(road: Road, name: ModelName) -> list[tuple[Path, Path]]:
    """Return the files of both sides of the bitext, those of the language that a model reads first."""
    sides = [road.sides("clean", "train", corpus) for corpus in road.bitext_names()]
    return [(target, source) for source, target in sides] if name == "backward" else sides


def _vocabularies(road: Road, name: ModelName) -> Path:
    from ziggurat.model.directory import locate_weights

    return locate_weights(road.model(name))[1]


def _check_decoding(step: str, road: Road, name: ModelName, changes: Mapping[str, Any]) -> None:
    """Raise ConfigError where a step's changes and the decoding settings of its model contradict each other."""
    from ziggurat.corpora.jobs.models import job_decoding

    try:
        job_decoding(decoding_of(road, name), changes)
    except ConfigError as error:
        raise ConfigError(f"step {step}, with the {said(name)}: {error}") from None


def filter_step(road: Road, config: FilterStepConfig, costs: Costs) -> Step:
    """Return the step that drops the distilled pairs whose source the backward model finds least likely."""
    made, distilled = Corpora(road).translated(), road.config.distillation
    assert distilled is not None
    sources, targets = ([road.at(step, "corpus", f"{side}.txt") for step in made] for side in ("source", "target"))
    here = config.workers, config.threads, config.device

    def check() -> None:
        road.bulk.check("filter", config.device)
        _check_decoding("filter", road, "backward", {})

    def work(folder: Path) -> int | None:
        from ziggurat.corpora.synthesis.cross_entropy import FilterJob, filter_pairs
        from ziggurat.corpora.synthesis.run import dropped_text

        job = FilterJob(
            models=(str(road.model("backward")),),
            sources=tuple(map(str, sources)),
            targets=tuple(map(str, targets)),
            out=folder / "corpus",
            keep=config.keep,
            max_pieces=distilled.max_pieces,
            reverse=True,
            device=config.device,
            threads=config.threads,
        )
        with in_fresh_state():
            outcome = filter_pairs(job, road.bulk.work(*here, Progress(road.say, "pairs").show))
        if (report := outcome.report) is not None:
            road.say(f"{report.kept:,} of {report.read:,} pairs; dropped: {dropped_text(report.dropped)}")
        return outcome.signal

    return Step(
        "filter",
        "drops distilled pairs that the backward model finds unlikely",
        joined(settings_of(config, exclude={"workers", *_OF_MACHINE}), settings_of(distilled, include={"max_pieces"})),
        work,
        {**{step: ["corpus/*.txt"] for step in made}, **of_model(road, "backward")},
        partial(model_files, road, "backward"),
        _CORPUS,
        lambda: costs.scoring(Amounts(road).read("filter")),
        check,
        machine=partial(_machine, config),
        done=lambda: lines_done(road.at("filter", "corpus"), "scored", "pairs"),
        is_job=True,
    )


_USUALLY_KEPT = 0.9  # of the lines; with less a notice says what may be wrong
_COMPARED = 20_000
"""Pairs of the bitext that limits are tried on: enough for a tenth of a percent, and half a second."""
_OF_LIMITS = ("ratio", "too_long")


def dropped_notice(
    report: Report, filters: PairFilter, section: str, bitext: Sequence[tuple[Path, Path]], vocabularies: Path
) -> str | None:
    """Return what to say of a corpus where many lines gave no pair; None where that is not so.

    Args:
        report: of the corpus.
        filters: what its pairs were dropped by.
        section: the section of the pipeline's file that has them.
        bitext: files of both sides of human pairs, those of the language that was translated first.
        vocabularies: folder with the vocabularies of the model that translated.
    """
    if report.kept >= _USUALLY_KEPT * report.read:
        return None
    lost = report.read - report.kept
    said = f"{_percent(lost / report.read)} of {report.read:,} lines gave no pair ({dropped_text(report.dropped)})"
    by_limits = sum(report.dropped.get(reason, 0) for reason in _OF_LIMITS) / report.read
    human = share_beyond(filters, bitext, vocabularies) if by_limits else None
    if human is None or 2 * by_limits < lost / report.read:
        return f"{said}: the model may be weak"
    limits = f"`{section}.max_ratio: {filters.max_ratio:g}`, `ratio_slack: {filters.ratio_slack}`"
    limits += f" and `max_pieces: {filters.max_pieces}`"
    beside = f"{said}; by {limits} {_percent(human)} of the bitext's own pairs would be dropped, too"
    # Where human translations fare half as badly, it is the limits; more than a few of them should never go.
    return f"{beside}: {'raise them' if 2 * human >= by_limits else 'the model may be weak'}"


def share_beyond(filters: PairFilter, bitext: Sequence[tuple[Path, Path]], vocabularies: Path) -> float | None:
    """Return the share of human pairs, the first ones of each corpus, beyond the limits; None where there are none."""
    tokenizers = load_tokenizers(vocabularies)
    beyond = tried = 0
    for sides in bitext:
        lines = islice(readable_lines([sides[0]], [sides[1]]), max(1, _COMPARED // len(bitext)))
        pairs = [(line.text, line.reference) for line in lines if line.text and line.reference]
        ids = [tokenizers[side].encode([pair[side] for pair in pairs]) for side in (0, 1)]
        beyond += sum(filters.reason("a", "b", len(a), len(b)) in _OF_LIMITS for a, b in zip(*ids, strict=True))
        tried += len(pairs)
    return beyond / tried if tried else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
