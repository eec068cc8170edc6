"""The step that aligns the words of the student's corpora."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ziggurat.alignment.aligner import Aligner
from ziggurat.alignment.direction import TrainingOptions
from ziggurat.alignment.links import format_links
from ziggurat.config.pipeline_models import AlignmentStepConfig
from ziggurat.data.readers import CorpusReader
from ziggurat.data.word_links import spread_pairs
from ziggurat.pipeline.amounts import Amounts
from ziggurat.pipeline.costs import PAIRS_ALIGNED, by_rate
from ziggurat.pipeline.road import Corpora, Progress, Road, write_side
from ziggurat.pipeline.settings import joined, settings_of
from ziggurat.pipeline.step import Step

__all__ = ["align_step"]


def align_step(road: Road, how: AlignmentStepConfig) -> Step:
    """Return the step: `links/CORPUS.links`, a line for each pair, such as `0-0 1-2`."""
    corpora = Corpora(road)
    chosen = corpora.train("student")

    def work(folder: Path) -> None:
        readers = [CorpusReader.of(corpus, f"student.{corpus.name}", road.languages) for corpus in chosen]
        # (1) One aligner learns from all corpora together: a small one has few words.
        total = sum(len(block[0]) for reader in readers for block in reader.blocks())
        usual = TrainingOptions()
        options = TrainingOptions(how.model1_iterations, how.hmm_iterations, usual.empty)
        blocks = chain.from_iterable(reader.blocks() for reader in readers)

        def report(direction: str, iteration: int, likelihood: float) -> None:
            road.say(f"{direction}, iteration {iteration}: log-likelihood {likelihood:,.0f}")

        aligner = Aligner.train(spread_pairs(blocks, total, how.pairs), "split", options, report)
        # (2) It aligns them one after another.
        progress = Progress(road.say, "pairs")
        for reader in readers:
            links = _links(reader, aligner, how, progress)
            write_side(folder / "links" / f"{reader.name}.links", links)

    return Step(
        "align",
        "aligns the words of the student's corpora",
        joined(settings_of(how), {"corpora": [corpus.name for corpus in chosen]}),
        work,
        {step: patterns for step, patterns in corpora.inputs("student").items() if step not in ("align", "sets")},
        outputs=("links/*",),
        cost=lambda: by_rate(Amounts(road).of("student"), PAIRS_ALIGNED),
    )


def _links(reader: CorpusReader, aligner: Aligner, how: AlignmentStepConfig, progress: Progress) -> Iterator[list[str]]:
    """Yield the links of a corpus, block by block."""
    done = 0
    for source, target in reader.blocks():
        yield [format_links(links) for links in aligner.align(source, target, how.symmetrise)]
        done += len(source)
        progress.phase(f"align {reader.name}", done, None)
