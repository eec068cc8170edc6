"""A disk that fills up while a verb writes: the message names the file or folder, the room left, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Ziggurat, tiny_config
from ziggurat.cli.output import check_output
from ziggurat.system.errors import DataError, MachineError, is_full_disk, why_unwritten, written_whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["prepare", "grow", "average", "export", "shortlist", "translate"])
def test_a_full_disk_is_reported_with_what_was_written(
    verb: str,
    number: int,
    ziggurat: Ziggurat,
    trained: Path,
    tiny_folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    arguments: dict[str, list[object]] = {
        "prepare": [tiny_config(tmp_path, tiny_folder), f"data.store={out}"],
        "grow": [trained, "--layers", 3, "--out", out],
        "average": [trained, "--last", 1, "--out", out],
        "export": [trained, "--to", "ziggurat", "--out", out],
        "shortlist": [tiny_folder / "store", "-o", out],
        "translate": [trained, "-i", text, "-o", out],
    }

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", full)
    result = ziggurat(verb, *arguments[verb])
    message = result.err.splitlines()[-1]
    assert result.status == 2
    assert message.startswith(f"ziggurat: {out}")
    assert f"cannot be written: {os.strerror(number)}" in message
    assert (f"MB are free in {tmp_path}" in message) == (number == errno.ENOSPC)
    assert "make room" in message
    assert not out.is_file()


def test_standard_output_has_no_name() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert is_full_disk(error)
    assert (
        why_unwritten(error) == "the output cannot be written: No space left on device; make room, or write elsewhere"
    )
    assert not is_full_disk(OSError(errno.EACCES, "Permission denied"))


def test_a_librarys_error_keeps_the_systems_message(tmp_path: Path) -> None:
    def load() -> None:
        try:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "vocab.json")
        except OSError:
            raise OSError("the vocabulary cannot be loaded")  # noqa: B904, as transformers does

    message = r"out: the vocabulary cannot be loaded \(Input/output error\)"
    with pytest.raises(MachineError, match=message), written_whole(tmp_path / "out"):
        load()


@pytest.mark.parametrize(("flag", "message"), [(os.ST_RDONLY, "Read-only file system"), (0, "permission denied")])
def test_an_output_on_a_disk_that_is_read_only(
    flag: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    with pytest.raises(DataError, match=f"out: cannot be written: {message}"):
        check_output(str(tmp_path / "out"))
