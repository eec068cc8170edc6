"""Batches: every pair once, within the budget, little padding, the same order for the same seed and epoch."""

from __future__ import annotations

import gzip
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ziggurat.data.batching import check_fits, epoch_indices, make_batches, round_up, sorted_batches
from ziggurat.system.errors import DataError

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=200)
SETTINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(48, 300),
        "max_sentences": st.none() | st.integers(1, 9),
        "length_multiple": st.sampled_from([1, 4, 8]),
    }
)


def columns(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(lengths, dtype=np.int32)
    return table[:, 0], table[:, 1]


def cost(batch: np.ndarray, source: np.ndarray, target: np.ndarray, multiple: int) -> int:
    """Return the tokens of a batch, straight from the rule."""
    widths = [-(-(int(side[batch].max()) + 1) // multiple) * multiple for side in (source, target)]
    return len(batch) * max(widths)


@given(LENGTHS, SETTINGS, st.integers(0, 2**31), st.integers(0, 1000))
def test_every_index_once_and_within_the_budget(
    lengths: list[tuple[int, int]], chosen: dict[str, Any], seed: int, epoch: int
) -> None:
    source, target = columns(lengths)
    indices = epoch_indices(np.zeros(len(source), np.uint8), [1.0], 1.0, seed, epoch)
    batches = make_batches(indices, source, target, **chosen, seed=seed, epoch=epoch)
    fixed = sorted_batches(source, target, **chosen)
    for found in (batches, fixed):
        assert sorted(np.concatenate(found).tolist()) == list(range(len(source)))
        assert all(cost(batch, source, target, chosen["length_multiple"]) <= chosen["max_tokens"] for batch in found)
        assert all(len(batch) <= (chosen["max_sentences"] or len(source)) for batch in found)
    again = make_batches(indices, source, target, **chosen, seed=seed, epoch=epoch)
    assert [b.tolist() for b in again] == [b.tolist() for b in batches]


@given(LENGTHS, SETTINGS)
def test_batches_are_as_large_as_the_budget_allows(lengths: list[tuple[int, int]], chosen: dict[str, Any]) -> None:
    source, target = columns(lengths)
    batches = sorted_batches(source, target, **chosen)
    for batch, following in pairwise(batches):
        larger = np.append(batch, following[0])
        too_long = cost(larger, source, target, chosen["length_multiple"]) > chosen["max_tokens"]
        assert too_long or len(batch) == chosen["max_sentences"]


@pytest.mark.parametrize("longest", [30, 250, 100_000])
def test_pairs_are_sorted_by_the_longer_side_then_by_the_difference_in_turns(longest: int) -> None:
    source, target = np.random.default_rng(0).integers(0, longest + 1, (2, 3000)).astype(np.int32)
    batches = sorted_batches(source, target, max_tokens=longest + 1)

    def key(pair: int) -> tuple[int, int, int]:
        longer, difference = max(source[pair], target[pair]) + 1, int(source[pair]) - int(target[pair])
        return longer, difference if longer % 2 == 0 else -difference, pair

    assert np.concatenate(batches).tolist() == sorted(range(3000), key=key)


def test_planning_takes_few_bytes_per_pair() -> None:
    """Every process of a run plans the whole epoch; docs/scaling.md has the figure."""
    count = 200_000
    source, target = np.random.default_rng(0).integers(1, 250, (2, count)).astype(np.int32)
    indices = np.arange(count)
    tracemalloc.start()
    make_batches(indices, source, target, max_tokens=25_000, length_multiple=8, seed=1, epoch=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 37 * count


def test_epochs_and_seeds_differ() -> None:
    random = np.random.default_rng(0)
    source, target = random.integers(3, 30, (2, 2000)).astype(np.int32)

    def order(seed: int, epoch: int) -> list[list[int]]:
        indices = epoch_indices(np.zeros(2000, np.uint8), [1.0], 1.0, seed, epoch)
        return [b.tolist() for b in make_batches(indices, source, target, max_tokens=500, seed=seed, epoch=epoch)]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Not only the order of the batches changes, but also which pairs share a batch.
    together = [{tuple(sorted(batch)) for batch in order(1, epoch)} for epoch in (0, 1)]
    assert len(together[0] & together[1]) < len(together[0]) / 2


def test_batch_order_is_not_by_length() -> None:
    source = np.sort(np.random.default_rng(0).integers(3, 30, 3000)).astype(np.int32)
    batches = make_batches(np.arange(3000), source, source, max_tokens=300, seed=1, epoch=0)
    sizes = [int(source[batch].max()) for batch in batches]
    assert abs(np.corrcoef(sizes, np.arange(len(sizes)))[0, 1]) < 0.2


def test_lengths_in_sixteen_bits_do_not_wrap() -> None:
    source = np.array([65_535, 3], dtype=np.uint16)
    with pytest.raises(DataError, match="65536 tokens"):
        check_fits(source, source, max_tokens=60_000)
    assert len(sorted_batches(source, source, max_tokens=65_536)) == 2


def test_a_pair_that_is_too_long_is_named_with_the_way_out() -> None:
    source, target = np.array([5, 9, 80, 7], np.int32), np.array([5, 120, 20, 8], np.int32)
    check_fits(source, target, max_tokens=121)
    message = r"1 of 4 .*max_tokens = 120.*pair 1 .*9 source and 120 target.*121 or more.*data\.filters\.max_pieces"
    with pytest.raises(DataError, match=message):
        check_fits(source, target, max_tokens=120)
    with pytest.raises(DataError, match="128 or more"):
        check_fits(source, target, max_tokens=127, length_multiple=8)
    with pytest.raises(DataError, match="pair 1 "):
        make_batches(np.arange(4), source, target, max_tokens=100, seed=1, epoch=0)
    # A long pair that is never drawn does no harm.
    assert len(make_batches(np.array([0, 3]), source, target, max_tokens=100, seed=1, epoch=0)) == 1


def test_no_pairs_give_no_batch() -> None:
    nothing = np.zeros(0, np.int32)
    check_fits(nothing, nothing, max_tokens=1)
    assert sorted_batches(nothing, nothing, max_tokens=1) == []
    assert make_batches(nothing.astype(np.int64), nothing, nothing, max_tokens=1, seed=1, epoch=0) == []
    assert epoch_indices(nothing, [1.0], 1.0, 1, 0).tolist() == []


@pytest.mark.parametrize(("max_tokens", "limit"), [(4096, 0.05), (1024, 0.02)])
def test_little_padding_on_multi30k(shared_data: Path, max_tokens: int, limit: float) -> None:
    def lengths(language: str) -> np.ndarray:
        with gzip.open(shared_data / "multi30k" / f"train.{language}.gz", "rt", encoding="utf-8") as file:
            return np.array([round(1.3 * len(line.split())) for line in file], dtype=np.int32)

    source, target = lengths("de"), lengths("en")
    batches = make_batches(np.arange(len(source)), source, target, max_tokens=max_tokens, seed=1, epoch=0)
    for side in (source, target):
        padded = sum(len(batch) * (int(side[batch].max()) + 1) for batch in batches)
        assert 1 - (side + 1).sum() / padded < limit
    filled = sum(cost(batch, source, target, 1) for batch in batches) / (len(batches) * max_tokens)
    assert filled > 0.95


def test_a_budget_larger_than_the_corpus_takes_no_extra_memory() -> None:
    lengths = np.full(10, 5, np.int32)
    assert [len(batch) for batch in sorted_batches(lengths, lengths, max_tokens=1 << 60)] == [10]
    assert [len(batch) for batch in sorted_batches(lengths, lengths, max_tokens=1 << 60, max_sentences=4)] == [4, 4, 2]


def test_a_length_multiple_bounds_the_shapes() -> None:
    random = np.random.default_rng(0)
    source = np.clip(random.normal(16, 5, 30_000), 2, 60).astype(np.int32)
    target = np.clip(source + random.normal(0, 3, 30_000), 1, 60).astype(np.int32)

    def widths(multiple: int) -> set[tuple[int, int]]:
        batches = sorted_batches(source, target, max_tokens=1024, length_multiple=multiple)
        return {
            (int(round_up(source[b] + 1, multiple).max()), int(round_up(target[b] + 1, multiple).max()))
            for b in batches
        }

    assert len(widths(8)) < 40 < len(widths(1))
    assert all(s % 8 == t % 8 == 0 for s, t in widths(8))


# ---- the pairs of an epoch


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 50))
def test_one_corpus_or_equal_weights_give_every_pair_once(pairs: int, seed: int, epoch: int) -> None:
    corpora = np.random.default_rng(pairs).integers(0, 3, pairs).astype(np.uint16)
    assert sorted(epoch_indices(corpora, [2.0, 2.0, 2.0], 1.0, seed, epoch).tolist()) == list(range(pairs))
    assert sorted(epoch_indices(corpora * 0, [0.3], 5.0, seed, epoch).tolist()) == list(range(pairs))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any),
    st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    st.floats(0.5, 10),
    st.integers(1, 12),
)
def test_draws_are_even_and_shares_follow_the_formula(
    sizes: list[int], weights: list[float], temperature: float, epochs: int
) -> None:
    corpora = np.repeat(np.arange(len(sizes)), sizes)
    weights = weights[: len(sizes)]
    drawn = [epoch_indices(corpora, weights, temperature, 7, epoch) for epoch in range(epochs)]
    assert {len(indices) for indices in drawn} == {len(corpora)}
    counts = np.bincount(np.concatenate(drawn), minlength=len(corpora))
    mass = np.array([(n * w) ** (1 / temperature) for n, w in zip(sizes, weights, strict=True)])
    shares = len(corpora) * mass / mass.sum()
    for corpus, size in enumerate(sizes):
        if not size:
            continue
        of_corpus = counts[corpora == corpus]
        assert of_corpus.max() - of_corpus.min() <= 1
        quota = of_corpus.sum() / epochs
        # Rounded to whole pairs; a corpus that would get none takes one from the largest corpus.
        assert abs(quota - shares[corpus]) <= 1 + len(sizes) * (shares.min(where=np.array(sizes) > 0, initial=9) < 1)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([1.0, 2.0, 1e-4])), min_size=1, max_size=60),
    st.sampled_from([0.5, 1.0, 3.0]),
)
@example([(10, 1.0)] * 20 + [(10, 1e-4)] * 80, 1.0)
def test_every_corpus_has_a_pair_in_an_epoch_of_the_right_size(
    corpora: list[tuple[int, float]], temperature: float
) -> None:
    """Giving each of many small corpora a pair takes many from the others, but from none more than it has."""
    sizes, weights = zip(*corpora, strict=True)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    drawn = np.bincount(numbers[epoch_indices(numbers, weights, temperature, 7, 0)], minlength=len(sizes))
    assert drawn.sum() == len(numbers)
    assert drawn.min() >= 1


def test_an_epoch_holds_whole_copies_and_a_remainder_without_repetition() -> None:
    corpora = np.repeat([0, 1], [90, 10])
    drawn = epoch_indices(corpora, [1.0, 9.0], 1.0, 3, 0)  # 90 and 90: half of each
    counts = np.bincount(drawn, minlength=100)
    assert counts[:90].sum() == counts[90:].sum() == 50
    assert set(counts[:90].tolist()) == {0, 1}
    assert set(counts[90:].tolist()) == {5}
    following = epoch_indices(corpora, [1.0, 9.0], 1.0, 3, 1)
    # The remainder carries over: the 40 pairs not yet drawn come first.
    assert set(range(90)) - set(drawn.tolist()) <= set(following.tolist())
    # After five copies the sequence starts again, but in a different order.
    later = epoch_indices(corpora, [1.0, 9.0], 1.0, 3, 9)
    assert set(later[:50].tolist()) != set(drawn[:50].tolist())


def test_resuming_needs_no_earlier_epoch() -> None:
    corpora = np.repeat([0, 1], [70, 13])
    order = [epoch_indices(corpora, [1.0, 2.0], 2.0, 3, epoch).tolist() for epoch in range(6)]
    assert epoch_indices(corpora, [1.0, 2.0], 2.0, 3, 5).tolist() == order[5]
    assert order[4] != order[5]
