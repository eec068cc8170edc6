"""/spec: it is OpenAPI, has all paths, and matches the answers of the paths."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.serve.conftest import Serve
from tests.vocabulary import SENTENCES
from ziggurat.serve.requests import Described

LINE = SENTENCES[0]
EN_DE = {"source": "en", "target": "de"}
EN_DE_LANG = {"source_lang": "en", "target_lang": "de"}
METHODS = {"get", "post", "delete"}


def routes(client: TestClient) -> list[Route]:
    assert isinstance(client.app, Starlette)
    return [route for route in client.app.routes if isinstance(route, Route)]


@pytest.mark.slow
def test_it_is_openapi_and_has_every_path(serve: Serve) -> None:
    client = serve()
    spec = client.get("/spec").json()
    assert list(OpenAPIV31SpecValidator(spec).iter_errors()) == []
    assert spec["info"]["title"] == "LibreTranslate"  # some programs recognise the server by it
    told = {(path, method) for path, methods in spec["paths"].items() for method in methods}
    every = routes(client)
    assert len(every) > 30
    assert {(re.sub(r":\w+", "", r.path), m.lower()) for r in every for m in (r.methods or set()) - {"HEAD"}} == told
    for path, methods in spec["paths"].items():
        for method, said in methods.items():
            named = {each["name"] for each in said.get("parameters", ()) if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            assert said["summary"]
            if method == "post" and path not in ("/languages", "/suggest"):
                for content in said["requestBody"]["content"].values():
                    assert content["schema"]["properties"]
    ids = [said["operationId"] for methods in spec["paths"].values() for said in methods.values()]
    assert len(ids) == len(set(ids))


def strict(schema: Any) -> Any:
    """Return the schema with objects limited to the properties that it names."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in found else found


def answers(client: TestClient) -> Iterator[tuple[str, str, Any]]:
    """Yield paths as in /spec, methods and answers."""
    want = {"alternatives": 2, "scores": True, "alignments": True, "glossary": {"dog": "Hund"}}
    message = {"role": "user", "content": LINE}
    for method, path, more in (
        ("post", "/translate", {"json": {"q": LINE, **EN_DE}}),
        ("post", "/translate", {"json": {"q": [LINE], "source": "auto", "target": "de", "alternatives": 2}}),
        ("post", "/detect", {"data": {"q": LINE}}),
        ("get", "/languages", {}),
        ("post", "/languages", {}),
        ("get", "/frontend/settings", {}),
        ("post", "/suggest", {}),
        ("post", "/v2/translate", {"json": {"text": [LINE], **EN_DE_LANG}}),
        ("post", "/v2/translate", {"json": {"text": [LINE], "target_lang": "XX"}}),
        *((method, "/v2/languages", {"params": {"type": "target"}}) for method in ("get", "post")),
        *((method, "/v2/usage", {}) for method in ("get", "post")),
        ("get", "/v2/glossary-language-pairs", {}),
        ("post", "/v1/chat/completions", {"json": {"model": "en-de", "messages": [message]}}),
        ("post", "/v1/chat/completions", {"json": {"model": "none", "messages": [message]}}),
        ("get", "/v1/models", {}),
        ("get", "/v1/settings", {}),
        ("post", "/v1/translate", {"json": {"text": LINE, **EN_DE, **want}}),
        ("post", "/v1/translate", {"json": {"text": LINE, "target": "de"}}),
        ("get", "/health", {}),
        ("get", "/spec", {}),
    ):
        yield path, method, client.request(method, path, **more)
    yield "/v1/models/{name}", "get", client.get("/v1/models/en-de")
    yield "/v1/models/{name}", "get", client.get("/v1/models/none")

    kept = client.post("/v2/glossaries", json={"name": "n", "entries": "dog\tHund", **EN_DE_LANG})
    yield "/v2/glossaries", "post", kept
    yield "/v2/glossaries", "get", client.get("/v2/glossaries")
    one = f"/v2/glossaries/{kept.json()['glossary_id']}"
    yield "/v2/glossaries/{id}", "get", client.get(one)
    yield "/v2/glossaries/{id}/entries", "get", client.get(f"{one}/entries")
    yield "/v2/glossaries/{id}", "delete", client.delete(one)

    file = {"file": ("a.txt", LINE.encode())}
    answer = client.post("/translate_file", files=file, data=EN_DE)
    yield "/translate_file", "post", answer
    yield "/download_file/{name}", "get", client.get(answer.json()["translatedFileUrl"])
    answer = client.post("/v2/document", files=file, data=EN_DE_LANG)
    yield "/v2/document", "post", answer
    key = {"document_key": answer.json()["document_key"]}
    path = f"/v2/document/{answer.json()['document_id']}"
    yield "/v2/document/{id}", "post", client.post(path, json=key)
    wait_until(lambda: client.get(path, params=key).json()["status"] == "done")
    yield "/v2/document/{id}", "get", client.get(path, params=key)
    yield "/v2/document/{id}/result", "get", client.get(f"{path}/result", params=key)
    yield "/v2/document/{id}/result", "post", client.post(f"{path}/result", data=key)
    glossary = {"glossary": json.dumps([{"source": "dog", "target": "Hund"}])}
    answer = client.post("/v1/documents", files=file, data={**EN_DE, **glossary})
    yield "/v1/documents", "post", answer
    path = f"/v1/documents/{answer.json()['id']}"
    wait_until(lambda: client.get(path).json()["status"] == "done")
    yield "/v1/documents/{id}", "get", client.get(path)
    yield "/v1/documents/{id}/file", "get", client.get(f"{path}/file")
    yield "/v1/documents/{id}", "delete", client.delete(path)
    for path in ("/metrics", "/", "/page.css"):
        yield path, "get", client.get(path)


def wait_until(done: Any) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_answers_match_it(serve: Serve) -> None:
    client = serve()
    spec = client.get("/spec").json()
    seen = set()
    for path, method, answer in answers(client):
        said = spec["paths"][path][method]
        declared = said["responses"].get(str(answer.status_code)) or said["responses"]["default"]
        if str(answer.status_code) in said["responses"]:
            seen.add((path, method))
        else:
            assert answer.status_code >= 400
        if "content" not in declared:
            assert answer.content == b"", (path, method)
            continue
        kind = answer.headers["content-type"].partition(";")[0]
        content = declared["content"].get(kind) or declared["content"]["*/*"]
        if kind == "application/json":
            schema = {**strict(content["schema"]), "components": strict(spec["components"])}
            Draft202012Validator(schema).validate(answer.json())
    scripts = {(path, "get") for path in spec["paths"] if path.endswith(".js")}
    everything = {(path, method) for path, methods in spec["paths"].items() for method in methods}
    assert everything - seen == scripts | {("/suggest", "post")}


def test_undeclared_fields_are_not_read(serve: Serve) -> None:
    """Therefore /spec has everything that a path accepts."""
    client = serve()
    operations = {route.path: route.operation for route in routes(client) if isinstance(route, Described)}
    assert {each.name for each in operations["/v2/usage"].takes} == {"auth_key"}
    asked = {"q": LINE, "text": LINE, **EN_DE}  # `text` is not a field of LibreTranslate's
    wanted = client.post("/translate", json={"q": LINE, **EN_DE}).json()
    assert client.post("/translate", json=asked).json() == wanted
    assert client.post("/translate", json={"text": LINE, **EN_DE}).status_code == 400
