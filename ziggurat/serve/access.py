"""API keys, of which only hashes are stored, and limits per key or address."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter, SlidingWindowCounterRateLimiter
from pydantic import Field

from ziggurat.serve.config import LimitsConfig
from ziggurat.serve.requests import Refused
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import JsonForm, read_json


class _Key(JsonForm):
    name: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    requests_per_minute: int | None = Field(default=None, ge=1)
    characters_per_minute: int | None = Field(default=None, ge=1)


class _Keys(JsonForm):
    keys: list[_Key] = Field(max_length=100_000)


def _read(path: Path) -> list[_Key]:
    try:
        return read_json(path, _Keys, error=ConfigError, remedy="`ziggurat serve --new-key NAME` makes one").keys
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file of keys; `ziggurat serve --new-key NAME` makes one") from None


def _seen(path: Path) -> object:
    """Return a value that changes when the file does; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _hash(key: str) -> str:
    # Keys are random 256-bit numbers; slow hashing, which protects passwords, would only slow down requests.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(path: Path, name: str) -> str:
    """Create a key, add its hash to the file under `name`, and return it: it is shown once and never stored.

    Raises ConfigError for a damaged file, or if the name is already taken.
    """
    keys = _read(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise ConfigError(f"{path}: already has a key called {name!r}; remove its entry to replace it")
    key = secrets.token_urlsafe(32)
    entries = [entry.model_dump(exclude_none=True) for entry in [*keys, _Key(name=name, sha256=_hash(key))]]
    write_atomically(path, json.dumps({"keys": entries}, indent=1).encode() + b"\n")
    return key


class ConcurrencyLimit:
    """A limit on the number of slots in use at a time, with a lower limit for each client.

    Args:
        all_: the number of slots.
        of_client: how many of them one client may hold.
    """

    def __init__(self, all_: int, of_client: int) -> None:
        self._all, self._of_client = all_, of_client
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, client: str, refusal: str) -> Iterator[None]:
        """Hold a slot. Raises Refused (429) with the text of `refusal` if none is free for this client."""
        if self._held.total() >= self._all or self._held[client] >= self._of_client:
            raise Refused(429, refusal, {"Retry-After": "10"})
        self._held[client] += 1
        try:
            yield
        finally:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]


class Access:
    """The keys and limits of a server.

    Args:
        limits: limits for clients without their own.
        keys: file of keys; None: everybody may send requests.
        say: receives messages for the operator.

    Raises ConfigError if the file cannot be read.
    """

    def __init__(
        self, limits: LimitsConfig, keys: Path | None = None, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._limits, self._path, self._say = limits, keys, say
        self._seen: object = None if keys is None else _seen(keys)
        self._keys = None if keys is None else {key.sha256: key for key in _read(keys)}
        storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(storage)
        self._characters = SlidingWindowCounterRateLimiter(storage)

    @property
    def required(self) -> bool:
        """True if a key is needed."""
        return self._keys is not None

    def account(self, client: str) -> str:
        """Return the owner of what a client stores: the name of its key, or everybody if no key is needed."""
        return client if self.required else ""

    def refresh(self) -> None:
        """Read the file of keys again if it has changed. While it is damaged or missing, the old keys stay valid."""
        if self._path is None or (seen := _seen(self._path)) == self._seen:
            return
        self._seen = seen
        try:
            self._keys = {key.sha256: key for key in _read(self._path)}
        except ConfigError as error:
            self._say(f"the keys that were read before stay valid: {error}")
            return
        self._say(f"{self._path}: keys read again, {len(self._keys):,} of them")

    def client(self, key: str | None, address: str, characters: int = 0) -> str:
        """Return the client, the name of its key or its address, and count the request against its limits.

        Raises Refused for a missing (400) or wrong key (403), worded as in LibreTranslate, or beyond a limit (429).
        """
        entry = None
        if self._keys is not None:
            if not key:
                raise Refused(400, "Please contact the server operator to get an API key")
            # The time of a lookup may reveal other hashes, but no key can be derived from those.
            entry = self._keys.get(_hash(key))
            if entry is None:
                raise Refused(403, "Invalid API key")
        client = f"key {entry.name}" if entry else f"address {address}"
        self._spend(client, entry, requests=1, characters=characters)
        return client

    def holder(self, key: str | None, address: str) -> str:
        """Return the holder of a slot while its request is still arriving: a key, an address, or "strangers".

        If a key is needed, all clients without a valid one count as one stranger. Nothing is counted against limits.
        """
        if self._keys is None:
            return f"address {address}"
        entry = self._keys.get(_hash(key)) if key else None
        return f"key {entry.name}" if entry else "strangers"

    def spend(self, client: str, characters: int) -> None:
        """Count more characters for an admitted client, such as those of its document. Thread-safe.

        Raises Refused: beyond the limit for now (429) or for good (413).
        """
        keys = self._keys or {}
        entry = next((key for key in keys.values() if f"key {key.name}" == client), None)
        self._spend(client, entry, requests=0, characters=characters)

    def _spend(self, client: str, entry: _Key | None, *, requests: int, characters: int) -> None:
        asked = []
        for kind, limiter, cost in (
            ("requests", self._requests, requests),
            ("characters", self._characters, characters),
        ):
            most = (entry and getattr(entry, f"{kind}_per_minute")) or getattr(self._limits, f"{kind}_per_minute")
            if most is not None and cost > most:  # before anything is counted: waiting would not help
                raise Refused(413, f"at most {most} {kind} are allowed in a minute")
            if most is not None and cost:
                asked.append((kind, limiter, cost, RateLimitItemPerMinute(most)))
        for kind, limiter, cost, item in asked:
            if not limiter.hit(item, kind, client, cost=cost):
                wait = limiter.get_window_stats(item, kind, client).reset_time - time.time()
                raise Refused(
                    429,
                    f"Slowdown: {item.amount} {kind} per 1 minute",
                    {"Retry-After": str(min(60, max(1, math.ceil(wait))))},
                )
