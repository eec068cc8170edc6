"""Cross-entropy filter: a model scores every pair of a corpus, and the least likely share of them is dropped.

The score of a pair is the mean log-probability per target token, including end-of-sentence, so that long sentences are
not penalised. With `reverse` the model translates in the other direction and scores the source given the target: a
backward model finds a teacher's translations that differ in meaning from their source. Each shard is scored separately,
and the threshold comes from the scores of all shards (ziggurat.corpora.jobs).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ziggurat.config.data import FilterConfig
from ziggurat.corpora.jobs.job import JobOutcome, Plan, Work, complete_shards, fix_plan, run_job
from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles
from ziggurat.corpora.jobs.tasks import ModelChoice, opened
from ziggurat.corpora.synthesis.backtranslation import Report, SynthesisJob, content_of, merged, rows_of, write_corpus
from ziggurat.corpora.synthesis.lines import Line, count_lines, readable_lines, text_files
from ziggurat.data.store_checks import InputWatch
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.engines import Engine


@dataclass(frozen=True, kw_only=True)
class FilterJob(SynthesisJob):
    """One call of the filter."""

    engine: Engine = "torch"
    sources: tuple[str, ...]
    """Paths or globs of source text."""
    targets: tuple[str, ...]
    """Paths or globs of its translations, line by line."""
    keep: float = 0.95
    """Share of the scored pairs to keep, above 0 and at most 1."""
    reverse: bool = False
    """The models translate targets into sources."""
    max_pieces: int = FilterConfig().max_pieces or 250
    """Pairs with more subword pieces on a side, or more than a model has positions, are dropped."""

    @property
    def files(self) -> tuple[list[Path], list[Path]]:
        """The files of both sides, in order. Raises DataError if one is missing or contains records."""
        return text_files(self.sources, "--source"), text_files(self.targets, "--target")


class _Pair(NamedTuple):
    source: Line
    target: Line


def filter_pairs(job: FilterJob, work: Work) -> JobOutcome[Report]:
    """Do this call's work on `job`; the corpus does not depend on interruptions or on the number of workers.

    Raises:
        DataError: text that cannot be used or does not pair up, a folder that is in the way or in use.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan, choice = _make_plan(job)
    files = StageFiles(job.out, "scored", plan.fingerprint)
    return run_job(
        plan,
        files,
        partial(_score, job, choice, files),
        partial(_pairs, *job.files),
        partial(_merge, job, plan, files),
        work,
        merged=partial(merged, job.out, plan),
    )


def _make_plan(job: FilterJob) -> tuple[Plan, ModelChoice]:
    if not 0 < job.keep <= 1:
        raise ConfigError(f"`--keep {job.keep:g}`: give a share above 0, at most 1, such as 0.95")
    (sources, targets), watch = job.files, InputWatch()
    found = job.choice.identified(searched=False)
    settings = {
        "keep": job.keep,
        "reverse": job.reverse,
        "max_pieces": job.max_pieces,
        "shard_lines": job.shard_lines,
        **found.settings,
        **found.tag_settings(job.model_tag),
        "sources": [{"files": watch.fingerprint(path)} for path in sources],
        "targets": [{"files": watch.fingerprint(path)} for path in targets],
    }

    def count() -> int:
        lines, others = count_lines(sources), count_lines(targets)
        if lines != others or not lines:
            raise DataError(
                f"{', '.join(map(str, sources))} has {lines:,} lines, {', '.join(map(str, targets))} has {others:,}: "
                "they must pair up, and there must be some"
            )
        return lines

    return fix_plan(job.out, "filter", settings, watch, job.shard_lines, count), found.choice


def _pairs(sources: list[Path], targets: list[Path]) -> Iterator[_Pair]:
    for source, target in zip_longest(readable_lines(sources), readable_lines(targets)):
        if source is None or target is None:
            raise DataError("the files became shorter while they were read")
        yield _Pair(source, target)


def _score(job: FilterJob, choice: ModelChoice, files: StageFiles, shard: Shard[_Pair]) -> Manifest:
    """Write rows (score, source, target) of the pairs that can be scored."""
    translator = opened(choice)
    given, expected = (translator.source_tokenizer, translator.target_tokenizer)
    if job.reverse:
        given, expected = expected, given
    taken = 1 + (job.model_tag is not None)  # positions for end-of-sentence and the tag
    limit = min(job.max_pieces, translator.max_positions - taken) if translator.max_positions else job.max_pieces
    dropped: Counter[str] = Counter()
    pairs: list[tuple[str, str]] = []
    lengths = (given.encode([pair[side].text for pair in shard.items]) for side, given in enumerate((given, expected)))
    for pair, *pieces in zip(shard.items, *lengths, strict=True):
        reason = pair.source.reason or pair.target.reason
        if reason is None and max(map(len, pieces)) > limit:
            reason = "too_long"
        if reason is None:
            pairs.append((pair.source.text, pair.target.text))
        else:
            dropped[reason] += 1
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    sides = (targets, sources) if job.reverse else (sources, targets)
    scores = translator.score(*sides, tag=job.model_tag)
    means = (score.log_probability / len(score.token_log_probabilities) for score in scores)
    # A model that overflows gives NaN; such a pair counts as the least likely.
    rows = [
        (f"{mean if math.isfinite(mean) else -math.inf:.6f}", *pair) for mean, pair in zip(means, pairs, strict=True)
    ]
    return files.write(shard.index, content_of(rows), read=len(shard.items), kept=len(rows), dropped=dropped)


def _merge(job: FilterJob, plan: Plan, files: StageFiles) -> Report:
    manifests = list(complete_shards(plan, files))
    every = (float(row[0]) for manifest in manifests for row in rows_of(files.read(manifest)))
    scores = np.fromiter(every, np.float64, sum(manifest.kept for manifest in manifests))
    if not len(scores):
        raise DataError(f"{job.out}: no pair of {plan.lines:,} could be scored")
    # At most that share is dropped; equally likely pairs are all dropped or all kept.
    scores.sort()
    threshold = float(scores[int((1 - job.keep) * len(scores) + 1e-9)])
    median = float(np.median(scores, overwrite_input=True))

    def kept() -> Iterator[tuple[Manifest, list[tuple[str, str]], Mapping[str, int]]]:
        for manifest in manifests:
            rows = [
                (source, target) for score, source, target in rows_of(files.read(manifest)) if float(score) >= threshold
            ]
            yield manifest, rows, {"cross_entropy": manifest.kept - len(rows)}

    return write_corpus(job.out, plan, kept(), scores={"threshold": threshold, "median": median})
