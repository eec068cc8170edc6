"""The axes of the model, and arrays of configurations that cover every pair or triple of their values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any, get_args

from pydantic import ValidationError

from ziggurat.config.kinds import (
    Activation,
    DecoderAttentionKind,
    EncoderAttentionKind,
    HistoryKind,
    InitKind,
    MemoryKind,
    NormKind,
    PositionKind,
    ResidualKind,
)
from ziggurat.config.model import ModelConfig
from ziggurat.system.errors import ConfigError

Choice = tuple[str, Any]

AXES: dict[str, list[Any]] = {
    "residual": list(get_args(ResidualKind)),
    "encoder.history": list(get_args(HistoryKind)),
    "decoder.history": list(get_args(HistoryKind)),
    "decoder.attention": list(get_args(DecoderAttentionKind)),
    "encoder.attention": list(get_args(EncoderAttentionKind)),
    "memory": list(get_args(MemoryKind)),
    "init.kind": list(get_args(InitKind)),
    "embedding.positions": list(get_args(PositionKind)),
    "activation": list(get_args(Activation)),
    "norm": list(get_args(NormKind)),
    "attention.qk_norm": ["none", "layer", "rms", "l2"],
    "combination.unit": ["layer", "sublayer"],
    "combination.norm": ["auto", "sources", "consumers", "none"],
    "embedding.sharing": ["all", "decoder", "none"],
    "embedding.unit_length": [False, True],
    "wiring.gpas": [False, True],
    "attention.value_norm": ["none", "layer", "rms"],
    "attention.value_residual": ["none", "half", "learned", "single"],
    "attention.cross_value_residual": ["none", "half", "learned", "single"],
    "encoder.ranges": ["none", "post"],
    "decoder.ranges": ["none", "peri"],
    "transfer": ["none", "base"],
    "encoder.solver": ["euler", "rk2_gated", "rk4"],
    "encoder.tied_layers": ["none", "groups"],
    "decoder.tied_layers": ["none", "groups"],
}
"""AXES maps an axis to its values. `family: rnmt` combines with few of them (refused_by_rnmt) and has its own tests."""

WRITTEN: dict[str, dict[str, Any]] = {
    "encoder.ranges": {"none": [], "post": [{"layers": 1, "residual": "post"}]},
    "decoder.ranges": {"none": [], "peri": [{"layers": 1, "residual": "peri"}]},
    "encoder.tied_layers": {"none": [], "groups": [1, 2, 2]},
    "decoder.tied_layers": {"none": [], "groups": [1, 2, 2]},
    "transfer": {"none": None, "base": {"width": 8, "encoder_layers": 2, "decoder_layers": 2}},
}
"""WRITTEN maps an axis and the name of a value to what a configuration has there, for axes whose values are
sections.
"""

SMALL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "heads": 2,
    "encoder": {"layers": 3},
    "decoder": {"layers": 3},
    "combination": {"period": 2},
    "wiring": {"streams": 2},
    "dropout": {"residual": 0.1, "attention": 0.1, "activation": 0.1, "embedding": 0.1},
}


def model(choices: dict[str, Any]) -> ModelConfig:
    """Return a small model with these values on its axes. Raises pydantic.ValidationError if they are refused."""
    content: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in SMALL.items()}
    for path, value in choices.items():
        at = content
        *sections, key = path.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = WRITTEN[path][value] if path in WRITTEN and isinstance(value, str) else value
    return ModelConfig.model_validate(content)


def refusal(choices: dict[str, Any]) -> ConfigError | None:
    """Return why these choices are refused, or None."""
    try:
        model(choices)
    except ValidationError as error:
        found = error.errors()[0]
        return found["ctx"]["error"] if found["type"] == "value_error" else ConfigError(found["msg"])
    return None


@cache
def refused_pairs() -> dict[tuple[Choice, Choice], str]:
    """Return every pair of values that is refused regardless of the other axes, with the reason."""
    refused = {}
    for (a, a_values), (b, b_values) in combinations(AXES.items(), 2):
        for x, y in product(a_values, b_values):
            if _completed({a: x, b: y}) is None:
                refused[(a, x), (b, y)] = str(refusal({a: x, b: y}))
    return refused


@cache
def refused_by_rnmt() -> dict[Choice, str]:
    """Return every value of an axis that `family: rnmt` refuses, with the reason."""
    rnmt = {"family": "rnmt", "embedding.positions": "none", "embedding.sharing": "none", "dropout.activation": 0.0}
    choices = {(axis, value): refusal({**rnmt, axis: value}) for axis, values in AXES.items() for value in values}
    return {choice: str(reason) for choice, reason in choices.items() if reason is not None}


def covering(size: int) -> Iterator[dict[str, Any]]:
    """Yield configurations such that every buildable choice of values on any `size` axes is in one of them.

    The algorithm is greedy: each configuration starts from a choice not yet covered and takes, axis by axis, the value
    that covers most.
    """
    open_choices = {
        tuple(zip(axes, values, strict=True))
        for axes in combinations(AXES, size)
        for values in product(*(AXES[axis] for axis in axes))
    }
    for seed in sorted(open_choices, key=str):
        if seed not in open_choices:
            continue
        open_choices.discard(seed)
        chosen = _completed(dict(seed))
        if chosen is None:
            continue
        for axis, values in AXES.items():
            if axis in chosen:
                continue
            ranked = sorted(values, key=lambda v: -_covered(open_choices, chosen, axis, v, size))
            chosen[axis] = next(v for v in ranked if refusal({**chosen, axis: v}) is None)
        for axes in combinations(AXES, size):
            open_choices.discard(tuple((axis, chosen[axis]) for axis in axes))
        yield chosen


def _completed(choices: dict[str, Any]) -> dict[str, Any] | None:
    """Return `choices` with what they need to be valid, or None if nothing makes them valid."""
    if refusal(choices) is None:
        return choices
    needed = {"residual": "admin"} if choices.get("init.kind") == "admin" and "residual" not in choices else {}
    repaired = {**choices, **needed}
    return repaired if refusal(repaired) is None else None


def _covered(open_choices: set[tuple[Choice, ...]], chosen: dict[str, Any], axis: str, value: Any, size: int) -> int:
    order = list(AXES)
    count = 0
    for others in combinations(chosen, size - 1):
        axes = sorted((*others, axis), key=order.index)
        count += tuple((a, value if a == axis else chosen[a]) for a in axes) in open_choices
    return count
