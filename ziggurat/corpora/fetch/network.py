"""Access to servers: proxies, redirects and time limits.

A socket's time-out applies to each read, so a server that sends single bytes could block for ever: in a header, in the
length of a chunk, in the body of a redirect. Reading is therefore timed at the socket.
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
"""_STALL_BYTES is the fewest bytes of a body that must arrive within a time-out."""


class _TimedReader(io.RawIOBase):
    """Reader of a socket that expects at least `least` bytes in any `seconds`, and a whole header in that time."""

    def __init__(self, raw: Any, seconds: float) -> None:
        self._raw, self._seconds = raw, seconds
        self.expect(inf)

    def expect(self, least: float) -> None:
        """Start timing a part of the answer that sends at least `least` bytes per time-out."""
        self._least, self._arrived, self._since = least, 0, time.monotonic()

    def readable(self) -> bool:
        """Return True, as io.BufferedReader requires."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read once. Raises TimeoutError if too few bytes have arrived in time."""
        count: int | None = self._raw.readinto(buffer)
        self._arrived += count or 0
        if self._arrived >= self._least:
            self.expect(self._least)
        elif count and time.monotonic() - self._since > self._seconds:
            raise TimeoutError(f"the server sent {self._arrived:,} bytes in {self._seconds:.0f} seconds")
        return count

    def close(self) -> None:
        """Close the underlying reader and this one."""
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """Response whose header must arrive within the socket's time-out, and whose body must not stall."""

    def __init__(self, sock: socket.socket, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self._timed = _TimedReader(self.fp.detach(), sock.gettimeout() or inf)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the header."""
        super().begin()
        self._timed.expect(_STALL_BYTES)


class _Timed(urllib.request.AbstractHTTPHandler):
    """Handler that opens connections with timed responses."""

    def do_open(self, http_class: Any, req: urllib.request.Request, **named: Any) -> http.client.HTTPResponse:
        """Send a request as urllib does."""
        timed: Any = type("Timed", (http_class,), {"response_class": _TimedResponse})
        return super().do_open(timed, req, **named)


class _Http(_Timed, urllib.request.HTTPHandler):
    pass


class _Https(_Timed, urllib.request.HTTPSHandler):
    pass


@dataclass(frozen=True)
class Network:
    """Network settings."""

    proxy: str | None = None
    """URL of a proxy; "": none; None: from the environment (`https_proxy`, `http_proxy`, `no_proxy`)."""
    retries: int = 5
    """Consecutive attempts that may fail without progress (`_GAIN_BYTES` in ziggurat.corpora.fetch.transfer)."""
    timeout_seconds: float = 60.0
    """Longest wait for a header, and for every `_STALL_BYTES` of a body."""
    pause: Callable[[float], object] = field(default=time.sleep, repr=False)
    """Function that waits between attempts."""

    def __post_init__(self) -> None:
        if self.proxy and not re.match(r"https?://[^/]", self.proxy):
            raise ConfigError(
                f"proxy {printable(self.proxy, 200)}: expected an address such as http://host:3128; other kinds are "
                "not supported"
            )

    def open(self, url: str, headers: dict[str, str], method: str = "GET") -> http.client.HTTPResponse:
        """Send one request and follow redirects. Raises as urllib does."""
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
    """Handler that follows redirects, but not from https to http, which anyone in between can tamper with."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request for the new address. Raises DataError if that leaves https."""
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise DataError(f"{req.full_url}: leads to {printable(newurl, 200)}, which is not https; not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
