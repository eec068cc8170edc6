"""Counts of outputs with faults that scores hide: empty, copied, untranslated, repeated; and of perfect ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ziggurat.evaluation.buckets import SentenceWords
from ziggurat.evaluation.findings import OutputCount, OverSeeds

__all__ = ["copied", "count_outputs", "empty", "exact", "repeated", "untranslated"]

_SHOWN_LINES = 10
_LONGEST_REPEAT = 4  # words

Judge = Callable[[Sequence[str], Sequence[str], Sequence[str]], bool]
"""Of the words of an output, of its reference and of its source."""


def empty(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Whether there is no word, but one in the reference."""
    return not output and bool(reference)


def exact(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Whether the words are the reference's, and there are some."""
    return bool(output) and list(output) == list(reference)


def copied(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Whether the words are the source's, but not the reference's."""
    return bool(output) and list(output) == list(source) != list(reference)


def untranslated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Whether at least half of the words stand in the source and not in the reference, each as often as it does there.

    Only what has a letter in it is a word here.
    """
    words = Counter(filter(_has_letter, output))
    left_over = (words - Counter(reference)) & Counter(source)
    return bool(words) and 2 * left_over.total() >= words.total()


def repeated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Whether 1 to 4 words, one with a letter in it at least, stand twice in a row, and none do so in the reference."""
    return _repeats(output) and not _repeats(reference)


def _has_letter(word: str) -> bool:
    return any(letter.isalpha() for letter in word)


def _repeats(words: Sequence[str]) -> bool:
    return any(
        words[start : start + length] == words[start + length : start + 2 * length]
        and any(map(_has_letter, words[start : start + length]))
        for length in range(1, _LONGEST_REPEAT + 1)
        for start in range(len(words) - 2 * length + 1)
    )


_KINDS: tuple[tuple[str, str, Judge, bool], ...] = (  # key, title, judge, whether it needs the source
    ("exact", "equal to the reference", exact, False),
    ("empty", "empty", empty, False),
    ("copied", "copied from the source", copied, True),
    ("untranslated", "at least half untranslated", untranslated, True),
    ("repeated", "with words repeated in a row", repeated, False),
)


def count_outputs(
    reference: SentenceWords, systems: Sequence[Sequence[SentenceWords]], sources: SentenceWords | None
) -> tuple[OutputCount, ...]:
    """Return how many outputs of each system are of each kind; without `sources` not those kinds that need them.

    reference, sources: words of each sentence; systems: of each system, of each seed, the same.
    """
    found = []
    blank: SentenceWords = sources or [()] * len(reference)
    for key, title, judge, needs_source in _KINDS:
        if needs_source and sources is None:
            continue
        lines = [
            [
                [number for number, words in enumerate(zip(output, reference, blank, strict=True), 1) if judge(*words)]
                for output in seeds
            ]
            for seeds in systems
        ]
        found.append(
            OutputCount(
                key=key,
                title=title,
                systems=tuple(OverSeeds.of([len(seed) for seed in seeds]) for seeds in lines),
                lines=tuple(tuple(seeds[0][:_SHOWN_LINES]) for seeds in lines),
            )
        )
    return tuple(found)
