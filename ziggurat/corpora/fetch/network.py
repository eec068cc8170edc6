"""Access to servers: proxies, redirects and time limits.

A time-out of sockets is one for each read, so a server that sends single bytes would hold us for ever: in a header, in
the length of a chunk, in the body of a redirect. So all that comes is timed where it comes from the socket.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ziggurat import __version__
from ziggurat.system.errors import ConfigError, DataError, printable

_STALL_BYTES = 1 << 12
"""Least that must arrive of a body within a time-out."""


class _TimedReader(io.RawIOBase):
    """The bytes of a socket, of which `least` have to come in any `seconds`; for a header, all of it."""

    def __init__(self, raw: Any, seconds: float) -> None:
        self._raw, self._seconds = raw, seconds
        self.expect(inf)

    def expect(self, least: float) -> None:
        """Begin a part of the answer."""
        self._least, self._arrived, self._since = least, 0, time.monotonic()

    def readable(self) -> bool:
        """Return True, as the reader of a buffer has to."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read once. Raises TimeoutError also where single bytes came, but too few of them."""
        count: int | None = self._raw.readinto(buffer)
        self._arrived += count or 0
        if self._arrived >= self._least:
            self.expect(self._least)
        elif count and time.monotonic() - self._since > self._seconds:
            raise TimeoutError(f"the server sent {self._arrived:,} bytes in {self._seconds:.0f} seconds")
        return count

    def close(self) -> None:
        """Close the socket's end, too."""
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """An answer whose header has to arrive whole within the socket's time-out, and whose body may not stall."""

    def __init__(self, sock: socket.socket, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self._timed = _TimedReader(self.fp.detach(), sock.gettimeout() or inf)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the header."""
        super().begin()
        self._timed.expect(_STALL_BYTES)


class _Timed(urllib.request.AbstractHTTPHandler):
    """Opens connections whose answers are timed."""

    def do_open(self, http_class: Any, req: urllib.request.Request, **named: Any) -> http.client.HTTPResponse:
        """Send a request, as urllib does it."""
        timed: Any = type("Timed", (http_class,), {"response_class": _TimedResponse})
        return super().do_open(timed, req, **named)


class _Http(_Timed, urllib.request.HTTPHandler):
    pass


class _Https(_Timed, urllib.request.HTTPSHandler):
    pass


@dataclass(frozen=True)
class Network:
    """Settings of the network: how servers are reached."""

    proxy: str | None = None
    """Address of a proxy; empty: none; None: as the environment says (`https_proxy`, `http_proxy`, `no_proxy`)."""
    retries: int = 5
    """Tries in a row that may fail without getting further (`_GAIN_BYTES`)."""
    timeout_seconds: float = 60.0
    """Longest wait for a header, and for each next `_STALL_BYTES` of a body."""
    pause: Callable[[float], object] = field(default=time.sleep, repr=False)
    """Waits between tries."""

    def __post_init__(self) -> None:
        if self.proxy and not re.match(r"https?://[^/]", self.proxy):
            raise ConfigError(
                f"proxy {printable(self.proxy, 200)}: wanted is an address such as http://host:3128; other kinds are "
                "not supported"
            )

    def open(self, url: str, headers: dict[str, str], method: str = "GET") -> http.client.HTTPResponse:
        """Send one request, redirects followed. Raises as urllib does."""
        proxies = None
        if self.proxy is not None:
            proxies = {"http": self.proxy, "https": self.proxy} if self.proxy else {}
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(proxies),
            _Http(),
            _Https(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            Redirects(),
        ):
            opener.add_handler(handler)
        asked = {"User-Agent": f"ziggurat/{__version__}", "Accept-Encoding": "identity", **headers}
        response = opener.open(urllib.request.Request(url, headers=asked, method=method), timeout=self.timeout_seconds)
        if response is None:  # no handler for the scheme
            raise DataError(f"{url}: only http and https addresses can be fetched")
        return response


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to an address that anyone on the way can change."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request for the new address. Raises DataError: it is not https any more."""
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise DataError(f"{req.full_url}: leads to {printable(newurl, 200)}, which is not https; not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
