"""The base of every configuration section: frozen, typed, no unknown keys, and no number without a bound.

Every number has one of the types here, or a bound in its own `Field`. An absurd value (a size beyond any memory, a seed
beyond 64 bits) is then rejected at once with its key, not hours later by some library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(le=10**12)]
"""Count is for numbers that are only compared: updates, epochs, validations."""
Size = Annotated[int, Field(le=2**31 - 1)]
"""Size is for total tokens or pairs; the product of two fits into 64 bits."""
Layers = Annotated[int, Field(le=4096)]
"""Layers is the depth of a stack, up to four times the deepest one published (DeepNet, 1,000)."""
Width = Annotated[int, Field(le=2**20)]
"""Width is for one side of a matrix: widths, heads, positions."""
Length = Annotated[int, Field(le=2**20)]
"""Length is for the tokens of one sentence."""
Beams = Annotated[int, Field(le=10_000)]
"""Beams is for hypotheses, samples or segmentations of one sentence."""
Vocabulary = Annotated[int, Field(le=10_000_000)]
"""Vocabulary is for the pieces of a vocabulary."""
Seed = Annotated[int, Field(lt=2**64)]
"""Seed is for seeds, in the range of torch's generators."""
Threads = Annotated[int, Field(le=1024)]
"""Threads is for a process's threads; the operating system kills a process with many more."""
Minutes = Annotated[float, Field(le=10_000_000)]
"""Minutes is for time spans, up to 19 years."""
Real = Annotated[float, Field(le=1e9)]
"""Real is for other real numbers."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""Fraction is for a share or probability below 1."""

_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


def _without_variables(path: str) -> str:
    """Return `path`. Raises ValueError if it contains `$HOME` or the like, unless a file has exactly that name."""
    # Left as text, `$HOME` would create a folder of that name. Expanded, the same file would mean something different
    # to each user, and an untrusted file could read the environment.
    if (found := _VARIABLE.search(path)) and not os.path.lexists(path):
        raise ValueError(
            f"`{found[0]}` is not expanded here as in a shell; write the path itself, or `~/` for your home folder"
        )
    return path


PathText = Annotated[str, AfterValidator(_without_variables)]
"""PathText is a path or glob in the configuration; a leading `~/` is the home folder of the current user."""


class Section(BaseModel):
    """A frozen part of the configuration. Field docstrings are the user's reference (`ziggurat explain`)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def inner_section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section class inside a field's annotation (None if none), and whether it is a list of them."""
    if isinstance(annotation, type) and not get_args(annotation):
        return (annotation, False) if issubclass(annotation, BaseModel) else (None, False)
    for argument in get_args(annotation):
        inner, _ = inner_section(argument)
        if inner is not None:
            return inner, get_origin(annotation) is list
    return None, False


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` updated by `new`: mappings are joined, anything else is replaced."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        result[key] = joined(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result
