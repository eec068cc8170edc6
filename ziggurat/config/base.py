"""The base of every configuration section: frozen, typed, no unknown keys."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["PathText", "Section"]

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
