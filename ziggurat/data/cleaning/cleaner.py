"""The filters of a pair alone, applied to blocks one after another, the cheap ones before the expensive ones.

Each dropped pair counts under one reason. ziggurat.data.cleaning.comparisons has the filters that compare pairs with
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig, FilterConfig
from ziggurat.data.cleaning import filters as clean
from ziggurat.data.cleaning.filters import Mask, Predicate
from ziggurat.data.cleaning.pair_score import PairScorer
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.system.errors import printable

if TYPE_CHECKING:
    from ziggurat.data.inputs import Corpus  # which has Examples

Scorers = Mapping[tuple[str, str], PairScorer]
"""The pair score of each direction that is filtered by it, by the codes of source and target language."""

_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 300  # of a side


class Examples:
    """A few dropped pairs for each reason: those of the smallest hashes, a random choice that depends on nothing else.

    So the examples of two blocks, joined, are those of both blocks together.
    """

    def __init__(self, record: Mapping[str, Sequence[tuple[int, str, str]]] | None = None) -> None:
        """`record`: what `record` returned."""
        self._kept = {reason: {key: (s, t) for key, s, t in pairs} for reason, pairs in (record or {}).items()}

    def see(self, reason: str, keys: NDArray[np.uint64], text: Callable[[int], tuple[str, str]]) -> None:
        """Look at pairs that were dropped for a reason: their hashes [pairs], and the texts of the pair at a place."""
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
        """Take over the examples of other pairs."""
        for reason, pairs in other._kept.items():
            every = {**self._kept.get(reason, {}), **pairs}
            self._kept[reason] = {key: every[key] for key in sorted(every)[:_EXAMPLES]}

    def record(self) -> dict[str, list[tuple[int, str, str]]]:
        """Return them for JSON: hash, source and target of each, by reason."""
        return {reason: [(key, *kept[key]) for key in sorted(kept)] for reason, kept in sorted(self._kept.items())}

    def listed(self, most: int = _EXAMPLES) -> dict[str, list[list[str]]]:
        """Return source and target of at most so many pairs by reason."""
        return {reason: [[s, t] for _, s, t in kept[:most]] for reason, kept in self.record().items()}


class Cleaner:
    """The filters of a corpus; a dropped pair is counted under the first filter that applies.

    `scorer` is the pair score, where it is trained already. Raises ConfigError: an unknown script or language, or a
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
        """Return both sides repaired, if that is asked for, and normalised; and a mask of the repaired pairs."""
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
        """Return the remaining pairs of a block, mended before, and their mask over the block [pairs].

        Dropped pairs are added to `counts` by reason, and `examples` sees them. `unwanted` is the mask of pairs to be
        dropped for a score that another tool gave them.
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
    """Return the filters of a pair alone, with their reasons; their order decides under which one a pair is counted.

    Raises ConfigError: see Cleaner.
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
