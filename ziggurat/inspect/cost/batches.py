"""The batches of an update: those of the store, or of sentences as long as the corpus has, or of an assumed length."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ziggurat.config import Experiment
from ziggurat.data.batching import make_batches, round_up
from ziggurat.data.corpus import Store, read_manifest
from ziggurat.data.folder_kinds import MANIFEST
from ziggurat.data.loader import LoaderState
from ziggurat.data.readers import CorpusReader
from ziggurat.data.store_checks import unlike_store
from ziggurat.inspect.cost.simulation import BatchShape
from ziggurat.system.errors import ZigguratError
from ziggurat.train.feeding import loader_of

ASSUMED_LENGTH = 30
"""Tokens of a sentence, end-of-sentence included, where there is neither a store nor text."""
_BYTES_PER_TOKEN = 4
"""Bytes of UTF-8 a token, of 8,000 joint pieces: German 4.2, English 3.6 (Tatoeba) and 4.0, Japanese 4.7 (Tanaka)."""
_SAMPLE = 1_000_000
"""Number of pairs read of a larger store."""
_LONGEST = 4096
"""Number of its longest pairs that are read in addition; they make a batch or more."""
_MODIFIED = 10
"""So many times fewer are read where modifiers make the lengths, for which text is read and segmented."""


@dataclass(frozen=True)
class Batches:
    """The batches of training.

    Attributes:
        largest: candidates for the most memory: with most padded tokens, and with most pairs of source and target
            positions.
        source_length: mean length of a source sentence in tokens, end-of-sentence included.
        target_length: likewise of a target sentence.
        source_tokens: mean number of padded source tokens of a batch.
        target_tokens: likewise of target tokens.
        real_target_tokens: likewise without padding.
        origin: a description of their origin.
    """

    largest: tuple[BatchShape, ...]
    source_length: float
    target_length: float
    source_tokens: float
    target_tokens: float
    real_target_tokens: float
    origin: str


def expected_batches(experiment: Experiment, text: CorpusReader | None = None) -> Batches:
    """Return the batches of the store if it was prepared as section `data` says; otherwise assumed ones.

    Args:
        experiment: the configuration.
        text: a corpus whose sentences are as long as those of training; None: the first of `data.train`.

    Raises DataError where the store is damaged, has a pair that does not fit into a batch, or lacks what stages or
    modifiers ask for.
    """
    store = Path(experiment.data.store).expanduser()
    if not (store / MANIFEST).is_file():
        return _assumed(experiment, f"there is no store {store}", text)
    if unlike_store(experiment.data, read_manifest(store)):
        return _assumed(experiment, f"{store} was prepared with other settings", text)
    opened = Store.open(store)
    return _assumed(experiment, f"{store} is empty", text) if len(opened.train) == 0 else _planned(experiment, opened)


def _assumed(experiment: Experiment, reason: str, text: CorpusReader | None) -> Batches:
    """Return batches of sentences of an assumed length, and of the longest that `data.filters` allows."""
    assumed, by = _length_of_text(experiment, text)
    batch = experiment.training.batch
    longest = min((experiment.data.filters.max_pieces or batch.max_tokens) + 1, batch.max_tokens)

    def of_length(length: int) -> BatchShape:
        padded = int(round_up(np.array([min(length, longest)]), batch.length_multiple)[0])
        sentences = max(1, batch.max_tokens // padded)
        return BatchShape(min(sentences, batch.max_sentences or sentences), padded, padded)

    usual = of_length(assumed)
    length, tokens = min(assumed, longest), usual.sentences * usual.source
    real = usual.sentences * length
    origin = f"assumed{by}: {reason}"
    return Batches(tuple(dict.fromkeys([usual, of_length(longest)])), length, length, tokens, tokens, real, origin)


def _length_of_text(experiment: Experiment, text: CorpusReader | None) -> tuple[int, str]:
    """Return the tokens of a sentence by the first lines of a corpus, if it is there, and how they were told."""
    data = experiment.data
    with contextlib.suppress(ZigguratError):  # not there, or not as it should be, which `prepare` says
        if text is None and data.train:
            text = CorpusReader.of(data.train[0], "data.train.0", (data.source_language, data.target_language))
        block = next(text.blocks(), None) if text is not None else None
        if block is not None:
            longer = max(sum(len(line.encode()) for line in side) for side in block)
            return round(longer / _BYTES_PER_TOKEN / len(block[0])) + 1, " by the bytes of the text"
    return ASSUMED_LENGTH, ""


def _planned(experiment: Experiment, store: Store) -> Batches:
    """Return the batches of the first epoch, or of a sample of its pairs."""
    batch, seed, table = experiment.training.batch, experiment.training.seed, store.train
    loader, begin = loader_of(experiment, store), LoaderState()
    pairs = loader.chosen(begin)
    share = _MODIFIED if experiment.data.stage_modifiers(0).chosen else 1
    step = -(-len(pairs) * share // _SAMPLE)  # rounded up
    if step > 1:
        # Every n-th pair gives the mean; the longest pairs, which make the largest batches, would be missing from it.
        longest = _LONGEST // share
        cost = np.maximum(table.source_lengths[pairs], table.target_lengths[pairs])
        pairs = np.concatenate([pairs[::step], pairs[np.argpartition(cost, -longest)[-longest:]]])
    planned = loader.lengths(begin, pairs)
    plan = make_batches(
        pairs,
        *planned,
        max_tokens=batch.max_tokens,
        max_sentences=batch.max_sentences,
        length_multiple=batch.length_multiple,
        seed=seed,
        epoch=0,
    )
    sentences = np.fromiter(map(len, plan), dtype=np.int64, count=len(plan))
    ordered, starts = np.concatenate(plan), np.cumsum(sentences) - sentences
    # These lengths are without end-of-sentence.
    lengths = [side[ordered].astype(np.int64) + 1 for side in planned]
    source, target = (
        round_up(np.maximum.reduceat(side, starts), batch.length_multiple).astype(np.int64) for side in lengths
    )
    candidates = (sentences * (source + target)).argmax(), (sentences * source * target).argmax()
    return Batches(
        tuple(dict.fromkeys(BatchShape(int(sentences[n]), int(source[n]), int(target[n])) for n in candidates)),
        float(lengths[0].mean()),
        float(lengths[1].mean()),
        float((sentences * source).mean()),
        float((sentences * target).mean()),
        float(lengths[1].sum() / len(plan)),
        str(Path(experiment.data.store).expanduser()) + (f", one pair in {step}" if step > 1 else ""),
    )
