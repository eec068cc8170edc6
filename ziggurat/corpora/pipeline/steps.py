"""The steps of a configuration, in their fixed order, without those of missing sections."""

from __future__ import annotations

from collections.abc import Iterator

from ziggurat.config.pipeline import MODELS, ModelName
from ziggurat.corpora.pipeline.cleaning import CleanStep
from ziggurat.corpora.pipeline.context import PipelineContext
from ziggurat.corpora.pipeline.corpora import (
    FetchStep,
    MonolingualStep,
    SetsStep,
    fetched_names,
    refuse_repeated_texts,
)
from ziggurat.corpora.pipeline.costs import CorpusSizes, Costs
from ziggurat.corpora.pipeline.engine import TIMES, Pipeline
from ziggurat.corpora.pipeline.evaluation import EvaluateStep, ReportStep
from ziggurat.corpora.pipeline.models import (
    ExportStep,
    ShortlistStep,
    experiment_of,
    refuse_any_language,
    refuse_other_direction,
    refuse_tags_alone,
    with_pruned_student,
)
from ziggurat.corpora.pipeline.step import Step
from ziggurat.corpora.pipeline.synthesis import AlignStep, BackTranslateStep, DistilStep, DistilTextStep, FilterStep
from ziggurat.corpora.pipeline.training import DataStep, QuantiseStep, TrainStep


def pipeline_of(context: PipelineContext) -> Pipeline:
    """Return the pipeline of a configuration. Raises ConfigError."""
    return Pipeline(context.folder, steps_of(context))


def steps_of(context: PipelineContext) -> list[Step]:
    """Return the steps of a configuration, in order.

    Raises as `refuse_repeated_texts`, `refuse_other_direction`, `refuse_tags_alone`, `refuse_any_language` and
    `with_pruned_student` do.
    """
    refuse_repeated_texts(context)
    refuse_other_direction(context)
    refuse_tags_alone(context)
    refuse_any_language(context)
    context = with_pruned_student(context)
    steps = list(_steps(context))
    return [*steps, ReportStep(context, steps, context.folder / TIMES)]


def _steps(context: PipelineContext) -> Iterator[Step]:
    """Yield all steps except the report, each after its dependencies."""
    config = context.config
    there: list[ModelName] = [name for name in MODELS if getattr(config, name) is not None]
    existing = {name: context.model(name) for name in there if getattr(config, name).existing is not None}
    trained = [name for name in there if name not in existing]
    pruned = config.student is not None and config.student.without_layers is not None
    costs = Costs(
        {name: experiment_of(context, name) for name in trained}, CorpusSizes(context), existing, pruned=pruned
    )

    def model(name: ModelName) -> Iterator[Step]:
        if name in trained:
            yield DataStep(context, name)
            yield TrainStep(context, name, costs)

    if fetched_names(context):
        yield FetchStep(context)
    if config.bitext.dev or config.test:
        yield SetsStep(context)
    yield CleanStep(context)
    if config.monolingual.source or config.monolingual.target:
        yield MonolingualStep(context)
    yield from model("backward")
    if config.backtranslation is not None:
        yield BackTranslateStep(context, config.backtranslation, costs)
    yield from model("teacher")
    if config.distillation is not None:
        if config.distillation.bitext:
            yield DistilStep(context, config.distillation, costs)
        if config.distillation.monolingual and config.monolingual.source:
            yield DistilTextStep(context, config.distillation, costs)
        if config.filter is not None:
            yield FilterStep(context, config.filter, config.distillation, costs)
    if config.alignment is not None:
        yield AlignStep(context, config.alignment)
    yield from model("student")
    if config.quantisation is not None:
        yield QuantiseStep(context, config.quantisation.updates, costs)
    if config.shortlist is not None:
        yield ShortlistStep(context, config.shortlist)
    for to, target in context.exports().items():
        yield ExportStep(context, to, target)
    if config.evaluation is not None:
        yield EvaluateStep(context, config.evaluation, costs)
