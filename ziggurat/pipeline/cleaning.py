"""The step that cleans the bitext, once for all models, and takes pairs for development and test out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappush, heapreplace
from pathlib import Path

import xxhash

from ziggurat.config.pipeline_corpora import HoldOutConfig
from ziggurat.data.clean import Cleaner
from ziggurat.data.lines import normalise
from ziggurat.data.readers import CorpusReader, PairBlock
from ziggurat.errors import DataError
from ziggurat.pipeline.corpora import corpus_files, of_fetch, reader_of
from ziggurat.pipeline.road import Progress, Road, write_sides
from ziggurat.pipeline.step import Step, write_document

__all__ = ["clean_step"]


def clean_step(road: Road) -> Step:
    """Return the step that cleans the training corpora: `train/CORPUS.LANGUAGE`, `held-out/SET.LANGUAGE`."""
    config = road.config
    held = config.bitext.hold_out or HoldOutConfig()

    def work(folder: Path) -> None:
        counts, cleaner = {}, Cleaner(config.cleaning)
        taken = _Taken(held)
        progress = Progress(road.say, "pairs")
        for number, (name, corpus) in enumerate(zip(road.bitext_names(), config.bitext.train, strict=True)):
            reader = reader_of(road, corpus, f"bitext.train.{number}")
            dropped: Counter[str] = Counter()
            blocks = _cleaned(reader, cleaner, dropped, progress)
            kept = write_sides(road.sides("clean", "cleaned" if taken else "train", name), taken.seeing(blocks))
            counts[name] = {"read": kept + sum(dropped.values()), "kept": kept, **dict(sorted(dropped.items()))}
        if not sum(of["kept"] for of in counts.values()):
            raise DataError(f"bitext.train: no pair is left after cleaning: {counts}; see section `cleaning`")
        if taken:
            taken.write(road)
            for name in counts:
                blocks = _plain(road.sides("clean", "cleaned", name))
                left = write_sides(road.sides("clean", "train", name), map(taken.without, blocks))
                counts[name] |= {"held_out": counts[name]["kept"] - left, "kept": left}
                for path in road.sides("clean", "cleaned", name):
                    path.unlink()
        write_document(folder / "report.json", counts)

    return Step(
        "clean",
        f"cleans {len(config.bitext.train)} parallel corpora",
        {
            "languages": list(road.languages),
            "cleaning": config.cleaning.model_dump(mode="json", exclude_defaults=True, exclude={"max_pieces"}),
            "corpora": [
                {"name": name, **corpus.model_dump(mode="json", include=_OF_TEXT, exclude_defaults=True)}
                for name, corpus in zip(road.bitext_names(), config.bitext.train, strict=True)
            ],
            "hold_out": held.model_dump(),
        },
        work,
        of_fetch(*(corpus.fetch for corpus in config.bitext.train)),
        lambda: corpus_files(road, config.bitext.train, "bitext.train"),
        ("train/*", "held-out/*", "report.json"),
    )


_OF_TEXT = {"format", "columns", "fetch"}
"""Keys of a corpus that its text depends on, besides its files."""


def _cleaned(reader: CorpusReader, cleaner: Cleaner, dropped: Counter[str], progress: Progress) -> Iterator[PairBlock]:
    """Yield the pairs that the filters leave, normalised."""
    read = 0
    for source, target in reader.blocks():
        read += len(source)
        kept_source, kept_target, _ = cleaner.clean(normalise(source, "none"), normalise(target, "none"), dropped)
        yield kept_source, kept_target
        progress.phase(f"clean {reader.name}", read, None)


def _plain(files: tuple[Path, Path]) -> Iterator[PairBlock]:
    from ziggurat.config.data import CorpusConfig

    corpus = CorpusConfig(source=str(files[0]), target=str(files[1]), format="text")
    yield from CorpusReader.of(corpus, "clean", ("", "")).blocks()


class _Taken:
    """The pairs that are held out: a random choice that depends on nothing but the pairs."""

    def __init__(self, sizes: HoldOutConfig) -> None:
        self._sizes = sizes
        # Those of the smallest hash, as a heap with the largest in front.
        self._heap: list[tuple[int, str, str]] = []
        self._chosen: set[int] = set()
        self._texts: tuple[set[str], set[str]] = (set(), set())

    def __bool__(self) -> bool:
        return bool(self._sizes.dev or self._sizes.test)

    def seeing(self, blocks: Iterator[PairBlock]) -> Iterator[PairBlock]:
        """Yield the blocks, having looked at their pairs."""
        wanted = self._sizes.dev + self._sizes.test
        for block in blocks:
            for source, target in zip(*block, strict=True) if wanted else ():
                entry = (-xxhash.xxh3_64_intdigest(f"{source}\n{target}".encode()), source, target)
                full = len(self._heap) == wanted
                if entry[0] in self._chosen or (full and entry <= self._heap[0]):
                    continue
                self._chosen.add(entry[0])
                if full:
                    self._chosen.discard(heapreplace(self._heap, entry)[0])
                else:
                    heappush(self._heap, entry)
            yield block

    def write(self, road: Road) -> None:
        """Write the sets. Raises DataError where there are too few pairs."""
        wanted = self._sizes.dev + self._sizes.test
        if len(self._heap) < wanted:
            raise DataError(f"bitext.hold_out: asks for {wanted:,} pairs, but cleaning leaves only {len(self._heap):,}")
        pairs = sorted(self._heap, reverse=True)
        for name, chosen in (("dev", pairs[: self._sizes.dev]), ("test", pairs[self._sizes.dev :])):
            if chosen:
                block = [source for _, source, _ in chosen], [target for _, _, target in chosen]
                write_sides(road.sides("clean", "held-out", name), [block])
        self._texts = {source for _, source, _ in pairs}, {target for _, _, target in pairs}

    def without(self, block: PairBlock) -> PairBlock:
        """Return the pairs of a block that have neither side in common with what is held out."""
        sources, targets = self._texts
        kept = [pair for pair in zip(*block, strict=True) if pair[0] not in sources and pair[1] not in targets]
        return [source for source, _ in kept], [target for _, target in kept]
