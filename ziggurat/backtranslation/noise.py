"""The noise of noised beam search: words dropped, replaced by a filler, and moved a little (Edunov et al. 2018)."""

from __future__ import annotations

import random

__all__ = ["DROP", "FILLER", "REACH", "REPLACE", "add_noise"]

DROP = 0.1
"""Probability of a word to be dropped."""
REPLACE = 0.1
"""Probability of a word that stayed to become the filler."""
FILLER = "_"
"""What takes a word's place: one character, which every vocabulary can spell."""
REACH = 3
"""How many places a word can move, at most."""


def add_noise(text: str, *, seed: int, line: int) -> str:
    """Return `text` with noise that is a function of `seed` and the number `line` alone.

    In the order of Edunov et al. (2018, section 3): each word is dropped with probability DROP, but never all of them;
    replaced by FILLER with probability REPLACE; and the words are put in the order of i + u_i, i being a word's place
    and u_i uniform in [0, REACH + 1), after which no word is further than REACH from where it was (Lample et al. 2018,
    section 2.3). A word is what blanks separate; a text of one word stays as it is.
    """
    words = text.split(" ")
    if len(words) < 2:
        return text
    # Python promises the same numbers from `random()` for the same seed in every version; seeds of different lines
    # are different numbers.
    draw = random.Random(seed << 64 | line).random
    kept = [word for word in words if draw() >= DROP] or [words[int(draw() * len(words))]]
    replaced = [FILLER if draw() < REPLACE else word for word in kept]
    places = [place + draw() * (REACH + 1) for place in range(len(replaced))]
    return " ".join(word for _, word in sorted(zip(places, replaced, strict=True)))
