"""One direction of word alignment: the source's words generate the target's. Training by expectation maximisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.alignment.hmm import Emissions, JumpCounts, Jumps, Posteriors, posteriors
from ziggurat.data.alignment.lexicon import Lexicon
from ziggurat.data.alignment.model1 import translation_table

Sentences = Sequence[NDArray[np.int32]]
"""Word ids of each sentence; -1: a word that the model does not know."""

_CELLS = 1 << 18
"""Most pairs of words in a batch; it bounds the memory: a batch takes about 100 bytes for each."""


class TrainingOptions(NamedTuple):
    """Settings of an aligner's training."""

    model1_iterations: int = 5
    """Iterations of IBM Model 1, which the HMM starts from."""
    hmm_iterations: int = 5
    """Iterations of the HMM."""
    empty: float = 0.2
    """Probability that a word comes from the empty word, which stands for no word of the other side."""


class Direction:
    """A trained direction.

    Args:
        lexicon: translation probabilities.
        jumps: weights of jumps.
        empty: probability of the empty word.
    """

    def __init__(self, lexicon: Lexicon, jumps: Jumps, empty: float) -> None:
        self.lexicon = lexicon
        self.jumps = jumps
        self.empty = empty

    def links(self, sources: Sentences, targets: Sentences) -> list[NDArray[np.int64]]:
        """Return for each pair the source word of each target word, [target words], -1 where there is none.

        Each target word gets its most probable source word, by the posterior of the HMM, or none where the empty word
        is more probable. A sentence without words has no links on either side.
        """
        found = [np.full(len(target), -1, np.int64) for target in targets]
        for batch in _batches(sources, targets):
            links = self._run(batch)[0].links
            best = links.argmax(2)
            chosen = np.where(links.max(2) > 1.0 - links.sum(2), best, -1)
            for row, pair in enumerate(batch.pairs):
                found[pair] = chosen[row, : len(found[pair])]
        return found

    def improved(self, sources: Sentences, targets: Sentences) -> tuple[Direction, float]:
        """Return the direction after one iteration on these pairs, and the log-likelihood before it in nats."""
        counts, jumps, likelihood = self.lexicon.counts(), JumpCounts(), 0.0
        for batch in _batches(sources, targets):
            found, places, empty_places = self._run(batch)
            np.add.at(counts, places.ravel(), found.links.ravel())
            # What no source word generated, the empty word did; places behind the end of a target count nothing.
            np.add.at(counts, empty_places.ravel(), (batch.present - found.links.sum(2)).ravel())
            jumps.add(found.jumps, found.endings)
            likelihood += found.log_likelihood
        return Direction(self.lexicon.estimate(counts), jumps.weights(), self.empty), likelihood

    def _run(self, batch: _Batch) -> tuple[Posteriors, NDArray[np.int64], NDArray[np.int64]]:
        """Return the posteriors of a batch, and the lexicon's entries [B, J, I] and [B, J] that they are based on."""
        places = self.lexicon.places(batch.source[:, None, :], batch.target[:, :, None])
        empty_places = self.lexicon.places(np.array(self.lexicon.source_size), batch.target)
        emissions = Emissions(self.lexicon[places], self.lexicon[empty_places], batch.lengths)
        return posteriors(emissions, self.jumps, self.empty), places, empty_places


def train_direction(
    sources: Sentences,
    targets: Sentences,
    sizes: tuple[int, int],
    options: TrainingOptions,
    report: Callable[[int, float], None] = lambda iteration, likelihood: None,
) -> Direction:
    """Return a direction trained on these pairs: IBM Model 1, then the HMM.

    Args:
        sources: all ids known.
        targets: the same.
        sizes: number of source and of target words.
        options: iterations, probability of the empty word.
        report: called with the number of each finished iteration of the HMM, from 1, and the log-likelihood before it.
    """
    rows = translation_table(sources, targets, *sizes, iterations=options.model1_iterations)
    direction = Direction(Lexicon.of_rows(rows, *sizes), Jumps.initial(), options.empty)
    for iteration in range(1, options.hmm_iterations + 1):
        direction, likelihood = direction.improved(sources, targets)
        report(iteration, likelihood)
    return direction


class _Batch(NamedTuple):
    """Pairs whose sources are equally long, longest target first; see Emissions."""

    pairs: NDArray[np.int64]
    """[B] numbers of the pairs."""
    source: NDArray[np.int64]
    """[B, I] ids."""
    target: NDArray[np.int64]
    """[B, J] ids, -1 behind the end."""
    lengths: NDArray[np.int64]
    """[B] words of each target."""
    present: NDArray[np.bool_]
    """[B, J], True where there is a target word."""


def _batches(sources: Sentences, targets: Sentences) -> Iterator[_Batch]:
    """Yield all pairs that have words on both sides, in batches of at most _CELLS pairs of words, one pair at least."""
    rows, columns = (np.fromiter(map(len, side), np.int64, len(side)) for side in (sources, targets))
    order = np.lexsort((-columns, rows))
    order = order[(rows[order] > 0) & (columns[order] > 0)]
    start = 0
    while start < len(order):
        length, longest = int(rows[order[start]]), int(columns[order[start]])
        most = max(1, _CELLS // (length * longest))
        chosen = order[start : start + most]
        chosen = chosen[rows[chosen] == length]
        start += len(chosen)
        present = np.arange(longest) < columns[chosen][:, None]
        target = np.full(present.shape, -1, np.int64)
        target[present] = np.concatenate([targets[pair] for pair in chosen])
        source = np.stack([sources[pair] for pair in chosen]).astype(np.int64)
        yield _Batch(chosen, source, target, columns[chosen], present)
