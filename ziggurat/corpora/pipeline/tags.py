"""The checks that models know what to make of text without a tag, where they are given such text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ziggurat.config.pipeline import BITEXT, MODELS, ModelName
from ziggurat.corpora.pipeline.models import experiment_there, final_model, said
from ziggurat.corpora.pipeline.road import Corpora, Road
from ziggurat.data.subword import load_tokenizers
from ziggurat.data.vocabulary import several_languages
from ziggurat.system.errors import CheckpointError, ConfigError, DataError

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


def refuse_any_language(road: Road) -> None:
    """Raise ConfigError where a model whose tags name several languages is to read text without a tag.

    It would write in whatever language. A model that is missing is told by the steps that use it.
    """
    for name in MODELS:
        chosen = getattr(road.config, name)
        if chosen is None:
            continue
        known: list[str] = []
        if chosen.existing is None:
            known = list(dict.fromkeys(corpus.tag for corpus in Corpora(road).train(name) if corpus.tag is not None))
        else:
            with contextlib.suppress(CheckpointError, DataError):
                known = list(load_tokenizers(experiment_there(road, name)[1])[0].tags)
        if (languages := several_languages(known)) and (reader := next(_uses(road, name), None)) is not None:
            key = "bitext.train" if chosen.existing is None else f"{name}.existing"
            raise ConfigError(
                f"`{key}`: the tags of the {said(name)} name several languages ({languages}), and `{reader}` gives it "
                "sentences without one, which it would translate into whatever language; take a model of one language, "
                "or make its corpus beforehand (`ziggurat backtranslate --model-tag TAG`) and give that as `bitext`"
            )


def _readers_without_tag(road: Road, name: ModelName) -> Iterator[str]:
    """Yield the keys by which a model is given sentences without a tag."""
    config = road.config
    for number, corpus in enumerate(Corpora(road).dev(name)):
        if corpus.tag is None:
            yield f"bitext.dev.{number}" if number < len(config.bitext.dev) else "bitext.hold_out.dev"
    yield from _uses(road, name)


def _uses(road: Road, name: ModelName) -> Iterator[str]:
    """Yield the keys by which a model that is trained is given sentences, none of which has a tag."""
    config = road.config
    if name == "backward":
        yield from (key for key in ("backtranslation", "filter") if getattr(config, key) is not None)
        return
    if name == "teacher" and config.distillation is not None:
        yield "distillation"
    if config.evaluation is not None:
        yield "evaluation"
    if name == final_model(road)[0]:
        for to, target in config.export or ():
            if target is not None and target.tolerance is not None:
                yield f"export.{to}.tolerance"
