"""The server's process: it opens the port, answers until it is stopped, and then finishes running requests.

Connections are uvicorn's HTTP/1.1 with read and write timeouts, and a graceful shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import math
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from ziggurat.serve.access import Access
from ziggurat.serve.app import BYTES_PER_SECOND, DISCARDED, LINGER, InFlight, build_app
from ziggurat.serve.config import LimitsConfig, ServeConfig
from ziggurat.serve.documents import Documents
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.pool import ModelPool, ModelSource
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import ConfigError
from ziggurat.system.terminal import REPEATED, stop_signals

HEAD = 1 << 16
"""HEAD is the maximum size in bytes of a request's first line and headers."""
ANSWERING = 2.0
"""ANSWERING is how many seconds the last responses may take when the server ends, before connections are cut off."""

CONNECTIONS = 1000
"""CONNECTIONS is the maximum number; further ones get a 503. It is lower if the process may open too few files."""
_SPARE = 128  # files for everything else: documents, models being opened, connections being refused
COLLECTED = (10_000, 10, 100)
"""COLLECTED are thresholds of Python's garbage collector.

Full collections over the millions of small objects of a large document hold the interpreter's lock for seconds, and
with Python's default thresholds (700, 10, 10) they happen again and again. So young objects are scanned less often, old
ones rarely, and those of open models never (ziggurat.serve.engine).
"""

_HEAD_END = re.compile(rb"\n\r?\n")  # as in h11


_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_PREFIX = re.compile(rb"(?:/[A-Za-z0-9._~-]{1,100}){1,10}/?")


class Forwarded(ProxyHeadersMiddleware):
    """Middleware that trusts proxies' headers: uvicorn's (client and scheme), and two more.

    They are the server's host name (`X-Forwarded-Host`, which replaces `Host`) and a path prefix
    (`X-Forwarded-Prefix`), as clients see them. If there are several values, the one that the first proxy added counts;
    invalid ones are ignored. The prefix is used only for addresses in responses, because proxies that send it remove it
    from the path.
    """

    def __init__(self, app: Any, proxies: list[str]) -> None:
        super().__init__(app, proxies)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        client = scope.get("client")
        if scope["type"] == "http" and client and client[0] in self.trusted_hosts:
            said = dict(reversed(scope["headers"]))
            host, prefix = (
                said.get(name, b"").partition(b",")[0].strip() for name in (b"x-forwarded-host", b"x-forwarded-prefix")
            )
            if _HOST.fullmatch(host):
                others = [each for each in scope["headers"] if each[0] != b"host"]
                scope = {**scope, "headers": [(b"host", host), *others]}
            if _PREFIX.fullmatch(prefix):
                scope = {**scope, "app_root_path": prefix.decode("ascii").rstrip("/")}
        await super().__call__(scope, receive, send)


class _BoundedHead(h11.Connection):
    """h11's connection with a limit on headers that does not depend on how they are split into packets.

    h11 itself checks the size of its buffer only while the end of the headers is missing.
    """

    too_large = False

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError as h11 does, and if the headers are too large."""
        if self.their_state is h11.IDLE:
            held, _ = self.trailing_data
            end = _HEAD_END.search(held)
            if (len(held) if end is None else end.end()) > HEAD:
                self.too_large = True
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return super().next_event()


class _TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1, corrected in four places.

    - With too many connections it refuses requests but keeps the connections, until no descriptors are left. Here,
      connections beyond `most` get a 503 and are closed at once.
    - It waits forever for the headers of a request, and for a client to read its response, so that a thousand idle
      connections would lock everybody out. Here they are closed after `reading_seconds`, and after `writing_seconds`
      plus one second per 10,000 bytes.
    - After invalid HTTP it closes at once; unread data then resets the connection, often before the client has seen the
      response. Here that data is discarded for a while.
    - If a body is invalid it responds itself, after which the application's own response fails with a traceback in the
      log.
    """

    limits: LimitsConfig
    most: int
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None
    _discarded = 0
    conn: _BoundedHead

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _BoundedHead(h11.SERVER, HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
            return
        transport.set_write_buffer_limits(high=0)  # be notified of any unwritten data, however little
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._discarded += len(data)
            if self._discarded > DISCARDED:
                self.transport.close()
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing, self._lingering):
            _cancel(timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        patience = self.limits.writing_seconds + self.transport.get_write_buffer_size() / BYTES_PER_SECOND
        self._writing = self.loop.call_later(patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._writing)

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the application's output now reaches no one
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self._refuse(431 if self.conn.too_large else 400, msg)

    def _watch(self) -> None:
        if self._lingering is not None or self.conn.their_state is not h11.IDLE:
            _cancel(self._reading)  # the body has a separate limit (BodyLimit)
            self._reading = None
        elif self._reading is None:
            self._reading = self.loop.call_later(self.limits.reading_seconds, self._refuse, 408, "")

    def _refuse(self, status: int, said: str) -> None:
        """Respond without the application, and close once the client has had time to read it."""
        if self.transport.is_closing():
            return
        top = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\nContent-Length: {len(said)}"
        kind = "Content-Type: text/plain; charset=utf-8"
        self.transport.write(f"{top}\r\n{kind}\r\n\r\n{said}".encode("ascii"))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._lingering = self.loop.call_later(LINGER, self.transport.close)


def with_timeouts(limits: LimitsConfig, most: int = 2 * CONNECTIONS) -> type[H11Protocol]:
    """Return the protocol with these limits as attributes of the class, because uvicorn makes the instances."""
    return type("TimedProtocol", (_TimedProtocol,), {"limits": limits, "most": most})


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 10\r\n\r\n"


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Uvicorn, but requests that are unfinished when it stops are refused with 503.

    By itself it cancels them, and responds with 500 and tracebacks in the log.

    Args:
        config: uvicorn's configuration; its graceful timeout must be longer than `seconds` plus twice `ANSWERING`.
        underway: the requests.
        seconds: time for running requests.
        say: receives messages for the operator.
    """

    def __init__(
        self, config: uvicorn.Config, underway: InFlight, seconds: float, say: Callable[[str], object]
    ) -> None:
        super().__init__(config)
        self._underway, self._seconds, self._say, self._exhausted = underway, seconds, say, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(2048)  # uvicorn's `backlog` is also how many are accepted at a time, which must be few

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context in which every stop signal ends serving in an orderly way; uvicorn handles only two of them."""
        with super().capture_signals():
            heard = stop_signals() if threading.current_thread() is threading.main_thread() else []
            before = {number: signal.signal(number, self.handle_exit) for number in heard if number in REPEATED}
            try:
                yield
            finally:  # uvicorn raises each again, for the previous handlers
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report once that no descriptors are left; asyncio would log a traceback for every waiting connection."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self._exhausted:
            self._exhausted = True
            self._say(f"connections wait: {error.strerror} (`ulimit -n`); this is not reported again")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and return when the existing ones have ended."""
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._seconds, self._underway.end),
            loop.call_later(self._seconds + ANSWERING, self._cut_off),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def app_of(config: ServeConfig, say: Callable[[str], object]) -> Starlette:
    """Return the application of a configuration. Raises ConfigError and CheckpointError if it cannot be served."""
    access = Access(config.limits, None if config.keys is None else Path(config.keys).expanduser(), say)
    sources = list(map(ModelSource, config.models))
    pool = ModelPool(sources, waiting=config.limits.waiting, memory=config.memory, names=config.names, say=say)
    translations = Translations(pool, access, config.limits, config.protect)
    documents = Documents(translations, config.documents, say)
    glossaries = Glossaries(None if config.glossaries is None else Path(config.glossaries).expanduser())
    return build_app(config, translations, documents, glossaries, say)


def connections_within(files: int, most: int = CONNECTIONS) -> int:
    """Return how many connections are allowed, at most `most`, if the process may open `files` more files."""
    return max(1, min(most, files - min(_SPARE, files // 2)))


def _files() -> int:
    """Return how many more files can be opened, after raising the soft limit as much as is useful."""
    used = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + CONNECTIONS + 2 * _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, soft - used)


def reached_from_elsewhere(address: str) -> bool:
    """Return whether other machines can reach an address that a socket is bound to."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return not (getattr(found, "ipv4_mapped", None) or found).is_loopback


def run_server(config: ServeConfig, say: Callable[[str], object]) -> None:
    """Serve at the configured address until SIGINT or SIGTERM.

    Raises ConfigError if the address cannot be used, and the errors of `app_of`.
    """
    app = app_of(config, say)
    # Only errors: warnings about invalid requests would let a client fill the disk.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            listener.listen(2048)  # a client that reads the message below may connect at once
        except OSError as error:
            raise ConfigError(
                f"{config.host}:{config.port}: {error.strerror or error}; choose another `--host` or `--port`"
            ) from None
        files = _files()
        most = connections_within(files)
        few = max(2, (files - most) // 4)  # connections accepted at a time, and connections being refused
        gc.set_threshold(*COLLECTED)
        shown = f"[{config.host}]" if family == socket.AF_INET6 else config.host
        say(f"http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        if config.keys is None and reached_from_elsewhere(listener.getsockname()[0]):
            say(
                f"warning: anyone who reaches {config.host} can translate and read stored data, because there are no "
                "keys; `--keys FILE` requires one (docs/serve.md)"
            )
        if most < CONNECTIONS:
            say(f"at most {most} connections, since the process may open {files} more files (`ulimit -n`)")
        behind = Forwarded(app, config.proxies) if config.proxies else app  # no other client may claim an address
        Server(
            uvicorn.Config(
                behind,
                log_level="error",
                access_log=False,  # addresses and requests are private
                server_header=False,
                proxy_headers=False,
                http=with_timeouts(config.limits, most + few),
                limit_concurrency=most,
                backlog=few,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds + 2 * ANSWERING),
                h11_max_incomplete_event_size=HEAD,
                ws="none",
            ),
            app.state.underway,
            config.drain_seconds,
            say,
        ).run(sockets=[listener])
