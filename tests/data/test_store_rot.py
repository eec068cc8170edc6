"""Stores that are damaged, by accident or on purpose: refused with the file's name before anything depends on them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.conftest import tiny_experiment
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.data.shortlist import ShortlistTable, read_shortlist, write_shortlist
from ziggurat.data.store_checks import Verification
from ziggurat.data.table import ArrowShard
from ziggurat.system.errors import DataError, MachineError
from ziggurat.system.files import content_checksum, fingerprint


def test_too_many_open_files_do_not_count_as_damage(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    opened = Store.open(store)
    table = ShortlistTable(*(np.zeros(shape, np.int32) for shape in ((opened.source.size, 2), (1,))), ("", ""))
    write_shortlist(tmp_path / "list.safetensors", table)
    shard = next(store.glob("train-*.arrow"))
    for patched, work in (
        ("pyarrow.memory_map", lambda: ArrowShard(shard, 1, has_text=True, checksum=None)),
        ("pathlib.Path.open", lambda: read_shortlist(tmp_path / "list.safetensors", opened.source, opened.target)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(patched, refuse)
            with pytest.raises(MachineError, match="cannot be read: Too many open files;"):
                work()


@pytest.fixture
def store(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder / "store", tmp_path / "store"))


def zero(path: Path, start: int = 2000, count: int = 500) -> None:
    content = bytearray(path.read_bytes())
    content[start : start + count] = bytes(count)
    path.write_bytes(content)


def signed(store: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Give the manifest the checksums of the current files, as someone who forges a store would."""
    manifest = json.loads((store / "manifest.json").read_text())
    for name in manifest["files"]:
        content = store / name
        manifest["files"][name] = {"bytes": content.stat().st_size, "xxh3_128": fingerprint(content)}
    change(manifest)
    manifest["checksum"] = content_checksum(manifest)
    (store / "manifest.json").write_text(json.dumps(manifest))


def rewritten(path: Path, change: Callable[[list[list[int]]], object]) -> None:
    """Apply `change` to the source ids in the first record batch of an Arrow file."""
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    columns = {name: table[name].to_pylist() for name in table.schema.names}
    change(columns["source"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(pa.table(columns, schema=table.schema))


def test_training_pairs_are_compared_before_they_are_parsed(store: Path) -> None:
    zero(store / "train-00000.arrow")
    opened = Store.open(store)  # lengths alone suffice to plan batches
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged \(wrong checksum\).*prepare --force"):
        opened.train.pairs([0])
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged \(wrong checksum\).*--resume"):
        Verification(opened)


@pytest.mark.parametrize("name", ["dev-00000.arrow", "train-source-lengths.npy", "train-corpora.npy", "joint.spm"])
def test_everything_else_is_compared_on_opening(name: str, store: Path) -> None:
    zero(store / name, 20, 30)
    with pytest.raises(DataError, match=rf"{name}: damaged \(wrong checksum\)"):
        Store.open(store)


def test_damage_found_in_the_background_is_kept_for_the_waiting_caller(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero(store / "train-00000.arrow")
    opened = Store.open(store)
    monkeypatch.setattr("ziggurat.data.store_checks.threading.Event.wait", lambda self, timeout=None: False)
    verification = Verification(opened, patience=0.0)
    monkeypatch.undo()
    assert verification.found_damage()
    assert verification.done
    with pytest.raises(DataError, match="no weights were saved that have seen these data"):
        verification.wait()


def test_a_worker_does_not_read_the_store_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(Store.open(store))

    def refused(path: Path, expected: str) -> bool:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr("ziggurat.data.corpus.is_intact", refused)
    monkeypatch.setattr("ziggurat.data.table.is_intact", refused)
    there = pickle.loads(sent)
    assert len(there.train.pairs(range(len(there.train)))[0]) == len(there.train)


def test_prepare_does_not_take_a_damaged_store_for_an_existing_one(tmp_path: Path) -> None:
    config = tiny_experiment(tmp_path).data
    whole = prepare(config)
    zero(tmp_path / "store" / "train-00000.arrow")
    with pytest.raises(DataError, match=r"train-00000\.arrow: damaged.*`--force` rebuilds it"):
        prepare(config)
    assert not prepare(config, force=True).reused
    assert prepare(config).reused
    assert Store.open(tmp_path / "store").fingerprint
    assert whole.kept == prepare(config).kept


def test_a_flip_in_the_manifest_is_not_another_weight(store: Path) -> None:
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"weight": 1.0', '"weight": 3.0', 1))
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Store.open(store)


def test_a_forged_manifest_is_refused(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["checksum"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Store.open(store)
    for key in ("tables", "corpora", "files"):
        forged = {**manifest, key: 7}
        (store / "manifest.json").write_text(json.dumps({**forged, "checksum": content_checksum(forged)}))
        with pytest.raises(DataError, match=r"manifest\.json: damaged"):
            Store.open(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[5].__setitem__(0, 400), "an id outside the vocabulary of 400"),
        (lambda rows: rows[5].__setitem__(0, -1), "an id outside the vocabulary of 400"),
        (lambda rows: rows[5].append(7), "pieces instead of"),
    ],
)
def test_pairs_that_a_model_could_not_take_are_refused(
    change: Callable[[list[list[int]]], object], message: str, store: Path
) -> None:
    rewritten(store / "train-00000.arrow", change)
    signed(store)
    train = Store.open(store).train
    train.pairs([4, 6])
    with pytest.raises(DataError, match=rf"train-00000\.arrow: damaged \(a source .*{message}.*prepare --force"):
        train.pairs([4, 5, 6])


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [0, 3, 1000, 8], [-4, 0, 3, 8], [0, 3, 5, 1000]])
@pytest.mark.parametrize("texts", [False, True])
def test_senseless_offsets_are_refused(offsets: list[int], texts: bool, tmp_path: Path) -> None:
    columns = dict.fromkeys(("source", "target"), pa.array([[1] * 3, [2] * 2, [3] * 3], pa.list_(pa.int32())))
    columns |= dict.fromkeys(("source_text", "target_text"), pa.array(["abc", "de", "fgh"], pa.large_string()))
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    path = tmp_path / "train-00000.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    kind = np.int64 if texts else np.int32
    right = np.array([0, 3, 5, 8], kind).tobytes()
    content = path.read_bytes()
    assert right in content
    path.write_bytes(content.replace(right, np.array(offsets, kind).tobytes(), 1))

    def read() -> object:
        found, row = ArrowShard(path, 3, has_text=True, checksum=None).locate(1)
        return found.text("source", row) if texts else found.sides

    inside = max(offsets[0], offsets[-1]) == 8 and offsets[0] == 0
    message = "offsets of source.* run backwards" if inside else "[Oo]ffset"
    with pytest.raises(DataError, match=rf"train-00000\.arrow: damaged \(.*{message}.*prepare --force"):
        read()


def test_offsets_and_text_that_would_crash_arrow_are_refused(store: Path) -> None:
    """Return every byte of the development pairs' file that may hold an offset, with matching checksums."""
    path = store / "dev-00000.arrow"
    whole = path.read_bytes()
    opened = Store.open(store).dev
    assert opened is not None
    expected = (opened.texts(range(len(opened))), [ids.tolist() for ids in opened.pairs(range(len(opened)))[0]])
    refused: list[str] = []
    for place in range(0, len(whole), 193):
        for value in (0xFF, whole[place] ^ 0x80):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            signed(store)
            try:
                dev = Store.open(store).dev
                assert dev is not None
                dev.texts(range(len(dev)))
                dev.pairs(range(len(dev)))
            except DataError as error:
                refused.append(str(error))
    assert len(refused) > 10
    assert all("dev-00000.arrow: damaged" in message for message in refused)
    path.write_bytes(whole)
    signed(store)
    dev = Store.open(store).dev
    assert dev is not None
    assert (dev.texts(range(len(dev))), [ids.tolist() for ids in dev.pairs(range(len(dev)))[0]]) == expected


def test_a_name_of_a_column_that_is_not_text_is_damage(store: Path) -> None:
    path = store / "dev-00000.arrow"
    path.write_bytes(path.read_bytes().replace(b"source_text", b"so\xffrce_text"))
    signed(store)
    dev = Store.open(store).dev
    assert dev is not None
    with pytest.raises(DataError, match=r"dev-00000\.arrow: damaged"):
        dev.texts([0])


def test_a_header_that_python_cannot_read_is_not_a_token_error(store: Path) -> None:
    path = store / "train-source-lengths.npy"
    whole = path.read_bytes()
    for place in range(0, 128, 3):
        path.write_bytes(whole[:place] + b"(" + whole[place + 1 :])
        signed(store)
        if (place >= 10 and whole[place : place + 1] == b" ") or whole[place : place + 1] == b"(":
            continue  # a bracket among blanks may still be a header
        with pytest.raises(DataError, match=r"train-source-lengths\.npy: damaged"):
            Store.open(store)


def test_lengths_and_corpora_that_do_not_fit_the_manifest_are_refused(store: Path) -> None:
    lengths = np.load(store / "train-target-lengths.npy")
    lengths[3] += 1
    np.save(store / "train-target-lengths.npy", lengths)
    signed(store)
    with pytest.raises(DataError, match=r"train-target-lengths\.npy: damaged \(lengths that do not add up"):
        Store.open(store)
    lengths[3] -= 1
    np.save(store / "train-target-lengths.npy", lengths)
    corpora = np.load(store / "train-corpora.npy")
    corpora[-1] = 1
    np.save(store / "train-corpora.npy", corpora)
    signed(store)
    with pytest.raises(DataError, match=r"train-corpora\.npy: damaged \(corpus 1 of 1\)"):
        Store.open(store)


def test_files_elsewhere_are_not_read(store: Path) -> None:
    signed(store, lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "xxh3_128": ""}}))
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Store.open(store)
