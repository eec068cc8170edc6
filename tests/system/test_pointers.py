"""Git LFS pointer files in place of every kind of file that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ziggurat.config.data import CorpusConfig
from ziggurat.data.lines import LineStream
from ziggurat.data.readers import CorpusReader
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.model.tensors import read_tensors
from ziggurat.system.errors import ZigguratError
from ziggurat.system.files import check_folder, write_checksums
from ziggurat.system.small_files import MAX_POINTER_BYTES, read_bounded, refuse_pointer

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 312087009\n"
POINTERS = [LFS, LFS.replace(b"git-lfs", b"hawser"), b"/annex/objects/SHA256E-s3--00.bin\n"]


def said_of(action: Callable[[], object]) -> str:
    with pytest.raises(ZigguratError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("content", POINTERS)
@pytest.mark.parametrize(
    "name",
    [
        "text.en",
        "text.en.gz",
        "text.en.xz",
        "pairs.tsv",
        "pairs.parquet",
        "pairs.jsonl",
        "model.npz",
        "model.pt",
        "model.spm",
        "model.safetensors",
    ],
)
def test_a_pointer_is_not_taken_for_the_file(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    actions: dict[str, Callable[[], object]] = {
        "model.npz": lambda: import_checkpoint(path, tmp_path / "out"),
        "model.pt": lambda: import_checkpoint(path, tmp_path / "out"),
        "model.spm": lambda: read_bounded(path),
        "model.safetensors": lambda: read_tensors(path),
    }
    if name.startswith("pairs"):
        corpus = CorpusConfig.model_validate({"path": str(path)})
        actions[name] = lambda: list(CorpusReader.of(corpus, "data.train.0", ("de", "en")).blocks())
    message = said_of(actions.get(name, lambda: LineStream(path).available()))
    assert "a pointer of Git" in message or "a pointer of git-annex" in message, message
    assert name in message


@pytest.mark.parametrize("content", POINTERS)
def test_a_pointer_among_the_files_of_a_manifest_is_named_as_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "joint.spm").write_bytes(b"the model")
    write_checksums(tmp_path, again="again")
    check_folder(tmp_path)
    (tmp_path / "joint.spm").write_bytes(content)
    assert "joint.spm: a pointer of" in said_of(lambda: check_folder(tmp_path))


def test_files_that_only_begin_like_a_pointer_are_not_pointers(tmp_path: Path) -> None:
    long = LFS + b"x" * MAX_POINTER_BYTES
    refuse_pointer("a", long)
    refuse_pointer("a", b"version 1\n")
    (tmp_path / "a").write_bytes(long)
    assert read_bounded(tmp_path / "a") == long
    stream = LineStream(tmp_path / "a")
    assert stream.available() == 4
