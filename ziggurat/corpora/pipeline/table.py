"""The steps of a configuration, in their fixed order; those of sections that are left out are not there."""

from __future__ import annotations

from collections.abc import Iterator

from ziggurat.config.pipeline import MODELS, ModelName
from ziggurat.corpora.pipeline.alignment import align_step
from ziggurat.corpora.pipeline.cleaning import clean_step
from ziggurat.corpora.pipeline.corpora import fetch_step, fetched_names, refuse_repeated_texts, sets_step
from ziggurat.corpora.pipeline.costs import Amounts, Costs
from ziggurat.corpora.pipeline.engine import TIMES, Pipeline
from ziggurat.corpora.pipeline.evaluation import evaluate_step
from ziggurat.corpora.pipeline.models import (
    experiment_of,
    export_steps,
    quantise_step,
    refuse_other_direction,
    shortlist_step,
    train_step,
    with_pruned_student,
)
from ziggurat.corpora.pipeline.monolingual import monolingual_step
from ziggurat.corpora.pipeline.road import Road
from ziggurat.corpora.pipeline.step import Step
from ziggurat.corpora.pipeline.store import data_step
from ziggurat.corpora.pipeline.summary import report_step
from ziggurat.corpora.pipeline.synthesis import backtranslate_step, distil_steps, filter_step
from ziggurat.corpora.pipeline.tags import refuse_any_language, refuse_tags_alone


def pipeline_of(road: Road) -> Pipeline:
    """Return the pipeline of a configuration. Raises ConfigError."""
    return Pipeline(road.folder, steps_of(road))


def steps_of(road: Road) -> list[Step]:
    """Return the steps of a configuration, in order.

    Raises as `refuse_repeated_texts`, `refuse_other_direction`, `refuse_tags_alone`, `refuse_any_language` and
    `with_pruned_student` do.
    """
    refuse_repeated_texts(road)
    refuse_other_direction(road)
    refuse_tags_alone(road)
    refuse_any_language(road)
    road = with_pruned_student(road)
    steps = list(_steps(road))
    return [*steps, report_step(road, steps, road.folder / TIMES)]


def _steps(road: Road) -> Iterator[Step]:
    """Yield all steps but the report, each after those that it depends on."""
    config = road.config
    there: list[ModelName] = [name for name in MODELS if getattr(config, name) is not None]
    existing = {name: road.model(name) for name in there if getattr(config, name).existing is not None}
    trained = [name for name in there if name not in existing]
    pruned = config.student is not None and config.student.without_layers is not None
    costs = Costs({name: experiment_of(road, name) for name in trained}, Amounts(road), existing, pruned=pruned)

    def model(name: ModelName) -> Iterator[Step]:
        if name in trained:
            yield data_step(road, name)
            yield train_step(road, name, costs)

    if fetched_names(road):
        yield fetch_step(road)
    if config.bitext.dev or config.test:
        yield sets_step(road)
    yield clean_step(road)
    if config.monolingual.source or config.monolingual.target:
        yield monolingual_step(road)
    yield from model("backward")
    if config.backtranslation is not None:
        yield backtranslate_step(road, config.backtranslation, costs)
    yield from model("teacher")
    if config.distillation is not None:
        yield from distil_steps(road, config.distillation, costs)
    if config.filter is not None:
        yield filter_step(road, config.filter, costs)
    if config.alignment is not None:
        yield align_step(road, config.alignment)
    yield from model("student")
    if config.quantisation is not None:
        yield quantise_step(road, config.quantisation.updates, costs)
    if config.shortlist is not None:
        yield shortlist_step(road, config.shortlist)
    yield from export_steps(road)
    if config.evaluation is not None:
        yield evaluate_step(road, config.evaluation)
