"""The server's process: it opens the port, answers until it is told to end, and then finishes what is under way."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ziggurat.serve.access import Access
from ziggurat.serve.app import build_app
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.connections import ANSWERING, HEAD, Server, hurried
from ziggurat.serve.documents import Documents
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.pool import ModelPool, ModelSource
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import ConfigError


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
                http=hurried(config.limits),
                limit_concurrency=1000,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds + 2 * ANSWERING),
                h11_max_incomplete_event_size=HEAD,
                ws="none",
            ),
            app.state.underway,
            config.drain_seconds,
        ).run(sockets=[listener])
