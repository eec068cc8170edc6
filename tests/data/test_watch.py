from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from ziggurat.data.corpus import Store
from ziggurat.data.store_checks import StoreWatch
from ziggurat.system.errors import DataError


@pytest.fixture
def store(tiny_folder: Path, tmp_path: Path) -> Store:
    shutil.copytree(tiny_folder / "store", tmp_path / "store")
    return Store.open(tmp_path / "store")


def arrow(store: Store) -> Path:
    return next(store.path.glob("train-*.arrow"))


def test_an_untouched_store_is_whole(store: Store) -> None:
    watch = StoreWatch(store)
    assert watch.check() is None
    os.utime(arrow(store))  # for example copied back: the same content at another time
    assert watch.check() is None


def test_another_store_in_its_place_is_noticed_and_not_read(store: Store, tiny_folder: Path, tmp_path: Path) -> None:
    """All files are mapped from the start, even those not read yet."""
    expected, _ = Store.open(tiny_folder / "store").train.pairs([0, 7])
    watch = StoreWatch(store)
    store.path.rename(tmp_path / "old")
    assert str(watch.check()).endswith("is gone")
    shutil.copytree(tiny_folder / "store", store.path)
    for file in store.path.glob("*.arrow"):
        file.write_bytes(b"\x07" * file.stat().st_size)
    shutil.rmtree(tmp_path / "old")
    assert str(watch.check()).endswith("is another file now")
    sources, _ = store.train.pairs([0, 7])
    assert all(np.array_equal(read, right) for read, right in zip(sources, expected, strict=True))


def test_a_store_removed_before_it_is_watched_is_an_error(store: Store) -> None:
    file = arrow(store)
    shutil.rmtree(store.path)
    with pytest.raises(DataError, match=rf"{file.parent}/.*: No such file or directory, just after the store was"):
        StoreWatch(store)


def test_a_file_changed_in_place_is_an_error(store: Store) -> None:
    watch, file = StoreWatch(store), arrow(store)
    with file.open("r+b") as handle:
        handle.seek(-9, os.SEEK_END)
        handle.write(b"\xff")
    with pytest.raises(DataError, match=rf"{file.name}: changed while it was being read"):
        watch.check()
