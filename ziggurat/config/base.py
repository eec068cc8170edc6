"""The base of every configuration section: frozen, typed, no unknown keys, and no number without a bound.

A number belongs to one of the types here (or is bounded by its own `Field`), so that an absurd one is refused with its
key, and not by the library that meets it hours later: sizes that no memory holds, seeds beyond 64 bits.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = [
    "Beams",
    "Count",
    "Layers",
    "Length",
    "Minutes",
    "PathText",
    "Real",
    "Section",
    "Seed",
    "Share",
    "Size",
    "Threads",
    "Vocabulary",
    "Width",
]

Count = Annotated[int, Field(le=10**12)]
"""Of what is only compared with: updates, epochs, validations."""
Size = Annotated[int, Field(le=2**31 - 1)]
"""Tokens or pairs together; a product of two fits into 64 bits."""
Layers = Annotated[int, Field(le=4096)]
"""Layers of a stack: four times the deepest ones published (DeepNet, 1,000)."""
Width = Annotated[int, Field(le=2**20)]
"""One side of a matrix: widths, heads, positions."""
Length = Annotated[int, Field(le=2**20)]
"""Tokens of one sentence."""
Beams = Annotated[int, Field(le=10_000)]
"""Hypotheses, samples or segmentations of one sentence."""
Vocabulary = Annotated[int, Field(le=10_000_000)]
"""Pieces of a vocabulary."""
Seed = Annotated[int, Field(lt=2**64)]
"""What torch's generators take."""
Threads = Annotated[int, Field(le=1024)]
"""Threads of a process: with many more the operating system ends it."""
Minutes = Annotated[float, Field(le=10_000_000)]
"""Spans of time: 19 years."""
Real = Annotated[float, Field(le=1e9)]
"""Any other number."""


Share = Annotated[float, Field(ge=0, lt=1)]
"""A share or probability below 1."""

_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


def _without_variables(path: str) -> str:
    """Return `path`; raise ValueError for `$HOME` and the like, of which a folder of that very name would be made.

    They are not replaced: what a file means would depend on who reads it, and a stranger's file could look at the
    environment. A file that is called so may be named.
    """
    if (found := _VARIABLE.search(path)) and not os.path.lexists(path):
        raise ValueError(
            f"`{found[0]}` is not replaced here, as a shell would; write the path itself, or `~/` for your home folder"
        )
    return path


PathText = Annotated[str, AfterValidator(_without_variables)]
"""A path or glob in the configuration; a leading `~/` is the home folder of whoever reads the file."""


class Section(BaseModel):
    """A frozen part of the configuration. Field docstrings are the user's reference (docs/config.md)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
