from __future__ import annotations

import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.data.table import PairTable, TableWriter
from ziggurat.system.errors import DataError
from ziggurat.system.files import fingerprint

Ragged = tuple[NDArray[np.int32], NDArray[np.int32]]


def ragged(rows: list[list[int]]) -> Ragged:
    return np.array([i for row in rows for i in row], np.int32), np.array([len(row) for row in rows], np.int32)


def rows(generator: np.random.Generator, count: int) -> list[list[int]]:
    return [generator.integers(4, 90, generator.integers(1, 9)).tolist() for _ in range(count)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "a.de").write_text("".join(f"Satz Nummer {n} .\n" for n in range(60)))
    (tmp_path / "a.en").write_text("".join(f"sentence number  {n} .\n" for n in range(60)))
    corpus = {"source": str(tmp_path / "a.de"), "target": str(tmp_path / "a.en"), "weight": 2.0}
    config = {
        "source_language": "de", "target_language": "en", "store": str(tmp_path / "store"),
        "train": [corpus], "dev": [corpus], "subword": {"vocabulary_size": 320},
    }  # fmt: skip
    prepare(DataConfig.model_validate(config))
    return tmp_path / "store"


@pytest.mark.parametrize("has_text", [True, False])
def test_table_gives_back_what_was_written(tmp_path: Path, has_text: bool) -> None:
    """Several batches and shards, in any order, with repeats."""
    generator = np.random.default_rng(7)
    writer = TableWriter(tmp_path, "train", has_text=has_text, shard_pairs=50)
    sources, targets, numbers = [], [], []
    for batch, count in enumerate((30, 1, 30, 0, 40, 7)):
        source, target = rows(generator, count), rows(generator, count)
        numbered = range(len(sources), len(sources) + count)
        texts = [f"s{n}" for n in numbered], [f"t{n}\u2028" for n in numbered]
        writer.write(batch % 3, ragged(source), ragged(target), texts if has_text else None)
        sources += source
        targets += target
        numbers += [batch % 3] * count
    entry = writer.close()
    assert [shard["pairs"] for shard in entry["shards"]] == [61, 47], "a shard ends with the batch that fills it"
    assert (entry["source_pieces"], entry["target_pieces"]) == (sum(map(len, sources)), sum(map(len, targets)))
    corpora = [{"name": f"c{n}", "weight": 1 + n, "kept": numbers.count(n)} for n in range(3)]
    table = PairTable(tmp_path, "train", entry, corpora)
    assert len(table) == 108
    assert table.source_lengths.tolist() == [len(row) for row in sources]
    assert table.target_lengths.tolist() == [len(row) for row in targets]
    assert table.corpora.tolist() == numbers
    assert (table.corpus_names, table.corpus_weights) == (["c0", "c1", "c2"], [1.0, 2.0, 3.0])
    order = [*generator.permutation(108).tolist(), 0, 107, 60, 61, 60]
    got_source, got_target = table.pairs(order)
    assert [row.tolist() for row in got_source] == [sources[n] for n in order]
    assert [row.tolist() for row in got_target] == [targets[n] for n in order]
    assert got_source[0].dtype == np.int32
    if has_text:
        assert table.texts(order) == ([f"s{n}" for n in order], [f"t{n}\u2028" for n in order])
    else:
        with pytest.raises(DataError, match=r"data\.subword\.regularisation"):
            table.texts([0])
    for index in (-1, 108):
        with pytest.raises(IndexError):
            table.pairs([index])


def test_a_store_may_have_more_shards_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path, "train", has_text=False, shard_pairs=1)
    for _ in range(60):
        writer.write(0, ragged([[4, 5]]), ragged([[6]]))
    entry = writer.close()
    checksums = {shard["file"]: fingerprint(tmp_path / shard["file"]) for shard in entry["shards"]}
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 30, hard))
    try:
        table = PairTable(tmp_path, "train", entry, [{"name": "a", "weight": 1.0}], checksums=checksums)
        assert len(os.listdir("/dev/fd")) < opened + 2 * 60, "one descriptor a shard"
        assert [ids.tolist() for ids in table.pairs(range(60))[1]] == [[6]] * 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_opening_maps_instead_of_reading(store: Path) -> None:
    table = Store.open(store).train
    assert isinstance(table.source_lengths, np.memmap)
    ids = table.pairs([0])[0][0]
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def test_store_travels_to_other_processes_by_its_path(store: Path) -> None:
    original = Store.open(store)
    sent = pickle.dumps(original)
    assert len(sent) < 500
    assert pickle.loads(sent).fingerprint == original.fingerprint


def test_development_references_are_untouched(store: Path) -> None:
    opened = Store.open(store)
    assert opened.dev is not None
    assert not opened.train.has_text
    source, target = opened.dev.texts([3])
    assert (source, target) == (["Satz Nummer 3 ."], ["sentence number  3 ."])
    assert opened.target.decode(opened.dev.pairs([3])[1][0]) == "sentence number 3 ."
    assert opened.train.corpus_weights == [2.0]


def test_verify_finds_a_flipped_bit(store: Path) -> None:
    opened = Store.open(store)
    opened.verify()
    shard = store / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged \(wrong checksum\)"):
        Store.open(store).verify()


def test_an_incomplete_store_is_refused(store: Path, tmp_path: Path) -> None:
    for name in sorted(path.name for path in store.iterdir() if path.name != "manifest.json"):
        content = (store / name).read_bytes()
        (store / name).write_bytes(content[:-1])
        with pytest.raises(DataError, match=rf"{name}: .* bytes instead of .*prepare --force"):
            Store.open(store)
        (store / name).unlink()
        with pytest.raises(DataError, match=rf"{name}: missing"):
            Store.open(store)
        (store / name).write_bytes(content)
    manifest = store / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(DataError, match="format 99, but this version of ziggurat reads 1"):
        Store.open(store)
    manifest.write_text(json.dumps(document)[:-9])
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Store.open(store)
    manifest.unlink()
    with pytest.raises(DataError, match="unfinished store"):
        Store.open(store)
    with pytest.raises(DataError, match=r"no store \(no manifest.json\); run"):
        Store.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=f"in {Path.cwd() / 'nowhere'}; give its path, `data.store=FOLDER`"):
        Store.open(Path("nowhere"))
