"""Differences between systems, in three tables.

They show sentences that one of two systems translates better, n-grams that one gets right more often, and how many
outputs have faults that scores hide (empty, copied, untranslated, repeated) or are perfect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ziggurat.evaluate.buckets import SentenceWords
from ziggurat.evaluate.findings import Example, NgramDifference, NgramTable, OutputCount, OverSeeds, SentenceTable

# Sentences


@dataclass(frozen=True)
class Text:
    """The lines of a test set shown in examples."""

    sources: Sequence[str] | None
    reference: Sequence[str]
    """The first reference translation."""


def sentence_table(
    names: tuple[str, str],
    outputs: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
    scores: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    text: Text,
    *,
    measure: str,
    examples: int,
) -> SentenceTable:
    """Return the numbers of sentences that either system translates better, and those with the largest differences.

    Args:
        names: names of the two systems.
        outputs: lines of each system, [seeds][lines].
        scores: scores of these lines, higher for better; their means over seeds are compared.
        text: the source and the reference.
        measure: name of the score.
        examples: largest number of sentences to show for either system. Repeated sentences with equal outputs are shown
            once.
    """
    left, right = ([fmean(of_line) for of_line in zip(*seeds, strict=True)] for seeds in scores)

    def best(sign: int) -> tuple[Example, ...]:
        """Return the examples for the left (1) or the right system (-1)."""
        advantage = [sign * (a - b) for a, b in zip(left, right, strict=True)]
        found: dict[tuple[object, ...], Example] = {}
        for line in sorted(range(len(left)), key=lambda line: -advantage[line]):  # stable: earlier lines first
            if len(found) == examples or advantage[line] <= 0:
                break
            texts = tuple(tuple(seed[line] for seed in seeds) for seeds in outputs)
            found.setdefault(
                (*texts, text.reference[line]),
                Example(
                    line=line + 1,
                    left_score=left[line],
                    right_score=right[line],
                    source=None if text.sources is None else text.sources[line],
                    reference=text.reference[line],
                    left=texts[0],
                    right=texts[1],
                ),
            )
        return tuple(found.values())

    wins = sum(a > b for a, b in zip(left, right, strict=True))
    losses = sum(a < b for a, b in zip(left, right, strict=True))
    return SentenceTable(
        left=names[0],
        right=names[1],
        measure=measure,
        wins=wins,
        losses=losses,
        ties=len(left) - wins - losses,
        left_best=best(1),
        right_best=best(-1),
    )


# N-grams

MAX_NGRAM = 4
"""Length of the longest n-grams compared, as in BLEU and compare-mt."""

Ngrams = dict[tuple[str, ...], float]


def ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    """Return the number of occurrences of each n-gram of 1 to MAX_NGRAM words in a sentence."""
    return Counter(
        tuple(words[start : start + length])
        for length in range(1, MAX_NGRAM + 1)
        for start in range(len(words) - length + 1)
    )


def matched_ngrams(reference: SentenceWords, seeds: Sequence[SentenceWords]) -> Ngrams:
    """Return the number of matches of each n-gram with the reference, mean over seeds.

    Within a sentence an n-gram matches at most as often as it occurs in the reference, as in BLEU.
    """
    total: Counter[tuple[str, ...]] = Counter()
    wanted = [ngrams(words) for words in reference]
    for output in seeds:
        for words, of_reference in zip(output, wanted, strict=True):
            total.update(ngrams(words) & of_reference)
    return {ngram: count / len(seeds) for ngram, count in total.items()}


def ngram_table(names: tuple[str, str], left: Ngrams, right: Ngrams, *, shown: int) -> NgramTable:
    """Return the n-grams that best tell two systems apart, by compare-mt's score (left + 1) / (left + right + 2).

    Args:
        names: names of the systems.
        left: matches of the first system, from matched_ngrams.
        right: likewise of the second.
        shown: largest number of n-grams for either system.
    """
    differences = [
        NgramDifference(" ".join(ngram), a, b, (a + 1) / (a + b + 2))
        for ngram in left.keys() | right.keys()
        if (a := left.get(ngram, 0.0)) != (b := right.get(ngram, 0.0))
    ]
    # Equal scores are frequent; the n-gram itself makes their order definite.
    more_left = sorted((d for d in differences if d.left > d.right), key=lambda d: (-d.score, d.ngram))
    more_right = sorted((d for d in differences if d.left < d.right), key=lambda d: (d.score, d.ngram))
    return NgramTable(*names, tuple(more_left[:shown]), tuple(more_right[:shown]))


# Faults of outputs

_SHOWN_LINES = 10
_LONGEST_REPEAT = 4  # words

Judge = Callable[[Sequence[str], Sequence[str], Sequence[str]], bool]
"""A test of an output by its words, those of the reference and those of the source."""


def empty(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True for an output without words, unless the reference has none either."""
    return not output and bool(reference)


def exact(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True where the words are those of the reference, and there are some."""
    return bool(output) and list(output) == list(reference)


def copied(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True where the words are those of the source, but not of the reference."""
    return bool(output) and list(output) == list(source) != list(reference)


def untranslated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True where at least half of the words are in the source and not in the reference.

    Repeated words count as often as the source has them and the reference does not. Words without a letter are ignored.
    """
    words = Counter(filter(_has_letter, output))
    left_over = (words - Counter(reference)) & Counter(source)
    return bool(words) and 2 * left_over.total() >= words.total()


def repeated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True where 1 to 4 words, not all without a letter, are repeated in a row, but none in the reference."""
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
    """Return the number of outputs of each kind; without `sources`, kinds that need them are left out.

    Args:
        reference: words of each sentence.
        systems: words of each sentence in each seed's output of each system.
        sources: words of each source sentence, or None.
    """
    found = []
    of_sources: SentenceWords = sources or [()] * len(reference)  # empty ones are read by no kind
    for key, title, judge, needs_source in _KINDS:
        if needs_source and sources is None:
            continue
        lines = [
            [
                [line for line, words in enumerate(zip(output, reference, of_sources, strict=True), 1) if judge(*words)]
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
