"""LibreTranslate's interface: the requests of its clients, and the answers and errors that LibreTranslate gives."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Exported, Serve, write_model
from tests.vocabulary import SENTENCES
from ziggurat.cli import main
from ziggurat.serve.access import new_key
from ziggurat.serve.config import ModelConfigEntry, ServeConfig
from ziggurat.serve.pool import ModelSource
from ziggurat.serve.server import app_of
from ziggurat.system.errors import ConfigError
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator, load_translator

LINES = list(SENTENCES)
DE_EN = {"source": "de", "target": "en"}


@pytest.fixture(scope="module")
def german(folders: dict[tuple[str, str], Path]) -> Translator:
    return load_translator(folders["de", "en"])


def texts(translator: Translator, lines: list[str]) -> list[str]:
    return [translation.text for translation in translator.translate(lines)]


def test_a_text_comes_as_json_form_or_query(serve: Serve, german: Translator) -> None:
    client, wanted = serve(), {"translatedText": texts(german, [LINES[0]])[0]}
    fields = {"q": LINES[0], **DE_EN}
    assert client.post("/translate", json=fields).json() == wanted
    assert client.post("/translate", data=fields).json() == wanted
    assert client.post("/translate", params=fields).json() == wanted
    assert client.post("/translate", params=DE_EN, data={"q": LINES[0]}).json() == wanted
    assert client.post("/translate", files={"q": (None, LINES[0])}, data=DE_EN).json() == wanted


def test_a_list_gives_a_list_of_the_same_length(serve: Serve, german: Translator) -> None:
    client = serve()
    found = client.post("/translate", json={"q": [LINES[0], "", LINES[1], "🙂 42"], **DE_EN}).json()
    first, second = texts(german, LINES[:2])
    assert found == {"translatedText": [first, "", second, "🙂 42"]}


def test_alternatives_and_paragraphs(serve: Serve, german: Translator) -> None:
    client = serve()
    found = client.post("/translate", json={"q": LINES[0], "alternatives": 2, **DE_EN}).json()
    best = list(dict.fromkeys(h.text for h in german.translate([LINES[0]], n_best=3)[0].hypotheses))
    assert len(best) > 1  # otherwise the test would show nothing
    assert [found["translatedText"], *found["alternatives"]] == best
    many = client.post("/translate", json={"q": [LINES[0]], "alternatives": 2, **DE_EN}).json()
    assert (many["translatedText"], many["alternatives"]) == (best[:1], [best[1:]])
    text = f"  {LINES[0]}\n\n{LINES[1]} \t{LINES[0]}\r\n"
    found = client.post("/translate", json={"q": text, **DE_EN}).json()
    a, b = texts(german, LINES[:2])
    assert found["translatedText"] == f"  {a}\n\n{b} \t{a}\r\n"


def test_a_third_language_bridges_missing_models(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    client = serve()
    between = load_translator(folders["de", "en"]).translate([LINES[0]])[0].text
    wanted = load_translator(folders["en", "qlo"]).translate([between])[0].text
    assert client.post("/translate", json={"q": LINES[0], "source": "de", "target": "qlo"}).json() == {
        "translatedText": wanted
    }
    assert client.get("/languages").json() == [
        {"code": "de", "name": "German", "targets": ["de", "en", "qlo"]},
        {"code": "en", "name": "English", "targets": ["de", "en", "qlo"]},
        {"code": "qlo", "name": "Qlo", "targets": ["qlo"]},
    ]
    assert client.post("/languages").json() == client.get("/languages").json()
    assert client.post("/translate", json={"q": "x", "source": "en", "target": "en"}).json() == {"translatedText": "x"}


def test_the_language_is_detected(serve: Serve) -> None:
    client = serve()
    said = "Das Haus steht am Fluss, und der Hund schläft vor der Tür."
    found = client.post("/detect", data={"q": said}).json()
    assert found[0]["language"] == "de"
    assert found[0]["confidence"] > 90
    answer = client.post("/translate", json={"q": said, "source": "auto", "target": "en"}).json()
    assert answer["detectedLanguage"]["language"] == "de"
    answer = client.post("/translate", json={"q": [said, said], "source": "auto", "target": "en"}).json()
    assert [each["language"] for each in answer["detectedLanguage"]] == ["de", "de"]
    assert [each["confidence"] for each in client.post("/detect", json={"q": "17"}).json()] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"json": {"source": "de", "target": "en"}}, 400, "Invalid request: missing q parameter"),
        ({"json": {"q": "", **DE_EN}}, 400, "Invalid request: missing q parameter"),
        ({"json": {"q": "x", "target": "en"}}, 400, "Invalid request: missing source parameter"),
        ({"json": {"q": "x", "source": "de", "target": "zz"}}, 400, "zz is not supported"),
        ({"json": {"q": "x", "source": "zz", "target": "en"}}, 400, "zz is not supported"),
        (
            {"json": {"q": "x", "source": "qlo", "target": "de"}},
            400,
            "German (de) is not available as a target language from Qlo (qlo)",
        ),
        ({"json": {"q": ["a"] * 4, **DE_EN}}, 400, "Invalid request: request (4) exceeds text limit (3)"),
        ({"json": {"q": "a" * 300, **DE_EN}}, 400, "Invalid request: request (300) exceeds text limit (200)"),
        ({"json": {"q": "x", "format": "pdf", **DE_EN}}, 400, "pdf format is not supported"),
        (
            {"json": {"q": "x", "alternatives": 9, **DE_EN}},
            400,
            "Invalid request: alternatives parameter must be <= 3",
        ),
        ({"json": {"q": "x", "alternatives": {}, **DE_EN}}, 200, None),
        ({"json": {"q": "x", "alternatives": [1], **DE_EN}}, 400, "Invalid request: alternatives parameter is not"),
        ({"json": {"q": [1, None], **DE_EN}}, 400, "q parameter must be a text"),
        ({"json": {"q": {"a": 1}, **DE_EN}}, 400, "q parameter must be a text"),
        ({"content": b"{bad"}, 400, "The browser (or proxy) sent a request that this server could not understand."),
        ({"content": b"[1]"}, 400, "Invalid JSON format"),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, "could not understand"),
        ({"content": b'"' + b"\\ud800" + b'"'}, 400, "could not understand"),
        ({"content": b"[" * 1500}, 400, "could not understand"),
        ({"content": b"x" * 3000}, 413, "larger than 2,000 bytes"),
        ({"files": {"q": ("a" * 2000, b"x" * 3000)}}, 413, "larger than 2,000 bytes"),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, 400, ""),
        (
            {"content": b"--x--", "headers": {"content-type": "multipart/form-data; boundary=x; charset=undefined"}},
            400,
            "forms must be UTF-8",
        ),
    ],
)
def test_texts_that_cannot_be_translated_are_refused(
    serve: Serve, request_: dict[str, Any], status: int, said: str
) -> None:
    client = serve(limits={"characters": 200, "texts": 3, "body_bytes": 2000})
    answer = client.post("/translate", **request_)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert said in answer.json()["error"]
        assert set(answer.json()) == {"error"}


def test_other_paths(serve: Serve) -> None:
    client = serve()
    settings = client.get("/frontend/settings").json()
    assert settings["language"]["source"] == {"code": "de", "name": "German"}
    assert (settings["keyRequired"], settings["charLimit"]) == (False, 20_000)
    suggested = client.post("/suggest", data={"q": "a", "s": "b", **DE_EN})
    assert (suggested.status_code, suggested.json()["error"]) == (403, "Suggestions are disabled on this server.")
    assert client.get("/spec").json()["info"]["title"] == "LibreTranslate"
    wrong = client.get("/translate")
    assert (wrong.status_code, wrong.headers["content-type"]) == (405, "text/html; charset=utf-8")
    assert client.get("/nothing").status_code == 404
    answer = client.get("/languages", headers={"Origin": "https://example.org"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert len(answer.headers["x-request-id"]) == 32


def test_a_model_from_a_language_into_itself(serve: Serve, vocabularies: Path, tmp_path: Path) -> None:
    """Such a model may, for example, correct text. It offers no other target language, and the page knows that."""
    write_model(tmp_path, vocabularies, "de", "de", seed=4)
    client = serve(models=[{"path": str(tmp_path), "threads": 1}])
    german = {"code": "de", "name": "German"}
    assert client.get("/frontend/settings").json()["language"] == {"source": german, "target": german}
    assert client.get("/languages").json() == [{**german, "targets": ["de"]}]


def test_health_and_figures(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    client = serve(metrics_token="secret-token")
    assert client.get("/health").json()["models"]["de-en"] == {"status": "cold"}
    client.post("/translate", json={"q": LINES[0], **DE_EN})
    health = client.get("/health").json()
    version = ModelSource(ModelConfigEntry(path=str(folders["de", "en"]))).version()
    assert (health["status"], health["models"]["de-en"]) == ("ok", {"status": "ready", "version": version})
    assert client.get("/metrics").status_code == 401
    said = client.get("/metrics", headers={"Authorization": "Bearer secret-token"}).text
    assert 'ziggurat_requests_total{path="/translate",status="200"} 1.0' in said
    assert 'ziggurat_lines_total{model="de-en"} 1.0' in said
    assert 'ziggurat_waiting_lines{model="de-en"} 0.0' in said


def test_keys_and_limits(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path, "weblate")
    assert key not in path.read_text()
    client = serve(keys=str(path), limits={"requests_per_minute": 2, "characters_per_minute": 500})
    fields = {"q": LINES[0], **DE_EN}
    answers = [client.post("/translate", json={**fields, **more}) for more in ({}, {"api_key": "x"})]
    assert [a.status_code for a in answers] == [400, 403]
    assert answers[1].json() == {"error": "Invalid API key"}
    answers = [client.post("/translate", json={**fields, "api_key": key}) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert client.post("/translate", json={"q": "a" * 501, "api_key": key, **DE_EN}).status_code == 413
    assert answers[2].json()["error"].startswith("Slowdown:")
    assert "retry-after" in answers[2].headers


def test_an_exported_model_is_served(serve: Serve, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    served = exported("de", "en")
    client, alone = serve(models=[{"path": str(served), "threads": 1}]), CTranslate2Translator(served)
    found = client.post("/translate", json={"q": LINES, **DE_EN}).json()["translatedText"]
    whole = [number for number, line in enumerate(LINES) if line.count(".") + line.count("?") < 2]
    expected = [translation.text for translation in alone.translate([LINES[number] for number in whole])]
    assert [found[number] for number in whole] == expected
    aligned, translate = [], CTranslate2Translator.translate

    def noted(translator: CTranslate2Translator, *texts: Any, **options: Any) -> list[Translation]:
        results = translate(translator, *texts, **options)
        aligned.extend(result.hypotheses[0].alignment for result in results)
        return results

    monkeypatch.setattr(CTranslate2Translator, "translate", noted)
    marked = client.post("/translate", json={"q": "<p>A <b>dog</b> runs.</p>", "format": "html", **DE_EN})
    assert aligned
    assert None not in aligned  # they determine where tags go
    monkeypatch.undo()
    assert re.findall("<[^>]*>", marked.json()["translatedText"]) == ["<p>", "<b>", "</b>", "</p>"]
    best = [h.text for h in alone.translate([LINES[0]], n_best=3)[0].hypotheses]
    answer = client.post("/translate", json={"q": LINES[0], "alternatives": 2, **DE_EN}).json()
    assert [answer["translatedText"], *answer["alternatives"]] == list(dict.fromkeys(best))


@pytest.mark.parametrize(
    ("decoding", "served", "said"),
    [
        ({"beam_sise": 9}, False, "unknown key `decoding.beam_sise`; did you mean `decoding.beam_size`"),
        ({"beam_size": 99_999}, False, "decoding.beam_size"),
        ({"search": "sample"}, True, "decoding.search: sample"),
        ({"precision": "int8"}, True, "decoding.precision: int8"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused_before_the_port_is_open(
    folders: dict[tuple[str, str], Path], exported: Exported, decoding: dict[str, Any], served: bool, said: str
) -> None:
    path = exported("de", "en") if served else folders["de", "en"]
    config = ServeConfig.model_validate({"models": [{"path": str(path), "decoding": decoding}]})
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*{re.escape(said)}"):
        app_of(config, lambda text: None)


def test_mistakes_of_the_command_and_its_file_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "serve.yaml").write_text("port: 0\nlimits:\n  character: 10\n", encoding="utf-8")
    for arguments, said in (
        (["--config", str(file)], f"{file}, line 3: unknown key `limits.character`; did you mean `limits.characters`"),
        (["run", "--metrics", "short"], "`metrics_token`: string should have at least 8 characters"),
        (["run", "--keys", "no/such/file"], "no/such/file"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["serve", *arguments])
        assert stop.value.code == 2
        assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("typed", "differs"),
    [
        (["--threads", "2"], {"threads": 2}),
        (["--device", "auto"], {"device": "auto"}),
        (
            ["beam_size=1", "length_penalty.alpha=0.2"],
            {"decoding": {"beam_size": 1, "min_length": 0, "length_penalty": {"kind": "gnmt", "alpha": 0.2}}},
        ),
    ],
)
def test_options_replace_only_their_own_settings(
    typed: list[str], differs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = {"min_length": 0, "length_penalty": {"kind": "gnmt", "alpha": 1.0}}
    entry = {"path": "a", "threads": 1, "device": "cuda:1", "decoding": decoding}
    (file := tmp_path / "serve.yaml").write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    found: list[ServeConfig] = []
    monkeypatch.setattr("ziggurat.serve.server.run_server", lambda config, say: found.append(config))
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file), *typed])
    assert found[0].models == [ModelConfigEntry.model_validate({**entry, **differs})]


def test_a_text_in_the_target_language_comes_back(serve: Serve) -> None:
    client, said = serve(), "Das Haus steht am Fluss, und der Hund schläft vor der Tür."
    answer = client.post("/translate", json={"q": said, "source": "auto", "target": "de"}).json()
    assert (answer["translatedText"], answer["detectedLanguage"]["language"]) == (said, "de")


def test_a_language_that_no_model_writes_is_refused(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    client = serve(models=[{"path": str(folders["de", "en"])}])
    answer = client.post("/translate", json={"q": "Hund", "source": "auto", "target": "de"})
    assert (answer.status_code, answer.json()["error"]) == (400, "no model translates into de")
    assert client.post("/v2/translate", json={"text": "Hund", "target_lang": "DE"}).status_code == 400


def test_tags_survive_two_models(serve: Serve) -> None:
    marked = {"q": "<p>A <b>dog</b> runs.</p>", "source": "de", "target": "qlo", "format": "html"}
    found = serve().post("/translate", json=marked).json()["translatedText"]
    assert re.findall("<[^>]*>", found) == ["<p>", "<b>", "</b>", "</p>"]


def test_no_client_waits_past_the_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    opening = ModelSource.open
    monkeypatch.setattr(ModelSource, "open", lambda self: (gate.wait(30), opening(self))[1])
    client = serve(limits={"seconds": 0.2})
    answer = client.post("/translate", json={"q": LINES[0], **DE_EN})
    gate.set()
    assert (answer.status_code, answer.json()) == (504, {"error": "the deadline passed"})


@pytest.mark.slow
def test_every_request_gets_its_own_answer(serve: Serve, german: Translator) -> None:
    client = serve()
    wanted = [f"The dog number {n} runs" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: client.post("/translate", json={"q": text, **DE_EN}).json(), wanted))
    assert [answer["translatedText"] for answer in answers] == texts(german, wanted)


@pytest.mark.parametrize(
    "path", ["//translate", "///translate", "//translate?q=x", "/v1//chat/completions", "//v1/models"]
)
def test_a_base_address_may_end_in_a_slash(serve: Serve, path: str) -> None:
    client = serve()
    asked = {"q": "A dog", "source": "en", "target": "de"}
    if "translate" in path:
        said = client.post("/translate", json=asked).json()
        assert client.post(f"http://testserver{path}", json=asked).json() == said
    else:
        assert client.get(f"http://testserver{path}").status_code == client.get(path.replace("//", "/")).status_code
    assert client.get("http://testserver//nothing").status_code == 404


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_may_begin_with_a_byte_order_mark(serve: Serve, encoding: str) -> None:
    client, asked = serve(), {"q": "A dög", "source": "en", "target": "de"}
    for headers in ({"content-type": "application/json"}, {}):
        body = json.dumps(asked, ensure_ascii=False).encode(encoding)
        assert (
            client.post("/translate", content=body, headers=headers).json()
            == client.post("/translate", json=asked).json()
        )
    assert client.post("/translate", content=b"\xff\xfe{").status_code == 400
