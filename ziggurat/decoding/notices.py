"""What was not translated in the ordinary way: counted by kind, and told once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

__all__ = ["Notices", "TranslationWarning"]


class TranslationWarning(UserWarning):
    """Something in the input was not translated in the ordinary way; counted in `Translator.notices`."""


class Notices(Counter[str]):
    """Counts by kind; `told` has what was said of the first of each kind that warns."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}

    def add(self, kind: str, message: str) -> None:
        """Count one; the first of its kind warns."""
        self[kind] += 1
        self._tell(kind, message)

    def merge(self, counts: Mapping[str, int], told: Mapping[str, str]) -> None:
        """Add what another process counted and `told`; only what is the first of its kind here warns."""
        self.update(counts)
        for kind, message in told.items():
            self._tell(kind, message)

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self.told:
            self.told[kind] = message
            warnings.warn(f"{message}; further ones are only counted", TranslationWarning, stacklevel=5)
