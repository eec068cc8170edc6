"""The server as an ASGI application: its paths, and errors as answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from html import escape
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ziggurat.serve.documents import Documents
from ziggurat.serve.engine import ModelFailed
from ziggurat.serve.glossaries import Glossaries
from ziggurat.serve.interfaces.deepl import DeepL, DeepLAccount
from ziggurat.serve.interfaces.deepl_resources import DeepLDocuments, DeepLGlossaries
from ziggurat.serve.interfaces.description import Described, Operation, specification
from ziggurat.serve.interfaces.dialects import LIBRETRANSLATE, SERVER, dialect_of
from ziggurat.serve.interfaces.files import Files
from ziggurat.serve.interfaces.libretranslate import LibreTranslate
from ziggurat.serve.interfaces.openai import OpenAI
from ziggurat.serve.interfaces.own import Own
from ziggurat.serve.interfaces.page import page_routes
from ziggurat.serve.interfaces.schemas import record, text
from ziggurat.serve.metrics import Metrics
from ziggurat.serve.middleware import BodyLimit, OwnPages, Seen, Underway, answer
from ziggurat.serve.queue import Late, QueueFull
from ziggurat.serve.requests import Refused
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import ZigguratError

CLOSING = 5.0
"""Seconds for a step that is under way at the end, when nobody waits for its lines any more."""

_MODEL = record(
    {
        "status": text("", "cold", "ready", "failed"),
        "reason": text("why it failed"),
        "version": text("of the files that the open model was read from"),
    },
    optional=("reason", "version"),
)
HEALTH = Operation(
    SERVER,
    "Say whether the server can translate, and how each model is",
    (),
    record({"status": text("", "ok", "failed"), "models": {"type": "object", "additionalProperties": _MODEL}}),
)
FIGURES = Operation(SERVER, "Give figures for Prometheus", kinds={"text/plain": "the figures"})
SPEC = Operation(SERVER, "Describe all paths (OpenAPI 3.1)", (), {"type": "object"})


def build_app(
    translations: Translations,
    documents: Documents,
    glossaries: Glossaries,
    *,
    page: bool = True,
    metrics_token: str | None = None,
    proxied: bool = False,
    hosts: Collection[str] | None = (),
    logged: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Starlette:
    """Return the application over what a server can do; the requests that it has are its `state.underway`.

    Args:
        translations: the models, with keys and limits.
        documents: those that clients send.
        glossaries: those that clients keep.
        page: whether there is a page for people at `/`.
        metrics_token: without which /metrics answers nobody; None: it answers everybody.
        proxied: whether a proxy in front names requests.
        hosts: names of the server beside addresses and names without dots; None: any.
        logged: whether each request is a line of the log.
        say: receives messages for the operator.
    """
    metrics = Metrics(translations.pool)
    account = DeepLAccount(translations, glossaries)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        documents.open()
        watch = asyncio.create_task(_refresh(translations, documents))
        yield
        watch.cancel()
        await documents.close()
        await run_in_threadpool(translations.pool.close, CLOSING)
        translations.close()

    async def health(request: Request) -> Response:
        """Say whether the server can translate, and how each model is. Cold ones are opened when they are needed."""
        models = {}
        for name, model in translations.pool.models.items():
            state = model.engine.state
            told = {"status": state.status, "reason": state.reason, "version": model.engine.version}
            models[name] = {key: value for key, value in told.items() if value}
        failed = all(told["status"] == "failed" for told in models.values())
        return JSONResponse({"status": "failed" if failed else "ok", "models": models}, 503 if failed else 200)

    async def figures(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if metrics_token is not None and not hmac.compare_digest(given, metrics_token.encode()):
            raise Refused(401, "Unauthorized", {"WWW-Authenticate": "Bearer"})
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def spec(request: Request) -> Response:
        return JSONResponse(specification(routes))

    routes: list[Described] = [
        *LibreTranslate(translations, files=documents.config.enabled).routes(),
        *Files(translations, documents).routes(),
        *DeepL(translations, account).routes(),
        *DeepLGlossaries(translations, account).routes(),
        *DeepLDocuments(account, documents).routes(),
        *OpenAI(translations).routes(),
        *Own(translations, files=documents.config.enabled).routes(),
        *(page_routes() if page else []),
        Described("/health", health, HEALTH),
        Described("/metrics", figures, FIGURES),
        Described("/spec", spec, SPEC),
    ]
    # A form has more than its file: names, boundaries, a glossary.
    uploads = [route.path for route in routes if route.operation.file]
    files = dict.fromkeys(uploads, translations.limits.file_bytes + translations.limits.body_bytes)
    underway = Underway()
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={Refused: _refused, ZigguratError: _failed, HTTPException: _page},
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=["*"],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["Authorization", "Content-Type"],
                expose_headers=["Authorization", "X-Request-ID"],
            ),
            Middleware(
                Seen, metrics=metrics, routes=routes, underway=underway, proxied=proxied, logged=logged, say=say
            ),
            Middleware(OwnPages, access=translations.access, path="/v2/glossaries", hosts=hosts),
            Middleware(
                BodyLimit,
                most=translations.limits.body_bytes,
                of_path=files,
                seconds=translations.limits.reading_seconds,
            ),
        ],
    )
    app.state.underway = underway
    return app


async def _refresh(translations: Translations, documents: Documents) -> None:
    """Look every second at the file of keys and at documents whose time is over, for as long as the server runs."""
    while True:
        await asyncio.sleep(1.0)
        with contextlib.suppress(Exception):  # whatever it is, the next second is another try
            await translations.in_thread(translations.access.refresh)
            await documents.expire()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return answer(request.url.path, error.status, error.text, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer for what a translation ran into; a client learns what it can do about it."""
    if isinstance(error, QueueFull):
        return answer(request.url.path, 429, f"Slowdown: {error}", {"Retry-After": str(max(1, round(error.seconds)))})
    if isinstance(error, Late):
        return answer(request.url.path, 504, str(error))
    if isinstance(error, ModelFailed):
        return answer(request.url.path, 503, str(error), {"Retry-After": "10"})
    return answer(request.url.path, 400, str(error))


async def _page(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that there are not: as a page, where LibreTranslate does; else as other errors."""
    assert isinstance(error, HTTPException)
    if dialect_of(request.url.path) is not LIBRETRANSLATE:
        said = f"{error.detail}: GET /spec has all paths and methods"
        return answer(request.url.path, error.status_code, said, error.headers)
    title = f"{error.status_code} {HTTPStatus(error.status_code).phrase}"
    page = f"<!doctype html>\n<html lang=en>\n<title>{title}</title>\n<h1>{title}</h1>\n<p>{escape(error.detail)}</p>\n"
    return HTMLResponse(page, error.status_code, headers=dict(error.headers or {}))
