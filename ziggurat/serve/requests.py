"""Requests and responses of all paths, declared once, for reading requests and for `GET /spec` (OpenAPI 3.1)."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ziggurat import __version__
from ziggurat.serve.notices import HEADER
from ziggurat.system.errors import DataError, printable
from ziggurat.system.small_files import parse_json

Value = TypeVar("Value")

IGNORED = "X-Ziggurat-Ignored"
"""IGNORED is the header of responses that lists request fields without effect here."""
REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")
"""REQUEST is the name of the current request, for messages to the operator."""

_UNREAD = "The browser (or proxy) sent a request that this server could not understand."
_NOT_UTF8 = "forms must be UTF-8"
_CHARSET = re.compile(r"""charset\s*+=\s*+["']?+([^"';\s]*+)""")
_JSON, _FORM, _UPLOAD = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 2000
_LARGE = 1 << 16  # size in bytes from which JSON is parsed outside the event loop


class Refused(Exception):  # noqa: N818 - a response
    """A response other than the requested one.

    Args:
        status: the HTTP status.
        text: the message.
        headers: additional headers.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, dict(headers or {})


def failure(error: Exception) -> tuple[Refused, str]:
    """Return the response to a failure of the machine (503) or the program (500), and the text for the log."""
    what = f"{type(error).__name__}: {printable(str(error), 300)}"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return Refused(503, "the server cannot keep files at the moment; try again later", {"Retry-After": "60"}), what
    where = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return Refused(500, "an internal error; the server's log has more"), f"{what}\n{where}"


async def fields_of(request: Request) -> dict[str, Any]:
    """Return the fields of a request: those of its JSON object or form, and query fields that the body lacks.

    A form or query field that occurs several times becomes a list. Raises Refused (400) for a body that is neither.
    """
    query = _grouped(_urlencoded(request.scope.get("query_string", b"")))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _UPLOAD:
        async with _form(request, _MOST_FIELDS) as form:
            pairs = [(key, value) for key, value in form.multi_items() if isinstance(value, str)]
        return {**query, **_typed(pairs)}
    try:
        body = await request.body()
    except ClientDisconnect:
        raise Refused(400, "the request broke off") from None
    if kind == _FORM:
        _check_charset(request)
        return {**query, **_typed(_urlencoded(body))}
    # JSON sent without its content type is accepted; requests with everything in the query have no body.
    if not body.strip() and "json" not in kind:
        return query
    return {**query, **(_json_object(body) if len(body) < _LARGE else await run_in_threadpool(_json_object, body))}


def texts_of(given: Any, refusal: str) -> list[str]:
    """Return the texts of a field that takes one or a list of them. Raises Refused (400) for anything else."""
    texts = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise Refused(400, refusal)
    return texts


def optional_texts(given: Any, name: str) -> tuple[str, ...]:
    """Return the texts of the optional field `name` (patterns or keys).

    Raises Refused (400) for anything but one text or a list of at most MOST_TEXTS texts.
    """
    if not given:
        return ()
    refusal = f"`{name}` is a text, or a list of at most {MOST_TEXTS} texts"
    texts = texts_of(given, refusal)
    if len(texts) > MOST_TEXTS:
        raise Refused(400, refusal)
    return tuple(text for text in texts if text)


MOST_TEXTS = 50
"""MOST_TEXTS is the maximum number of patterns, or keys, in a request."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of `work`, which is cancelled if the client leaves first. The body must have been read.

    Raises Refused (499, which is never read) if the client has left.
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
        # LibreTranslate accepts JSON in any Unicode encoding, with or without a byte order mark.
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


def _urlencoded(given: bytes) -> list[tuple[str, str]]:
    """Return the fields of a query or form, whose bytes need not be percent-encoded (`curl -d q=für`)."""
    try:
        return parse_qsl(given.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except UnicodeDecodeError:
        raise Refused(400, _NOT_UTF8) from None
    except ValueError:
        raise Refused(400, f"Too many fields. Maximum number of fields is {_MOST_FIELDS}.") from None


def _typed(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return form fields with line ends as they were typed; in transit they are CR LF (HTML, 4.10.21.8)."""
    return _grouped((key, value.replace("\r\n", "\n")) for key, value in pairs)


def _check_charset(request: Request) -> None:
    """Raise Refused (400) if a form declares a charset other than UTF-8: Python has codecs that no browser has."""
    found = _CHARSET.search(request.headers.get("content-type", "").lower())
    if found is not None and found[1] not in ("utf-8", "utf8"):
        raise Refused(400, _NOT_UTF8)


class _Parts(MultiPartParser):
    """Starlette's form parser, but with an error for text that is not UTF-8; Starlette itself decodes it as Latin-1."""

    def on_part_end(self) -> None:
        """Take a part."""
        if self._current_part.file is None:
            try:
                self._current_part.data.decode()
            except UnicodeDecodeError:
                raise MultiPartException(_NOT_UTF8) from None
        super().on_part_end()


@asynccontextmanager
async def upload_of(request: Request) -> AsyncIterator[tuple[dict[str, Any], UploadFile]]:
    """Read a form with one file; yield its other fields and the file, open for as long as the context lasts.

    Raises Refused (400) if there is no such form, or no file; reading the file may raise DataError.
    """
    if not request.headers.get("content-type", "").lower().startswith(_UPLOAD):
        raise Refused(400, _UNREAD)
    async with _form(request, 100, _UNREAD) as form:
        pairs = [(key, value) for key, value in form.multi_items() if isinstance(value, str)]
        files = [value for key, value in form.multi_items() if key == "file" and isinstance(value, UploadFile)]
        if not files:
            raise Refused(400, _UNREAD)
        yield _grouped(pairs), files[0]


@asynccontextmanager
async def _form(request: Request, fields: int, refusal: str = "") -> AsyncIterator[FormData]:
    """Read a form of at most `fields` fields. Raises Refused (400) with `refusal`, or the parser's message."""
    _check_charset(request)
    try:
        form = await _Parts(request.headers, request.stream(), max_files=1, max_fields=fields).parse()
    except MultiPartException as error:
        raise Refused(400, _NOT_UTF8 if error.message == _NOT_UTF8 else refusal or error.message) from None
    except ClientDisconnect:
        raise Refused(400, "the request broke off") from None
    try:
        yield form
    finally:
        await form.close()


Schema = dict[str, Any]


def text(about: str = "", *values: str, **more: Any) -> Schema:
    """Return the schema of a text, limited to `values` if any are given."""
    return _about({"type": "string", **({"enum": list(values)} if values else {}), **more}, about)


def whole(about: str = "", **more: Any) -> Schema:
    """Return the schema of a whole number."""
    return _about({"type": "integer", **more}, about)


def number(about: str = "", **more: Any) -> Schema:
    """Return the schema of a number."""
    return _about({"type": "number", **more}, about)


def flag(about: str = "") -> Schema:
    """Return the schema of true or false."""
    return _about({"type": "boolean"}, about)


def listed(items: Schema, about: str = "", **more: Any) -> Schema:
    """Return the schema of a list."""
    return _about({"type": "array", "items": items, **more}, about)


def record(properties: Mapping[str, Schema], about: str = "", *, optional: Sequence[str] = ()) -> Schema:
    """Return the schema of an object that always has these properties, except for the `optional` ones."""
    required = [name for name in properties if name not in optional]
    return _about({"type": "object", "properties": dict(properties), "required": required}, about)


def _about(schema: Schema, about: str) -> Schema:
    return {**schema, "description": about} if about else schema


@dataclass(frozen=True)
class Dialect:
    """An interface as programs know it: its paths, and its format of errors.

    Attributes:
        name: its name, for display.
        prefix: the prefix of its paths.
        error: an error's content, given the status and a text.
        error_schema: the schema of that.
        security: the ways to send a key, by name, as in OpenAPI. Empty: in a field.
        scheme: the prefix of a key in the `Authorization` header; empty: keys are sent in a field only.
        denied: status, text and headers for a missing or wrong key; None: as in LibreTranslate.
    """

    name: str
    prefix: str
    error: Callable[[int, str], Schema]
    error_schema: Schema
    security: Mapping[str, Schema] = field(default_factory=dict)
    scheme: str = ""
    denied: tuple[int, str, Mapping[str, str]] | None = None


def _plain(status: int, said: str) -> Schema:
    return {"error": said}


def _deepl(status: int, said: str) -> Schema:
    return {"message": said}


def _openai(status: int, said: str) -> Schema:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": said, "type": kind, "param": None, "code": None}}


_PLAIN = record({"error": text()})
_NULL: Schema = {"type": ["string", "null"]}
_KIND = text("", "invalid_request_error", "server_error")
_OPENAI = record({"error": record({"message": text(), "type": _KIND, "param": _NULL, "code": _NULL})})
_BEARER: Schema = {"bearer": {"type": "http", "scheme": "bearer"}}
_NO_BEARER = (401, "Incorrect API key provided", {"WWW-Authenticate": "Bearer"})
_AUTH_KEY: Schema = {
    "DeepL-Auth-Key": {
        "type": "apiKey",
        "in": "header",
        "name": "Authorization",
        "description": "`DeepL-Auth-Key` and the key",
    }
}

LIBRETRANSLATE = Dialect("LibreTranslate", "/", _plain, _PLAIN)
SERVER = Dialect("Server", "/", _plain, _PLAIN, _BEARER)
DEEPL = Dialect(
    name="DeepL",
    prefix="/v2",
    error=_deepl,
    error_schema=record({"message": text()}),
    security=_AUTH_KEY,
    scheme="DeepL-Auth-Key ",
    denied=(403, "Authorization failed. Please supply a valid DeepL-Auth-Key.", {}),
)
OPENAI = Dialect(
    name="OpenAI",
    prefix="/v1",
    error=_openai,
    error_schema=_OPENAI,
    security=_BEARER,
    scheme="Bearer ",
    denied=_NO_BEARER,
)
OWN = replace(OPENAI, name="Ziggurat")


def dialect_of(path: str) -> Dialect:
    """Return the interface that a path belongs to, even if the path does not exist."""
    own = (each for each in (DEEPL, OPENAI) if f"{path}/".startswith(f"{each.prefix}/"))
    return next(own, LIBRETRANSLATE)


_CONVERTER = re.compile(r":\w+\}")


@dataclass(frozen=True)
class Field:
    """A field of a request: its name, its schema, and whether it is required."""

    name: str
    schema: Schema
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation of a path.

    Attributes:
        dialect: the interface that it belongs to.
        takes: fields of the request, in the query or, for a POST, as JSON or a form.
        answer: the schema of the JSON response; None: it is not JSON.
        kinds: further content types, each with a description; for documents, any.
        status: the status of the response.
        file: whether the request is a form with a file.
        strict: whether unknown fields are refused (400), since one may be misspelt. Programs written for another server
            send fields that even it does not know; those are listed in the response (IGNORED).
        noticed: whether notices are in a header of the response (ziggurat.serve.notices).
    """

    dialect: Dialect
    takes: Sequence[Field] = ()
    answer: Schema | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    file: bool = False
    strict: bool = False
    noticed: bool = False

    async def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields of a request, as `fields_of` does, but only those that it takes."""
        return self._declared(request, await fields_of(request))

    @asynccontextmanager
    async def upload(self, request: Request) -> AsyncIterator[tuple[dict[str, Any], UploadFile]]:
        """Read a form with a file, as `upload_of` does, but only the fields that it takes."""
        async with upload_of(request) as (fields, file):
            yield self._declared(request, fields), file

    def _declared(self, request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
        names = [each.name for each in self.takes]
        unknown = request.state.ignored = [name for name in fields if name not in names]
        if self.strict and unknown:
            near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.6)
            hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(names)}"
            raise Refused(400, f"unknown field `{printable(unknown[0])}`; {hint}")
        return {each.name: fields[each.name] for each in self.takes if each.name in fields}

    def described(self, path: str, method: str, summary: str) -> Schema:
        """Return the operation in OpenAPI's form."""
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", path)
        ]
        found: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_").lower(),
            "summary": summary,
            "tags": [self.dialect.name],
            "responses": {
                str(self.status): {"description": "the answer", **self._content()},
                "default": {
                    "description": "what is wrong",
                    "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{_error_name(self.dialect)}"}}},
                },
            },
        }
        if self.takes and method == "POST":
            kinds = (_UPLOAD,) if self.file else (_JSON, _FORM)
            found["requestBody"] = {"content": {kind: {"schema": self._body()} for kind in kinds}, "required": True}
        elif method == "GET":
            parameters += [
                {"name": each.name, "in": "query", "required": each.required, "schema": each.schema}
                for each in self.takes
            ]
        if parameters:
            found["parameters"] = parameters
        if self.dialect.security:
            found["security"] = [{}, *({name: []} for name in self.dialect.security)]
        return found

    def _content(self) -> Schema:
        content: Schema = {kind: {"schema": text(what)} for kind, what in self.kinds.items()}
        if self.answer is not None:
            content[_JSON] = {"schema": self.answer}
        found: Schema = {"content": content} if content else {}
        headers = {HEADER: "notices, if there are any"} if self.noticed else {}
        if self.takes and not self.strict:
            headers[IGNORED] = "unknown fields, if there are any"
        if headers:
            found["headers"] = {name: {"description": about, "schema": text()} for name, about in headers.items()}
        return found

    def _body(self) -> Schema:
        properties = {each.name: each.schema for each in self.takes}
        if self.file:
            properties = {"file": text("the document", format="binary"), **properties}
        required = [each.name for each in self.takes if each.required]
        return {**record(properties), "required": [*(["file"] if self.file else []), *required]}


class Described(Route):
    """A path whose operation is declared; its summary is the first line of the endpoint's docstring."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        operation: Operation,
        methods: Sequence[str] = ("GET",),
    ) -> None:

        @wraps(endpoint)
        async def answer(request: Request) -> Response:
            response = await endpoint(request)
            if ignored := getattr(request.state, "ignored", None):
                response.headers[IGNORED] = ", ".join(quote(name[:60], errors="replace") for name in ignored[:20])
            return response

        super().__init__(path, answer, methods=list(methods))
        self.operation = operation
        self.summary = (endpoint.__doc__ or "").partition("\n")[0].removesuffix(".")


def specification(routes: Sequence[Described]) -> Schema:
    """Return the description of all paths (OpenAPI 3.1). Some programs recognise a server by its title."""
    paths: dict[str, Schema] = {}
    dialects = {route.operation.dialect.name: route.operation.dialect for route in routes}
    for route in routes:
        path = _CONVERTER.sub("}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = route.operation.described(path, method, route.summary)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "LibreTranslate",
            "version": "1.9.6",
            "description": f"An interface compatible with LibreTranslate, and others, by Ziggurat {__version__}.",
        },
        "tags": [{"name": name} for name in dialects],
        "paths": paths,
        "components": {
            "schemas": {_error_name(each): each.error_schema for each in dialects.values()},
            "securitySchemes": {name: way for each in dialects.values() for name, way in each.security.items()},
        },
    }


def _error_name(dialect: Dialect) -> str:
    return re.sub(r"\W", "", dialect.name) + "Error"
