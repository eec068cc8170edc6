"""Stages of training data: the mix of each stage, and where one ends and the next one starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import DataConfig
from ziggurat.config.modifiers import StageConfig
from ziggurat.data.batching import CorpusMix, next_starts, stages_over
from ziggurat.data.table import PairTable, TableWriter
from ziggurat.system.errors import DataError

SIZES = {"clean": 40, "dirty": 130, "rest": 7}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    folder = tmp_path_factory.mktemp("stages")
    writer = TableWriter(folder, "train", has_text=False)
    for number, size in enumerate(SIZES.values()):
        side = (np.zeros(size, np.int32), np.ones(size, np.int32))
        writer.write(number, side, side)
    corpora = [{"name": name, "weight": 1.0, "kept": size} for name, size in SIZES.items()]
    return PairTable(folder, "train", writer.close(), corpora)


def stage(until: str, epochs: int | None = None, patience: int | None = None, **mix: float) -> StageConfig:
    return StageConfig.model_validate({"mix": mix, "until": {"corpus": until, "epochs": epochs, "patience": patience}})


STAGES = [stage("clean", 2, clean=0.8, dirty=0.2), stage("dirty", 1, clean=1, dirty=3), stage("rest", rest=1, dirty=1)]


def epochs(stages: list[StageConfig], count: int) -> list[tuple[int, ...]]:
    """Return the starts with which each epoch is drawn."""
    starts: tuple[int, ...] = (0,)
    found = []
    for epoch in range(count):
        found.append(starts)
        starts = next_starts(stages, starts, epoch + 1)
    return found


def test_stages_follow_each_other() -> None:
    assert epochs(STAGES, 6) == [(0,), (0,), (0, 2), (0, 2, 3), (0, 2, 3), (0, 2, 3)]
    assert not any(stages_over(STAGES, starts, epoch) for epoch, starts in enumerate(epochs(STAGES, 6)))
    ended = STAGES[:2]
    assert [stages_over(ended, starts, epoch) for epoch, starts in enumerate(epochs(ended, 5))] == [False] * 3 + [
        True
    ] * 2


def test_an_epoch_is_a_pass_over_the_corpus_that_is_counted(table: PairTable) -> None:
    mix = CorpusMix(table, STAGES, 1.0, seed=3)
    drawn = [Counter(table.corpora[mix.chosen(n, starts)].tolist()) for n, starts in enumerate(epochs(STAGES, 5))]
    assert drawn[0] == drawn[1] == {0: 40, 1: 10}
    assert drawn[2] == {0: 43, 1: 130}
    assert drawn[3] == drawn[4] == {1: 7, 2: 7}


def test_corpora_continue_where_the_stage_before_left_them(table: PairTable) -> None:
    """No pair repeats before all pairs of its corpus have come, across all stages."""
    mix = CorpusMix(table, STAGES, 1.0, seed=3)
    counts = np.zeros(len(table), int)
    for epoch, starts in enumerate(epochs(STAGES, 12)):
        np.add.at(counts, mix.chosen(epoch, starts), 1)
        for number in range(3):
            of_corpus = counts[table.corpora == number]
            assert of_corpus.max() - of_corpus.min() <= 1
    assert (mix.chosen(4, (0, 2, 3)) == CorpusMix(table, STAGES, 1.0, seed=3).chosen(4, (0, 2, 3))).all()
    assert (mix.chosen(4, (0, 2, 3)) != CorpusMix(table, STAGES, 1.0, seed=4).chosen(4, (0, 2, 3))).any()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 12))
def test_the_stage_of_an_epoch(lengths: list[int], epoch: int) -> None:
    stages = [stage("clean", length, clean=1) for length in lengths]
    last = [number for number, length in enumerate(lengths) for _ in range(length)]
    starts = epochs(stages, epoch + 1)[-1]
    assert len(starts) - 1 == (last[epoch] if epoch < len(last) else len(lengths) - 1)


def test_without_stages_weights_decide(table: PairTable) -> None:
    assert sorted(CorpusMix(table, [], 1.0, seed=3).chosen(0).tolist()) == list(range(len(table)))


def test_corpora_of_one_name_without_pairs_or_that_the_store_lacks(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path, "train", has_text=False)
    one = (np.zeros(1, np.int32), np.ones(1, np.int32))
    writer.write(0, one, one)
    writer.write(1, one, one)
    corpora: list[dict[str, Any]] = [{"name": name, "weight": 1.0, "kept": 1} for name in ("a", "a", "empty")]
    table = PairTable(tmp_path, "train", writer.close(), corpora)
    for name, message in (
        ("a", "several corpora have this name"),
        ("empty", "the store has no pair of empty"),
        ("mud", r"data\.stages\.0\.mix`: no corpus mud; the store has: a, a, empty"),
    ):
        with pytest.raises(DataError, match=message):
            CorpusMix(table, [stage(name, **{name: 1})], 1.0, seed=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": [STAGES[2], STAGES[0]]}, r"`stages\.0` never ends"),
        ({"stages": [stage("clean", None, 3, clean=1)]}, r"set `training\.stop\.patience`"),
        ({"stages": STAGES, "sampling_temperature": 2.0}, "leave out `sampling_temperature` and `weight`"),
        ({"stages": STAGES, "train": [{"path": "a.tsv", "weight": 2.0}]}, "leave out `sampling_temperature` and"),
        ({"stages": [{"mix": {"a": 1.0}, "until": {"corpus": "b"}}]}, "counts epochs of `b`, which is not in the mix"),
        ({"stages": [{"mix": {"a": 0.0}, "until": {"corpus": "a"}}]}, "not in the mix with a share above 0"),
        (
            {"stages": [{"mix": {"a": 1.0}, "until": {"corpus": "a", "epochs": 1, "patience": 1}}]},
            "either `epochs` or `patience`",
        ),
    ],
)
def test_impossible_stages(settings: dict[str, Any], message: str) -> None:
    section = {"source_language": "de", "target_language": "en", "store": "store", **settings}
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(section)
