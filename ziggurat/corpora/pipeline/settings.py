"""Settings of a step as its manifest keeps them: all of them, so that a default that changed is seen.

A setting that came with a later version is not in the manifests of an earlier one. Where it has its default, that is no
change: what came without it is as before, or the step's number is raised (`Step.version`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ziggurat.config.base import Section
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
