"""The comparison of systems on one test set: scores, tests of significance, and tables of their differences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ziggurat.evaluate.buckets import SentenceWords, by_length, length_differences, sentence_scores, word_accuracy
from ziggurat.evaluate.comet import CometEnvironment
from ziggurat.evaluate.differences import Text, count_outputs, matched_ngrams, ngram_table, sentence_table
from ziggurat.evaluate.findings import BucketTable, NgramTable, OutputCount, Scores, SentenceTable, SystemNotes
from ziggurat.evaluate.metrics import TestSet, check_metrics
from ziggurat.evaluate.scores import METRICS, check_lines
from ziggurat.evaluate.segments import SacrebleuMetric, SegmentMetric, Statistics, Words
from ziggurat.evaluate.significance import RESAMPLINGS, TRIALS, compare_scores
from ziggurat.system.errors import ConfigError, DataError, other_format, printable

FORMAT = 1
"""Version of the JSON form; other versions are not read."""


@dataclass(frozen=True)
class System:
    """A system to compare, with its translations of the test set."""

    name: str
    outputs: Sequence[Sequence[str]]
    """One list of lines per seed, at least one."""
    origins: Sequence[str] = field(default=())
    """The origin of each output; may be left out."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. Tables whose input was not given are left out; `notes` names them."""

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


def comparison_from_json(text: str | bytes, name: str) -> Comparison:
    """Return the comparison from its JSON record; `name`, such as that of a file, is for messages.

    Raises DataError when the text is not a comparison of this version.
    """
    try:
        record = _RECORD.validate_json(text)
        found = record.pop("format", None)
        if found != FORMAT:
            raise DataError(other_format(name, found, FORMAT, "compare again"))
        return _COMPARISON.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise DataError(
            f"{name}: not a comparison as printed by `ziggurat evaluate --compare --json`: {where}: {first['msg']}"
        ) from None


_RECORD: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_COMPARISON = TypeAdapter(Comparison)


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
        systems: at least one; the tests of significance and the tables of pairs need two.
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
        say: takes messages on the progress, since tests of many systems take minutes.

    Raises DataError when there are no lines or they do not pair up; ConfigError for systems without outputs or with
    equal names, and the errors of the metrics.
    """
    _check(systems, references, sources)
    check_metrics(metrics)
    test_set = TestSet(references, sources, target_language, tokenize, lowercase)
    words = Words(tokenize=test_set.splitting.bleu, lowercase=lowercase)
    say = say or (lambda _: None)
    names = [system.name for system in systems]
    measured: dict[str, _Measured] = {}
    # (1) Statistics, once per metric; the tables of sentences need BLEU and chrF in any case
    for metric in dict.fromkeys((*metrics, "bleu", "chrf")):
        say(f"scoring by {metric}")
        measured[metric] = _measure(test_set.metric(metric, comet), systems)
    # (2) Scores and tests of significance
    scores = []
    for metric in dict.fromkeys(metrics):
        if len(systems) > 1:
            say(f"testing by {metric}")
        found = measured[metric]
        scores.append(compare_scores(found.metric, names, found.statistics, resamplings=resamplings, trials=trials))
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
        sentence_tables=_sentence_tables(systems, measured["chrf"], Text(sources, references[0]), examples),
        ngrams=_ngram_tables(names, split, examples),
        notes=_notes(sources is not None, train_target is not None),
    )


def _check(systems: Sequence[System], references: Sequence[Sequence[str]], sources: Sequence[str] | None) -> None:
    """Raise the errors of `compare` about its texts and systems."""
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

    def by_sentence(self) -> list[list[list[float]]]:
        """Return the scores of the sentences, [systems][seeds][sentences]."""
        return [
            [[float(self.metric.from_sums(row).score) for row in output] for output in seeds]
            for seeds in self.statistics
        ]


def _measure(metric: SegmentMetric, systems: Sequence[System]) -> _Measured:
    """Return the statistics of all outputs, computed in one call: COMET's program then loads its model only once."""
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
    """Return all tables by buckets; that by frequency only where there are `counts` of the training text."""
    bleu, chrf = measured["bleu"], measured["chrf"]
    return (
        *([word_accuracy(split.reference, split.systems, counts)] if counts is not None else []),
        by_length(split.reference, bleu.metric, bleu.statistics, "BLEU"),
        length_differences(split.reference, split.systems),
        sentence_scores(_for_sentences(bleu).by_sentence(), "BLEU"),
        sentence_scores(chrf.by_sentence(), "chrF"),
    )


def _sentence_tables(
    systems: Sequence[System], chrf: _Measured, text: Text, examples: int
) -> tuple[SentenceTable, ...]:
    """Return one table for each pair of systems, by sentence chrF."""
    scores = chrf.by_sentence()
    return tuple(
        sentence_table(
            (systems[left].name, systems[right].name),
            (systems[left].outputs, systems[right].outputs),
            (scores[left], scores[right]),
            text,
            measure=f"sentence chrF|{chrf.metric.signature()}",
            examples=examples,
        )
        for left, right in combinations(range(len(systems)), 2)
    )


def _ngram_tables(names: Sequence[str], split: _SplitText, shown: int) -> tuple[NgramTable, ...]:
    """Return one table for each pair of systems."""
    matched = [matched_ngrams(split.reference, seeds) for seeds in split.systems]
    return tuple(
        ngram_table((names[left], names[right]), matched[left], matched[right], shown=shown)
        for left, right in combinations(range(len(names)), 2)
    )


def _notes(with_sources: bool, with_train_target: bool) -> tuple[str, ...]:
    """Return notes on the tables that are left out."""
    notes = []
    if not with_train_target:
        notes.append("no word accuracy by frequency: give the training text's target side (`--train-target FILE`)")
    if not with_sources:
        notes.append("no counts of copied and untranslated outputs: give the source text (`--source FILE`)")
    return tuple(notes)
