"""From a table to tensors: the content of a batch, resuming at any update, the thread, sampled segmentations."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ziggurat.config.data import DataConfig, RegularisationConfig, SubwordConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.loader import Background, Batch, Group, Loader, LoaderState, SpecialIds, collate, fixed_batches
from ziggurat.data.table import PairTable, TableWriter
from ziggurat.system.errors import DataError

SPECIAL = SpecialIds(source_pad=0, source_eos=1, target_pad=2, target_bos=3, target_eos=4)
TAG = 9
ROWS = [(int(n) % 3, int(n), int(m)) for n, m in np.random.default_rng(0).integers(0, 24, (190, 2))]


class Letters:
    """A tokenizer whose sampled segmentations reveal the seed, and are up to twice as long as the stored ones."""

    def __init__(self, pad: int, bos: int, eos: int) -> None:
        self.pad, self.bos, self.eos = pad, bos, eos
        self.tags = {"<bt>": TAG}

    def sample(
        self, texts: Sequence[str], seeds: Sequence[int], regularisation: RegularisationConfig
    ) -> list[list[int]]:
        assert regularisation.alpha == 0.1
        return [
            np.random.default_rng(seed).integers(1000, 2000, len(text) * (1 + seed % 2)).tolist()
            for text, seed in zip(texts, seeds, strict=True)
        ]


SOURCE, TARGET = Letters(0, 7, 1), Letters(2, 3, 4)


def write_table(folder: Path, rows: list[tuple[int, int, int]], has_text: bool = True) -> PairTable:
    """Pairs of (corpus, source length, target length) with ids that identify the pair; corpus 2 has a tag."""
    writer = TableWriter(folder, "train", has_text=has_text, shard_pairs=70)
    for index, (corpus, source, target) in enumerate(rows):
        ids = [np.arange(size, dtype=np.int32) + 10 + 7 * index for size in (source, target)]
        if corpus == 2:
            ids[0] = np.insert(ids[0], 0, TAG)
        sides = [(side, np.array([len(side)], np.int32)) for side in ids]
        texts = (["s" * source], ["t" * target]) if has_text else None
        writer.write(corpus, sides[0], sides[1], texts)
    corpora = [{"name": str(c), "weight": 1.0 + c, "kept": sum(r[0] == c for r in rows)} for c in range(3)]
    return PairTable(folder, "train", writer.close(), corpora)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    return write_table(tmp_path_factory.mktemp("table"), ROWS)


def make_loader(table: PairTable, regularisation: RegularisationConfig | None = None, seed: int = 5) -> Loader:
    batch = BatchConfig(max_tokens=120, accumulate=3, length_multiple=4)
    data = data_section(regularisation, sampling_temperature=1.5)
    return Loader(table, SOURCE, TARGET, batch, seed=seed, data=data, prefetch=2)


def data_section(regularisation: RegularisationConfig | None, **settings: Any) -> DataConfig:
    subword = SubwordConfig(regularisation=regularisation)
    return DataConfig(source_language="de", target_language="en", store="store", subword=subword, **settings)


def take(groups: Iterator[Group], count: int) -> list[Group]:
    taken = list(itertools.islice(groups, count))
    groups.close()  # type: ignore[attr-defined]
    return taken


def contents(groups: list[Group]) -> list[object]:
    """Everything in the groups, in a form that can be compared."""
    return [
        (
            g.state_after,
            [(b.source.tolist(), b.target_out.tolist(), b.indices.tolist(), b.seed) for b in g.batches],
        )
        for g in groups
    ]


def arrays(*sentences: list[int]) -> list[np.ndarray]:
    return [np.array(sentence, dtype=np.int32) for sentence in sentences]


def test_collate_frames_and_pads() -> None:
    batch = collate(arrays([11, 12, 13], [21], []), arrays([31], [], [41, 42]), np.array([7, 8, 9]), SPECIAL)
    assert batch.source.tolist() == [[11, 12, 13, 1], [21, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.target_in.tolist() == [[3, 31, 2], [3, 2, 2], [3, 41, 42]]
    assert batch.target_out.tolist() == [[31, 4, 2], [4, 2, 2], [41, 42, 4]]
    assert batch.source_mask.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
    assert batch.target_mask.tolist() == [[True, True, False], [True, False, False], [True] * 3]
    assert (batch.sentences, batch.source_tokens, batch.target_tokens) == (3, 7, 6)
    assert batch.indices.tolist() == [7, 8, 9]
    assert {t.dtype for t in (batch.source, batch.target_in, batch.target_out)} == {torch.int64}
    assert {t.dtype for t in (batch.source_mask, batch.target_mask)} == {torch.bool}


def test_collate_rounds_lengths_up() -> None:
    batch = collate(arrays([5] * 8), arrays([5] * 7), np.array([0]), SPECIAL, length_multiple=8)
    assert batch.source.shape == (1, 16)
    assert batch.target_in.shape == batch.target_out.shape == batch.target_mask.shape == (1, 8)
    assert batch.source_tokens == 9


def test_collate_knows_tokens_that_look_like_padding() -> None:
    """A token's position follows from lengths, never from ids."""
    batch = collate(arrays([0, 0]), arrays([2, 4, 3]), np.array([0]), SPECIAL, length_multiple=4)
    assert batch.source_mask.tolist() == [[True, True, True, False]]
    assert batch.target_in.tolist() == [[3, 2, 4, 3]]
    assert batch.target_out.tolist() == [[2, 4, 3, 4]]


def test_to_moves_all_tensors() -> None:
    batch = collate(arrays([5]), arrays([6]), np.array([3]), SPECIAL).to("meta", non_blocking=True)
    tensors = (batch.source, batch.source_mask, batch.target_in, batch.target_out, batch.target_mask)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (batch.sentences, batch.source_tokens, batch.target_tokens) == (1, 2, 2)


def test_epoch_follows_the_plan(table: PairTable) -> None:
    loader = make_loader(table)
    plan = [batch.tolist() for batch in loader.plan(LoaderState())]
    groups = take(loader.groups(), -(-len(plan) // 3) + 1)
    assert [b.indices.tolist() for g in groups[:-1] for b in g.batches] == plan
    assert [len(g.batches) for g in groups[:-2]] == [3] * (len(groups) - 2)
    assert len(plan) % 3, "an epoch that ends in a shorter group should be among the tests"
    assert [g.state_after for g in groups[:2]] == [LoaderState(0, 3), LoaderState(0, 6)]
    assert groups[-2].state_after == LoaderState(1, 0)
    assert [b.indices.tolist() for b in groups[-1].batches] == [b.tolist() for b in loader.plan(LoaderState(1))[:3]]
    for batch in (b for g in groups for b in g.batches):
        assert batch.sentences * max(batch.source.shape[1], batch.target_out.shape[1]) <= 120
        sources, targets = table.pairs(batch.indices)
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            assert batch.source[row][batch.source_mask[row]].tolist() == [*source, SOURCE.eos]
            assert batch.target_out[row][batch.target_mask[row]].tolist() == [*target, TARGET.eos]
            assert batch.target_in[row][batch.target_mask[row]].tolist() == [TARGET.bos, *target]


@pytest.mark.parametrize("regularisation", [None, RegularisationConfig(target=True)])
def test_resuming_anywhere_gives_the_same_tail(table: PairTable, regularisation: RegularisationConfig | None) -> None:
    count = 2 * -(-len(make_loader(table).plan(LoaderState())) // 3) + 2
    whole = take(make_loader(table, regularisation).groups(), count)
    expected = contents(whole)
    for done in range(1, count):
        state = LoaderState(*whole[done - 1].state_after)
        resumed = take(make_loader(table, regularisation).groups(state), min(4, count - done))
        assert contents(resumed) == expected[done : done + 4]


def test_state_at_the_end_of_an_epoch_is_the_start_of_the_next(table: PairTable) -> None:
    loader = make_loader(table)
    end = LoaderState(0, len(loader.plan(LoaderState())))
    assert contents(take(loader.groups(end), 2)) == contents(take(loader.groups(LoaderState(1, 0)), 2))


def test_state_of_other_data_is_refused(table: PairTable) -> None:
    with pytest.raises(DataError, match=r"after batch 999 of epoch 2.*training\.batch"):
        next(make_loader(table).groups(LoaderState(2, 999)))


def test_seeds_and_epochs_differ(table: PairTable) -> None:
    first = contents(take(make_loader(table).groups(), 3))
    assert first == contents(take(make_loader(table).groups(), 3))
    assert first != contents(take(make_loader(table, seed=6).groups(), 3))
    assert first != contents(take(make_loader(table).groups(LoaderState(1, 0)), 3))


# ---- sampled segmentations


def rows(batch: Batch) -> dict[int, tuple[list[int], list[int]]]:
    """Map each pair to its ids in the batch, without begin- and end-of-sentence."""
    return {
        int(index): (
            batch.source[row][batch.source_mask[row]].tolist()[:-1],
            batch.target_out[row][batch.target_mask[row]].tolist()[:-1],
        )
        for row, index in enumerate(batch.indices)
    }


def test_sampling_keeps_tags_budget_and_the_other_side(table: PairTable) -> None:
    loader = make_loader(table, RegularisationConfig(source=True, target=False))
    plan = loader.plan(LoaderState())
    groups = take(loader.groups(), -(-len(plan) // 3))
    split = 0
    for number, group in enumerate(groups):
        planned = plan[3 * number : 3 * number + 3]
        split += len(group.batches) > len(planned)
        drawn = np.concatenate([b.indices for b in group.batches])
        assert sorted(drawn.tolist()) == sorted(np.concatenate(planned).tolist())
        for batch in group.batches:
            assert batch.sentences * max(batch.source.shape[1], batch.target_out.shape[1]) <= 120
            for index, (source, target) in rows(batch).items():
                stored_source, stored_target = (side[0].tolist() for side in table.pairs(np.array([index])))
                assert target == stored_target
                assert (source[:1] == [TAG]) == (ROWS[index][0] == 2)
                text = source[1:] if ROWS[index][0] == 2 else source
                assert all(id >= 1000 for id in text)
                assert len(text) in (ROWS[index][1], 2 * ROWS[index][1])
                assert bool(stored_source) == bool(source)
    assert split, "longer samples should have split some batch"


def test_samples_change_with_epoch_and_side_only(table: PairTable) -> None:
    def samples(state: LoaderState, seed: int = 5) -> dict[int, tuple[list[int], list[int]]]:
        loader = make_loader(table, RegularisationConfig(target=True), seed=seed)
        found: dict[int, tuple[list[int], list[int]]] = {}
        for group in take(loader.groups(state), -(-len(loader.plan(state)) // 3)):
            for batch in group.batches:
                found |= rows(batch)
        return found

    first, second, other = samples(LoaderState(0)), samples(LoaderState(1)), samples(LoaderState(0), seed=6)
    shared = [i for i in first.keys() & second.keys() & other.keys() if min(ROWS[i][1:]) > 3]
    assert len(shared) > 50
    assert all(first[i] != second[i] and first[i] != other[i] for i in shared)
    assert all(first[i][0][-3:] != first[i][1][-3:] for i in shared)


@pytest.mark.parametrize(("max_tokens", "longest"), [(40, None), (60, None), (200, 59)])
def test_sample_too_long_for_any_batch_or_for_the_model_is_left_alone(
    tmp_path: Path, max_tokens: int, longest: int | None
) -> None:
    """Samples have 30 or 60 pieces; with end-of-sentence, 60 pieces exceed a limit of 60."""
    table = write_table(tmp_path, [(0, 30, 30)] * 20)
    batch = BatchConfig(max_tokens=max_tokens)
    data = data_section(RegularisationConfig())
    loader = Loader(table, SOURCE, TARGET, batch, seed=1, data=data, longest=longest)
    found = [row for group in take(loader.groups(), 20) for b in group.batches for row in rows(b).values()]
    stored = [source[0] < 1000 for source, _ in found]
    assert any(stored)
    assert not all(stored)
    assert all(len(source) == 30 for source, _ in found)


def test_sampling_without_text_is_refused_at_once(tmp_path: Path) -> None:
    table = write_table(tmp_path, ROWS[:5], has_text=False)
    with pytest.raises(DataError, match="no training text"):
        make_loader(table, RegularisationConfig())


def test_looking_at_another_epoch_does_not_change_the_planned_batches(
    table: PairTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of the largest batches runs in another thread than the loader's; nothing is planned twice or mixed up."""
    planned: list[LoaderState] = []
    plan = Loader._plan
    monkeypatch.setattr(Loader, "_plan", lambda self, at: [planned.append(at), plan(self, at)][1])
    loader = make_loader(table)
    groups: Iterator[Group] = loader.groups()
    found: list[Group] = []
    for _ in range(6):
        found.append(next(groups))
        assert loader.load(LoaderState(1))[0].indices.tolist() == loader.plan(LoaderState(1))[0].tolist()
    groups.close()  # type: ignore[attr-defined]
    assert sorted(at.epoch for at in planned) == [0, 1]
    assert contents(found) == contents(take(make_loader(table).groups(), 6))


# ---- refusals, validation


def test_too_long_pair_is_refused_at_once(table: PairTable) -> None:
    with pytest.raises(DataError, match=r"training\.batch\.max_tokens"):
        Loader(table, SOURCE, TARGET, BatchConfig(max_tokens=20), seed=1)


def test_table_without_pairs_is_refused(tmp_path: Path) -> None:
    empty = write_table(tmp_path, [])
    with pytest.raises(DataError, match="no training pair"):
        make_loader(empty)
    assert list(fixed_batches(empty, SOURCE, TARGET, BatchConfig())) == []


@pytest.mark.parametrize("max_tokens", [120, 10])
def test_fixed_batches_hold_every_pair_once(table: PairTable, max_tokens: int) -> None:
    """This includes pairs longer than the budget, because validation sets are not filtered."""
    batch = BatchConfig(max_tokens=max_tokens, max_sentences=6)
    batches = list(fixed_batches(table, SOURCE, TARGET, batch))
    assert sorted(i for b in batches for i in b.indices.tolist()) == list(range(len(ROWS)))
    assert max(b.sentences for b in batches) <= 6
    again = list(fixed_batches(table, SOURCE, TARGET, batch))
    assert [b.source.tolist() for b in again] == [b.source.tolist() for b in batches]
    assert sum(b.target_tokens for b in batches) == sum(target + 1 for _, _, target in ROWS)


# ---- the thread


def loader_threads() -> int:
    return sum(thread.name == "ziggurat-loader" for thread in threading.enumerate())


def test_prefetching_keeps_order_and_depth() -> None:
    produced = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            produced.append(number)
            yield number

    ahead = Background(numbers(), depth=3)
    assert [next(ahead) for _ in range(50)] == list(range(50))
    ahead.close()
    # 3 in the queue, one waiting to enter it, and at most one more taken from the queue meanwhile.
    assert len(produced) <= 50 + 5
    assert loader_threads() == 0


def test_errors_of_the_thread_reach_the_consumer() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise DataError("shard 3 is damaged")

    ahead = Background(broken(), depth=1)
    assert next(ahead) == 1
    with pytest.raises(DataError, match="shard 3 is damaged"):
        next(ahead)
    assert loader_threads() == 0


def test_threads_end_when_their_iterators_do(table: PairTable) -> None:
    loader = make_loader(table)
    for stop in ("close", "break", "delete"):
        groups = loader.groups()
        for _ in groups:
            break
        assert loader_threads() == 1
        if stop == "close":
            groups.close()  # type: ignore[attr-defined]
        del groups, _
        gc.collect()
        assert loader_threads() == 0


def test_waiting_is_counted(table: PairTable) -> None:
    loader = make_loader(table)
    assert loader.waited_seconds == 0
    take(loader.groups(), 1)
    assert 0 < loader.waited_seconds < 30


@pytest.mark.slow
def test_a_program_that_forgets_the_iterator_still_ends() -> None:
    program = (
        "import itertools, sys\n"
        "from ziggurat.data.loader import Background\n"
        "ahead = Background(itertools.count(), depth=2)\n"
        "sys.exit(next(ahead) + 7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 7


def test_seeds_of_batches_follow_from_their_position(table: PairTable) -> None:
    """They are distinct for every batch of two epochs and every part of a split one, and the same however an update is
    cut.
    """
    sampling = RegularisationConfig(source=True, target=True)

    def seeds(accumulate: int, seed: int = 1) -> list[int]:
        batch = BatchConfig(max_tokens=120, length_multiple=4, accumulate=accumulate)
        groups = Loader(table, SOURCE, TARGET, batch, seed=seed, data=data_section(sampling)).groups()
        found: list[int] = []
        while True:
            group = next(groups)
            found.extend(b.seed for b in group.batches)
            if group.state_after.epoch == 2:
                break
        return found

    single = seeds(1)
    assert single == seeds(3)
    assert len(set(single)) == len(single) > 20
    assert not set(single) & set(seeds(1, seed=2))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_processes_divide_the_batches_of_one(table: PairTable, count: int) -> None:
    """Batches come in order, none twice; a process without one gets an idle batch, which does not count."""
    batch = BatchConfig(max_tokens=120, accumulate=3, length_multiple=4)

    def groups(rank: int, count: int) -> list[Group]:
        return take(Loader(table, SOURCE, TARGET, batch, seed=5, rank=rank, count=count).groups(), 40)

    idle = 0
    for whole, *parts in zip(groups(0, 1), *(groups(rank, count) for rank in range(count)), strict=True):
        assert {part.state_after for part in parts} == {whole.state_after}
        for rank, part in enumerate(parts):
            mine = whole.batches[rank::count]
            assert [b.seed for b in part.batches if b.target_tokens] == [b.seed for b in mine]
            assert [b.indices.tolist() for b in part.batches if b.target_tokens] == [b.indices.tolist() for b in mine]
            if not mine:
                (empty,) = part.batches
                assert (empty.source_tokens, empty.target_tokens, empty.sentences) == (0, 0, 0)
                assert not empty.target_mask.any()
                assert empty.source_mask.any(1).all()
                idle += 1
    assert idle > 0 or count == 2  # every epoch of this table ends with at least two batches
