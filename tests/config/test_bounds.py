"""Configurations from strangers: absurdly large numbers, and text made to exhaust memory or time."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.system.errors import ConfigError

MINIMAL = "data: {source_language: de, target_language: en, store: s}\n"
ABSURD = (10**30, -(10**30), 10**400, -(10**400), float("nan"), float("inf"), float("-inf"))
GIVEN = {
    "training.growth.stages": [{"layers": 2, "updates": 5}],
    "model.encoder.ranges": [{"layers": 2, "residual": "post"}],
    "model.decoder.ranges": [{"layers": 2, "residual": "post"}],
    "data.stages": [{"mix": {"a": 1}, "until": {"corpus": "a"}}],
    "data.train": [{"path": "a.tsv"}],
    "data.dev": [{"path": "a.tsv"}],
    "data.train.0.scores": [{"path": "scores", "min": 0}],
    "data.dev.0.scores": [{"path": "scores", "min": 0}],
}


def numbers(section: type[BaseModel] = Experiment, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every key that takes a number, dotted, and how to put a number there (inside a list, for example)."""
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        for kind, wrap in leaves(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, (*path, "0") if wrap == "list" else path)
            elif kind in (int, float):
                yield ".".join(path), wrap


def leaves(annotation: Any, wrap: str = "") -> Iterator[tuple[Any, str]]:
    origin = get_origin(annotation)
    if origin is None:
        yield annotation, wrap
    elif origin in (list, tuple):
        for inner in get_args(annotation):
            yield from leaves(inner, origin.__name__)
    else:
        for inner in get_args(annotation):
            if isinstance(inner, type) or get_origin(inner) is not None:
                yield from leaves(inner, wrap)


NUMBERS = sorted(set(numbers()))


def put(path: str, value: Any) -> dict[str, Any]:
    content: Any = {"data": {"source_language": "de", "target_language": "en", "store": "s"}}
    at, steps = content, path.split(".")
    for depth, step in enumerate(steps[:-1]):
        inside = ".".join(steps[: depth + 1])
        at = at[int(step)] if step.isdecimal() else at.setdefault(step, deepcopy(GIVEN.get(inside, {})))
    at[steps[-1]] = value
    return content  # type: ignore[no-any-return]


def test_every_number_is_walked() -> None:
    paths = {path for path, _ in NUMBERS}
    assert len(paths) > 130
    assert {"training.seed", "training.optimiser.betas", "data.train.0.columns", "training.recompute.encoder"} <= paths
    assert {"training.growth.stages.0.updates", "data.subword.regularisation.nbest"} <= paths


@pytest.mark.parametrize(("path", "wrap"), NUMBERS)
def test_no_number_is_without_a_bound(path: str, wrap: str) -> None:
    plain = Experiment.model_validate({"data": put("x", 0)["data"]})
    for value in ABSURD:
        content = put(path, [value, value] if wrap else value)
        with pytest.raises(ConfigError) as error:
            change_section(plain, content, "x")
        assert path in str(error.value), (value, str(error.value))
        assert len(str(error.value)) < 2000
