"""Requests as APIs have them: fields from JSON, a form or the query, in whatever form they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from ziggurat.system.errors import DataError
from ziggurat.system.small_files import parse_json

Value = TypeVar("Value")

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")
"""Name of the request that is being answered, for messages to the operator."""

_UNREAD = "The browser (or proxy) sent a request that this server could not understand."
_LARGE = 1 << 16
"""Bytes of JSON that are read beside the event loop."""


class Refused(Exception):  # noqa: N818 - an answer
    """An answer other than the one that was asked for.

    Args:
        status: of HTTP.
        text: what to say.
        headers: further ones.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, dict(headers or {})


async def fields_of(request: Request) -> dict[str, Any]:
    """Return the fields of a request: of its JSON object or form, and those of the query that the body lacks.

    A field of a form or query that comes several times is a list. Raises Refused (400) for a body that is neither.
    """
    query = _grouped(request.query_params.multi_items())
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("application/x-www-form-urlencoded", "multipart/form-data"):
        if "charset" in request.headers.get("content-type", "").lower().replace("charset=utf-8", ""):
            raise Refused(400, "forms must be UTF-8")  # Python knows codecs that no browser has
        async with _form(request, 2000) as form:
            pairs = [(key, value) for key, value in form.multi_items() if not isinstance(value, UploadFile)]
        # Line ends of forms are CR LF, whatever was typed (HTML, 4.10.21.8).
        return {**query, **_grouped((key, str(value).replace("\r\n", "\n")) for key, value in pairs)}
    try:
        body = await request.body()
    except ClientDisconnect:
        raise Refused(400, "the request broke off") from None
    # Programs that send JSON without saying so are understood; those that send all in the query have no body.
    if not body.strip() and "json" not in kind:
        return query
    return {**query, **(_json_object(body) if len(body) < _LARGE else await run_in_threadpool(_json_object, body))}


def texts_of(given: Any, refusal: str) -> list[str]:
    """Return the texts of a field that takes one or a list of them. Raises Refused (400) where they are none."""
    texts = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise Refused(400, refusal)
    return texts


def optional_texts(given: Any, name: str) -> tuple[str, ...]:
    """Return the texts of the field `name` (patterns or keys), which may be left out.

    Raises Refused (400) for anything but one text or a list of them, or more than MOST_TEXTS.
    """
    if not given:
        return ()
    refusal = f"`{name}` is a text, or a list of at most {MOST_TEXTS} texts"
    texts = texts_of(given, refusal)
    if len(texts) > MOST_TEXTS:
        raise Refused(400, refusal)
    return tuple(text for text in texts if text)


MOST_TEXTS = 50
"""MOST_TEXTS is the most patterns, or keys, of a request."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of `work`, which is cancelled when the client goes away before. The body must have been read.

    Raises Refused (499, which nobody reads) where the client has gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        # LibreTranslate takes JSON in any of Unicode's forms, with a byte order mark or without.
        encoding = json.detect_encoding(body)
        content = body if encoding == "utf-8" else body.decode(encoding).encode()
        found = parse_json(content, "the request")
    except (DataError, UnicodeError):
        raise Refused(400, _UNREAD) from None
    if not isinstance(found, dict):
        raise Refused(400, "Invalid JSON format")
    return found


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


@asynccontextmanager
async def upload_of(request: Request) -> AsyncIterator[tuple[dict[str, Any], UploadFile]]:
    """Read a form with one file; yield its other fields and the file, open for as long as the context lasts.

    Raises Refused (400): no such form, or no file; reading the file may raise DataError.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(400, _UNREAD)
    async with _form(request, 100, _UNREAD) as form:
        pairs = [(key, value) for key, value in form.multi_items() if isinstance(value, str)]
        files = [value for key, value in form.multi_items() if key == "file" and isinstance(value, UploadFile)]
        if not files:
            raise Refused(400, _UNREAD)
        yield _grouped(pairs), files[0]


@asynccontextmanager
async def _form(request: Request, fields: int, refusal: str = "") -> AsyncIterator[FormData]:
    """Read a form of at most so many fields. Raises Refused (400), without a text for it with the parser's."""
    try:
        async with request.form(max_files=1, max_fields=fields) as form:
            yield form
    except HTTPException as error:
        raise Refused(400, refusal or str(error.detail)) from None
    except ClientDisconnect:
        raise Refused(400, "the request broke off") from None
