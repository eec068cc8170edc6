"""Figures of a report on a store: how long its sentences are, and how the lengths of the two sides compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.inspect.report.figure import Figure, Panel, Series, described

MOST_CURVES = 8
"""Corpora that have a curve: as many as there are colours."""

_SECTION = "Lengths"
_PER_DOUBLING = 4  # bins of lengths
_RATIO_STEP = 0.25  # width of a bin of ratios, in doublings
_WIDEST = 3.0  # doublings; ratios beyond it count in the last bins


class LengthCurve(NamedTuple):
    """Lengths of a corpus's pairs in subword pieces."""

    name: str
    corpus: int
    source: NDArray[np.int32]
    target: NDArray[np.int32]


def length_figures(curves: Sequence[LengthCurve]) -> list[Figure]:
    """Return the figures of these corpora, the largest first."""
    panels = tuple(
        Panel(
            f"{side} sentences",
            "subword pieces",
            "% of sentences",
            tuple(_lengths(curve.name, colour, getattr(curve, side)) for colour, curve in enumerate(curves)),
            log_x=True,
        )
        for side in ("source", "target")
    )
    ratios = Panel(
        "target over source",
        "pieces of the target per piece of the source",
        "% of pairs",
        tuple(_ratios(curve, colour) for colour, curve in enumerate(curves)),
        log_x=True,
    )
    found = [
        described(
            "lengths", _SECTION, "Length of sentences",
            f"Share of the sentences of each training corpus by length; {_PER_DOUBLING} points for each doubling. "
            f"At most {MOST_CURVES} corpora, the largest.",
            panels,
        ),
        described(
            "length-ratios", _SECTION, "Ratio of lengths",
            "Share of the pairs of each training corpus by the ratio of their lengths. A second hill, or a high end of "
            "a curve, is a sign of pairs that do not translate each other.",
            (ratios,),
        ),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None] if curves else []


def _lengths(name: str, colour: int, lengths: NDArray[np.int32]) -> Series:
    """Return the share of sentences in each bin, at the bin's geometric middle."""
    bins = np.round(np.log2(np.maximum(lengths, 1)) * _PER_DOUBLING).astype(np.int64)
    counts = np.bincount(bins)
    first = int(bins.min())
    x = tuple(float(2 ** (n / _PER_DOUBLING)) for n in range(first, len(counts)))
    return Series(name, x, tuple(float(100 * count / len(lengths)) for count in counts[first:]), colour)


def _ratios(curve: LengthCurve, colour: int) -> Series:
    doublings = np.log2(np.maximum(curve.target, 1) / np.maximum(curve.source, 1)).clip(-_WIDEST, _WIDEST)
    bins = np.round((doublings + _WIDEST) / _RATIO_STEP).astype(np.int64)
    counts = np.bincount(bins, minlength=round(2 * _WIDEST / _RATIO_STEP) + 1)
    x = tuple(float(2 ** (n * _RATIO_STEP - _WIDEST)) for n in range(len(counts)))
    return Series(curve.name, x, tuple(float(100 * count / len(bins)) for count in counts), colour)
