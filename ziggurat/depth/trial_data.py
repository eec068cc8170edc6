"""The data of a trial: the store of the configuration, or the embedded language pair where there is none yet."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.babel import SOURCE_LANGUAGE, TARGET_LANGUAGE, write_corpus
from ziggurat.data.corpus import MANIFEST, Store
from ziggurat.data.prepare import prepare

__all__ = ["open_data", "unigram_entropy"]

_EMBEDDED_PAIRS = 4000
_EMBEDDED_PIECES = 1200
_SAMPLE = 20_000  # pairs


@contextmanager
def open_data(experiment: Experiment) -> Iterator[tuple[Store, str]]:
    """Yield the store that `experiment` trains on, and for people what it is.

    Where nothing is prepared yet, it is one of the embedded language pair (docs/embedded-data.md), which is gone when
    the context ends. Raises DataError for a store that cannot be read.
    """
    store = Path(experiment.data.store).expanduser()
    if (store / MANIFEST).is_file():
        yield Store.open(store), f"the data of {store}"
        return
    with tempfile.TemporaryDirectory(prefix="ziggurat-") as folder:
        files = write_corpus(folder, train=_EMBEDDED_PAIRS, dev=1, test=1)
        source, target = files["train"]
        changes = {
            "source_language": SOURCE_LANGUAGE,
            "target_language": TARGET_LANGUAGE,
            "store": f"{folder}/store",
            "train": [{"source": str(source), "target": str(target)}],
            "subword": {"kind": "bpe", "vocabulary_size": _EMBEDDED_PIECES, "joint": True},
        }
        data = change_section(type(experiment.data).model_validate(changes), {}, "data")
        prepare(data)
        yield Store.open(data.store), f"the embedded language pair, since {store} is not prepared"


def unigram_entropy(store: Store, seed: int = 0) -> float:
    """Return what knowing only the frequencies of target tokens costs, nats per token, end-of-sentence included.

    Over the training pairs, or a random sample of 20,000 of them.
    """
    table = store.train
    pairs = np.arange(len(table))
    if len(pairs) > _SAMPLE:
        pairs = np.sort(np.random.Generator(np.random.PCG64(seed)).choice(pairs, _SAMPLE, replace=False))
    _, targets = table.pairs(pairs)
    counts = np.bincount(np.concatenate([np.asarray(ids) for ids in targets]), minlength=store.target.size)
    present = np.append(counts[counts > 0], len(pairs))  # the last: one end of sentence each
    shares = present / present.sum()
    return float(-(shares * np.log(shares)).sum())
