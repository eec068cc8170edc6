"""A check that the lines of a corpus pair up: a file may lack a line, be sorted or shuffled, or repeat one text.

The lengths of sentences and their translations are correlated in any two languages (Gale and Church 1993), those of
neighbouring lines are not. So the check correlates both sides' changes in log length from line to line, window by
window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ziggurat.system.errors import Problem, printable

_WINDOW = 500  # lines
_LEAST = 100  # fewest lines of a meaningful window
_SPREAD = 0.2  # minimum standard deviation of the changes in length for a window to be judged
_CLEARLY = 0.6
"""Correlation at which a window is right; below, it must be higher than that of lines shifted either way.

In aligned text in en, de, fr, cs and ja it is at least 0.49, and at least 0.37 higher than that of shifted lines.
"""
_BETTER = 0.25  # margin by which the correlation must be higher with shifted lines for the shift to be right
_FARTHEST = 10  # maximum number of lines by which the sides are shifted against each other
_REPEATED = 0.2  # share of the lines of a window that pair one text with different texts
_SHARE = 0.05  # share of a corpus's windows from which there is a notice

_Floats = NDArray[np.float64]


@dataclass
class _Fault:
    windows: int = 0
    first: str = ""
    details: Counter[str] = field(default_factory=Counter)

    def see(self, place: str, detail: str) -> None:
        self.windows += 1
        self.first = self.first or place
        self.details[detail] += 1


class Pairing:
    """Windows of the lines of a corpus, and those whose sides do not seem to belong together."""

    def __init__(self) -> None:
        self._windows = 0
        self._apart, self._repeated = _Fault(), _Fault()

    def see(self, source: Sequence[str], target: Sequence[str], before: int, where: str) -> None:
        """Look at a block of pairs; `before` is the number of lines before it in its file, called `where`."""
        count = max(1, len(source) // _WINDOW)
        size = len(source) // count
        if size < _LEAST:
            return
        lengths = [np.log1p(np.fromiter(map(len, side), np.float64, len(side))) for side in (source, target)]
        for start in range(0, size * count, size):
            part = slice(start, start + size)
            place = f"{where}, line {before + start + 1:,}"
            self._windows += 1
            if (text := _repeated(source[part], target[part])) is not None:
                self._repeated.see(place, text)
            elif (shift := _shift(lengths[0][part], lengths[1][part])) is not None:
                self._apart.see(place, _side_ahead(shift))

    def notices(self, key: str) -> Iterator[Problem]:
        """Yield a warning, with the key of the corpus, on each fault that more than a few of its windows have."""
        for fault, what, way_out in (
            (self._apart, "source and target do not seem to belong together, by their lengths", "are lines missing?"),
            (self._repeated, "one text is paired with many different ones", "is this the right file?"),
        ):
            if fault.windows > _SHARE * self._windows:
                ((detail, _),) = fault.details.most_common(1)
                said = (
                    f"{key}: in {fault.windows:,} of {self._windows:,} parts of about {_WINDOW} lines {what}, the "
                    f"first from {fault.first} on{detail}:"
                )
                yield Problem(key, said, way_out, "warning")


def _repeated(*sides: Sequence[str]) -> str | None:
    """Return a text that is paired with many different ones, for a message; None if there is none."""
    for side, others in (sides, reversed(sides)):
        ((text, count),) = Counter(side).most_common(1)
        if count > _REPEATED * len(side) and text.strip():
            beside = {other for one, other in zip(side, others, strict=True) if one == text}
            if len(beside) > _REPEATED * len(side):
                return f" (`{printable(text, 40)}`)"
    return None


def _shift(source: _Floats, target: _Floats) -> int | None:
    """Return by how many lines the target is behind, 0 if no shift is right; None if the sides seem to match."""
    straight = _correlation(source, target)
    if straight is None or straight > _CLEARLY:
        return None
    shifted = {0: straight}
    for lines in range(1, _FARTHEST + 1):
        shifted[lines] = _correlation(source[:-lines], target[lines:]) or 0.0
        shifted[-lines] = _correlation(source[lines:], target[:-lines]) or 0.0
    best = max(shifted, key=lambda lines: shifted[lines])
    if not best:
        return None
    return best if shifted[best] > straight + _BETTER else 0


def _correlation(first: _Floats, second: _Floats) -> float | None:
    """Return the correlation of changes in length from line to line; None if one side hardly changes."""
    filled = (first > 0) & (second > 0)  # blank lines may not have been translated yet
    first, second = np.diff(first[filled]), np.diff(second[filled])  # text may be sorted by length
    if len(first) < _LEAST // 2 or min(first.std(), second.std()) < _SPREAD:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _side_ahead(shift: int) -> str:
    if not shift:
        return ""
    lines = "1 line" if abs(shift) == 1 else f"{abs(shift)} lines"
    return f" (the target seems to come {lines} {'late' if shift > 0 else 'early'})"
