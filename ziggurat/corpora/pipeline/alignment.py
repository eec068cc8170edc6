"""The step that aligns the words of the student's corpora."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

from ziggurat.config.pipeline_models import AlignmentStepConfig
from ziggurat.corpora.jobs.run import fix_plan, made_once
from ziggurat.corpora.jobs.tasks import Aligning, Line, run_text_job
from ziggurat.corpora.pipeline.costs import PAIRS_ALIGNED, Amounts, by_rate
from ziggurat.corpora.pipeline.road import Corpora, Progress, Road, write_side
from ziggurat.corpora.pipeline.settings import joined, settings_of
from ziggurat.corpora.pipeline.step import Step
from ziggurat.data.aligner import Aligner, TrainingOptions
from ziggurat.data.readers import CorpusReader, PairBlock
from ziggurat.data.store_checks import InputWatch
from ziggurat.data.word_links import spread_pairs
from ziggurat.system.files import write_atomically
from ziggurat.system.staging import discard

_SHARD_PAIRS = 10_000


def align_step(road: Road, how: AlignmentStepConfig) -> Step:
    """Return the step: `links/CORPUS.links`, a line for each pair, such as `0-0 1-2`."""
    corpora = Corpora(road)
    chosen = corpora.train("student")
    settings = joined(settings_of(how), {"corpora": [corpus.name for corpus in chosen]})

    def work(folder: Path) -> int | None:
        readers = [CorpusReader.of(corpus, f"student.{corpus.name}", road.languages) for corpus in chosen]
        watch = InputWatch()
        files = [watch.fingerprint(path) for reader in readers for part in reader.files for path in part]

        def blocks() -> Iterator[PairBlock]:
            return chain.from_iterable(reader.blocks() for reader in readers)

        def lines() -> Iterator[Line]:
            return (Line(source, (target,)) for block in blocks() for source, target in zip(*block, strict=True))

        def count() -> int:
            return sum(len(block[0]) for block in blocks())

        plan = fix_plan(folder / "job", "align", {**settings, "files": files}, watch, _SHARD_PAIRS, count)
        # (1) One aligner learns from all corpora together: a small one has few words.
        with made_once(plan, "aligner") as path:
            if not path.exists():
                write_atomically(path, _trained(blocks(), plan.lines, how, road).content())
        # (2) It aligns them, shard by shard.
        merge = partial(_write, folder / "links", readers)
        work = road.bulk.work(1, 1, "cpu", Progress(road.say, "pairs").show)
        outcome = run_text_job(plan, Aligning(str(path), how.symmetrise), lines, merge, work)
        if outcome.report is not None:
            discard(plan.folder)
        return outcome.signal

    return Step(
        "align",
        "aligns the words of the student's corpora",
        settings,
        work,
        {step: patterns for step, patterns in corpora.inputs("student").items() if step not in ("align", "sets")},
        outputs=("links/*",),
        cost=lambda: by_rate(Amounts(road).of("student"), PAIRS_ALIGNED),
        is_job=True,
    )


def _trained(blocks: Iterator[PairBlock], pairs: int, how: AlignmentStepConfig, road: Road) -> Aligner:
    options = TrainingOptions(how.model1_iterations, how.hmm_iterations, TrainingOptions().empty)

    def report(direction: str, iteration: int, likelihood: float) -> None:
        road.say(f"{direction}, iteration {iteration}: log-likelihood {likelihood:,.0f}")

    return Aligner.train(spread_pairs(blocks, pairs, how.pairs), "split", options, report)


def _write(folder: Path, readers: list[CorpusReader], shards: Iterator[bytes]) -> None:
    """Write the links of all pairs, one file for each corpus."""
    links = (line for content in shards for line in content.decode().splitlines())
    for reader in readers:
        found = (list(islice(links, len(source))) for source, _ in reader.blocks())
        write_side(folder / f"{reader.name}.links", found)
