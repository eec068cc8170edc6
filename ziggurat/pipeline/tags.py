"""The check that models learn from text without a tag where such text is translated, or what they are judged by."""

from __future__ import annotations

from collections.abc import Iterator

from ziggurat.config.pipeline import BITEXT, ModelName
from ziggurat.errors import ConfigError
from ziggurat.pipeline.export import final_model
from ziggurat.pipeline.road import Corpora, Road

__all__ = ["refuse_tags_alone"]

_MODELS: tuple[ModelName, ...] = ("teacher", "student")  # the backward model reads the other side, which has no tags


def refuse_tags_alone(road: Road) -> None:
    """Raise ConfigError where a model is to read text without a tag, and every corpus that it learns from has one.

    Tags are of training corpora and of development sets; what is held out, distilled or a test set has none.
    """
    for name in _MODELS:
        chosen = getattr(road.config, name)
        if chosen is None or chosen.existing is not None or BITEXT not in road.config.weights(name):
            continue
        learns_untagged = any(corpus.tag is None for corpus in Corpora(road).train(name))
        if not learns_untagged and (reader := next(_readers_without_tag(road, name), None)) is not None:
            raise ConfigError(
                f"`bitext.train.0.tag`: each corpus that the {name} learns from has a tag, so it would never see a "
                f"sentence without one, as `{reader}` has them; leave out the `tag` of one corpus at least"
            )


def _readers_without_tag(road: Road, name: ModelName) -> Iterator[str]:
    """Yield the keys by which a model is given sentences without a tag."""
    config = road.config
    for number, corpus in enumerate(Corpora(road).dev(name)):
        if corpus.tag is None:
            yield f"bitext.dev.{number}" if number < len(config.bitext.dev) else "bitext.hold_out.dev"
    if name == "teacher" and config.distillation is not None:
        yield "distillation"
    if config.evaluation is not None:
        yield "evaluation"
    if name == final_model(road)[0]:
        for to, target in config.export or ():
            if target is not None and target.tolerance is not None:
                yield f"export.{to}.tolerance"
