"""Who may ask, and how much: API keys, of which only hashes are kept, and limits by key or address."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, SlidingWindowCounterRateLimiter
from pydantic import Field

from ziggurat.data.files import write_atomically
from ziggurat.documents import Form, read_json
from ziggurat.errors import ConfigError
from ziggurat.serving.config import LimitsConfig
from ziggurat.serving.requests import Refused

__all__ = ["Access", "new_key"]


class _Key(Form):
    name: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    requests_per_minute: int | None = Field(default=None, ge=1)
    characters_per_minute: int | None = Field(default=None, ge=1)


class _Keys(Form):
    keys: list[_Key] = Field(max_length=100_000)


def _read(path: Path) -> list[_Key]:
    try:
        return read_json(path, _Keys, error=ConfigError, remedy="`ziggurat serve --new-key NAME` makes one").keys
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file of keys; `ziggurat serve --new-key NAME` makes one") from None


def _hash(key: str) -> str:
    # Keys are random numbers of 256 bits: what slows down guessing passwords would only slow down requests.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(path: Path, name: str) -> str:
    """Make a key, add its hash to the file under `name`, and return it: it is shown once and kept nowhere.

    Raises ConfigError for a damaged file, or a name that it has already.
    """
    keys = _read(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise ConfigError(f"{path}: has a key called {name!r} already; remove its entry to replace it")
    key = secrets.token_urlsafe(32)
    entries = [entry.model_dump(exclude_none=True) for entry in [*keys, _Key(name=name, sha256=_hash(key))]]
    write_atomically(path, json.dumps({"keys": entries}, indent=1).encode() + b"\n")
    return key


class Access:
    """The keys and limits of a server.

    Args:
        limits: of clients that have none of their own.
        keys: file of keys; None: everybody may ask.

    Raises ConfigError where the file cannot be read.
    """

    def __init__(self, limits: LimitsConfig, keys: Path | None = None) -> None:
        self._limits = limits
        self._keys = None if keys is None else _read(keys)
        storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(storage)
        self._characters = SlidingWindowCounterRateLimiter(storage)

    @property
    def required(self) -> bool:
        """Whether a key is needed."""
        return self._keys is not None

    def client(self, key: str | None, address: str, requests: int = 1, characters: int = 0) -> str:
        """Return who asks: the name of the key, or the address; what is asked for counts against the limits.

        Raises Refused: no key (400) or a wrong one (403), as LibreTranslate says it; beyond a limit (429).
        """
        entry = None
        if self._keys is not None:
            if not key:
                raise Refused(400, "Please contact the server operator to get an API key")
            hashed = _hash(key)
            # All are compared, each in constant time: the time tells nothing of the keys.
            found = [each for each in self._keys if hmac.compare_digest(each.sha256, hashed)]
            if not found:
                raise Refused(403, "Invalid API key")
            entry = found[0]
        client = f"key {entry.name}" if entry else f"address {address}"
        for kind, limiter, cost in (
            ("requests_per_minute", self._requests, requests),
            ("characters_per_minute", self._characters, characters),
        ):
            most = (entry and getattr(entry, kind)) or getattr(self._limits, kind)
            if most is not None and cost > most:
                raise Refused(413, f"at most {most} {kind.replace('_per_minute', '')} are allowed in a minute")
            if most is not None and cost and not limiter.hit(RateLimitItemPerMinute(most), kind, client, cost=cost):
                raise Refused(
                    429, f"Slowdown: {most} {kind.replace('_per_minute', '')} per 1 minute", {"Retry-After": "60"}
                )
        return client
