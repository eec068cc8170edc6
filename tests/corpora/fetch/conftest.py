"""Fixtures: a server that can misbehave, and a network without pauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.corpora.fetch.server import Server, serving
from ziggurat.corpora.fetch.network import Network


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def pauses() -> list[float]:
    """The waits of the network between tries, in seconds."""
    return []


@pytest.fixture
def network(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network of one machine: no proxy from the environment, no real pauses."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Network(retries=3, timeout_seconds=20, pause=pauses.append)
