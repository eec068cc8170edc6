"""Requests that no client library sends: broken HTTP, smuggled requests, floods of headers, slow senders."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.programs import Server, head, served, statuses
from ziggurat.serve.access import new_key
from ziggurat.serve.app import LINGER
from ziggurat.serve.server import CONNECTIONS, HEAD, connections_within, reached_from_elsewhere

HURRY = 2.0
"""HURRY is the number of seconds that this server waits for a head or a body."""
ASKED = b'{"q": "A dog", "source": "en", "target": "de"}'


@pytest.fixture(scope="module")
def server(folders: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"body_bytes": 20_000, "reading_seconds": HURRY, "writing_seconds": HURRY}
    with served(tmp_path_factory.mktemp("raw"), folders["en", "de"], limits=limits) as found:
        yield found


JSON, CLOSE = "Content-Type: application/json", "Connection: close"
LENGTH = f"Content-Length: {len(ASKED)}"
CASES: dict[str, tuple[bytes, list[int]]] = {
    "a good one": (head(JSON, LENGTH, CLOSE) + ASKED, [200]),
    "two, one after the other": (head(JSON, LENGTH) + ASKED + head(JSON, LENGTH, CLOSE) + ASKED, [200, 200]),
    "chunks": (head(JSON, "Transfer-Encoding: chunked", CLOSE) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED), [200]),
    "length and chunks": (head(JSON, LENGTH, "Transfer-Encoding: chunked") + b"0\r\n\r\n" + head(path="/x"), [400]),
    "two lengths": (head(JSON, LENGTH, "Content-Length: 3") + ASKED, [400]),
    "a negative length": (head(JSON, "Content-Length: -1") + ASKED, [400]),
    "a length that is not a number": (head(JSON, "Content-Length: 0x10") + ASKED, [400]),
    "a length beyond all numbers": (head(JSON, f"Content-Length: {'9' * 30}") + ASKED, [400]),
    "chunks of no size": (head(JSON, "Transfer-Encoding: chunked") + b"zz\r\nabc\r\n0\r\n\r\n", [400]),
    "a chunk beyond all numbers": (head(JSON, "Transfer-Encoding: chunked") + b"f" * 30 + b"\r\nabc", [400]),
    "another coding": (head(JSON, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", [501, 400]),
    "a folded header": (head("X: a\r\n b", "Connection: close", method="GET", path="/health"), [200, 400]),
    "a header without a name": (head(": a", method="GET", path="/health"), [400]),
    "a blank before the colon": (head("Content-Length : 3", method="GET", path="/health"), [400]),
    "a zero byte": (head("X: a\0b", method="GET", path="/health"), [400]),
    "lines that end alone": (b"GET /health HTTP/1.1\nHost: x\nConnection: close\n\n", [200, 400]),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", [400]),
    "HTTP/0.9": (b"GET /health\r\n\r\n", [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400, 404]),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + bytes(150), [400]),
    "nothing": (b"", [408]),
    "a header of a megabyte": (head("X: " + "a" * (1 << 20), method="GET", path="/health"), [431]),
    "a hundred thousand headers": (head(*["X: a"] * 100_000, method="GET", path="/health"), [431]),
    "a path of a megabyte": (head(method="GET", path="/" + "a" * (1 << 20)), [431]),
    "a path upwards": (head(CLOSE, method="GET", path="/../../../etc/passwd"), [404]),
    "a path upwards in disguise": (head(CLOSE, method="GET", path="/page/%2e%2e/%2e%2e/etc/passwd"), [404]),
    "a path with a zero": (head(CLOSE, method="GET", path="/a%00b"), [404]),
    "an address of another server": (head(CLOSE, method="GET", path="http://example.org/health"), [404, 400]),
    "a method of a strange kind": (head(CLOSE, method="BREW", path="/translate"), [405]),
    "an upgrade": (head("Upgrade: websocket", "Connection: Upgrade, close", method="GET", path="/health"), [200, 400]),
    "a proxy's request": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", [404, 400]),
    "a body too large": (head(JSON, "Content-Length: 10000000") + b"a" * 25_000, [413]),
    "chunks too large": (
        head(JSON, "Transfer-Encoding: chunked") + b"".join(b"400\r\n%s\r\n" % (b"a" * 1024) for _ in range(30)),
        [413],
    ),
    "a body that breaks off": (head(JSON, "Content-Length: 1000") + b'{"q": "A', [408]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_broken_http_is_refused(case: str, server: Server) -> None:
    sent, allowed = CASES[case]
    answer = server.exchange(sent)
    found = statuses(answer)
    if allowed == [200, 200]:
        assert found == allowed
    else:
        assert found, "no answer: the connection was reset"
        assert set(found) <= set(allowed), answer[:300]
    assert b"Traceback" not in answer
    assert b"root:" not in answer


BODIES = {
    "declared": head(JSON, "Content-Length: 10000000") + b"a" * 10_000_000,
    "in chunks": head(JSON, "Transfer-Encoding: chunked") + b"10000\r\n%s\r\n" % (b"a" * 65_536) * 160 + b"0\r\n\r\n",
    "for nobody": head(JSON, "Content-Length: 10000000", path="/nowhere") + b"a" * 10_000_000,
    "a form that is none": head("Content-Length: 10000000", path="/translate_file") + b"a" * 10_000_000,
}  # fmt: skip
"""BODIES are ten megabytes, of which the server reads little or nothing."""


@pytest.mark.parametrize(("case", "status"), list(zip(BODIES, (413, 413, 404, 400), strict=True)))
def test_clients_that_send_too_much_see_the_reason(case: str, status: int, server: Server) -> None:
    """This holds even if the client sends everything before it reads the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(BODIES[case])
        answer = b""
        while new := connection.recv(65536):  # a reset would be an error
            answer += new
    assert statuses(answer) == [status]
    top, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in top.lower()
    assert b"content-length: %d" % len(body) in top.lower()


def padded(size: int, *more: str) -> bytes:
    """Return the head of a request with that many bytes."""
    most = head("X: ", *more, method="GET", path="/health")
    return most.replace(b"X: ", b"X: " + b"a" * (size - len(most)))


@pytest.mark.parametrize("parts", [1, 7])
def test_the_limit_of_heads_is_the_same_however_packets_fall(parts: int, server: Server) -> None:
    def answers(sent: bytes) -> list[int]:
        size = -(-len(sent) // parts)
        return statuses(
            server.exchange(*(sent[at : at + size] for at in range(0, len(sent), size)), pause=0.02 * (parts > 1))
        )

    assert answers(padded(HEAD, CLOSE)) == [200]
    assert answers(padded(HEAD + 1, CLOSE)) == [431]
    assert answers(padded(HEAD) + padded(HEAD + 1, CLOSE)) == [200, 431]  # even while it waits for its turn


@pytest.mark.slow
def test_clients_that_do_not_read_answers_are_disconnected(server: Server) -> None:
    """There are more answers than fit into the system's buffers, and the client reads none of them for a while."""
    asked = head(method="GET", path="/page.js")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        own = connection.getsockname()[1]

        def until(held: bool) -> None:
            end = time.monotonic() + 30
            while held != any(c.raddr and c.raddr.port == own for c in server.process.net_connections("tcp")):
                assert time.monotonic() < end, f"the connection is {'not yet' if held else 'still'} held"
                time.sleep(0.05)

        until(held=True)
        with contextlib.suppress(ConnectionError):  # the server may close the connection before everything is sent
            connection.sendall(asked * 4000)
        until(held=False)


@pytest.mark.slow
def test_expect_100_continue_is_answered(server: Server) -> None:
    said = server.exchange(head(JSON, LENGTH, CLOSE, "Expect: 100-continue"), ASKED, pause=0.3)
    assert statuses(said) == [100, 200]


@pytest.mark.slow
def test_slow_clients_get_a_timeout_error(server: Server) -> None:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as idle:
        drop, answer = head(JSON, LENGTH, CLOSE), b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(head(JSON, LENGTH))
            for number in range(1, 40):  # byte by byte, the body would take ten seconds
                try:
                    slow.sendall(ASKED[number - 1 : number])
                except (BrokenPipeError, ConnectionResetError):
                    break
                time.sleep(0.25)
            answer = slow.recv(65536)
        assert b" 408 " in answer[:20]
        assert b"too slowly" in answer
        assert b" 408 " in idle.recv(65536)[:20]
        assert idle.recv(65536) == b""
    assert time.monotonic() - began < 12
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        for byte in drop[:30]:
            slow.sendall(bytes([byte]))
        assert b" 408 " in slow.recv(65536)[:20]


@pytest.mark.slow
def test_many_slow_clients_block_no_other(server: Server) -> None:
    """There are more connections than the server accepts at a time; once they time out, others are answered again."""
    waiting = []
    try:
        for _ in range(1010):
            waiting.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            waiting[-1].sendall(b"POST /translate HT")
        time.sleep(HURRY + LINGER + 0.5)
        assert statuses(server.exchange(CASES["a good one"][0])) == [200]
    finally:
        for connection in waiting:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_corrupted_requests(count: int, server: Server) -> None:
    """Valid requests with bytes changed, removed, doubled or moved get an answer, or the connection ends."""
    draw, seen = random.Random(3), Counter[int]()
    server.exchange(CASES["a good one"][0])
    before = server.process.memory_info().rss
    good = [CASES[name][0] for name in ("a good one", "chunks", "two, one after the other")]
    for _ in range(count):
        sent = bytearray(draw.choice(good))
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(sent))
            kind = draw.randrange(4)
            if kind == 0:
                sent[at] = draw.randrange(256)
            elif kind == 1:
                del sent[at : at + draw.randrange(1, 30)]
            elif kind == 2:
                sent[at:at] = sent[at : at + draw.randrange(1, 60)]
            else:
                sent[at:at] = draw.choice([b"\r\n", b"\0", b"\r\n\r\n", b": ", b"\xff", b"0\r\n\r\n"])
            if not sent:
                break
        answer = server.exchange(bytes(sent), patience=0.25)
        seen.update(found := statuses(answer))
        assert all(status in (200, 400, 404, 405, 408, 413, 501) for status in found), (bytes(sent), answer)
    assert {200, 400} <= seen.keys()
    assert server.process.memory_info().rss < before + (64 << 20)


@pytest.mark.parametrize(("files", "most"), [(100_000, CONNECTIONS), (1000, 872), (256, 128), (44, 22), (2, 1), (1, 1)])
def test_connections_leave_file_descriptors_for_other_work(files: int, most: int) -> None:
    assert connections_within(files) == most


@pytest.mark.parametrize(
    ("address", "elsewhere"),
    [("127.0.0.1", False), ("127.9.0.1", False), ("::1", False), ("::ffff:127.0.0.1", False), ("0.0.0.0", True),
     ("::", True), ("10.0.0.3", True), ("fe80::1%eth0", True), ("::ffff:10.0.0.1", True)],
)  # fmt: skip
def test_addresses_that_others_can_reach(address: str, elsewhere: bool) -> None:
    assert reached_from_elsewhere(address) == elsewhere


@pytest.mark.parametrize(
    ("host", "keys", "warned"), [("0.0.0.0", False, 1), ("127.0.0.1", False, 0), ("0.0.0.0", True, 0)]
)
def test_more_connections_than_files(
    host: str, keys: bool, warned: int, folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """The server may open 64 files, and there are 80 idle connections."""
    command = [sys.executable, "-m", "ziggurat", "serve", str(folders["en", "de"]), "--port", "0", "--host", host]
    if keys:
        new_key(tmp_path / "keys", "cat")
        command += ["--keys", str(tmp_path / "keys")]
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *command]
    with subprocess.Popen(limited, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r":(\d+) ", process.stderr.readline())
            assert found is not None
            address = ("127.0.0.1", int(found[1]))

            def status() -> bytes:
                with contextlib.closing(socket.create_connection(address, timeout=10)) as one:
                    one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    return one.recv(12)

            with contextlib.ExitStack() as idle:
                for _ in range(80):
                    idle.enter_context(contextlib.closing(socket.create_connection(address, timeout=10)))
                with contextlib.suppress(ConnectionError):  # refused before it could be read
                    assert status() == b"HTTP/1.1 503"
                time.sleep(1.5)  # descriptors are tried again after a second
            time.sleep(1.5)
            assert status() == b"HTTP/1.1 200"
        finally:
            process.terminate()
        said = process.stderr.read().splitlines()
    assert sum("warning: " in line for line in said) == warned
    assert sum("Too many open files" in line for line in said) <= 1
    assert len(said) <= 4
