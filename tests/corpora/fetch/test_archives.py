"""Archive members: copied under our own names, in bounded memory, and refused if an archive is malicious."""

from __future__ import annotations

import bz2
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.corpora.fetch.downloads import is_archive, take_out
from ziggurat.system.errors import DamageError, DataError

Members = list[tuple[str, bytes]]


def make_zip(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def make_tar(path: Path, members: Members) -> Path:
    mode: Any = {".tgz": "w:gz", ".gz": "w:gz", ".xz": "w:xz"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


KINDS: dict[str, Callable[[Path, Members], Path]] = {
    "a.zip": make_zip, "a.tar": make_tar, "a.tgz": make_tar, "a.tar.gz": make_tar, "a.tar.xz": make_tar,
}  # fmt: skip


def extracted(archive: Path, folder: Path, *patterns: str) -> dict[str, list[tuple[str, bytes]]]:
    """Return name and content of what is copied out, and check that nothing was written anywhere else."""
    folder.mkdir(exist_ok=True)
    before = {path for path in folder.parent.rglob("*") if folder not in path.parents}
    found, _ = take_out(archive, patterns, folder)
    assert {path for path in folder.parent.rglob("*") if folder not in path.parents} == before
    copies = [member.path for members in found.values() for member in members]
    assert sorted(folder.iterdir()) == sorted(copies)
    assert all(path.is_file() and not path.is_symlink() for path in copies)
    return {p: [(member.name, member.path.read_bytes()) for member in members] for p, members in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_members_are_copied_out(kind: str, tmp_path: Path) -> None:
    members = [
        ("./x/t.de", b"eins\n"),
        ("x/t.en", b"one\n"),
        ("x/LICENSE", b"free"),
        ("other.en.bz", bz2.compress(b"")),
    ]
    archive = KINDS[kind](tmp_path / kind, members)
    assert is_archive(archive)
    assert extracted(archive, tmp_path / "out", "*.de", "x/*.en") == {
        "*.de": [("x/t.de", b"eins\n")],
        "x/*.en": [("x/t.en", b"one\n")],
    }
    _, terms = take_out(archive, [], tmp_path / "out")
    assert terms == {"x/LICENSE": "free"}


def test_the_number_of_terms_is_limited(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", [(f"{n}/README", b"free") for n in range(40)])
    _, terms = take_out(archive, [], tmp_path)
    assert list(terms) == [f"{n}/README" for n in range(32)]


NAMES = st.one_of(
    st.sampled_from(["../../a.de", "/etc/a.de", "a\\..\\b.de", "\n.de", "..de", "a/../../b.de", "C:\\a.de", " .de"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).map(
        lambda name: f"{name}.de"
    ),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(kind=st.sampled_from(["a.zip", "a.tar"]), names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_no_name_leads_out_of_the_folder(kind: str, names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("names")
    archive = KINDS[kind](place / kind, [(name, str(number).encode()) for number, name in enumerate(names)])
    found = extracted(archive, place / "out", "*.de")["*.de"]
    assert sorted(content for _, content in found) == sorted(str(number).encode() for number in range(len(names)))


def test_links_devices_and_sparse_files_are_not_members(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as opened:
        for name, kind in [("l.de", tarfile.SYMTYPE), ("h.de", tarfile.LNKTYPE), ("d.de", tarfile.CHRTYPE)]:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            opened.addfile(entry)
        entry = tarfile.TarInfo("s.de")  # 1 TB, all of it a hole
        entry.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(10**12), "GNU.sparse.map": "0,0"}
        opened.addfile(entry)
    assert extracted(archive, tmp_path / "out", "*.de") == {"*.de": []}


@pytest.mark.parametrize("kind", ["a.zip", "a.tgz"])
def test_bombs(kind: str, tmp_path: Path) -> None:
    archive = KINDS[kind](tmp_path / kind, [("a.de", bytes(18 << 20))])
    assert archive.stat().st_size < 200_000
    with pytest.raises(DataError, match="made to fill memory or disk"):
        extracted(archive, tmp_path / "out", "*.de")


def test_a_tar_header_that_would_fill_the_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 10**11
    archive = tmp_path / "a.tar"
    archive.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=r"a header of 100,000,000,000 bytes"):
        extracted(archive, tmp_path / "out", "*.de")


def test_encrypted_members(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", [("a.de", b"text")])
    content = bytearray(archive.read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.de is encrypted"):
        extracted(archive, tmp_path / "out", "*.de")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.2, 0.7, 0.97])
def test_truncated_archives(kind: str, keep: float, tmp_path: Path) -> None:
    archive = KINDS[kind](tmp_path / kind, [(f"{n}.de", os.urandom(30_000)) for n in range(4)])
    content = archive.read_bytes()
    # A tar ends with zeros, which may be missing.
    archive.write_bytes(content[: int(len(content.rstrip(b"\0")) * keep)])
    with pytest.raises(DamageError, match=r"damaged|ends early") as caught:
        extracted(archive, tmp_path / "out", "*.de")
    assert str(archive) in str(caught.value)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("place", ["content", "name", "empty name", "offset"])
def test_damage_anywhere_in_a_zip(method: int, place: str, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w", method) as opened:
        opened.writestr("ä.de", b"text " * 99)
    content = bytearray(archive.read_bytes())
    entry = content.index(b"PK\x01\x02")
    if place == "content":
        content[40:60] = b"\xff" * 20
    elif place == "name":
        content[entry + 46 : entry + 48] = b"\xff\xff"
    elif place == "empty name":
        content[entry + 28 : entry + 32] = bytes([0, 0, 5, 0])  # turns bytes of the name into an extra field
        content[entry + 46 : entry + 51] = bytes([1, 1, 1, 0, 0])
    else:
        end = content.rindex(b"PK\x05\x06")
        content[end + 16 : end + 20] = (1 << 20).to_bytes(4, "little")
    archive.write_bytes(content)
    with pytest.raises(DamageError, match=r"a\.zip: damaged"):
        extracted(archive, tmp_path / "out", "*.de")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    for kind in ("a.zip", "a.tgz", "a.tar.xz"):
        archive = KINDS[kind](tmp_path / kind, [("a.de", os.urandom(30_000))])
        content = bytearray(archive.read_bytes())
        content[15_000] ^= 1
        archive.write_bytes(content)
        with pytest.raises(DamageError, match="damaged"):
            extracted(archive, tmp_path / f"out-{kind}", "*.de")


SHADOWS = (
    "__MACOSX/._C.en-ru.en", "__MACOSX/sub/._C.en-ru.ru", "._C.en-ru.en", "sub/._C.en-ru.ru",
    "sub/.DS_Store", "Thumbs.db", "__MACOSX/C.en-ru.en", "./__MACOSX/._LICENSE", "desktop.ini",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["a.zip", "a.tgz"])
@pytest.mark.parametrize("order", [1, -1])
def test_files_that_a_desktop_adds_to_an_archive_are_ignored(kind: str, order: int, tmp_path: Path) -> None:
    wanted = [("sub/C.en-ru.en", b"a\n"), ("sub/C.en-ru.ru", b"b\n"), ("LICENSE", b"free")]
    shadows = [(name, b"\x00\x05\x16\x07\x00\x02") for name in SHADOWS]
    archive = KINDS[kind](tmp_path / kind, [*wanted, *shadows][::order])
    folder = tmp_path / "out"
    folder.mkdir()
    found, terms = take_out(archive, ["*.en", "*.ru"], folder)
    names = {pattern: [member.name for member in members] for pattern, members in found.items()}
    assert names == {"*.en": ["sub/C.en-ru.en"], "*.ru": ["sub/C.en-ru.ru"]}
    assert terms == {"LICENSE": "free"}
