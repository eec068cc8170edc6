"""Where two systems differ: sentences that one translates better, n-grams that one gets right more often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from ziggurat.evaluation.buckets import SentenceWords
from ziggurat.evaluation.findings import Example, NgramDifference, NgramTable, SentenceTable

__all__ = ["MAX_NGRAM", "Text", "matched_ngrams", "ngram_table", "ngrams", "sentence_table"]

MAX_NGRAM = 4
"""Longest n-gram compared, as in BLEU and compare-mt."""

Ngrams = dict[tuple[str, ...], float]


class Text:
    """The lines of a test set that examples show."""

    def __init__(self, sources: Sequence[str] | None, reference: Sequence[str]) -> None:
        """`sources` may be missing; `reference` is the first one."""
        self.sources = sources
        self.reference = reference


def sentence_table(
    names: tuple[str, str],
    outputs: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
    scores: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    text: Text,
    *,
    measure: str,
    examples: int,
) -> SentenceTable:
    """Return who translates how many sentences better, and the sentences with the largest differences.

    Args:
        names: of the two systems.
        outputs: of each, the lines of each seed.
        scores: of each, of each seed, the score of each line, higher for better; means over seeds are compared.
        text: the rest of the test set.
        measure: what the scores are.
        examples: at most how many sentences to show of either kind. The same sentence with the same outputs is shown
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


def ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    """Return how often each n-gram of 1 to MAX_NGRAM words stands in a sentence."""
    return Counter(
        tuple(words[start : start + length])
        for length in range(1, MAX_NGRAM + 1)
        for start in range(len(words) - length + 1)
    )


def matched_ngrams(reference: SentenceWords, seeds: Sequence[SentenceWords]) -> Ngrams:
    """Return how often each n-gram stands in an output where the reference has it too, mean over seeds.

    Within a sentence an n-gram counts at most as often as it stands in the reference, as in BLEU.
    """
    total: Counter[tuple[str, ...]] = Counter()
    wanted = [ngrams(words) for words in reference]
    for output in seeds:
        for words, of_reference in zip(output, wanted, strict=True):
            total.update(ngrams(words) & of_reference)
    return {ngram: count / len(seeds) for ngram, count in total.items()}


def ngram_table(names: tuple[str, str], left: Ngrams, right: Ngrams, *, shown: int) -> NgramTable:
    """Return the n-grams that tell two systems apart, by (left + 1) / (left + right + 2), compare-mt's score.

    names: of the systems; left, right: what matched_ngrams gave; shown: at most how many for either system.
    """
    differences = [
        NgramDifference(" ".join(ngram), a, b, (a + 1) / (a + b + 2))
        for ngram in left.keys() | right.keys()
        if (a := left.get(ngram, 0.0)) != (b := right.get(ngram, 0.0))
    ]
    more_left = sorted((d for d in differences if d.left > d.right), key=lambda d: (-d.score, d.ngram))
    more_right = sorted((d for d in differences if d.left < d.right), key=lambda d: (d.score, d.ngram))
    return NgramTable(*names, tuple(more_left[:shown]), tuple(more_right[:shown]))
