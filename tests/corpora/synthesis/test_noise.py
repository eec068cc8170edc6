"""Noise compared with its definition in Edunov et al. (2018), step by step, and by its statistics."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ziggurat.corpora.synthesis.backtranslation import FILLER, add_noise


def by_definition(text: str, seed: int, line: int) -> str:
    """Drop with probability 0.1, replace with probability 0.1, sort by i + U(0, 4), in plain loops."""
    numbers = random.Random((seed << 64) + line)
    kept = []
    for word in text.split(" "):
        if numbers.random() >= 0.1:
            kept.append(word)
    if not kept:
        kept = [text.split(" ")[int(numbers.random() * len(text.split(" ")))]]
    for place in range(len(kept)):
        if numbers.random() < 0.1:
            kept[place] = "_"
    keys = []
    for place in range(len(kept)):
        keys.append(place + 4 * numbers.random())
    order = sorted(range(len(kept)), key=lambda place: keys[place])
    return " ".join(kept[place] for place in order)


@given(st.lists(st.text("abc", min_size=1), min_size=2, max_size=12), st.integers(0, 9), st.integers(0, 10**12))
def test_it_matches_the_definition(words: list[str], seed: int, line: int) -> None:
    text = " ".join(words)
    assert add_noise(text, seed=seed, line=line) == by_definition(text, seed, line)


def test_words_are_dropped_replaced_and_moved_at_the_given_rates() -> None:
    words = [f"w{n}" for n in range(20)]
    kept = filled = 0
    moves: Counter[int] = Counter()
    rounds = 2000
    for line in range(rounds):
        noisy = add_noise(" ".join(words), seed=1, line=line).split(" ")
        kept += len(noisy)
        filled += noisy.count(FILLER)
        if len(noisy) == len(words):  # nothing was dropped, so positions can be compared
            moves.update(abs(place - int(word[1:])) for place, word in enumerate(noisy) if word != FILLER)
    total = rounds * len(words)
    assert abs(kept / total - 0.9) < 0.01  # 7 standard deviations
    assert abs(filled / kept - 0.1) < 0.01
    assert set(moves) == {0, 1, 2, 3}


def test_seeds_and_lines_give_different_noise() -> None:
    text = " ".join(f"w{n}" for n in range(30))
    drawn = {add_noise(text, seed=seed, line=line) for seed in range(5) for line in range(20)}
    assert len(drawn) == 100


def test_no_text_becomes_empty() -> None:
    assert all(add_noise("a b", seed=0, line=line) for line in range(2000))
    assert add_noise("one", seed=0, line=0) == "one"
    assert add_noise("", seed=0, line=0) == ""
