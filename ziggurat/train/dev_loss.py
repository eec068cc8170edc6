"""Losses on the dev set: of target tokens and, with guided alignment, of the taught head."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config import TrainingConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import fixed_batches
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.objective import autocast, batch_loss
from ziggurat.train.processes import Processes


class DevLoss(NamedTuple):
    """Sums over target tokens; those of several processes add up."""

    nll: float = 0.0
    """-log p(gold), nats."""
    tokens: float = 0.0
    """Number of them."""
    alignment: float = 0.0
    """Cross-entropy of guided alignment, nats."""
    aligned: float = 0.0
    """Number of target tokens that have links; 0 where the run has no guided alignment, or the dev set no links."""

    @property
    def mean(self) -> float:
        """Mean -log p(gold) of a token, nats."""
        return self.nll / max(1.0, self.tokens)

    @property
    def alignment_mean(self) -> float | None:
        """Mean cross-entropy of a token with links, nats; None without any."""
        return self.alignment / self.aligned if self.aligned else None


def dev_loss(
    model: Seq2Seq,
    store: Store,
    config: TrainingConfig,
    processes: Processes,
    go_on: Callable[[], None],
    rows: NDArray[np.int64] | None = None,
) -> DevLoss:
    """Return the losses on this process's part of the dev set; `go_on` is called before each batch.

    `rows` are the pairs that count; None: all.
    """
    dev, guided = store.dev, config.loss.alignment
    assert dev is not None
    links = guided is not None and dev.has_links
    loss = LossConfig(label_smoothing=0.0, chunk_tokens=config.loss.chunk_tokens, alignment=guided if links else None)
    found = DevLoss()
    batches = fixed_batches(dev, store.source, store.target, config.batch, links=links, rows=rows)
    for batch in islice(batches, processes.rank, None, processes.count):
        go_on()
        with autocast(model.device, config.precision):
            # What is read are sums, whatever sizes the objective is divided by.
            sums = batch_loss(model, batch.to(model.device), loss, tokens=1, sentences=1)
        alignment = [0.0, 0.0] if sums.alignment is None else sums.alignment.tolist()
        new = (float(sums.nll), float(batch.target_tokens), *alignment)
        found = DevLoss(*map(sum, zip(found, new, strict=True)))
    return found
