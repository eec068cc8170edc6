"""The steps of a pipeline that a call is to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ziggurat.errors import ConfigError, printable
from ziggurat.pipeline.step import Step

__all__ = ["Selection"]


@dataclass(frozen=True)
class Selection:
    """The steps of a call.

    Attributes:
        first: name of the first; None: the first of all. Results of the steps before it are taken as they stand.
        last: name of the last; None: the last of all.
        forced: names of steps to be done again although they are done.
    """

    first: str | None = None
    last: str | None = None
    forced: frozenset[str] = frozenset()

    def numbers(self, steps: Sequence[Step]) -> range:
        """Return the numbers of the chosen steps. Raises ConfigError for a step that is none of `steps`."""
        names = [step.name for step in steps]
        for name in (self.first, self.last, *sorted(self.forced)):
            if name is not None and name not in names:
                raise ConfigError(f"no step `{printable(name)}` in this pipeline; it has {', '.join(names)}")
        first = 0 if self.first is None else names.index(self.first)
        last = len(names) - 1 if self.last is None else names.index(self.last)
        if last < first:
            raise ConfigError(f"`{names[last]}` comes before `{names[first]}`: no step is between them")
        if outside := [name for name in sorted(self.forced) if not first <= names.index(name) <= last]:
            raise ConfigError(f"`--force {outside[0]}`: this step is not among those chosen")
        return range(first, last + 1)
