"""Random samples of the corpora: for subword models, and for the pair score, which is learnt from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig
from ziggurat.data.cleaning.cleaner import Cleaner, Scorers, cleaners_of
from ziggurat.data.cleaning.pair_score import PairScorer, read_pair_score
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.lines import UnicodeForm
from ziggurat.data.readers import PairBlock
from ziggurat.system.files import write_atomically

_SAMPLE_SEED = 20_17  # any number: the sample must only be the same every time


def train_pair_scores(corpora: Sequence[Corpus], config: DataConfig, progress: Progress) -> Scorers:
    """Return the pair score of each direction, learnt from those of its training corpora that are filtered by it.

    It sees what the other filters of a pair leave.

    Raises DataError where that is too little.
    """
    directions: dict[tuple[str, str], list[Corpus]] = {}
    for corpus in corpora:
        if config.filters_of(corpus.config).pair_score is not None:
            directions.setdefault(config.languages_of(corpus.config), []).append(corpus)
    found = {}
    for languages, chosen in directions.items():
        wanted = [f.pair_score.pairs for f in (config.filters_of(c.config) for c in chosen) if f.pair_score]
        sizes = np.array([corpus.read for corpus in chosen])
        # In proportion to the corpora: a small one has no words that the others need.
        shares = [int(size) for size in np.floor(sizes * min(1.0, wanted[0] / sizes.sum()))]
        blocks = sampled_blocks(chosen, cleaners_of(config, chosen), shares, config.unicode, Counter(), progress)
        pairs = [*chain.from_iterable(zip(*block, strict=True) for block in blocks)]
        progress("learn pair score", 0, None)
        found[languages] = PairScorer.train(pairs)
    return found


def write_pair_scores(folder: Path, scorers: Scorers, config: DataConfig) -> None:
    """Write the pair scores into a folder, for `read_pair_scores`."""
    files = _pair_score_files(config)
    for languages, scorer in scorers.items():
        write_atomically(folder / files[languages], scorer.content())


def read_pair_scores(folder: Path, config: DataConfig) -> Scorers:
    """Return the pair scores in a folder. Raises DataError where one is damaged."""
    files = {languages: folder / name for languages, name in _pair_score_files(config).items()}
    return {languages: read_pair_score(file) for languages, file in files.items() if file.exists()}


def _pair_score_files(config: DataConfig) -> dict[tuple[str, str], str]:
    """Return the name of the file with the pair score of each direction."""
    directions = dict.fromkeys(map(config.languages_of, config.train))
    return {languages: f"pair-score-{number}" for number, languages in enumerate(directions)}


def sampled_blocks(
    corpora: Sequence[Corpus],
    cleaners: Sequence[Cleaner],
    shares: Sequence[int],
    form: UnicodeForm,
    counts: Counter[str],
    progress: Progress,
) -> Iterator[PairBlock]:
    """Yield the pairs of a random sample that the filters leave, mended, in file order, in constant memory.

    The choice is a function of the counts alone.

    Args:
        corpora: with their counts.
        cleaners: of each corpus.
        shares: pairs to draw from each.
        form: Unicode form.
        counts: of dropped pairs, to be added to.
        progress: called with the number of pairs read.
    """
    generator = np.random.default_rng(_SAMPLE_SEED)
    done, total = 0, sum(corpus.read for corpus in corpora)
    for corpus, cleaner, share in zip(corpora, cleaners, shares, strict=True):
        picks = Picks(generator, corpus.read, share)
        for (source, target), unwanted in corpus.scored_blocks():
            picked = picks.take(len(source))
            sides = [list(compress(texts, picked)) for texts in (source, target)]
            first, second, _ = cleaner.mended(sides[0], sides[1], form)
            sources, targets, _ = cleaner.clean(first, second, counts, None if unwanted is None else unwanted[picked])
            yield sources, targets
            done += len(source)
            progress("sample", done, total)


class Picks:
    """A random choice of `wanted` out of `total` items without replacement, revealed in order, in constant memory.

    Items are drawn in windows of fixed size, with a hypergeometric number of chosen items in each, so the choice does
    not depend on how many items are asked for at a time.
    """

    _WINDOW = 8192
    _MOST = 10**9 - 1  # of chosen and of other items, for numpy's hypergeometric

    def __init__(self, generator: np.random.Generator, total: int, wanted: int) -> None:
        self._generator = generator
        self._total = total
        self._wanted = wanted
        self._mask = np.zeros(0, np.bool_)

    def take(self, count: int) -> NDArray[np.bool_]:
        """Return the mask of the chosen items among the next `count`, bool [count]."""
        while len(self._mask) < count and self._total:
            size = min(self._WINDOW, self._total)
            chosen = self._chosen(size, self._total - self._wanted)
            window = np.zeros(size, np.bool_)
            window[self._generator.choice(size, chosen, replace=False)] = True
            self._total -= size
            self._wanted -= chosen
            self._mask = np.concatenate([self._mask, window])
        mask, self._mask = self._mask[:count], self._mask[count:]
        return mask

    def _chosen(self, size: int, others: int) -> int:
        """Draw the number of chosen items in a window of `size` of those left, of which `others` are not chosen."""
        if max(self._wanted, others) <= self._MOST:
            return int(self._generator.hypergeometric(self._wanted, others, size))
        # numpy refuses such numbers. Of a billion items a window is so small a part that a binomial number is as good;
        # within these bounds, since what is left must be able to hold what is left to choose.
        drawn = int(self._generator.binomial(size, self._wanted / self._total))
        return min(max(drawn, size - others), size, self._wanted)


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` evenly over corpora of `sizes` pairs; the shares that small ones cannot fill go to the others."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    # From the smallest: what it leaves is then shared by all larger ones.
    for position, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        shares[number] = min(sizes[number], left // (len(sizes) - position))
        left -= shares[number]
    return shares
