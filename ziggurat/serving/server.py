"""The server's process: it opens the port, answers until it is told to end, and then finishes what is under way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ziggurat.errors import ConfigError
from ziggurat.serving.access import Access
from ziggurat.serving.app import build_app
from ziggurat.serving.config import ServeConfig
from ziggurat.serving.pool import ModelPool, ModelSource
from ziggurat.serving.translations import Translations

__all__ = ["app_of", "run_server"]


def app_of(config: ServeConfig, say: Callable[[str], object]) -> Starlette:
    """Return the application of a configuration. Raises ConfigError and CheckpointError for what cannot be served."""
    sources = [
        ModelSource(Path(entry.path).expanduser(), entry.name, entry.which, entry.threads, entry.device, entry.decoding)
        for entry in config.models
    ]
    access = Access(config.limits, None if config.keys is None else Path(config.keys).expanduser())
    pool = ModelPool(sources, waiting=config.limits.waiting, memory=config.memory, names=config.names, say=say)
    translations = Translations(pool, access, config.limits)
    return build_app(translations, metrics_token=config.metrics_token, drain_seconds=config.drain_seconds)


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
                log_level="warning",
                access_log=False,  # addresses and what is asked are nobody's business
                server_header=False,
                proxy_headers=False,  # else whoever asks from this machine could name any address as its own
                http="h11",  # the one whose limit of headers is below
                limit_concurrency=1000,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
                h11_max_incomplete_event_size=1 << 16,  # of headers
                ws="none",
            )
        ).run(sockets=[listener])
