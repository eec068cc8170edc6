"""The server's process: it opens the port, answers until it is told to end, and then finishes what is under way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from ziggurat.errors import ConfigError
from ziggurat.serving.access import Access
from ziggurat.serving.app import build_app
from ziggurat.serving.config import ServeConfig
from ziggurat.serving.documents import Documents
from ziggurat.serving.glossaries import Glossaries
from ziggurat.serving.pool import ModelPool, ModelSource
from ziggurat.serving.translations import Translations

__all__ = ["app_of", "run_server"]


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
        drain_seconds=config.drain_seconds,
    )


_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def _hurried(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1, mended in two places.

    Uvicorn alone waits for the head of a request for ever, so that a thousand connections which send nothing would keep
    out everybody: here they are closed after `seconds`. And where a body breaks the rules it answers by itself, after
    which the application's own answer fails with a traceback in the log.
    """

    class Hurried(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True  # what the application says now reaches nobody
                cycle.message_event.set()
                if cycle.response_started:
                    self.transport.close()
                    return
            super().send_400_response(msg)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._unwatch()  # the body has a limit of its own (BodyLimit)
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._too_slow)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self.transport.write(_TOO_SLOW)
            self.transport.close()

    return Hurried


def run_server(config: ServeConfig, say: Callable[[str], object]) -> None:
    """Answer at the configured address until SIGINT or SIGTERM.

    Raises ConfigError where the address cannot be used, and the errors of `app_of`.
    """
    app = app_of(config, say)
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
        uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="error",  # warnings are of broken requests: whoever sends them could fill the disk
                access_log=False,  # addresses and what is asked are nobody's business
                server_header=False,
                proxy_headers=bool(config.proxies),  # of others nobody may name any address as its own
                forwarded_allow_ips=config.proxies,
                http=_hurried(config.limits.reading_seconds),  # h11: the one whose limit of headers is below
                limit_concurrency=1000,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
                h11_max_incomplete_event_size=1 << 16,  # of headers
                ws="none",
            )
        ).run(sockets=[listener])
