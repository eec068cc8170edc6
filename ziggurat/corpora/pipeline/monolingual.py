"""The step that puts text of one language together, for back-translation and distillation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from ziggurat.config.pipeline import MonolingualText
from ziggurat.corpora.pipeline.corpora import fetched_files, of_fetch
from ziggurat.corpora.pipeline.road import Progress, Road, write_side
from ziggurat.corpora.pipeline.settings import settings_of
from ziggurat.corpora.pipeline.step import Step, write_document
from ziggurat.corpora.synthesis.plan import Line, readable_lines
from ziggurat.data.cleaning.filters import HashSet
from ziggurat.data.cleaning.held_out import SentenceSet, sentence_hashes
from ziggurat.data.lines import normalise
from ziggurat.system.errors import DataError
from ziggurat.system.files import find_files

_BLOCK = 10_000


def monolingual_step(road: Road) -> Step:
    """Return the step that puts text of one language together: readable lines, each once, none of a test set."""
    texts = road.config.monolingual
    sides = [(side, entries) for side, entries in (("source", texts.source), ("target", texts.target)) if entries]
    held = road.config.bitext.hold_out
    after = of_fetch(*(entry.fetch for _, entries in sides for entry in entries))
    if road.config.bitext.dev or road.config.test:
        after["sets"] = ["*"]
    if held is not None:
        after["clean"] = ["held-out/*"]

    def work(folder: Path) -> None:
        counts = {}
        for side, entries in sides:
            held_out = [*road.at("sets").glob("*/*")] if "sets" in after else []
            held_out += [*road.at("clean", "held-out").glob("*")] if "clean" in after else []
            language = road.languages[side == "target"]
            lines = _Lines(road, side, entries, [path for path in held_out if path.suffix == f".{language}"])
            kept = write_side(folder / f"{side}.txt", lines.blocks())
            if not kept:
                raise DataError(f"monolingual.{side}: no line is left; dropped: {lines.counts}")
            counts[side] = {**lines.counts, "kept": kept}
        write_document(folder / "report.json", counts)

    return Step(
        "monolingual",
        f"cleans text of one language ({' and '.join(side for side, _ in sides)})",
        {
            "languages": list(road.languages),
            **{side: [settings_of(entry, exclude={"path"}) for entry in entries] for side, entries in sides},
        },
        work,
        after,
        lambda: {
            (key := f"monolingual.{side}.{n}.path"): find_files(entry.path, key)
            for side, entries in sides
            for n, entry in enumerate(entries)
            if entry.path
        },
        ("*.txt", "report.json"),
    )


class _Lines:
    """The lines of one language that are kept, and counts of those that are not.

    Args:
        road: of the pipeline.
        side: `source` or `target`.
        entries: where they come from.
        known: files with the lines of development and test sets, which are left out.
    """

    def __init__(self, road: Road, side: str, entries: Sequence[MonolingualText], known: Sequence[Path]) -> None:
        self._road, self._side, self._entries = road, side, entries
        self._language = road.languages[side == "target"]
        self._seen = HashSet()
        self._known = SentenceSet(
            sentence_hashes(normalise(path.read_text("utf-8").split("\n"), "none")) for path in known
        )
        self.counts: dict[str, int] = {}

    def blocks(self) -> Iterator[list[str]]:
        """Yield the lines that are kept."""
        progress = Progress(self._road.say)
        read = 0
        for number, entry in enumerate(self._entries):
            key = f"monolingual.{self._side}.{number}"
            files = self._files(entry, key)
            lines, left = readable_lines(files), entry.lines
            # No block is larger than what is left to take: a line that is not written must not count as seen.
            while block := list(islice(lines, _BLOCK if left is None else min(_BLOCK, left))):
                read += len(block)
                kept = self._kept(block)
                yield kept
                left = None if left is None else left - len(kept)
                progress.phase(f"text of {self._language}", read, None)

    def _files(self, entry: MonolingualText, key: str) -> list[Path]:
        if entry.path is not None:
            return find_files(entry.path, f"{key}.path")
        assert entry.fetch is not None
        return fetched_files(self._road, entry.fetch, [self._language], key)

    def _kept(self, block: Sequence[Line]) -> list[str]:
        texts = []
        known = self._known.look(sentence_hashes([line.text for line in block]))
        for line, held_out in zip(block, known, strict=True):
            why = line.reason or ("held_out" if held_out else None)
            if why:
                self.counts[why] = self.counts.get(why, 0) + 1
            else:
                texts.append(line.text)
        if not texts:
            return []
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64, len(texts))
        repeated = self._seen.add(hashes)
        if repeated.any():
            self.counts["duplicate"] = self.counts.get("duplicate", 0) + int(repeated.sum())
        return [text for text, again in zip(texts, repeated, strict=True) if not again]
