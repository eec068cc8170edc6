"""DeepL's and OpenAI's interfaces, with requests captured from their own client libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Serve
from tests.vocabulary import SENTENCES
from ziggurat.serve.access import Access, new_key
from ziggurat.serve.config import LimitsConfig
from ziggurat.serve.interfaces.openai import _joined
from ziggurat.translate.translator import load_translator

LINES = [SENTENCES[0], SENTENCES[1]]


@pytest.fixture(scope="module")
def wanted(folders: dict[tuple[str, str], Path]) -> list[str]:
    return [translation.text for translation in load_translator(folders["en", "de"]).translate(LINES)]


def test_deepl(serve: Serve, wanted: list[str], tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "cat")
    client, auth = serve(keys=str(tmp_path / "keys")), {"Authorization": f"DeepL-Auth-Key {key}"}
    python = {
        "target_lang": "DE",
        "source_lang": "EN",
        "formality": "prefer_less",
        "text": LINES,
        "show_billed_characters": True,
    }
    found = client.post("/v2/translate", json=python, headers=auth).json()
    assert found == {
        "translations": [
            {"detected_source_language": "EN", "text": text, "billed_characters": len(line)}
            for line, text in zip(LINES, wanted, strict=True)
        ]
    }
    node = {"target_lang": "de", "source_lang": "en", "show_billed_characters": "1", "text": LINES}
    assert client.post("/v2/translate", data=node, headers=auth).json() == found
    marked = {"target_lang": "DE", "source_lang": "EN", "text": "You <b>two</b>", "tag_handling": "html"}
    text = client.post("/v2/translate", data=marked, headers=auth).json()["translations"][0]["text"]
    assert (text.count("<b>"), text.count("</b>")) == (1, 1)
    kept = {**marked, "text": "You <x>dog</x> runs", "ignore_tags": "x,y"}
    assert "<x>dog</x>" in client.post("/v2/translate", data=kept, headers=auth).json()["translations"][0]["text"]
    detected = {"target_lang": "EN-US", "text": ["Das Haus steht am Fluss, und der Hund schläft."]}
    answer = client.post("/v2/translate", json=detected, headers=auth).json()
    assert answer["translations"][0]["detected_source_language"] == "DE"
    used = client.get("/v2/usage", headers=auth).json()
    assert used["character_count"] == 2 * sum(map(len, LINES)) + sum(
        len(each["text"]) for each in (marked, kept)
    ) + len(detected["text"][0])
    everybody = serve()
    for text in ("Two dogs", "A dog"):
        everybody.post("/v2/translate", json={"text": [text], "target_lang": "DE", "source_lang": "EN"})
    assert everybody.get("/v2/usage").json()["character_count"] == len("Two dogs") + len("A dog")
    access = Access(LimitsConfig())  # the number of addresses is unlimited
    assert {access.account(access.client(None, address)) for address in ("10.0.0.1", "10.0.0.2")} == {""}
    targets = client.get("/v2/languages", params={"type": "target"}, headers=auth).json()
    assert {"language": "DE", "name": "German", "supports_formality": False} in targets
    assert {"language": "EN", "name": "English"} in client.get("/v2/languages", headers=auth).json()


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"text": ["a"], "target_lang": "XX"}, 400, "'target_lang' not supported"),
        ({"text": ["a"]}, 400, "'target_lang' not specified"),
        ({"target_lang": "DE"}, 400, "'text' not specified"),
        ({"text": [1], "target_lang": "DE"}, 400, "'text' not specified"),
        ({"text": ["a"], "target_lang": "DE", "source_lang": "QLO"}, 400, "'source_lang' not supported"),
        ({"text": ["a"], "target_lang": "DE", "tag_handling": "pdf"}, 400, "'tag_handling' not supported"),
        ({"text": ["a"], "target_lang": "DE", "glossary_id": "g"}, 400, "requires the source_lang parameter"),
        ({"text": ["a"], "target_lang": "DE", "source_lang": "EN", "glossary_id": "g"}, 404, "does not exist"),
        ({"text": ["a"], "target_lang": "DE", "style_id": "s"}, 400, "'style_id' not supported"),
        ({"text": ["a"], "target_lang": "DE", "formality": "less"}, 400, "'formality' is not supported for given"),
        ({"text": ["a"], "target_lang": "DE", "formality": "more"}, 400, "'formality' is not supported for given"),
        ({"text": ["a"], "target_lang": "DE", "formality": "polite"}, 400, "'formality' not supported"),
        ({"text": ["a"], "target_lang": "DE", "formality": ["less"]}, 400, "'formality' not supported"),
        ({"text": ["a"], "target_lang": "DE", "model_type": "best"}, 400, "'model_type' not supported"),
        ({"text": ["a"], "target_lang": "DE", "tag_handling_version": "v9"}, 400, "'tag_handling_version' not"),
        ({"text": ["a"], "target_lang": "DE", "context": ["a letter"]}, 400, "'context' not supported"),
        ({"text": ["a"], "target_lang": "DE", "preserve_formatting": "x"}, 400, "'preserve_formatting' not supported"),
        ({"text": ["a"], "target_lang": "DE", "show_billed_characters": 2}, 400, "'show_billed_characters' not"),
        ({"text": ["a"], "target_lang": "DE", "enable_beta_languages": [1]}, 400, "'enable_beta_languages' not"),
        ({"text": ["a"], "target_lang": "DE", "outline_detection": "maybe"}, 400, "'outline_detection' not supported"),
        ({"text": ["a"], "target_lang": "DE", "ignore_tags": 5}, 400, "'ignore_tags' not supported"),
        ({"text": ["a"], "target_lang": "DE", "splitting_tags": ["x", None]}, 400, "'splitting_tags' not supported"),
        ({"text": ["a"], "target_lang": "DE", "tag_handling": ["html"]}, 400, "'tag_handling' not supported"),
        ({"text": ["a"], "target_lang": "DE", "split_sentences": True}, 400, "'split_sentences' not supported"),
        ({"text": ["a"], "target_lang": "DE", "glossary_ids": ["s"]}, 400, "'glossary_ids' not supported"),
        ({"text": ["a"], "target_lang": "DE", "split_sentences": "2"}, 400, "'split_sentences' not supported"),
        ({"text": ["<a>b"], "target_lang": "DE", "tag_handling": "xml"}, 400, "Tag handling parsing failed"),
        ({"text": ["a"] * 501, "target_lang": "DE"}, 413, "At most 500 texts"),
    ],
)
def test_requests_that_deepl_refuses(serve: Serve, fields: dict[str, object], status: int, said: str) -> None:
    answer = serve().post("/v2/translate", json=fields)
    assert answer.status_code == status
    assert said in answer.json()["message"]


@pytest.mark.parametrize("asked", ["quality_optimized", "prefer_quality_optimized", "latency_optimized", None])
def test_deepl_s_types_of_models(serve: Serve, asked: str | None) -> None:
    fields = {"text": ["a"], "source_lang": "EN", "target_lang": "DE", "formality": "default", "context": ""}
    given = fields if asked is None else {**fields, "model_type": asked}
    (told,) = serve().post("/v2/translate", json=given).json()["translations"]
    assert told.get("model_type_used") == (asked and asked.removeprefix("prefer_"))


CHAT = "/v1/chat/completions"


def events(streamed: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must announce its end."""
    *chunks, last = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_openai_s_choices(serve: Serve, wanted: list[str]) -> None:
    client = serve()
    asked = {"model": "en-de", "messages": [{"role": "user", "content": LINES[0]}]}
    for count in (1, 2, 3, 4):
        told = client.post(CHAT, json={**asked, "n": count}).json()
        assert [each["index"] for each in told["choices"]] == list(range(count))
        texts = [each["message"]["content"] for each in told["choices"]]
        assert count == 1 or len(set(texts)) > 1
        usage = told["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        streamed = events(client.post(CHAT, json={**asked, "n": count, "stream": True}).text)
        contents = [c["delta"]["content"] for e in streamed for c in e["choices"] if "content" in c["delta"]]
        assert contents == texts
        assert not any("usage" in each for each in streamed)
    assert client.post(CHAT, json={**asked, "n": None}).json()["choices"][0]["message"]["content"] == wanted[0]
    with_usage = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *first, last = events(client.post(CHAT, json=with_usage).text)
    assert [each["usage"] for each in first] == [None, None]
    assert (last["choices"], last["usage"]) == ([], client.post(CHAT, json=asked).json()["usage"])
    without = {**with_usage, "stream_options": {"include_usage": False}}
    assert not any("usage" in each for each in events(client.post(CHAT, json=without).text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/translate", {"q": LINES[0], "source": "en", "target": "de", "glossary": "{}", "secret": "s"}),
        ("/v2/translate", {"text": LINES[:1], "source_lang": "EN", "target_lang": "DE", "ignore_tag": "x", "ü\n": 1}),
        ("/detect", {"q": LINES[0], "hint": "en"}),
    ],
)
def test_fields_that_do_not_matter_are_named(serve: Serve, path: str, text: dict[str, Any]) -> None:
    client = serve()
    unknown = {"/translate": "glossary, secret", "/v2/translate": "ignore_tag, %C3%BC%0A", "/detect": "hint"}[path]
    answer = client.post(path, json=text)
    assert (answer.status_code, answer.headers["x-ziggurat-ignored"]) == (200, unknown)
    known = {name: text[name] for name in list(text)[: len(text) - unknown.count(",") - 1]}
    plain = client.post(path, json=known)
    assert (plain.json(), "x-ziggurat-ignored" in plain.headers) == (answer.json(), False)


UTF8 = "Für 漢字 ☕"


@pytest.mark.parametrize("path", ["/translate", "/v2/translate"])
def test_forms_and_queries_are_utf_8(serve: Serve, path: str) -> None:
    """This includes raw bytes, which curl's `-d` sends."""
    client = serve()
    deepl = path.startswith("/v2")
    name, more = ("text", "source_lang=EN&target_lang=EN") if deepl else ("q", "source=en&target=en")
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    def part(raw: bytes) -> dict[str, Any]:
        others = [each.split("=") for each in more.split("&")]
        fields = [(key, value.encode()) for key, value in others] + [(name, raw)]
        body = b"".join(
            b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (key.encode(), value)
            for key, value in fields
        )
        return {"content": body + b"--x--\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}

    def asked(raw: bytes) -> list[dict[str, Any]]:
        return [
            {"content": f"{more}&{name}=".encode() + raw, "headers": form},
            {"content": f"{more}&{name}=".encode() + b"".join(b"%%%02X" % byte for byte in raw), "headers": form},
            part(raw),
        ]

    for request in asked(UTF8.encode()):
        answer = client.post(path, **request).json()
        assert (answer["translations"][0]["text"] if deepl else answer["translatedText"]) == UTF8
    for raw in (b"\xff\xfe", b"a\xe4b", "Für".encode("utf-16"), b"\xed\xa0\x80", b"\xc3", b"\xc0\xaf"):
        for request in asked(raw):
            answer = client.post(path, **request)
            assert (answer.status_code, list(answer.json().values())) == (400, ["forms must be UTF-8"]), raw
        assert client.post(f"{path}?{more}&{name}={''.join(f'%{byte:02x}' for byte in raw)}").status_code == 400
    for charset in ("latin-1", '"utf-16"', "utf-7"):
        headers = {"Content-Type": f"application/x-www-form-urlencoded; charset={charset}"}
        assert client.post(path, content=f"{more}&{name}=a", headers=headers).status_code == 400
    headers = {"Content-Type": 'application/x-www-form-urlencoded; charset="UTF-8"'}
    assert client.post(path, content=f"{more}&{name}=a", headers=headers).status_code == 200


@pytest.mark.parametrize("mark", ["\ufeff", "\u200b", "\ufeff \u200b"])
def test_marks_without_width_at_the_ends_are_not_translated(serve: Serve, wanted: list[str], mark: str) -> None:
    client, pair = serve(), {"source": "en", "target": "de"}
    for given, best in ((f"{mark}{LINES[0]}", f"{mark}{wanted[0]}"), (f"{LINES[0]}{mark}", f"{wanted[0]}{mark}")):
        assert client.post("/translate", json={"q": given, **pair}).json()["translatedText"] == best
        marked = client.post("/translate", json={"q": f"<p>{given}</p>", "format": "html", **pair})
        assert marked.json()["translatedText"] == f"<p>{best}</p>"
    assert client.post("/translate", json={"q": mark, **pair}).json()["translatedText"] == mark


@pytest.mark.parametrize("given", [True, 2.7, [1], {}, "two", "1e3", "inf"])
def test_the_number_of_alternatives_is_an_integer(serve: Serve, given: object) -> None:
    answer = serve().post("/translate", json={"q": "a", "source": "en", "target": "de", "alternatives": given or [0]})
    assert (answer.status_code, "not a number" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (["The do", "g runs."], "The dog runs."),
        (["The dog", " runs."], "The dog runs."),
        (["The dog ", "runs. It", " barks."], "The dog runs. It barks."),
        (["A dog runs.", "It barks."], "A dog runs.\nIt barks."),
        (["A dog runs. ", "It barks."], "A dog runs. It barks."),
        (['"A dog runs."', '"Why?"'], '"A dog runs."\n"Why?"'),
        (["It costs 3.", "5 euros."], "It costs 3.5 euros."),
        (["A dog runs.\n", "", "It barks."], "A dog runs.\nIt barks."),
        (["犬が走る。", "吠える。"], "犬が走る。\n吠える。"),
        (["", ""], ""),
    ],
)
def test_parts_of_openai_s_messages_are_one_text(parts: list[str], text: str) -> None:
    assert _joined(parts) == text


def test_parts_of_a_message_are_translated_as_one(serve: Serve) -> None:
    def said(content: object) -> str:
        asked = {"model": "en-de", "messages": [{"role": "user", "content": content}]}
        return str(client.post(CHAT, json=asked).json()["choices"][0]["message"]["content"])

    client = serve()
    parts = [{"type": "text", "text": line} for line in LINES]
    assert said(parts) == said("\n".join(LINES)) == "\n".join(map(said, LINES))
    cut = [{"type": "text", "text": part} for part in (LINES[0][:7], LINES[0][7:])]
    assert said(cut) == said(LINES[0])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 0}, "`n`"),
        ({"n": 99}, "`n`"),
        ({"n": "2"}, "`n`"),
        ({"n": True}, "`n`"),
        ({"stream": "yes"}, "`stream`"),
        ({"stream_options": {"include_usage": True}}, "`stream_options`"),
        ({"stream": True, "stream_options": {"usage": True}}, "`stream_options.usage`"),
        ({"stream": True, "stream_options": True}, "`stream_options`"),
        ({"tools": [{"type": "function"}]}, "`tools`"),
        ({"response_format": {"type": "json_object"}}, "`response_format`"),
        ({"logprobs": True}, "`logprobs`"),
        ({"stop": ["."]}, "`stop`"),
        ({"modalities": ["audio"]}, "`modalities`"),
        ({"temperaturre": 0}, "`temperaturre`; did you mean `temperature`"),
        ({"guided_json": {}}, "`guided_json`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "`image_url`",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "need a text as `text`"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "need a text as `text`"),
        ({"temperature": "x"}, "`temperature`"),
        ({"temperature": 2.5}, "`temperature`"),
        ({"top_p": 7}, "`top_p`"),
        ({"max_tokens": -1}, "`max_tokens`"),
        ({"max_completion_tokens": 1.5}, "`max_completion_tokens`"),
        ({"seed": "3"}, "`seed`"),
        ({"presence_penalty": -3}, "`presence_penalty`"),
        ({"metadata": "x"}, "`metadata`"),
        ({"metadata": {"a": 1}}, "`metadata`"),
        ({"store": "yes"}, "`store`"),
        ({"user": 5}, "`user`"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "`messages`"),
    ],
)
def test_requests_that_openai_refuses(serve: Serve, fields: dict[str, object], named: str) -> None:
    answer = serve().post(CHAT, json={"model": "en-de", "messages": [{"role": "user", "content": "A dog"}], **fields})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_fields_that_openai_s_clients_always_send(serve: Serve, wanted: list[str]) -> None:
    asked = {
        **{"model": "en-de", "messages": [{"role": "user", "content": LINES[0]}], "temperature": 0.2, "top_p": 1},
        **{"max_tokens": 900, "user": "u", "seed": 3, "tools": [], "logprobs": False, "stop": None, "n": 1},
        **{"response_format": {"type": "text"}, "tool_choice": "none", "stream_options": None, "stream": False},
    }
    assert serve().post(CHAT, json=asked).json()["choices"][0]["message"]["content"] == wanted[0]


def test_openai(serve: Serve, wanted: list[str]) -> None:
    client = serve()
    asked = {"model": "en-de", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": LINES[0]}]}
    found = client.post("/v1/chat/completions", json=asked, headers={"Authorization": "Bearer k"}).json()
    assert found["choices"][0]["message"] == {"role": "assistant", "content": wanted[0]}
    assert (found["object"], found["model"], found["choices"][0]["finish_reason"]) == (
        "chat.completion",
        "en-de",
        "stop",
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": LINES[0]}]}]
    streamed = client.post("/v1/chat/completions", json={"model": "en-de", "messages": parts, "stream": True}).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == wanted[0]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["de-en", "en-de", "en-qlo"]
    one = client.get("/v1/models/en-de").json()
    assert (one["id"], one["object"], one["owned_by"]) == ("en-de", "model", "ziggurat")
    pivot = {"model": "de-qlo", "messages": [{"role": "user", "content": LINES[0]}]}
    assert client.post("/v1/chat/completions", json=pivot).status_code == 200
    for bad, status in (({**asked, "model": "gpt"}, 404), ({**asked, "messages": []}, 400), ({"messages": 3}, 400)):
        answer = client.post("/v1/chat/completions", json=bad)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_openai_s_model_names_the_translating_model(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    """With two models for a pair, other interfaces use the first; here each model has its name."""
    path = str(folders["en", "de"])
    models = [{"path": path, "name": "live"}, {"path": path, "name": "slow", "decoding": {"beam_size": 1}}]
    client = serve(models=[*models, {"path": str(folders["de", "en"])}])
    for name in ("slow", "live", "en-de"):
        asked = {"model": name, "messages": [{"role": "user", "content": LINES[0]}]}
        assert client.post("/v1/chat/completions", json=asked).json()["model"] == name
        found = {key: model["status"] for key, model in client.get("/health").json()["models"].items()}
        assert found == {"live": "cold" if name == "slow" else "ready", "slow": "ready", "de-en": "cold"}
    said = client.get("/metrics").text
    assert 'ziggurat_lines_total{model="slow"} 1.0' in said
    assert 'ziggurat_lines_total{model="live"} 2.0' in said


@pytest.mark.parametrize(
    ("method", "path", "status", "known"),
    [
        ("GET", "/v1/models/gpt", 404, "error"),
        ("GET", "/v1/nothing", 404, "error"),
        ("GET", "/v1", 404, "error"),
        ("PUT", "/v1/translate", 405, "error"),
        ("GET", "/v2/nothing", 404, "message"),
        ("POST", "/v2/", 404, "message"),
        ("DELETE", "/v2/translate", 405, "message"),
    ],
)
def test_unknown_paths(serve: Serve, method: str, path: str, status: int, known: str) -> None:
    """Errors have the format that the clients of each interface read."""
    answer = serve().request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    said = answer.json()[known]
    if known == "error":
        assert said.keys() == {"message", "type", "param", "code"}
        said = said["message"]
    assert len(said) > 10
    assert ("allow" in answer.headers) == (status == 405)


def test_keys_apply_everywhere(serve: Serve, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "a")
    client = serve(keys=str(tmp_path / "keys"))
    assert client.post("/v2/translate", json={"text": "a", "target_lang": "DE", "source_lang": "EN"}).status_code == 403
    assert client.get("/v2/usage").status_code == 403
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}x"}).status_code == 401
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
