"""Checksum lists: which changes they notice, accept and report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ziggurat.system.errors import CheckpointError
from ziggurat.system.files import check_file, check_folder, fingerprint, is_intact, write_checksums

CONFIG = "data:\n  store: s\nmodel:\n  heads: 4\ndecoding:\n  beam_size: 5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / ".lock").touch()
    (tmp_path / "inner").mkdir()
    write_checksums(tmp_path, "`make it` makes it")
    return tmp_path


def test_an_intact_folder_passes_and_so_does_one_without_a_list(folder: Path) -> None:
    assert check_folder(folder) == {"weights", "config.yaml"}
    (folder / "notes.txt").write_text("mine")
    check_folder(folder)
    (folder / "weights").write_bytes(b"other")
    (folder / "checksums.json").unlink()
    assert check_folder(folder) == frozenset()
    (folder / "checksums.json").write_text('{"sha": {"weights": "somebody else\'s"}}')
    assert check_folder(folder) == frozenset()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(bytes(5120)), "wrong checksum"),
        (lambda path: path.write_bytes(b""), "0 bytes instead of 5,120"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
    ],
)
def test_changed_files_are_named_with_the_way_out(folder: Path, damage: object, message: str) -> None:
    damage(folder / "weights")  # type: ignore[operator]
    for check in (lambda: check_folder(folder), lambda: check_file(folder / "weights")):
        with pytest.raises(CheckpointError, match=rf"weights: .*{message}.*; `make it` makes it"):
            check()
    check_file(folder / "config.yaml")
    check_file(folder / "notes.txt")


def test_every_bit_of_the_list_itself_is_protected(folder: Path) -> None:
    path = folder / "checksums.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"checksums\.json: "):
            check_folder(folder)
    for text in ("", "[]", "[" * 100_000, '{"files": 3}', json.dumps({**json.loads(whole), "format": 2})):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"checksums\.json: "):
            check_folder(folder)


def test_a_list_cannot_name_files_elsewhere(folder: Path) -> None:
    from ziggurat.system.files import content_checksum

    document = json.loads((folder / "checksums.json").read_text())
    document["files"] = {"../weights": document["files"]["weights"]}
    document["checksum"] = content_checksum(document)
    (folder / "checksums.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"checksums\.json: damaged"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("beam_size: 5", "beam_size: 8", r"decoding\.beam_size: 5 -> 8\); .*ziggurat translate .* beam_size=8"),
        ("beam_size: 5", "beam_size: 8", r"remove .*checksums\.json"),
        ("heads: 4", "heads: 2", r"model\.heads: 4 -> 2\); .*weights are those of the old `model` section"),
        ("  heads: 4", "  heads: 4\n  d_model: 8", r"model\.d_model: \(not given\) -> 8"),
        ("heads: 4", "heads: '4'", r'model\.heads: 4 -> "4"'),
        ("heads: 4", "heads: [", "not valid YAML.*`make it` makes it"),
    ],
)
def test_an_edited_configuration_is_refused_with_its_keys(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "config.yaml").write_text(CONFIG.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        check_folder(folder)


def test_comments_and_order_are_not_an_edit(folder: Path) -> None:
    (folder / "config.yaml").write_text("# mine\n" + CONFIG.replace("heads: 4", "heads:   4  # four"))
    check_folder(folder)


def test_a_settled_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"abc")
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return fingerprint(path)

    monkeypatch.setattr("ziggurat.system.files.fingerprint", counted)
    expected = fingerprint(path)
    assert is_intact(path, expected)
    assert is_intact(path, expected)
    assert len(read) == 2, "a file of this moment may change once more without its time showing it"
    later = time.time() + 60
    monkeypatch.setattr("ziggurat.system.files.time.time", lambda: later)
    assert is_intact(path, expected)
    assert is_intact(path, expected)
    assert not is_intact(path, "another")
    assert len(read) == 3
    path.write_bytes(b"xyz")
    assert not is_intact(path, expected)
