"""Lengths of text that are fair between scripts: every character is weighed by what it says.

A Chinese sentence has a third of the characters of its English translation and hardly a blank; a Thai one has as many
and no blank either. So words cannot be counted there, and characters cannot be compared as they are. The weights are
letters of English for a character, blanks left out: those at which translations are equally long on the mean, measured
on Tatoeba's pairs (LASER's 1,000 of Chinese, Cantonese, Japanese, Korean, 722 of Khmer, 548 of Thai), the 50,000 of
tanaka-en-ja, and the messages of Debian's programs. They are whole tenths, so that every machine counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.lines import INVISIBLE

Lengths = NDArray[np.int64]

_TENTHS = 10  # weight of a letter of Latin, Cyrillic, Greek, Arabic and all that is not in a table below
_WORD = 50  # weight of a word: five letters
_UNSPACED = {
    29: ("2e80-2fd5 3005 3007 3021-3029 3038-303b 3400-4dbf 4e00-9fff f900-faff 17000-18d8f 20000-3fffd",),  # Han
    14: ("3041-3096 309d-309f 30a1-30fa 30fc-30ff 31f0-31ff ff66-ff9d 1b000-1b16f",),  # kana
    10: (
        "0e01-0e3a 0e40-0e5b 0e81-0eff 3105-312f 31a0-31bf",  # Thai, Lao, bopomofo
        "1950-19df 1a20-1aaf 1b00-1b7f a980-a9df aa00-aa5f aa80-aadf",  # Tai scripts, Balinese, Javanese, Cham
    ),
    8: ("1000-109f a9e0-a9ff aa60-aa7f 1780-17b3 17b6-17ff 19e0-19ff",),  # Burmese, Khmer
    7: ("0f00-0fff",),  # Tibetan: its dots stand between syllables
}
"""_UNSPACED is weight -> characters of scripts that write no blank between words."""
_SPACED = {
    21: "ac00-d7a3",  # Hangul
    8: "1100-115e 1161-11ff",  # the letters that its syllables are made of, where they are decomposed
    15: "1200-139f",  # Ethiopic
    0: "0300-034e 0350-036f 3099-309a",  # accents: a decomposed letter is no longer than a composed one
}
"""_SPACED is weight -> characters of other scripts that say more or less than a letter."""
_BOUNDARIES = "3001-3004 3008-3020 3030 303d 30fb ff01-ff0f ff1a-ff20 ff3b-ff40 ff5b-ff65"
"""_BOUNDARIES are marks of scripts without blanks: a word of another script ends there."""


@lru_cache(maxsize=1)
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return of each character two weights and two facts.

    They are its weight, the same but 0 for what nobody sees, whether its script has no blanks, and whether a word of
    another script may have it.
    """
    weights = np.full(0x110000, _TENTHS, np.uint8)
    unspaced = np.zeros(0x110000, np.bool_)
    wordly = np.ones(0x110000, np.bool_)
    for first, last in _ranges(_BOUNDARIES):
        wordly[first:last] = False
    for weight, rows in _UNSPACED.items():
        for first, last in _ranges(" ".join(rows)):
            weights[first:last], unspaced[first:last], wordly[first:last] = weight, True, False
    for weight, row in _SPACED.items():
        for first, last in _ranges(row):
            weights[first:last] = weight
    plane = "".join(chr(code) for code in (*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE1000)))
    invisible = np.fromiter(map(ord, INVISIBLE.findall(plane)), np.int64)
    visible = weights.copy()
    visible[invisible], wordly[invisible] = 0, False
    return weights, visible, unspaced, wordly


def _ranges(written: str) -> list[tuple[int, int]]:
    """Return the first of each range of characters, and the one behind its last."""
    ends = [part.partition("-")[::2] for part in written.split()]
    return [(int(first, 16), int(last or first, 16) + 1) for first, last in ends]


def _codes(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the characters of all texts as numbers, each text behind a line feed, and where each text begins."""
    joined = "\n" + "\n".join(texts)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    return codes, np.cumsum(lengths) - lengths


def _sums(values: NDArray[np.generic], starts: NDArray[np.int64]) -> Lengths:
    return np.add.reduceat(values, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)


def has_unspaced(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return which texts have a character of a script that writes no blank between words, [texts]."""
    if "".join(texts).isascii():
        return np.zeros(len(texts), np.bool_)
    codes, starts = _codes(texts)
    return _sums(_tables()[2][codes], starts) > 0


def visible_lengths(texts: Sequence[str]) -> Lengths:
    """Return the weight of the visible characters of each text in tenths of a letter, [texts]; at least 1."""
    codes, starts = _codes(texts)
    return np.maximum(_sums(_tables()[1][codes], starts), 1)


def character_lengths(texts: Sequence[str]) -> Lengths:
    """Return the weight of the characters of each text, blanks included, in tenths of a letter, [texts]."""
    if "".join(texts).isascii():
        return np.fromiter(map(len, texts), np.int64, len(texts)) * _TENTHS
    codes, starts = _codes(texts)
    return _sums(_tables()[0][codes], starts) - _TENTHS  # the line feed before it


def word_counts(texts: Sequence[str]) -> Lengths:
    """Return the number of words of each text, [texts]; characters of scripts without blanks make a word by weight."""
    counts = np.fromiter((len(text.split()) for text in texts), np.int64, len(texts))
    if not (places := has_unspaced(texts).nonzero()[0]).size:
        return counts
    codes, starts = _codes([texts[place] for place in places.tolist()])
    weights, _, unspaced, wordly = _tables()
    of_words = wordly[codes]
    begins = of_words[1:] & ~of_words[:-1]  # every text is behind a line feed
    words = _sums(np.append(False, begins), starts)
    counts[places] = words + -(-_sums(np.where(unspaced[codes], weights[codes], 0), starts) // _WORD)
    return counts
