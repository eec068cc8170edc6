"""Comparison of systems on one test set: scores, significance tests, and tables of their differences.

The tables show sentences that one of two systems translates better, n-grams that one gets right more often, and how
many outputs are perfect or have faults that scores hide (empty, copied, untranslated, repeated).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from ziggurat.evaluate.findings import (
    USELESS_BLEU,
    BucketTable,
    Example,
    NgramDifference,
    NgramTable,
    OutputCount,
    OverSeeds,
    Scores,
    SentenceTable,
    SentenceWords,
    SystemNotes,
    by_length,
    length_differences,
    sentence_scores,
    word_accuracy,
)
from ziggurat.evaluate.metrics import CometEnvironment, TestSet, check_metrics
from ziggurat.evaluate.scores import METRICS, BleuWords, SacrebleuMetric, SegmentMetric, Statistics, add_up, check_lines
from ziggurat.evaluate.significance import RESAMPLINGS, TRIALS, compare_scores
from ziggurat.system.errors import ConfigError, printable

# Sentences


def sentence_table(
    names: tuple[str, str],
    outputs: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
    scores: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    sources: Sequence[str] | None,
    reference: Sequence[str],
    *,
    measure: str,
    examples: int,
) -> SentenceTable:
    """Return how many sentences either system translates better, and those with the largest differences.

    Args:
        names: names of the two systems.
        outputs: lines of each system, [seeds][lines].
        scores: scores of these lines, where higher is better; their means over seeds are compared.
        sources: the source text, shown in examples; None: unknown.
        reference: the first reference translation.
        measure: name of the score.
        examples: largest number of sentences to show for either system. Repeated sentences with equal outputs are shown
            once.
    """
    left, right = ([fmean(of_line) for of_line in zip(*seeds, strict=True)] for seeds in scores)

    def best(sign: int) -> tuple[Example, ...]:
        """Return the examples for the left (1) or the right system (-1)."""
        advantage = [sign * (a - b) for a, b in zip(left, right, strict=True)]
        found: dict[tuple[object, ...], Example] = {}
        for line in sorted(range(len(left)), key=lambda line: -advantage[line]):  # stable, so earlier lines come first
            if len(found) == examples or advantage[line] <= 0:
                break
            texts = tuple(tuple(seed[line] for seed in seeds) for seeds in outputs)
            found.setdefault(
                (*texts, reference[line]),
                Example(
                    line=line + 1,
                    left_score=left[line],
                    right_score=right[line],
                    source=None if sources is None else sources[line],
                    reference=reference[line],
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

_MAX_NGRAM = 4
"""_MAX_NGRAM is the length of the longest n-grams compared, as in BLEU and compare-mt."""

Ngrams = dict[tuple[str, ...], float]


def ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    """Return the number of occurrences of each n-gram of 1 to MAX_NGRAM words in a sentence."""
    return Counter(
        tuple(words[start : start + length])
        for length in range(1, _MAX_NGRAM + 1)
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
    """Return the n-grams that best distinguish two systems, by compare-mt's score (left + 1) / (left + right + 2).

    Args:
        names: names of the systems.
        left: matches of the first system, from matched_ngrams.
        right: matches of the second system.
        shown: largest number of n-grams for either system.
    """
    differences = [
        NgramDifference(" ".join(ngram), a, b, (a + 1) / (a + b + 2))
        for ngram in left.keys() | right.keys()
        if (a := left.get(ngram, 0.0)) != (b := right.get(ngram, 0.0))
    ]
    # Equal scores are frequent, so the n-gram itself breaks ties.
    more_left = sorted((d for d in differences if d.left > d.right), key=lambda d: (-d.score, d.ngram))
    more_right = sorted((d for d in differences if d.left < d.right), key=lambda d: (d.score, d.ngram))
    return NgramTable(*names, tuple(more_left[:shown]), tuple(more_right[:shown]))


# Faults of outputs

_SHOWN_LINES = 10
_LONGEST_REPEAT = 4  # words

Judge = Callable[[Sequence[str], Sequence[str], Sequence[str]], bool]
"""Judge is a test of an output, given its words, the reference's and the source's."""


def empty(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True for an output without words, unless the reference also has none."""
    return not output and bool(reference)


def exact(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True if the words equal those of the reference and are not empty."""
    return bool(output) and list(output) == list(reference)


def copied(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True if the words equal those of the source, but not those of the reference."""
    return bool(output) and list(output) == list(source) != list(reference)


def untranslated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True if at least half of the words are in the source and not in the reference.

    Repeated words count as often as the source has them and the reference does not. Words without a letter are ignored.
    """
    words = Counter(filter(_has_letter, output))
    left_over = (words - Counter(reference)) & Counter(source)
    return bool(words) and 2 * left_over.total() >= words.total()


def repeated(output: Sequence[str], reference: Sequence[str], source: Sequence[str]) -> bool:
    """Return True if 1 to 4 words, not all without a letter, are repeated consecutively, but none in the reference."""
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
    of_sources: SentenceWords = sources or [()] * len(reference)  # kinds that need sources never read these empty ones
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


FORMAT = 1
"""FORMAT is the version of the JSON format."""


@dataclass(frozen=True)
class System:
    """A system to compare, with its translations of the test set."""

    name: str
    outputs: Sequence[Sequence[str]]
    """A list of lines per seed; at least one seed."""
    origins: Sequence[str] = field(default=())
    """The origin of each output; optional."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. Tables whose input is missing are left out; `notes` names them."""

    systems: tuple[SystemNotes, ...]
    sentences: int
    """Lines of the test set."""
    references: int
    """Reference translations of each line; words and n-grams are compared with the first."""
    words: str
    """sacreBLEU's name of the tokenizer behind the words of all tables except `scores`."""
    scores: tuple[Scores, ...]
    counts: tuple[OutputCount, ...]
    buckets: tuple[BucketTable, ...]
    sentence_tables: tuple[SentenceTable, ...]
    """One per pair of systems."""
    ngrams: tuple[NgramTable, ...]
    """One per pair of systems."""
    notes: tuple[str, ...]
    """The tables left out, and how to get them."""

    def as_record(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {"format": FORMAT, **asdict(self)}


def compare(
    systems: Sequence[System],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None = None,
    train_target: Iterable[str] | None = None,
    *,
    metrics: Sequence[str] = METRICS,
    target_language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    comet: CometEnvironment | None = None,
    resamplings: int = RESAMPLINGS,
    trials: int = TRIALS,
    examples: int = 10,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Return the comparison of `systems` on one test set.

    Args:
        systems: at least one; significance tests and tables of pairs need two.
        references: one list of lines per reference translation.
        sources: the source text; without it untranslated outputs are not counted, and examples have no source.
        train_target: lines of the training text's target side, read once; without it there is no word accuracy by
            frequency.
        metrics: names of ALL_METRICS.
        target_language: a code such as `en`; see TestSet.
        tokenize: the tokenizer of BLEU, METEOR and the words of all tables, by sacreBLEU's name; see TestSet.
        lowercase: ignore case in BLEU, chrF and the tables.
        comet: the environment of COMET, if that is one of the metrics.
        resamplings: number of resamplings of the paired bootstrap.
        trials: number of trials of approximate randomisation.
        examples: number of sentences and n-grams shown for each of two systems.
        say: receives progress messages, since tests of many systems take minutes.

    Raises DataError if there are no lines or they do not pair up; ConfigError for systems without outputs or with
    equal names; and the errors of the metrics.
    """
    _check(systems, references, sources)
    check_metrics(metrics)
    test_set = TestSet(references, sources, target_language, tokenize, lowercase)
    words = BleuWords(tokenize=test_set.splitting.bleu, lowercase=lowercase)
    say = say or (lambda _: None)
    names = [system.name for system in systems]
    measured: dict[str, _Measured] = {}
    # (1) Statistics, once per metric; the tables of sentences always need BLEU and chrF
    for metric in dict.fromkeys((*metrics, "bleu", "chrf")):
        say(f"scoring by {metric}")
        measured[metric] = _measure(test_set.metric(metric, comet), systems)
    # (2) Scores and significance tests
    bleu = [fmean(measured["bleu"].of_seeds(seeds)) for seeds in measured["bleu"].statistics]
    useless = tuple(name for name, score in zip(names, bleu, strict=True) if score < USELESS_BLEU)
    scores = []
    for metric in dict.fromkeys(metrics):
        if len(systems) > 1:
            say(f"testing by {metric}")
        found = measured[metric]
        tested = compare_scores(found.metric, names, found.statistics, resamplings=resamplings, trials=trials)
        scores.append(replace(tested, useless=useless))
    # (3) Tables of words and sentences
    say("comparing words and sentences")
    split = _SplitText(
        [words(line) for line in references[0]],
        [[[words(line) for line in output] for output in system.outputs] for system in systems],
    )
    return Comparison(
        systems=tuple(SystemNotes(system.name, len(system.outputs), tuple(system.origins)) for system in systems),
        sentences=len(references[0]),
        references=len(references),
        words=words.name,
        scores=tuple(scores),
        counts=count_outputs(split.reference, split.systems, sources and [words(line) for line in sources]),
        buckets=_buckets(split, measured, None if train_target is None else words.counts(train_target)),
        sentence_tables=_sentence_tables(systems, measured["chrf"], sources, references[0], examples),
        ngrams=_ngram_tables(names, split, examples),
        notes=_notes(sources is not None, train_target is not None),
    )


def _check(systems: Sequence[System], references: Sequence[Sequence[str]], sources: Sequence[str] | None) -> None:
    if not systems:
        raise ConfigError("no system to compare")
    names = [system.name for system in systems]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two systems are called {printable(repr(repeated[0]))}; names must differ")
    for system in systems:
        if not system.outputs or isinstance(system.outputs[0], str):
            raise ConfigError(f"system {printable(repr(system.name))} needs a list of outputs, each a list of lines")
        for output in system.outputs:
            check_lines(output, references)
    if sources is not None:
        check_lines(sources, references, "the source text")


@dataclass(frozen=True)
class _Measured:
    """A metric's statistics of all outputs."""

    metric: SegmentMetric
    statistics: list[list[Statistics]]
    """[systems][seeds]"""

    def of_seeds(self, seeds: Sequence[Statistics]) -> list[float]:
        """Return the score of each seed's output of a system."""
        return [float(self.metric.from_sums(add_up(output)).score) for output in seeds]

    def by_sentence(self) -> list[list[list[float]]]:
        """Return the scores of the sentences, [systems][seeds][sentences]."""
        return [
            [[float(self.metric.from_sums(row).score) for row in output] for output in seeds]
            for seeds in self.statistics
        ]


def _measure(metric: SegmentMetric, systems: Sequence[System]) -> _Measured:
    """Return the statistics of all outputs, computed in one call, so that COMET's program loads its model only once."""
    flat = iter(metric.statistics([output for system in systems for output in system.outputs]))
    return _Measured(metric, [[next(flat) for _ in system.outputs] for system in systems])


def _for_sentences(bleu: _Measured) -> _Measured:
    """Return BLEU as sacreBLEU computes it for single sentences: n-grams longer than the sentence do not count."""
    metric = copy.copy(bleu.metric)
    assert isinstance(metric, SacrebleuMetric)
    metric.metric = copy.copy(metric.metric)
    metric.metric.effective_order = True
    return _Measured(metric, bleu.statistics)


@dataclass(frozen=True)
class _SplitText:
    """The reference and all outputs as words."""

    reference: SentenceWords
    systems: list[list[SentenceWords]]
    """[systems][seeds]"""


def _buckets(
    split: _SplitText, measured: Mapping[str, _Measured], counts: Mapping[str, int] | None
) -> tuple[BucketTable, ...]:
    """Return all tables by buckets; the table by frequency only if there are `counts` of the training text."""
    bleu, chrf = measured["bleu"], measured["chrf"]
    return (
        *([word_accuracy(split.reference, split.systems, counts)] if counts is not None else []),
        by_length(split.reference, bleu.metric, bleu.statistics, "BLEU"),
        length_differences(split.reference, split.systems),
        sentence_scores(_for_sentences(bleu).by_sentence(), "BLEU"),
        sentence_scores(chrf.by_sentence(), "chrF"),
    )


def _sentence_tables(
    systems: Sequence[System], chrf: _Measured, sources: Sequence[str] | None, reference: Sequence[str], examples: int
) -> tuple[SentenceTable, ...]:
    scores = chrf.by_sentence()
    return tuple(
        sentence_table(
            (systems[left].name, systems[right].name),
            (systems[left].outputs, systems[right].outputs),
            (scores[left], scores[right]),
            sources,
            reference,
            measure=f"sentence chrF|{chrf.metric.signature()}",
            examples=examples,
        )
        for left, right in combinations(range(len(systems)), 2)
    )


def _ngram_tables(names: Sequence[str], split: _SplitText, shown: int) -> tuple[NgramTable, ...]:
    matched = [matched_ngrams(split.reference, seeds) for seeds in split.systems]
    return tuple(
        ngram_table((names[left], names[right]), matched[left], matched[right], shown=shown)
        for left, right in combinations(range(len(names)), 2)
    )


def _notes(with_sources: bool, with_train_target: bool) -> tuple[str, ...]:
    notes = []
    if not with_train_target:
        notes.append("no word accuracy by frequency: give the training text's target side (`--train-target FILE`)")
    if not with_sources:
        notes.append("no counts of copied and untranslated outputs: give the source text (`--source FILE`)")
    return tuple(notes)
