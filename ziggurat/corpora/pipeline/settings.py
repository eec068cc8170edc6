"""Settings of a step as its manifest keeps them: all of them, so that a default that changed is seen.

A setting that came with a later version is not in the manifests of an earlier one. Where it has its default, that is no
change: what came without it is as before, or the step's number is raised (`Step.version`).

Places of files in the configuration of a store or a training, where only what the files hold matters.

That they hold the same is known by the manifests of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ziggurat.config.base import Section
from ziggurat.config.data import CorpusConfig
from ziggurat.config.experiment import Experiment
from ziggurat.system.errors import CheckpointError
from ziggurat.system.yaml_text import changed


class Settings(dict[str, Any]):
    """All settings by key, and which of them are not the default.

    Args:
        content: all of them.
        given: those that are not the default.
    """

    def __init__(self, content: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.given = given


def settings_of(section: Section, *, include: Any = None, exclude: Any = None) -> Settings:
    """Return the settings of a section, or of the keys that are chosen as by pydantic's `model_dump`."""
    dumped = partial(section.model_dump, mode="json", include=include, exclude=exclude)
    return Settings(dumped(), dumped(exclude_defaults=True))


def joined(*parts: Mapping[str, Any]) -> Settings:
    """Return the settings of several parts together; what is not of a section counts as given."""
    return Settings(
        {key: value for part in parts for key, value in part.items()},
        {key: value for part in parts for key, value in _given(part).items()},
    )


def settings_changed(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every setting that differs from what a manifest says."""
    return changed(_completed(before, now, _given(now)), dict(now))


def _given(settings: Any) -> Any:
    """Return settings without those that are the default."""
    if isinstance(settings, Settings):
        return settings.given
    if isinstance(settings, Mapping):
        return {key: _given(value) for key, value in settings.items()}
    return [_given(value) for value in settings] if isinstance(settings, list) else settings


def _completed(before: Any, now: Any, given: Any) -> Any:
    """Return the settings of a manifest with those that it does not know where they are the default now."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        inside = given if isinstance(given, Mapping) else {}
        known = {key: _completed(value, now.get(key), inside.get(key)) for key, value in before.items()}
        return known | {key: value for key, value in now.items() if key not in before and key not in inside}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        items = given if isinstance(given, list) and len(given) == len(now) else [None] * len(now)
        return [_completed(*parts) for parts in zip(before, now, items, strict=True)]
    return before


_OF_CORPUS = ("source", "target", "path", "alignment")
_OF_SUBWORD = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")
"""Keys whose values are places of files."""


def without_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped section `data` with only whether there are files in place of where they are."""
    kept = {**data, "store": None, "subword": _hidden(data["subword"], _OF_SUBWORD)}
    return kept | {split: [_hidden(corpus, _OF_CORPUS) for corpus in data[split]] for split in ("train", "dev")}


def _hidden(content: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {**content, **{key: content.get(key) is not None for key in keys}}


def as_begun(run: Path, experiment: Experiment) -> Experiment:
    """Return an experiment with the places of files by which its training, in the folder `run`, was begun.

    A run with checkpoints refuses any others, since it cannot tell whether they hold the same; the manifest of the step
    can. None of these files is read any more then: a run goes on from the store and its checkpoint. Without a
    checkpoint it begins with `training.start_from`, so there the present places stay.
    """
    from ziggurat.model.run_folder import checkpoint_folders, read_meta

    for folder in reversed(checkpoint_folders(run)):
        try:
            kept = read_meta(folder)["configuration"]
        except CheckpointError:
            continue  # damaged; the configuration of the one before is the same
        return _placed(experiment, kept)
    return experiment


def _placed(experiment: Experiment, kept: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the places of `kept`, a whole configuration."""
    data, training = experiment.data, experiment.training
    subword = data.subword.model_copy(update=_places(data.subword.model_dump(), kept["data"]["subword"], _OF_SUBWORD))
    corpora = {split: _corpora(getattr(data, split), kept["data"][split]) for split in ("train", "dev")}
    start = _places(training.model_dump(), kept["training"], ("start_from",))
    return experiment.model_copy(
        update={
            "data": data.model_copy(update={**corpora, "subword": subword}),
            "training": training.model_copy(update=start),
        }
    )


def _corpora(now: Sequence[CorpusConfig], before: Sequence[Mapping[str, Any]]) -> list[CorpusConfig]:
    if len(now) != len(before):
        return list(now)
    return [
        corpus.model_copy(update=_places(corpus.model_dump(), kept, _OF_CORPUS))
        for corpus, kept in zip(now, before, strict=True)
    ]


def _places(now: Mapping[str, Any], before: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the former values of `keys` that both have; one that only one of them has is another setting."""
    return {key: before[key] for key in keys if before.get(key) is not None and now[key] is not None}
