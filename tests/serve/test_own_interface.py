"""The server's own interface: everything it reports besides the translation agrees with the translators themselves."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import Exported, Serve
from tests.vocabulary import SENTENCES
from ziggurat.data.shortlist import ShortlistTable, _fingerprint, write_shortlist
from ziggurat.data.subword import load_tokenizers
from ziggurat.serve.notices import notice_text
from ziggurat.serve.text.alignment import rendered
from ziggurat.serve.text.paragraphs import aligned_text
from ziggurat.serve.text.sentences import Options, SentenceTranslation, run
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.text_lines import begins_word, first_word
from ziggurat.translate.translator import Translator, load_translator

LINES = [SENTENCES[0], SENTENCES[1]]
DE_EN = {"source": "de", "target": "en"}


@pytest.fixture(scope="module")
def german(folders: dict[tuple[str, str], Path]) -> Translator:
    return load_translator(folders["de", "en"])


def one(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["translations"]
    return dict(found)


def test_settings(serve: Serve, tmp_path: Path) -> None:
    found = serve(limits={"characters": 200}).get("/v1/settings").json()
    assert found["limits"]["characters"] == 200
    assert {"code": "en", "name": "English", "targets": ["de", "qlo"]} in found["languages"]
    assert {"code": "qlo", "name": "Qlo", "targets": []} in found["languages"]
    assert (found["key_required"], found["detection"]) == (False, True)
    pairs = {(each.pop("source"), each.pop("target")): each for each in found["pairs"]}
    assert pairs == {
        ("de", "en"): {"models": ["de-en"], "soft_terms": True, "prefixes": True},
        ("de", "qlo"): {"models": ["de-en", "en-qlo"], "soft_terms": True, "prefixes": False},
        ("en", "de"): {"models": ["en-de"], "soft_terms": True, "prefixes": True},
        ("en", "qlo"): {"models": ["en-qlo"], "soft_terms": True, "prefixes": True},
    }


def test_settings_show_what_models_cannot_do(
    serve: Serve, folders: dict[tuple[str, str], Path], exported: Exported, tmp_path: Path
) -> None:
    """They equal what the translators themselves return."""
    shortlist = str(tmp_path / "shortlist")
    source, target = load_tokenizers(folders["de", "en"])
    candidates = np.tile(np.arange(target.size, dtype=np.int32), (source.size, 1))
    names = _fingerprint(source), _fingerprint(target)
    write_shortlist(tmp_path / "shortlist", ShortlistTable(candidates, np.arange(4, dtype=np.int32), names))
    models = [
        {"path": str(exported("en", "de")), "threads": 1},
        {"path": str(folders["de", "en"]), "decoding": {"shortlist": shortlist}, "threads": 1},
    ]
    client = serve(models=models)
    pairs = {(each["source"], each["target"]): each for each in client.get("/v1/settings").json()["pairs"]}
    assert [(pairs[pair]["soft_terms"], pairs[pair]["prefixes"]) for pair in (("en", "de"), ("de", "en"))] == [
        (False, True),
        (False, False),
    ]
    for pair, told in pairs.items():
        asked = {"text": LINES[0], "source": pair[0], "target": pair[1]}
        term = {"source": "dog", "target": "Hund"}
        soft = {"glossary": [{**term, "mode": "soft"}]}
        for more, offered in ((soft, "soft_terms"), ({"prefix": "ein"}, "prefixes")):
            answer = client.post("/v1/translate", json={**asked, **more})
            assert (answer.status_code == 200) == told[offered], answer.text
        # A term without a mode gets one that the model supports, and the answer reports it.
        for short in ({"dog": "Hund"}, [term]):
            found = one(client.post("/v1/translate", json={**asked, "glossary": short}))
            assert found["glossary"][0]["mode"] == ("soft" if told["soft_terms"] else "hard")
    form = {"source": "en", "target": "de", "glossary": '{"dog": "XQZ"}'}
    name = client.post("/v1/documents", files={"file": ("f.txt", b"The dog runs.")}, data=form).json()["id"]
    end = time.monotonic() + 30
    while (state := client.get(f"/v1/documents/{name}").json())["status"] != "done":
        assert time.monotonic() < end, state
    assert [(each["mode"], each["applied"]) for each in state["glossary"]] == [("hard", 1)]


def test_n_best_and_scores_are_the_translators(serve: Serve, german: Translator) -> None:
    text = f"  {LINES[0]}\n{LINES[1]}"
    asked = {"text": text, "alternatives": 2, "scores": True, **DE_EN}
    found = one(serve().post("/v1/translate", json=asked))
    expected = german.translate(LINES, n_best=3)
    assert found["text"] == f"  {expected[0].text}\n{expected[1].text}"
    assert len(found["sentences"]) == 2
    for sentence, translation, line in zip(found["sentences"], expected, LINES, strict=True):
        best = translation.hypotheses[0]
        assert text[slice(*sentence["source"])] == line
        assert found["text"][slice(*sentence["target"])] == best.text
        assert sentence["score"] == pytest.approx(best.score, abs=1e-4)
        others = [h for h in translation.hypotheses[1:] if h.text != best.text]
        assert [each["text"] for each in sentence["alternatives"]] == list(dict.fromkeys(h.text for h in others))
        scores = {h.text: h.score for h in reversed(others)}
        for other in sentence["alternatives"]:
            assert other["score"] == pytest.approx(scores[other["text"]], abs=1e-4)
        assert sum(len(each["alternatives"]) for each in found["sentences"]) > 0
        assert len(sentence["tokens"]) == len(best.tokens)
        for token, piece, score in zip(sentence["tokens"], best.tokens, best.token_log_probabilities, strict=False):
            said = found["text"][slice(*token["target"])]
            assert said.lower() == piece.replace("\u2581", "").lower() or piece.startswith("<0x")
            assert token["score"] == pytest.approx(score, abs=1e-4)


NOTICED = [f"<bt> {LINES[0]} {LINES[1]}", "See https://example.org now.", "The {0} dog.", "17"]


def test_notices_are_those_of_the_command_line(serve: Serve, german: Translator) -> None:
    """In every interface the counts equal those of the translator, and those of the same work on the same texts."""
    client, header = serve(), "X-Ziggurat-Notices"

    for aligned in (True, False):
        every: Counter[str] = Counter()

        def translate(sentences: list[str], aligned: bool = aligned) -> list[SentenceTranslation]:
            return list(map(rendered, german.translate(sentences, alignments=aligned)))

        for text in NOTICED:
            german.notices.clear()
            with warnings.catch_warnings(action="ignore"):
                outcome = run(aligned_text(text, Options(sentencex_splitter("de"))), translate)
            wanted = +(outcome.notices + Counter(german.notices))
            every += wanted
            found = one(client.post("/v1/translate", json={"text": text, "alignments": aligned, **DE_EN}))
            assert {each["kind"]: each["count"] for each in found.get("notices", [])} == wanted, text
            assert all(each["text"] == notice_text(each["kind"], each["count"]) for each in found.get("notices", []))
        assert every.keys() >= {"tag_as_text", "protected_again"}
    german.notices.clear()
    with warnings.catch_warnings(action="ignore"):
        german.translate([LINES[0]], prefixes=["the dog"])
    found = one(client.post("/v1/translate", json={"text": LINES[0], "prefix": "the dog", **DE_EN}))
    assert {each["kind"]: each["count"] for each in found["notices"]} == +german.notices == {"unfinished": 1}

    in_header = ", ".join(f"{kind}={count}" for kind, count in sorted(every.items()))
    in_languages = {"source_lang": "de", "target_lang": "en"}
    for path, asked in (
        ("/translate", {"q": NOTICED, **DE_EN}),
        ("/v2/translate", {"text": NOTICED, **in_languages}),
        ("/translate", {"q": "17", **DE_EN}),
    ):
        answer = client.post(path, json=asked)
        assert answer.headers.get(header) == (in_header if asked.get("q") != "17" else None)
    messages = [{"role": "user", "content": NOTICED[1]}]
    for more in ({}, {"stream": True}):
        answer = client.post("/v1/chat/completions", json={"model": "de-en", "messages": messages, **more})
        assert "protected_again=1" in answer.headers[header]


def test_notices_of_a_document_are_in_its_state_and_in_a_header(serve: Serve) -> None:
    client = serve()
    captions = (
        b"1\n00:00:01,000 --> 00:00:02\nA dog.\n\n2\n00:00:0x,000 --> 00:00:05,000\nSee https://example.org now.\n"
    )
    name = client.post("/v1/documents", files={"file": ("f.srt", captions)}, data=DE_EN).json()["id"]
    end = time.monotonic() + 30
    while (state := client.get(f"/v1/documents/{name}").json())["status"] != "done":
        assert time.monotonic() < end, state
    told = {each["kind"]: each for each in state["notices"]}
    assert told["times_unread"]["place"] == "line 6"
    assert told["times_unread"]["text"] == notice_text("times_unread", 1, "line 6")
    in_header = ", ".join(f"{kind}={each['count']}" for kind, each in sorted(told.items()))
    assert client.get(f"/v1/documents/{name}/file").headers["X-Ziggurat-Notices"] == in_header
    file = client.post("/translate_file", files={"file": ("f.srt", captions)}, data=DE_EN).json()["translatedFileUrl"]
    assert client.get(file).headers["X-Ziggurat-Notices"] == in_header


def test_links_are_between_words(serve: Serve) -> None:
    text = "The dog runs.  A dog barks at {0}."
    found = one(serve().post("/v1/translate", json={"text": text, "alignments": True, "source": "en", "target": "de"}))
    links = [link for sentence in found["sentences"] for link in sentence["links"]]
    assert links
    for source_start, source_end, start, end in links:
        for whole, a, b in ((text, source_start, source_end), (found["text"], start, end)):
            assert whole[a:b].strip() == whole[a:b] != ""
            assert a == 0 or not (whole[a - 1].isalnum() and whole[a].isalnum())
            assert b == len(whole) or not (whole[b - 1].isalnum() and whole[b].isalnum())
    for sentence in found["sentences"]:
        assert all(sentence["source"][0] <= link[0] < sentence["source"][1] for link in sentence["links"])
        assert all(sentence["target"][0] <= link[2] < sentence["target"][1] for link in sentence["links"])


def test_an_address_is_linked_to_itself(serve: Serve) -> None:
    text, address = "See https://example.org/a.b?c=d now.", "https://example.org/a.b?c=d"
    found = one(serve().post("/v1/translate", json={"text": text, "alignments": True, "source": "en", "target": "de"}))
    at, there = text.index(address), found["text"].index(address)
    own = [link for link in found["sentences"][0]["links"] if at <= link[0] < at + len(address)]
    assert own == [[at, at + len(address), there, there + len(address)]]


def test_an_exported_model_reports_the_same(
    serve: Serve, folders: dict[tuple[str, str], Path], exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"text": LINES[0], "alignments": True, "scores": True, **DE_EN}
    alike = {"endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}, "min_length": 0}
    models = [{"path": str(folders["de", "en"]), "decoding": alike}]
    ours = one(serve(models=models).post("/v1/translate", json=asked))
    models = [{"path": str(exported("de", "en")), "threads": 1, "decoding": alike}]
    found = one(serve(models=models).post("/v1/translate", json=asked))
    assert found["text"] == ours["text"]
    mine, its = ours["sentences"][0], found["sentences"][0]
    assert its["links"] == mine["links"]
    for a, b in zip(mine["tokens"], its["tokens"], strict=True):
        assert (a["target"], a["score"]) == (b["target"], pytest.approx(b["score"], abs=1e-3))


def test_translations_begin_with_the_prefix(serve: Serve, german: Translator) -> None:
    client = serve()
    wanted = german.translate([LINES[0]], prefixes=["the dog"])[0].text
    found = one(client.post("/v1/translate", json={"text": LINES[0], "prefix": "the dog", **DE_EN}))
    assert found["text"] == wanted
    assert wanted.startswith("the dog")
    for text in ("Ein Hund. Ein Haus.", "Ein Hund. Ein Hund."):
        two = client.post("/v1/translate", json={"text": text, "prefix": "a", **DE_EN})
        assert (two.status_code, "one sentence" in two.json()["error"]["message"]) == (400, True)
    pivot = client.post("/v1/translate", json={"text": "Ein Hund", "prefix": "a", "source": "de", "target": "qlo"})
    assert pivot.status_code == 400


@pytest.mark.parametrize("engine", ["ours", "CTranslate2"])
def test_alternatives_after_a_prefix_differ_in_the_next_word(
    serve: Serve, folders: dict[tuple[str, str], Path], exported: Exported, german: Translator, engine: str
) -> None:
    path = folders["de", "en"] if engine == "ours" else exported("de", "en")
    client = serve(models=[{"path": str(path), "threads": 1}])
    tokenizer = german.target_tokenizer

    def words(prefix: str = "", **more: Any) -> list[tuple[str, ...]]:
        asked = {"text": LINES[0], "prefix": prefix, "alternatives": 3, "scores": True, **DE_EN, **more}
        found = one(client.post("/v1/translate", json=asked))
        said = [found["text"], *found["alternatives"]]
        assert all(text.startswith(prefix) for text in said)
        rest = [tokenizer.pieces(tokenizer.encode([text])[0]) for text in said]
        return [first_word(pieces[len(tokenizer.encode([prefix])[0]) :]) for pieces in rest]

    for asked in ({"prefix": "the dog", "complete": True}, {"prefix": "the dog"}, {"next_words": True}):
        assert len(set(words(**asked))) == 4, asked
    assert all(begins_word(word[0]) for word in words("the dog", complete=True) if word)
    if engine == "ours":
        best = german.translate([LINES[0]], TranslateOptions(4, prefix="the dog", complete=True, next_words=True))[0]
        found = one(client.post("/v1/translate", json={
            "text": LINES[0], "prefix": "the dog", "complete": True, "alternatives": 3, "alignments": True, **DE_EN
        }))  # fmt: skip
        assert [found["text"], *found["alternatives"]] == [hypothesis.text for hypothesis in best.hypotheses]
        assert found["sentences"][0]["links"]
        usual = german.translate([LINES[0]], prefixes=["the dog"], n_best=4)[0]
        plain = one(client.post("/v1/translate", json={
            "text": LINES[0], "prefix": "the dog", "next_words": False, "alternatives": 3, **DE_EN
        }))  # fmt: skip
        assert plain["text"] == usual.text
    two = {"text": "Ein Hund. Ein Haus.", "next_words": True, "alternatives": 1, **DE_EN}
    answer = client.post("/v1/translate", json=two)
    assert (answer.status_code, "one sentence" in answer.json()["error"]["message"]) == (400, True)


def test_languages_are_detected_and_bridged_by_a_third(serve: Serve) -> None:
    said = "Das Haus steht am Fluss, und der Hund schläft vor der Tür."
    asked = {"text": [said, "17"], "target": "qlo", "alignments": True, "scores": True}
    answer = serve().post("/v1/translate", json=asked).json()["translations"]
    assert (answer[0]["source"], answer[0]["detected"]["language"]) == ("de", "de")
    assert not answer[0]["sentences"][0].keys() & {"tokens", "links"}
    assert answer[1]["text"] == "17"


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({}, 400, "`text`"),
        ({"text": []}, 400, "`text`"),
        ({"text": [1]}, 400, "`text`"),
        ({"text": "a" * 300}, 413, "200 characters"),
        ({"text": "a", "target": "xx"}, 400, "xx is not supported"),
        ({"text": "a", "alternatives": 9}, 400, "`alternatives`"),
        ({"text": "a", "alternatives": True}, 400, "`alternatives`"),
        ({"text": "a", "scores": 3}, 400, "`scores`"),
        ({"text": "a", "alignment": True}, 400, "unknown field `alignment`; did you mean `alignments`?"),
        ({"text": "a", "format": "pdf"}, 400, "`format`"),
        ({"text": ["a", "b"], "prefix": "x"}, 400, "`prefix`"),
        ({"text": "a", "prefix": 3}, 400, "`prefix`"),
        ({"text": ["a", "b"], "next_words": True}, 400, "`next_words`"),
        ({"text": "a", "complete": 3}, 400, "`complete`"),
        ({"text": "a", "glossary": "x"}, 400, "`glossary`"),
        ({"text": "a", "glossary": [["a", "b"]]}, 400, "`glossary`"),
        ({"text": "a", "glossary": {"a": 1}}, 400, "`glossary`"),
        ({"text": "a", "glossary": {"a": " "}}, 400, "glossary's term"),
        ({"text": "a", "glossary": [{"source": "a", "target": "b"}, {"source": "a ", "target": "c"}]}, 400, "twice"),
        ({"text": "a", "glossary": {str(n): "x" for n in range(9)}}, 413, "at most 8 terms"),
        ({"text": "a", "protect": "("}, 400, "the pattern '(' cannot be read"),
        ({"text": "a", "protect": [1]}, 400, "`protect`"),
        ({"text": "a", "protect": ["a"] * 51}, 400, "at most 50"),
        ({"text": "a" * 60, "protect": r"(?:a+)+(?=b)c|(a|a)+\1\1z"}, 400, "patterns to protect took more than"),
        ({"text": "a", "glossary": [{"source": "a", "target": "b", "mode": "wet"}]}, 400, "mode"),
    ],
)
def test_what_is_refused(serve: Serve, fields: dict[str, Any], status: int, said: str) -> None:
    client = serve(limits={"characters": 200, "texts": 3, "glossary_terms": 8})
    answer = client.post("/v1/translate", json={**DE_EN, **fields})
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_text_that_matches_patterns_survives(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(protect=[r"\bQX-\d+"])
    for more, wanted in (({}, ["QX-17"]), ({"protect": "Zorb Cloud"}, ["QX-17", "Zorb Cloud"])):
        for form in ("text", "html"):
            said = {"text": "Der Zorb Cloud QX-17 ist da.", "format": form, **DE_EN, **more}
            found = client.post("/v1/translate", json=said).json()["translations"][0]["text"]
            assert all(found.count(text) == 1 for text in wanted)
