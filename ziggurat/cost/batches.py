"""The batches that an update is made of: those of the store, or those of sentences of a length that is assumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ziggurat.config import Experiment
from ziggurat.cost.simulation import BatchShape
from ziggurat.data.batching import epoch_indices, make_batches, round_up
from ziggurat.data.corpus import MANIFEST, Store, read_manifest
from ziggurat.data.provenance import unlike_store
from ziggurat.data.table import PairTable

__all__ = ["ASSUMED_LENGTH", "Batches", "expected_batches"]

ASSUMED_LENGTH = 30
"""Tokens of a sentence, end-of-sentence counted, where there is no store to tell."""
_SAMPLE = 1_000_000
"""Of larger stores so many pairs are looked at, and as many of the longest as make a batch or more."""
_LONGEST = 4096


@dataclass(frozen=True)
class Batches:
    """What batches will be like.

    Attributes:
        largest: those that may take the most memory: by padded tokens, and by products of source and target length.
        source_length: mean tokens of a source sentence, end-of-sentence counted.
        target_length: likewise.
        source_tokens: mean padded source tokens of a batch.
        target_tokens: likewise.
        origin: where this was found, in words for people.
    """

    largest: tuple[BatchShape, ...]
    source_length: float
    target_length: float
    source_tokens: float
    target_tokens: float
    origin: str


def expected_batches(experiment: Experiment) -> Batches:
    """Return the batches of the store, if it was prepared as section `data` says; else those that are assumed.

    Raises DataError: the store is damaged, or holds a pair that fits into no batch.
    """
    store = Path(experiment.data.store).expanduser()
    if not (store / MANIFEST).is_file():
        return _assumed(experiment, f"there is no store {store}")
    if unlike_store(experiment.data, read_manifest(store)):
        return _assumed(experiment, f"{store} was prepared with other settings")
    table = Store.open(store).train
    return _assumed(experiment, f"{store} is empty") if len(table) == 0 else _planned(experiment, table, store)


def _assumed(experiment: Experiment, reason: str) -> Batches:
    """Return batches of sentences of ASSUMED_LENGTH, and the longest that `data.filters` let pass."""
    batch = experiment.training.batch
    longest = min((experiment.data.filters.max_pieces or batch.max_tokens) + 1, batch.max_tokens)

    def of_length(length: int) -> BatchShape:
        padded = int(round_up(np.array([min(length, longest)]), batch.length_multiple)[0])
        sentences = max(1, batch.max_tokens // padded)
        return BatchShape(min(sentences, batch.max_sentences or sentences), padded, padded)

    usual = of_length(ASSUMED_LENGTH)
    length, tokens = min(ASSUMED_LENGTH, longest), usual.sentences * usual.source
    origin = f"assumed: {reason}"
    return Batches(tuple(dict.fromkeys([usual, of_length(longest)])), length, length, tokens, tokens, origin)


def _planned(experiment: Experiment, table: PairTable, store: Path) -> Batches:
    batch, seed = experiment.training.batch, experiment.training.seed
    pairs = epoch_indices(table.corpora, table.corpus_weights, experiment.data.sampling_temperature, seed, epoch=0)
    step = -(-len(pairs) // _SAMPLE)
    if step > 1:
        cost = np.maximum(table.source_lengths[pairs], table.target_lengths[pairs])
        pairs = np.concatenate([pairs[::step], pairs[np.argpartition(cost, -_LONGEST)[-_LONGEST:]]])
    plan = make_batches(
        pairs,
        table.source_lengths,
        table.target_lengths,
        max_tokens=batch.max_tokens,
        max_sentences=batch.max_sentences,
        length_multiple=batch.length_multiple,
        seed=seed,
        epoch=0,
    )
    sentences = np.fromiter(map(len, plan), dtype=np.int64, count=len(plan))
    ordered, starts = np.concatenate(plan), np.cumsum(sentences) - sentences
    lengths = [side[ordered].astype(np.int64) + 1 for side in (table.source_lengths, table.target_lengths)]
    source, target = (
        round_up(np.maximum.reduceat(side, starts), batch.length_multiple).astype(np.int64) for side in lengths
    )
    most = (sentences * (source + target)).argmax(), (sentences * source * target).argmax()
    return Batches(
        tuple(dict.fromkeys(BatchShape(int(sentences[n]), int(source[n]), int(target[n])) for n in most)),
        float(lengths[0].mean()),
        float(lengths[1].mean()),
        float((sentences * source).mean()),
        float((sentences * target).mean()),
        str(store) + (f", one pair in {step}" if step > 1 else ""),
    )
