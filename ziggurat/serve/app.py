"""The server as an ASGI application: its paths, the middlewares around each request, figures for Prometheus.

The middlewares name, count and limit requests, turn errors into answers, and end the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ziggurat.serve.access import Access
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.documents import Documents
from ziggurat.serve.engine import ModelFailed
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.interfaces.deepl import DeepL
from ziggurat.serve.interfaces.deepl_resources import DeepLResources
from ziggurat.serve.interfaces.files import Files
from ziggurat.serve.interfaces.libretranslate import LibreTranslate
from ziggurat.serve.interfaces.native import NativeApi, page_routes
from ziggurat.serve.interfaces.openai import OpenAI
from ziggurat.serve.notices import HEADER
from ziggurat.serve.pool import ModelPool
from ziggurat.serve.queue import DeadlineExceeded, QueueFull
from ziggurat.serve.requests import (
    IGNORED,
    LIBRETRANSLATE,
    REQUEST,
    SERVER,
    Described,
    Operation,
    Refused,
    dialect_of,
    failure,
    record,
    specification,
    text,
)
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import ZigguratError, printable

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


_MODEL = record(
    {
        "status": text("", "cold", "ready", "failed"),
        "reason": text("why it failed"),
        "version": text("version of the files that the open model was read from"),
    },
    optional=("reason", "version"),
)
HEALTH = Operation(
    SERVER,
    (),
    record({"status": text("", "ok", "failed"), "models": {"type": "object", "additionalProperties": _MODEL}}),
)
FIGURES = Operation(SERVER, kinds={"text/plain": "the figures"})
SPEC = Operation(SERVER, (), {"type": "object"})


class Metrics:
    """Counts of requests and figures of the models, which are read on request; with the paths that serve them.

    Args:
        pool: the models.
        token: token that /metrics requires; None: it answers everybody.
    """

    def __init__(self, pool: ModelPool, token: str | None) -> None:
        self._pool, self._token = pool, token
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ziggurat_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "ziggurat_request_seconds", "Seconds of a request.", ["path"], buckets=_SECONDS, registry=self._registry
        )
        self._registry.register(self)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """Count a request. `path` is a route's, not what the client sent: each new one is a separate series."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [Described("/health", self.health, HEALTH), Described("/metrics", self.figures, FIGURES)]

    async def health(self, request: Request) -> Response:
        """Report whether the server can translate, and the state of each model."""
        models = {}
        for name, model in self._pool.models.items():
            state = model.engine.state
            told = {"status": state.status, "reason": state.reason, "version": model.engine.version}
            models[name] = {key: value for key, value in told.items() if value}
        failed = all(told["status"] == "failed" for told in models.values())
        return JSONResponse({"status": "failed" if failed else "ok", "models": models}, 503 if failed else 200)

    async def figures(self, request: Request) -> Response:
        """Return figures for Prometheus."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._token is not None and not hmac.compare_digest(given, self._token.encode()):
            raise Refused(401, "Unauthorized", {"WWW-Authenticate": "Bearer"})
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the models."""
        gauges = {
            "waiting": GaugeMetricFamily("ziggurat_waiting_lines", "Lines that wait for a model.", labels=["model"]),
            "live": GaugeMetricFamily("ziggurat_live_lines", "Lines in the search of a model.", labels=["model"]),
            "ready": GaugeMetricFamily("ziggurat_model_ready", "1: the model is open.", labels=["model"]),
        }
        counts = {
            "lines": CounterMetricFamily("ziggurat_lines", "Lines that a model has translated.", labels=["model"]),
            "tokens": CounterMetricFamily("ziggurat_tokens", "Tokens that a model has written.", labels=["model"]),
            "steps": CounterMetricFamily("ziggurat_steps", "Steps of a model's searches.", labels=["model"]),
            "reloads": CounterMetricFamily("ziggurat_reloads", "Times a changed model was opened.", labels=["model"]),
        }
        for name, model in self._pool.models.items():
            state = model.engine.state
            gauges["waiting"].add_metric([name], len(model.engine.queue))
            gauges["live"].add_metric([name], state.live)
            gauges["ready"].add_metric([name], float(state.status == "ready"))
            for kind, family in counts.items():
                family.add_metric([name], getattr(state, kind))
        yield from gauges.values()
        yield from counts.values()


BYTES_PER_SECOND = 10_000
"""BYTES_PER_SECOND is the speed of a slow connection."""
DISCARDED = 64 << 20
"""DISCARDED is how many bytes of a refused request are still read and discarded, so that the client sees the answer."""
LINGER = 1.0
"""LINGER is how many seconds this may take for clients that send slowly or break HTTP."""

_CLOSE = (b"connection", b"close")
_SLASHES = re.compile("//+")
_NAME = re.compile(rb"[A-Za-z0-9._-]{8,128}")  # request name that is safe in a log


def answer(path: str, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the format of the interface that the path belongs to."""
    content = dialect_of(path).error(status, text)
    return JSONResponse(content, status, headers=dict(headers or {}))


class InFlight:
    """The requests that have no answer yet."""

    def __init__(self) -> None:
        self.over = False
        """True if the server refuses every request that it has not answered."""
        self.tasks: set[asyncio.Task[object]] = set()

    def end(self) -> None:
        """Refuse all of them, and all later ones."""
        self.over = True
        for task in self.tasks:
            task.cancel()


class RequestLog:
    """Middleware that names and counts requests, and answers for internal errors and during shutdown.

    Args:
        app: the application behind it.
        metrics: counts the requests.
        routes: routes whose paths appear in figures and logs; whatever clients send does not.
        underway: the requests that have no answer yet.
        proxied: whether a proxy in front names requests (`X-Request-ID`).
        logged: whether each request is a line of the log.
        say: receives messages for the operator.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Sequence[Route],
        underway: InFlight,
        *,
        proxied: bool,
        logged: bool,
        say: Callable[[str], object],
    ) -> None:
        self._app, self._metrics, self._routes, self._underway = app, metrics, routes, underway
        self._proxied, self._logged, self._say = proxied, logged, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Base addresses often end in a slash and paths start with one, so `//translate` means `/translate`.
        scope = {**scope, "path": _SLASHES.sub("/", scope["path"])}
        began, status, task = time.perf_counter(), 0, asyncio.current_task()
        name = self._name(scope)
        REQUEST.set(name)
        assert task is not None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                self._underway.tasks.discard(task)
                status = message["status"]
                headers = [
                    *message.get("headers", []),
                    (b"x-request-id", name.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                if not any(key == b"cache-control" for key, _ in headers):
                    headers.append((b"cache-control", b"no-store"))  # translations are private
                message["headers"] = headers
            await send(message)

        self._underway.tasks.add(task)
        try:
            if self._underway.over:
                raise asyncio.CancelledError
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not self._underway.over or status:
                raise
            task.uncancel()
            headers = {"Retry-After": "10", "Connection": "close"}
            await answer(scope["path"], 503, "the server is shutting down", headers)(scope, receive, noted)
        except Exception as error:
            refused, said = failure(error)
            self._say(f"request {name}: {said}")
            if status:
                raise  # uvicorn closes the connection: the answer cannot be taken back
            headers = {**refused.headers, "Connection": "close"}  # part of the body may be unread
            await answer(scope["path"], refused.status, refused.text, headers)(scope, receive, noted)
        finally:
            self._underway.tasks.discard(task)
            seconds = time.perf_counter() - began
            known = (route.path for route in self._routes if route.matches(scope)[0] != Match.NONE)
            path = next(known, "other")
            self._metrics.seen(path, status or 500, seconds)
            if self._logged:
                self._say(f"request {name}: {printable(scope['method'], 10)} {path} {status}, {1000 * seconds:.0f} ms")

    def _name(self, scope: Scope) -> str:
        """Return the name of a request: the proxy's, so that both logs match, or a random one."""
        if self._proxied:
            for key, value in scope["headers"]:
                if key == b"x-request-id" and _NAME.fullmatch(value):
                    return str(value.decode("ascii"))
        return uuid.uuid4().hex


class SameOriginOnly:
    """Middleware that keeps pages of other origins away from stored data if no key protects it (403).

    Pages of any origin may translate (CORS). Glossaries are stored, and without keys they belong to everybody who
    reaches the port, so any page that a user of this machine opens could read and delete them. Programs send no
    `Origin`. A page whose host name resolves to this machine (DNS rebinding) sends that name as `Host`, so the only
    accepted names are those that cannot exist elsewhere.

    Args:
        app: the application behind it.
        access: whether a key is needed.
        path: prefix of the paths with stored data.
        hosts: further names of the server; None: any, because a proxy in front checks them.
    """

    def __init__(self, app: ASGIApp, access: Access, path: str, hosts: Collection[str] | None) -> None:
        self._app, self._access, self._path, self._hosts = app, access, path, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless it comes from another origin."""
        if scope["type"] == "http" and scope["path"].startswith(self._path) and not self._access.required:
            headers = dict(scope["headers"])
            # Behind a proxy the scheme may differ from the page's.
            origin, host = headers.get(b"origin", b"").lower().partition(b"://")[2], headers.get(b"host", b"").lower()
            if (b"origin" in headers and origin != host) or not self._is_own(host.decode("latin-1")):
                text = "pages of other origins or host names need an API key for this, and this server has none"
                await answer(scope["path"], 403, text)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Return whether a `Host` can only be this server: an address, a name without dots, or a configured one."""
        name = re.sub(r":\d*$", "", host)
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            own = "." not in name or name.endswith(".localhost")
            return self._hosts is None or own or name in self._hosts
        return True


class BodyLimit:
    """Middleware that refuses bodies over a number of bytes (413), and bodies that arrive too slowly (408).

    A body with two lengths is also refused (400). If an answer is ready before the body has arrived, the rest is
    discarded for a while: closing a connection with unread data resets it, and the answer may be lost.

    Args:
        app: the application behind it.
        most: largest body in bytes.
        of_path: largest bodies for paths with a different limit.
        seconds: time in which a body must arrive, extended by one second per 10,000 bytes received.
    """

    def __init__(self, app: ASGIApp, most: int, of_path: Mapping[str, int], seconds: float) -> None:
        self._app, self._most, self._of_path, self._seconds = app, most, of_path, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its bytes as they arrive."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        loop = asyncio.get_running_loop()
        most, size = self._of_path.get(scope["path"], self._most), 0
        end, late = loop.time() + self._seconds, False
        complete = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"

        async def counted() -> Message:
            nonlocal size, complete, late
            try:
                # Only the end of the connection can follow the body, and that may take its time.
                async with asyncio.timeout_at(None if complete else end + size / BYTES_PER_SECOND):
                    message = await receive()
            except TimeoutError:
                late = True
                raise Refused(408, "the request came too slowly") from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > most:  # a declared length may be false, so the received bytes count
                raise Refused(413, f"the request is larger than {most:,} bytes")
            return message

        async def answered(message: Message) -> None:
            if complete:
                await send(message)
            elif message["type"] == "http.response.start":
                others = [each for each in message.get("headers", []) if each[0] != b"connection"]
                await send({**message, "headers": [*others, _CLOSE]})
            elif message.get("more_body", False):
                await send(message)
            else:
                await send({**message, "more_body": True})
                await _discard(receive, LINGER if late else self._seconds)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        if headers.keys() >= {b"content-length", b"transfer-encoding"}:
            # A proxy in front may trust the other one, and take what is hidden after it for the next request (RFC 9112,
            # 6.1).
            refusal = answer(scope["path"], 400, "a length and chunks exclude each other", {"Connection": "close"})
            await refusal(scope, receive, answered)
            return
        await self._app(scope, counted, answered)


async def _discard(receive: Receive, seconds: float) -> None:
    """Discard the rest of a body, or as much as arrives in time, at most DISCARDED bytes."""
    end, size = asyncio.get_running_loop().time() + seconds, 0
    with contextlib.suppress(TimeoutError):
        while size < DISCARDED:
            async with asyncio.timeout_at(end + size / BYTES_PER_SECOND):
                message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return


CLOSING = 5.0
"""CLOSING is how many seconds a step may still take at the end, when nothing is waiting for its lines."""


def build_app(
    config: ServeConfig,
    translations: Translations,
    documents: Documents,
    glossaries: Glossaries,
    say: Callable[[str], object],
) -> Starlette:
    """Return the application over a server's services; its `state.underway` holds the unanswered requests.

    Args:
        config: what is served, and to whom.
        translations: the models, with keys and limits.
        documents: documents that clients send.
        glossaries: glossaries that clients store.
        say: receives messages for the operator.
    """
    limits, deepl = config.limits, DeepL(translations, glossaries)
    metrics = Metrics(translations.pool, config.metrics_token)

    async def spec(request: Request) -> Response:
        """Describe all paths (OpenAPI 3.1)."""
        return JSONResponse(specification(routes))

    routes: list[Described] = [
        *LibreTranslate(translations, files=config.documents.enabled).routes(),
        *Files(translations, documents).routes(),
        *deepl.routes(),
        *DeepLResources(deepl, documents).routes(),
        *OpenAI(translations).routes(),
        *NativeApi(translations, files=config.documents.enabled).routes(),
        *(page_routes() if config.page else []),
        *metrics.routes(),
        Described("/spec", spec, SPEC),
    ]
    # A form contains more than its file: names, boundaries, a glossary.
    uploads = [route.path for route in routes if route.operation.file]
    files = dict.fromkeys(uploads, limits.file_bytes + limits.body_bytes)
    underway, proxied = InFlight(), bool(config.proxies)
    hosts = None if proxied else {config.host.lower(), socket.gethostname().lower()}
    app = Starlette(
        routes=routes,
        lifespan=partial(_lifespan, translations, documents),
        exception_handlers={Refused: _refused, ZigguratError: _failed, HTTPException: _page},
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=["*"],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type"],
                expose_headers=["Authorization", "X-Request-ID", HEADER, IGNORED],
            ),
            Middleware(
                RequestLog,
                metrics=metrics,
                routes=routes,
                underway=underway,
                proxied=proxied,
                logged=config.log_requests,
                say=say,
            ),
            Middleware(SameOriginOnly, access=translations.access, path="/v2/glossaries", hosts=hosts),
            Middleware(
                BodyLimit,
                most=limits.body_bytes,
                of_path=files,
                seconds=limits.reading_seconds,
            ),
        ],
    )
    app.state.underway = underway
    return app


@asynccontextmanager
async def _lifespan(translations: Translations, documents: Documents, app: Starlette) -> AsyncIterator[None]:
    documents.open()
    watch = asyncio.create_task(_refresh(translations, documents))
    yield
    watch.cancel()
    await documents.close()
    await run_in_threadpool(translations.pool.close, CLOSING)
    translations.close()


async def _refresh(translations: Translations, documents: Documents) -> None:
    """Check the file of keys and expired documents every second, for as long as the server runs."""
    while True:
        await asyncio.sleep(1.0)
        with contextlib.suppress(Exception):  # whatever happened, try again in a second
            await translations.in_thread(translations.access.refresh)
            await documents.expire()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return answer(request.url.path, error.status, error.text, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer for an error during translation, with what the client can do about it."""
    if isinstance(error, QueueFull):
        return answer(request.url.path, 429, f"Slowdown: {error}", {"Retry-After": str(max(1, round(error.seconds)))})
    if isinstance(error, DeadlineExceeded):
        return answer(request.url.path, 504, str(error))
    if isinstance(error, ModelFailed):
        return answer(request.url.path, 503, str(error), {"Retry-After": "10"})
    return answer(request.url.path, 400, str(error))


async def _page(request: Request, error: Exception) -> Response:
    """Answer for unknown paths and methods: as a page if LibreTranslate does so, otherwise like other errors."""
    assert isinstance(error, HTTPException)
    if dialect_of(request.url.path) is not LIBRETRANSLATE:
        said = f"{error.detail}: GET /spec has all paths and methods"
        return answer(request.url.path, error.status_code, said, error.headers)
    title = f"{error.status_code} {HTTPStatus(error.status_code).phrase}"
    page = f"<!doctype html>\n<html lang=en>\n<title>{title}</title>\n<h1>{title}</h1>\n<p>{escape(error.detail)}</p>\n"
    return HTMLResponse(page, error.status_code, headers=dict(error.headers or {}))
