"""Layers of a trained model that are left out (Fan et al. 2019): their names, whether that is possible, what is left.

The weights follow in ziggurat.model.depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ziggurat.config.kinds import RESIDUALS
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.system.errors import ConfigError, Problem, printable

_MOST = 1 << 20
"""Layers that are named one by one; no model has so many."""
_PART = re.compile(r"(encoder|decoder)\.(\d{1,9})(?:-(\d{1,9}))?")


class LeftOut(NamedTuple):
    """Numbers of the layers to leave out, from 1."""

    encoder: frozenset[int] = frozenset()
    decoder: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str, key: str = "--without-layers ") -> LeftOut:
        """Return the layers that `encoder.5-8,decoder.3` names. Raises ConfigError, with `key` before the text."""
        found: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
        for part in text.split(","):
            match = _PART.fullmatch(part.strip())
            first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
            if match is None or not 1 <= first <= last:
                raise ConfigError(
                    f"`{key}{printable(text)}`: `{printable(part)}` names no layers; write `encoder.5` or "
                    "`encoder.5-8`, separated by commas; the lowest layer is 1"
                )
            # Beyond any model the last alone: it says later on that there is no such layer.
            found[match[1]] |= {*range(first, min(last, _MOST) + 1), last}
        return cls(*map(frozenset, found.values()))

    def names(self) -> list[str]:
        """Return the names of the layers, such as `decoder.3`, in order."""
        return [f"{stack}.{number}" for stack in ("encoder", "decoder") for number in sorted(self.of(stack))]

    def of(self, stack: str) -> frozenset[int]:
        """Return those of one stack."""
        return self.decoder if stack == "decoder" else self.encoder


def unprunable(config: ModelConfig, left_out: LeftOut) -> list[Problem]:
    """Return why the model cannot do without these layers; nothing when it can."""
    if config.family != "transformer":
        none = f"`model.family: {config.family}` has no layers that could be left out"
        return [Problem("model.family", none)]
    return [problem for stack in ("encoder", "decoder") for problem in _problems(config, stack, left_out.of(stack))]


def _problems(config: ModelConfig, stack: str, numbers: frozenset[int]) -> Iterator[Problem]:
    if not numbers:
        return
    decoder = stack == "decoder"
    section, kinds = (config.decoder if decoder else config.encoder), config.residuals(decoder=decoder)
    if (last := max(numbers)) > section.layers:
        yield Problem(f"model.{stack}.layers", f"the {stack} has {section.layers} layers, no layer {last}")
        return
    left = [kind for number, kind in enumerate(kinds, start=1) if number not in numbers]
    if not left:
        yield Problem(f"model.{stack}.layers", f"nothing would be left of the {stack}")
        return
    if section.history != "latest":
        weights = f"`{stack}.history: {section.history}` has weights for the outputs of all layers"
        yield Problem(f"model.{stack}.history", weights)
    if counting := sorted({kind for kind in kinds if RESIDUALS[kind].layer_constants}):
        number = f"`residual: {counting[0]}` computes with the number of a layer, which would change for those above"
        yield Problem("model.residual", number)
    if 1 in numbers and RESIDUALS[kinds[0]].first_differs:
        yield Problem("model.residual", f"`residual: {kinds[0]}` has a first layer unlike the others")
    if 1 in numbers and (residuals := config.value_residuals(decoder=decoder)):
        key = next(iter(residuals))
        yield Problem(f"model.{key}", f"`{key}`: all layers read the values of the first")
    if (kinds[0], kinds[-1]) != (left[0], left[-1]):
        ends = (
            f"the {stack} begins and ends as its first and its last layers do, and no layer of one kind would be left"
        )
        yield Problem(f"model.{stack}.ranges", ends)


def pruned_config(config: ModelConfig, left_out: LeftOut) -> ModelConfig:
    """Return the architecture without some layers; constants of depth stay those of the whole model.

    Raises ConfigError with all reasons why that is not possible.
    """
    if problems := unprunable(config, left_out):
        keys = [problem.key for problem in problems]
        raise ConfigError(f"layers cannot be left out: {'; '.join(map(str, problems))}", key=keys[0], named=keys[1:])
    values = config.model_dump()
    if config.depth_matters:
        values["wiring"] |= {
            "planned_encoder_layers": config.planned_encoder_layers,
            "planned_decoder_layers": config.planned_decoder_layers,
        }
    for stack, section in (("encoder", config.encoder), ("decoder", config.decoder)):
        left = layers_left(config, stack, left_out)
        values[stack] |= {"layers": len(left), "ranges": _ranges(section, left)}
    return ModelConfig.model_validate(values)


def layers_left(config: ModelConfig, stack: str, left_out: LeftOut) -> list[int]:
    """Return the numbers of the layers of a stack that are not left out, from 1."""
    section = config.decoder if stack == "decoder" else config.encoder
    return [number for number in range(1, section.layers + 1) if number not in left_out.of(stack)]


def _ranges(section: StackConfig, left: list[int]) -> list[dict[str, object]]:
    """Return `ranges` for the layers with the numbers `left`."""
    ranges: list[dict[str, object]] = []
    first = 1
    for part in section.ranges:
        layers = sum(first <= number < first + part.layers for number in left)
        first += part.layers
        if layers:
            ranges.append({"layers": layers, "residual": part.residual})
    return ranges
