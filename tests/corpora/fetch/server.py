"""A file server that can misbehave: drop connections, lie about lengths, change files, redirect, send pages.

It knows files by `HOST/PATH`, so it can play a mirror, a proxy, or the server itself.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class File:
    """A file and the headers of its answers; None leaves a header out."""

    content: bytes
    etag: str | None = '"1"'
    modified: str | None = None
    ranges: bool = True
    content_type: str = "application/octet-stream"


@dataclass
class Request:
    """A request as received."""

    method: str
    path: str
    """`HOST/PATH` for a proxy, else the path without its slash."""
    headers: dict[str, str]


Behaviour = Callable[["_Handler", File], None]


@dataclass
class Server:
    """Files by path, the requests received, and for each path the faults of the next answers."""

    port: int
    files: dict[str, File] = field(default_factory=dict)
    next: dict[str, list[Behaviour]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, path: str, content: bytes, *behaviours: Behaviour, **how: object) -> str:
        """Serve a file, misbehaving at first; return its address."""
        self.files[path] = File(content, **how)  # type: ignore[arg-type]
        self.next[path] = list(behaviours)
        return f"{self.address}/{path}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        served: Server = self.server.served  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        query = f"?{parts.query}" if parts.query else ""
        path = unquote(f"{parts.netloc}{parts.path}{query}").lstrip("/")
        served.requests.append(Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        self.close_connection = True
        file = served.files.get(path)
        if file is None:
            self.answer(404, b"<html><title>Not Found</title></html>", {"Content-Type": "text/html"})
            return
        waiting = served.next.get(path)
        with contextlib.suppress(ConnectionError):
            (waiting.pop(0) if waiting else normal)(self, file)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, content: bytes, headers: dict[str, str], *, length: int | None = None) -> None:
        """Send an answer; `length` is a false length to declare."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


def validators(file: File) -> dict[str, str]:
    """Return the headers that identify the version of a file."""
    named = {"ETag": file.etag, "Last-Modified": file.modified}
    return {"Content-Type": file.content_type, **{name: value for name, value in named.items() if value is not None}}


def partial(handler: _Handler, file: File) -> tuple[int, bytes, dict[str, str]]:
    """Return status, content and headers of a correct answer; requests for a part get that part."""
    headers = validators(file)
    wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    condition = handler.headers.get("If-Range")
    if not wanted or not file.ranges or (condition is not None and condition not in (file.etag, file.modified)):
        return 200, file.content, headers
    start, total = int(wanted[1]), len(file.content)
    if start >= total:
        return 416, b"", {**headers, "Content-Range": f"bytes */{total}"}
    return 206, file.content[start:], {**headers, "Content-Range": f"bytes {start}-{total - 1}/{total}"}


def normal(handler: _Handler, file: File) -> None:
    """Answer as a correct server does."""
    status, content, headers = partial(handler, file)
    handler.answer(status, content, headers)


def dropping(after: int) -> Behaviour:
    """Send that many of the requested bytes, then drop the connection."""

    def behave(handler: _Handler, file: File) -> None:
        status, content, headers = partial(handler, file)
        handler.answer(status, content[:after], headers, length=len(content))

    return behave


def claiming(length: int) -> Behaviour:
    """Send everything, but declare another length."""
    return lambda handler, file: handler.answer(200, file.content, validators(file), length=length)


def claiming_again(length: int) -> Behaviour:
    """Send everything, first declaring its length and then a different one."""
    return lambda handler, file: handler.answer(200, file.content, {**validators(file), "content-length": str(length)})


def status(code: int, **headers: str) -> Behaviour:
    """Answer with an error."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, file: handler.answer(code, b"<html>no</html>", named)


def page(handler: _Handler, file: File) -> None:
    """Send a page in place of the file, as if nothing were wrong."""
    handler.answer(200, b"\n<!DOCTYPE html><html><title>Sign in &amp; go</title></html>", {"Content-Type": "text/html"})


def redirecting(where: str, code: int = 302) -> Behaviour:
    """Redirect to another address."""
    return lambda handler, file: handler.answer(code, b"", {"Location": where})


def heedless(handler: _Handler, file: File) -> None:
    """Send the requested part regardless of the requested version."""
    start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    total = len(file.content)
    if start >= total:
        handler.answer(416, b"", {**validators(file), "Content-Range": f"bytes */{total}"})
        return
    headers = {**validators(file), "Content-Range": f"bytes {start}-{total - 1}/{total}"}
    handler.answer(206, file.content[start:], headers)


def nameless(handler: _Handler, file: File) -> None:
    """Do the same, without identifying the version."""
    heedless(handler, replace(file, etag=None, modified=None))


def piecewise(handler: _Handler, file: File) -> None:
    """Send at most 30,000 bytes of the requested part."""
    _, content, headers = partial(handler, file)
    start, total = len(file.content) - len(content), len(file.content)
    handler.answer(206, content[:30_000], {**headers, "Content-Range": f"bytes {start}-{start + 29_999}/{total}"})


def elsewhere(handler: _Handler, file: File) -> None:
    """Send a part from an offset other than the requested one."""
    total = len(file.content)
    handler.answer(206, file.content[1:], {**validators(file), "Content-Range": f"bytes 1-{total - 1}/{total}"})


def chunked(cut: int | None) -> Behaviour:
    """Send in chunks without a length, cut after that many bytes (None: complete)."""

    def behave(handler: _Handler, file: File) -> None:
        handler.send_response(200)
        for name, value in {**validators(file), "Transfer-Encoding": "chunked", "Connection": "close"}.items():
            handler.send_header(name, value)
        handler.end_headers()
        content = file.content[:cut]
        handler.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        if cut is None:
            handler.wfile.write(b"0\r\n\r\n")

    return behave


def trickling(handler: _Handler, file: File) -> None:
    """Send a byte now and then until the client leaves."""
    handler.answer(200, b"", validators(file), length=1 << 20)
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.02)


def dripping(*parts: bytes) -> Behaviour:
    """Send the first parts at once, and the last one byte by byte until the client leaves."""

    def behave(handler: _Handler, file: File) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(b"".join(parts[:-1]))
            for byte in itertools.cycle(parts[-1]):
                handler.wfile.write(bytes([byte]))
                time.sleep(0.02)

    return behave


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Context with a running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.served = Server(server.server_address[1])  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.served  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
