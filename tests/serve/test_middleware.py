"""Middleware: request ids, internal errors, and pages of other origins."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from starlette.testclient import TestClient

from ziggurat.serve.access import new_key
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.pool import ModelSource
from ziggurat.serve.server import Forwarded, app_of
from ziggurat.serve.translations import Detector

ASKED = {"q": "Ein Hund rennt.", "source": "de", "target": "en"}
TERMS = {"name": "n", "source_lang": "de", "target_lang": "en", "entries": "Hund\thound", "entries_format": "tsv"}


class Start(Protocol):
    """Starts a server with settings; returns a client and the messages for the operator."""

    def __call__(self, **settings: Any) -> tuple[TestClient, list[str]]: ...


@pytest.fixture
def start(folders: dict[tuple[str, str], Path]) -> Iterator[Start]:
    opened: list[TestClient] = []

    def start(**settings: Any) -> tuple[TestClient, list[str]]:
        said: list[str] = []
        models = [{"path": str(folders["de", "en"]), "threads": 1}]
        config = ServeConfig.model_validate({"models": models, **settings})
        opened.append(TestClient(app_of(config, said.append), raise_server_exceptions=False))
        opened[-1].__enter__()
        return opened[-1], said

    yield start
    for client in opened:
        client.__exit__(None, None, None)


def test_requests_have_the_ids_that_a_proxy_gives_them(start: Start) -> None:
    client, said = start(proxies=["127.0.0.1"], log_requests=True)
    given = "4f0c_proxy.1-a"
    answer = client.post("/translate", json=ASKED, headers={"X-Request-ID": given})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, given)
    for bad in ("short", "a" * 129, "a b c d e f g", "request\t1234567", '"12345678"'):
        assert re.fullmatch(
            "[0-9a-f]{32}", client.get("/health", headers={"X-Request-ID": bad}).headers["x-request-id"]
        )
    assert re.fullmatch(rf"request {given}: POST /translate 200, \d+ ms", said[0])
    assert len(said) == 6
    assert "Hund" not in "".join(said)
    client, said = start()  # without a proxy no client's claim is trusted
    answer = client.post("/translate", json=ASKED, headers={"X-Request-ID": given})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert said == []


def test_a_fault_is_found_in_the_log_by_its_request_id(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Detector, text: str, among: Any = None) -> Any:
        raise RuntimeError("a fault\nof ours")

    monkeypatch.setattr(Detector, "rank", broken)
    client, said = start(proxies=["127.0.0.1"])
    for path, asked in (
        ("/translate", {**ASKED, "source": "auto"}),
        ("/v2/translate", {"text": "a", "target_lang": "EN"}),
    ):
        answer = client.post(
            path, json=asked, headers={"X-Request-ID": "the-proxy-s", "Origin": "https://elsewhere.example"}
        )
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "the-proxy-s")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["access-control-allow-origin"] == "*"  # otherwise it looks like a lost connection
        assert list(answer.json().values()) == ["an internal error; the server's log has more"]
    first, _ = said
    assert first.startswith("request the-proxy-s: RuntimeError: a fault\\nof ours\n")
    assert re.search(r'File ".*", line \d+, in broken', first)
    assert 'path="/translate",status="500"} 1.0' in client.get("/metrics").text


def test_a_fault_in_a_document_is_reported_with_its_request_id(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.serve.documents.translated", lambda *given: 1 / 0)
    client, said = start()
    answer = client.post("/translate_file", files={"file": ("f.txt", b"Ein Hund")}, data=ASKED)
    assert answer.status_code == 500
    (line,) = said
    name = answer.headers["x-request-id"]
    assert line.startswith(f"request {name}: a document failed: ZeroDivisionError: division by zero\nTraceback")


@pytest.mark.parametrize("broken", ["ziggurat.serve.glossaries.write_atomically", "ziggurat.serve.documents._is_own"])
def test_a_full_disk_is_not_a_fault_of_the_program(
    broken: str, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client, said = start(glossaries=str(tmp_path / "kept.json"))

    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/file")

    monkeypatch.setattr(broken, full)
    if "glossaries" in broken:
        answer = client.post("/v2/glossaries", json=TERMS)
    else:
        answer = client.post("/translate_file", files={"file": ("f.txt", b"Ein Hund")}, data=ASKED)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
    (line,) = said
    assert line.endswith("OSError: [Errno 28] No space left on device: '/a/file'")  # no traceback for each request


@pytest.mark.slow
def test_pages_of_other_origins_cannot_use_glossaries_without_keys(start: Start, tmp_path: Path) -> None:
    client, _ = start()
    own, other = {"Origin": "http://testserver"}, {"Origin": "https://elsewhere.example"}
    created = client.post("/v2/glossaries", json=TERMS)  # as DeepL's clients do, without an origin
    assert created.status_code == 201
    path = f"/v2/glossaries/{created.json()['glossary_id']}"
    for headers in (other, {"Origin": "null"}, {"Origin": "http://testserver:81"}, {"Origin": ""}):
        calls = [("POST", "/v2/glossaries"), ("DELETE", path), ("GET", path), ("GET", f"{path}/entries")]
        refused = [client.request(method, where, headers=headers) for method, where in calls]
        assert [each.status_code for each in refused] == [403] * 4
        assert "need an API key" in refused[0].json()["message"]
    assert client.post("/translate", json=ASKED, headers=other).status_code == 200  # everybody may translate
    assert client.get(path, headers=own).status_code == 200
    hosts = {
        "evil.example:5000": 403,
        "testserver.evil.example": 403,
        "1.2.3.4.evil.example": 403,
        "a.localhost:1": 200,
    }
    hosts |= {"127.0.0.1:5000": 200, "[::1]:5000": 200, "localhost:5000": 200, "translator": 200}
    for host, status in hosts.items():  # DNS rebinding: the name of the page's host leads to this machine
        for origin in ({}, {"Origin": f"http://{host}"}):
            assert client.get(path, headers={"Host": host, **origin}).status_code == status, host
        assert client.post("/translate", json=ASKED, headers={"Host": host}).status_code == 200
    assert client.delete(path, headers=own).status_code == 204
    proxied, _ = start(proxies=["127.0.0.1"])  # the proxy handles it
    assert proxied.get("/v2/glossaries", headers={"Host": "translate.example"}).status_code == 200
    named, _ = start(host="translate.example")
    assert named.get("/v2/glossaries", headers={"Host": "Translate.example:80"}).status_code == 200
    key = {"Authorization": f"DeepL-Auth-Key {new_key(tmp_path / 'keys', 'a')}"}
    client, _ = start(keys=str(tmp_path / "keys"))
    assert client.post("/v2/glossaries", json=TERMS, headers={**key, **other}).status_code == 201
    assert client.post("/v2/glossaries", json=TERMS, headers=other).status_code == 403


def test_a_model_that_cannot_be_opened_is_reported_once_by_its_name(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ModelSource) -> Any:
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(ModelSource, "open", broken)
    client, said = start()
    answers = [client.post("/translate", json=ASKED) for _ in range(2)]  # the second before it is tried again
    assert [(each.status_code, each.json()["error"]) for each in answers] == [
        (503, "de-en: could not be opened; the server's log has the reason")
    ] * 2
    assert said == ["de-en: could not be opened: the disk\\nis gone"]
    reason = "could not be opened; the server's log has the reason"
    assert client.get("/health").json()["models"] == {"de-en": {"status": "failed", "reason": reason}}


PUBLIC = "X-Forwarded-Host"


@pytest.mark.parametrize(
    ("peer", "headers", "address"),
    [
        ("127.0.0.1", {"X-Forwarded-Proto": "https", PUBLIC: "mt.example.org"}, "https://mt.example.org/"),
        (
            "127.0.0.1",
            {"X-Forwarded-Proto": "https", PUBLIC: "mt.example.org", "X-Forwarded-Prefix": "/mt"},
            "https://mt.example.org/mt/",
        ),
        ("127.0.0.1", {PUBLIC: "a.example:8443, b.example"}, "http://a.example:8443/"),
        ("127.0.0.1", {PUBLIC: "[2001:db8::1]:81", "X-Forwarded-Prefix": "/a/b/, /c"}, "http://[2001:db8::1]:81/a/b/"),
        ("127.0.0.1", {PUBLIC: "a.example", "X-Forwarded-Prefix": "/translate_file"}, "http://a.example/translate_file/"),
        ("127.0.0.1", {"X-Forwarded-Prefix": "/mt"}, "http://inner:5000/mt/"),
        ("127.0.0.1", {PUBLIC: "a.example/b", "X-Forwarded-Prefix": "//evil.example"}, "http://inner:5000/"),
        ("127.0.0.1", {PUBLIC: "a.example:1:2", "X-Forwarded-Prefix": "/../x?y"}, "http://inner:5000/"),
        ("127.0.0.1", {PUBLIC: "", "X-Forwarded-Prefix": "/"}, "http://inner:5000/"),
        ("10.0.0.9", {"X-Forwarded-Proto": "https", PUBLIC: "a.example", "X-Forwarded-Prefix": "/mt"}, "http://inner:5000/"),
    ],
)  # fmt: skip
def test_addresses_are_those_of_the_proxy(
    folders: dict[tuple[str, str], Path], peer: str, headers: dict[str, str], address: str
) -> None:
    models = [{"path": str(folders["de", "en"]), "threads": 1}]
    config = ServeConfig.model_validate({"models": models, "proxies": ["127.0.0.1"]})
    app = Forwarded(app_of(config, print), config.proxies)
    with TestClient(app, base_url="http://inner:5000", client=(peer, 1)) as client:
        file = {"file": ("f.txt", b"17")}
        answer = client.post("/translate_file", files=file, data={"source": "de", "target": "en"}, headers=headers)
        assert answer.json()["translatedFileUrl"].startswith(f"{address}download_file/")
