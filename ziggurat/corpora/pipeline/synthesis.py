"""Steps that make text and word links: back-translation, distillation by the teacher, its filter, alignment.

All of them are jobs (ziggurat.corpora.jobs). If many lines give no pair, a warning states whether the cause may be the
model or limits that do not suit these languages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from ziggurat.config.pipeline import ModelName
from ziggurat.config.pipeline_models import (
    AlignmentStepConfig,
    DistillationConfig,
    FilterStepConfig,
    TranslationConfig,
)
from ziggurat.corpora.jobs.job import Work, fix_plan, made_once
from ziggurat.corpora.jobs.tasks import Aligning, job_decoding, run_text_job
from ziggurat.corpora.jobs.tasks import LineWithInputs as TextLine
from ziggurat.corpora.pipeline.context import DISTILLED, Corpora, PipelineContext, Progress, write_side
from ziggurat.corpora.pipeline.costs import PAIRS_ALIGNED, CorpusSizes, Costs, by_rate, lines_done
from ziggurat.corpora.pipeline.models import (
    decoding_of,
    in_fresh_state,
    model_files,
    of_model,
    refuse_empty_stages,
    said,
    shortlists,
)
from ziggurat.corpora.pipeline.step import (
    AUTO,
    Expected,
    Step,
    StepProgress,
    StepSettings,
    joined,
    settings_of,
    write_document,
)
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob, Report, back_translate, dropped_text
from ziggurat.corpora.synthesis.cross_entropy import FilterJob, filter_pairs
from ziggurat.corpora.synthesis.lines import PairFilter, count_lines, readable_lines
from ziggurat.data.aligner import Aligner, TrainingOptions
from ziggurat.data.readers import CorpusReader, PairBlock
from ziggurat.data.store_checks import InputWatch
from ziggurat.data.subword import load_tokenizers
from ziggurat.data.word_links import spread_pairs
from ziggurat.model.accelerator import usable_device
from ziggurat.model.directory import locate_weights
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.system.staging import discard

NOTICES = "notices.json"
"""File with the warnings of a step, for the report; missing if there are none."""
_SHARDS, _LEAST_SHARD_LINES, _MOST_SHARD_LINES = 100, 200, 2000
_SHARD_PAIRS = 10_000
"""Pairs of a shard of the alignment."""
_CORPUS = ("corpus/source.txt", "corpus/target.txt", "corpus/manifest.json")
_OF_MACHINE = {"threads", "device"}
_OF_RESULT = set(TranslationConfig.model_fields) - {"workers", *_OF_MACHINE}
"""Keys of a synthetic corpus on which its text depends."""


class _ModelStep(Step):
    """A step that makes a corpus with a model, which each worker opens."""

    outputs = _CORPUS
    is_job = True
    model: ModelName = "backward"
    _config: TranslationConfig | FilterStepConfig

    def __init__(self, context: PipelineContext, costs: Costs) -> None:
        self._context, self._costs = context, costs

    def machine(self) -> dict[str, Any]:
        """Return the settings of the machine, with `auto` resolved: all of a job runs on one kind of device."""
        found = dict(settings_of(self._config, include=_OF_MACHINE))
        if self._config.device != "auto":
            return found
        return {**found, "device": f"{AUTO}{usable_device('auto', 'device').type}"}

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of an existing model."""
        return model_files(self._context, self.model)

    def check(self) -> None:
        """Refuse a missing device, and decoding settings that contradict those of the model."""
        self._context.execution.check(self.name, self._config.device)
        try:
            job_decoding(decoding_of(self._context, self.model), self._decoding())
        except ConfigError as error:
            raise ConfigError(f"step {self.name}, with the {said(self.model)}: {error}") from None

    def _decoding(self) -> Mapping[str, Any]:
        """Return the keys of `decoding` that override those of the model."""
        return {}

    def _work(self, noun: str) -> Work:
        config, progress = self._config, Progress(self._context.say, noun)
        return self._context.execution.work(config.workers, config.threads, config.device, progress.show)


class _TranslationStep(_ModelStep):
    """A step that makes a synthetic corpus."""

    section: ClassVar[str]
    """Its section in the pipeline's file."""
    verb: ClassVar[str] = "translates"
    """Its action on text, for the title."""
    text: ClassVar[tuple[str, str]]
    """The step that makes the text, and the pattern of its files."""
    _config: TranslationConfig

    def __init__(self, context: PipelineContext, config: TranslationConfig, costs: Costs) -> None:
        super().__init__(context, costs)
        self._config = config
        self.title = f"{self.verb} text by the {said(self.model)}"
        self.settings = joined(settings_of(config, include=_OF_RESULT), self._candidates())
        step, files = self.text
        self.after = {step: [files], **of_model(context, self.model)}

    def _texts(self) -> list[Path]:
        return [self._context.at(*self.text)]

    def _references(self) -> list[Path]:
        """Return the files of its human translations, used to choose one of several candidates."""
        return []

    def _candidates(self) -> dict[str, Any]:
        """Return the number of candidates and how one of them is chosen; nothing if there is only one."""
        return {}

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of an existing model and of the shortlist that it translates with."""
        return super().inputs() | shortlists(self._context, self.model, changes=self._config.decoding)

    def cost(self) -> Expected:
        """Return the expected cost of translation."""
        config = self._config
        beam = config.decoding.get("beam_size", 4) if config.method in ("beam", "noised-beam") else 1
        beam = max(beam, self._candidates().get("n_best", 1))
        workers = self._context.execution.processes(config.workers, config.threads, config.device)
        return self._costs.translating(self.model, CorpusSizes(self._context).read(self.name), beam, workers)

    def progress(self) -> StepProgress | None:
        """Return the share of lines in finished shards."""
        return lines_done(self._context.at(self.name, "corpus"), "filtered", "lines")

    def _decoding(self) -> Mapping[str, Any]:
        return self._job(self._context.at(self.name)).settings()

    def _job(self, folder: Path) -> BackTranslationJob:
        config, texts = self._config, self._texts()
        return BackTranslationJob(
            models=(str(self._context.model(self.model)),),
            inputs=tuple(map(str, texts)),
            out=folder / "corpus",
            method=config.method,
            forward=self.model == "teacher",
            device=config.device,
            threads=config.threads,
            seed=config.seed,
            shard_lines=config.shard_lines or _shard_lines(texts),
            filters=PairFilter(config.max_pieces, config.max_ratio, config.ratio_slack),
            decoding=config.decoding,
            references=tuple(map(str, self._references())),
            **self._candidates(),
        )

    def work(self, folder: Path) -> int | None:
        """Translate the text, shard by shard."""
        context = self._context
        refuse_empty_stages(context)
        job = self._job(folder)
        with in_fresh_state():
            outcome = back_translate(job, self._work("lines"))
        if (report := outcome.report) is not None:
            context.say(f"{report.kept:,} pairs of {report.read:,} lines; dropped: {dropped_text(report.dropped)}")
            vocabularies = locate_weights(context.model(self.model))[1]
            if notice := drop_warning(report, job.filters, self.section, self._bitext(), vocabularies):
                context.say(f"warning: {notice}")
                write_document(folder / NOTICES, {"notices": [f"{self.name}: {notice}"]})
        return outcome.signal

    def _bitext(self) -> list[tuple[Path, Path]]:
        """Return the files of both sides of the bitext, those in the model's source language first."""
        sides = [self._context.sides("clean", "train", corpus) for corpus in self._context.bitext_names()]
        return [(target, source) for source, target in sides] if self.model == "backward" else sides


class BackTranslateStep(_TranslationStep):
    """The step that translates target-language text with the backward model."""

    name, section, verb = "backtranslate", "backtranslation", "back-translates"
    text = ("monolingual", "target.txt")


class DistilTextStep(_TranslationStep):
    """The step that translates source-language text with the teacher."""

    name, section, model = DISTILLED[1], "distillation", "teacher"
    text = ("monolingual", "source.txt")


class DistilStep(_TranslationStep):
    """The step that translates the bitext's source side with the teacher and keeps the candidate nearest the target."""

    name, section, model = DISTILLED[0], "distillation", "teacher"
    text = ("clean", "train/*")
    _config: DistillationConfig

    def __init__(self, context: PipelineContext, config: DistillationConfig, costs: Costs) -> None:
        super().__init__(context, config, costs)
        # Their order determines that of the result.
        self.settings = joined(self.settings, StepSettings({"corpora": context.bitext_names()}, {}))

    def _texts(self) -> list[Path]:
        return [source for source, _ in self._bitext()]

    def _references(self) -> list[Path]:
        return [target for _, target in self._bitext()] if self._config.n_best > 1 else []

    def _candidates(self) -> dict[str, Any]:
        config = self._config
        return {"n_best": config.n_best, "nearest": config.nearest} if config.n_best > 1 else {}


def _shard_lines(texts: Sequence[Path]) -> int:
    """Return the lines of a shard, a function only of the text, since the result depends on them.

    An interruption then loses only a small part of the whole, and progress is soon visible.
    """
    there = [path for path in texts if path.is_file()]  # at first, settings are checked without text
    return min(_MOST_SHARD_LINES, max(_LEAST_SHARD_LINES, count_lines(there) // _SHARDS))


class FilterStep(_ModelStep):
    """The step that drops the distilled pairs whose source the backward model finds least likely."""

    name, title = "filter", "drops distilled pairs that the backward model finds unlikely"
    _config: FilterStepConfig

    def __init__(
        self, context: PipelineContext, config: FilterStepConfig, distilled: DistillationConfig, costs: Costs
    ) -> None:
        super().__init__(context, costs)
        self._config, self._distilled, self._made = config, distilled, Corpora(context).translated()
        own = settings_of(config, exclude={"workers", *_OF_MACHINE})
        self.settings = joined(own, settings_of(distilled, include={"max_pieces"}))
        self.after = {**{step: ["corpus/*.txt"] for step in self._made}, **of_model(context, self.model)}

    def cost(self) -> Expected:
        """Return the expected cost of scoring."""
        return self._costs.scoring(CorpusSizes(self._context).read(self.name))

    def progress(self) -> StepProgress | None:
        """Return the share of pairs in finished shards."""
        return lines_done(self._context.at(self.name, "corpus"), "scored", "pairs")

    def work(self, folder: Path) -> int | None:
        """Score all pairs, shard by shard, and write the likely ones."""
        context, config = self._context, self._config
        corpora = [context.at(step, "corpus") for step in self._made]
        job = FilterJob(
            models=(str(context.model(self.model)),),
            sources=tuple(str(corpus / "source.txt") for corpus in corpora),
            targets=tuple(str(corpus / "target.txt") for corpus in corpora),
            out=folder / "corpus",
            keep=config.keep,
            max_pieces=self._distilled.max_pieces,
            reverse=True,
            device=config.device,
            threads=config.threads,
        )
        with in_fresh_state():
            outcome = filter_pairs(job, self._work("pairs"))
        if (report := outcome.report) is not None:
            context.say(f"{report.kept:,} of {report.read:,} pairs; dropped: {dropped_text(report.dropped)}")
        return outcome.signal


class AlignStep(Step):
    """The step that aligns the words of the student's corpora.

    It writes `links/CORPUS.links`, a line for each pair, such as `0-0 1-2`.
    """

    name, title = "align", "aligns the words of the student's corpora"
    outputs = ("links/*",)
    is_job = True

    def __init__(self, context: PipelineContext, how: AlignmentStepConfig) -> None:
        self._context, self._how, corpora = context, how, Corpora(context)
        self._chosen = corpora.train("student")
        self.settings = joined(settings_of(how), {"corpora": [corpus.name for corpus in self._chosen]})
        read = corpora.inputs("student")
        self.after = {step: patterns for step, patterns in read.items() if step not in (self.name, "sets")}

    def cost(self) -> Expected:
        """Return the expected cost of alignment."""
        return by_rate(CorpusSizes(self._context).of("student"), PAIRS_ALIGNED)

    def work(self, folder: Path) -> int | None:
        """Train one aligner on all corpora, since a small corpus has few words; align them with it, shard by shard."""
        context, how = self._context, self._how
        readers = [CorpusReader.of(one, f"student.{one.name}", context.languages) for one in self._chosen]
        watch = InputWatch()
        files = [watch.fingerprint(path) for reader in readers for part in reader.files for path in part]

        def blocks() -> Iterator[PairBlock]:
            return chain.from_iterable(reader.blocks() for reader in readers)

        def lines() -> Iterator[TextLine]:
            return (TextLine(source, (target,)) for block in blocks() for source, target in zip(*block, strict=True))

        def count() -> int:
            return sum(len(block[0]) for block in blocks())

        plan = fix_plan(folder / "job", "align", {**self.settings, "files": files}, watch, _SHARD_PAIRS, count)
        with made_once(plan, "aligner") as path:
            if not path.exists():
                write_atomically(path, self._trained(blocks(), plan.lines).content())
        merge = partial(_write_links, folder / "links", readers)
        work = context.execution.work(1, 1, "cpu", Progress(context.say, "pairs").show)
        outcome = run_text_job(plan, Aligning(str(path), how.symmetrise), lines, merge, work)
        if outcome.report is not None:
            discard(plan.folder)
        return outcome.signal

    def _trained(self, blocks: Iterator[PairBlock], pairs: int) -> Aligner:
        how, say = self._how, self._context.say
        options = TrainingOptions(how.model1_iterations, how.hmm_iterations, TrainingOptions().empty)

        def report(direction: str, iteration: int, likelihood: float) -> None:
            say(f"{direction}, iteration {iteration}: log-likelihood {likelihood:,.0f}")

        return Aligner.train(spread_pairs(blocks, pairs, how.pairs), "split", options, report)


def _write_links(folder: Path, readers: list[CorpusReader], shards: Iterator[bytes]) -> None:
    links = (line for content in shards for line in content.decode().splitlines())
    for reader in readers:
        found = (list(islice(links, len(source))) for source, _ in reader.blocks())
        write_side(folder / f"{reader.name}.links", found)


_USUALLY_KEPT = 0.9  # below this share of the lines, a notice says what may be wrong
_COMPARED = 20_000
"""Number of pairs of the bitext on which limits are tried: precise to a tenth of a percent in half a second."""
_OF_LIMITS = ("ratio", "too_long")


def drop_warning(
    report: Report, filters: PairFilter, section: str, bitext: Sequence[tuple[Path, Path]], vocabularies: Path
) -> str | None:
    """Return a notice on a corpus if many lines gave no pair; otherwise None.

    `section` is the section of the pipeline's file with the filters. `bitext` are the files of human pairs, those in
    the translated language first. `vocabularies` is the folder with the vocabularies of the translating model.
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
    # If human translations lose half as many, the limits are the cause: they should drop only a few of those.
    return f"{beside}: {'raise them' if 2 * human >= by_limits else 'the model may be weak'}"


def share_beyond(filters: PairFilter, bitext: Sequence[tuple[Path, Path]], vocabularies: Path) -> float | None:
    """Return the share of human pairs (the first ones of each corpus) beyond the limits; None if there are none."""
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
