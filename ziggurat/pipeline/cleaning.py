"""The step that cleans the bitext, once for all models, and takes pairs for development and test out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappush, heapreplace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ziggurat.cleaning.held_out import NOTHING, HeldOut, side_hashes
from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.config.pipeline_corpora import BitextCorpus, HoldOutConfig
from ziggurat.data.cleaner import Examples, Scorers, cleaner_of, cleaners_of
from ziggurat.data.comparisons import MANY, Comparisons, TraceMaker, overlap_notices
from ziggurat.data.encoding import CleanedBlock, compared
from ziggurat.data.inputs import (
    Corpus,
    count_pairs,
    exchanged_by_name,
    find_corpora,
    nothing_left,
    side_notices,
)
from ziggurat.data.readers import CorpusReader, PairBlock
from ziggurat.data.sampling import train_pair_scores
from ziggurat.errors import ConfigError, DataError
from ziggurat.pipeline.amounts import Amounts
from ziggurat.pipeline.corpora import corpus_files, of_fetch, resolved
from ziggurat.pipeline.costs import PAIRS_CLEANED, by_rate
from ziggurat.pipeline.road import Progress, Road, write_sides
from ziggurat.pipeline.step import Step, write_document
from ziggurat.pipeline.wording import errors_worded, worded

__all__ = ["clean_step"]

_OF_TEXT = {"format", "columns", "fetch", "filters", "scores"}
"""Keys of a corpus that what is left of it depends on, besides its files."""


def clean_step(road: Road) -> Step:
    """Return the step that cleans the training corpora: `train/CORPUS.LANGUAGE`, `held-out/SET.LANGUAGE`."""
    config = road.config
    held = config.bitext.hold_out or HoldOutConfig()
    wanted = held.dev + held.test
    after = of_fetch(*(corpus.fetch for corpus in config.bitext.train))
    if config.bitext.dev or config.test:
        after["sets"] = ["*"]  # training pairs are compared with them

    def work(folder: Path) -> None:
        with errors_worded(corpora=lambda: _keys(road)):
            _Cleaning(road, held).run(folder)

    def check() -> None:
        for number, corpus in enumerate(config.bitext.train):
            if notice := exchanged_by_name(corpus, road.languages, f"bitext.train.{number}"):
                raise ConfigError(f"{notice}; if they are right, rename the files")
        with errors_worded(corpora=lambda: _keys(road)):
            data = _data(road, [CorpusConfig(source="-", target="-", filters=c.filters) for c in config.bitext.train])
            for as_data in data.train:
                cleaner_of(data, as_data)
        given = Amounts(road).given() if wanted else None
        if given is not None and not given.rough and given.number <= wanted:
            only = f"but bitext.train has {given.number:,}: nothing would be left to train on; hold out fewer"
            raise DataError(f"bitext.hold_out: asks for {wanted:,} pairs, {only}")

    return Step(
        "clean",
        f"cleans the bitext: {', '.join(road.bitext_names()[:5])}{f'; holds out {wanted:,} pairs' if wanted else ''}",
        {
            "languages": list(road.languages),
            "cleaning": config.cleaning.model_dump(mode="json", exclude_defaults=True, exclude={"max_pieces"}),
            "corpora": [
                {"name": name, **_form(corpus)}
                for name, corpus in zip(road.bitext_names(), config.bitext.train, strict=True)
            ],
            "hold_out": held.model_dump(),
        },
        work,
        after,
        lambda: corpus_files(road, config.bitext.train, "bitext.train"),
        ("train/*", "held-out/*", "report.json"),
        lambda: by_rate(Amounts(road).given(), PAIRS_CLEANED),
        check,
    )


def _form(corpus: BitextCorpus) -> dict[str, Any]:
    """Return what is left of a corpus depends on, besides its files."""
    paths = {"scores": {"__all__": {"path"}}}
    return corpus.model_dump(mode="json", include=_OF_TEXT, exclude=paths, exclude_defaults=True)


def _keys(road: Road) -> dict[str, str]:
    """Return the key or name in the pipeline's file of each corpus that `_data` has."""
    train = {f"data.train.{n}": f"bitext.train.{n}" for n in range(len(road.config.bitext.train))}
    return train | {f"data.dev.{n}": name for n, (name, _) in enumerate(_sets(road))}


def _sets(road: Road) -> list[tuple[str, tuple[Path, Path]]]:
    """Return key or name and files of each set that training pairs are compared with."""
    sets = [(f"bitext.dev.{n}", road.sides("sets", "dev", str(n))) for n in range(len(road.config.bitext.dev))]
    return sets + [(f"test set {test.name}", road.sides("sets", "test", test.name)) for test in road.config.test]


def _data(road: Road, train: list[CorpusConfig]) -> DataConfig:
    """Return the section `data` that these corpora are cleaned by."""
    # As pairs, both kinds: of a pair in a training corpus both sides are looked for in one set.
    return DataConfig(
        source_language=road.languages[0],
        target_language=road.languages[1],
        store="-",
        train=train,
        dev=[CorpusConfig(name=name, source=str(source), target=str(target)) for name, (source, target) in _sets(road)],
        filters=road.config.cleaning,
    )


class _Cleaning:
    """One call of the step."""

    def __init__(self, road: Road, held: HoldOutConfig) -> None:
        self._road, self._taken = road, _Taken(held)
        self._progress = Progress(road.say, "pairs")

    def run(self, folder: Path) -> None:
        """Clean all corpora, then take out what is to be held out."""
        road, taken = self._road, self._taken
        names = road.bitext_names()
        data = _data(road, [resolved(road, one, f"bitext.train.{n}") for n, one in enumerate(road.config.bitext.train)])
        # (1) Count and learn.
        corpora = find_corpora(data)
        training = [corpus for corpus in corpora if corpus.split == "train"]
        cleaners_of(data, training)
        count_pairs(corpora, self._progress.phase)
        scorers = train_pair_scores(training, data, self._progress.phase)
        comparisons, traces = Comparisons.of_all(data, corpora), TraceMaker(data)
        # (2) Clean.
        for number, (name, corpus) in enumerate(zip(names, training, strict=True)):
            blocks = self._blocks(number, corpus, data, scorers, traces, comparisons)
            place = road.sides("clean", "cleaned" if taken else "train", name)
            corpus.kept = write_sides(place, taken.seeing(blocks))
            corpus.overlap = comparisons.overlaps(number)
        if not sum(corpus.kept for corpus in training):
            counts = sum((corpus.dropped for corpus in training), Counter[str]())
            raise nothing_left(sum(corpus.read for corpus in training), counts, training)
        # (3) Take out what is held out.
        unseen = []
        if taken:
            taken.write(road)
            before = sum(corpus.kept for corpus in training)
            for name, corpus in zip(names, training, strict=True):
                others = map(taken.without, _plain(road.sides("clean", "cleaned", name)))
                kept = write_sides(road.sides("clean", "train", name), others)
                corpus.dropped["held_out"] += corpus.kept - kept
                corpus.kept = kept
                for path in road.sides("clean", "cleaned", name):
                    path.unlink()
            left = sum(corpus.kept for corpus in training)
            if not left:
                raise taken.nothing_left(before)
            unseen = taken.notices(before - left)
        # (4) Tell.
        found = side_notices(corpora, data) + overlap_notices(training, data)
        notices = [worded(notice, corpora=_keys(road)) for notice in found] + unseen
        notices += [_nothing_left(n, names[n], corpus) for n, corpus in enumerate(training) if not corpus.kept]
        for notice in notices:
            road.say(f"warning: {notice}")
        reports = {name: self._report(corpus) for name, corpus in zip(names, training, strict=True)}
        write_document(folder / "report.json", {"corpora": reports, "notices": notices})

    def _blocks(
        self,
        number: int,
        corpus: Corpus,
        data: DataConfig,
        scorers: Scorers,
        traces: TraceMaker,
        comparisons: Comparisons,
    ) -> Iterator[PairBlock]:
        """Yield what is left of a corpus, and count the rest in it."""
        cleaner = cleaner_of(data, corpus.config, scorers)
        done = 0
        for lines, unwanted in corpus.scored_blocks():
            dropped, examples = Counter[str](), Examples()
            first, second, mended = cleaner.mended(*lines, data.unicode)
            source, target, _ = cleaner.clean(first, second, dropped, unwanted, examples)
            block = CleanedBlock(number, len(lines[0]), dropped, int(mended.sum()), examples, source, target, target,
                                 traces.make(number, source, target), None)  # fmt: skip
            block = compared(block, comparisons, lambda of, place: (of.source[place], of.target[place]))
            corpus.dropped.update(block.dropped)
            corpus.repaired += block.repaired
            corpus.examples.join(block.examples)
            yield block.source, block.target
            done += len(lines[0])
            self._progress.phase(f"clean {corpus.reader.name}", done, corpus.read)

    @staticmethod
    def _report(corpus: Corpus) -> dict[str, Any]:
        return {
            "read": corpus.read,
            "kept": corpus.kept,
            "repaired": corpus.repaired,
            "dropped": dict(sorted(corpus.dropped.items())),
            "examples": corpus.examples.listed(),
        }


def _nothing_left(number: int, name: str, corpus: Corpus) -> str:
    """Return the notice on a corpus of which nothing is left; what comes after goes on without it."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in corpus.dropped.most_common() if count)
    return f"bitext.train.{number} ({name}): none of its {corpus.read:,} pairs is left ({reasons}); it is left out"


def _plain(files: tuple[Path, Path]) -> Iterator[PairBlock]:
    """Yield the pairs of two text files."""
    corpus = CorpusConfig(source=str(files[0]), target=str(files[1]), format="text")
    yield from CorpusReader.of(corpus, "clean", ("", "")).blocks()


class _Taken:
    """The pairs that are held out: a random choice that depends on nothing but the pairs.

    Case, punctuation and blanks do not count: a pair that differs from another in nothing else is the same one.
    """

    def __init__(self, sizes: HoldOutConfig) -> None:
        self._sizes = sizes
        self._wanted = sizes.dev + sizes.test
        # Those of the smallest hash, and these hashes, negative, as a heap with the largest in front.
        self._chosen: dict[int, tuple[str, str]] = {}
        self._heap: list[int] = []
        self._texts = HeldOut()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def seeing(self, blocks: Iterator[PairBlock]) -> Iterator[PairBlock]:
        """Yield the blocks, having looked at their pairs."""
        for block in blocks:
            if self._wanted:
                self._see(block)
            yield block

    def _see(self, block: PairBlock) -> None:
        sides = side_hashes(*block)
        # A pair without letters and digits on a side tests nothing.
        for number in np.flatnonzero((sides != NOTHING).all(1)):
            key, pair = -xxhash.xxh3_64_intdigest(sides[number].tobytes()), (block[0][number], block[1][number])
            full = len(self._heap) == self._wanted
            if (known := self._chosen.get(key)) is not None:
                self._chosen[key] = min(known, pair)  # whichever came first
            elif not full or key > self._heap[0]:
                self._chosen[key] = pair
                if full:
                    del self._chosen[heapreplace(self._heap, key)]
                else:
                    heappush(self._heap, key)

    def write(self, road: Road) -> None:
        """Write the sets. Raises DataError where there are too few pairs."""
        if len(self._heap) < self._wanted:
            raise DataError(
                f"bitext.hold_out: asks for {self._wanted:,} pairs, but cleaning leaves only {len(self._heap):,} that "
                "differ in more than case and punctuation"
            )
        pairs = [self._chosen[key] for key in sorted(self._heap, reverse=True)]
        for name, chosen in (("dev", pairs[: self._sizes.dev]), ("test", pairs[self._sizes.dev :])):
            if chosen:
                block = [source for source, _ in chosen], [target for _, target in chosen]
                write_sides(road.sides("clean", "held-out", name), [block])
                self._texts.add_pairs(name, [block])

    def without(self, block: PairBlock) -> PairBlock:
        """Return the pairs of a block that have neither side in common with what is held out."""
        _, either = self._texts.look(side_hashes(*block))
        source, target = (list(compress(side, ~either)) for side in block)
        return source, target

    def nothing_left(self, dropped: int) -> DataError:
        """Return the error where no pair is left to train on, of `dropped` that cleaning had left."""
        return DataError(
            f"bitext.hold_out: all {dropped:,} pairs that cleaning leaves have a side of the {self._wanted:,} that are "
            "held out, so nothing is left to train on; hold out fewer, or name sets of your own (`bitext.dev`, `test`)"
        )

    def notices(self, dropped: int) -> list[str]:
        """Return a notice where `dropped`, the pairs left out of training, are many more than those held out."""
        if (more := dropped - self._wanted) < max(1, MANY * self._wanted):
            return []
        return [
            f"{more:,} more pairs have a side of the {self._wanted:,} that are held out, case and punctuation aside, "
            "and were dropped (bitext.hold_out)"
        ]
