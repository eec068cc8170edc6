"""What lies around every request: its name and figures, limits of its body, faults of ours, and the server's end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ziggurat.serve.access import Access
from ziggurat.serve.interfaces.dialects import dialect_of
from ziggurat.serve.metrics import Metrics
from ziggurat.serve.requests import REQUEST, Refused
from ziggurat.system.errors import printable

BYTES_PER_SECOND = 10_000
"""Bytes that a slow line carries in a second."""
DISCARDED = 64 << 20
"""Bytes of a refused request that are still read, and thrown away, so that the client sees why it was refused."""
LINGER = 1.0
"""Seconds in which this is done for clients that send slowly or break HTTP."""

_CLOSE = (b"connection", b"close")
_NAME = re.compile(rb"[A-Za-z0-9._-]{8,128}")  # of a request, that a log can hold


def answer(path: str, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error in the form of the interface whose path was asked for."""
    content = dialect_of(path).error(status, text)
    return JSONResponse(content, status, headers=dict(headers or {}))


class Underway:
    """The requests that have no answer yet."""

    def __init__(self) -> None:
        self.over = False
        """Whether the server refuses what it has not answered."""
        self.tasks: set[asyncio.Task[object]] = set()

    def end(self) -> None:
        """Refuse them all, and those that still come."""
        self.over = True
        for task in self.tasks:
            task.cancel()


class Seen:
    """Middleware that names requests, counts them, and answers for faults and for the server's end.

    Args:
        app: what is asked.
        metrics: where requests are counted.
        routes: whose paths are told of in figures and logs; what clients send is not.
        underway: where requests are that have no answer yet.
        proxied: whether a proxy in front names requests (`X-Request-ID`).
        logged: whether each request is a line of the log.
        say: receives messages for the operator.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Sequence[Route],
        underway: Underway,
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
                    headers.append((b"cache-control", b"no-store"))  # translations are nobody else's business
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
            where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            what = f"{type(error).__name__}: {printable(str(error), 300)}"
            self._say(f"request {name}: {what}\nTraceback (most recent call last):\n{where}")
            if status:
                raise  # uvicorn closes the connection: the answer cannot be taken back
            headers = {"Connection": "close"}  # part of the body may be unread
            text = "an internal error; the server's log has more"
            await answer(scope["path"], 500, text, headers)(scope, receive, noted)
        finally:
            self._underway.tasks.discard(task)
            seconds = time.perf_counter() - began
            known = (route.path for route in self._routes if route.matches(scope)[0] != Match.NONE)
            path = next(known, "other")
            self._metrics.seen(path, status or 500, seconds)
            if self._logged:
                self._say(f"request {name}: {printable(scope['method'], 10)} {path} {status}, {1000 * seconds:.0f} ms")

    def _name(self, scope: Scope) -> str:
        """Return the name of a request: the proxy's, so that its log and ours go together, or a random one."""
        if self._proxied:
            for key, value in scope["headers"]:
                if key == b"x-request-id" and _NAME.fullmatch(value):
                    return str(value.decode("ascii"))
        return uuid.uuid4().hex


class OwnPages:
    """Middleware that keeps pages of other origins from what clients keep here, where no key does (403).

    Translations are for pages of any origin (CORS). Glossaries are kept, and without keys they are everybody's who
    reaches the port: any page that its user opens could read and delete them. Programs send no `Origin`. A page whose
    own name leads to this machine (DNS rebinding) sends that name as `Host`: so only names count that nobody can have
    elsewhere.

    Args:
        app: what is asked.
        access: whether a key is needed.
        path: beginning of the paths that are kept.
        hosts: further names of the server; None: any, since a proxy in front sees to it.
    """

    def __init__(self, app: ASGIApp, access: Access, path: str, hosts: Collection[str] | None) -> None:
        self._app, self._access, self._path, self._hosts = app, access, path, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless it comes from elsewhere."""
        if scope["type"] == "http" and scope["path"].startswith(self._path) and not self._access.required:
            headers = dict(scope["headers"])
            # Behind a proxy the scheme may be another than the page's.
            origin, host = headers.get(b"origin", b"").lower().partition(b"://")[2], headers.get(b"host", b"").lower()
            if (b"origin" in headers and origin != host) or not self._is_own(host.decode("latin-1")):
                text = "pages of other origins or host names need an API key for this, and this server has none"
                await answer(scope["path"], 403, text)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Return whether a `Host` can only be this server: an address, a name without dots or a given one."""
        name = re.sub(r":\d*$", "", host)
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            own = "." not in name or name.endswith(".localhost")
            return self._hosts is None or own or name in self._hosts
        return True


class BodyLimit:
    """Middleware that refuses bodies beyond a number of bytes (413), or that come too slowly (408).

    A body of two lengths (400) is refused too. Where an answer is ready before the body has come, what still comes is
    thrown away for a while: a connection that is closed with something unread is reset, and the answer may be lost.

    Args:
        app: what is asked.
        most: bytes of a body.
        of_path: bytes at paths for which another number holds.
        seconds: in which a body must come, and one more for every 10,000 bytes of it that have.
    """

    def __init__(self, app: ASGIApp, most: int, of_path: Mapping[str, int], seconds: float) -> None:
        self._app, self._most, self._of_path, self._seconds = app, most, of_path, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its bytes as they come."""
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
                # After the body only the end of the connection can come, for which there is no hurry.
                async with asyncio.timeout_at(None if complete else end + size / BYTES_PER_SECOND):
                    message = await receive()
            except TimeoutError:
                late = True
                raise Refused(408, "the request came too slowly") from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > most:  # a length that was declared may be a lie, so it is what comes that counts
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
            # A proxy in front may believe the other one, and take what is hidden behind it for the next request
            # (RFC 9112, 6.1).
            refusal = answer(scope["path"], 400, "a length and chunks exclude each other", {"Connection": "close"})
            await refusal(scope, receive, answered)
            return
        await self._app(scope, counted, answered)


async def _discard(receive: Receive, seconds: float) -> None:
    """Throw away the rest of a body, or as much of it as comes in time, at most DISCARDED bytes."""
    end, size = asyncio.get_running_loop().time() + seconds, 0
    with contextlib.suppress(TimeoutError):
        while size < DISCARDED:
            async with asyncio.timeout_at(end + size / BYTES_PER_SECOND):
                message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
