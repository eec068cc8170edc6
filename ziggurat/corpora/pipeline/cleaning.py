"""The step that cleans the bitext, once for all models, and takes pairs for development and test out of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from heapq import heappush, heapreplace
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.config.pipeline import HoldOutConfig, pipeline_names
from ziggurat.corpora.pipeline.context import PipelineContext, Progress, errors_renamed, write_sides
from ziggurat.corpora.pipeline.corpora import corpus_files, of_fetch, resolved, text_settings
from ziggurat.corpora.pipeline.costs import CorpusSizes, cleaning
from ziggurat.corpora.pipeline.step import Expected, Step, joined, settings_of, write_document
from ziggurat.data.cleaning.cleaner import MANY, Comparisons, Scorers, cleaner_of, cleaners_of, overlap_notices
from ziggurat.data.cleaning.held_out import NOTHING, HeldOut, side_hashes
from ziggurat.data.encoding import BlockCleaner, CleanedBlock, compared
from ziggurat.data.inputs import (
    Corpus,
    count_pairs,
    exchanged_by_name,
    find_corpora,
    nothing_left,
    side_notices,
)
from ziggurat.data.readers import CorpusReader, PairBlock
from ziggurat.data.signs import sign_notices
from ziggurat.data.subword_training import read_pair_scores, train_pair_scores, write_pair_scores
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.processes import in_order, usable_cpus, worker_pool
from ziggurat.system.small_files import read_bounded


class HeldOutPairs:
    """The held-out pairs: a random choice that depends only on the pairs.

    Pairs that differ only in case, punctuation and spaces count as the same pair.
    """

    def __init__(self, sizes: HoldOutConfig) -> None:
        self._sizes = sizes
        self._wanted = sizes.dev + sizes.test
        # The pairs with the smallest hashes, and these hashes, negated, as a heap with the largest in front.
        self._chosen: dict[int, tuple[str, str]] = {}
        self._heap: list[int] = []
        self._texts = HeldOut()

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def seeing(self, blocks: Iterator[PairBlock]) -> Iterator[PairBlock]:
        """Yield the blocks after looking at their pairs."""
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

    def write(self, context: PipelineContext) -> None:
        """Write the sets. Raises DataError if there are too few pairs."""
        if len(self._heap) < self._wanted:
            raise DataError(
                f"bitext.hold_out: asks for {self._wanted:,} pairs, but cleaning leaves only {len(self._heap):,} that "
                "differ in more than case and punctuation"
            )
        pairs = [self._chosen[key] for key in sorted(self._heap, reverse=True)]
        for name, chosen in (("dev", pairs[: self._sizes.dev]), ("test", pairs[self._sizes.dev :])):
            if chosen:
                block = [source for source, _ in chosen], [target for _, target in chosen]
                write_sides(context.sides("clean", "held-out", name), [block])
                self._texts.add_pairs(name, [block])

    def without(self, block: PairBlock) -> PairBlock:
        """Return the pairs of a block that share no side with the held-out pairs."""
        _, either = self._texts.look(side_hashes(*block))
        source, target = (list(compress(side, ~either)) for side in block)
        return source, target

    def nothing_left(self, dropped: int) -> DataError:
        """Return the error to raise if none of the `dropped` pairs that passed cleaning is left to train on."""
        return DataError(
            f"bitext.hold_out: all {dropped:,} pairs that cleaning leaves share a side with the {self._wanted:,} that "
            "are held out, so nothing is left to train on; hold out fewer, or name sets of your own (`bitext.dev`, "
            "`test`)"
        )

    def notices(self, dropped: int, left: int) -> list[str]:
        """Return notices if few pairs are left, or if many more were `dropped` from training than are held out."""
        found = []
        if (more := dropped - self._wanted) >= max(1, MANY * self._wanted):
            found.append(
                f"{more:,} more pairs have a side of the {self._wanted:,} that are held out, case and punctuation "
                "aside, and were dropped (bitext.hold_out)"
            )
        if left < self._wanted:
            found.append(f"{self._wanted:,} pairs are held out and {left:,} left to train on (bitext.hold_out)")
        return found


_PAIRS_OF_WORKER = 50_000
"""Minimum number of pairs worth starting a process for: with all filters about 8,000 are cleaned per second."""
_MOST_WORKERS = 24
"""Maximum number of processes: the main one reads, compares and writes 190,000 pairs a second, enough for this many."""


class CleanStep(Step):
    """The step that cleans the training corpora: `train/CORPUS.LANGUAGE`, `held-out/SET.LANGUAGE`."""

    name = "clean"
    outputs = ("train/*", "held-out/*", "report.json")

    def __init__(self, context: PipelineContext) -> None:
        self._context, self._bitext = context, context.config.bitext
        self._held = self._bitext.hold_out or HoldOutConfig()
        self._wanted = self._held.dev + self._held.test
        self._names = context.bitext_names()
        held_out = f"; holds out {self._wanted:,} pairs" if self._wanted else ""
        self.title = f"cleans the bitext: {', '.join(self._names[:5])}{held_out}"
        self.settings = {
            "languages": list(context.languages),
            "cleaning": settings_of(context.config.cleaning, exclude={"max_pieces"}),
            "corpora": [
                joined({"name": name}, text_settings(corpus))
                for name, corpus in zip(self._names, self._bitext.train, strict=True)
            ],
            "hold_out": settings_of(self._held),
        }
        compared_with = {"sets": ["*"]} if self._bitext.dev or context.config.test else {}
        self.after = of_fetch(*(corpus.fetch for corpus in self._bitext.train)) | compared_with

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of the corpora and of their scores."""
        return corpus_files(self._context, self._bitext.train, "bitext.train")

    def check(self) -> None:
        """Refuse filters that cannot work, empty corpora, swapped sides, and requests to hold out too many pairs."""
        for number, corpus in enumerate(self._bitext.train):
            if notice := exchanged_by_name(corpus, self._context.languages, f"bitext.train.{number}"):
                raise ConfigError(f"{notice}; if they are right, rename the files")
        with errors_renamed(corpora=self._keys):
            data = self._data([CorpusConfig(source="-", target="-", filters=c.filters) for c in self._bitext.train])
            for as_data in data.train:
                cleaner_of(data, as_data)
        sizes = CorpusSizes(self._context)
        for number in range(len(self._bitext.train)):
            reader = sizes.reader(number)
            for side in zip(*reader.files, strict=True) if reader is not None else ():
                if not any(path.stat().st_size for path in side):
                    why = f"{side[0]} is empty; give a file with sentences, or leave it out"
                    raise DataError(f"bitext.train.{number}: {why}")
        given = sizes.given() if self._wanted else None
        if given is not None and not given.rough and given.number <= self._wanted:
            only = f"but bitext.train has {given.number:,}: nothing would be left to train on; hold out fewer"
            raise DataError(f"bitext.hold_out: asks for {self._wanted:,} pairs, {only}")

    def cost(self) -> Expected:
        """Return the expected cost of cleaning."""
        given = CorpusSizes(self._context).given()
        expected = cleaning(given, self._context.config.cleaning, _workers(given.number if given else 0))
        if given is None or 2 * self._wanted <= given.number:
            return expected
        return replace(expected, said=f"{expected.said}, most of which are held out and not trained on")

    def work(self, folder: Path) -> None:
        """Clean all corpora, then take out the held-out pairs."""
        with errors_renamed(corpora=self._keys):
            self._clean(folder)

    def _keys(self) -> dict[str, str]:
        """Return the key or name in the pipeline's file of each corpus that `_data` has."""
        train = {f"data.train.{n}": f"bitext.train.{n}" for n in range(len(self._bitext.train))}
        return train | {f"data.dev.{n}": name for n, (name, _) in enumerate(self._sets())}

    def _sets(self) -> list[tuple[str, tuple[Path, Path]]]:
        """Return the key or name, and the files, of each set to compare training pairs with."""
        sides, tests = self._context.sides, self._context.config.test
        sets = [(f"bitext.dev.{n}", sides("sets", "dev", str(n))) for n in range(len(self._bitext.dev))]
        return sets + [(f"test set {test.name}", sides("sets", "test", test.name)) for test in tests]

    def _data(self, train: list[CorpusConfig]) -> DataConfig:
        # Both kinds are given as pairs, because both sides of a training pair are looked up in the same set.
        sets = [CorpusConfig(name=name, source=str(files[0]), target=str(files[1])) for name, files in self._sets()]
        return DataConfig(
            source_language=self._context.languages[0],
            target_language=self._context.languages[1],
            store="-",
            train=train,
            dev=sets,
            filters=self._context.config.cleaning,
        )

    def _clean(self, folder: Path) -> None:
        context, taken, progress = self._context, HeldOutPairs(self._held), Progress(self._context.say, "pairs")
        keyed = [(f"bitext.train.{number}", corpus) for number, corpus in enumerate(self._bitext.train)]
        data = self._data([resolved(context, corpus, key) for key, corpus in keyed])
        # (1) Count and learn.
        corpora = find_corpora(data)
        training = [corpus for corpus in corpora if corpus.split == "train"]
        cleaners_of(data, training)
        count_pairs(corpora, progress.phase)
        scorers = train_pair_scores(training, data, progress.phase)
        comparisons = Comparisons.of_all(data, corpora)
        # (2) Clean.
        with _block_cleaning(data, scorers, sum(corpus.read for corpus in training), folder) as cleaned:
            for number, (name, corpus) in enumerate(zip(self._names, training, strict=True)):
                tasks = (_Task(number, lines, unwanted) for lines, _, unwanted in corpus.blocks())
                blocks = _compared(cleaned(tasks), corpus, comparisons, progress)
                files = context.sides("clean", "cleaned" if taken else "train", name)
                corpus.kept = write_sides(files, taken.seeing(blocks))
                corpus.overlap = comparisons.overlaps(number)
        if not sum(corpus.kept for corpus in training):
            counts = sum((corpus.dropped for corpus in training), Counter[str]())
            raise nothing_left(sum(corpus.read for corpus in training), counts, training)
        # (3) Take out the held-out pairs.
        unseen = self._without_held_out(training, taken) if taken else []
        # (4) Report.
        signs = sign_notices({corpus.key: corpus.signs for corpus in corpora}, data, segmented=False)
        found = side_notices(corpora, data) + signs + overlap_notices(corpora, data)
        notices = [notice.shown(pipeline_names(corpora=self._keys())) for notice in found] + unseen
        reports: dict[str, dict[str, Any]] = {}
        for number, (name, corpus) in enumerate(zip(self._names, training, strict=True)):
            lines = {"read": corpus.read, "kept": corpus.kept, "repaired": corpus.repaired}
            reports[name] = {**lines, "dropped": dict(corpus.dropped), "examples": corpus.examples.listed()}
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in corpus.dropped.most_common() if count)
            if not corpus.kept:
                left = f"none of its {corpus.read:,} pairs is left ({reasons})"
                notices.append(f"bitext.train.{number} ({name}): {left}; it is left out")
            dropped = f"; dropped: {reasons}" if corpus.kept < corpus.read else ""
            context.say(f"{name}: kept {corpus.kept:,} of {corpus.read:,} pairs{dropped}")
        for notice in notices:
            context.say(f"warning: {notice}")
        write_document(folder / "report.json", {"corpora": reports, "notices": notices})

    def _without_held_out(self, training: Sequence[Corpus], taken: HeldOutPairs) -> list[str]:
        """Write the held-out sets and the training corpora without their pairs; return notices."""
        taken.write(self._context)
        before = sum(corpus.kept for corpus in training)
        for name, corpus in zip(self._names, training, strict=True):
            cleaned = self._context.sides("clean", "cleaned", name)
            plain = CorpusConfig(source=str(cleaned[0]), target=str(cleaned[1]), format="text")
            others = map(taken.without, CorpusReader.of(plain, "clean", ("", "")).blocks())
            kept = write_sides(self._context.sides("clean", "train", name), others)
            corpus.dropped["held_out"] += corpus.kept - kept
            corpus.kept = kept
            for path in cleaned:
                path.unlink()
        if not (left := sum(corpus.kept for corpus in training)):
            raise taken.nothing_left(before)
        return taken.notices(before - left, left)


def _compared(
    blocks: Iterator[CleanedBlock], corpus: Corpus, comparisons: Comparisons, progress: Progress
) -> Iterator[PairBlock]:
    """Yield the pairs of a corpus's blocks that pass comparisons with others, and count the rest in the corpus."""
    done = 0
    for cleaned in blocks:
        block = compared(cleaned, comparisons, lambda of, place: (of.source[place], of.target[place]))
        corpus.dropped.update(block.dropped)
        corpus.repaired += block.repaired
        corpus.examples.join(block.examples)
        yield block.source, block.target
        done += block.read
        progress.phase(f"clean {corpus.reader.name}", done, corpus.read)


class _Task(NamedTuple):
    corpus: int
    lines: PairBlock
    unwanted: NDArray[np.bool_] | None
    """Pairs excluded by another tool's score, [pairs]."""


@contextlib.contextmanager
def _block_cleaning(
    data: DataConfig, scorers: Scorers, pairs: int, folder: Path
) -> Iterator[Callable[[Iterable[_Task]], Iterator[CleanedBlock]]]:
    """Yield a function that cleans blocks, in order; if there are many pairs, in worker processes."""
    if (workers := _workers(pairs)) == 1:
        cleaner = BlockCleaner(data, "train", scorers)
        yield partial(map, lambda task: cleaner.cleaned(*task)[0])
        return
    with TemporaryDirectory(dir=folder) as name:
        # Passed in files, which each worker reads once, because a pair score contains a large lexicon.
        given = Path(name)
        write_atomically(given / "data.json", data.model_dump_json().encode())
        write_pair_scores(given, scorers, data)
        with worker_pool(workers, way_out="let it use fewer CPUs (`taskset -c 0-3 ziggurat pipeline ...`)") as submit:
            yield lambda tasks: in_order(partial(submit, _clean, given), tasks, 2 * workers)


def _workers(pairs: int) -> int:
    return max(1, min(usable_cpus(), pairs // _PAIRS_OF_WORKER, _MOST_WORKERS))


def _clean(folder: Path, task: _Task) -> CleanedBlock:
    return _opened(folder).cleaned(*task)[0]


@lru_cache(maxsize=1)
def _opened(folder: Path) -> BlockCleaner:
    """Open the filters, once in a worker's life."""
    data = DataConfig.model_validate_json(read_bounded(folder / "data.json"))
    return BlockCleaner(data, "train", read_pair_scores(folder, data))
