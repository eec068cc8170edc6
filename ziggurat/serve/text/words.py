"""Words and signs of a translation, what they are linked to, and where between them something belongs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import regex

from ziggurat.serve.text.work import Link
from ziggurat.translate.lines import UNSPACED_SCRIPTS

# A letter of a script without blanks; a word, with what joins its parts; any other sign.
_UNIT = regex.compile(
    rf"[{UNSPACED_SCRIPTS}]\p{{M}}*|(?:(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{M}}\p{{N}}_])+"
    rf"(?:['’·\-](?:(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{M}}\p{{N}}_])+)*|\S"
)


@dataclass(frozen=True)
class Target:
    """The translation of a text.

    Attributes:
        text: the translation.
        links: between characters of the source and of `text`, the surest first.
        fixed: the links of stretches that came through unchanged; no tag goes inside of them.
    """

    text: str
    links: list[Link] = field(default_factory=list)
    fixed: list[Link] = field(default_factory=list)


def units(text: str, fixed: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return the words and signs of a text as spans; those in `fixed` (in order) are not cut."""
    spans, begin = [], 0
    for start, end in fixed:
        spans += [found.span() for found in _UNIT.finditer(text, begin, start)]
        spans.append((start, end))
        begin = end
    return spans + [found.span() for found in _UNIT.finditer(text, begin)]


def cut_at(spans: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the spans, each cut at those of `cuts` that are inside of it."""
    parts = []
    for start, end in spans:
        inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
        parts += list(pairwise([start, *inside, end]))
    return parts


def best_boundary(centres: Sequence[float | None], at: float, allowed: Sequence[int], lowest: int, highest: int) -> int:
    """Return the boundary at which the fewest words are on another side of a point than in the source.

    `centres` has for each word the place in the source that it belongs to, None where that is not known, and `at` is
    the place of the point in the source. `allowed` are boundaries in order; k is before word k. Only words from
    `lowest` to `highest` count.
    """
    wrong = sum(1 for c in centres[lowest:highest] if c is not None and c < at)
    best, fewest, k = allowed[0], wrong + 1, lowest
    for boundary in allowed:
        while k < boundary:
            centre = centres[k]
            if centre is not None:
                wrong += 1 if centre >= at else -1
            k += 1
        if wrong < fewest:
            best, fewest = boundary, wrong
    return best
