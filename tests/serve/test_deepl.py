"""DeepL's glossaries, documents and settings, requested as its client libraries do."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import Exported, Serve
from tests.vocabulary import SENTENCES
from ziggurat.serve import glossaries as glossaries_module
from ziggurat.serve.access import new_key
from ziggurat.serve.glossaries import Glossaries, read_entries
from ziggurat.serve.interfaces.deepl import REFUSED, DeepL, _xml_rules
from ziggurat.serve.requests import Refused
from ziggurat.serve.text.markup import xml, xml_tokens
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.errors import ConfigError
from ziggurat.translate.translator import load_translator

EN_DE = {"source_lang": "EN", "target_lang": "DE"}


def translated(client: TestClient, **fields: Any) -> str:
    answer = client.post("/v2/translate", json={**EN_DE, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["translations"][0]["text"])


def create_glossary(client: TestClient, entries: str, kind: str = "tsv", **fields: Any) -> Any:
    given = {"name": "n", "entries": entries, "entries_format": kind, **EN_DE, **fields}
    return client.post("/v2/glossaries", json=given)


def test_glossaries(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "glossaries.json"
    client = serve(glossaries=str(file))
    answer = create_glossary(client, "dog\tHund\nbig house\tSchloss")
    assert answer.status_code == 201
    told = answer.json()
    assert (told["name"], told["ready"], told["entry_count"]) == ("n", True, 2)
    assert (told["source_lang"], told["target_lang"]) == ("en", "de")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", told["creation_time"])
    csv = create_glossary(client, 'a,"b, c"\r\nd,e,en,de\r\n', "csv").json()
    path = f"/v2/glossaries/{csv['glossary_id']}"
    entries = client.get(f"{path}/entries", headers={"Accept": "text/tab-separated-values"})
    assert entries.text == "a\tb, c\nd\te"
    assert client.get("/v2/glossaries").json() == {"glossaries": [told, csv]}
    again = serve(glossaries=str(file))  # for example another process
    assert again.get("/v2/glossaries").json() == {"glossaries": [told, csv]}
    assert again.delete(path).status_code == 204
    assert again.get(path).status_code == 404
    assert [each["id"] for each in json.loads(file.read_text())["glossaries"]] == [told["glossary_id"]]
    pairs = client.get("/v2/glossary-language-pairs").json()["supported_languages"]
    assert {"source_lang": "en", "target_lang": "de"} in pairs


@pytest.mark.slow
def test_a_glossary_is_used(serve: Serve, folders: dict[tuple[str, str], Path], exported: Exported) -> None:
    client = serve()
    text, target = SENTENCES[0], "Haus"
    free = translated(client, text=text)
    translator = load_translator(folders["en", "de"])
    # One term costs 6 nats per token, the other 20: the bound is 10.
    for wanted, applied in (("the", 1), ("Haus", 0)):
        assert wanted not in free
        (own,) = client.post(
            "/v1/translate", json={"text": text, "source": "en", "target": "de", "glossary": {"little": wanted}}
        ).json()["translations"]
        told = own["glossary"][0]
        assert (told["found"], told["applied"], told["dropped"]) == (1, applied, 1 - applied)
        searched = translator.translate([text], constraints=[[wanted]], endings="candidates", beam_size=4)[0].text
        name = create_glossary(client, f"little\t{wanted}").json()["glossary_id"]
        found = translated(client, text=text, glossary_id=name)
        assert found == own["text"] == (searched if applied else free)
        assert (wanted in found) == bool(applied)
    other = client.post(
        "/v2/translate", json={"text": text, "source_lang": "DE", "target_lang": "EN", "glossary_id": name}
    )
    assert other.status_code == 400
    client = serve(models=[{"path": str(exported("en", "de")), "threads": 1}])
    name = create_glossary(client, f"{text.split()[0]}\t{target}").json()["glossary_id"]
    assert target in translated(client, text=text, glossary_id=name)  # here the term is hard
    own = {"text": text, "source": "en", "target": "de", "glossary": {text.split()[0]: target}}
    answer = client.post("/v1/translate", json=own)
    assert (answer.status_code, "mode: hard" in answer.json()["error"]["message"]) == (400, True)
    answer = client.post("/v1/translate", json={"text": text, "source": "en", "target": "de", "prefix": "Hund"})
    assert answer.json()["translations"][0]["text"].startswith("Hund")
    answer = client.post("/v1/translate", json={"text": text, "source": "en", "target": "de", "scores": True})
    assert len(answer.json()["translations"][0]["sentences"][0]["tokens"]) > 3


def test_glossaries_belong_to_keys(serve: Serve, tmp_path: Path) -> None:
    keys = [{"Authorization": f"DeepL-Auth-Key {new_key(tmp_path / 'keys', name)}"} for name in "ab"]
    client = serve(keys=str(tmp_path / "keys"))
    given = {"name": "n", "entries": "a\tb", "entries_format": "tsv", **EN_DE}
    assert client.post("/v2/glossaries", json=given).status_code == 403
    name = client.post("/v2/glossaries", json=given, headers=keys[0]).json()["glossary_id"]
    assert client.get(f"/v2/glossaries/{name}", headers=keys[0]).status_code == 200
    for method, path in (("GET", ""), ("GET", "/entries"), ("DELETE", "")):
        assert client.request(method, f"/v2/glossaries/{name}{path}", headers=keys[1]).status_code == 404
    assert client.get("/v2/glossaries", headers=keys[1]).json() == {"glossaries": []}
    used = client.post("/v2/translate", json={"text": "a", "glossary_id": name, **EN_DE}, headers=keys[1])
    assert used.status_code == 404


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "'name'"),
        ({"entries": " "}, "'entries'"),
        ({"entries": "a\tb\tc"}, "entry 1 has 3 columns"),
        ({"entries": "a\t "}, "empty"),
        ({"entries": "a\tb\na\tc"}, "twice"),
        ({"entries": 'a,"b', "entries_format": "csv"}, "Invalid glossary entries"),
        ({"entries": "a,b,en,fr", "entries_format": "csv"}, "entry 1 is in other languages: en-fr"),
        ({"entries": "a,b,en,de\nc,d,DE,EN", "entries_format": "csv"}, "entry 2 is in other languages: DE-EN"),
        ({"entries": "source,target,source_lang,target_lang\na,b,en,de", "entries_format": "csv"}, "other languages"),
        ({"entries": "\u200b\tx"}, "empty"),
        ({"entries": "a\t\u2060"}, "empty"),
        ({"entries": "\ufeff"}, "0, not 1 to"),
        ({"entries": "a\x0bc\tb"}, "several lines"),
        ({"entries": "a\tb\u2028c\td"}, "3 columns"),
        ({"entries": "a\u0085\tb\x1cc"}, "several lines"),
        ({"target_lang": "EN"}, "two languages"),
        ({"entries_format": "xls"}, "'entries_format' not supported"),
        ({"target_lang": "XX"}, "'target_lang' not supported"),
        ({"source_lang": ""}, "'source_lang' not specified"),
        ({"source_lang": "QLO", "target_lang": "DE"}, "'source_lang' not supported"),
    ],
)
def test_invalid_glossaries(serve: Serve, fields: dict[str, str], said: str) -> None:
    answer = create_glossary(serve(), **{"entries": "a\tb", **fields})
    assert (answer.status_code, said in answer.json()["message"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        ("\ufeffdog\tHund", "tsv"),
        ("dog\tHund\r\n\r\n", "tsv"),
        ("\rdog\tHund\r", "tsv"),
        ("\ufeffdog,Hund\r\n", "csv"),
        ('\ufeff"dog","Hund",EN,DE', "csv"),
        ("dog,Hund, en-US , de_AT ", "csv"),
    ],
)
def test_glossary_files_are_read_as_intended(entries: str, kind: str) -> None:
    assert read_entries(entries, kind, ("en", "de")) == [("dog", "Hund")]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("PT", "pt-BR"),
        ("PT-BR", "pt-BR"),
        ("PT-PT", None),
        ("ZH", None),
        ("ZH-HANS", "zh_Hans"),
        ("EN-US", "en"),
        ("EN", "en"),
        ("DEU", None),
        ("DE", "de-AT"),
        ("SR-LATN", "sr-Latn-RS"),
    ],
)
def test_regions_do_not_matter_where_no_model_has_them(given: str, code: str | None) -> None:
    pairs = [("en", "pt-BR"), ("en", "zh_Hans"), ("en", "zh_Hant"), ("de-AT", "en"), ("en", "sr-Latn-RS")]
    server: Any = SimpleNamespace(pool=SimpleNamespace(pairs=pairs))
    deepl = DeepL(server, Glossaries())
    if code is None:
        with pytest.raises(Refused, match="'target_lang' not supported"):
            deepl.code(given, "target_lang")
    else:
        assert deepl.code(given, "target_lang") == code


def test_glossaries_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(glossaries_module, "MOST_GLOSSARIES", 2)
    kept = Glossaries(tmp_path / "g.json")
    for number in range(2):
        kept.add("a", str(number), "en", "de", [("x", "y")])
    with pytest.raises(Refused, match="at most 2"):
        kept.add("a", "2", "en", "de", [("x", "y")])
    monkeypatch.setattr(glossaries_module, "MAX_BYTES", 600)
    before = (tmp_path / "g.json").read_bytes()
    with pytest.raises(Refused, match="no room"):
        kept.add("b", "2", "en", "de", [("x", "y" * 200)])
    assert (tmp_path / "g.json").read_bytes() == before
    assert kept.of("b") == []
    with pytest.raises(Refused, match="no room"):  # glossaries kept only in memory take space, too
        Glossaries().add("b", "2", "en", "de", [(str(n), "y" * 100) for n in range(6)])
    with pytest.raises(Refused, match="not 1 to"):
        read_entries("a\tb\n" * (glossaries_module.MOST_ENTRIES + 1), "tsv", ("en", "de"))
    (tmp_path / "g.json").write_text('{"glossaries": [{}]}')
    with pytest.raises(ConfigError, match=r"g\.json"):
        Glossaries(tmp_path / "g.json")


def test_glossaries_are_listed_while_others_arrive() -> None:
    class Slow(dict[str, Any]):
        """A second glossary arrives while the first one is read, unless it has to wait."""

        def values(self) -> Any:
            for value in super().values():
                if not adding.ident:
                    adding.start()
                    adding.join(0.1)
                yield value

    kept = Glossaries()
    for name in "ab":
        kept.add("me", name, "en", "de", [("x", "y")])
    adding = threading.Thread(target=kept.add, args=("me", "c", "en", "de", [("x", "y")]))
    kept._known = Slow(kept._known)
    assert [each.name for each in kept.of("me")] == ["a", "b"]
    adding.join(10)
    assert [each.name for each in kept.of("me")] == ["a", "b", "c"]


@pytest.mark.slow
def test_documents(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    client = serve()
    answer = client.post("/v2/document", files={"file": ("a.txt", SENTENCES[0].encode())}, data=EN_DE).json()
    path, key = f"/v2/document/{answer['document_id']}", {"document_key": answer["document_key"]}
    end = time.monotonic() + 30
    while (told := client.post(path, json=key).json())["status"] not in ("done", "error"):
        assert told["status"] in ("queued", "translating")
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (told["status"], told["billed_characters"]) == ("done", len(SENTENCES[0]))
    wanted = load_translator(folders["en", "de"]).translate([SENTENCES[0]])[0].text
    assert client.post(f"{path}/result", data=key).text == wanted
    for wrong in ({}, {"document_key": "x"}, {"document_key": "é"}):
        assert client.post(path, json=wrong).status_code == 404
        assert client.post(f"{path}/result", json=wrong).status_code == 404
    bad = client.post("/v2/document", files={"file": ("a.exe", b"a")}, data=EN_DE)
    assert (bad.status_code, bad.json()) == (400, {"message": "Invalid file data."})
    pdf = client.post("/v2/document", files={"file": ("a.txt", b"a")}, data={**EN_DE, "output_format": "pdf"})
    assert pdf.status_code == 400
    for name in (field.name for field in REFUSED):
        refused = client.post("/v2/document", files={"file": ("a.txt", b"a")}, data={**EN_DE, name: "x"})
        assert (refused.status_code, refused.json()) == (400, {"message": f"Value for '{name}' not supported."})


def asked(text: str, **settings: Any) -> tuple[list[str], str]:
    """The sentences into which XML is split, and its translation into capitals."""
    seen: list[str] = []

    def upper(sentences: list[str]) -> list[SentenceTranslation]:
        seen.extend(sentences)
        return [SentenceTranslation(sentence.upper()) for sentence in sentences]

    named = [frozenset(settings.pop(name, ())) for name in ("ignored", "splitting", "non_splitting")]
    rules = _xml_rules([xml_tokens(text)], *named, outline=settings.pop("outline", True))
    return seen, run(xml(text, Options(sentencex_splitter("en"), aligned=False), rules), upper).value


def test_xml_is_split_by_its_structure() -> None:
    text = "<doc><p>One <b>dog</b></p><p>Two cats</p></doc>"
    assert asked(text) == (["One", "dog", "Two cats"], "<doc><p>ONE <b>DOG</b></p><p>TWO CATS</p></doc>")
    rules = _xml_rules([xml_tokens(text)], frozenset(), frozenset(), frozenset(), outline=True)
    assert (rules.inline, rules.xml) == ({"b"}, True)
    flat = _xml_rules([xml_tokens(text)], frozenset(), frozenset({"p"}), frozenset(), outline=False)
    assert flat.inline == {"b", "doc"}
    kept = _xml_rules([xml_tokens(text)], frozenset({"i"}), frozenset({"b"}), frozenset({"p"}), outline=True)
    assert (kept.inline, kept.copied) == ({"p", "i"}, {"i"})
    assert asked("A <i>b c</i> d", ignored=["i"])[1] == "A <i>b c</i> D"
    assert asked("a &amp; <x/> b")[1] == "A &amp; <x/> B"
    assert asked("") == ([], "")


@pytest.mark.slow
def test_sentences_are_split_as_asked(serve: Serve, folders: dict[tuple[str, str], Path]) -> None:
    client, translator = serve(), load_translator(folders["en", "de"])
    one, two = SENTENCES[0], SENTENCES[1]
    parts = [each.text for each in translator.translate([one, two])]
    whole = translator.translate([f"{one} {two}"])[0].text
    assert whole != " ".join(parts)
    assert translated(client, text=f"{one} {two}") == " ".join(parts)
    assert translated(client, text=f"{one} {two}", split_sentences="0") == whole
    broken = one.replace(" ", "\n", 1)
    assert translated(client, text=broken, split_sentences="nonewlines") == translator.translate([broken])[0].text
    halves = [each.text for each in translator.translate(broken.split("\n"))]
    assert translated(client, text=broken) == translated(client, text=broken, split_sentences="1") == "\n".join(halves)


def test_fields_without_effect(serve: Serve) -> None:
    client = serve()
    plain = translated(client, text=SENTENCES[0])
    more = {"preserve_formatting": True, "formality": "prefer_less", "model_type": "quality_optimized",
            "show_billed_characters": False, "tag_handling_version": "v2",
            "context": "A letter about dogs."}  # fmt: skip
    assert translated(client, text=SENTENCES[0], **more) == plain
