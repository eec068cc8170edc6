"""The folder of downloads and mirrors: where files are taken from, and what is refused."""

from __future__ import annotations

import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.corpora.fetch import server as behaving
from tests.corpora.fetch.server import Server
from ziggurat.corpora.fetch.downloads import Downloads, place_of
from ziggurat.corpora.fetch.network import Network
from ziggurat.corpora.fetch.registry import Remote
from ziggurat.corpora.fetch.transfer import Part
from ziggurat.system.errors import ConfigError, DataError

CONTENT = random.Random(3).randbytes(5000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_a_file_is_fetched_once_and_compared_every_time(server: Server, tmp_path: Path, network: Network) -> None:
    downloads = Downloads(tmp_path, network=network)
    remote = Remote(url=server.add("x/a.bin", CONTENT, behaving.redirecting("/b")))
    server.add("b", CONTENT)
    held = downloads.get(remote)
    assert held.path == tmp_path / f"127.0.0.1_{server.port}" / "x" / "a.bin"
    assert held.document() == {
        "url": remote.url, "came_from": f"{server.address}/b", "bytes": 5000, "sha256": SHA256,
    }  # fmt: skip
    assert downloads.get(remote) == held
    assert len(server.requests) == 2

    held.path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(DataError, match=r"since it was fetched, as a\.bin\.origin\.json shows; it was removed"):
        downloads.get(remote)
    assert downloads.get(remote).sha256 == SHA256


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sha256": "0" * 64}, f"what came has the sha256 {SHA256}, but the registry says 0000"),
        ({"md5": "0" * 32}, "but the registry says 0000"),
        ({"bytes": 10_000}, "what came has the length 5,000 bytes, but the registry says 10,000 bytes"),
    ],
    ids=["sha256", "md5", "bytes"],
)
def test_a_file_other_than_the_registrys(
    server: Server, tmp_path: Path, network: Network, wrong: dict[str, str | int], says: str
) -> None:
    url = server.add("a", CONTENT)
    with pytest.raises(DataError, match=says) as caught:
        Downloads(tmp_path, network=network).get(Remote(url=url, **wrong))  # type: ignore[arg-type]
    assert "it was removed" in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    right = Remote(url=url, bytes=5000, sha256=SHA256, md5=hashlib.md5(CONTENT).hexdigest())
    assert Downloads(tmp_path, network=network).get(right).bytes == 5000


def test_the_folder_of_one_machine_is_the_mirror_of_another(server: Server, tmp_path: Path, network: Network) -> None:
    remote = Remote(url=server.add("x/a?f=1/2", CONTENT, behaving.dropping(100)))
    held = Downloads(tmp_path / "one", network=network).get(remote)
    asked = len(server.requests)
    mirrored = Downloads(tmp_path / "two", [str(tmp_path / "none"), str(tmp_path / "one")], offline=True).get(remote)
    assert mirrored == held, "also in its origin"
    assert len(server.requests) == asked
    assert not (tmp_path / "two").exists(), "a mirror that is a folder is read where it lies"
    mirrored.path.write_bytes(CONTENT[:100])
    for asked_for, says in (
        (remote, r"damaged or changed since it was fetched, as .*\.origin\.json shows"),
        (remote.model_copy(update={"sha256": SHA256}), "the mirror's file has the sha256"),
    ):
        with pytest.raises(DataError, match=f"{says}.*; it is in a mirror: replace it there"):
            Downloads(tmp_path / "two", [str(tmp_path / "one")], offline=True).get(asked_for)
    assert mirrored.path.exists()


def test_a_mirror_that_is_a_server_comes_before_the_files_own(server: Server, tmp_path: Path, network: Network) -> None:
    server.add("mirror/corpora.invalid/x/a.tgz?y", b"\x1f\x8bmirrored")
    mirror = f"{server.address}/mirror/"
    held = Downloads(tmp_path, [mirror], network=network).get(Remote(url="https://corpora.invalid/x/a.tgz?y"))
    assert held.came_from == f"{server.address}/mirror/corpora.invalid/x/a.tgz%3Fy"
    own = Remote(url=server.add("own", CONTENT))
    assert Downloads(tmp_path / "1", [mirror], network=network).get(own).came_from == own.url

    place = place_of(own.url)
    for folder in ("mirror", "other"):
        server.add(f"{folder}/{place}", CONTENT)
        (tmp_path / folder / place).parent.mkdir(parents=True)
    mirrors = [mirror, f"{server.address}/other", str(tmp_path / "mirror"), str(tmp_path / "other")]
    assert Downloads(tmp_path / "2", mirrors, network=network).get(own).came_from == f"{mirror}{place}"
    for folder in ("other", "mirror"):  # folders come first, then servers, each in their order
        (tmp_path / folder / place).write_bytes(CONTENT)
        downloads = Downloads(tmp_path / "3", mirrors, network=network)
        assert downloads.get(own).came_from == str(tmp_path / folder / place)
    index = server.add("index", b"own")
    server.add(f"mirror/{place_of(index)}", b"mirrored")
    assert downloads.get_small(index) == b"mirrored"
    with pytest.raises(DataError, match=r"404.*404") as caught:
        Downloads(tmp_path, [mirror], network=network).get(Remote(url=f"{server.address}/none"))
    assert f"{mirror}127.0.0.1_{server.port}/none" in str(caught.value)


def test_two_processes_fetch_the_same_files_at_once(server: Server, tmp_path: Path, network: Network) -> None:
    """The second process asks for each file before the first one has it, waits, and then finds it."""
    remotes = [Remote(url=server.add(name, CONTENT)) for name in ("de", "en")]
    phases: list[str] = []

    def second() -> list[str]:
        downloads = Downloads(tmp_path, network=network, progress=lambda phase, *_: phases.append(phase))
        return [downloads.get(remote).sha256 for remote in remotes]

    with ThreadPoolExecutor(1) as pool:
        first = tmp_path / place_of(remotes[0].url)
        first.parent.mkdir()
        with Part.opened(first) as part:
            other = pool.submit(second)
            while not (other.done() or any(phase.startswith("wait for another process") for phase in phases)):
                time.sleep(0.005)
            part.write(CONTENT)
            part.finish(lambda file: None)
        assert other.result() == [SHA256, SHA256]
    assert [request.path for request in server.requests] == ["en"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_process_killed_while_another_waits_leaves_everything_it_wrote(
    server: Server, tmp_path: Path, network: Network
) -> None:
    remote = Remote(url=server.add("a", CONTENT))
    path = tmp_path / place_of(remote.url)
    path.parent.mkdir()
    phases: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with Part.opened(path) as part:
            part.restart(remote.url, '"1"', len(CONTENT))
            part.write(CONTENT[:1000])
            part.file.flush()
            downloads = Downloads(tmp_path, network=network, progress=lambda phase, *_: phases.append(phase))
            other = pool.submit(downloads.get, remote)
            while not (other.done() or any(phase.startswith("wait for another process") for phase in phases)):
                time.sleep(0.005)
            part.write(CONTENT[1000:3000])
        assert other.result().sha256 == SHA256
    assert [request.headers.get("range") for request in server.requests] == ["bytes=3000-"]


def answering_a_part(handler: behaving._Handler, file: behaving.File) -> None:
    """Send bytes from 3,000 on, which nobody requested, without identifying the version."""
    handler.answer(206, bytes(2000), {"Content-Range": "bytes 3000-4999/5000"})


@pytest.mark.parametrize(
    ("mirrored", "asked"),
    [(None, "bytes=3000-"), (answering_a_part, "bytes=3000-"), (behaving.dropping(4000), None)],
    ids=["lacks the file", "sends another part", "drops another version"],
)
def test_a_mirror_replaces_a_partial_download_only_if_it_sends_the_file(
    server: Server, tmp_path: Path, network: Network, mirrored: behaving.Behaviour | None, asked: str | None
) -> None:
    network = replace(network, retries=0)
    remote = Remote(url=server.add("a", CONTENT, behaving.dropping(3000)))
    with pytest.raises(DataError, match="3,000 bytes are kept"):
        Downloads(tmp_path, network=network).get(remote)
    if mirrored is not None:
        server.add(f"mirror/{place_of(remote.url)}", bytes(5000), mirrored)
    assert Downloads(tmp_path, [f"{server.address}/mirror"], network=network).get(remote).sha256 == SHA256
    assert [request.headers.get("range") for request in server.requests] == [None, None, asked]


def test_without_a_network_the_message_says_where_to_put_the_file(tmp_path: Path) -> None:
    downloads = Downloads(tmp_path, offline=True)
    with pytest.raises(DataError, match="`--offline` forbids the network") as caught:
        downloads.get(Remote(url="https://corpora.invalid/x/a.tgz"))
    assert f"Put it at {tmp_path / 'corpora.invalid/x/a.tgz'}" in str(caught.value)
    (tmp_path / "corpora.invalid/x").mkdir(parents=True)
    (tmp_path / "corpora.invalid/x/a.tgz").write_bytes(b"\x1f\x8b")
    assert downloads.get(Remote(url="https://corpora.invalid/x/a.tgz")).bytes == 2
    with pytest.raises(DataError, match=r"sold by Someone\. Put it at"):
        Downloads(tmp_path).get(Remote(url="ftp://corpora.invalid/b.tgz", by_hand="sold by Someone"))
    with pytest.raises(DataError, match="name the corpus in full"):
        downloads.get_small("https://corpora.invalid/index")
    with pytest.raises(DataError, match="only http and https"):
        Downloads(tmp_path).get(Remote(url="ftp://corpora.invalid/b.tgz"))


def test_a_file_put_there_by_hand_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    (tmp_path / "h/a.tgz").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(DataError, match=r"a\.tgz: the content does not match the name"):
        Downloads(tmp_path, offline=True).get(Remote(url="http://h/a.tgz"))


def test_notes_that_are_damaged_are_not_checksums(server: Server, tmp_path: Path, network: Network) -> None:
    downloads = Downloads(tmp_path, network=network)
    remote = Remote(url=server.add("a", CONTENT))
    notes = downloads.get(remote).path.with_name("a.origin.json")
    document = json.loads(notes.read_text())
    notes.write_text(json.dumps({**document, "sha256": "0" * 64}))
    assert downloads.get(remote).sha256 == SHA256


@pytest.mark.parametrize(
    "url",
    [
        "http://h/../../etc/passwd", "http://h/a/../../b", "http://h//etc/passwd", "http://../a", "http://h/a\\..\\b",
        "file:///etc/passwd", "http://user:secret@h/a", "http://h/a b", "http://h/a\n", "http://h/", "h/a",
        f"http://h/{'x' * 300}", "http://h/./a", "http://./a", "http://",
        "http://www..example.org/x.txt", "http://.example.org/x", f"http://{'x' * 64}.org/x", "http://h:/x",
    ],
)  # fmt: skip
def test_addresses_that_lead_out_of_the_folder(url: str) -> None:
    with pytest.raises(ConfigError):
        place_of(url)


def test_paths_of_addresses() -> None:
    assert place_of("https://data.statmt.org/wmt19/dev.tgz") == "data.statmt.org/wmt19/dev.tgz"
    assert place_of("http://h:8080/a?f=x/y") == "h_8080/a?f=x%2Fy"
    assert len(place_of(f"http://h/a?{'x' * 900}")) < 80


def test_sizes(server: Server, tmp_path: Path, network: Network) -> None:
    downloads = Downloads(tmp_path, network=network)
    remote = Remote(url=server.add("a", CONTENT))
    assert downloads.size(remote) == 5000
    assert Downloads(tmp_path, offline=True).size(remote) is None
    assert downloads.size(remote.model_copy(update={"bytes": 3})) == 3
    downloads.get(remote)
    assert Downloads(tmp_path, offline=True).size(remote) == 5000
    assert Downloads(tmp_path / "b", [str(tmp_path)], offline=True).size(remote) == 5000
