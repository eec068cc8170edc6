"""One file over HTTP, from a server that drops, lies, changes its files and sends pages."""

from __future__ import annotations

import errno
import gzip
import http.client
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora.fetch import server as behaving
from tests.corpora.fetch.server import Server, serving
from ziggurat.corpora.fetch.network import Network, Redirects
from ziggurat.corpora.fetch.transfer import Part, download, read_small, size_of
from ziggurat.system.errors import DataError

TEXT = random.Random(1).randbytes(200_000)
OTHER = random.Random(2).randbytes(220_000)


def quiet(phase: str, done: int, total: int | None) -> None: ...


def got(url: str, folder: Path, network: Network) -> bytes:
    """Fetch a file and return its content; nothing else is left in the folder."""
    path = folder / "there" / "file"
    download(url, path, network, quiet)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    return path.read_bytes()


def failed(url: str, folder: Path, network: Network, *, name: str = "file") -> str:
    """Return the message of a failing fetch, and check that it leaves no file."""
    with pytest.raises(DataError) as caught:
        download(url, folder / name, network, quiet)
    assert not (folder / name).exists()
    return str(caught.value)


def ranges(server: Server) -> list[str | None]:
    """Return the requested parts."""
    return [request.headers.get("range") for request in server.requests]


def test_a_file_comes_whole(server: Server, tmp_path: Path, network: Network) -> None:
    assert got(server.add("a", TEXT), tmp_path, network) == TEXT
    assert ranges(server) == [None]
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_a_partial_download_is_not_fetched_again(server: Server, tmp_path: Path, network: Network) -> None:
    url = server.add("a", TEXT, behaving.dropping(70_000), behaving.dropping(30_000))
    assert got(url, tmp_path, network) == TEXT
    assert ranges(server) == [None, "bytes=70000-", "bytes=100000-"]
    assert [r.headers.get("if-range") for r in server.requests] == [None, '"1"', '"1"']


def test_attempts_that_transfer_something_do_not_count_as_failed(
    server: Server, tmp_path: Path, network: Network
) -> None:
    """Each try brings a third of the rest, down to a few bytes: far more tries than may fail in a row."""
    steps, rest = list[behaving.Behaviour](), len(TEXT)
    while rest > 9:
        steps.append(behaving.dropping(rest // 3))
        rest -= rest // 3
    assert got(server.add("a", TEXT, *steps), tmp_path, network) == TEXT
    assert len(server.requests) > 20


@pytest.mark.parametrize("first", [behaving.dropping(600), behaving.chunked(600)], ids=["length", "no length"])
def test_one_byte_per_attempt_does_not_go_on_for_ever(
    server: Server, tmp_path: Path, network: Network, first: behaving.Behaviour
) -> None:
    message = failed(server.add("a", TEXT, first, *[behaving.dropping(1)] * 99), tmp_path, network)
    assert "4 times in a row; 60" in message
    assert len(server.requests) <= 5


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENOSPC])
def test_a_network_that_goes_away_comes_back_and_a_full_disk_does_not(
    number: int, server: Server, tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fails = http.client.HTTPResponse.read1, [False, True]

    def read1(response: http.client.HTTPResponse, n: int = -1) -> bytes:
        if fails and fails.pop(0):
            raise OSError(number, os.strerror(number))
        return read(response, n)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", read1)
    url = server.add("a", TEXT)
    if number == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            got(url, tmp_path, network)
    else:
        assert got(url, tmp_path, network) == TEXT
        assert len(server.requests) == 2


@pytest.mark.parametrize("second", [behaving.dropping(30_000), behaving.piecewise], ids=["dropped", "a part of it"])
def test_a_file_first_sent_in_chunks_gets_its_length_from_the_rest(
    server: Server, tmp_path: Path, network: Network, second: behaving.Behaviour
) -> None:
    url = server.add("a", TEXT, behaving.chunked(70_000), second)
    assert got(url, tmp_path, network) == TEXT
    assert ranges(server) == [None, "bytes=70000-", "bytes=100000-"]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_dropped_connections_and_changed_files_never_mix_versions(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever faults some answers have, the result is the file that the server has in the end."""
    with serving() as server:
        network = Network(proxy="", retries=12, pause=lambda seconds: None)
        contents = data.draw(st.lists(st.binary(min_size=600, max_size=3000), min_size=1, max_size=4))
        how = st.sampled_from(["dropping", "heedless", "elsewhere", "chunked", "unavailable", "change"])
        steps = data.draw(st.lists(st.tuples(how, st.integers(1, 2500)), max_size=8))
        url = server.add("a", contents[0], etag='"0"')  # each version has its own tag
        version = 0

        def step(kind: str, number: int) -> behaving.Behaviour:
            def behave(handler: behaving._Handler, file: behaving.File) -> None:
                nonlocal version
                if kind == "change":
                    version += 1
                    file.content, file.etag = contents[version % len(contents)], f'"{version}"'
                {
                    "heedless": behaving.heedless if handler.headers.get("Range") else behaving.dropping(number),
                    "elsewhere": behaving.elsewhere if handler.headers.get("Range") else behaving.dropping(number),
                    "chunked": behaving.chunked(number),
                    "unavailable": behaving.status(503),
                }.get(kind, behaving.dropping(number))(handler, file)

            return behave

        server.next["a"] = [step(*one) for one in steps]
        path = tmp_path / str(server.port)
        download(url, path, network, quiet)
        assert path.read_bytes() == server.files["a"].content


def test_a_file_that_changes_between_two_requests(server: Server, tmp_path: Path, network: Network) -> None:
    def change(handler: behaving._Handler, file: behaving.File) -> None:
        behaving.dropping(70_000)(handler, file)
        file.content, file.etag = OTHER, '"2"'

    assert got(server.add("a", TEXT, change), tmp_path, network) == OTHER
    assert ranges(server) == [None, "bytes=70000-"], "the server sends the other version whole, in place of the rest"


@pytest.mark.parametrize(
    ("first", "behaviour", "other"),
    [
        (behaving.dropping(70_000), behaving.heedless, OTHER),
        (behaving.dropping(70_000), behaving.heedless, OTHER[: len(TEXT)]),
        (behaving.dropping(70_000), behaving.elsewhere, OTHER),
        (behaving.dropping(70_000), behaving.elsewhere, OTHER[: len(TEXT)]),
        (behaving.dropping(70_000), behaving.nameless, OTHER),  # only the total shows it
        # The first version has arrived completely, and the server reports that the second has no more bytes.
        (behaving.claiming(len(TEXT) + 9), behaving.heedless, OTHER[: len(TEXT)]),
        (behaving.claiming(len(TEXT) + 9), behaving.nameless, OTHER[:-30_000]),
    ],
    ids=["heedless", "as long", "elsewhere", "elsewhere, as long", "nameless", "at the end", "at the end, nameless"],
)
def test_a_server_that_sends_a_part_other_than_the_requested_one(
    server: Server,
    tmp_path: Path,
    network: Network,
    first: behaving.Behaviour,
    behaviour: behaving.Behaviour,
    other: bytes,
) -> None:
    def change(handler: behaving._Handler, file: behaving.File) -> None:
        first(handler, file)
        file.content, file.etag = other, '"2"'

    assert got(server.add("a", TEXT, change, behaviour), tmp_path, network) == other


def test_a_server_without_versions_or_parts_restarts(server: Server, tmp_path: Path, network: Network) -> None:
    url = server.add("a", TEXT, behaving.dropping(70_000), etag=None)
    assert got(url, tmp_path / "1", network) == TEXT
    url = server.add("b", TEXT, behaving.dropping(70_000), ranges=False)
    assert got(url, tmp_path / "2", network) == TEXT
    assert ranges(server) == [None, None, None, "bytes=70000-"]


def test_a_date_identifies_the_version_if_the_tag_is_weak(server: Server, tmp_path: Path, network: Network) -> None:
    date = "Tue, 03 Nov 2026 10:00:00 GMT"
    url = server.add("a", TEXT, behaving.dropping(70_000), etag='W/"1"', modified=date)
    assert got(url, tmp_path, network) == TEXT
    assert server.requests[1].headers["if-range"] == date


def test_chunks_without_a_length(server: Server, tmp_path: Path, network: Network) -> None:
    url = server.add("a", TEXT, behaving.chunked(5000), behaving.chunked(None))
    assert got(url, tmp_path, network) == TEXT


def test_a_length_that_is_too_large(server: Server, tmp_path: Path, network: Network, pauses: list[float]) -> None:
    """The rest does not exist. A server that knows the number of bytes reports that; otherwise the file is refused."""
    for number, answer in enumerate((behaving.normal, behaving.nameless), 1):  # `nameless` hides its version
        url = server.add("a", TEXT, behaving.claiming(len(TEXT) + 9), answer)
        assert got(url, tmp_path / str(number), network) == TEXT
        assert len(server.requests) == 2 * number
    url = server.add("b", TEXT, *[behaving.claiming(len(TEXT) + 9)] * 9, ranges=False)
    message = failed(url, tmp_path, network)
    assert "ended after 200,000 of 200,009 bytes, 4 times in a row" in message
    assert pauses[-3:] == [1, 2, 4]


def test_an_interrupted_fetch_continues_later(server: Server, tmp_path: Path, network: Network) -> None:
    class StoppedError(Exception):
        pass

    def stop(phase: str, done: int, total: int | None) -> None:
        if done >= 100_000:
            raise StoppedError

    url = server.add("a", TEXT)
    with pytest.raises(StoppedError):
        download(url, tmp_path / "file", network, stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.part", "file.part.json"]
    kept = (tmp_path / "file.part").stat().st_size
    assert kept >= 100_000
    download(url, tmp_path / "file", network, quiet)
    assert ranges(server) == [None, f"bytes={kept}-"]
    assert (tmp_path / "file").read_bytes() == TEXT


@pytest.mark.parametrize("notes", ["{", "[]", '{"url": "http://other/", "version": "\\"1\\"", "total": 200000}', None])
def test_a_part_of_unknown_origin_is_not_continued(
    server: Server, tmp_path: Path, network: Network, notes: str | None
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file.part").write_bytes(OTHER[:1000])
    if notes is not None:
        (tmp_path / "there" / "file.part.json").write_text(notes)
    assert got(server.add("a", TEXT), tmp_path, network) == TEXT


@pytest.mark.parametrize("name", ["file", "file.gz", "file.zip", "file.txt"])
def test_a_page_in_place_of_the_file(server: Server, tmp_path: Path, network: Network, name: str) -> None:
    message = failed(server.add(name, TEXT, behaving.page), tmp_path, network, name=name)
    assert "sent a web page (Sign in & go)" in message
    assert "--mirror" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (behaving.page, "web page"),
        (behaving.claiming(10**17), "do not fit on the disk"),
        (lambda handler, file: handler.answer(200, b"", {}), "empty file"),
    ],
    ids=["page", "too large", "empty"],
)
def test_a_refusal_after_a_drop_leaves_the_part_unchanged(
    server: Server, tmp_path: Path, network: Network, answer: behaving.Behaviour, says: str
) -> None:
    url = server.add("a", TEXT, behaving.dropping(70_000), answer)
    assert says in failed(url, tmp_path / "there", network)
    assert (tmp_path / "there" / "file.part").read_bytes() == TEXT[:70_000]
    assert got(url, tmp_path, network) == TEXT
    assert ranges(server) == [None, "bytes=70000-", "bytes=70000-"]


def test_a_part_longer_or_shorter_than_declared_is_not_a_file(tmp_path: Path) -> None:
    def finish(content: bytes) -> None:
        with Part.opened(tmp_path / "file") as part:
            part.restart("http://h/file", '"1"', 10)
            part.write(content)
            part.finish(lambda file: None)

    for content in (TEXT[:9], TEXT[:11]):
        with pytest.raises(DataError, match=f"file: has {len(content)} bytes instead of 10; it was discarded"):
            finish(content)
        assert not list(tmp_path.iterdir())


def test_content_that_does_not_match_the_name(server: Server, tmp_path: Path, network: Network) -> None:
    assert "it begins with b'plain text" in failed(server.add("a.tgz", b"plain text" * 99), tmp_path, network)
    packed = gzip.compress(b"text\n" * 999)
    assert got(server.add("a.gz", packed, content_type="text/html"), tmp_path, network) == packed
    assert "(sent as text/html)" in failed(server.add("a", TEXT, content_type="Text/HTML; x=y"), tmp_path, network)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (404, "there is no such file"),
        (403, "may need a licence"),
        (401, "requires a login"),
        (418, "418"),
        (501, "501"),
    ],
)
def test_permanent_errors(server: Server, tmp_path: Path, network: Network, code: int, says: str) -> None:
    message = failed(server.add("a", TEXT, behaving.status(code)), tmp_path, network)
    assert says in message
    assert "--registry" in message
    assert len(server.requests) == 1


def test_transient_errors(server: Server, tmp_path: Path, network: Network, pauses: list[float]) -> None:
    url = server.add("a", TEXT, behaving.status(503), behaving.status(429, Retry_After="7"), behaving.status(500))
    assert got(url, tmp_path, network) == TEXT
    assert pauses == [1, 7, 4]
    message = failed(server.add("b", TEXT, *[behaving.status(503)] * 9), tmp_path, network)
    assert "answered 503 (Service Unavailable), 4 times in a row" in message


def test_redirects(server: Server, tmp_path: Path, network: Network) -> None:
    server.add("b", TEXT, behaving.dropping(70_000))
    url = server.add("a", b"", *[behaving.redirecting("/b", code) for code in (301, 307)])
    path = tmp_path / "file"
    came_from: list[str] = []
    download(url, path, network, quiet, lambda file, address: came_from.append(address))
    assert (path.read_bytes(), came_from) == (TEXT, [f"{server.address}/b"])
    loop = server.add("c", b"", *[behaving.redirecting("/c")] * 30)
    assert "302" in failed(loop, tmp_path / "2", network)
    away = server.add("d", b"", behaving.redirecting("file:///etc/passwd"))
    assert "302" in failed(away, tmp_path / "3", network)
    for nowhere in ("http://www..example.org/x", "http://[::1/x", "http://h:port/x"):
        url = server.add("e", b"", behaving.redirecting(nowhere))
        assert f"{url}: leads to an impossible address" in failed(url, tmp_path / "4", network)


def test_no_redirect_leads_away_from_https() -> None:
    from urllib.request import Request

    with pytest.raises(DataError, match="not https"):
        Redirects().redirect_request(Request("https://a/b"), None, 302, "Found", {}, "http://a/b")


def test_unreachable_servers(tmp_path: Path, network: Network, pauses: list[float]) -> None:
    with serving() as gone:
        address = gone.address
    message = failed(f"{address}/a", tmp_path, network)
    assert "cannot be reached (" in message
    assert "refused" in message
    assert len(pauses) == 2, "with no network nobody wants to wait for long"


def test_a_server_that_sends_single_bytes(server: Server, tmp_path: Path) -> None:
    network = Network(proxy="", retries=0, timeout_seconds=0.2)
    message = failed(server.add("a", TEXT, behaving.trickling), tmp_path, network)
    assert "bytes in 0 seconds" in message


STATUS = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "status line": (b"HTTP/1.1 200 OK",),
    "reason": (b"HTTP/1.1 200 ", b"O"),
    "name of a header": (STATUS, b"X"),
    "value of a header": (STATUS, b"X: ", b"y"),
    "many headers": (STATUS, b"a: b\r\n"),
    "informational answers": (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "size of a chunk": (STATUS, b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "body of a redirect": (b"HTTP/1.1 302 Found\r\nLocation: /b\r\n\r\n", b"x"),
    "body of an error": (b"HTTP/1.1 503 Busy\r\n\r\n", b"x"),
    "header of a partial answer": (b"HTTP/1.1 206 Partial\r\n", b"X"),
}


@pytest.mark.parametrize("where", DRIPS)
def test_a_server_that_drips(where: str, server: Server, tmp_path: Path) -> None:
    """No single read waits long, but the whole would never end."""
    network = Network(proxy="", retries=0, timeout_seconds=0.3)
    started = time.monotonic()
    message = failed(server.add("a", TEXT, behaving.dripping(*DRIPS[where])), tmp_path, network)
    assert "bytes in 0 seconds" in message or "503" in message
    assert time.monotonic() - started < 10
    assert size_of(server.add("a", TEXT, behaving.dripping(*DRIPS[where])), network) is None


def test_a_slow_but_steady_server_is_waited_for(server: Server, tmp_path: Path) -> None:
    steady = behaving.dripping(STATUS + b"Content-Length: 200000\r\n\r\n" + TEXT[:-40], TEXT[-40:])
    network = Network(proxy="", retries=0, timeout_seconds=10)
    download(server.add("a", TEXT, steady), tmp_path / "a", network, quiet)
    assert (tmp_path / "a").read_bytes() == TEXT


def test_a_file_of_two_lengths_is_refused(server: Server, tmp_path: Path, network: Network) -> None:
    assert "several lengths" in failed(server.add("a", TEXT, behaving.claiming_again(5)), tmp_path, network)
    assert "several lengths" in failed(server.add("b", TEXT, behaving.claiming_again(10**6)), tmp_path, network)
    download(server.add("c", TEXT, behaving.claiming_again(len(TEXT))), tmp_path / "c", network, lambda *told: None)
    assert (tmp_path / "c").read_bytes() == TEXT


def test_an_empty_file_is_refused(server: Server, tmp_path: Path, network: Network) -> None:
    assert "empty file" in failed(server.add("a", b""), tmp_path, network)


def test_too_large_for_the_disk(server: Server, tmp_path: Path, network: Network) -> None:
    message = failed(server.add("a", TEXT, behaving.claiming(10**17)), tmp_path, network)
    assert "do not fit on the disk" in message


def test_through_a_proxy(server: Server, tmp_path: Path) -> None:
    server.add("corpora.invalid/x/a.bin", TEXT, behaving.dropping(70_000))
    network = Network(proxy=server.address, pause=lambda seconds: None)
    assert got("http://corpora.invalid/x/a.bin", tmp_path, network) == TEXT


def test_the_proxy_of_the_environment(
    server: Server, tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    server.add("corpora.invalid/a", TEXT)
    assert got("http://corpora.invalid/a", tmp_path, network) == TEXT


def test_small_answers_and_sizes(server: Server, network: Network) -> None:
    assert read_small(server.add("a", b"{}", behaving.status(503), behaving.dropping(1)), network) == b"{}"
    assert len(server.requests) == 3
    with pytest.raises(DataError, match="ended after 1 of 2 bytes, 4 times in a row"):
        read_small(server.add("a", b"{}", *[behaving.dropping(1)] * 4), network)
    assert size_of(server.add("b", TEXT), network) == len(TEXT)
    assert size_of(f"{server.address}/none", network) is None
    with pytest.raises(DataError, match="there is no such file"):
        read_small(f"{server.address}/none", network)
