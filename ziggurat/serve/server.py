"""The server's process: it opens the port, answers until it is stopped, and then finishes what is under way.

Connections are uvicorn's HTTP/1.1 with read and write timeouts, and a graceful shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from ziggurat.serve.access import Access
from ziggurat.serve.app import BYTES_PER_SECOND, DISCARDED, LINGER, InFlight, build_app
from ziggurat.serve.config import LimitsConfig, ServeConfig
from ziggurat.serve.documents import Documents
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.pool import ModelPool, ModelSource
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import ConfigError

HEAD = 1 << 16
"""Most bytes of a request's first line and headers."""
ANSWERING = 2.0
"""Seconds in which the last answers are written when the server ends, before what is still open is cut off."""

_HEAD_END = re.compile(rb"\n\r?\n")  # as h11 finds it


class _BoundedHead(h11.Connection):
    """h11's connection with a limit of heads that does not depend on how they are cut into packets.

    h11 alone looks at the size of what it holds only while the end of the head is missing.
    """

    too_large = False

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError as h11 does, and for a head that is too large."""
        if self.their_state is h11.IDLE:
            held, _ = self.trailing_data
            end = _HEAD_END.search(held)
            if (len(held) if end is None else end.end()) > HEAD:
                self.too_large = True
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return super().next_event()


def with_timeouts(limits: LimitsConfig) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1, mended in three places.

    - It waits for the head of a request, and for a client to take its answer, for ever, so that a thousand connections
      which send or read nothing would keep out everybody: here they are closed after `reading_seconds`, and after
      `writing_seconds` with one more for every 10,000 bytes.
    - Where HTTP is broken it closes at once, and what has not been read yet then resets the connection, often before
      the client has seen the answer: here that is thrown away for a while.
    - It answers by itself where a body breaks the rules, after which the application's own answer fails with a
      traceback in the log.
    """

    class TimedProtocol(H11Protocol):
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
            transport.set_write_buffer_limits(high=0)  # whatever waits to be written is told of, however little
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
            patience = limits.writing_seconds + self.transport.get_write_buffer_size() / BYTES_PER_SECOND
            self._writing = self.loop.call_later(patience, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._writing)

        def send_400_response(self, msg: str) -> None:
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True  # what the application says now reaches nobody
                cycle.message_event.set()
                if cycle.response_started:
                    self.transport.close()
                    return
            self._refuse(431 if self.conn.too_large else 400, msg)

        def _watch(self) -> None:
            if self._lingering is not None or self.conn.their_state is not h11.IDLE:
                _cancel(self._reading)  # the body has a limit of its own (BodyLimit)
                self._reading = None
            elif self._reading is None:
                self._reading = self.loop.call_later(limits.reading_seconds, self._refuse, 408, "")

        def _refuse(self, status: int, said: str) -> None:
            """Answer without the application, and close when the client has had the time to see it."""
            if self.transport.is_closing():
                return
            top = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\nContent-Length: {len(said)}"
            kind = "Content-Type: text/plain; charset=utf-8"
            self.transport.write(f"{top}\r\n{kind}\r\n\r\n{said}".encode("ascii"))
            self.transport.write_eof()
            self.flow.resume_reading()
            self._lingering = self.loop.call_later(LINGER, self.transport.close)

    return TimedProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Uvicorn, whose requests are refused with 503 where they are not done in time when it ends.

    By itself it cancels them, and answers 500 with tracebacks in the log.

    Args:
        config: of uvicorn; its graceful timeout must be longer than `seconds` and twice `ANSWERING`.
        underway: the requests.
        seconds: for what is under way.
    """

    def __init__(self, config: uvicorn.Config, underway: InFlight, seconds: float) -> None:
        super().__init__(config)
        self._underway, self._seconds = underway, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and return when those that there are have ended."""
        steps: list[tuple[float, Callable[[], object]]] = [
            (self._seconds, self._underway.end),
            (self._seconds + ANSWERING, self._cut_off),
        ]
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(seconds, step) for seconds, step in steps]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def app_of(config: ServeConfig, say: Callable[[str], object]) -> Starlette:
    """Return the application of a configuration. Raises ConfigError and CheckpointError for what cannot be served."""
    sources = [
        ModelSource(Path(entry.path).expanduser(), entry.name, entry.which, entry.threads, entry.device, entry.decoding)
        for entry in config.models
    ]
    access = Access(config.limits, None if config.keys is None else Path(config.keys).expanduser(), say)
    pool = ModelPool(sources, waiting=config.limits.waiting, memory=config.memory, names=config.names, say=say)
    translations = Translations(pool, access, config.limits)
    documents = Documents(translations, config.documents, say)
    kept = Glossaries(None if config.glossaries is None else Path(config.glossaries).expanduser())
    return build_app(
        translations,
        documents,
        kept,
        page=config.page,
        metrics_token=config.metrics_token,
        proxied=bool(config.proxies),
        hosts=None if config.proxies else {config.host.lower(), socket.gethostname().lower()},
        logged=config.log_requests,
        say=say,
    )


def run_server(config: ServeConfig, say: Callable[[str], object]) -> None:
    """Answer at the configured address until SIGINT or SIGTERM.

    Raises ConfigError where the address cannot be used, and the errors of `app_of`.
    """
    app = app_of(config, say)
    # Warnings are of broken requests: whoever sends them could fill the disk.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            listener.listen(2048)  # whoever reads the message below may come at once
        except OSError as error:
            raise ConfigError(
                f"{config.host}:{config.port}: {error.strerror or error}; choose another `--host` or `--port`"
            ) from None
        shown = f"[{config.host}]" if family == socket.AF_INET6 else config.host
        say(f"http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        Server(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,  # addresses and what is asked are nobody's business
                server_header=False,
                proxy_headers=bool(config.proxies),  # of others nobody may name any address as its own
                forwarded_allow_ips=config.proxies,
                http=with_timeouts(config.limits),
                limit_concurrency=1000,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds + 2 * ANSWERING),
                h11_max_incomplete_event_size=HEAD,
                ws="none",
            ),
            app.state.underway,
            config.drain_seconds,
        ).run(sockets=[listener])
