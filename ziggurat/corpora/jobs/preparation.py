"""`prepare` as a job: one call learns the vocabulary, all calls encode shards, and one makes the store.

The store equals that of `ziggurat.data.prepare.prepare` in one process, byte for byte: shards contain the part of its
work that treats each block separately, and comparisons between pairs are made when the shards are merged, in order.
Shards do not cross files, so a call for a part reads only the files of its shards, if there are as many files as parts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from ziggurat.config.data import DataConfig
from ziggurat.corpora.jobs.job import JobOutcome, Plan, Work, at_work, do_shards, fix_plan, made_once
from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles, cut
from ziggurat.data.aligner import Link, read_aligner
from ziggurat.data.cleaning.cleaner import Comparisons
from ziggurat.data.cleaning.filters import Mask
from ziggurat.data.encoding import EncodedBlock, PairEncoder, block_text, compared, pack, unpack
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.prepare import Inputs, PrepareReport, Trained, learn, prepare, reusable_store, stored_notices
from ziggurat.data.readers import PairBlock, ReadNotes
from ziggurat.data.subword import load_tokenizers, save_tokenizers
from ziggurat.data.subword_training import read_pair_scores, write_pair_scores
from ziggurat.data.word_links import HmmLinks, words_of
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import building, tidy

SHARD_PAIRS = 50_000
"""Minimum number of pairs in a shard, which ends with a block of the reader."""
_SHARDS_OF_FILE = 1_000_000  # shard numbers reserved for each file
_LEARNT = "learned"


class _Item(NamedTuple):
    """A block of a corpus: the corpus's number within its split, lines, links from files, pairs excluded by scores."""

    split: str
    corpus: int
    lines: PairBlock
    links: list[list[Link]] | None
    unwanted: Mask | None


def prepare_job(
    config: DataConfig,
    folder: Path,
    work: Work,
    *,
    force: bool = False,
    progress: Progress = lambda phase, done, total: None,
    shard_pairs: int = SHARD_PAIRS,
) -> JobOutcome[PrepareReport]:
    """Do this call's work on preparing `config` in the folder of a job; see ziggurat.data.prepare.prepare.

    `progress` is called with (phase, done, total or None). Raises the errors of `prepare` and
    ziggurat.corpora.jobs.job.run_job.
    """
    inputs = Inputs(config, progress)
    store = Path(config.store).expanduser().absolute()
    tidy(store)
    if reusable_store(store, inputs.settings, force) is not None:  # raises if something is in the way
        return JobOutcome(None, prepare(config, progress=progress, inputs=inputs))
    settings = {"verb": "prepare", "shard_pairs": shard_pairs, "data": inputs.settings}
    plan = fix_plan(folder, "prepare", settings, inputs.watch, 1, lambda: 0)
    with at_work(plan, alone=work.part[1] == 1):
        parts = _Parts(config, inputs.corpora, plan, StageFiles(folder, "encoded", plan.fingerprint, "arrow"))
        parts.learn(progress, missing_allowed=not work.only_merge)
        stopped_by = None if work.only_merge else parts.encode(work, shard_pairs)
        plan.check_inputs()
        if stopped_by is not None or work.part[1] > 1:
            return JobOutcome(None, None, stopped_by)
        parts.refuse_missing()
        return JobOutcome(None, prepare(config, force=force, progress=progress, inputs=inputs, parts=parts))


@dataclass
class _Parts:
    """The parts of a store: the learned models and the encoded shards."""

    config: DataConfig
    corpora: list[Corpus]
    plan: Plan
    encoded: StageFiles

    def learn(self, progress: Progress, *, missing_allowed: bool) -> None:
        """Learn tokenizers and aligner, unless another call has done so, and read the counts of the corpora."""
        with made_once(self.plan, _LEARNT) as path:
            if not path.exists():
                if not missing_allowed:
                    raise DataError(f"{self.plan.folder}: no part is done; run the same command without `--merge`")
                with building(path) as directory:
                    self._learn(directory, progress)
        document = parse_json(read_bounded(path / "corpora.json"), str(path / "corpora.json"))
        for corpus, entry in zip(self.corpora, document["corpora"], strict=True):
            corpus.read_of, corpus.maker = Counter(dict(enumerate(entry["read"]))), None
            corpus.read = corpus.read_of.total()
            corpus.reader.notes = ReadNotes(
                entry["carriage_returns"], entry["byte_order_marks"], entry.get("short_rows", 0)
            )
        self._notices = stored_notices(document["notices"], self.corpora)
        self._tokenizers = load_tokenizers(path)

    def _learn(self, directory: Path, progress: Progress) -> None:
        learned = learn(self.corpora, self.config, directory, progress)
        write_pair_scores(directory, learned.scorers, self.config)
        for corpus in self.corpora:
            if isinstance(corpus.maker, HmmLinks):
                write_atomically(directory / "aligner", corpus.maker.aligner.content())
                break
        entries = [
            {"read": [corpus.read_of[part] for part in range(len(corpus.reader.files))], **vars(corpus.reader.notes)}
            for corpus in self.corpora
        ]
        document = {"corpora": entries, "notices": list(map(str, learned.notices))}
        write_atomically(directory / "corpora.json", json.dumps(document, indent=1).encode())
        write_atomically(directory / "data.json", self.config.model_dump_json().encode())

    def encode(self, work: Work, shard_pairs: int) -> int | None:
        """Encode the missing shards of this call; return the number of the signal that stopped it, or None."""
        files = list(self._files())
        done = {manifest.shard: manifest.read for manifest in self.encoded.finished()}
        shared = len(files) < work.part[1]

        def mine(shard: int) -> bool:
            file, number = divmod(shard, _SHARDS_OF_FILE)
            return (file + number if shared else file) % work.part[1] == work.part[0]

        def shards() -> Iterator[Shard[_Item]]:
            for file, (number, corpus) in enumerate(files):
                if shared or mine(file * _SHARDS_OF_FILE):
                    blocks = corpus.blocks(words_of(self.config, self._tokenizers))
                    yield from cut(
                        (_Item(corpus.split, number, *block) for block in blocks),
                        shard_pairs,
                        lambda shard: shard not in done and mine(shard),
                        start=file * _SHARDS_OF_FILE,
                        weight=lambda item: len(item.lines[0]),
                    )

        before = sum(read for shard, read in done.items() if mine(shard))
        # If parts share files, only reading them finds the shards of each.
        owned = (corpus.read for file, (_, corpus) in enumerate(files) if mine(file * _SHARDS_OF_FILE))
        total = None if shared else sum(owned)
        if before == total:
            return None
        do = partial(_encode, str(self.plan.folder / _LEARNT), self.encoded)
        return do_shards(do, shards(), work, before, total)

    def _files(self) -> Iterator[tuple[int, Corpus]]:
        """Yield every file of every corpus as a separate corpus, with the number of its corpus in its split."""
        numbers = {"train": 0, "dev": 0}
        for corpus in self.corpora:
            for place, part in enumerate(corpus.reader.files):
                files = corpus.alignments
                alignments = None if files is None else files._replace(paths=[files.paths[place]])
                reader = replace(corpus.reader, files=[part], notes=ReadNotes())
                scores = [column._replace(paths=[column.paths[place]]) for column in corpus.scores]
                yield (
                    numbers[corpus.split],
                    replace(corpus, reader=reader, read=corpus.read_of[place], alignments=alignments, scores=scores),
                )
            numbers[corpus.split] += 1

    def refuse_missing(self) -> None:
        """Raise DataError unless all shards are complete."""
        found = sum(manifest.read for manifest in self.encoded.finished())
        total = sum(corpus.read for corpus in self.corpora)
        if found != total:
            raise DataError(
                f"{self.plan.folder}: {found:,} of {total:,} pairs are encoded; run the same command without `--merge`"
            )

    def learned(self, directory: Path) -> Trained:
        """Return the learned models and save the tokenizers in `directory`; the pair scores are no longer needed."""
        save_tokenizers(directory, *self._tokenizers)
        return Trained(self._tokenizers, self._notices, {})

    def blocks(self, split: str, comparisons: Comparisons) -> Iterator[EncodedBlock]:
        """Yield the blocks of one split, in order, compared."""
        splits: Sequence[str] = [corpus.split for _, corpus in self._files()]
        text = partial(block_text, self._tokenizers)
        for manifest in self.encoded.finished():
            if splits[manifest.shard // _SHARDS_OF_FILE] == split:
                for block in unpack(self.encoded.read(manifest)):
                    yield compared(block, comparisons, text)


def _encode(learned: str, files: StageFiles, shard: Shard[_Item]) -> Manifest:
    config, encoder, aligner = _opened(learned, shard.items[0].split)
    seen, blocks = Comparisons(config), list[EncodedBlock]()
    for item in shard.items:
        links = item.links
        if links is None and aligner is not None:
            links = aligner.links(item.lines, encoder.words)
        # Duplicates within the shard are not segmented; all other comparisons are made at the end.
        block = compared(encoder.cleaned(item.corpus, item.lines, links, item.unwanted), seen, encoder.text)
        blocks.append(encoder.encoded(block))
    read, kept = sum(block.read for block in blocks), sum(len(block.source[1]) for block in blocks)
    return files.write(shard.index, pack(blocks), read=read, kept=kept, dropped={})


@lru_cache(maxsize=2)
def _opened(learned: str, split: str) -> tuple[DataConfig, PairEncoder, HmmLinks | None]:
    """Open the learned models, once in a worker's life."""
    folder = Path(learned)
    config = DataConfig.model_validate_json(read_bounded(folder / "data.json"))
    aligner = None
    if config.aligned(split) and (folder / "aligner").exists():
        aligner = HmmLinks(read_aligner(folder / "aligner"), config.alignment.symmetrise)
    scorers = read_pair_scores(folder, config)
    return config, PairEncoder(config, load_tokenizers(folder), split, 1, scorers), aligner
