"""Sample translations for a report: where runs differ most, where all do well, and where all do badly."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import regex
from sacrebleu import CHRF

from ziggurat.evaluate.splitting import unspaced_script

_PER_GROUP = 3
# A character with the marks upon it, but foreign words and numbers whole; blanks by themselves.
_CHARACTERS = regex.compile(r"\s+|[\p{Latin}\p{N}]+|\X")


@dataclass(frozen=True)
class Output:
    """The translation of a sentence by one run.

    Attributes:
        run: number of the run in the report.
        score: chrF of the sentence, 0 to 100.
        words: the words, each with True where the reference has it; the k-th occurrence needs a k-th one there. In a
            script without blanks, stretches of characters.
        between: what stands between two of them: a blank, or nothing in a script without blanks.
    """

    run: int
    score: float
    words: tuple[tuple[str, bool], ...]
    between: str = " "


@dataclass(frozen=True)
class Sample:
    """One sentence with all translations; `line` counts from 1."""

    line: int
    source: str
    reference: str
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class SampleGroup:
    """Sentences chosen for the same reason, which is the title."""

    title: str
    samples: tuple[Sample, ...]


def sample_groups(
    names: Sequence[str], outputs: Sequence[Sequence[str] | None], sources: Sequence[str], references: Sequence[str]
) -> list[SampleGroup]:
    """Return sentences worth reading, each in one group only.

    Args:
        names: names of all runs of the report.
        outputs: lines of each run, one for each sentence; None where a run has no translations.
        sources: source sentences.
        references: reference translations.
    """
    chrf = CHRF()
    scores = {
        run: [chrf.sentence_score(line, [reference]).score for line, reference in zip(lines, references, strict=True)]
        for run, lines in enumerate(outputs)
        if lines is not None
    }
    spaced = unspaced_script(references) is None
    lines = range(len(references))
    means = [sum(of_run[i] for of_run in scores.values()) / len(scores) for i in lines]
    wanted: list[tuple[str, list[int]]] = []
    for run, own in scores.items() if len(scores) > 1 else ():
        ahead = {i: own[i] - max(theirs[i] for other, theirs in scores.items() if other != run) for i in lines}
        order = [i for i in sorted(lines, key=lambda i: -ahead[i]) if ahead[i] > 0]
        wanted.append((f"{names[run]} is ahead by most", order))
    ranked = sorted(lines, key=lambda i: means[i])
    whose = "All do" if len(scores) > 1 else "It does"
    wanted += [
        (f"{whose} best here", ranked[::-1]),
        (f"{whose} worst here", ranked),
        ("In between", [ranked[n] for n in sorted(range(len(ranked)), key=lambda n: abs(n + 0.5 - len(ranked) / 2))]),
    ]
    groups, taken = [], set[int]()  # a sentence is shown once, in the first group that wants it
    for title, order in wanted:
        chosen = [i for i in order if i not in taken][:_PER_GROUP]
        taken.update(chosen)
        samples = tuple(_sample(i, sources, references, outputs, scores, spaced) for i in chosen)
        groups += [SampleGroup(title, samples)] if samples else []
    return groups


def _sample(
    i: int,
    sources: Sequence[str],
    references: Sequence[str],
    outputs: Sequence[Sequence[str] | None],
    scores: dict[int, list[float]],
    spaced: bool,
) -> Sample:
    found = tuple(
        Output(run, scores[run][i], _marked(lines[i], references[i], spaced), " " if spaced else "")
        for run, lines in enumerate(outputs)
        if lines is not None
    )
    return Sample(i + 1, sources[i], references[i], found)


def _marked(line: str, reference: str, spaced: bool) -> tuple[tuple[str, bool], ...]:
    """Return the words of a line, or stretches of its characters, each with True where the reference has it."""
    split = str.split if spaced else _CHARACTERS.findall
    left = Counter(_bare(word) for word in split(reference))
    marked = []
    for word in split(line):
        hit = word.isspace() or left[_bare(word)] > 0
        left[_bare(word)] -= hit
        marked.append((word, hit))
    if spaced:
        return tuple(marked)
    return tuple(("".join(word for word, _ in its), hit) for hit, its in groupby(marked, key=itemgetter(1)))


def _bare(word: str) -> str:
    """Return a word in lower case without the punctuation around it; a word of punctuation alone is kept."""
    return word.strip(".,;:!?\"'()[]«»„“”‚‘’").lower() or word


def as_csv(
    names: Sequence[str], outputs: Sequence[Sequence[str] | None], sources: Sequence[str], references: Sequence[str]
) -> str:
    """Return all translations as CSV: line, source, reference, and a column for each run with translations."""
    columns = [(name, lines) for name, lines in zip(names, outputs, strict=True) if lines is not None]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", "source", "reference", *(name for name, _ in columns)])
    for i, (source, reference) in enumerate(zip(sources, references, strict=True)):
        writer.writerow([i + 1, source, reference, *(lines[i] for _, lines in columns)])
    return text.getvalue()
