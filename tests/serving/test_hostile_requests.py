"""Requests that are broken or hostile: each gets a clear refusal or a right answer, and none a fault of ours."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.serving.conftest import Serve

PATHS = ("/translate", "/detect", "/languages", "/suggest", "/v2/translate", "/v2/languages", "/v1/chat/completions")
VALUES: list[Any] = [
    None, True, 0, -1, 1e308, 10**400, "", " ", "a", "\0", "\ud800", "\u202e", "🙂" * 50, "x" * 3000, "%s{0}{{a}}", [],
    [[]], [None], ["a", 1], {}, {"a": {"b": []}}, "auto", "de", "en", "qlo", "../../etc/passwd", "<b>", "</b></p>",
    "<!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>", "html", "text", "1e5", "９", [*"abc"],
]  # fmt: skip
FIELDS = ("q", "source", "target", "format", "alternatives", "api_key", "text", "source_lang", "target_lang",
          "tag_handling", "messages", "model", "stream", "type")  # fmt: skip
GOOD = {"q": "A dog runs.", "source": "en", "target": "de", "text": ["A dog"], "target_lang": "DE", "model": "en-de",
        "messages": [{"role": "user", "content": "A dog"}]}  # fmt: skip


def body(draw: random.Random) -> dict[str, Any]:
    """Return what a request has instead of, or beside, what belongs there."""
    fields = {key: value for key, value in GOOD.items() if draw.random() < 0.8}
    for _ in range(draw.randrange(4)):
        fields[draw.choice(FIELDS)] = draw.choice(VALUES)
    kind = draw.randrange(6)
    if kind == 0:
        return {"content": bytes(draw.randrange(256) for _ in range(draw.randrange(200)))}
    if kind == 1:  # JSON that ends early, or has something added
        text = json.dumps(fields).encode("utf-8", "surrogatepass")
        at = draw.randrange(len(text) + 1)
        return {"content": text[:at] + draw.choice([b"", b"}", b"\xff", b"," * 9, b"[" * 900])}
    if kind == 2:
        plain = {key: str(value).encode("utf-8", "replace").decode() for key, value in fields.items()}
        return {"data": plain} if draw.random() < 0.7 else {"params": {key: v[:500] for key, v in plain.items()}}
    if kind == 3:
        boundary = draw.choice(["x", "", "y" * 300])
        parts = b"".join(
            b"--x\r\nContent-Disposition: form-data; name=" + draw.choice([b'"q"', b'"', b"q; filename=../x", b""]) +
            b"\r\n\r\nA\r\n" for _ in range(draw.randrange(5))
        )  # fmt: skip
        return {"content": parts + b"--x--", "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}
    kinds = ["application/json", "text/plain", "application/x-www-form-urlencoded", 'a/b; charset="', ""]
    content = json.dumps(fields).encode("utf-8", "surrogatepass")
    return {"content": content, "headers": {"content-type": draw.choice(kinds)}}


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow, id="ten thousand")])
def test_hostile_requests(serve: Serve, count: int) -> None:
    client = serve(limits={"characters": 500, "texts": 5, "body_bytes": 4000})
    draw, seen = random.Random(7), Counter[int]()
    for number in range(count):
        path, method = draw.choice(PATHS), draw.choice(["POST"] * 9 + ["GET", "PUT"])
        request = body(draw)
        answer = client.request(method, path, **request)
        seen[answer.status_code] += 1
        assert answer.status_code in (200, 400, 403, 404, 405, 413), (number, path, request, answer.text)
        if answer.status_code != 405:
            found = answer.json()
            assert answer.status_code == 200 or found.keys() & {"error", "message"}
        assert "Traceback" not in answer.text
    assert {200, 400, 413} <= seen.keys()
    assert client.post("/translate", json={"q": "A dog", "source": "en", "target": "de"}).status_code == 200
