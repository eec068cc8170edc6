"""The filters that compare a pair with others: duplicates, near-duplicates, sentences of held-out sets.

Any process can compute the `PairHashes` of a block by itself; the comparison is done in one place, in the order of the
blocks (ziggurat.data.encoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig
from ziggurat.data.cleaning.filters import HashSet, Mask, pair_hashes
from ziggurat.data.cleaning.held_out import HeldOut, NearDuplicates, Overlap, rows_for, side_hashes, sketches
from ziggurat.data.lines import LineStream, UnicodeForm, normalise
from ziggurat.data.readers import PairBlock
from ziggurat.system.errors import Problem
from ziggurat.system.files import find_files

if TYPE_CHECKING:
    from ziggurat.data.inputs import Corpus

CONTAMINATION = "CONTAMINATION:"
"""Beginning of a notice on held-out sentences in training pairs."""

MANY = 0.01
"""Share of a held-out set's sentences in training pairs from which that is worth a notice."""


class PairHashes(NamedTuple):
    """Hashes by which the pairs of a block are compared with others."""

    keys: NDArray[np.uint64]
    """A hash of the pair, [pairs]."""
    bands: NDArray[np.uint64] | None = None
    """Bands of its sketch, [pairs, BANDS]; None where near-duplicates are not looked for."""
    sides: NDArray[np.uint64] | None = None
    """A hash of each side, [pairs, 2]; None where there are no held-out sets."""

    def select(self, stay: Mask) -> PairHashes:
        """Return those of the pairs of the mask `stay` [pairs]."""
        return PairHashes(*(None if array is None else array[stay] for array in self))  # type: ignore[arg-type]


def compared_hashes(config: DataConfig, corpus: int, source: Sequence[str], target: Sequence[str]) -> PairHashes:
    """Return the hashes of a block of pairs of the training corpus of this number that `config` compares."""
    near = config.filters_of(config.train[corpus]).near_duplicates
    return PairHashes(
        pair_hashes(source, target),
        None if near is None else sketches(source, target, rows_for(near.similarity)),
        side_hashes(source, target) if config.dev or config.held_out else None,
    )


class Comparisons:
    """The filters with what they remember of the pairs so far; None: near-duplicates, or pairs held out, are not looked
    for.
    """

    def __init__(self, config: DataConfig, near: NearDuplicates | None = None, held_out: HeldOut | None = None) -> None:
        self._filters = [config.filters_of(corpus) for corpus in config.train]
        self._languages = [config.languages_of(corpus) for corpus in config.train]
        self._duplicates, self._near, self._held_out = HashSet(), near, held_out or HeldOut()
        self._overlaps: list[dict[str, Overlap]] = [{} for _ in self._filters]

    @classmethod
    def of_all(cls, config: DataConfig, corpora: Sequence[Corpus]) -> Comparisons:
        """Return all comparisons that `config` asks for; the held-out sets are read.

        Raises DataError as readers do, and for a missing file of `data.held_out`.
        """
        near = [filters.near_duplicates for filters in map(config.filters_of, config.train) if filters.near_duplicates]
        table = NearDuplicates(near[0].memory << 20) if near else None
        return cls(config, table, _held_out_sets(config, corpora))

    def checks(self, corpus: int) -> Iterator[tuple[str, Callable[[PairHashes], Mask]]]:
        """Yield the filters of a training corpus with their reasons, in order: from traces to the pairs to be dropped.

        Each is to see the pairs that those before left.
        """
        filters = self._filters[corpus]
        if filters.duplicates:
            yield "duplicate", lambda traces: self._duplicates.add(traces.keys)
        if filters.near_duplicates is not None and (near := self._near) is not None:
            yield "near_duplicate", lambda traces: near.add(_given(traces.bands))
        if self._held_out:
            yield "held_out", lambda traces: self._in_held_out(corpus, traces)

    def _in_held_out(self, corpus: int, traces: PairHashes) -> Mask:
        """Return the pairs that are to be dropped because a held-out set has them; they are counted in any case."""
        before = self._held_out.overlaps()
        both, either = self._held_out.look(_given(traces.sides), self._languages[corpus])
        own = self._overlaps[corpus]
        for name, now in self._held_out.overlaps().items():
            found = now.since(before[name])
            own[name] = own[name].joined(found) if name in own else found
        return {"pairs": both, "sides": either, "keep": np.zeros_like(both)}[self._filters[corpus].held_out]

    def overlaps(self, corpus: int) -> dict[str, Overlap]:
        """Return what a training corpus was found to share with the held-out sets, by set."""
        return self._overlaps[corpus]


def _given(array: NDArray[np.uint64] | None) -> NDArray[np.uint64]:
    assert array is not None
    return array


def held_out_label(corpus: Corpus) -> str:
    """Return what a development corpus is called among the held-out sets."""
    return f"{corpus.key} ({corpus.reader.name})"


def _held_out_sets(config: DataConfig, corpora: Sequence[Corpus]) -> HeldOut:
    found = HeldOut()
    for corpus in corpora:
        if corpus.split == "dev":
            languages = config.languages_of(corpus.config)
            found.add_pairs(held_out_label(corpus), _normalised(corpus, config.unicode), languages)
    for number, pattern in enumerate(config.held_out):
        for path in find_files(pattern, f"data.held_out.{number}"):
            found.add_lines(str(path), _lines(path, config.unicode))
    return found


def _normalised(corpus: Corpus, form: UnicodeForm) -> Iterator[PairBlock]:
    for source, target in corpus.reader.blocks():
        yield normalise(source, form), normalise(target, form)


def _lines(path: Path, form: UnicodeForm) -> Iterator[list[str]]:
    stream = LineStream(path)
    while count := stream.available():
        yield normalise(stream.take(count), form)


def total_overlap(corpora: Sequence[Corpus]) -> dict[str, Overlap]:
    """Return what all these training corpora together have in common with each held-out set."""
    total: dict[str, Overlap] = {}
    for corpus in corpora:
        for name, found in corpus.overlap.items():
            total[name] = found if name not in total else total[name].joined(found)
    return total


def overlap_notices(corpora: Sequence[Corpus], config: DataConfig) -> list[Problem]:
    """Return warnings on held-out sets of which something stays in training pairs, whatever `held_out` drops.

    `corpora`: those of both splits.
    """
    of_pairs = {held_out_label(corpus) for corpus in corpora if corpus.split == "dev"}
    training = [corpus for corpus in corpora if corpus.split == "train"]
    notices = []
    for rule, notice in (("keep", overlap_notice), ("pairs", _notice_of_sides)):
        of_rule = (config.filters_of(corpus.config).held_out == rule for corpus in training)
        for name, overlap in total_overlap(list(compress(training, of_rule))).items():
            notices.append(notice(name, overlap, of_pairs=name in of_pairs))
    return [notice for notice in notices if notice]


def overlap_notice(name: str, found: Overlap, *, of_pairs: bool, way_out: str | None = None) -> Problem | None:
    """Return a warning on what training pairs share with the set `name`; None where it is next to nothing.

    `of_pairs`: whether it is a set of pairs. `way_out`: how such pairs are dropped; None: by `data.filters.held_out`.
    """
    if not found.pairs and found.found < _many(found):
        return None
    if way_out is None:
        way_out = f"`data.filters.held_out: {'pairs' if found.pairs else 'sides'}` drops such pairs"
        if 0 < found.pairs < found.sides:
            way_out = f"`data.filters.held_out: pairs` drops the {found.pairs:,}, `sides` all {found.sides:,}"
    return _contamination(
        name,
        f"{found.found:,} of {_sentences_of(name, found, of_pairs)} are in training pairs: both sides of "
        f"{found.pairs:,}, one at least of {found.sides:,} pairs. Scores on it tell less than they seem to:",
        way_out,
    )


def _contamination(name: str, said: str, way_out: str) -> Problem:
    return Problem("data.filters.held_out", f"{CONTAMINATION} {said}", way_out, "warning", (name,))


def _notice_of_sides(name: str, found: Overlap, *, of_pairs: bool) -> Problem | None:
    _, left = found.staying("pairs")
    # An everyday sentence ("Thank you.") is in many pairs, so the set's sentences decide, not the pairs.
    if min(left, found.found) < _many(found):
        return None
    return _contamination(
        name,
        f"{left:,} training pairs have one side among the {_sentences_of(name, found, of_pairs)} and stay "
        f"({found.pairs:,} with both were dropped):",
        "`data.filters.held_out: sides` drops them too",
    )


def _sentences_of(name: str, found: Overlap, of_pairs: bool) -> str:
    return f"{found.sentences:,} sentences of {name}{', sources and targets together,' if of_pairs else ''}"


def _many(found: Overlap) -> float:
    return max(1, MANY * found.sentences)
