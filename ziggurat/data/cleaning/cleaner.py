"""The filters of a corpus, applied to blocks: first those on single pairs, starting with the cheap ones, then those
that compare pairs with others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig, FilterConfig
from ziggurat.data.cleaning import filters as clean
from ziggurat.data.cleaning.filters import HashSet, Mask, Predicate, pair_hashes
from ziggurat.data.cleaning.held_out import HeldOut, NearDuplicates, Overlap, rows_for, side_hashes, sketches
from ziggurat.data.cleaning.pair_score import PairScorer
from ziggurat.data.lines import LineStream, UnicodeForm, normalise
from ziggurat.data.readers import PairBlock
from ziggurat.system.errors import Problem, printable
from ziggurat.system.files import find_files

if TYPE_CHECKING:
    from ziggurat.data.inputs import Corpus  # which has Examples


Scorers = Mapping[tuple[str, str], PairScorer]
"""Codes of source and target language -> pair score, for each direction that is filtered by it."""

_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 300  # maximum number of characters of a side of an example


class Examples:
    """A few dropped pairs for each reason: those with the smallest hashes, a random choice that depends only on pairs.

    So the joined examples of two blocks are those of both blocks together.
    """

    def __init__(self, record: Mapping[str, Sequence[tuple[int, str, str]]] | None = None) -> None:
        """`record`: return value of the method `record`."""
        self._kept = {reason: {key: (s, t) for key, s, t in pairs} for reason, pairs in (record or {}).items()}

    def see(self, reason: str, keys: NDArray[np.uint64], text: Callable[[int], tuple[str, str]]) -> None:
        """Look at pairs dropped for a reason; `keys` are their hashes [pairs], `text` returns the pair at an index."""
        kept = self._kept.setdefault(reason, {})
        smallest, places = np.unique(keys, return_index=True)
        for key, place in zip(smallest[:_EXAMPLES].tolist(), places[:_EXAMPLES].tolist(), strict=True):
            if key in kept or (len(kept) == _EXAMPLES and key > max(kept)):
                continue
            source, target = text(place)
            kept[key] = printable(source, _EXAMPLE_CHARACTERS), printable(target, _EXAMPLE_CHARACTERS)
            if len(kept) > _EXAMPLES:
                del kept[max(kept)]

    def join(self, other: Examples) -> None:
        """Add the examples of other pairs."""
        for reason, pairs in other._kept.items():
            every = {**self._kept.get(reason, {}), **pairs}
            self._kept[reason] = {key: every[key] for key in sorted(every)[:_EXAMPLES]}

    def record(self) -> dict[str, list[tuple[int, str, str]]]:
        """Return the examples for JSON: hash, source and target of each, by reason."""
        return {reason: [(key, *kept[key]) for key in sorted(kept)] for reason, kept in sorted(self._kept.items())}

    def listed(self, most: int = _EXAMPLES) -> dict[str, list[list[str]]]:
        """Return source and target of at most `most` pairs for each reason."""
        return {reason: [[s, t] for _, s, t in kept[:most]] for reason, kept in self.record().items()}


class Cleaner:
    """The filters of a corpus; a dropped pair is counted under the first filter that applies.

    `scorer` is the pair score, if it is already trained. Raises ConfigError for an unknown script or language, or a
    package that is not installed.
    """

    def __init__(
        self,
        filters: FilterConfig,
        languages: tuple[str, str] = ("", ""),
        scorer: PairScorer | None = None,
    ) -> None:
        self._filters = predicates(filters, languages)
        if filters.pair_score is not None and scorer is not None:
            self._filters.append(("pair_score", partial(_unlikely, scorer=scorer, limit=filters.pair_score.min)))
        self._repair = clean.repair_with() if filters.repair else None

    @classmethod
    def only_empty(cls) -> Cleaner:
        """Return the cleaner for development corpora, which drops only pairs with an empty side."""
        cleaner = cls(FilterConfig(max_characters=None))
        cleaner._filters = [("empty", clean.empty)]
        return cleaner

    def mended(self, source: list[str], target: list[str], form: UnicodeForm) -> tuple[list[str], list[str], Mask]:
        """Return both sides repaired (if requested) and normalised, and a mask of the repaired pairs."""
        changed = np.zeros(len(source), np.bool_)
        if self._repair is not None:
            (source, first), (target, second) = self._repair(source), self._repair(target)
            changed = first | second
        return normalise(source, form), normalise(target, form), changed

    def clean(
        self,
        source: list[str],
        target: list[str],
        counts: Counter[str],
        unwanted: Mask | None = None,
        examples: Examples | None = None,
    ) -> tuple[list[str], list[str], Mask]:
        """Return the remaining pairs of a mended block, and their mask over the block [pairs].

        Dropped pairs are added to `counts` by reason, and `examples` sees them. `unwanted` is the mask of pairs to drop
        because of another tool's score.
        """
        kept = np.ones(len(source), np.bool_)
        left = source, target
        if unwanted is not None:
            left, kept = _drop(left, kept, unwanted, "score", counts, examples)
        for reason, predicate in self._filters:
            if left[0]:
                left, kept = _drop(left, kept, predicate(*left), reason, counts, examples)
        return *left, kept


def _drop(
    pairs: tuple[list[str], list[str]],
    kept: Mask,
    drop: Mask,
    reason: str,
    counts: Counter[str],
    examples: Examples | None,
) -> tuple[tuple[list[str], list[str]], Mask]:
    dropped = int(drop.sum())
    if not dropped:
        return pairs, kept
    counts[reason] += dropped
    if examples is not None:
        gone = [list(compress(side, drop)) for side in pairs]
        examples.see(reason, clean.pair_hashes(gone[0], gone[1]), lambda place: (gone[0][place], gone[1][place]))
    stay = ~drop
    kept = kept.copy()
    kept[kept] = stay
    return (list(compress(pairs[0], stay)), list(compress(pairs[1], stay))), kept


def cleaners_of(config: DataConfig, corpora: Sequence[Corpus], scorers: Scorers | None = None) -> list[Cleaner]:
    """Return the cleaner of each of these training corpora. Raises ConfigError as `Cleaner` does."""
    return [cleaner_of(config, corpus.config, scorers) for corpus in corpora]


def cleaner_of(config: DataConfig, corpus: CorpusConfig, scorers: Scorers | None = None) -> Cleaner:
    """Return the cleaner of a training corpus. Raises ConfigError as `Cleaner` does."""
    languages = config.languages_of(corpus)
    return Cleaner(config.filters_of(corpus), languages, (scorers or {}).get(languages))


def predicates(filters: FilterConfig, languages: tuple[str, str]) -> list[tuple[str, Predicate]]:
    """Return the filters of single pairs, with their reasons; a pair is counted under the first one that drops it.

    Raises ConfigError as Cleaner does.
    """
    named: list[tuple[str, Predicate]] = [("empty", clean.empty), ("nul", clean.nul)]
    if filters.max_characters is not None:
        named.append(("too_long", partial(clean.too_long, limit=filters.max_characters)))
    if filters.max_words is not None:
        named.append(("too_many_words", partial(clean.too_many_words, limit=filters.max_words)))
    if filters.max_length_ratio is not None:
        named.append(("length_ratio", partial(clean.length_ratio, limit=filters.max_length_ratio)))
    if filters.identical:
        named.append(("identical", clean.identical))
    if filters.control_characters:
        named.append(("control_characters", clean.control_characters))
    if filters.markup:
        named.append(("markup", clean.markup))
    if filters.source_script or filters.target_script:
        named.append(("wrong_script", clean.script_filter(filters)))
    named += _agreements(filters)
    if filters.languages is not None:
        found = filters.languages
        for side, (where, limit) in enumerate((("source", found.source), ("target", found.target))):
            if limit is not None:
                name = clean.known_language(languages[side], where)
                test = partial(_other_language, side=side, name=name, limit=limit, letters=found.min_letters)
                named.append((f"{where}_language", test))
    return named


def _agreements(filters: FilterConfig) -> list[tuple[str, Predicate]]:
    wanted, named = filters.agreement, list[tuple[str, Predicate]]()
    if wanted.urls:
        named.append(("urls", partial(clean.addresses_differ, find=clean.web_addresses, sign=".")))
    if wanted.emails:
        named.append(("emails", partial(clean.addresses_differ, find=clean.email_addresses, sign="@")))
    if (share := wanted.numbers) is not None:
        named.append(("numbers", _each(lambda source, target: clean.number_share(source, target) < share)))
    if (most := wanted.punctuation) is not None:
        named.append(("punctuation", _each(lambda source, target: clean.unmatched_marks(source, target) > most)))
    return named


def _each(test: Callable[[str, str], bool]) -> Predicate:
    return lambda source, target: np.fromiter(map(test, source, target), np.bool_, len(source))


def _other_language(
    source: Sequence[str], target: Sequence[str], *, side: int, name: str, limit: float, letters: int
) -> Mask:
    """A side is in the language `name` with less confidence than `limit`."""
    return clean.confidences((source, target)[side], name, letters) < limit


def _unlikely(source: Sequence[str], target: Sequence[str], *, scorer: PairScorer, limit: float) -> Mask:
    """The pair score is below `limit`."""
    return scorer.scores(source, target) < limit


CONTAMINATION = "CONTAMINATION:"
"""Prefix of a notice on held-out sentences in training pairs."""

MANY = 0.01
"""Share of a held-out set's sentences found in training pairs from which there is a notice."""


class PairHashes(NamedTuple):
    """Hashes by which the pairs of a block are compared with others."""

    keys: NDArray[np.uint64]
    """A hash of the pair, [pairs]."""
    bands: NDArray[np.uint64] | None = None
    """Bands of its sketch, [pairs, BANDS]; None without a search for near-duplicates."""
    sides: NDArray[np.uint64] | None = None
    """A hash of each side, [pairs, 2]; None without held-out sets."""

    def select(self, stay: Mask) -> PairHashes:
        """Return the hashes of the pairs of the mask `stay` [pairs]."""
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
    """The filters that compare pairs, with their memory of earlier pairs; None switches one off."""

    def __init__(self, config: DataConfig, near: NearDuplicates | None = None, held_out: HeldOut | None = None) -> None:
        self._filters = [config.filters_of(corpus) for corpus in config.train]
        self._languages = [config.languages_of(corpus) for corpus in config.train]
        self._duplicates, self._near, self._held_out = HashSet(), near, held_out or HeldOut()
        self._overlaps: list[dict[str, Overlap]] = [{} for _ in self._filters]

    @classmethod
    def of_all(cls, config: DataConfig, corpora: Sequence[Corpus]) -> Comparisons:
        """Return all comparisons that `config` requests, after reading the held-out sets.

        Raises DataError as readers do, and for a missing file of `data.held_out`.
        """
        near = [filters.near_duplicates for filters in map(config.filters_of, config.train) if filters.near_duplicates]
        table = NearDuplicates(near[0].memory << 20) if near else None
        return cls(config, table, _held_out_sets(config, corpora))

    def checks(self, corpus: int) -> Iterator[tuple[str, Callable[[PairHashes], Mask]]]:
        """Yield the filters of a training corpus with their reasons, in order; each maps hashes to the pairs to drop.

        Each must see only the pairs that passed the previous filters.
        """
        filters = self._filters[corpus]
        if filters.duplicates:
            yield "duplicate", lambda traces: self._duplicates.add(traces.keys)
        if filters.near_duplicates is not None and (near := self._near) is not None:
            yield "near_duplicate", lambda traces: near.add(_given(traces.bands))
        if self._held_out:
            yield "held_out", lambda traces: self._in_held_out(corpus, traces)

    def _in_held_out(self, corpus: int, traces: PairHashes) -> Mask:
        """Return the pairs to drop because a held-out set contains them; all overlaps are counted."""
        before = self._held_out.overlaps()
        both, either = self._held_out.look(_given(traces.sides), self._languages[corpus])
        own = self._overlaps[corpus]
        for name, now in self._held_out.overlaps().items():
            found = now.since(before[name])
            own[name] = own[name].joined(found) if name in own else found
        return {"pairs": both, "sides": either, "keep": np.zeros_like(both)}[self._filters[corpus].held_out]

    def overlaps(self, corpus: int) -> dict[str, Overlap]:
        """Return the overlaps of a training corpus with the held-out sets, by set."""
        return self._overlaps[corpus]


def _given(array: NDArray[np.uint64] | None) -> NDArray[np.uint64]:
    assert array is not None
    return array


def held_out_label(corpus: Corpus) -> str:
    """Return the name of a development corpus among the held-out sets."""
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
    """Return the total overlap of training corpora with each held-out set."""
    total: dict[str, Overlap] = {}
    for corpus in corpora:
        for name, found in corpus.overlap.items():
            total[name] = found if name not in total else total[name].joined(found)
    return total


def overlap_notices(corpora: Sequence[Corpus], config: DataConfig) -> list[Problem]:
    """Return warnings on held-out sets that overlap with the training pairs left after `held_out`.

    `corpora`: the corpora of both splits.
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
    """Return a warning about the overlap of training pairs with the set `name`; None if it is negligible.

    `of_pairs`: whether it is a set of pairs. `way_out`: how to drop such pairs; None: by `data.filters.held_out`.
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
        f"{found.pairs:,} pairs, and at least one side of {found.sides:,}. Scores on it mean less than they seem to:",
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
