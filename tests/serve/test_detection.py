"""Language detection, where py3langid knows all languages of a server, some, or none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.serve.conftest import Serve, write_model
from tests.vocabulary import SENTENCES
from ziggurat.data import babel
from ziggurat.serve.translations import Detector
from ziggurat.translate.translator import load_translator

GERMAN = "Das Haus steht am Fluss, und der Hund schläft vor der Tür."
ENGLISH = "The house is near the river, and the dog sleeps in front of the door."
BABEL = "Ma peno da Sikuna tebel sekun Nanena dinas."


@pytest.fixture(scope="module")
def invented(tmp_path_factory: pytest.TempPathFactory, vocabularies: Path) -> Path:
    """A model like that of `make demo`, with two languages that no detector knows."""
    folder = tmp_path_factory.mktemp("invented") / "model"
    write_model(folder, vocabularies, babel.SOURCE_LANGUAGE, babel.TARGET_LANGUAGE, 4)
    return folder


def test_languages_that_no_detector_knows(serve: Serve, invented: Path) -> None:
    client = serve(models=[{"path": str(invented), "threads": 1}])
    texts = [SENTENCES[0], ENGLISH]
    wanted = [translation.text for translation in load_translator(invented).translate(texts)]
    assert wanted[0] != texts[0]
    found = client.post("/translate", json={"q": texts, "source": "auto", "target": "qhi"}).json()
    assert found["translatedText"] == wanted
    assert found["detectedLanguage"] == 2 * [{"confidence": 0.0, "language": "qlo"}]
    own = client.post("/v1/translate", json={"text": texts[0], "target": "qhi"}).json()["translations"][0]
    assert (own["text"], own["source"]) == (wanted[0], "qlo")
    deepl = client.post("/v2/translate", json={"text": texts[0], "target_lang": "QHI"}).json()["translations"][0]
    assert (deepl["text"], deepl["detected_source_language"]) == (wanted[0], "QLO")
    form = {"source": "auto", "target": "qhi"}
    name = client.post("/v1/documents", files={"file": ("a.txt", texts[0].encode())}, data=form).json()["id"]
    end = time.monotonic() + 30
    while (told := client.get(f"/v1/documents/{name}").json())["status"] != "done":
        assert told["status"] != "failed", told
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (told["source"], client.get(f"/v1/documents/{name}/file").text) == ("qlo", wanted[0])
    assert client.post("/detect", json={"q": texts[0]}).json() == [{"confidence": 0.0, "language": "qlo"}]


@pytest.mark.parametrize(
    ("text", "sources", "target", "expected"),
    [
        (GERMAN, ["de"], "en", "de"),
        (ENGLISH, ["de"], "en", "en"),  # it is already in the target language
        ("17", ["de"], "en", "de"),  # no evidence
        (BABEL, ["qlo"], "en", "qlo"),  # English is the only known language, but this is not English
        (ENGLISH, ["qlo"], "en", "en"),
        (BABEL, ["en"], "qhi", "en"),
        (GERMAN, ["de", "qlo"], "en", "de"),
        (ENGLISH, ["de", "qlo"], "en", "en"),
        (BABEL, ["de", "qlo"], "de", "qlo"),
    ],
)
def test_the_target_is_found_by_evidence_only(text: str, sources: list[str], target: str, expected: str) -> None:
    sources = [code for code in sources if code != target]
    found, share = Detector(sorted({*sources, target})).source(text, sources, target)
    assert found == expected
    assert found != target or share >= 50


def test_one_language_gives_no_certainty() -> None:
    detector = Detector(["en", "qlo"])
    assert detector.rank(ENGLISH)[0] == ("en", pytest.approx(100, abs=5))
    name, share = detector.rank(BABEL)[0]
    assert name == "en"
    assert share < 10
    assert detector.rank(GERMAN, ["en", "qlo"]) == [("en", 0.0), ("qlo", 0.0)]
