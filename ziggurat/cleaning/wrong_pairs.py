"""Wrong pairs made of right ones, from which the pair score learns: exchanged, cut, shuffled, copied, glued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["wrong_pairs"]

_SEED = 20_24  # any number: the score must only be the same every time


def wrong_pairs(sources: Sequence[str], targets: Sequence[str], odd: NDArray[np.bool_]) -> tuple[list[str], list[str]]:
    """Return a wrong pair made of each right one, with text only of pairs of the same half."""
    generator = np.random.default_rng(_SEED)
    lengths = np.array([len(t) for t in targets])
    # The neighbour by length, or any other: its target is wrong whatever its length.
    by_length = np.lexsort((lengths, odd))
    near = np.empty(len(sources), np.int64)
    near[by_length] = np.roll(by_length, 1 + int(generator.integers(3)))
    others = np.empty(len(sources), np.int64)
    for half in (0, 1):
        own = np.flatnonzero(odd == half)
        mixed = generator.permutation(own)
        others[mixed] = np.roll(mixed, 1)
    made: tuple[list[str], list[str]] = ([], [])
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        kind, side = number % 6, int(generator.integers(2))
        pair = [source, target]
        if kind < 2:
            pair[1] = targets[(near, others)[kind][number]]
        elif kind == 2:
            pair[side] = _cut(pair[side], generator)
        elif kind == 3:
            pair[side] = _shuffled(pair[side], generator)
        elif kind == 4:
            pair[1 - side] = pair[side]
        else:
            pair[side] = f"{pair[side]} {(sources, targets)[side][others[number]]}"
        made[0].append(pair[0])
        made[1].append(pair[1])
    return made


def _cut(text: str, generator: np.random.Generator) -> str:
    """Return the first or last 30 to 70 per cent of a text's words, at least one."""
    words = text.split() if " " in text else [*text]
    kept = max(1, round(len(words) * generator.uniform(0.3, 0.7)))
    return ("" if " " not in text else " ").join(words[:kept] if generator.random() < 0.5 else words[-kept:])


def _shuffled(text: str, generator: np.random.Generator) -> str:
    words = text.split() if " " in text else [*text]
    return ("" if " " not in text else " ").join(words[n] for n in generator.permutation(len(words)))
