"""The speed of this machine, and the batches of an update: the two things that turn an estimate into seconds.

Rates of products, memory and calls are measured in a fraction of a second. Real layers are slower than these rates
predict; a shallow copy of the model is timed to find by which factor. Batches are those of the store, or of sentences
of an assumed length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.cost.ledger import Ledger, Product, Work
from ziggurat.cost.simulation import BatchShape, full_batch, simulate_update
from ziggurat.data.batching import epoch_indices, make_batches, round_up
from ziggurat.data.corpus import MANIFEST, Store, read_manifest
from ziggurat.data.store_checks import unlike_store
from ziggurat.data.table import PairTable
from ziggurat.models.build import build_model, set_recompute
from ziggurat.models.tensors import random_state_kept
from ziggurat.nn.dropout import Dropout
from ziggurat.nn.linear import linear
from ziggurat.training.objective import every_branch_present
from ziggurat.training.parallel import Parallel

__all__ = ["ASSUMED_LENGTH", "Batches", "Speed", "expected_batches", "measure_speed", "shallow", "slowness"]

# Rates

_SECONDS = 0.06
"""Duration of each measurement."""
_CALLS = 64


@dataclass(frozen=True)
class Speed:
    """The rates of a device.

    Attributes:
        products: operations per second, by kind of product.
        moved: bytes per second that simple operators read and write.
        calls: operators per second that can be started and recorded for the backward pass.
        waits: True where the time of starting an operator adds to that of its work (a CPU), False where they overlap
            (a GPU).
    """

    products: Mapping[Product, float]
    moved: float
    calls: float
    waits: bool

    def seconds(self, work: Work) -> float:
        """Return the time of `work` at these rates."""
        products = sum(count / self.products[kind] for kind, count in work.operations.items())
        computing, starting = products + work.moved / self.moved, work.calls / self.calls
        return computing + starting if self.waits else max(computing, starting)


def measure_speed(
    kinds: Iterable[Product], widths: tuple[int, int], device: torch.device, threads: int | None = None
) -> Speed:
    """Return the rates of `device`: of products of each kind, of operators between them, and of calls.

    Args:
        kinds: kinds of products.
        widths: d_model and d_ff of the model; plain products have the shape of its feed-forward network.
        device: a CPU or a GPU.
        threads: `training.threads`; the present number is restored afterwards.
    """
    with with_threads(threads):
        return Speed(
            {kind: _batched(kind, device) if kind.batched else _matrix(kind, widths, device) for kind in kinds},
            _moved(device),
            _calls(device),
            waits=device.type == "cpu",
        )


@contextlib.contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Context with this number of CPU threads; None: the present number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of `work` in the calls that fit into `_SECONDS`, at least one.

    A single CPU thread is timed by its processor time, which other programs do not disturb.
    """
    work()  # not timed: the first call allocates memory and chooses kernels
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    fastest, until = float("inf"), clock() + _SECONDS
    while clock() < until:
        _wait(device)
        began = clock()
        work()
        _wait(device)
        fastest = min(fastest, clock() - began)
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matrix(kind: Product, widths: tuple[int, int], device: torch.device) -> float:
    """Return operations per second in the first product of a feed-forward network."""
    rows = 512 if device.type == "cpu" else 4096
    x, weight = (torch.randn(n, widths[0], device=device, dtype=kind.dtype) for n in (rows, widths[1]))
    return 2 * rows * widths[0] * widths[1] / seconds_of(lambda: linear(x, weight), device)


def _batched(kind: Product, device: torch.device) -> float:
    """Return operations per second in the products of attention: 32 positions, heads of width 64."""
    a, b = (torch.randn(256, 32, 64, device=device, dtype=kind.dtype) for _ in range(2))
    return 2 * 256 * 32 * 32 * 64 / seconds_of(lambda: torch.bmm(a, b.transpose(1, 2)), device)


def _moved(device: torch.device) -> float:
    """Return bytes per second between the products: norm, activation, dropout, sum, softmax, both passes."""
    x = torch.randn(128, 32, 512, device=device, requires_grad=True)
    norm, dropout = torch.nn.LayerNorm(512, device=device), Dropout(0.1)

    def between() -> None:
        weights = torch.softmax(x.view(128, 16, 32, 32) + 1.0, dim=-1)
        dropout(torch.relu(norm(x)), dropout(weights).view_as(x)).sum().backward()
        x.grad = None

    with Ledger() as ledger:
        between()
    return ledger.work[""].moved / seconds_of(between, device)


def _calls(device: torch.device) -> float:
    """Return operators per second in a chain of tiny ones, forward and backward."""
    start = torch.zeros(8, device=device, requires_grad=True)

    def chain() -> None:
        x: Tensor = start
        for _ in range(_CALLS):
            x = x * 1.0
        x.sum().backward()

    return 2 * _CALLS / seconds_of(chain, device)


# A shallow copy, timed

_VOCABULARY = 500
"""Small, so that nearly all work is that of the layers."""
_LAYERS = 2
_LENGTH = 32


def shallow(experiment: Experiment) -> Experiment:
    """Return `experiment` with at most two layers in each stack."""
    model = experiment.model
    stacks = {
        side: stack.model_copy(update={"layers": min(_LAYERS, stack.layers)})
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder))
    }
    return experiment.model_copy(update={"model": model.model_copy(update=stacks)})


def slowness(experiment: Experiment, speed: Speed, device: torch.device) -> float:
    """Return measured over estimated time of a forward and backward pass through a shallow copy.

    Products of other shapes, copies inside kernels and memory outside the caches are slower than the operators behind
    `speed`. The layers are real, with values; the batch has few tokens and the vocabulary few types.
    """
    training = experiment.training
    shape = BatchShape(16 if device.type == "cpu" else 128, _LENGTH, _LENGTH)
    small = shallow(experiment)
    work = Work()
    for phase, of_phase in simulate_update(small, (_VOCABULARY, _VOCABULARY), shape, device).work.items():
        if phase != "step":
            work.add(of_phase)
    with random_state_kept(device), with_threads(training.threads):
        model = build_model(small.model, _VOCABULARY, _VOCABULARY, exact_dropout=training.exact_dropout).to(device)
        set_recompute(model, training.recompute)
        parallel = Parallel(model, training.loss, training.precision)
        batch = full_batch(shape, device)
        with every_branch_present(model):
            return seconds_of(lambda: parallel.attempt(batch), device) / speed.seconds(work)


# Batches

ASSUMED_LENGTH = 30
"""Tokens of a sentence, end-of-sentence included, where there is no store."""
_SAMPLE = 1_000_000
"""Number of pairs read of a larger store."""
_LONGEST = 4096
"""Number of its longest pairs that are read in addition; they make a batch or more."""


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
        origin: a description of their origin.
    """

    largest: tuple[BatchShape, ...]
    source_length: float
    target_length: float
    source_tokens: float
    target_tokens: float
    origin: str


def expected_batches(experiment: Experiment) -> Batches:
    """Return the batches of the store if it was prepared as section `data` says; otherwise assumed ones.

    Raises DataError where the store is damaged, or has a pair that does not fit into a batch.
    """
    store = Path(experiment.data.store).expanduser()
    if not (store / MANIFEST).is_file():
        return _assumed(experiment, f"there is no store {store}")
    if unlike_store(experiment.data, read_manifest(store)):
        return _assumed(experiment, f"{store} was prepared with other settings")
    table = Store.open(store).train
    return _assumed(experiment, f"{store} is empty") if len(table) == 0 else _planned(experiment, table, store)


def _assumed(experiment: Experiment, reason: str) -> Batches:
    """Return batches of sentences of ASSUMED_LENGTH, and of the longest that `data.filters` allows."""
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
    """Return the batches of the first epoch, or of a sample of its pairs."""
    batch, seed = experiment.training.batch, experiment.training.seed
    pairs = epoch_indices(table.corpora, table.corpus_weights, experiment.data.sampling_temperature, seed, epoch=0)
    step = -(-len(pairs) // _SAMPLE)  # rounded up
    if step > 1:
        # Every n-th pair gives the mean; the longest pairs, which make the largest batches, would be missing from it.
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
    # Stored lengths are without end-of-sentence.
    lengths = [side[ordered].astype(np.int64) + 1 for side in (table.source_lengths, table.target_lengths)]
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
        str(store) + (f", one pair in {step}" if step > 1 else ""),
    )
