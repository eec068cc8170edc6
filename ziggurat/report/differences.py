"""Which settings runs differ in, and which were set away from the defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ziggurat.config import Experiment

__all__ = ["Setting", "differing", "set_away"]


@dataclass(frozen=True)
class Setting:
    """One key of the configuration.

    Attributes:
        key: such as `model.encoder.layers`.
        values: one for each run (`set_away`: the default, then the run's), as YAML would show it.
    """

    key: str
    values: tuple[str, ...]


def differing(experiments: Sequence[Experiment]) -> list[Setting]:
    """Return the settings that are not the same in all of `experiments`."""
    flat = [_flat(experiment.model_dump(mode="json")) for experiment in experiments]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [Setting(key, tuple(_shown(one, key) for one in flat)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def set_away(experiment: Experiment) -> list[Setting]:
    """Return the settings of one experiment that are not the defaults; corpora and languages have none."""
    data = {
        key: getattr(experiment.data, key)
        for key, field in type(experiment.data).model_fields.items()
        if field.is_required()
    }
    return differing([Experiment(data=type(experiment.data)(**data)), experiment])


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def _shown(flat: Mapping[str, Any], key: str) -> str:
    if key not in flat:
        return "–"
    value = flat[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
